"""Records to arrays, by a schema. Each record on its own; what cannot be encoded is refused or becomes a null row."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sordino.data.columns import EMPTY, Table, absent_words, numbers, positions, word
from sordino.data.federation import Features, Targets
from sordino.data.schema import Interval, Schema
from sordino.errors import BadInput

log = logging.getLogger("sordino.data")

MOST = 0.5
"""A range, or a list of values, that more than this share of a column lies outside of is worth a warning."""

_OR_NULL = "or keep such records as null rows with data.invalid = 'null'"

Arrays = tuple[Features, Targets, npt.NDArray[np.bool_]]


def check_invalid(invalid: str) -> None:
    """Refuse a word that says neither to refuse invalid records nor to keep them as null rows."""
    if invalid not in ("refuse", "null"):
        raise BadInput(f"data.invalid is {invalid!r}: use 'refuse' (an error) or 'null' (rows that contribute zero)")


class Faults:
    """Rows of one file that cannot be encoded, and the first reason in each column."""

    def __init__(self, where: str, rows: int, invalid: str) -> None:
        self.where, self.invalid = where, invalid
        self.bad = np.zeros(rows, dtype=bool)
        self.reasons: list[tuple[int, str]] = []

    def note(self, wrong: npt.NDArray[np.bool_], column: str, why: str, cells: Any = None) -> None:
        """Remember the rows where ``wrong`` holds; ``cells`` lets the message quote the first of them."""
        if wrong.any():
            row = int(wrong.argmax())
            quoted = "" if cells is None else f"{cells[row]!s} "
            self.reasons.append((row, f"{column}: {quoted}{why}"))
            self.bad |= wrong

    def settle(self) -> npt.NDArray[np.bool_]:
        """Which rows are valid; an error that names the first that is not, unless null rows are asked for."""
        if self.reasons and self.invalid == "refuse":
            row, why = min(self.reasons, key=lambda reason: reason[0])
            count = int(self.bad.sum())
            more = f" ({count} such records in this file)" if count > 1 else ""
            raise BadInput(f"{self.where}, row {row + 1}, {why}{more}: correct the data or the schema, {_OR_NULL}")
        return ~self.bad


def encode_table(table: Table, schema: Schema, invalid: str = "refuse") -> Arrays:
    """The features, targets and validity of a file's records.

    Guarantees
    ----------
    Row j of the result depends on row j of the table and on the schema alone, and there are as many rows as the file
    has records, valid or not.
    """
    if not schema.features:
        raise BadInput("data.schema declares no columns: CSV and Parquet files need numeric or categorical columns")
    if invalid == "refuse":
        table = _without_empty_end(table)
    if table.broken and invalid == "refuse":
        row, why = min(table.broken.items())
        raise BadInput(f"{table.where}, row {row}: {why}: correct it, {_OR_NULL}")
    faults = Faults(table.where, table.rows, invalid)
    x = np.zeros((table.rows, len(schema.features)), dtype=np.float32)
    for k, (name, interval) in enumerate(schema.numeric.items()):
        values, absent, wrong = numbers(table.columns[name], schema.missing)
        if name in schema.fill:
            values = np.where(absent, float(schema.fill[name]), values)
        else:
            faults.note(absent, f"column {name!r}", "is missing and the schema has no fill for it")
        faults.note(wrong, f"column {name!r}", "is not a number", table.columns[name])
        usable = np.where(np.isfinite(values), values, interval.low)
        tell_clipped(table.where, name, interval, values)
        x[:, k] = interval.scaled(usable, schema.scale)
    at = len(schema.numeric)
    for name, declared in schema.categorical.items():
        place = positions(table.columns[name], declared)
        _tell_other(table, schema, name, place < 0)
        place[place < 0] = len(declared)
        if name in schema.fill:
            place[absent_words(table.columns[name], schema.missing)] = declared.index(word(schema.fill[name]))
        x[np.arange(table.rows), at + place] = 1.0
        at += len(declared) + 1
    y = _targets(table, schema, faults)
    valid = faults.settle()
    x[~valid], y[~valid] = 0, 0
    return x, y, valid


def _without_empty_end(table: Table) -> Table:
    """The table without the empty lines that editors leave at the end of a file; null rows where those are wanted."""
    rows = table.rows
    while table.broken.get(rows) == EMPTY:
        rows -= 1
    columns = {name: column[:rows] for name, column in table.columns.items()}
    return replace(table, columns=columns, rows=rows, broken={k: why for k, why in table.broken.items() if k <= rows})


def _targets(table: Table, schema: Schema, faults: Faults) -> Targets:
    """Class numbers, or scaled numbers."""
    column, place = table.columns[schema.target], f"column {schema.target!r}"
    if schema.classes is not None:
        labels = positions(column, schema.classes)
        faults.note(labels < 0, place, "is none of the declared classes", column)
        return labels
    values, absent, wrong = numbers(column, schema.missing)
    faults.note(absent | wrong, place, "is not a number", column)
    usable = np.where(np.isfinite(values), values, 0.0)
    if schema.interval is not None:
        tell_clipped(table.where, schema.target, schema.interval, values, "range")
    return _scaled_target(usable, schema)


def tell_clipped(where: str, column: str, interval: Interval, values: npt.NDArray[Any], key: str = "") -> None:
    """Log a declared range that clips most of a column: nothing of it is left to learn from. Said on this machine."""
    there = np.asarray(values)[np.isfinite(values)]
    outside = float(np.mean((there < interval.low) | (there > interval.high))) if there.size else 0.0
    if outside > MOST:
        log.warning(
            "%s, column %r: data.schema.%s = [%g, %g] clips %.0f %% of the values: check the range and its unit",
            where, column, key or f"numeric.{column}", interval.low, interval.high, 100 * outside,
        )  # fmt: skip


def _tell_other(table: Table, schema: Schema, column: str, other: npt.NDArray[np.bool_]) -> None:
    """Log declared values that most cells of a column are none of."""
    there = ~absent_words(table.columns[column], schema.missing)
    share = float(np.mean(other[there])) if there.any() else 0.0
    if share > MOST:
        log.warning(
            "%s, column %r: %.0f %% of the values are none of data.schema.categorical.%s = %s: check their spelling",
            table.where, column, 100 * share, column, list(schema.categorical[column]),
        )  # fmt: skip


def _scaled_target(values: npt.NDArray[np.floating], schema: Schema) -> npt.NDArray[np.float32]:
    if schema.interval is None:
        raise BadInput("data.schema.range is missing: a regression target needs a declared range [low, high]")
    return schema.interval.scaled(values, schema.scale).astype(np.float32)


def encode_arrays(where: str, x: Any, y: Any, schema: Schema, invalid: str = "refuse") -> Arrays:
    """The same for arrays: entries of x are clipped and scaled by ``values`` where the schema declares them."""
    try:
        features = np.asarray(x, dtype=np.float32)
    except (TypeError, ValueError):
        raise BadInput(f"{where}: array x holds {np.asarray(x).dtype}, not numbers: convert it first") from None
    labels = np.asarray(y)
    if features.ndim < 2 or labels.shape != features.shape[:1]:
        raise BadInput(
            f"{where}: x has shape {features.shape} and y {labels.shape}: x needs one row per record, y one entry"
        )
    faults = Faults(where, len(features), invalid)
    finite = np.isfinite(features).all(axis=tuple(range(1, features.ndim)))
    faults.note(np.asarray(~finite), "array x", "has an entry that is not a finite number")
    if schema.values is not None:
        tell_clipped(where, "x", schema.values, features, "values")
        usable = np.nan_to_num(features, nan=0.0, posinf=0.0, neginf=0.0)
        features = schema.values.scaled(usable, schema.scale).astype(np.float32)
    targets = _array_targets(labels, schema, faults)
    valid = faults.settle()
    if not valid.all():
        features = np.array(features)
        features[~valid], targets[~valid] = 0, 0
    return features, targets, valid


def _array_targets(labels: npt.NDArray[Any], schema: Schema, faults: Faults) -> Targets:
    """Class numbers by the declared labels, or scaled numbers, from an array."""
    if schema.classes is not None:
        declared = {label: k for k, label in enumerate(schema.classes)}
        distinct, back = np.unique(labels, return_inverse=True)
        codes = np.array([declared.get(word(value), -1) for value in distinct.tolist()], dtype=np.int64)
        found = codes[back.reshape(-1)] if len(distinct) else np.zeros(0, dtype=np.int64)
        faults.note(found < 0, "array y", "is none of the declared classes", labels)
        return found
    try:
        values = labels.astype(np.float64)
    except (TypeError, ValueError):
        raise BadInput(f"{faults.where}: array y holds {labels.dtype}, not numbers: convert it first") from None
    faults.note(~np.isfinite(values), "array y", "is not a finite number")
    usable = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    return _scaled_target(usable, schema) if schema.interval is not None else usable.astype(np.float32)
