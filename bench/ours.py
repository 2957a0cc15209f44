"""sordino's own round: sampling, ledger, gate, noise, aggregation, all included."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from bench.workloads import KEY, Task, plan_of, trained_in
from sordino.client import gradients
from sordino.client.rows import Records
from sordino.data import Federation
from sordino.privacy.ledger import Ledger
from sordino.study.prepared import Prepared
from sordino.study.session import Session

PERSON = 4
"""Records of a person in the workloads by person."""


class Timed(Prepared):
    """A workload as a session takes it."""

    @property
    def key(self) -> str:
        """What random streams are keyed by: the peers draw the same batches."""
        return KEY


def sordino(task: Task, device: str = "cpu", records: Records | None = None) -> Callable[[], None]:
    """One private round through the simulation loop, with a fresh ledger each time.

    ``records`` where they are not the task's own tensors (a mapped file).
    """
    where = torch.device(device)
    model = copy.deepcopy(task.model).to(where)
    engine = gradients.build(model, "cross-entropy")
    records = records or Records(task.x.to(where), task.y.to(where))
    return _rounds(task, model, engine, records, [task.own(i) for i in range(task.work.clients)], None)


def _rounds(
    task: Task,
    model: nn.Module,
    engine: gradients.Engine,
    records: Records,
    train: list[NDArray[np.int64]],
    units: NDArray[np.int64] | None,
) -> Callable[[], None]:
    nothing, where = [np.arange(0)] * len(train), records.y.device
    names, valid = [c.name for c in task.plan.clients], np.ones(len(records.y), bool)
    x, y = np.broadcast_to(np.float32(0), task.x.shape), np.zeros(len(valid), np.int64)  # the session is given records
    clients = Federation("bench", x, y, valid, names, train, nothing, None, "classification", 10, units=units)
    ready = Timed(clients, model, engine, task.plan, {"loss": "cross-entropy"}, 0, model)

    def run() -> None:
        with tempfile.TemporaryDirectory(prefix="sordino-bench-") as folder, Ledger(Path(folder) / "l.db") as book:
            next(Session(ready, book, KEY, where, records=records).rounds())

    return run


def persons(task: Task) -> Callable[[], None]:
    """The same round with persons of four records as units: a quarter as many a batch, and as many records."""
    plan = plan_of(task.work, trained_in(task.model), PERSON)
    engine = gradients.build(task.model, "cross-entropy", copies=PERSON)
    units = np.arange(len(task.y)).reshape(-1, PERSON)
    records = Records(task.x, task.y, members=torch.from_numpy(units))
    train = [task.own(i)[::PERSON] // PERSON for i in range(task.work.clients)]
    return _rounds(Task(task.work, task.x, task.y, task.model, plan, []), task.model, engine, records, train, units)
