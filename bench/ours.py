"""sordino's own round: sampling, ledger, gate, noise, aggregation, all included."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn

from bench.workloads import KEY, Task, plan_of, trained_in
from sordino.client import gradients
from sordino.client.rows import Records
from sordino.data import Federation
from sordino.engine.checkpoint import Checkpoint
from sordino.engine.devices import repeatable
from sordino.engine.sharded import Shard
from sordino.privacy.ledger import Ledger
from sordino.study.prepared import Prepared
from sordino.study.session import Session, beginning

PERSON = 4
"""Records of a person in the workloads by person."""

RUNNING = 200
"""Rounds of the simulation that goes on."""


class Timed(Prepared):
    """A workload as a session takes it."""

    @property
    def key(self) -> str:
        """What random streams are keyed by: the peers draw the same batches."""
        return KEY


def sordino(task: Task, records: Records | None = None) -> Callable[[], None]:
    """One private round through the simulation loop, with a fresh ledger each time.

    ``records`` where they are not the task's own tensors (a mapped file).
    """
    records = records or Records(task.x, task.y)
    model = copy.deepcopy(task.model)
    engine = gradients.build(model, "cross-entropy")
    return _first_round(task, _ready(task, model, engine, records, _own(task), None), records)


class Running:
    """The next round of a simulation that goes on, and on from the start when its plan is done.

    Its ledger is that of a run without a folder: a charge survives a killed process, not a loss of power.
    ``mixed``: a GPU may compute activations in TF32.
    """

    def __init__(self, task: Task, mixed: bool = False) -> None:
        model = copy.deepcopy(task.model)
        plan = plan_of(task.work, sum(p.numel() for p in model.parameters()), rounds=RUNNING)
        self._task, self._records = replace(task, plan=plan), Records(task.x, task.y)
        engine = gradients.build(model, "cross-entropy", mixed=mixed)
        self._ready = _ready(self._task, model, engine, self._records, _own(task), None)
        self._open = ExitStack()
        self._rounds: Iterator[Checkpoint] = iter(())

    def __call__(self) -> None:
        """Take the next round."""
        with repeatable(self._records.y.device, self._task.deterministic):
            if next(self._rounds, None) is None:
                self.stop()
                folder = self._open.enter_context(tempfile.TemporaryDirectory(prefix="sordino-bench-"))
                book = self._open.enter_context(Ledger(Path(folder) / "l.db", durable=False))
                where = self._records.y.device
                self._rounds = Session(self._ready, book, KEY, where, records=self._records).rounds()
                next(self._rounds)

    def stop(self) -> None:
        """End the session: its ledger is closed, and its folder goes."""
        self._open.close()


def _own(task: Task) -> list[NDArray[np.int64]]:
    return [task.own(i) for i in range(task.work.clients)]


def _ready(
    task: Task,
    model: nn.Module,
    engine: gradients.Engine,
    records: Records,
    train: list[NDArray[np.int64]],
    units: NDArray[np.int64] | None,
) -> Timed:
    nothing = [np.arange(0)] * len(train)
    names, valid = [c.name for c in task.plan.clients], np.ones(len(records.y), bool)
    x, y = np.broadcast_to(np.float32(0), task.x.shape), np.zeros(len(valid), np.int64)  # the session is given records
    clients = Federation("bench", x, y, valid, names, train, nothing, None, "classification", 10, units=units)
    return Timed(clients, model, engine, task.plan, {"loss": "cross-entropy"}, 0, model)


def _first_round(task: Task, ready: Timed, records: Records) -> Callable[[], None]:
    where = records.y.device
    first = beginning(ready, where).weights  # made before, as the peers' models are

    def run() -> None:
        scratch, same_bits = tempfile.TemporaryDirectory(prefix="sordino-bench-"), repeatable(where, task.deterministic)
        with scratch as folder, ExitStack() as books, same_bits:
            book = books.enter_context(Ledger(Path(folder) / "l.db")) if Shard.now().first else None
            next(Session(ready, book, KEY, where, Checkpoint(0, first, first), records=records).rounds())

    return run


def persons(task: Task) -> Callable[[], None]:
    """The same round with persons of four records as units: a quarter as many a batch, and as many records."""
    plan = plan_of(task.work, trained_in(task.model), PERSON)
    engine = gradients.build(task.model, "cross-entropy", copies=PERSON)
    units = np.arange(len(task.y)).reshape(-1, PERSON)
    records = Records(task.x, task.y, members=task.place(units))
    train = [task.own(i)[::PERSON] // PERSON for i in range(task.work.clients)]
    by_person = replace(task, plan=plan, batches=[])
    return _first_round(by_person, _ready(by_person, task.model, engine, records, train, units), records)
