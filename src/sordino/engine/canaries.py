"""Auditing a method as it really runs: one client whose records are canaries, the real turn, gate and ledger.

Canary i's gradient is a large multiple of e_i, so that the gate clips it to C·e_i: the worst record there is. Canaries
that lose their coin toss are null rows, which is exactly the neighbour that zero-out adjacency speaks of. A canary's
score is how far the weights moved along it, everything the server sees of it.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sordino.client import gradients
from sordino.client.rows import Records
from sordino.client.turn import Work
from sordino.engine.checkpoint import Checkpoint
from sordino.engine.evaluate import Observer
from sordino.engine.simulate import Setup, one_round
from sordino.errors import BadInput
from sordino.methods import Method, Population, Training, get, make_plan
from sordino.methods import Plan as RunPlan
from sordino.privacy.auditing import Verdict, audit
from sordino.privacy.gate import Gate
from sordino.privacy.generators import Keyed
from sordino.privacy.ledger import Ledger, Plan
from sordino.privacy.types import Budget

LARGE = 1e4
"""The canaries' targets: so far away that every gradient is clipped, in every step."""


class Lookup(nn.Module):
    """One weight a record: record i's output is w_i, so its gradient is a multiple of e_i."""

    def __init__(self, records: int) -> None:
        super().__init__()
        self.table = nn.Embedding(records, 1)
        nn.init.zeros_(self.table.weight)

    def forward(self, x: Tensor) -> Tensor:
        """w at the record's own place."""
        out: Tensor = self.table(x)
        return out


@dataclass(frozen=True)
class Trial:
    """How a method is audited: its budget and the shape of the run."""

    epsilon: float = 2.0
    delta: float = 1e-5
    rate: float = 1.0
    rounds: int = 2
    steps: int = 2
    canaries: int = 100_000


def audit_method(method: str | Method, trial: Trial = Trial(), seed: int = 0) -> Verdict:  # noqa: B008
    """Audit a private method on canaries, against what its own ledger says it spent."""
    chosen = get(method)
    if not chosen.private:
        raise BadInput(f"{chosen.name} is NOT PRIVATE: there is no claim to audit")
    spent: list[float] = []

    def mechanism(included: NDArray[np.bool_]) -> NDArray[np.float64]:
        with tempfile.TemporaryDirectory(prefix="sordino-audit-") as folder, Ledger(Path(folder) / "l.db") as book:
            moved = _run(plan, included, book, seed)
            spent.append(book.epsilon()["canaries"])
        return moved

    training = Training(rounds=trial.rounds, rate=trial.rate, steps=trial.steps, lr=1.0, clip=1.0)
    budget = Budget(trial.epsilon, trial.delta)
    population = Population(("canaries",), np.array([trial.canaries]), (budget,))
    plan = make_plan(chosen, training, population, trial.canaries, seed)
    verdict = audit(mechanism, plan.clients[0].epsilon, trial.delta, trial.canaries, seed)
    return replace(verdict, claimed=spent[0])


def _run(plan: RunPlan, included: NDArray[np.bool_], book: Ledger, seed: int) -> NDArray[np.float64]:
    client, count = plan.clients[0], len(included)
    book.open_account(client.name, client.budget, simulated=True)
    book.declare([Plan(client.name, "audit", *client.declaration())])
    model = Lookup(count)
    engine = gradients.build(model, "half-squared-error")
    records = Records(torch.arange(count), torch.full((count,), -LARGE), torch.from_numpy(included))
    also = tuple(one.question for one in plan.method.ask if one.batch == "step")
    work = Work(engine, plan.method.clip, plan.method.local, also, most=count)
    observer = Observer(engine, lambda out, y: out, records, [np.arange(0)], np.array([count]), None, False)
    setup = Setup(plan, work, Gate(book, Keyed(f"audit {seed}"), "audit"), records, [np.arange(count)], observer)
    start = engine.flatten(model)
    state = Checkpoint(0, start, start)
    for number in range(1, plan.training.rounds + 1):
        one_round(setup, state, number, np.array([number - 1]))
    return (start - state.weights).double().numpy()
