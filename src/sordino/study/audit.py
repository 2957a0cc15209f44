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
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sordino.client import gradients
from sordino.client.local import sgd
from sordino.data import Federation
from sordino.data.units import check_unit_records
from sordino.errors import BadInput
from sordino.methods import Method, Plan, Population, Training, get, make_plan
from sordino.models import isolated
from sordino.privacy.auditing import Verdict, audit
from sordino.privacy.gate import Batch, Gate, Permit
from sordino.privacy.generators import Keyed
from sordino.privacy.ledger import Ledger
from sordino.privacy.types import Budget, Release
from sordino.server.rules import data_weighted
from sordino.study.prepared import Prepared
from sordino.study.session import Session

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
    """How a method is audited: its budget and the shape of the run.

    ``unit_records``: how many records a canary has; above 1 it is a person, who is promised as much as a record was.
    """

    epsilon: float = 2.0
    delta: float = 1e-5
    rate: float = 1.0
    rounds: int = 2
    steps: int = 2
    canaries: int = 100_000
    unit_records: int = 1

    def __post_init__(self) -> None:
        check_unit_records(self.unit_records, "unit_records")


@dataclass(frozen=True)
class Canaries(Prepared):
    """A run whose records are canaries, ready to train."""

    @property
    def key(self) -> str:
        """What the audit's random streams are keyed by."""
        return f"audit {self.seed}"


def _canaries(
    plan: Plan,
    model: nn.Module,
    x: NDArray[Any],
    included: NDArray[np.bool_],
    seed: int,
    train: list[NDArray[np.int64]],
    unit_records: int = 1,
) -> Canaries:
    """A run of ``plan`` in which all records of a canary that lost its coin toss are null rows."""
    names, nothing = [c.name for c in plan.clients], [np.arange(0)] * len(train)
    units = None if unit_records == 1 else np.arange(len(x) * unit_records).reshape(len(x), -1)
    x, included = np.repeat(x, unit_records), np.repeat(included, unit_records)
    targets = np.full(len(x), -LARGE, dtype=np.float32)
    clients = Federation("canaries", x, targets, included, names, train, nothing, None, "regression", None, units=units)
    engine = gradients.build(model, "half-squared-error", copies=unit_records)
    return Canaries(clients, model, engine, plan, {"loss": "half-squared-error"}, seed, model)


def _audited(ready: Canaries, book: Ledger, gate: type[Gate] = Gate, **work: Any) -> Session:
    """Train all rounds. ``work``: how rows are taken; nothing of it changes what is released."""
    session = Session(ready, book, "audit", torch.device("cpu"), gate=gate)
    session.setup = replace(session.setup, work=replace(session.setup.work, **work), spending=lambda turns: None)
    for _ in session.rounds():
        pass
    return session


def _planned(
    method: str | Method, trial: Trial, names: tuple[str, ...], sizes: NDArray[np.int64], lr: float, seed: int
) -> Plan:
    chosen = get(method)
    if not chosen.private:
        raise BadInput(f"{chosen.name} is NOT PRIVATE: there is no claim to audit")
    if chosen.local.trains is not None:  # canaries have gradients and no moments, and both pass the same gate
        chosen = replace(chosen, local=sgd(), aggregate=data_weighted())
    training = Training(rounds=trial.rounds, rate=trial.rate, steps=trial.steps, lr=lr, clip=1.0, evaluate=trial.rounds)
    population = Population(names, sizes, (Budget(trial.epsilon, trial.delta),) * len(names))
    return make_plan(chosen, training, population, int(sizes[0]), seed)


def audit_method(method: str | Method, trial: Trial = Trial(), seed: int = 0) -> Verdict:  # noqa: B008
    """Audit a private method on canaries, against what its own ledger says it spent."""
    count = trial.canaries
    plan = _planned(method, trial, ("canaries",), np.array([count]), 1.0, seed)
    spent: list[float] = []

    def mechanism(included: NDArray[np.bool_]) -> NDArray[np.float64]:
        model = Lookup(count)
        ready = _canaries(plan, model, np.arange(count), included, seed, [np.arange(count)], trial.unit_records)
        with tempfile.TemporaryDirectory(prefix="sordino-audit-") as folder, Ledger(Path(folder) / "l.db") as book:
            session = _audited(ready, book, most=count)
            spent.append(book.epsilon()["canaries"])
        return (ready.engine.flatten(model) - session.state.weights).double().numpy()

    verdict = audit(mechanism, plan.clients[0].epsilon, trial.delta, count, seed)
    return replace(verdict, claimed=spent[0])


def audit_releases(method: str | Method, trial: Trial = Trial(canaries=20_000), seed: int = 0) -> Verdict:  # noqa: B008
    """Audit everything a method releases, questions too: every canary is a client of its own, with one record.

    A canary's score is the log-likelihood ratio of all its releases, gradients and answers, under both hypotheses: the
    best there is, so a question that is charged too little, or not at all, shows.
    """
    count = trial.canaries
    names = tuple(f"canary {i}" for i in range(count))
    plan = _planned(method, trial, names, np.ones(count, dtype=np.int64), 0.1, seed)
    spent: list[float] = []

    def mechanism(included: NDArray[np.bool_]) -> NDArray[np.float64]:
        x = np.zeros(count, dtype=np.int64)
        each = list(np.arange(count)[:, None])
        ready = _canaries(plan, Lookup(1), x, included, seed, each, trial.unit_records)
        with Ledger(Path(folder) / "l.db", durable=False) as book:
            session = _audited(ready, book, Witness, stack=True)
            spent.append(max(book.epsilon().values()))
        scores: dict[str, float] = session.gate.scores  # type: ignore[attr-defined]
        return np.array([scores.get(name, 0.0) for name in names])

    with tempfile.TemporaryDirectory(prefix="sordino-audit-") as folder:
        verdict = audit(mechanism, plan.clients[0].epsilon, trial.delta, count, seed)
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
        """Release as always, and keep what the attacker learns from it: the log-likelihood ratio of every canary."""
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
