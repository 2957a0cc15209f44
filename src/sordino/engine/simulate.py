"""Simulation: all clients on one machine. A round is: charge → turns, chunk by chunk → combine → step → look."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino.client.rows import Records, Rows
from sordino.client.turn import Work, take_turn
from sordino.engine.checkpoint import Checkpoint
from sordino.engine.evaluate import Observer
from sordino.errors import SordinoError
from sordino.methods.plan import Plan
from sordino.privacy.gate import Gate, Permit, fingerprint
from sordino.privacy.generators import Turn
from sordino.privacy.types import Release
from sordino.server.facts import Facts

CHUNK_BYTES = 1 << 26
"""How much a chunk's weight matrix may take: small enough to stay near the cache, large enough to share passes."""


@dataclass(frozen=True)
class Setup:
    """A simulation, ready to go: who, what, with which data."""

    plan: Plan
    work: Work
    gate: Gate
    records: Records
    train: list[NDArray[np.int64]]
    observer: Observer
    payable: dict[str, int] = field(default_factory=dict)
    """How many turns each client's ledger can pay; a client that is not listed pays all of them."""
    spending: Callable[[NDArray[np.int64]], dict[str, float] | None] = lambda turns: None
    """From the turns each client has taken: what to show of the ε spent so far."""


def simulate(setup: Setup, state: Checkpoint) -> Iterator[Checkpoint]:
    """Run the rounds that are left; yields the state after each. Nothing is lost when the caller stops asking."""
    plan = setup.plan
    turns_taken = np.zeros(len(plan.clients), dtype=np.int64)
    for number, chosen in enumerate(plan.schedule, start=1):
        asked = _who_can_pay(setup, chosen, turns_taken)
        np.add.at(turns_taken, asked, 1)
        if number <= state.round:
            continue
        started = time.perf_counter()
        record: dict[str, Any] = {"round": number}
        record |= one_round(setup, state, number, asked)
        state.round = number
        if number % plan.training.evaluate == 0 or number == len(plan.schedule):
            record |= setup.observer.look(state.shown)
            record["spent_epsilon"] = setup.spending(turns_taken)
        else:
            record |= {"accuracy": None, "loss": None, "psi": None}
        state.seconds += time.perf_counter() - started
        state.history.append(record)
        yield state


def one_round(setup: Setup, state: Checkpoint, number: int, asked: NDArray[np.int64]) -> dict[str, Any]:
    """Charge, take turns, combine, step. Changes ``state``; returns what to show of the round."""
    plan = setup.plan
    if len(asked) == 0:
        return {"participants": [], "note": "no client could pay for this round"}
    turns = _turns(plan, asked, number)
    public = {"lr": plan.training.lr, "clip": plan.training.clip if plan.method.private else float("inf")}
    request = fingerprint(state.weights, sorted(public.items()), number)
    permit = setup.gate.grant(turns, [plan.clients[i].terms for i in asked], request)
    updates = torch.empty(len(asked), setup.work.engine.dimension, device=state.weights.device)
    start = Release.public(state.weights, "weights from the server")
    for rows in _chunks(setup, asked):
        _chunk(setup, state, asked[rows], rows, permit.split(rows), start, public, updates)
    outcome = plan.method.aggregate(updates, _facts(setup, asked, number), state.server)
    stepped = plan.method.server(state.weights, outcome.delta * plan.training.server_lr, outcome.state)
    state.weights, state.shown, state.server = stepped
    if not torch.isfinite(state.weights).all():
        raise SordinoError(
            f"the model is no longer finite after round {number}: training diverged; use a smaller training.lr"
        )
    record: dict[str, Any] = {"participants": [plan.clients[i].name for i in asked]}
    if outcome.weights is not None:
        counted = np.bincount(asked, outcome.weights, minlength=len(plan.clients))
        record["weights"] = {plan.clients[i].name: float(counted[i]) for i in dict.fromkeys(asked.tolist())}
    return record | ({"diagnostics": outcome.diagnostics} if outcome.diagnostics else {})


