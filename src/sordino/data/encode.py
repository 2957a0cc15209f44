"""Records to arrays: the cells of a table are encoded by a schema (rule R8).

Nothing is learnt from the records: each is encoded on its own, and what cannot be is refused or becomes a null row.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sordino.data.federation import Features, Targets
from sordino.data.read import EMPTY, RawTable
from sordino.data.schema import WHOLE, Interval, Schema, word
from sordino.data.target import COMPARISONS, Rule
from sordino.data.tokens import Layout
from sordino.errors import BadInput

log = logging.getLogger("sordino.data")

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Arrays = tuple[Features, Targets, Bools]
Faults = list[tuple[Bools, str, str, Any]]
"""Which rows cannot be encoded, in which column, why, and the cells that a message may quote (or None)."""

MOST = 0.5
"""A range, or a list of values, that more than this share of a column lies outside of is worth a warning."""

MOST_QUOTED = 80
"""So many characters of a cell are quoted in a message."""

_BLANKS = "".join(chr(code) for code in range(0x3001) if chr(code).isspace())
"""What is trimmed off cells: what Python trims off declared values."""

_OR_NULL = "or keep such records as null rows with data.invalid = 'null'"


def numbers(column: Any, missing: Sequence[str]) -> tuple[Floats, Bools, Bools]:
    """The column as floats, which cells are missing, and which are not numbers.

    Missing are nulls, NaN, the words for missing, and numbers that are equal to one of these (−9.0, where −9 is one).
    """
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if _is_number(column.type):
        values: Floats = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False).astype(np.float64)
        absent, wrong = np.isnan(values), np.isinf(values)
    else:
        values, absent, wrong = _numbers_in_text(texts(column), missing)
    codes = [code for code in map(_float, missing) if math.isfinite(code)]
    return values, absent | np.isin(values, codes), wrong


def _is_number(kind: Any) -> bool:
    """Whether every entry of this type is a number, a truth value or null."""
    known = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_null)
    return any(one(kind) for one in known)


def texts(column: Any) -> Any:
    """The column as text, whatever its type. How is decided by the type alone, so that no entry touches another."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type) or _is_number(column.type):
        # Not every Arrow writes halves as text.
        return (column.cast(pa.float32()) if pa.types.is_float16(column.type) else column).cast(pa.string())
    return pa.array([_said(entry) for entry in column], pa.string())


def _said(entry: Any) -> str | None:
    """One entry of an uncommon type as text; a mark that is no value of anything where there is no text for it."""
    try:
        value = entry.as_py()
        if value is None:
            return None
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    except Exception:  # an entry may hold anything (a date before all calendars), and is one entry all the same
        return "\ufffd"


def _numbers_in_text(column: Any, missing: Sequence[str]) -> tuple[Floats, Bools, Bools]:
    """Numbers written as text. Arrow's parser takes whole clean columns; otherwise cell by cell."""
    trimmed = pc.utf8_trim(column, characters=_BLANKS)
    unknown = pc.fill_null(pc.is_in(trimmed, value_set=pa.array(list(missing), trimmed.type)), True)
    absent: Bools = pc.or_(unknown, pc.is_null(trimmed)).to_numpy(zero_copy_only=False)
    try:
        values = pc.if_else(pa.array(absent), "nan", trimmed).cast(pa.float64()).to_numpy(zero_copy_only=False)
    except pa.ArrowException:
        values = np.array([np.nan if gone else _float(text) for text, gone in zip(trimmed.to_pylist(), absent)])
    # The word "nan" is a missing value however it is spelled; what else is not finite is not a number.
    spelled = pc.fill_null(pc.equal(pc.utf8_lower(trimmed), "nan"), False).to_numpy(zero_copy_only=False)
    absent = absent | spelled
    return np.asarray(values, dtype=np.float64), absent, ~absent & ~np.isfinite(values)


def _float(text: str) -> float:
    """The number, or ∞ for text that is none (∞ is refused as well)."""
    try:
        return float(text)
    except ValueError:
        return np.inf


def words(column: Any) -> Any:
    """The column as text to compare with declared values: trimmed, and 1.0 written as 1."""
    text = pc.utf8_trim(texts(column), characters=_BLANKS)
    return pc.replace_substring_regex(text, pattern=WHOLE, replacement=r"\1")


