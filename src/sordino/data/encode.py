"""Records to arrays: the cells of CSV and Parquet files are read as they are, then encoded by a schema (rule R8).

Nothing is learnt from the records: each is encoded on its own, and what cannot be is refused or becomes a null row.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from sordino.data.dataset import Features, Targets
from sordino.data.schema import WHOLE, Interval, Schema, word
from sordino.errors import BadInput

log = logging.getLogger("sordino.data")

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Arrays = tuple[Features, Targets, Bools]
Faults = list[tuple[Bools, str, str, Any]]
"""Which rows cannot be encoded, in which column, why, and the cells that a message may quote (or None)."""

LINES = 1 << 16
"""Lines of a CSV file that are taken apart at once."""

EMPTY = "it is an empty line"
"""What is wrong with a line that holds nothing."""

DELIMITERS = ",;\t|"
"""What may stand between the cells of a line."""

MOST = 0.5
"""A range, or a list of values, that more than this share of a column lies outside of is worth a warning."""

_OR_NULL = "or keep such records as null rows with data.invalid = 'null'"


@dataclass(frozen=True)
class RawTable:
    """The columns of one file before they are encoded, and why rows (counted from 1) have no columns at all."""

    where: str
    columns: dict[str, Any]
    rows: int
    broken: Mapping[int, str] = field(default_factory=dict)


def read_table(path: Path, wanted: Sequence[str] | None, delimiter: str = ",") -> RawTable:
    """The wanted columns (None: all) of a CSV file, as text, or of a Parquet file, with the types they have."""
    try:
        if path.suffix.lower() != ".parquet":
            return read_csv(path, wanted, delimiter)
        wanted = _present(path, wanted, pyarrow.parquet.read_schema(path).names)
        table = pyarrow.parquet.read_table(path, columns=wanted)
        return RawTable(path.name, {name: table[name].combine_chunks() for name in wanted}, table.num_rows)
    except (OSError, EOFError, zlib.error, pa.ArrowException, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read as {path.suffix[1:]}: {str(error).splitlines()[0]}") from None


def delimiter_of(path: Path) -> str:
    """The character that the header of a CSV file has most of; a comma for any other file."""
    if path.name.lower().endswith(".parquet"):
        return ","
    opener: Callable[..., Any] = gzip.open if path.name.lower().endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", errors="replace") as opened:
            return max(DELIMITERS, key=opened.readline().count)
    except (OSError, EOFError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from None


def _present(path: Path, wanted: Sequence[str] | None, there: Sequence[str]) -> list[str]:
    """The wanted columns, or all; an error names one that is not there."""
    for name in wanted or ():
        if name not in there:
            raise BadInput(f"{path} has no column {name!r}: it has {', '.join(map(str, there))}; correct the schema")
    return list(there if wanted is None else wanted)


def read_csv(
    path: Path, wanted: Sequence[str] | None, delimiter: str, names: Sequence[str] = (), skip: int = 0
) -> RawTable:
    """The wanted columns of a CSV file as text; ``names`` stand in for the header of a file that has none.

    Guarantees: a line is a record, whatever it holds, and row j depends on line j alone: a quote that is not closed
    ends with its line and swallows no other. A line that cannot be taken apart is a row of nulls in its place (without
    a target, so it can only be a null record), so that the number of records stays what it was.
    """
    lines = _lines(path)[skip:]
    header = list(names) or _header(path, lines, delimiter)
    wanted = _present(path, wanted, header)
    records = lines if names else lines[1:]
    broken: dict[int, str] = {}
    chunks: dict[str, list[Any]] = {name: [pa.array([], pa.string())] for name in wanted}
    for start in range(0, len(records), LINES):
        rows: list[Sequence[str | None]] = []
        for number, line in enumerate(records[start : start + LINES], start + 1):
            try:
                rows.append(_cells(line, delimiter, len(header)))
            except BadInput as error:
                broken[number] = str(error)
                rows.append([None] * len(header))
        for name, chunk in chunks.items():
            place = header.index(name)
            chunk.append(pa.array([row[place] for row in rows], pa.string()))
    columns = {name: pa.concat_arrays(chunk) for name, chunk in chunks.items()}
    return RawTable(path.name, columns, len(records), broken)


def _lines(path: Path) -> list[bytes]:
    """The lines of a file, however long or odd, gzipped or not; a newline at its end ends the last of them."""
    content = path.read_bytes()
    if path.suffix.lower() == ".gz":
        content = gzip.decompress(content)
    lines = content.removeprefix(codecs.BOM_UTF8).split(b"\n")
    return lines if lines[-1] else lines[:-1]


def _cells(line: bytes, delimiter: str, wanted: int) -> list[str]:
    """The cells of one line; says what is wrong with a line that has none to give."""
    try:
        text = line.removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError:
        raise BadInput("it is not UTF-8 text") from None
    if not text and wanted > 1:
        raise BadInput(EMPTY)
    try:
        quoted = '"' in text
        cells = next(csv.reader([text], delimiter=delimiter, strict=True)) if quoted else text.split(delimiter)
    except csv.Error:
        raise BadInput("a quote is not closed where its cell ends (a cell cannot hold a line break)") from None
    if len(cells) != wanted:
        raise BadInput(f"it has more or fewer cells ({len(cells)}) than the header ({wanted})")
    return cells


def _header(path: Path, lines: Sequence[bytes], delimiter: str) -> list[str]:
    if not lines:
        raise BadInput(f"{path} is empty: a CSV file starts with a line of column names")
    first = lines[0].removesuffix(b"\r")
    if b"\r" in first:
        raise BadInput(f"{path} ends its lines with carriage returns alone: save it with line feeds")
    try:
        return [name.strip() for name in next(csv.reader([first.decode("utf-8")], delimiter=delimiter, strict=True))]
    except (csv.Error, UnicodeDecodeError, StopIteration) as error:
        raise BadInput(f"{path}: its first line has no column names: {error}") from None


def numbers(column: Any, missing: Sequence[str]) -> tuple[Floats, Bools, Bools]:
    """The column as floats, which cells are missing (null, NaN, or a word for missing), and which are not numbers."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return _numbers_in_text(column, missing)
    try:
        values: Floats = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False).astype(np.float64)
    except pa.ArrowException:
        every = np.ones(len(column), dtype=bool)
        return np.zeros(len(column)), ~every, every
    return values, np.isnan(values), np.isinf(values)


