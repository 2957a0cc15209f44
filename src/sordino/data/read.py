"""Files to tables: the cells of CSV, Parquet and Excel files as they are, before anything is made of them.

A row of a table depends on its own line alone, and there are as many rows as the file has records, whatever they hold.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from sordino.data.excel import below_blank, sheet_rows
from sordino.data.schema import Schema
from sordino.errors import BadInput

LINES = 1 << 16
"""Lines of a file that are taken apart at once."""

EMPTY = "it is an empty line"
"""What is wrong with a line that holds nothing."""

DELIMITERS = ",;\t|"
"""What may stand between the cells of a line."""

Cells = list[str | None]
"""The cells of one line."""


@dataclass(frozen=True)
class RawTable:
    """The columns of one file before they are encoded, and why rows (counted from 1) have no columns at all."""

    where: str
    columns: dict[str, Any]
    rows: int
    broken: Mapping[int, str] = field(default_factory=dict)


def read_by(path: Path, wanted: Sequence[str], schema: Schema) -> RawTable:
    """The wanted columns of a client's table, laid out as its schema says."""
    return read_table(path, wanted, schema.delimiter or delimiter_of(path), schema.names)


def read_table(
    path: Path, wanted: Sequence[str] | None, delimiter: str = ",", names: Sequence[str] | None = None
) -> RawTable:
    """The wanted columns (None: all) of a CSV or Excel file, as text, or of a Parquet file, with the types they have.

    ``names`` as in ``read_csv``; a Parquet file has its own.
    """
    try:
        if path.suffix.lower() == ".parquet":
            return _read_parquet(path, wanted)
        if path.suffix.lower() == ".xlsx":
            return _read_sheet(path, wanted, names)
        return read_csv(path, wanted, delimiter, names)
    except (OSError, EOFError, zlib.error, pa.ArrowException, UnicodeDecodeError) as error:
        told = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(f"{path} cannot be read as {path.suffix[1:]}: {told}") from None


def delimiter_of(path: Path) -> str:
    """The character that the first line of a CSV file has most of; a comma for any other file."""
    if path.name.lower().endswith((".parquet", ".xlsx")):
        return ","
    opener: Callable[..., Any] = gzip.open if path.name.lower().endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", errors="replace") as opened:
            return max(DELIMITERS, key=opened.readline().count)
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{path} cannot be read: {error}") from None


def _present(path: Path, wanted: Sequence[str] | None, there: Sequence[str]) -> list[str]:
    """The wanted columns, or all that have a name of their own; an error names one that is not there, or is twice."""
    often = Counter(there)
    if wanted is None:
        return [name for name in there if often[name] == 1]
    for name in wanted:
        if not often[name]:
            listed = ", ".join(map(str, there[:50])) + (" …" if len(there) > 50 else "")
            raise BadInput(f"{path} has no column {name!r}: it has {listed}; correct the schema")
        if often[name] > 1:
            raise BadInput(f"{path} has {often[name]} columns {name!r}: give each a name of its own")
    return list(wanted)


def _read_parquet(path: Path, wanted: Sequence[str] | None) -> RawTable:
    with pyarrow.parquet.ParquetFile(path) as file:
        there = file.schema_arrow.names
        wanted = _present(path, wanted, there)
        table = file.read(columns=wanted)
        # Where a name has a point in it, Arrow may bring the fields of other columns along.
        columns = {name: _sound(table.column(table.schema.names.index(name)).combine_chunks()) for name in wanted}
        return RawTable(path.name, columns, file.metadata.num_rows)