def unit_ids(table: RawTable, schema: Schema) -> list[str]:
    """Whose every record is, as text: trimmed, 1.0 written as 1; empty where the cell is."""
    if schema.unit is None:
        return []
    return ["" if one is None else str(one) for one in words(table.columns[schema.unit]).to_pylist()]


def positions(column: Any, declared: Sequence[str]) -> npt.NDArray[np.int64]:
    """Where each cell stands in the declared values; −1 when it does not."""
    found = pc.fill_null(pc.index_in(words(column), value_set=pa.array(list(declared), pa.string())), -1)
    place: npt.NDArray[np.int64] = found.to_numpy(zero_copy_only=False).astype(np.int64)
    return place


def _absent_words(column: Any, missing: Sequence[str]) -> Bools:
    """Which cells are null or hold a word for missing."""
    text = words(column)
    unknown = pc.is_in(text, value_set=pa.array([*missing, "nan", "NaN"], pa.string()))
    gone: Bools = pc.or_(pc.fill_null(unknown, True), pc.is_null(text)).to_numpy(zero_copy_only=False)
    return gone


def check_invalid(invalid: str) -> None:
    """Refuse a word that says neither to refuse invalid records nor to keep them as null rows."""
    if invalid not in ("refuse", "null"):
        raise BadInput(f"data.invalid is {invalid!r}: use 'refuse' (an error) or 'null' (rows that contribute zero)")


def fault_in_words(row: int, what: str, why: str, cells: Any) -> str:
    """What is wrong with a row, with the cell where there is one to quote."""
    return f"{what}: {'' if cells is None else f'{_short(cells[row])} '}{why}"


def _settled(where: str, x: Features, y: Targets, faults: Faults, invalid: str) -> Arrays:
    """The arrays, the rows at fault zeroed in copies of them, and which rows are valid.

    With ``invalid`` "refuse", an error names the first row at fault instead, with the cell where there is one to quote.
    """
    bad, first = np.zeros(len(x), dtype=bool), (len(x), "")
    for wrong, what, why, cells in faults:
        bad |= wrong
        if wrong.any() and wrong.argmax() < first[0]:
            row = int(wrong.argmax())
            first = row, fault_in_words(row, what, why, cells)
    if not bad.any():
        return x, y, ~bad
    if invalid == "refuse":
        more = f" ({bad.sum()} such records in this file)" if bad.sum() > 1 else ""
        raise BadInput(f"{where}, row {first[0] + 1}, {first[1]}{more}: correct the data or the schema, {_OR_NULL}")
    x, y = x.copy(), y.copy()
    x[bad], y[bad] = 0, 0
    return x, y, ~bad


def _short(cell: Any) -> str:
    """A cell as a message quotes it."""
    text = str(cell)
    return text if len(text) <= MOST_QUOTED else f"{text[:MOST_QUOTED]}…"


def encode_table(table: RawTable, schema: Schema, invalid: str = "refuse") -> Arrays:
    """The features, targets and validity of a file's records.

    Guarantees: row j of the result depends on row j of the table and on the schema alone, and there are as many rows as
    the file has records, valid or not.
    """
    if not schema.features:
        raise BadInput("data.schema declares no columns: tables need numeric, categorical or text columns")
    if invalid == "refuse":
        table = _without_empty_end(table)
        for row, why in sorted(table.broken.items()):
            raise BadInput(f"{table.where}, row {row}: {why}: correct it, {_OR_NULL}")
    x, faults = table_features(table, schema)
    column, what = table.columns[schema.target], f"column {schema.target!r}"
    if schema.rule is not None:
        labels, fault = _answers(schema.rule, column, schema.missing)
        faults.append((fault, what, schema.rule.unanswered, column))
        return _settled(table.where, x, labels, faults, invalid)
    if schema.classes is not None:
        labels = positions(column, schema.classes)
        faults.append((labels < 0, what, "is none of the declared classes", column))
        return _settled(table.where, x, labels, faults, invalid)
    values, absent, wrong = numbers(column, schema.missing)
    faults.append((absent | wrong, what, "is not a number", column))
    _tell_clipped(table.where, schema.target, schema.interval, values, "range")
    return _settled(table.where, x, _scaled(values, schema.interval, schema.scale), faults, invalid)