def _chunk(
    setup: Setup,
    state: Checkpoint,
    clients: NDArray[np.int64],
    rows: slice,
    permit: Permit,
    start: Release,
    public: dict[str, Any],
    updates: Tensor,
) -> None:
    plan, local = setup.plan, setup.work.local
    batches = []
    for turn, i in zip(permit.turns, clients):
        terms = plan.clients[i].terms
        drawn = setup.gate.source.batches(turn, terms.what, terms.sampling, plan.clients[i].records, terms.count)
        batches.append([setup.train[i][one] for one in drawn])
    kept = {name: _client_state(state, name, len(plan.clients))[torch.from_numpy(clients)] for name in local.state}
    try:
        upload, after = take_turn(
            setup.work,
            Rows(permit.turns, batches, setup.records),
            start,
            Release.public(kept, "state from earlier releases"),
            public,
            permit,
            setup.gate,
        )
    except RuntimeError as error:
        names = ", ".join(sorted({t.client for t in permit.turns}))
        raise SordinoError(f"round {permit.turns[0].round}, local steps of {names}: {error}") from error
    updates[rows] = upload.parts["update"].value
    for name in local.state:
        _client_state(state, name, len(plan.clients))[torch.from_numpy(clients)] = after.value[name]


def _client_state(state: Checkpoint, name: str, clients: int) -> Tensor:
    if name not in state.clients:
        state.clients[name] = state.weights.new_zeros(clients, len(state.weights))
    return state.clients[name]


def _who_can_pay(setup: Setup, chosen: NDArray[np.int64], taken: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of the scheduled participations, those whose client can still pay for a turn."""
    left = {i: setup.payable.get(setup.plan.clients[i].name, 1 << 62) - int(taken[i]) for i in set(chosen.tolist())}
    asked = []
    for i in chosen.tolist():
        if left[i] > 0:
            asked.append(i)
            left[i] -= 1
    return np.array(asked, dtype=np.int64)


def _turns(plan: Plan, asked: NDArray[np.int64], number: int) -> list[Turn]:
    copies: dict[int, int] = {}
    turns = []
    for i in asked.tolist():
        copies[i] = copies.get(i, -1) + 1
        turns.append(Turn(plan.clients[i].name, number, copies[i]))
    return turns


def _chunks(setup: Setup, asked: NDArray[np.int64]) -> Iterator[slice]:
    """Consecutive rows with equal step counts, as many as fit; one at a time where rows differ in their weights."""
    plan, work = setup.plan, setup.work
    width = max(1, CHUNK_BYTES // (4 * work.engine.dimension))
    first = 0
    while first < len(asked):
        terms = plan.clients[asked[first]].terms
        most = width if work.stack else max(1, min(width, int(2048 // max(1.0, terms.divisor))))
        last = first + 1
        if work.stack or terms.count == 1:
            while (
                last < len(asked)
                and last - first < most
                and plan.clients[asked[last]].terms.count == terms.count
            ):
                last += 1
        yield slice(first, last)
        first = last


def _facts(setup: Setup, asked: NDArray[np.int64], number: int) -> Facts:
    plan = setup.plan
    clients = [plan.clients[i] for i in asked]
    variances = plan.variances()[asked]
    return Facts(
        clients=asked,
        sizes=np.array([c.records for c in clients], dtype=np.float64),
        epsilons=np.array([c.budget.epsilon for c in clients]),
        batches=np.array([c.terms.divisor for c in clients]),
        noises=np.array([c.noise for c in clients]),
        steps=np.array([c.terms.count for c in clients], dtype=np.float64),
        variances=variances,
        selection=np.ones(len(clients)),
        layout=tuple(setup.work.engine.layout),
        round=number,
        extra={"oracle_variances": variances, "lr": plan.training.lr},
    )
