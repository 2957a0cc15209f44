"""Runs the cells of an experiment: in stacks on a GPU, one after another elsewhere. What is finished is kept."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from papers.experiment import Cell, Experiment, Measure, Place, tuning_cells
from papers.make import Workshop
from papers.store import Store, diverged, figures, hardware
from sordino.engine.devices import torch_device
from sordino.errors import BadInput, Diverged
from sordino.study.many import train_together
from sordino.study.run import Prepared, Run, train_prepared

STACK_ROWS = 1000
"""Most participations of one round that share a stack, over all of its runs."""

STACK_NUMBERS = 2_000_000_000
"""Most parameters times rows of a stack: 8 GB for the updates of one round."""

LOST = 1e6
"""A final loss from which on a run has diverged, though it be a number: to know nothing costs ln(classes)."""


class Watch(Protocol):
    """Is told how far a reproduction is."""

    def begin(self, rounds: int, runs: int, what: str) -> None:
        """So many rounds of so many runs are about to be trained."""

    def advance(self, rounds: int) -> None:
        """So many of them are done."""

    def say(self, line: str) -> None:
        """Something a person should know."""


@dataclass(frozen=True)
class Silent:
    """Tells nobody."""

    def begin(self, rounds: int, runs: int, what: str) -> None:
        """Nothing."""

    def advance(self, rounds: int) -> None:
        """Nothing."""

    def say(self, line: str) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Runner:
    """How cells are run: where, in stacks of how many rows, until when."""

    workshop: Workshop
    store: Store
    device: str = "cpu"
    stack: bool = False
    rows: int = STACK_ROWS
    deadline: float | None = None
    """No stack is begun after this moment (``time.monotonic``)."""
    watch: Watch = Silent()

    def waiting(self, cells: Sequence[Cell]) -> list[Cell]:
        """The runs that are not finished yet, each once."""
        return list({cell.id: cell for cell in cells if self.store.read(cell) is None}.values())

    def finish(self, cells: Sequence[Cell], what: str) -> list[Cell]:
        """Run what is not finished yet; returns the cells that had to be left for another time."""
        waiting = self.waiting(cells)
        if not waiting:
            return []
        ready = [(cell, self.workshop.prepared(cell)) for cell in waiting]
        self.watch.begin(sum(one.plan.schedule.rounds for _, one in ready), len(ready), what)
        stacks = list(self._stacks(ready))
        for place, stack in enumerate(stacks):
            if self.deadline is not None and time.monotonic() > self.deadline:
                return [cell for later in stacks[place:] for cell, _ in later]
            if self.stack:
                self._run(stack)
            else:
                self._alone(*stack[0])
        return []

    def _stacks(self, ready: Sequence[tuple[Cell, Prepared]]) -> Iterator[list[tuple[Cell, Prepared]]]:
        """Runs that can share a stack, as many as the cap on rows allows; single runs where nothing is stacked."""
        groups: dict[str, list[tuple[Cell, Prepared]]] = {}
        for cell, one in ready:
            groups.setdefault(_kinship(one) if self.stack else cell.id, []).append((cell, one))
        for group in groups.values():
            stack: list[tuple[Cell, Prepared]] = []
            held = 0
            for cell, one in group:
                most = min(self.rows, STACK_NUMBERS // one.engine.dimension)
                if stack and held + _rows(one) > most:
                    yield stack
                    stack, held = [], 0
                stack.append((cell, one))
                held += _rows(one)
            yield stack

    def _run(self, stack: list[tuple[Cell, Prepared]]) -> None:
        runs = [one for _, one in stack]
        try:
            started = time.perf_counter()
            done = train_together(
                runs, self.device, lambda number: self.watch.advance(_live(runs, number)), keep=self.store.stacks
            )
            seconds = (time.perf_counter() - started) / len(stack)
            for (cell, _), run in zip(stack, done):
                self._keep(cell, run, seconds)
        except BadInput as refusal:
            if "share a stack" not in str(refusal):
                raise
            for cell, one in stack:
                self._alone(cell, one)

    def _alone(self, cell: Cell, one: Prepared) -> None:
        started = time.perf_counter()
        run: Run | Diverged
        try:
            run = train_prepared(one, self.device, [lambda record: self.watch.advance(1)], keep=self.store.stacks)
        except Diverged as error:
            run = error
        self._keep(cell, run, time.perf_counter() - started)

    def _keep(self, cell: Cell, run: Run | Diverged, seconds: float) -> None:
        """Write what a run came to. One that diverged is a result too, also if only its loss shows it."""
        if isinstance(run, Run) and not run.result["final"]["loss"] < LOST:
            run = Diverged(f"the loss is {run.result['final']['loss']:.2g} at the end: training diverged")
        if isinstance(run, Run):
            self.store.write(cell, figures(run.result, seconds, self.where))
            return
        self.watch.say(f"{cell.row}, {cell.column}, seed {cell.seed}: {run}")
        self.store.write(cell, diverged(seconds, self.where, str(run)))

    @property
    def where(self) -> str:
        """The hardware, in words."""
        return hardware(torch_device(self.device))


def _live(runs: Sequence[Prepared], number: int) -> int:
    return sum(1 for one in runs if number <= one.plan.schedule.rounds)


def _rows(one: Prepared) -> int:
    return int(one.plan.schedule.asked.shape[1])


def _kinship(one: Prepared) -> str:
    """What runs of one stack have in common: the network with what it holds fixed, the shape of a record, the loss."""
    fixed = hashlib.sha256()
    for name, buffer in one.template.named_buffers():
        fixed.update(name.encode() + np.ascontiguousarray(buffer.detach().cpu().numpy()).tobytes())
    model = one.study["model"]
    return repr([model["name"], model["options"], model["shape"], one.study["loss"], fixed.hexdigest()])


def chosen_values(
    experiment: Experiment, cells: Sequence[Cell], store: Store
) -> tuple[dict[Place, dict[str, Any]], list[Cell]]:
    """The searched values with the best first measure on the tuning seeds, and the tuning runs that are missing.

    A place whose tuning runs are not all finished has no values yet. Runs that diverged never win.
    """
    measure = experiment.measures[0]
    chosen: dict[Place, dict[str, Any]] = {}
    missing = []
    for place, runs in tuning_cells(cells).items():
        read = [(run, store.read(run)) for run in runs]
        missing += [run for run, found in read if found is None]
        if all(found is not None for _, found in read):
            chosen[place] = _best(measure, [(run, found["final"].get(measure.key)) for run, found in read if found])
    return chosen, missing


def _best(measure: Measure, runs: Sequence[tuple[Cell, float | None]]) -> dict[str, Any]:
    scores: dict[str, list[float]] = {}
    values: dict[str, dict[str, Any]] = {}
    for run, score in runs:
        key = repr(sorted(run.chosen.items()))
        values[key] = dict(run.chosen)
        worst = -np.inf if measure.more_is_better else np.inf
        scores.setdefault(key, []).append(worst if score is None else score)
    choose: Callable[..., str] = max if measure.more_is_better else min
    return values[choose(scores, key=lambda key: float(np.mean(scores[key])))]


def settle(cells: Sequence[Cell], chosen: dict[Place, dict[str, Any]]) -> list[Cell]:
    """The cells whose searched values are known, with these values; cells that wait for a search are left out."""
    known = [cell for cell in cells if not cell.search or cell.place in chosen]
    return [
        replace(cell, chosen={**cell.chosen, **chosen[cell.place]}, search={}) if cell.search else cell
        for cell in known
    ]


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
