"""The leaderboard in docs/results/index.md: for every benchmark, print, the paper's methods as measured here, and auto.

A row is the mean over the benchmark's columns, its 95 % interval over seeds, its lead over the best that the paper
prints in each column, and in how many columns that lead is beyond its interval. All rows keep the same ε by the same
accountant, every release counted; what is printed keeps it by the paper's own counting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from papers import accuracy_published as published
from papers import accuracy_selection, fedfdp_cells, robust_hdp, selection, verdicts
from papers.experiment import Entry, Measure, Place
from papers.known import measured
from papers.verdicts import ABOVE, Gap


@dataclass(frozen=True)
class Board:
    """One benchmark.

    Attributes
    ----------
    title: which tables of which paper, and at which budgets.
    auto: the experiment and its block that have ``auto`` on the same federations.
    paper: the experiment that has the paper's methods with the paper's network.
    blocks: its blocks to choose from, each with what it is called here.
    """

    title: str
    auto: tuple[str, str]
    paper: str
    blocks: Mapping[str, str]

    @property
    def measure(self) -> Measure:
        """Which accuracy the paper speaks of."""
        return published.measure_of(self.auto[1])

    @property
    def printed(self) -> dict[str, float]:
        """By column, the best that the paper prints."""
        name, block = self.auto
        there = accuracy_selection.printed() if name == "accuracy/selection" else published.printed()
        return {
            place[2]: next(value for value in values if value is not None)
            for place, values in there.items()
            if place[:2] == (block, published.AUTO)
        }


AS_THEIRS, OURS = "noise as published", "tight noise"
FAIR = {fedfdp_cells.ONE: "one local step", fedfdp_cells.FIVE: "five local steps", fedfdp_cells.TANH: "tanh"}
BOARDS = (
    *(
        Board(
            f"Selection, {shown}: 100 clients, ε ~ U(0, 1)",
            ("accuracy/selection", accuracy_selection.BLOCKS[data]),
            f"selection/table{number}",
            {selection.AS_PUBLISHED: AS_THEIRS, selection.TIGHT: OURS},
        )
        for data, shown, number in (("mnist", "Table III (MNIST)", 3), ("fashion-mnist", "Table IV (Fashion-MNIST)", 4))
    ),
    *(
        Board(
            f"Robust-HDP, {shown}: 20 clients, nine distributions of budgets",
            ("accuracy/published", published.HDP[data]),
            f"robust-hdp/table{number}",
            {robust_hdp.AS_PUBLISHED: AS_THEIRS, robust_hdp.TIGHT: OURS},
        )
        for data, shown, number in (("mnist", "Table 8 (MNIST)", 8), ("fashion-mnist", "Table 9 (Fashion-MNIST)", 9))
    ),
    *(
        Board(f"FedFDP, {shown}", ("accuracy/published", block), f"fedfdp/table{number}", FAIR)
        for shown, block, number in (
            ("Table IV: ε = 3.52", published.FAIR, 4),
            ("Table V: ε = 3.52, the columns that Table IV has not", published.SPREAD, 5),
            ("Table VI: Fashion-MNIST, ε = 1 to 4", published.LEVELS, 6),
        )
    ),
)


@dataclass(frozen=True)
class Row:
    """A method on a benchmark: its name, its numbers by column, and their differences from the best printed."""

    name: str
    values: dict[str, float]
    gaps: dict[str, Gap]

    @property
    def mean(self) -> float:
        """The method's accuracy, averaged over the columns of the benchmark."""
        return float(np.mean(list(self.values.values())))

    @property
    def lead(self) -> Gap:
        """Over the best printed, on average over the columns, seed by seed."""
        found = verdicts.average(self.gaps.values())
        if found is None:
            raise LookupError(f"{self.name} has no seed that all columns have")
        return found

    @property
    def above(self) -> list[str]:
        """The columns whose interval lies above print."""
        return [column for column, gap in self.gaps.items() if gap.word == ABOVE]


