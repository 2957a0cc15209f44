"""sordino's own round: sampling, ledger, gate, noise, aggregation, all included."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from bench.workloads import KEY, Task
from sordino.client import gradients
from sordino.client.rows import Records
from sordino.data import Federation
from sordino.privacy.ledger import Ledger
from sordino.study.prepared import Prepared
from sordino.study.session import Session


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
    train = [task.own(i) for i in range(task.work.clients)]
    nothing = [np.arange(0)] * len(train)
    names, valid = [c.name for c in task.plan.clients], np.ones(len(records.y), bool)
    x, y = np.broadcast_to(np.float32(0), task.x.shape), np.zeros(len(valid), np.int64)  # the session is given records
    clients = Federation("bench", x, y, valid, names, train, nothing, None, "classification", 10)
    ready = Timed(clients, model, engine, task.plan, {"loss": "cross-entropy"}, 0, model)

    def run() -> None:
        with tempfile.TemporaryDirectory(prefix="sordino-bench-") as folder, Ledger(Path(folder) / "l.db") as book:
            next(Session(ready, book, KEY, where, records=records).rounds())

    return run
