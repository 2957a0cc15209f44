"""The data sets sordino knows by name (``standard.toml`` describes them), and ``load``."""

from __future__ import annotations

import gzip
import os
import struct
import tomllib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sordino.data.dataset import Dataset, client_names
from sordino.data.encode import encode_table
from sordino.data.federation import Features
from sordino.data.own import load_folder
from sordino.data.partitions import generator
from sordino.data.read import RawTable, read_csv
from sordino.data.schema import parse_schema
from sordino.data.school import read_school
from sordino.data.sites import read_sited, site_names
from sordino.errors import BadInput

Labelled = tuple[Features, npt.NDArray[Any]]
"""Features and labels of records."""

# Byte k becomes k/255. A table is several times faster here than converting and multiplying.
_SCALED = (np.arange(256) / 255).astype(np.float32)


@dataclass(frozen=True)
class DataSource:
    """One data set by name: what it is, which files it needs, and how its columns are encoded where it is a table.

    ``files`` are relative to ``FOLDER/NAME``, each with its md5 sum; a source without files is always there.
    ``columns`` are the names of the columns where the files do not say them; ``clients`` is how many clients the
    records come with, ``sites`` the column of a table that says whose a record is, and ``scale`` the public constants
    that a set's own reader turns the file's numbers into targets with.
    """

    name: str
    what: str
    records: int
    shape: tuple[int, ...]
    classes: int | None = None
    manual: str = ""
    files: dict[str, str] = field(default_factory=dict)
    columns: Sequence[str] = ()
    schema: dict[str, Any] = field(default_factory=dict)
    clients: int | None = None
    sites: dict[str, Any] = field(default_factory=dict)
    scale: dict[str, Any] = field(default_factory=dict)

    @property
    def client_names(self) -> tuple[str, ...] | None:
        """The names of the clients that the records come with."""
        if self.sites:
            return site_names(self.sites)
        return None if self.clients is None else tuple(client_names(self.clients))


_DESCRIBED = tomllib.loads(resources.files("sordino.data").joinpath("standard.toml").read_text(encoding="utf-8"))
SOURCES = {name: DataSource(name, **{**what, "shape": tuple(what["shape"])}) for name, what in _DESCRIBED.items()}


def load(name: str | Path, folder: str | Path | None = None, **options: Any) -> Dataset:
    """The data set of that name, or your own data in the folder of that path.

    Parameters
    ----------
    name
        A name from ``SOURCES``, or a path to a folder with one CSV, Excel, Parquet or NPZ file per client (then with
        ``schema=``, or a ``schema.toml`` in it, and optionally ``invalid="null"`` and ``also=``).
    folder
        Where the standard files are, as ``FOLDER/NAME/…``; by default ``$SORDINO_DATA``, else ``./data``.
    options
        ``records=`` with ``records_seed=`` chooses so many records at random; ``merge=True`` adds a set's own test
        records to the others, leaving no central test set; ``units=False`` makes every record a unit of its own where
        people come with several (``insteval``), so that promises are made for a record. ``least-squares`` takes
        ``records``, ``dimension``, ``tests`` and ``seed`` of ``least_squares``.
    """
    if not isinstance(name, (str, Path)):
        raise BadInput(f"data set {name!r}: give a name, one of {', '.join(SOURCES)}, or a path to your own folder")
    source = SOURCES.get(str(name))
    merge = options.pop("merge", False)
    records, records_seed = None, 0
    if source is not None and source.name == "least-squares":
        dataset = least_squares(**_known(options, ("records", "dimension", "tests", "seed"), source.name))
    else:
        records, records_seed = options.pop("records", None), options.pop("records_seed", 0)
        if source is not None:
            people = ("units",) if "unit" in source.schema else ()
            dataset = _read(source, data_folder(folder), **_known(options, people, source.name))
        elif isinstance(name, Path) or os.sep in name or Path(name).exists():
            dataset = load_folder(Path(name), **_known(options, ("schema", "invalid", "also"), "your own data"))
        else:
            known = ", ".join(SOURCES)
            raise BadInput(f"data set {str(name)!r} is unknown: use one of {known}, or a path to your own folder")
    if merge:
        if dataset.test_x is None or dataset.test_y is None:
            raise BadInput(f"{dataset.name} has no test set of its own to merge: leave out merge")
        x, y = np.concatenate([dataset.x, dataset.test_x]), np.concatenate([dataset.y, dataset.test_y])
        valid = np.concatenate([dataset.valid, np.ones(len(dataset.test_x), dtype=bool)])
        made = {**dataset.source, "merge": True}
        dataset = replace(dataset, x=x, y=y, valid=valid, test_x=None, test_y=None, source=made)
    return dataset if records is None else dataset.subset(records, records_seed)


