"""Auditing a method as it really runs: one client whose records are canaries, the real turn, gate and ledger.

Canary i's gradient is a large multiple of e_i, so that the gate clips it to C·e_i: the worst record there is. Canaries
that lose their coin toss are null rows, which is exactly the neighbour that zero-out adjacency speaks of. A canary's
score is how far the weights moved along it, everything the server sees of it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
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
from sordino.models import isolated
from sordino.privacy.auditing import Verdict, audit
from sordino.privacy.gate import Batch, Gate, Permit
from sordino.privacy.generators import Keyed
from sordino.privacy.ledger import Ledger, Plan
from sordino.privacy.types import Budget, Release

LARGE = 1e4
"""The canaries' targets: so far away that every gradient is clipped, in every step."""


@isolated
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


def audit_releases(method: str | Method, trial: Trial = Trial(canaries=20_000), seed: int = 0) -> Verdict:  # noqa: B008
    """Audit everything a method releases, questions too: every canary is a client of its own, with one record.

    A canary's score is the log-likelihood ratio of all its releases, gradients and answers, under both hypotheses: the
    best there is, so a question that is charged too little, or not at all, shows.
    """
    chosen = get(method)
    if not chosen.private:
        raise BadInput(f"{chosen.name} is NOT PRIVATE: there is no claim to audit")
    names = tuple(f"canary {i}" for i in range(trial.canaries))
    budget = Budget(trial.epsilon, trial.delta)
    training = Training(rounds=trial.rounds, rate=trial.rate, steps=trial.steps, lr=0.1, clip=1.0)
    population = Population(names, np.ones(trial.canaries, dtype=np.int64), (budget,) * trial.canaries)
    plan = make_plan(chosen, training, population, 1, seed)
    spent: list[float] = []

    def mechanism(included: NDArray[np.bool_]) -> NDArray[np.float64]:
        where = Path(folder) / "l.db"
        with Ledger(where, durable=False) as book:
            gate = Witness(book, Keyed(f"audit {seed}"), "audit")
            _run_alone(plan, included, gate, book)
            spent.append(max(book.epsilon().values()))
        return np.array([gate.scores.get(name, 0.0) for name in names])

    with tempfile.TemporaryDirectory(prefix="sordino-audit-") as folder:
        verdict = audit(mechanism, plan.clients[0].epsilon, trial.delta, trial.canaries, seed)
    return replace(verdict, claimed=spent[0])


class Witness(Gate):
    """A gate that also keeps, for every client, the log-likelihood ratio of what it let through.

    For one batch with parts x_p = (value × divisor) of bound C_p and noise z_p S C_p, drawn at rate q:
    log(1 − q + q exp Σ_p (x_p/(z_p²S²C_p) − 1/(2z_p²S²))).
    """

    def __init__(self, ledger: Ledger, source: Keyed, run: str) -> None:
        super().__init__(ledger, source, run)
        self.scores: dict[str, float] = {}

    def release(
        self, permit: Permit, step: int, pieces: Batch, bounds: Mapping[str, Tensor], width: int
    ) -> dict[str, Release]:
        """Release, and listen."""
        found = super().release(permit, step, pieces, bounds, width)
        values = {part: one.value[:, 0].double().tolist() for part, one in found.items()}
        limits = {part: one.double().tolist() for part, one in bounds.items()}
        for row, (turn, terms) in enumerate(zip(permit.turns, permit.terms)):
            ratio = 0.0
            for part in found:
                noise = (terms.noise(part) * terms.adjacency.sensitivity) ** 2
                ratio += values[part][row] * terms.divisor / (noise * limits[part][row]) - 1 / (2 * noise)
            rate = terms.sampling.rate
            score = float(np.logaddexp(np.log1p(-rate), np.log(rate) + ratio)) if rate < 1 else ratio
            self.scores[turn.client] = self.scores.get(turn.client, 0.0) + score
        return found


def _run_alone(plan: RunPlan, included: NDArray[np.bool_], gate: Gate, book: Ledger) -> None:
    """The run with one record a client; a client that lost its coin toss has a null row."""
    count = len(included)
    book.open_accounts({c.name: c.budget for c in plan.clients}, simulated=True)
    taking = [c for c in plan.clients if c.turns > 0 or any(c.queries)]
    book.declare([Plan(c.name, "audit", *c.declaration()) for c in taking])
    model = Lookup(1)
    engine = gradients.build(model, "half-squared-error")
    zeros = torch.zeros(count, dtype=torch.int64)
    records = Records(zeros, torch.full((count,), -LARGE), torch.from_numpy(included))
    also = tuple(one.question for one in plan.method.ask if one.batch == "step")
    work = Work(engine, plan.method.clip, plan.method.local, also, stack=True)
    nothing, sizes = [np.arange(0)] * count, np.ones(count, dtype=np.int64)
    observer = Observer(engine, lambda out, y: out, records, nothing, sizes, None, False)
    setup = Setup(plan, work, gate, records, list(np.arange(count)[:, None]), observer)
    start = engine.flatten(model)
    state, taken = Checkpoint(0, start, start), np.zeros(count, dtype=np.int64)
    for number in range(1, plan.training.rounds + 1):
        _, asked = one_round(setup, state, number, taken)
        np.add.at(taken, asked, 1)