def table_features(table: RawTable, schema: Schema) -> tuple[Features, Faults]:
    """The features of a file's records, whatever their targets, and which of them cannot be encoded."""
    faults: Faults = []
    if schema.layout is not None:
        return _token_features(table, schema, schema.layout, faults), faults
    x = np.zeros((table.rows, len(schema.features)), dtype=np.float32)
    for k, name in enumerate(schema.numeric):
        x[:, k] = _scaled_column(table, name, schema, schema.scale, faults)
    at = len(schema.numeric)
    for name, declared in schema.categorical.items():
        x[np.arange(table.rows), at + _places(table, name, schema)] = 1.0
        at += len(declared) + 1
    return x, faults


def _token_features(table: RawTable, schema: Schema, layout: Layout, faults: Faults) -> npt.NDArray[np.int64]:
    """Records as token ids: texts padded to their lengths, then an id for every other column."""
    parts = []
    for name in schema.text:
        column = table.columns[name]
        absent = _absent_words(column, schema.missing)
        if name not in schema.fill:
            faults.append((absent, f"column {name!r}", "is missing and the schema has no fill for it", None))
        blank = schema.fill.get(name)
        parts.append(layout.texts(name, [blank if no else one for one, no in zip(texts(column).to_pylist(), absent)]))
    for name in schema.numeric:
        parts.append(layout.parts(name, _scaled_column(table, name, schema, "unit", faults))[:, None])
    for name in schema.categorical:
        parts.append(layout.values(name, _places(table, name, schema))[:, None])
    return np.concatenate(parts, axis=1)


def _scaled_column(table: RawTable, name: str, schema: Schema, scale: str, faults: Faults) -> Floats:
    """A number column, filled, clipped and scaled; notes cells that are missing or no numbers."""
    interval = schema.numeric[name]
    values, absent, wrong = numbers(table.columns[name], schema.missing)
    if name in schema.fill:
        values = np.where(absent, float(schema.fill[name]), values)
    else:
        faults.append((absent, f"column {name!r}", "is missing and the schema has no fill for it", None))
    faults.append((wrong, f"column {name!r}", "is not a number", table.columns[name]))
    _tell_clipped(table.where, name, interval, values, f"numeric.{name}")
    return interval.scaled(np.where(np.isfinite(values), values, interval.low), scale)


def _places(table: RawTable, name: str, schema: Schema) -> npt.NDArray[np.int64]:
    """Where the cells of a category column stand among the declared values, filled; behind the last: other."""
    declared = schema.categorical[name]
    place, absent = positions(table.columns[name], declared), _absent_words(table.columns[name], schema.missing)
    other = (place < 0)[~absent]
    if other.sum() > MOST * other.size:
        log.warning(
            "%s, column %r: %.0f %% of the values are none of data.schema.categorical.%s = %s: check their "
            "spelling", table.where, name, 100 * other.mean(), name, list(declared),
        )  # fmt: skip
    place[place < 0] = len(declared)
    if name in schema.fill:
        place[absent] = declared.index(word(schema.fill[name]))
    return place


def _answers(rule: Rule, column: Any, missing: Sequence[str]) -> tuple[npt.NDArray[np.int64], Bools]:
    """Class 0 or 1 of every cell by a declared question, and which cells leave it open."""
    if rule.comparison in COMPARISONS:
        values, absent, wrong = numbers(column, missing)
        return COMPARISONS[rule.comparison](values, rule.number).astype(np.int64), absent | wrong
    among = positions(column, rule.words) >= 0
    return (among == (rule.comparison == "in")).astype(np.int64), _absent_words(column, missing)


def _without_empty_end(table: RawTable) -> RawTable:
    """The table without the empty lines that editors leave at the end of a file; null rows where those are wanted."""
    rows = table.rows
    while table.broken.get(rows) == EMPTY:
        rows -= 1
    columns = {name: column[:rows] for name, column in table.columns.items()}
    return replace(table, columns=columns, rows=rows, broken={k: why for k, why in table.broken.items() if k <= rows})


