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
from sordino.client.turn import Work
from sordino.engine.checkpoint import Checkpoint
from sordino.engine.evaluate import Observer
from sordino.engine.simulate import Setup, one_round
from sordino.privacy.gate import Gate
from sordino.privacy.generators import Keyed
from sordino.privacy.ledger import Ledger
from sordino.study.run import open_accounts


def sordino(task: Task, device: str = "cpu", records: Records | None = None) -> Callable[[], None]:
    """One private round through the simulation loop, with a fresh ledger each time.

    ``records`` where they are not the task's own tensors (a mapped file).
    """
    where = torch.device(device)
    engine = gradients.build(copy.deepcopy(task.model).to(where), "cross-entropy")
    method = task.plan.method
    work = Work(engine, method.clip, method.local, stack=where.type == "cuda")
    records = records or Records(task.x.to(where), task.y.to(where))
    train = [task.own(i) for i in range(task.work.clients)]
    observer = Observer(engine, torch.nn.functional.cross_entropy, records, [np.arange(0)], np.ones(1, int), None, True)
    start = engine.flatten(task.model).to(where)
    nobody = np.zeros(task.work.clients, dtype=np.int64)

    def run() -> None:
        with tempfile.TemporaryDirectory(prefix="sordino-bench-") as folder, Ledger(Path(folder) / "l.db") as book:
            open_accounts(book, task.plan, "bench")
            gate = Gate(book, Keyed(KEY), "bench")
            one_round(Setup(task.plan, work, gate, records, train, observer), Checkpoint(0, start, start), 1, nobody)

    return run
