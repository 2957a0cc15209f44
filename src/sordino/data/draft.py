"""A first draft of a schema from one example file, for a person to check: ``sordino data schema FOLDER``."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from sordino.data.encode import numbers, read_table, words
from sordino.data.own import client_files, kind_of
from sordino.data.schema import MISSING
from sordino.errors import BadInput

TARGETS = ("target", "label", "class", "outcome", "y")
"""Column names that are taken for the target, in this order of preference; otherwise the last column is."""

MOST_VALUES = 50
"""A text column with more distinct values than this is left out: it may be a name or an identifier."""

MOST_CLASSES = 20
"""A numeric target with more distinct values than this is drafted as regression."""

_HEADER = """\
# Drafted from {file} alone. CHECK EVERY LINE BEFORE USE.
# All ranges and value lists below were READ OFF THE RECORDS OF THIS ONE FILE: they are no public knowledge, they
# may give away single records, and other clients' data may lie outside them. Replace them by what is known without
# looking at any record (physical limits, code books, agreed categories) before this schema is shared.

[data.schema]"""


def draft_schema(path: str | Path) -> str:
    """TOML text for a study's ``[data.schema]``, from the first file of a folder (by name) or from one file.

    It is accepted as a schema as it stands, and fits the file it was drafted from; its comments say what a person must
    do.
    """
    file = client_files(Path(path))[0]
    drafted = _of_arrays(file) if kind_of(file) == "npz" else _of_table(file)
    return "\n".join([_HEADER.format(file=file.name), *drafted]) + "\n"


def _of_arrays(file: Path) -> list[str]:
    """The schema of an NPZ file: labels and the range of the entries."""
    try:
        with np.load(file, allow_pickle=False) as content:
            x, y = np.asarray(content["x"], dtype=np.float64), content["y"]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise BadInput(f"{file} cannot be read as npz with numeric x and y: {error}") from None
    labels = np.unique(y).tolist()
    return [
        f"# x: {len(x)} records of shape {list(x.shape[1:])}",
        *_task(labels, y if np.issubdtype(y.dtype, np.floating) else None),
        f"values = {_range(x[np.isfinite(x)])}  # the range of the entries of x, scaled to 0 … 1",
    ]


def _of_table(file: Path) -> list[str]:
    """The schema of a CSV or Parquet file: every column numeric where all its cells are numbers, else categorical."""
    delimiter = _delimiter(file)
    columns = read_table(file, None, delimiter).columns
    target = next((name for wanted in TARGETS for name in columns if name.lower() == wanted), [*columns][-1])
    task, numeric, categorical, fill = [], [], [], []
    for name, column in columns.items():
        values, absent, wrong = numbers(column, MISSING)
        there = values[~absent]
        if name == target:
            task = _task(_distinct(column), None if wrong.any() else there)
        elif there.size and not wrong.any():
            numeric.append(f"{_toml(name)} = {_range(there)}")
            if absent.any():
                middle = float(np.mean([there.min(), there.max()]))
                fill.append(f"{_toml(name)} = {middle!r}  # stands in for missing cells: choose a public constant")
        else:
            found = _distinct(column)
            told = f"{len(found)} distinct values, perhaps a name or an identifier" if found else "it has no values"
            out = f"# {_toml(name)} is left out: {told}"
            categorical.append(f"{_toml(name)} = {_toml(found)}" if 0 < len(found) <= MOST_VALUES else out)
    lines = [f"target = {_toml(target)}  # a guess: is this what the model should predict?", *task]
    if delimiter != ",":
        lines.append(f"delimiter = {_toml(delimiter)}")
    lines.append('scale = "unit"  # numbers become 0 … 1; "signed" for −1 … 1')
    lines += ["", "[data.schema.numeric]", *numeric, "", "[data.schema.categorical]", *categorical]
    return [*lines, "", "[data.schema.fill]", *fill] if fill else lines


def _task(labels: list[Any], values: Any) -> list[str]:
    """Classification where the target has few values or is no number (``values`` is None), else regression."""
    if values is None or len(labels) <= MOST_CLASSES:
        return ['task = "classification"', f"classes = {_toml(labels)}"]
    return ['task = "regression"', f"range = {_range(values)}"]


def _distinct(column: Any) -> list[str]:
    """The distinct values of a column as text, missing ones left out, sorted."""
    found = pc.unique(words(column)).to_pylist()
    kept = [value for value in found if value is not None and value not in MISSING]
    return sorted(kept, key=lambda value: (not value.lstrip("+-").isdigit(), len(value) * value.isdigit(), value))


def _delimiter(file: Path) -> str:
    """The character that the header of a CSV file has most of."""
    if kind_of(file) == "parquet":
        return ","
    opener = gzip.open if kind_of(file) == "csv.gz" else open
    with opener(file, "rt", encoding="utf-8-sig", errors="replace") as opened:
        return max(",;\t|", key=opened.readline().count)


def _range(values: Any) -> str:
    """[low, high] of the values, widened when they are all alike."""
    low, high = float(np.min(values)), float(np.max(values))
    return _toml([low, high if low < high else low + 1.0])


def _toml(value: str | float | list[Any]) -> str:
    """A text, a number (whole ones without a point) or a list as TOML writes it: as JSON does, but for DEL."""
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))