def data_folder(folder: str | Path | None = None) -> Path:
    """The folder given, else ``$SORDINO_DATA``, else ``./data``."""
    return Path(folder or os.environ.get("SORDINO_DATA") or "data")


def absent_files(source: DataSource, folder: Path) -> list[str]:
    """The files of a source that are not there; a gzipped file may be there unpacked."""
    place = folder / source.name
    return [
        name for name in source.files if not any((place / one).is_file() for one in (name, name.removesuffix(".gz")))
    ]


def manual_route(source: DataSource, folder: Path) -> str:
    """How a person obtains the files without this program."""
    return f"put {', '.join(source.files)} from {source.manual} into {folder / source.name}"


def _known(options: Mapping[str, Any], known: tuple[str, ...], what: str) -> dict[str, Any]:
    for name in sorted(set(options) - set(known)):
        options_here = ", ".join(dict.fromkeys((*known, "records", "records_seed", "merge")))
        raise BadInput(f"{what} has no option {name!r}: its options are {options_here}")
    return dict(options)


def _read(source: DataSource, folder: Path, units: bool = True) -> Dataset:
    """Read a source, or say how to get it; without ``units`` every record is a unit of its own."""
    if not isinstance(units, bool):
        raise BadInput(f"{source.name} units is {units!r}: it is true (people as units) or false (records)")
    absent = absent_files(source, folder)
    if absent:
        fetched = "" if source.name == "school" else f"run `sordino data get {source.name}`, or "
        raise BadInput(
            f"{source.name} is not in {folder}: {absent[0]} is missing; {fetched}{manual_route(source, folder)}; "
            "another folder is named by data.folder or SORDINO_DATA"
        )
    if source.name == "school":
        ((file, checksum),) = source.files.items()
        return read_school(folder / source.name / file, checksum, source.scale)
    if source.sites:
        (file,) = source.files
        schema = {key: value for key, value in source.schema.items() if units or not key.startswith("unit")}
        dataset = read_sited(folder / source.name / file, schema, source.sites, source.scale.get("high"))
        return dataset if units else replace(dataset, source={"units": False})
    pairs = _READERS[source.name](source, folder / source.name)
    for _, labels in pairs:
        if len(labels) and not 0 <= labels.min() <= labels.max() < (source.classes or 0):
            raise BadInput(
                f"{source.name} has a label {labels.max()}, but {source.classes} classes: its files are damaged, get "
                "it again"
            )
    (x, y), (test_x, test_y) = pairs[0], pairs[1] if len(pairs) > 1 else (None, None)
    ranged = parse_schema(source.schema).ranged if source.schema else None
    valid = np.ones(len(x), dtype=bool)
    return Dataset(
        source.name, x, y, "classification", source.classes, valid, test_x, test_y,
        ranged=ranged, schema=source.schema or None,
    )  # fmt: skip


def least_squares(records: int = 4000, dimension: int = 100, tests: int = 1000, seed: int = 0) -> Dataset:
    """T1 of AdaptDP-FedAvg: (1/2n)(w − b)ᵀ Z Zᵀ (w − b), as records (z_j, z_jᵀb) of noiseless linear regression.

    Record j's loss for a linear model w without bias is ½(z_jᵀw − z_jᵀb)². Entries of Z and b are N(0, 1); n = 4000.
    The paper gives no dimension: 100 is our reading, from the level its training losses settle at (Table 3).
    """
    source = {"records": records, "dimension": dimension, "tests": tests, "seed": seed}
    for name, value in source.items():
        if name != "seed" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise BadInput(f"least-squares {name} is {value!r}: it must be a whole number ≥ 1")
    random = generator(seed, "least-squares")
    reference = random.standard_normal(dimension)
    z = random.standard_normal((records + tests, dimension))
    x, y = z.astype(np.float32), (z @ reference).astype(np.float32)
    valid, own, held = np.ones(records, dtype=bool), slice(records), slice(records, None)
    return Dataset("least-squares", x[own], y[own], "regression", None, valid, x[held], y[held], source=source)


