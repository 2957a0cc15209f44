"""Tables for a terminal that never cut a figure, and the same rows for programs.

A ``Sheet`` is a table where it fits; where it does not, it is a list, a block of ``name: value`` lines per row. Nothing
is shortened by an ellipsis, and no figure or name is broken as long as it fits on a line by itself.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

UNBOUNDED = 10_000
"""The width of what is no terminal: a line is as long as what it says."""

PROSE = 24
"""A column of prose is wrapped, but not to fewer characters than this."""

BETWEEN = 3
"""Characters that stand between two columns."""

Cell = str | Text


def console(stderr: bool = False) -> Console:
    """Where commands print: as wide as the terminal, or as ``COLUMNS`` says; what is piped has no width.

    A terminal is asked how wide it is at every print, so a window may be resized.
    """
    stream = sys.stderr if stderr else sys.stdout
    known = stream.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(stderr=stderr, width=None if known else UNBOUNDED)


@dataclass
class Sheet:
    """A table for people. Cells are taken literally, brackets too; a ``Text`` brings its own style.

    Parameters
    ----------
    columns: the words above the columns. The first one names a row.
    left: columns that are not figures, by name, and begin at the left; the first always does.
    prose: columns whose text may be wrapped between words, by name; all others stay on one line.
    title: what stands above it.
    notes: lines below it.
    """

    columns: Sequence[str]
    left: Sequence[str] = ()
    prose: Sequence[str] = ()
    title: str = ""
    notes: Sequence[str] = ()
    rows: list[list[Text]] = field(default_factory=list)

    def add_row(self, *cells: Cell, style: str = "") -> None:
        """Add a row with a cell for every column."""
        if len(cells) != len(self.columns):
            raise ValueError(f"a row of {len(cells)} cells for {len(self.columns)} columns")
        self.rows.append([Text.assemble(one if isinstance(one, Text) else (one, style)) for one in cells])

    @property
    def row_count(self) -> int:
        """How many rows there are."""
        return len(self.rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = self._widths(options.max_width)
        if widths is None:
            yield from self._blocks()
        else:
            yield self._table(widths)
        yield from (Text(line) for line in self.notes)

    def _widths(self, room: int) -> list[int] | None:
        """How wide every column is, so that all fit into so many characters; None where they cannot.

        A column needs its longest line, one of prose the longest word or ``PROSE``; what is left over goes to prose.
        """
        most, least = [], []
        for place, name in enumerate(self.columns):
            words = max((cell_len(word) for word in name.split()), default=0)
            lines = [line for row in self.rows for line in row[place].plain.splitlines()]
            longest = max((cell_len(line) for line in lines), default=0)
            needed = longest
            if name in self.prose:
                parts = max((cell_len(word) for line in lines for word in line.split()), default=0)
                needed = min(longest, max(parts, PROSE))
            least.append(max(needed, words))
            most.append(max(longest, cell_len(name)))
        spare = room - sum(least) - BETWEEN * len(least) + 1
        if spare < 0:
            return None
        for place in sorted(range(len(least)), key=lambda one: most[one] - least[one]):
            more = min(most[place] - least[place], spare)
            least[place], spare = least[place] + more, spare - more
        return least

    def _table(self, widths: Sequence[int]) -> Table:
        title = Text(self.title, style="italic") if self.title else None
        found = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, header_style="bold")
        for place, (name, width) in enumerate(zip(self.columns, widths)):
            starts = place == 0 or name in self.left or name in self.prose
            found.add_column(Text(name), justify="left" if starts else "right", width=width, overflow="fold")
        for row in self.rows:
            found.add_row(*row)
        return found

    def _blocks(self) -> Iterable[Text | Padding]:
        """Every row as its name and a line for each of its figures; a cell that is empty says nothing."""
        if self.title:
            yield Text(self.title, style="italic")
        for row in self.rows:
            yield Text.assemble((f"{self.columns[0]}: ", "dim"), row[0], overflow="fold", style="bold")
            for name, cell in zip(self.columns[1:], row[1:]):
                if cell.plain.strip():
                    below = "\n" if "\n" in cell.plain else " "
                    named = f"{name}:{below}" if name else ""
                    yield Padding(Text.assemble((named, "dim"), cell, overflow="fold"), (0, 0, 0, 2), expand=False)


def told(line: str, style: str = "", word: str = "") -> Text:
    """A line as it is, brackets too; ``word``, in ``style``, stands before it."""
    return Text.assemble((word, style), " ", line) if word else Text(line, style=style)


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV with a line of names. What lies deeper has a dotted name; a list is JSON; ∞ and null are empty."""
    flat = [_flat(row) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    written = io.StringIO()
    writer = csv.DictWriter(written, names, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(flat)
    return written.getvalue()


def _flat(row: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in row.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping):
            found |= _flat(value, f"{name}.")
        elif isinstance(value, (list, tuple)):
            found[name] = json.dumps(value, ensure_ascii=False, default=str)
        elif isinstance(value, bool):
            found[name] = str(value).lower()
        else:
            found[name] = "" if value is None or (isinstance(value, float) and not math.isfinite(value)) else value
    return found