def _row(name: str, entries: Mapping[str, Entry], board: Board) -> Row | None:
    """A row if it has every column of the benchmark."""
    key, printed = board.measure.key, board.printed
    if not set(printed) <= set(entries):
        return None
    values = {column: entries[column].values.get(key) for column in printed}
    gaps = {column: verdicts.against(entries[column], best, board.measure, column) for column, best in printed.items()}
    if any(one is None for one in (*values.values(), *gaps.values())):
        return None
    return Row(name, {c: v for c, v in values.items() if v is not None}, {c: g for c, g in gaps.items() if g})


def _by_column(table: Mapping[Place, Entry], block: str, row: str) -> dict[str, Entry]:
    return {place[2]: entry for place, entry in table.items() if place[:2] == (block, row)}


def rows(board: Board) -> list[Row]:
    """``auto`` with both kinds of trust, then the paper's methods, each in its best block, the best first."""
    name, block = board.auto
    first = [_row(f"`auto`, {trust}", _by_column(measured(name), block, row), board) for row, trust in TRUST.items()]
    best: dict[str, Row] = {}
    theirs = measured(board.paper)
    for where, called in board.blocks.items():
        for method in dict.fromkeys(place[1] for place in theirs if place[0] == where):
            found = _row(f"{method}, {called}", _by_column(theirs, where, method), board)
            if found and (method not in best or found.mean > best[method].mean):
                best[method] = found
    return sorted((one for one in (*first, *best.values()) if one), key=lambda one: -one.mean)


def default(found: Sequence[Row]) -> Row | None:
    """The row of ``auto`` with noise per site, which is what sordino does if nothing is said."""
    return next((row for row in found if row.name == f"`auto`, {TRUST[published.AUTO]}"), None)


TRUST = {published.AUTO: "noise per site", published.SHARED: "noise shared, half of all sites conspiring"}


def _shown(row: Row, columns: int) -> str:
    mean, low, high = row.lead.interval
    if row.lead.word == verdicts.NONE:
        return f"| {row.name} | {row.mean:.1f} | {mean:+.1f} | no verdict | one seed |"
    return (
        f"| {row.name} | {row.mean:.1f} | {mean:+.1f} [{low:+.1f}, {high:+.1f}] | {len(row.above)} of {columns} | "
        f"{len(row.lead.pairs)} |"
    )


def lines() -> Iterator[str]:
    """The leaderboard: for every benchmark its table, and what stays below print."""
    for board in BOARDS:
        printed, found = board.printed, rows(board)
        yield f"### {board.title}"
        yield ""
        yield "| method | mean over columns | over the best printed | columns above | seeds |"
        yield "|---|---|---|---|---|"
        told = [(row.mean, _shown(row, len(printed))) for row in found]
        best = float(np.mean(list(printed.values())))
        told.append((best, f"| *the best printed of each column* | *{best:.1f}* | | | |"))
        yield from (line for _, line in sorted(told, key=lambda one: -one[0]))
        yield ""
        pages = dict.fromkeys((board.auto[0], board.paper))
        links = " and ".join(f"[{one}]({one.replace('/', '-')}.md)" for one in pages)
        yield f"{_below(found, printed)} From {links}."
        yield ""


def _below(found: Sequence[Row], printed: Mapping[str, float]) -> str:
    """Which columns no row has above print, and which ``auto`` with noise per site has not."""
    somebody = {column for row in found for column in row.above}
    alone = default(found)
    nobody = [column for column in printed if column not in somebody]
    said = "Every column is above print" if not nobody else f"Nothing is above print on {'; '.join(nobody)}"
    if alone is None:
        return f"{said}; `auto` was not run."
    short = [column for column in printed if column not in alone.above and column in somebody]
    if not short:
        return f"{said}, with noise per site too." if not nobody else f"{said}."
    told = "; ".join(f"{column} ({alone.gaps[column].show()})" for column in short)
    return f"{said}; with noise per site not: {told}."