def _digits(source: DataSource, folder: Path) -> list[Labelled]:
    """8 × 8 handwritten digits (scikit-learn's copy of the UCI set): [1797, 1, 8, 8], scaled by the constant 1/16."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return [((bunch.images[:, None] / 16.0).astype(np.float32), bunch.target.astype(np.int64))]


def _breast_cancer(source: DataSource, folder: Path) -> list[Labelled]:
    """Wisconsin diagnostic breast cancer (scikit-learn's copy): 30 measurements scaled to [0, 1] by declared ranges."""
    from sklearn.datasets import load_breast_cancer

    bunch = load_breast_cancer()
    columns = {str(name): pa.array(bunch.data[:, k]) for k, name in enumerate(bunch.feature_names)}
    columns["diagnosis"] = pa.array(bunch.target)
    table = RawTable("breast-cancer", columns, len(bunch.data))
    return [encode_table(table, parse_schema(source.schema))[:2]]


def _csv_files(source: DataSource, folder: Path) -> list[Labelled]:
    """A table in CSV files: the training records and, where there is a second file, the test records."""
    schema = parse_schema(source.schema)
    pairs = []
    for name in source.files:
        skipped = 1 if name == "adult.test" else 0  # its first line is a remark
        table = read_csv(folder / name, schema.columns, schema.delimiter or ",", source.columns or None, skipped)
        target = pc.utf8_rtrim(table.columns[schema.target], ".")  # adult.test writes its labels with a full stop
        pairs.append(encode_table(replace(table, columns={**table.columns, schema.target: target}), schema)[:2])
    return pairs


def _mnist(source: DataSource, folder: Path) -> list[Labelled]:
    """MNIST and its kin: images [N, 1, 28, 28] scaled by the public constant 1/255."""
    pairs: list[Labelled] = []
    for part in ("train", "t10k"):
        images, labels = (
            _read_idx(folder / f"{part}-{name}.gz") for name in ("images-idx3-ubyte", "labels-idx1-ubyte")
        )
        if images.ndim != 3 or labels.shape != images.shape[:1]:
            raise BadInput(f"{folder}: {part} images {images.shape} and labels {labels.shape} do not belong together")
        pairs.append((_SCALED[images[:, None]], labels.astype(np.int64)))
    return pairs


def _read_idx(packed: Path) -> npt.NDArray[np.uint8]:
    """The array in a gzipped idx file of unsigned bytes, or in the same file unpacked."""
    path = packed if packed.is_file() else packed.with_suffix("")
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{path} cannot be read: {error}; it is damaged or not gzipped, get it again") from None
    if len(data) < 4 or data[:3] != b"\x00\x00\x08":
        raise BadInput(f"{path} is no idx file of unsigned bytes: get it again")
    axes = data[3]
    start = 4 + 4 * axes
    shape = struct.unpack(f">{axes}I", data[4:start]) if len(data) >= start else (-1,)
    if len(data) - start != np.prod(shape, dtype=np.int64):
        raise BadInput(
            f"{path} should hold {' × '.join(map(str, shape))} bytes but has {len(data) - start}: get it again"
        )
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)


def _cifar10(source: DataSource, folder: Path) -> list[Labelled]:
    """CIFAR-10's binary batches: images [N, 3, 32, 32] scaled by the public constant 1/255.

    A record is one label byte and 3 × 1024 bytes: red, green, blue, each row by row.
    """
    length = 1 + int(np.prod(source.shape))
    raws = []
    for path in (folder / name for name in source.files):
        try:
            raw: npt.NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise BadInput(f"{path} cannot be read: {error}; get it again") from None
        if len(raw) % length:
            raise BadInput(f"{path} has {len(raw)} bytes, not a multiple of {length}: get it again")
        raws.append(raw.reshape(-1, length))
    pairs: list[Labelled] = []
    for batches in (raws[:-1], raws[-1:]):  # the last file holds the test records
        records = np.concatenate(batches)
        pairs.append((_SCALED[records[:, 1:]].reshape(-1, *source.shape), records[:, 0].astype(np.int64)))
    return pairs


_READERS: dict[str, Callable[[DataSource, Path], list[Labelled]]] = {
    "digits": _digits,
    "breast-cancer": _breast_cancer,
    "mnist": _mnist,
    "fashion-mnist": _mnist,
    "cifar10": _cifar10,
    "bank-marketing": _csv_files,
    "adult": _csv_files,
}
