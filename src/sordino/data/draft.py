"""A first draft of a schema from one example file, for a person to check: ``sordino data schema FOLDER``."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet

from sordino.data.columns import Table, csv_header, numbers, read_table, words
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
    lines = [_HEADER.format(file=file.name)]
    lines += _for_arrays(file) if kind_of(file) == "npz" else _for_table(file)
    return "\n".join(lines) + "\n"


def _for_arrays(file: Path) -> list[str]:
    """The schema of an NPZ file: labels and the range of the entries."""
    try:
        with np.load(file, allow_pickle=False) as content:
            x, y = np.asarray(content["x"], dtype=np.float64), content["y"]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise BadInput(f"{file} cannot be read as npz with numeric x and y: {error}") from None
    lines = [f"# x: {len(x)} records of shape {list(x.shape[1:])}"]
    distinct = np.unique(y)
    if np.issubdtype(distinct.dtype, np.floating) and len(distinct) > MOST_CLASSES:
        lines += ['task = "regression"', f"range = {_range(y.astype(np.float64))}"]
    else:
        lines += ['task = "classification"', f"classes = {_list(distinct.tolist())}"]
    return [*lines, f"values = {_range(x[np.isfinite(x)])}  # the range of the entries of x, scaled to 0 … 1"]


def _for_table(file: Path) -> list[str]:
    """The schema of a CSV or Parquet file."""
    delimiter = _delimiter(file)
    names = csv_header(file, delimiter) if kind_of(file) != "parquet" else pyarrow.parquet.read_schema(file).names
    table = read_table(file, names, delimiter)
    target = next((name for wanted in TARGETS for name in names if name.lower() == wanted), names[-1])
    lines = [f"target = {_text(target)}  # a guess: is this what the model should predict?", *_target(table, target)]
    if delimiter != ",":
        lines.append(f"delimiter = {_text(delimiter)}")
    lines.append('scale = "unit"  # numbers become 0 … 1; "signed" for −1 … 1')
    numeric, categorical, fill = [], [], []
    for name in names:
        if name == target:
            continue
        values, absent, wrong = numbers(table.columns[name], MISSING)
        if not wrong.any() and not absent.all():
            numeric.append(f"{_text(name)} = {_range(values[~absent])}")
            if absent.any():
                middle = float(np.mean([values[~absent].min(), values[~absent].max()]))
                fill.append(f"{_text(name)} = {middle!r}  # stands in for missing cells: choose a public constant")
        else:
            categorical.append(_categories(table, name))
    lines += ["", "[data.schema.numeric]", *numeric, "", "[data.schema.categorical]", *categorical]
    return [*lines, "", "[data.schema.fill]", *fill] if fill else lines


def _target(table: Table, target: str) -> list[str]:
    """Classification when the target is text or has few values, else regression."""
    values, absent, wrong = numbers(table.columns[target], MISSING)
    labels = _distinct(table, target)
    if wrong.any() or len(labels) <= MOST_CLASSES:
        return ['task = "classification"', f"classes = {_list(labels)}"]
    return ['task = "regression"', f"range = {_range(values[~absent])}"]


def _categories(table: Table, name: str) -> str:
    """One categorical column, or a comment when it has too many values to be one."""
    values = _distinct(table, name)
    if len(values) > MOST_VALUES:
        return f"# {_text(name)} is left out: {len(values)} distinct values, perhaps a name or an identifier"
    if not values:
        return f"# {_text(name)} is left out: it has no values"
    return f"{_text(name)} = {_list(values)}"


def _distinct(table: Table, name: str) -> list[str]:
    """The distinct values of a column as text, missing ones left out, sorted."""
    found = pc.unique(words(table.columns[name])).to_pylist()
    kept = [value for value in found if value is not None and value not in MISSING]
    return sorted(kept, key=lambda value: (not value.lstrip("+-").isdigit(), len(value) * value.isdigit(), value))


def _delimiter(file: Path) -> str:
    """The character that the header of a CSV file has most of."""
    if kind_of(file) == "parquet":
        return ","
    opener = gzip.open if kind_of(file) == "csv.gz" else open
    with opener(file, "rt", encoding="utf-8-sig") as opened:
        first = opened.readline()
    return max(",;\t|", key=first.count)


def _range(values: Any) -> str:
    """[low, high] of the values, widened when they are all alike."""
    low, high = float(np.min(values)), float(np.max(values))
    if low == high:
        high = low + 1.0
    return f"[{_number(low)}, {_number(high)}]"


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


def _list(values: list[Any]) -> str:
    return "[" + ", ".join(_text(v) if isinstance(v, str) else _number(float(v)) for v in values) + "]"


def _text(value: str) -> str:
    """A TOML basic string: JSON's escapes are TOML's, but for DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
