"""Records without targets, for a finished model: from a file, a data frame, a table, a dict of columns or an array.

They are encoded by the schema that the model was trained with, each on its own, as its training records were (rule R8).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sordino.data.encode import (
    Faults,
    array_features,
    fault_in_words,
    numbers,
    table_features,
)
from sordino.data.federation import Features
from sordino.data.own import SUFFIXES, kind_of, read_npz
from sordino.data.read import RawTable, delimiter_of, read_table
from sordino.data.schema import Schema
from sordino.errors import BadInput

_HERE = "the records"
"""What records that come from no file are called in messages."""


@dataclass(frozen=True)
class Unlabelled:
    """Features of records, one row for each, and by row why it has none (None: it has)."""

    x: Features
    reasons: tuple[str | None, ...]
    ids: tuple[str, ...] | None = None
    """What a column of the caller's choice says of every row."""


def read_unlabelled(frame: Any, schema: Schema, shape: Sequence[int], id_column: str | None = None) -> Unlabelled:
    """Encode records for a model that takes records of this shape; targets are not read, and need not be there.

    Parameters
    ----------
    frame: the path of a CSV, Parquet or NPZ file, a pandas or polars data frame, a pyarrow table, a dict of columns, or
        an array. An array's columns are the schema's, numeric ones first, then categorical and text, where it declares
        columns; where it declares none, its rows have ``shape``.
    id_column: a column to carry along, such as a patient's number; it is not encoded.

    Guarantees
    ----------
    There are as many rows as there are records, in their order; row j depends on record j and the schema alone.
    """
    found = _opened(frame, schema)
    if not isinstance(found, RawTable):
        if id_column is not None:
            raise BadInput(f"there is no column {id_column!r} to tell rows by: an array has none")
        found = _named(found, schema)
    if not isinstance(found, RawTable):
        x, faults = array_features(_HERE, _shaped(found, shape), schema)
        return Unlabelled(*_whole(x, faults, {}))
    ids = None if id_column is None else _ids(found, id_column)
    if schema.features:
        for name in schema.encoded:
            if name not in found.columns:
                raise BadInput(
                    f"{found.where} has no column {name!r}, which the model was trained with: it has "
                    f"{', '.join(found.columns)}"
                )
        x, faults = table_features(found, schema)
    else:
        x, faults = array_features(found.where, _in_order(found, shape, id_column), schema)
    return Unlabelled(*_whole(x, faults, found.broken), ids)


def _opened(frame: Any, schema: Schema) -> RawTable | Any:
    """The columns of whatever has columns; of anything else the array."""
    if isinstance(frame, str | os.PathLike):
        return _from_file(Path(frame), schema)
    if not isinstance(frame, pa.Table | Mapping | np.ndarray) and not hasattr(frame, "columns"):
        if hasattr(frame, "__arrow_c_stream__"):
            frame = pa.table(frame)
        else:
            return frame
    if isinstance(frame, np.ndarray):
        if frame.dtype.names is None:
            return frame
        frame = {name: frame[name] for name in frame.dtype.names}
    names = frame.column_names if isinstance(frame, pa.Table) else list(getattr(frame, "columns", frame))
    columns = {str(name): _column(frame[name], str(name)) for name in names}
    sizes = {len(column) for column in columns.values()}
    if len(sizes) > 1 or len(columns) < len(names):
        raise BadInput(f"{_HERE} have columns of different lengths, or two of one name: give every record every column")
    return RawTable(_HERE, columns, next(iter(sizes), 0))


def _from_file(path: Path, schema: Schema) -> RawTable | Any:
    kind = kind_of(path)
    if kind is None or not path.is_file():
        raise BadInput(f"{path} is no file that can be read: give one whose name ends in {', '.join(SUFFIXES)}")
    if kind != "npz":
        delimiter = schema.delimiter or delimiter_of(path)
        table = read_table(path, None, delimiter, schema.names)
        if not schema.names or len(table.broken) < table.rows:
            return table
        # No header says which columns are there: lines that are a cell short lack the target.
        short = read_table(path, None, delimiter, [name for name in schema.names if name != schema.target])
        return short if len(short.broken) < short.rows else table
    arrays = read_npz(path)
    if "x" not in arrays:
        raise BadInput(f"{path} holds {', '.join(arrays) or 'nothing'}: an NPZ file needs an array x")
    return arrays["x"]