def array_features(where: str, x: Any, schema: Schema) -> tuple[Features, Faults]:
    """The features in an array, clipped and scaled by ``values`` where the schema declares them; who has none.

    Of token ids, which stay whole numbers, those have none that hold an id beyond the declared ones.
    """
    if schema.tokens is not None:
        return _checked_ids(where, np.asarray(x), schema.tokens)
    try:
        if np.asarray(x).dtype.kind in "cmM":  # NumPy would drop imaginary parts, and count nanoseconds
            raise TypeError
        with np.errstate(over="ignore"):  # what is too large for a float is told as not finite
            features = np.asarray(x, dtype=np.float32)
    except (TypeError, ValueError):
        raise BadInput(f"{where}: array x holds {np.asarray(x).dtype}, not numbers: convert it first") from None
    finite = np.isfinite(features).all(axis=tuple(range(1, features.ndim)))
    faults: Faults = [(np.asarray(~finite), "array x", "has an entry that is not a finite number", None)]
    if schema.values is not None:
        _tell_clipped(where, "x", schema.values, features, "values")
        features = _scaled(features, schema.values, schema.scale)
    return features, faults


def _checked_ids(where: str, x: npt.NDArray[Any], tokens: int) -> tuple[Features, Faults]:
    if x.dtype.kind not in "iu" or x.ndim != 2:
        raise BadInput(
            f"{where}: array x is {x.dtype} of shape {x.shape}: token ids are whole numbers, as many for every record"
        )
    inside: Bools = np.all((x >= 0) & (x < tokens), axis=1)
    told = f"has a token id outside 0 … {tokens - 1}"
    return np.where(inside[:, None], x, 0).astype(np.int64), [(~inside, "array x", told, None)]


def encode_arrays(where: str, x: Any, y: Any, schema: Schema, invalid: str = "refuse") -> Arrays:
    """The same for arrays: entries of x are clipped and scaled by ``values`` where the schema declares them."""
    features, faults = array_features(where, x, schema)
    labels = np.asarray(y)
    if features.ndim < 2 or labels.shape != features.shape[:1]:
        raise BadInput(
            f"{where}: x has shape {features.shape} and y {labels.shape}: x needs one row per record, y one entry"
        )
    if schema.rule is not None:
        column = pa.array([word(value) for value in labels.tolist()], pa.string())
        found, fault = _answers(schema.rule, column, schema.missing)
        faults.append((fault, "array y", schema.rule.unanswered, labels))
        return _settled(where, features, found, faults, invalid)
    if schema.classes is not None:
        declared = {label: k for k, label in enumerate(schema.classes)}
        distinct, back = np.unique(labels, return_inverse=True)
        codes = np.array([declared.get(word(value), -1) for value in distinct.tolist()], dtype=np.int64)
        found = codes[back.reshape(-1)]
        faults.append((found < 0, "array y", "is none of the declared classes", labels))
        return _settled(where, features, found, faults, invalid)
    try:
        values = labels.astype(np.float64)
    except (TypeError, ValueError):
        raise BadInput(f"{where}: array y holds {labels.dtype}, not numbers: convert it first") from None
    faults.append((~np.isfinite(values), "array y", "is not a finite number", None))
    return _settled(where, features, _scaled(values, schema.interval, schema.scale), faults, invalid)


def _scaled(values: npt.NDArray[np.floating], interval: Interval | None, scale: str) -> npt.NDArray[np.float32]:
    """The values, those that are not finite as 0, clipped and scaled by the interval where there is one."""
    usable = np.where(np.isfinite(values), values, 0.0)
    return (usable if interval is None else interval.scaled(usable, scale)).astype(np.float32)


def _tell_clipped(where: str, column: str, interval: Interval | None, values: npt.NDArray[Any], key: str) -> None:
    """Log a declared range that clips most of a column: nothing of it is left to learn from. Said on this machine."""
    if interval is None:
        return
    there = values[np.isfinite(values)]
    with np.errstate(over="ignore"):
        outside = (there < interval.low) | (there > interval.high)
    if outside.sum() > MOST * outside.size:
        log.warning(
            "%s, column %r: data.schema.%s = [%g, %g] clips %.0f %% of the values: check the range and its unit",
            where, column, key, interval.low, interval.high, 100 * outside.mean(),
        )  # fmt: skip
