"""Columns of CSV and Parquet files: read as they are, and turned into numbers or names without learning from them."""

from __future__ import annotations

import codecs
import csv
import gzip
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from sordino.errors import BadInput

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

LINES = 1 << 16
"""Lines of a CSV file that are taken apart at once."""

EMPTY = "it is an empty line"
"""What is wrong with a line that holds nothing."""


@dataclass(frozen=True)
class Table:
    """The columns of one file, and why rows (counted from 1) could not be taken apart into columns at all."""

    where: str
    columns: dict[str, Any]
    rows: int
    broken: Mapping[int, str] = field(default_factory=dict)


def read_table(path: Path, wanted: Sequence[str], delimiter: str = ",") -> Table:
    """The wanted columns of a CSV file (all as text) or of a Parquet file (with the types they have)."""
    try:
        if path.suffix.lower() == ".parquet":
            present = pyarrow.parquet.read_schema(path).names
            _check_present(path, wanted, present)
            table = pyarrow.parquet.read_table(path, columns=list(wanted))
            return Table(path.name, {name: _joined(table[name]) for name in wanted}, table.num_rows)
        return read_csv(path, wanted, delimiter)
    except (OSError, EOFError, zlib.error, pa.ArrowException, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read as {path.suffix[1:]}: {str(error).splitlines()[0]}") from None


def read_csv(path: Path, wanted: Sequence[str], delimiter: str, names: Sequence[str] = (), skip: int = 0) -> Table:
    """The wanted columns of a CSV file as text; ``names`` stand in for the header of a file that has none.

    Guarantees: a line is a record, whatever it holds, and row j depends on line j alone: a quote that is not closed
    ends with its line and swallows no other. A line that cannot be taken apart is a row of nulls in its place (without
    a target, so it can only be a null record), so that the number of records stays what it was.
    """
    lines = _lines(path)[skip:]
    header = list(names) or _header(path, lines, delimiter)
    _check_present(path, wanted, header)
    places = [header.index(name) for name in wanted]
    records = lines if names else lines[1:]
    broken: dict[int, str] = {}
    chunks: list[list[Any]] = [[pa.array([], pa.string())] for _ in wanted]
    for start in range(0, len(records), LINES):
        rows: list[Sequence[str | None]] = []
        for number, line in enumerate(records[start : start + LINES], start + 1):
            try:
                rows.append(_cells(line, delimiter, len(header)))
            except BadInput as error:
                broken[number] = str(error)
                rows.append([None] * len(header))
        for chunk, place in zip(chunks, places):
            chunk.append(pa.array([row[place] for row in rows], pa.string()))
    columns = {name: pa.concat_arrays(chunk) for name, chunk in zip(wanted, chunks)}
    return Table(path.name, columns, len(records), broken)


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
    if '"' not in text:
        cells = text.split(delimiter)
    else:
        try:
            cells = next(csv.reader([text], delimiter=delimiter, strict=True))
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


def csv_header(path: Path, delimiter: str) -> list[str]:
    """The column names in a CSV file's first line."""
    return _header(path, _lines(path), delimiter)


def numbers(column: Any, missing: Sequence[str]) -> tuple[Floats, Bools, Bools]:
    """The column as floats, which cells are missing (null, NaN, or a word for missing), and which are not numbers."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if _is_text(column.type):
        return _numbers_in_text(column, missing)
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_boolean(column.type)):
        try:
            column = column.cast(pa.float64())
        except pa.ArrowException:
            every = np.ones(len(column), dtype=bool)
            return np.zeros(len(column)), ~every, every
    values: Floats = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False).astype(np.float64)
    absent = np.isnan(values)
    return values, absent, np.isinf(values)


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
    return pc.replace_substring_regex(text, pattern=r"^([+-]?\d+)\.0+$", replacement=r"\1")


def word(value: object) -> str:
    """One declared value as ``words`` would write it."""
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value).strip()
    whole, dot, zeros = text.partition(".")
    return whole if dot and zeros and not zeros.strip("0") and whole.lstrip("+-").isdigit() else text


def positions(column: Any, declared: Sequence[str]) -> npt.NDArray[np.int64]:
    """Where each cell stands in the declared values; −1 when it does not."""
    found = pc.fill_null(pc.index_in(words(column), value_set=pa.array(list(declared), pa.string())), -1)
    place: npt.NDArray[np.int64] = found.to_numpy(zero_copy_only=False).astype(np.int64)
    return place


def absent_words(column: Any, missing: Sequence[str]) -> Bools:
    """Which cells are null or hold a word for missing."""
    text = words(column)
    unknown = pc.is_in(text, value_set=pa.array([*missing, "nan", "NaN"], pa.string()))
    gone: Bools = pc.or_(pc.fill_null(unknown, True), pc.is_null(text)).to_numpy(zero_copy_only=False)
    return gone


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _joined(column: Any) -> Any:
    """One array of a chunked column."""
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _check_present(path: Path, wanted: Sequence[str], present: Sequence[str]) -> None:
    for name in wanted:
        if name not in present:
            raise BadInput(f"{path} has no column {name!r}: it has {', '.join(map(str, present))}; correct the schema")
