"""A survey's declared tables: per column a list of cells, and for every raw record the one cell of each it falls into.

What a schema needs (ranges, categories, how much is missing) is asked before there is one. So a survey declares, from
public knowledge alone, a generous range or a list of values for every column; a record then counts once in one cell of
each of the f columns. Whatever a record holds, it adds a vector of f ones to the concatenated tables: norm √f.

Cells of a number column [low, high] with B bins: below, bin 1 … bin B, above, missing, no number. Bin k holds the
values from edge k − 1 to edge k; edge k is low + (high − low)·k/B, or with ``log`` low + (1 + high − low)^(k/B) − 1.
Cells of a category column: each declared value, other, missing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from sordino.data.encode import numbers, words
from sordino.data.read import RawTable, delimiter_of, read_table
from sordino.data.schema import MISSING, Schema, is_finite, missing_words, word
from sordino.errors import BadInput

Places = npt.NDArray[np.int64]

BINS = 32
MOST_BINS = 1000
MOST_CELLS = 100_000
"""The most cells that all tables of a survey have together: a site's memory is not the server's to fill."""

_KEYS = {"low", "high", "bins", "log", "categories"}


@dataclass(frozen=True)
class Numbers:
    """The table of a number column: bins of equal width over [low, high], or of equal width in ln(1 + v − low)."""

    name: str
    low: float
    high: float
    bins: int = BINS
    log: bool = False

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells' names, in order."""
        edges = self.edges
        inside = (f"{edges[k]:g} … {edges[k + 1]:g}" for k in range(self.bins))
        return ("below", *inside, "above", "missing", "no number")

    @property
    def edges(self) -> npt.NDArray[np.float64]:
        """Where bins begin and end: B + 1 values from low to high."""
        share = np.linspace(0.0, 1.0, self.bins + 1)
        width = self.high - self.low
        over = np.expm1(share * math.log1p(width)) if self.log else share * width
        inner = self.low + over
        inner[-1] = self.high
        return inner

    def places(self, column: Any, missing: Sequence[str]) -> Places:
        """The cell of every entry; a value on an edge belongs to the bin above it, ``high`` to the last bin."""
        values, absent, wrong = numbers(column, missing)
        # Comparisons only: a logarithm of a vector may differ in its last bit by where in it a record stands.
        found: Places = np.searchsorted(self.edges, values, side="right").astype(np.int64)
        found[values == self.high] = self.bins
        found[values > self.high] = self.bins + 1
        found[~np.isfinite(values)] = self.bins + 3
        found[absent] = self.bins + 2
        found[wrong] = self.bins + 3
        return found

    @property
    def unknown(self) -> int:
        """The cell of an entry that is not there."""
        return self.bins + 2

    @property
    def odd(self) -> int:
        """The cell of an entry that nothing can be made of."""
        return self.bins + 3

    def plain(self) -> dict[str, Any]:
        """The declaration as a study file has it."""
        return {"low": self.low, "high": self.high, "bins": self.bins, "log": self.log}


@dataclass(frozen=True)
class Categories:
    """The table of a category column: the declared values, other, missing."""

    name: str
    categories: tuple[str, ...]

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells' names, in order."""
        return (*self.categories, "other", "missing")

    def places(self, column: Any, missing: Sequence[str]) -> Places:
        """The cell of every entry, compared as text (trimmed, 1.0 as 1)."""
        text = words(column)
        absent = pc.is_in(text, value_set=pa.array([*missing, "nan", "NaN"], pa.string()))
        absent = pc.or_(pc.fill_null(absent, True), pc.is_null(text)).to_numpy(zero_copy_only=False)
        place = pc.fill_null(pc.index_in(text, value_set=pa.array(list(self.categories), pa.string())), self.odd)
        found: Places = place.to_numpy(zero_copy_only=False).astype(np.int64)
        found[absent] = self.unknown
        return found

    @property
    def unknown(self) -> int:
        """The cell of an entry that is not there."""
        return len(self.categories) + 1

    @property
    def odd(self) -> int:
        """The cell of an entry that nothing can be made of."""
        return len(self.categories)

    def plain(self) -> dict[str, Any]:
        """The declaration as a study file has it."""
        return {"categories": list(self.categories)}