def _column(values: Any, name: str) -> Any:
    """One column with the type it has; as text where its cells are of several types."""
    if isinstance(values, pa.ChunkedArray):
        return values.combine_chunks()
    if isinstance(values, pa.Array):
        return values
    if isinstance(values, str) or not hasattr(values, "__len__"):
        raise BadInput(f"column {name!r} is {values!r:.60}: it needs one cell per record, in a list or an array")
    try:
        return pa.array(values, from_pandas=True)
    except (pa.ArrowException, TypeError, ValueError):
        return pa.array([_text(value) for value in values], pa.string())


def _text(value: Any) -> str | None:
    try:
        return None if value is None or value != value else str(value)  # NaN is not equal to itself
    except TypeError:  # pandas' NA will not say whether it is
        return None


def _named(array: Any, schema: Schema) -> RawTable | Any:
    """An array's columns under the schema's names, where it has names; of one column, a list of cells will do."""
    names = schema.encoded
    if not names:
        return array
    cells = np.asarray(array)
    cells = cells[:, None] if cells.ndim == len(names) == 1 else cells
    if cells.ndim != 2 or cells.shape[1] != len(names):
        raise BadInput(
            f"an array of shape {cells.shape} does not hold the schema's columns, {len(names)} of them: "
            f"{', '.join(names)}; give them in this order, as they were before they were encoded"
        )
    return RawTable(_HERE, {name: _column(cells[:, k].tolist(), name) for k, name in enumerate(names)}, len(cells))


def _shaped(array: Any, shape: Sequence[int]) -> Any:
    """The array, when its rows are records of this shape."""
    try:
        found = np.asarray(array).shape
    except ValueError:
        found = ()
    if found[1:] != tuple(shape) or not found:
        raise BadInput(f"an array of shape {found} has no records of the model's shape: it takes {('n', *shape)}")
    return array


def _in_order(table: RawTable, shape: Sequence[int], id_column: str | None) -> Any:
    """The columns of a table side by side, for a model that was trained on rows of numbers without names."""
    columns = [column for name, column in table.columns.items() if name != id_column]
    if len(shape) != 1 or len(columns) != shape[0]:
        raise BadInput(
            f"{table.where} has {len(columns)} columns, and the model was trained on arrays of shape "
            f"{('n', *shape)} without names: give such an array (of a file: NPZ, as x)"
        )
    found = []
    for column in columns:
        values, absent, wrong = numbers(column, ("",))
        found.append(np.where(absent | wrong, np.nan, values))
    return np.stack(found, axis=1)


def _ids(table: RawTable, column: str) -> tuple[str, ...]:
    if column not in table.columns:
        raise BadInput(f"{table.where} has no column {column!r} to tell rows by: it has {', '.join(table.columns)}")
    return tuple("" if cell is None else str(cell) for cell in table.columns[column].to_pylist())


def _whole(x: Features, faults: Faults, broken: Mapping[int, str]) -> tuple[Features, tuple[str | None, ...]]:
    """The features, those of rows at fault zeroed in a copy, and what is wrong with these."""
    reasons: list[str | None] = [None] * len(x)
    for wrong, what, why, cells in reversed(faults):  # the first of several is told
        for row in np.flatnonzero(wrong).tolist():
            reasons[row] = fault_in_words(row, what, why, cells)
    for number, why in broken.items():
        reasons[number - 1] = why
    bad = np.array([one is not None for one in reasons], dtype=bool)
    return np.where(bad.reshape(-1, *[1] * (x.ndim - 1)), x.dtype.type(0), x), tuple(reasons)
