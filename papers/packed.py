"""A data set as one NPZ file of ready arrays, for machines that cannot read its original files (no pyarrow).

``pack("bank-marketing", "data", "carried")`` writes carried/bank-marketing.npz; a reproduction with ``data="carried"``
then uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sordino import data
from sordino.data import SOURCES, Dataset
from sordino.data.sources import data_folder

_ARRAYS = ("x", "y", "valid", "test_x", "test_y")


def pack(name: str, folder: str | Path | None, out: str | Path) -> Path:
    """Write a standard data set as arrays; returns the file."""
    read = data.load(name, folder=folder)
    arrays = {key: getattr(read, key) for key in _ARRAYS if getattr(read, key) is not None}
    where = Path(out) / f"{name}.npz"
    where.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(where, **arrays)
    return where


def load(name: str, folder: str | Path | None, options: Mapping[str, Any]) -> Dataset:
    """A data set from its packed file where there is one, else as ``sd.data.load`` reads it."""
    where = data_folder(folder) / f"{name}.npz"
    if not where.exists() or set(options) - {"records"}:
        return data.load(name, folder=folder, **options)
    with np.load(where) as file:
        arrays = {key: file[key] for key in _ARRAYS if key in file}
    source = SOURCES[name]
    task = "regression" if source.classes is None else "classification"
    read = Dataset(name=name, task=task, classes=source.classes, source={"name": name}, **arrays)
    return read if options.get("records") is None else read.subset(options["records"])