Column = Numbers | Categories


@dataclass(frozen=True)
class Survey:
    """What a survey asks: a table for each of f columns, which of them is the target, and words for missing."""

    columns: tuple[Column, ...]
    target: str
    missing: tuple[str, ...] = MISSING

    @property
    def width(self) -> int:
        """How many cells all tables have together."""
        return sum(len(column.cells) for column in self.columns)

    @property
    def norm(self) -> float:
        """√f: the norm of what one record adds to the concatenated tables."""
        return math.sqrt(len(self.columns))

    @property
    def starts(self) -> list[int]:
        """Where every column's table begins in the concatenated ones."""
        return [0, *np.cumsum([len(column.cells) for column in self.columns]).tolist()[:-1]]

    def parts(self, whole: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """The tables of the columns, from the concatenated ones."""
        return [whole[at : at + len(one.cells)] for at, one in zip(self.starts, self.columns)]

    def plain(self) -> dict[str, Any]:
        """The survey as plain values, which ``parse_survey`` reads: what a site is sent.

        Columns are a list of pairs: packets sort the keys of tables, and cells are counted in the columns' order.
        """
        columns = [[one.name, one.plain()] for one in self.columns]
        return {"target": self.target, "missing": list(self.missing), "columns": columns}


def places(table: RawTable, survey: Survey) -> Places:
    """For every record of a raw table the cell that it falls into, [records, f], counted within each column's table.

    Guarantees: row j depends on row j of the table alone, whatever it holds; no content raises. A column that the table
    does not have is missing in every record.
    """
    found = np.empty((table.rows, len(survey.columns)), dtype=np.int64)
    for k, column in enumerate(survey.columns):
        held = table.columns.get(column.name)
        found[:, k] = column.unknown if held is None else _robust(column, held, survey.missing)
    return found


def flat_places(table: RawTable, survey: Survey) -> Places:
    """The same, counted within the concatenated tables: f different cells a record, from 0 to ``survey.width`` − 1."""
    flat: Places = places(table, survey) + np.array(survey.starts)
    return flat


def _robust(column: Column, held: Any, missing: Sequence[str]) -> Places:
    """The cells of a column of any type; where the column as a whole cannot be read, of each entry by itself.

    An entry that Arrow cannot convert would make all entries fail, so that one record would move every other.
    """
    usual = (pa.types.is_string, pa.types.is_large_string, pa.types.is_floating, pa.types.is_integer)
    inner = held.type.value_type if pa.types.is_dictionary(held.type) else held.type
    if any(one(inner) for one in usual):
        return column.places(held, missing)
    alone = [_alone(column, held, k, missing) for k in range(len(held))]
    return np.array(alone, dtype=np.int64)


def _alone(column: Column, held: Any, k: int, missing: Sequence[str]) -> int:
    """The cell of one entry of a type that is neither text nor number: by what it looks like as text."""
    try:
        value = held[k].as_py()
        if value is None:
            return column.unknown
        text = value.decode("utf-8") if isinstance(value, bytes) else word(value)
        return int(column.places(pa.array([text], pa.string()), missing)[0])
    except Exception:  # a record may hold anything, and counts once all the same
        return column.odd


def read_raw(path: Path, survey: Survey, schema: Schema | None = None) -> RawTable:
    """The survey's columns of a table, as they are; those that it does not have are left out.

    Where there is a schema already it says how the file is laid out.
    """
    wanted = [column.name for column in survey.columns]
    if path.name.lower().endswith(".parquet"):
        try:
            there = pyarrow.parquet.read_schema(path).names
        except (OSError, pa.ArrowException) as error:
            raise BadInput(f"{path} cannot be read as parquet: {str(error).splitlines()[0]}") from None
        return read_table(path, [name for name in wanted if name in there])
    if not path.name.lower().endswith((".csv", ".csv.gz", ".xlsx")):
        raise BadInput(f"{path} is no table with named columns: a survey reads CSV, Excel and Parquet files")
    delimiter, names = (None, None) if schema is None else (schema.delimiter, schema.names)
    if names == ():
        wanted = [name for name in wanted if re.fullmatch("c[1-9][0-9]*", name)]
    table = read_table(path, wanted if names == () else None, delimiter or delimiter_of(path), names)
    kept = {name: held for name, held in table.columns.items() if name in wanted}
    return RawTable(table.where, kept, table.rows, table.broken)


def parse_survey(raw: Mapping[str, Any]) -> Survey:
    """The survey in plain tables (a study's ``[survey]``, or what a server sent); errors name the key and remedy."""
    columns, target = raw.get("columns"), raw.get("target")
    columns = dict(columns) if isinstance(columns, list) else columns
    if not isinstance(columns, Mapping) or not columns:
        raise BadInput(
            "survey.columns is missing: declare what is asked, such as [survey.columns.age] with low = 0, high = 110"
        )
    missing = missing_words(raw.get("missing", MISSING), "survey.missing")
    parsed = tuple(_column(str(name), one, missing) for name, one in columns.items())
    if target is None:
        raise BadInput("survey.target is missing: name the column that the model is to predict")
    if target not in columns:
        raise BadInput(f"survey.target is {target!r}, which survey.columns does not declare: add it there")
    found = Survey(parsed, str(target), missing)
    if len(parsed) < 2:
        raise BadInput("survey.columns declares the target alone: declare at least one column to predict it from")
    aim = next(one for one in parsed if one.name == target)
    if isinstance(aim, Categories) and len(aim.categories) < 2:
        raise BadInput(f"survey.columns.{target}.categories are the classes of the target: declare at least two")
    if found.width > MOST_CELLS:
        raise BadInput(
            f"survey.columns declares {found.width} cells: at most {MOST_CELLS} are possible, use fewer bins"
        )
    return found


def _column(name: str, raw: Any, missing: Sequence[str]) -> Column:
    where = f"survey.columns.{name}"
    if not isinstance(raw, Mapping):
        raise BadInput(f"{where} is {raw!r}: it is a table with low and high, or with categories")
    for key in sorted(set(raw) - _KEYS):
        raise BadInput(f"{where}.{key} is unknown: the keys are low, high, bins, log, or categories")
    if "categories" in raw:
        if len(raw) > 1:
            raise BadInput(f"{where} has categories and {sorted(set(raw) - {'categories'})[0]}: keep one of the two")
        return Categories(name, _listed(raw["categories"], f"{where}.categories", missing))
    for key in ("low", "high"):
        if key not in raw:
            raise BadInput(f"{where}.{key} is missing: declare a range that holds all values, or categories = […]")
        if not is_finite(raw[key]):
            raise BadInput(f"{where}.{key} is {raw[key]!r}: it is a number")
    low, high, bins, log = float(raw["low"]), float(raw["high"]), raw.get("bins", BINS), raw.get("log", False)
    if not low < high or not math.isfinite(high - low):
        raise BadInput(f"{where} has low = {low:g} and high = {high:g}: low is below high")
    if type(bins) is not int or not 2 <= bins <= MOST_BINS:
        raise BadInput(f"{where}.bins is {bins!r}: it is a whole number from 2 to {MOST_BINS}")
    if not isinstance(log, bool):
        raise BadInput(f"{where}.log is {log!r}: it is true or false")
    found = Numbers(name, low, high, bins, log)
    if not (np.diff(found.edges) > 0).all():
        raise BadInput(f"{where}: {bins} bins between {low!r} and {high!r} cannot be told apart: use fewer, or a range")
    return found


def _listed(value: Any, where: str, missing: Sequence[str]) -> tuple[str, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise BadInput(f"{where} is {value!r}: declare the list of values it can have")
    declared = tuple(word(item) for item in value)
    for one in declared:
        if declared.count(one) > 1:
            raise BadInput(f"{where} lists {one!r} twice: list every value once")
        if one in (*missing, "nan", "NaN"):
            raise BadInput(f"{where} lists {one!r}, which means a missing value: leave it out, it has a cell already")
    return declared