def _sound(column: Any) -> Any:
    """The column, text that is not UTF-8 with marks in place of what cannot be read."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return column
    try:
        column.validate(full=True)
        return column
    except pa.ArrowInvalid:
        entries = column.cast(pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary()).to_pylist()
        return pa.array([None if one is None else one.decode("utf-8", "replace") for one in entries], pa.string())


def _read_sheet(path: Path, wanted: Sequence[str] | None, names: Sequence[str] | None) -> RawTable:
    """The first sheet of an Excel file; a row that holds more cells than there are columns is a row of nulls."""
    rows, open_ended = sheet_rows(path), names is not None and not names
    if names is None:
        rows = below_blank(rows)
        if not rows:
            raise BadInput(f"{path} is empty: its first row has the names of the columns")
        header = [(cell or "").strip() for cell in rows.pop(0)]
    else:
        header = _numbered(names, wanted, max(map(len, rows), default=0))

    def cells(row: Cells) -> Cells:
        if not row and len(header) > 1:
            raise BadInput(EMPTY)
        if len(row) > len(header) and not open_ended:
            raise BadInput(f"it has more cells ({len(row)}) than there are columns ({len(header)})")
        return [*row, *[None] * (len(header) - len(row))]

    return _gathered(path, header, _present(path, wanted, header), rows, cells)


def read_csv(
    path: Path,
    wanted: Sequence[str] | None,
    delimiter: str,
    names: Sequence[str] | None = None,
    skip: int = 0,
) -> RawTable:
    """The wanted columns of a CSV file as text.

    ``names`` stand in for the header of a file that has none; where they are empty, columns are c1, c2, … and a line
    needs as many cells as are asked for, and may have more.

    Guarantees: a line is a record, whatever it holds, and row j depends on line j alone: a quote that is not closed
    ends with its line and swallows no other. A line that cannot be taken apart is a row of nulls in its place (without
    a target, so it can only be a null record), so that the number of records stays what it was.
    """
    lines, open_ended = file_lines(path)[skip:], names is not None and not names
    if names is None:
        header, records = _header(path, lines, delimiter), lines[1:]
    else:
        if len(lines) == 1:
            _check_ends(path, lines[0])
        seen = len(line_cells(lines[0], delimiter)) if wanted is None and lines else 0
        header, records = _numbered(names, wanted, seen), lines

    def cells(line: bytes) -> Sequence[str | None]:
        if line in (b"", b"\r") and len(header) > 1:
            raise BadInput(EMPTY)
        found = line_cells(line, delimiter)
        if len(found) < len(header) or (len(found) > len(header) and not open_ended):
            whose = "the header" if names is None else "there are columns"
            raise BadInput(f"it has more or fewer cells ({len(found)}) than {whose} ({len(header)})")
        return found

    return _gathered(path, header, _present(path, wanted, header), records, cells)


def _numbered(names: Sequence[str], wanted: Sequence[str] | None, width: int) -> list[str]:
    """The names of columns that no header says: those given, or c1, c2, … up to the last that is asked for."""
    if names:
        return list(names)
    asked = [int(name[1:]) for name in wanted or () if name[:1] == "c" and name[1:].isascii() and name[1:].isdigit()]
    return [f"c{k + 1}" for k in range(width if wanted is None else max(asked, default=0))]


def _gathered(
    path: Path,
    header: Sequence[str],
    wanted: Sequence[str],
    records: Sequence[Any],
    cells: Callable[[Any], Sequence[str | None]],
) -> RawTable:
    """The wanted columns as text, a row for every record; those that cannot be taken apart are nulls in their place."""
    broken: dict[int, str] = {}
    chunks: dict[str, list[Any]] = {name: [pa.array([], pa.string())] for name in wanted}
    places = {name: header.index(name) for name in wanted}
    nothing = [None] * len(header)
    for start in range(0, len(records), LINES):
        rows: list[Sequence[str | None]] = []
        for number, record in enumerate(islice(records, start, start + LINES), start + 1):
            try:
                rows.append(cells(record))
            except BadInput as error:
                broken[number] = str(error)
                rows.append(nothing)
        for name, chunk in chunks.items():
            chunk.append(pa.array([row[places[name]] for row in rows], pa.string()))
    columns = {name: pa.concat_arrays(chunk) for name, chunk in chunks.items()}
    return RawTable(path.name, columns, len(records), broken)


def file_lines(path: Path) -> list[bytes]:
    """The lines of a file, however long or odd, gzipped or not; a newline at its end ends the last of them."""
    content = path.read_bytes()
    if path.suffix.lower() == ".gz":
        content = gzip.decompress(content)
    lines = content.removeprefix(codecs.BOM_UTF8).split(b"\n")
    return lines if lines[-1] else lines[:-1]


def line_cells(line: bytes, delimiter: str) -> list[str]:
    """The cells of one line; says what is wrong with a line that has none to give."""
    try:
        text = line.removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError:
        raise BadInput("it is not UTF-8 text") from None
    if '"' not in text:
        return text.split(delimiter)
    try:
        return next(csv.reader([text], delimiter=delimiter, strict=True))
    except csv.Error as error:
        if "field limit" in str(error):
            raise BadInput(f"a cell in quotes is longer than {csv.field_size_limit()} characters") from None
        raise BadInput("a quote is not closed where its cell ends (a cell cannot hold a line break)") from None


def _header(path: Path, lines: Iterable[bytes], delimiter: str) -> list[str]:
    first = next(iter(lines), None)
    if first is None:
        raise BadInput(f"{path} is empty: a CSV file starts with a line of column names")
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise BadInput(f"{path} is written in UTF-16: save it as UTF-8")
    _check_ends(path, first)
    try:
        found = [name.strip() for name in line_cells(first, delimiter)]
    except BadInput as error:
        raise BadInput(f"{path}: its first line has no column names: {error}") from None
    if not any(found):
        raise BadInput(f"{path}: its first line has no column names: it is empty")
    return found


def _check_ends(path: Path, line: bytes) -> None:
    if b"\r" in line.removesuffix(b"\r"):
        raise BadInput(f"{path} ends its lines with carriage returns alone: save it with line feeds")
