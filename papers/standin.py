"""Bundled data in the place of a data set that is not there, so that a quick look needs no download.

Only for quick versions, and every table made this way says so: its numbers show that the method runs, nothing more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sordino import data
from sordino.data import SOURCES, Dataset
from sordino.data.sources import absent_files, data_folder

TESTS = 500
"""At most so many records of a data set's own test set are looked at in a quick version."""

HELD = 297
"""Records of the bundled digits that stand in for a data set's own test records; 1,500 are left."""


def load_or_stand_in(name: str, folder: str | Path | None, options: Mapping[str, Any]) -> tuple[Dataset, str | None]:
    """The data set, or, where its files are absent, bundled data of the same shape and what that is in words."""
    source = SOURCES[name]
    if not absent_files(source, data_folder(folder)):
        return _few_tests(data.load(name, folder=folder, **options)), None
    if source.classes != 10:
        return _cut(data.load("breast-cancer"), options), "the bundled breast-cancer data"
    small = data.load("digits")
    x = _enlarged(small.x, source.shape)
    whole = replace(small, x=x, source={"name": "digits", "enlarged": list(source.shape)})
    words = f"the bundled 8 × 8 digits, enlarged to {source.shape[1]} × {source.shape[2]}"
    if options.get("merge"):
        return _cut(whole, options), words
    split = np.random.default_rng(0).permutation(len(x))
    train, held = split[HELD:], split[:HELD]
    kept = replace(whole, x=x[train], y=small.y[train], valid=small.valid[train], test_x=x[held], test_y=small.y[held])
    return _cut(kept, options), words


def _few_tests(dataset: Dataset) -> Dataset:
    if dataset.test_x is None or dataset.test_y is None:
        return dataset
    return replace(dataset, test_x=dataset.test_x[:TESTS], test_y=dataset.test_y[:TESTS])


def _enlarged(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Every pixel as a square, a black frame around, the same picture in every channel."""
    channels, side, _ = shape
    factor = side // x.shape[-1]
    large = x.repeat(factor, axis=2).repeat(factor, axis=3)
    frame = side - large.shape[-1]
    edges = (frame // 2, frame - frame // 2)
    large = np.pad(large, ((0, 0), (0, 0), edges, edges))
    return np.ascontiguousarray(large.repeat(channels, axis=1), dtype=np.float32)


def _cut(dataset: Dataset, options: Mapping[str, Any]) -> Dataset:
    """As many records as were asked for, if there are so many."""
    wanted = options.get("records")
    if wanted is None or wanted >= len(dataset):
        return dataset
    return dataset.subset(wanted, options.get("records_seed", 0))
