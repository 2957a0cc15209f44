"""Cells of an experiment for the scheduler of many runs: how each is made, and what is kept of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from papers.experiment import Cell, Place
from papers.make import Workshop
from papers.search import Search
from papers.store import Store, diverged, figures, hardware
from sordino.engine.devices import torch_device
from sordino.errors import BadInput, Diverged, SordinoError
from sordino.methods import Training
from sordino.methods.auto import MOST
from sordino.study.folder import Copies
from sordino.study.prepared import Prepared, Run
from sordino.study.schedule import Ending, Scheduler
from sordino.study.session import Callback, train_prepared, train_together

LOST = 1e6
"""A final loss from which on a run has diverged, though it be a number: to know nothing costs ln(classes)."""


class Silent:
    """Is told how far a reproduction is, and shows nothing of it; other watches show it."""

    def begin(self, rounds: int, runs: int, what: str) -> None:
        """So many rounds of so many runs are about to be trained."""

    def advance(self, rounds: int) -> None:
        """So many of them are done."""

    def say(self, line: str) -> None:
        """Something a person should know."""


@dataclass(frozen=True)
class Cells:
    """Makes the runs of cells, and writes their numbers into a store: see ``schedule.Maker``."""

    workshop: Workshop
    store: Store
    device: str = "cpu"

    def finish(self, cells: Sequence[Cell], what: str, how: Scheduler, watch: Silent) -> bool:
        """Make the runs that are not finished yet; False where some had to be left for another time."""
        every = list({cell.id: cell for cell in cells}.values())
        left = {cell.id: _rounds(cell) for cell in every if not self.finished(cell)}
        if left:
            watch.begin(sum(left.values()), len(left), what)

        def tell(some: Sequence[Cell], record: dict[str, Any]) -> None:
            watch.advance(sum(1 for cell in some if record["round"] <= _rounds(cell)))

        for ended in how.run(every, self, tell):
            self.workshop.replaced.update(ended.note)
            cell = ended.job
            if isinstance(ended.error, Diverged):
                watch.say(f"{cell.row}, {cell.column}, seed {cell.seed}: {ended.error}")
            elif ended.error is not None:
                raise ended.error
            del left[cell.id]
        return not left

    def finished(self, cell: Cell) -> bool:
        """Whether the store knows the cell's numbers."""
        return self.store.read(cell) is not None

    def begun(self, cell: Cell) -> bool:
        """Never known: a run that was stopped is found by what it is, alone or in its stack."""
        return False

    def kin(self, cell: Cell) -> Hashable:
        """All cells of one model go together."""
        return None

    def prepared(self, cell: Cell) -> Prepared:
        """The run of a cell."""
        return self.workshop.prepared(cell)

    def alone(self, cell: Cell, ready: Prepared, tell: Callback) -> Run:
        """Train the run of one cell by itself, from where it was stopped if it was."""
        return train_prepared(ready, self.device, [tell], self.store.stacks)

    def together(self, cells: Sequence[Cell], runs: Sequence[Prepared], tell: Callback) -> Sequence[Run | SordinoError]:
        """Train several runs in one stack."""
        return train_together(runs, self.device, [tell], Copies(self.store.stacks, [one.kept_as for one in runs]))

    def close(self, cell: Cell, found: Run | SordinoError, seconds: float) -> Ending[Cell]:
        """Write what a run came to. One that diverged is a result too, also if only its loss shows it."""
        if isinstance(found, Run) and not found.result["final"]["loss"] < LOST:
            found = Diverged(f"the loss is {found.result['final']['loss']:.2g} at the end: training diverged")
        where = hardware(torch_device(self.device))
        if isinstance(found, Run):
            self.store.write(cell, figures(found.result, seconds, where))
        elif isinstance(found, Diverged):
            self.store.write(cell, diverged(seconds, where, str(found)))
        return Ending(cell, None if isinstance(found, Run) else found, dict(self.workshop.replaced))


def _rounds(cell: Cell) -> int:
    """How many rounds a run has, or at most has where it sets them itself."""
    given = cell.settled.training.get("rounds", MOST if cell.method == "auto" else Training.rounds)
    return MOST if given == "auto" else int(given)


def settle(cells: Sequence[Cell], found: Mapping[Place, Search]) -> list[Cell]:
    """The cells whose searched values are known, with these values; cells that wait for a search are left out."""
    settled = []
    for cell in cells:
        if not cell.search:
            settled.append(cell)
        elif (values := found[cell.place].chosen) is not None:
            settled.append(replace(cell, chosen={**cell.chosen, **values}, search={}))
    return settled


def matching(cells: Sequence[Cell], only: str | Callable[[Cell], bool] | None) -> list[Cell]:
    """The cells to run: those for which ``only`` holds, or whose block, row, column or seed contain its words.

    Words are separated by commas, alternatives by ``|``: ``"tight, Dist1|Dist2, seed 0"``. A word that is somebody's
    whole label means just that label.
    """
    if only is None:
        return list(cells)
    if not isinstance(only, str):
        return [cell for cell in cells if only(cell)]
    wanted = [[one.strip().lower() for one in word.split("|")] for word in only.split(",") if word.strip()]
    whole = {label for cell in cells for label in _labels(cell)}

    def holds(cell: Cell) -> bool:
        return all(
            any(word == label if word in whole else word in label for word in words for label in _labels(cell))
            for words in wanted
        )

    kept = [cell for cell in cells if holds(cell)]
    if cells and not kept:
        names = [", ".join(dict.fromkeys(getattr(c, key) for c in cells)) for key in ("block", "row", "column")]
        raise BadInput(f"no run matches {only!r}: blocks are {names[0]}; rows are {names[1]}; columns are {names[2]}")
    return kept


def _labels(cell: Cell) -> tuple[str, ...]:
    return (cell.block.lower(), cell.row.lower(), cell.column.lower(), f"seed {cell.seed}")
