"""The data sets sordino knows by name, and ``load``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sordino.data import declared, images
from sordino.data.columns import Table, read_csv, read_table
from sordino.data.dataset import Dataset
from sordino.data.encode import Arrays, encode_table
from sordino.data.own import load_folder
from sordino.data.schema import parse_schema
from sordino.data.seeds import generator
from sordino.errors import BadInput

CIFAR_TRAIN = tuple(f"data_batch_{k}.bin" for k in range(1, 6))
IDX_FILES = tuple(
    f"{part}-{name}.gz" for part in ("train", "t10k") for name in ("images-idx3-ubyte", "labels-idx1-ubyte")
)


@dataclass(frozen=True)
class Source:
    """One data set by name: what it is, which files it needs, and how it is read.

    ``files`` are relative to ``FOLDER/NAME``; a source without files is always there.
    """

    name: str
    what: str
    records: int
    shape: tuple[int, ...]
    classes: int | None
    read: Callable[..., Dataset]
    files: tuple[str, ...] = ()
    manual: str = ""


def load(name: str | Path, folder: str | Path | None = None, **options: Any) -> Dataset:
    """The data set of that name, or your own data in the folder of that path.

    Parameters
    ----------
    name
        A name from ``SOURCES``, or a path to a folder with one CSV, Parquet or NPZ file per client (then with
        ``schema=``, or a ``schema.toml`` in it, and optionally ``invalid="null"``).
    folder
        Where the standard files are, as ``FOLDER/NAME/…``; by default ``$SORDINO_DATA``, else ``./data``.
    options
        ``records=`` with ``records_seed=`` chooses so many records at random; ``merge=True`` adds a set's own test
        records to the others, leaving no central test set. ``least-squares`` takes ``records``, ``dimension``,
        ``tests`` and ``seed`` of ``least_squares``.
    """
    source = SOURCES.get(str(name))
    merge = options.pop("merge", False)
    if source is not None and source.name == "least-squares":
        dataset = least_squares(**_known(options, ("records", "dimension", "tests", "seed"), source.name))
        return _merged(dataset) if merge else dataset
    records, records_seed = options.pop("records", None), options.pop("records_seed", 0)
    if source is not None:
        _known(options, (), source.name)
        dataset = _read(source, data_folder(folder))
    elif isinstance(name, Path) or os.sep in name or Path(name).exists():
        dataset = load_folder(Path(name), **_known(options, ("schema", "invalid"), "your own data"))
    else:
        raise BadInput(
            f"data set {str(name)!r} is unknown: use one of {', '.join(SOURCES)}, or a path to your own folder"
        )
    if merge:
        dataset = _merged(dataset)
    return dataset if records is None else dataset.subset(records, records_seed)


def data_folder(folder: str | Path | None = None) -> Path:
    """The folder given, else ``$SORDINO_DATA``, else ``./data``."""
    return Path(folder or os.environ.get("SORDINO_DATA") or "data")


def absent_files(source: Source, folder: Path) -> list[str]:
    """The files of a source that are not there; an idx file may be there unpacked."""
    return [
        name
        for name in source.files
        if not (folder / source.name / name).is_file()
        and not (name.endswith(".gz") and (folder / source.name / name[:-3]).is_file())
    ]


def manual_route(source: Source, folder: Path) -> str:
    """How a person obtains the files without this program."""
    return f"put {', '.join(source.files)} from {source.manual} into {folder / source.name}"


def _read(source: Source, folder: Path) -> Dataset:
    """Read a source, or say how to get it."""
    if not source.files:
        return source.read()
    absent = absent_files(source, folder)
    if absent:
        raise BadInput(
            f"{source.name} is not in {folder}: {absent[0]} is missing. Run `sordino data get {source.name}`, "
            f"or {manual_route(source, folder)}; another folder is named by data.folder or SORDINO_DATA"
        )
    return source.read(folder / source.name)


def _known(options: Mapping[str, Any], known: tuple[str, ...], what: str) -> dict[str, Any]:
    for name in sorted(set(options) - set(known)):
        options_here = ", ".join(dict.fromkeys((*known, "records", "records_seed", "merge")))
        raise BadInput(f"{what} has no option {name!r}: its options are {options_here}")
    return dict(options)


def _merged(dataset: Dataset) -> Dataset:
    """Training and test records as one pool."""
    if dataset.test_x is None or dataset.test_y is None:
        raise BadInput(f"{dataset.name} has no test set of its own to merge: leave out merge")
    return replace(
        dataset,
        x=np.concatenate([dataset.x, dataset.test_x]),
        y=np.concatenate([dataset.y, dataset.test_y]),
        valid=np.concatenate([dataset.valid, np.ones(len(dataset.test_x), dtype=bool)]),
        test_x=None,
        test_y=None,
        source={**dataset.source, "merge": True},
    )


def digits() -> Dataset:
    """8 × 8 handwritten digits (scikit-learn's copy of the UCI set): [1797, 1, 8, 8], scaled by the constant 1/16."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = (bunch.images[:, None] / 16.0).astype(np.float32)
    return _classified("digits", 10, (x, bunch.target.astype(np.int64), np.ones(len(x), dtype=bool)))


def breast_cancer() -> Dataset:
    """Wisconsin diagnostic breast cancer (scikit-learn's copy): 30 measurements scaled to [0, 1] by declared ranges."""
    from sklearn.datasets import load_breast_cancer

    bunch = load_breast_cancer()
    columns = {str(name): pa.array(bunch.data[:, k]) for k, name in enumerate(bunch.feature_names)}
    columns["diagnosis"] = pa.array(bunch.target)
    table = Table("breast-cancer", columns, len(bunch.data))
    return _classified("breast-cancer", 2, encode_table(table, parse_schema(declared.BREAST_CANCER)))


def least_squares(records: int = 4000, dimension: int = 100, tests: int = 1000, seed: int = 0) -> Dataset:
    """T1 of AdaptDP-FedAvg: (1/2n)(w − b)ᵀ Z Zᵀ (w − b), as records (z_j, z_jᵀb) of noiseless linear regression.

    Record j's loss for a linear model w without bias is ½(z_jᵀw − z_jᵀb)². Entries of Z and b are N(0, 1); n = 4000.
    The paper gives no dimension: 100 is our reading, from the level its training losses settle at (Table 3).
    """
    for name, value in (("records", records), ("dimension", dimension), ("tests", tests)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadInput(f"least-squares {name} is {value!r}: it must be a whole number ≥ 1")
    random = generator(seed, "least-squares")
    reference = random.standard_normal(dimension)
    z = random.standard_normal((records + tests, dimension))
    x, y = z.astype(np.float32), (z @ reference).astype(np.float32)
    return Dataset(
        name="least-squares",
        x=x[:records],
        y=y[:records],
        task="regression",
        classes=None,
        valid=np.ones(records, dtype=bool),
        test_x=x[records:],
        test_y=y[records:],
        source={"records": records, "dimension": dimension, "tests": tests, "seed": seed},
    )


def _mnist_like(name: str) -> Callable[[Path], Dataset]:
    def read(folder: Path) -> Dataset:
        x, y = images.read_mnist(folder, "train")
        return _classified(name, 10, (x, y, np.ones(len(x), dtype=bool)), images.read_mnist(folder, "t10k"))

    return read


def _cifar10(folder: Path) -> Dataset:
    place = folder / "cifar-10-batches-bin"
    x, y = images.read_cifar(place, CIFAR_TRAIN)
    return _classified(
        "cifar10", 10, (x, y, np.ones(len(x), dtype=bool)), images.read_cifar(place, ("test_batch.bin",))
    )


def _bank_marketing(folder: Path) -> Dataset:
    schema = parse_schema(declared.BANK_MARKETING)
    table = read_table(folder / "bank-full.csv", schema.columns, schema.delimiter)
    return _classified("bank-marketing", 2, encode_table(table, schema))


def _adult(folder: Path) -> Dataset:
    schema = parse_schema(declared.ADULT)

    def part(name: str, skip: int) -> Arrays:
        table = read_csv(folder / name, schema.columns, ",", declared.ADULT_COLUMNS, skip)
        # The test file writes its labels with a full stop.
        income = pc.utf8_rtrim(table.columns["income"], ".")
        return encode_table(replace(table, columns={**table.columns, "income": income}), schema)

    return _classified("adult", 2, part("adult.data", 0), part("adult.test", 1)[:2])


def _classified(name: str, classes: int, arrays: Arrays, test: tuple[Any, Any] | None = None) -> Dataset:
    x, y, valid = arrays
    held_x, held_y = test if test is not None else (None, None)
    for labels in (y,) if held_y is None else (y, held_y):
        if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
            raise BadInput(
                f"{name} has a label {labels.max()}, but {classes} classes: its files are damaged, get it again"
            )
    return Dataset(name, x, y, "classification", classes, valid, held_x, held_y)


_UCI = "https://archive.ics.uci.edu/dataset"
SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        Source("digits", "handwritten digits, 8 × 8, bundled", 1797, (1, 8, 8), 10, digits),
        Source("breast-cancer", "Wisconsin diagnostic, 30 measurements, bundled", 569, (30,), 2, breast_cancer),
        Source("least-squares", "artificial, AdaptDP's T1, generated", 4000, (100,), None, least_squares),
        Source(
            "mnist", "handwritten digits, 28 × 28", 60_000, (1, 28, 28), 10, _mnist_like("mnist"), IDX_FILES,
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
        ),
        Source(
            "fashion-mnist", "clothes, 28 × 28", 60_000, (1, 28, 28), 10, _mnist_like("fashion-mnist"), IDX_FILES,
            "https://github.com/zalandoresearch/fashion-mnist",
        ),
        Source(
            "cifar10", "colour photographs, 32 × 32", 50_000, (3, 32, 32), 10, _cifar10,
            tuple(f"cifar-10-batches-bin/{name}" for name in (*CIFAR_TRAIN, "test_batch.bin")),
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        ),
        Source(
            "bank-marketing", "phone marketing of a Portuguese bank", 45_211,
            (len(parse_schema(declared.BANK_MARKETING).features),), 2, _bank_marketing, ("bank-full.csv",),
            f"{_UCI}/222/bank+marketing",
        ),
        Source(
            "adult", "income in the 1994 US census", 32_561, (len(parse_schema(declared.ADULT).features),), 2, _adult,
            ("adult.data", "adult.test"), f"{_UCI}/2/adult",
        ),
    )
}  # fmt: skip
