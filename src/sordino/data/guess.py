"""What a file looks like, for a drafted schema: whether it has a header, what stands for "missing", what columns are.

Everything here looks at records, so it is for a person who owns them and checks what is guessed; nothing of it is used
when records are encoded.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet

from sordino.data.encode import Floats, numbers, words
from sordino.data.excel import below_blank, sheet_rows
from sordino.data.read import Cells, RawTable, delimiter_of, file_lines, line_cells, read_table
from sordino.data.schema import MISSING, word
from sordino.data.tokens import Tokenizer
from sordino.data.toml import toml_value
from sordino.errors import BadInput

UNKNOWN = frozenset(("?", "-", "--", ".", "*", "n/a", "na", "null", "#n/a", "#null!", "missing", "unknown"))
"""Words that mean "no value" where the other cells of a column are numbers, in small or capital letters."""

CODES = (-9.0, -99.0, -999.0, -9999.0, -1.0, -8.0, -88.0, 88.0, 99.0, 888.0, 999.0, 8888.0, 9999.0)
"""Numbers that may stand for "no value" where they lie apart from all others."""

SURE = CODES[:4]
"""Those of them that nobody takes for a value where all others are positive."""

LOOKED_AT = 2000
"""So many lines are looked at to see whether the first is one of them."""

MOSTLY = 0.8
"""A column is one of numbers when this share of its cells are."""

MANY_TEXTS, LONG_TEXT, FEW_WORDS = 50, 100, 3.0
"""Texts: more different cells than this, or one of more letters, and on average at least so many words."""

_WORDS = Tokenizer("words", 4096, 1)

_PERSON = re.compile(r"(?i)(^|[^a-z])(id|pid|mrn|ssn|uuid|patient|person|subject|proband|pseudonym)([^a-z]|$)")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}([T ].*)?|[0-9]{1,2}[./][0-9]{1,2}[./][0-9]{2,4}")


@dataclass(frozen=True)
class Opened:
    """A file as a draft reads it.

    ``names``: of its columns, where it has no header, and ``why``: what tells so; ``twice``: names that several have.
    """

    table: RawTable
    delimiter: str = ","
    names: tuple[str, ...] | None = None
    why: str = ""
    twice: tuple[str, ...] = ()


@dataclass(frozen=True)
class Column:
    """What one column holds: its distinct words with their counts, and its finite numbers. Missing cells are apart."""

    name: str
    counts: dict[str, int]
    values: Floats
    absent: int
    nested: bool = False

    @property
    def cells(self) -> int:
        """How many cells hold something."""
        return sum(self.counts.values())

    @property
    def numeric(self) -> bool:
        """Whether it has cells, and all are numbers."""
        return 0 < self.cells == len(self.values)

    @property
    def whole(self) -> bool:
        """Whether all its numbers are whole ones."""
        return self.numeric and bool((self.values == np.floor(self.values)).all())

    @property
    def counting(self) -> bool:
        """Whether its numbers count up by one from line to line."""
        return self.whole and bool((self.values[1:] == self.values[:-1] + 1).all())

    @property
    def named_person(self) -> bool:
        """Whether its name says that it says who somebody is."""
        return bool(_PERSON.search(self.name) or re.search("[a-z]I[Dd]$", self.name))

    @property
    def dates(self) -> bool:
        """Whether its cells are dates."""
        return bool(self.counts) and all(map(_DATE.fullmatch, self.counts))

    @property
    def commas(self) -> bool:
        """Whether its cells are numbers with a decimal comma."""
        return any("," in one for one in self.counts) and all(is_number(one.replace(",", ".")) for one in self.counts)

    @property
    def prose(self) -> bool:
        """Whether its cells are texts of several words, neither names nor a few categories."""
        if self.numeric or self.dates or self.named_person or self.nested or not self.counts:
            return False
        if len(self.counts) <= MANY_TEXTS and max(map(len, self.counts)) <= LONG_TEXT:
            return False
        return float(self.lengths().mean()) >= FEW_WORDS

    def lengths(self) -> npt.NDArray[np.int64]:
        """How many words each of its different cells has."""
        return np.array([sum(1 for _ in _WORDS.split(one)) for one in self.counts], dtype=np.int64)

    def sorted_words(self) -> list[str]:
        """The distinct words, whole numbers first in their order."""
        return sorted(self.counts, key=_in_order)


def _in_order(text: str) -> tuple[bool, float, str]:
    whole = re.fullmatch("[+-]?[0-9]{1,15}", text) is not None
    return not whole, int(text) if whole else 0, text


@dataclass(frozen=True)
class Missing:
    """Words for "no value" that a draft declares, with what tells so, and what may be further ones."""

    words: tuple[str, ...] = MISSING
    told: list[str] = field(default_factory=list)
    perhaps: list[str] = field(default_factory=list)


def open_file(file: Path) -> Opened:
    """Read a table, with a header or without one."""
    delimiter = delimiter_of(file)
    if file.name.lower().endswith(".parquet"):
        table = read_table(file, None)
        return Opened(table, twice=_twice(pyarrow.parquet.read_schema(file).names))
    sheet = file.name.lower().endswith(".xlsx")
    rows: list[Cells] = below_blank(sheet_rows(file)) if sheet else _taken_apart(file, delimiter)
    header, why = has_header(rows)
    if header:
        table = read_table(file, None, delimiter)
        return Opened(table, delimiter, twice=_twice([(cell or "").strip() for cell in rows[0]]))
    width = Counter(len(row) for row in rows if row).most_common(1)[0][0]
    names = tuple(f"c{k + 1}" for k in range(width))
    return Opened(read_table(file, None, delimiter, names), delimiter, names, why)


def _twice(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name, count in Counter(names).items() if count > 1)


def _taken_apart(file: Path, delimiter: str) -> list[Cells]:
    """The cells of every line of a CSV file; none of a line that cannot be taken apart."""
    rows: list[Cells] = []
    try:
        lines = file_lines(file)
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{file} cannot be read: {error}") from None
    for line in lines:
        try:
            rows.append([*line_cells(line, delimiter)])
        except BadInput:
            rows.append([])
    return rows


def has_header(rows: Sequence[Cells]) -> tuple[bool, str]:
    """Whether the first line names the columns, and what tells if it does not.

    It does where it has a word above numbers or dates. Otherwise columns vote: for a record a number above numbers
    (half a vote where it lies outside of them) and a word that comes again below; for names a word that does not. Words
    count for less where few below are alike. Numbers that count up by one name columns (0, 1, 2, … or years).
    """
    first = [(cell or "").strip() for cell in rows[0]] if rows else []
    alike, names, told = 0.0, 0.0, ""
    for k, cell in enumerate(first):
        below = [
            text for text in ((row[k] or "").strip() for row in rows[1:LOOKED_AT] if k < len(row)) if not _unknown(text)
        ]
        if _unknown(cell):
            continue
        if not below:
            alike, names = alike + is_number(cell) / 4, names + (not is_number(cell)) / 4
            told = told or (f"{toml_value(cell[:40])} is a number" if is_number(cell) else "")
        elif sum(map(is_number, below)) >= MOSTLY * len(below):
            if not is_number(cell):
                return True, ""
            values = [float(one) for one in below if is_number(one)]
            alike += 1.0 if min(values) <= float(cell) <= max(values) else 0.5
            told = f"{toml_value(cell[:40])} stands above numbers"
        elif all(map(_DATE.fullmatch, below)) and not _DATE.fullmatch(cell):
            return True, ""
        elif cell in below:
            alike += 1.0 - len(set(below)) / len(below)
            told = told or f"{toml_value(cell[:40])} comes again below it"
        else:
            names += max(0.25, 1.0 - len(set(below)) / len(below))
    counting = len(first) > 1 and all(map(is_number, first)) and _counts_up(first)
    if counting or alike <= names:
        return True, ""
    return False, f"the first line looks like a record: {told}"


def is_number(text: str) -> bool:
    """Whether a cell holds a finite number."""
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _unknown(text: str) -> bool:
    return text in MISSING or text.lower() == "nan" or text.lower() in UNKNOWN


def _counts_up(cells: Sequence[str]) -> bool:
    steps = np.diff([float(cell) for cell in cells])
    return bool((steps == 1).all())


def columns_of(table: RawTable) -> tuple[list[Column], Missing]:
    """What every column holds, once the words for "no value" are known that columns of numbers have beside them."""
    plain = {name: _column(name, held, MISSING) for name, held in table.columns.items()}
    found = _missing(list(plain.values()))
    return [_column(name, table.columns[name], found.words) for name in plain], found


def _column(name: str, held: Any, missing: Sequence[str]) -> Column:
    nested = pa.types.is_nested(held.type)
    values, absent, wrong = numbers(held, missing)
    text = words(held).to_pylist()
    there = [one for one, gone in zip(text, absent) if not gone and one is not None and one.lower() != "nan"]
    return Column(name, dict(Counter(map(word, there))), values[~absent & ~wrong], len(text) - len(there), nested)


def _missing(columns: Sequence[Column]) -> Missing:
    """The words and codes for "no value" in a file, each with the columns that tell."""
    where: dict[str, list[str]] = {}
    kept: set[str] = set()
    for column in columns:
        odd = [one for one in column.counts if not is_number(one)]
        known = [one for one in odd if one.lower() in UNKNOWN]
        rest = column.cells - sum(column.counts[one] for one in known)
        few = len(odd) <= 3 and all(one in known or _repeated_word(column, one) for one in odd)
        if odd and few and len(column.values) >= max(MOSTLY * rest, 1):
            for one in odd:
                where.setdefault(one, []).append(column.name)
            continue
        if "?" in odd:
            where.setdefault("?", []).append(column.name)
        kept.update(one for one in odd if one != "?")
    # A word that is a value of some other column, such as the − of a test's result, cannot be declared for all of them.
    found = {one: names for one, names in where.items() if one not in kept}
    told = [f"{toml_value(one)} in {_some(names)}" for one, names in found.items()]
    codes, perhaps = _codes(columns)
    for code, names in codes.items():
        told.append(f"{code:g} in {_some(names)}, where no other number is negative")
    listed = (*MISSING, *found, *(f"{code:g}" for code in codes))
    return Missing(tuple(dict.fromkeys(listed)), told, perhaps)


def _repeated_word(column: Column, text: str) -> bool:
    """Whether a text comes more than once and has no digit: 1,5 is a number to somebody."""
    return column.counts[text] > 1 and not any(map(str.isdigit, text))


def _codes(columns: Sequence[Column]) -> tuple[dict[float, list[str]], list[str]]:
    """Numbers that surely are codes for "no value", with their columns; and remarks about those that may be."""
    sure: dict[float, list[str]] = {}
    perhaps: list[str] = []
    for code in CODES:
        for column in columns:
            others, count = _others(column, code), int((column.values == code).sum())
            if count < 2 or len(np.unique(others)) < 2 or others.min() <= code <= others.max():
                continue
            low, high = float(others.min()), float(others.max())
            gap = max(low - code, code - high)
            if code in SURE and low >= 0 and not any(_holds(one, code) for one in columns if one is not column):
                sure.setdefault(code, []).append(column.name)
            elif gap > high - low or (code < 0 <= low):
                perhaps.append(
                    f"{code:g} in {toml_value(column.name)} may mean a missing value ({count} cells; all others lie in "
                    f"{low:g} … {high:g}): if so, add {toml_value(f'{code:g}')} to missing"
                )
    return sure, perhaps


def _others(column: Column, code: float) -> Floats:
    """The numbers of a column but for this one and those that surely are codes."""
    return column.values[~np.isin(column.values, (*SURE, code))]


def _holds(column: Column, value: float) -> bool:
    """Whether a number is a value like any other of a column."""
    others = _others(column, value)
    return value in column.values and bool(len(others)) and bool(others.min() < value)


def _some(names: Sequence[str]) -> str:
    listed = ", ".join(map(toml_value, names[:3]))
    return listed if len(names) <= 3 else f"{listed} and {len(names) - 3} more columns"