def _numbers_in_text(column: Any, missing: Sequence[str]) -> tuple[Floats, Bools, Bools]:
    """Numbers written as text. Arrow's parser takes whole clean columns; otherwise cell by cell."""
    trimmed = pc.utf8_trim_whitespace(column)
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
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    text = pc.utf8_trim_whitespace(column.cast(pa.string()))
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


def _settled(where: str, x: Features, y: Targets, faults: Faults, invalid: str) -> Arrays:
    """The arrays, the rows at fault zeroed in copies of them, and which rows are valid.

    With ``invalid`` "refuse", an error names the first row at fault instead, with the cell where there is one to quote.
    """
    bad, first = np.zeros(len(x), dtype=bool), (len(x), "")
    for wrong, what, why, cells in faults:
        bad |= wrong
        if wrong.any() and wrong.argmax() < first[0]:
            row = int(wrong.argmax())
            first = row, f"{what}: {'' if cells is None else f'{cells[row]!s} '}{why}"
    if not bad.any():
        return x, y, ~bad
    if invalid == "refuse":
        more = f" ({bad.sum()} such records in this file)" if bad.sum() > 1 else ""
        raise BadInput(f"{where}, row {first[0] + 1}, {first[1]}{more}: correct the data or the schema, {_OR_NULL}")
    x, y = x.copy(), y.copy()
    x[bad], y[bad] = 0, 0
    return x, y, ~bad


def encode_table(table: RawTable, schema: Schema, invalid: str = "refuse") -> Arrays:
    """The features, targets and validity of a file's records.

    Guarantees: row j of the result depends on row j of the table and on the schema alone, and there are as many rows as
    the file has records, valid or not.
    """
    if not schema.features:
        raise BadInput("data.schema declares no columns: CSV and Parquet files need numeric or categorical columns")
    if invalid == "refuse":
        table = _without_empty_end(table)
        for row, why in sorted(table.broken.items()):
            raise BadInput(f"{table.where}, row {row}: {why}: correct it, {_OR_NULL}")
    faults: Faults = []
    x = np.zeros((table.rows, len(schema.features)), dtype=np.float32)
    for k, (name, interval) in enumerate(schema.numeric.items()):
        values, absent, wrong = numbers(table.columns[name], schema.missing)
        if name in schema.fill:
            values = np.where(absent, float(schema.fill[name]), values)
        else:
            faults.append((absent, f"column {name!r}", "is missing and the schema has no fill for it", None))
        faults.append((wrong, f"column {name!r}", "is not a number", table.columns[name]))
        _tell_clipped(table.where, name, interval, values, f"numeric.{name}")
        x[:, k] = interval.scaled(np.where(np.isfinite(values), values, interval.low), schema.scale)
    at = len(schema.numeric)
    for name, declared in schema.categorical.items():
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
        x[np.arange(table.rows), at + place] = 1.0
        at += len(declared) + 1
    column, what = table.columns[schema.target], f"column {schema.target!r}"
    if schema.classes is not None:
        labels = positions(column, schema.classes)
        faults.append((labels < 0, what, "is none of the declared classes", column))
        return _settled(table.where, x, labels, faults, invalid)
    values, absent, wrong = numbers(column, schema.missing)
    faults.append((absent | wrong, what, "is not a number", column))
    _tell_clipped(table.where, schema.target, schema.interval, values, "range")
    return _settled(table.where, x, _scaled(values, schema.interval, schema.scale), faults, invalid)


def _without_empty_end(table: RawTable) -> RawTable:
    """The table without the empty lines that editors leave at the end of a file; null rows where those are wanted."""
    rows = table.rows
    while table.broken.get(rows) == EMPTY:
        rows -= 1
    columns = {name: column[:rows] for name, column in table.columns.items()}
    return replace(table, columns=columns, rows=rows, broken={k: why for k, why in table.broken.items() if k <= rows})


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
    finite = np.isfinite(features).all(axis=tuple(range(1, features.ndim)))
    faults: Faults = [(np.asarray(~finite), "array x", "has an entry that is not a finite number", None)]
    if schema.values is not None:
        _tell_clipped(where, "x", schema.values, features, "values")
        features = _scaled(features, schema.values, schema.scale)
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
    outside = (there < interval.low) | (there > interval.high)
    if outside.sum() > MOST * outside.size:
        log.warning(
            "%s, column %r: data.schema.%s = [%g, %g] clips %.0f %% of the values: check the range and its unit",
            where, column, key, interval.low, interval.high, 100 * outside.mean(),
        )  # fmt: skip
