"""Simulation: all clients on one machine. A round is: ask → choose → charge → turns → combine → step → look."""

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
from sordino.client.turn import Upload, Work, answer, take_turn
from sordino.engine.checkpoint import Checkpoint
from sordino.engine.evaluate import Observer
from sordino.errors import SordinoError
from sordino.methods.asking import Ask
from sordino.methods.plan import Plan
from sordino.privacy.gate import Gate, Permit, Terms, fingerprint
from sordino.privacy.generators import Turn
from sordino.privacy.types import Release
from sordino.server.facts import Facts
from sordino.server.select import Round, choose

CHUNK_BYTES = 1 << 26
"""How much a chunk's weight matrix may take: small enough to stay near the cache, large enough to share passes."""

CHUNK_RECORDS = 2048
"""How many records of rows with equal weights go through one pass on a CPU."""

Index = NDArray[np.int64]


@dataclass(frozen=True)
class Setup:
    """A simulation, ready to go: who, what, with which data."""

    plan: Plan
    work: Work
    gate: Gate
    records: Records
    train: list[Index]
    observer: Observer
    payable: dict[str, int] = field(default_factory=dict)
    """How many turns each client's ledger can pay; a client that is not listed pays all of them."""
    spending: Callable[[Index], dict[str, float] | None] = lambda turns: None
    """From the turns each client has taken: what to show of the ε spent so far."""

    @property
    def turns_left(self) -> Index:
        """The most turns each client can take in this run."""
        most = [self.payable.get(c.name, 1 << 40) for c in self.plan.clients]
        if self.plan.schedule.caps is not None:  # the whole run was declared as one turn: pay all of it or nothing
            most = [1 << 40 if one else 0 for one in most]
        return np.array(most, dtype=np.int64)


def simulate(setup: Setup, state: Checkpoint) -> Iterator[Checkpoint]:
    """Run the rounds that are left; yields the state after each. Nothing is lost when the caller stops asking."""
    plan = setup.plan
    taken = np.zeros(len(plan.clients), dtype=np.int64)
    for record in state.history:
        np.add.at(taken, [_index(plan)[name] for name in record["participants"]], 1)
    for number in range(state.round + 1, plan.schedule.rounds + 1):
        started = time.perf_counter()
        record, asked = one_round(setup, state, number, taken)
        np.add.at(taken, asked, 1)
        state.round = number
        if number % plan.training.evaluate == 0 or number == plan.schedule.rounds:
            record |= setup.observer.look(state.shown)
            record["spent_epsilon"] = setup.spending(taken)
        else:
            record |= {"accuracy": None, "loss": None, "psi": None}
        state.seconds += time.perf_counter() - started
        state.history.append(record)
        yield state


def one_round(setup: Setup, state: Checkpoint, number: int, taken: Index) -> tuple[dict[str, Any], Index]:
    """One round. Changes ``state``; returns what to show of it, and who took part."""
    plan = setup.plan
    called = _who_can_pay(setup, plan.schedule.round(number), taken)
    record: dict[str, Any] = {"round": number, "participants": []}
    if len(called.clients) == 0:
        return record | {"note": "no client could pay for this round"}, called.clients
    own = [one for one in plan.method.ask if one.batch == "own"]
    heard = {}
    for place, ask in enumerate(own):
        heard[ask.question.what] = _ask(setup, state, number, called, ask, place)
    if plan.schedule.caps is not None:
        losses = heard[own[0].question.what].double().cpu().numpy()
        kept = np.sort(choose(called.clients, losses, plan.schedule.select, taken, plan.schedule.caps))
        called = Round(kept, np.zeros_like(kept), np.ones(len(kept)))
    uploads = _turns(setup, state, number, called)
    facts = _facts(setup, called, number, {**heard, **uploads})
    for ask in plan.method.ask:
        if ask.batch == "step":
            state.server = ask.conclude(uploads[ask.question.what][:, 0], facts, state.server)
    outcome = plan.method.aggregate(uploads["update"], facts, state.server)
    stepped = plan.method.server(state.weights, outcome.delta * plan.training.server_lr, outcome.state)
    state.weights, state.shown, state.server = stepped
    if not torch.isfinite(state.weights).all():
        raise SordinoError(
            f"the model is no longer finite after round {number}: training diverged; use a smaller training.lr"
        )
    record["participants"] = [plan.clients[i].name for i in called.clients]
    if outcome.weights is not None:
        counted = np.bincount(called.clients, outcome.weights, minlength=len(plan.clients))
        record["weights"] = {plan.clients[i].name: float(counted[i]) for i in dict.fromkeys(called.clients.tolist())}
    return record | ({"diagnostics": outcome.diagnostics} if outcome.diagnostics else {}), called.clients


def broadcast(setup: Setup, state: Checkpoint) -> dict[str, Any]:
    """What the server sends beside the weights: settings, and whatever the method's state holds under ``public/``."""
    training = setup.plan.training
    public = {"lr": training.lr, "clip": training.clip if setup.plan.method.private else float("inf")}
    kept = {k.removeprefix("public/"): v for k, v in state.server.items() if k.startswith("public/")}
    return public | kept


def _ask(setup: Setup, state: Checkpoint, number: int, called: Round, ask: Ask, place: int) -> Tensor:
    """Ask everyone called, charge first, and let the server conclude; returns the answers, one a row."""
    plan, public = setup.plan, broadcast(setup, state)
    terms = [plan.clients[i].asks[place] for i in called.clients]
    permit = _grant(setup, state, number, called, terms, public)
    start = Release.public(state.weights, "weights from the server")
    answers = torch.empty(len(terms), device=state.weights.device)
    for rows in _chunks(setup, called, terms):
        part = permit.split(rows)
        drawn = _rows(setup, called.clients[rows], part)
        answers[rows] = answer(setup.work, ask.question, drawn, start, public, part, setup.gate).value[:, 0]
    state.server = ask.conclude(answers, _facts(setup, called, number, {}), state.server)
    return answers


def _turns(setup: Setup, state: Checkpoint, number: int, called: Round) -> dict[str, Tensor]:
    """Everyone's turn, chunk by chunk; the uploads by name, a row each."""
    plan, public = setup.plan, broadcast(setup, state)
    terms = [plan.clients[i].terms for i in called.clients]
    permit = _grant(setup, state, number, called, terms, public)
    start = Release.public(state.weights, "weights from the server")
    uploads: dict[str, Tensor] = {}
    for rows in _chunks(setup, called, terms):
        upload = _chunk(setup, state, called.clients[rows], permit.split(rows), start, public)
        for name, release in upload.parts.items():
            if name not in uploads:
                uploads[name] = release.value.new_empty(len(terms), *release.value.shape[1:])
            uploads[name][rows] = release.value
    return uploads


def _grant(
    setup: Setup, state: Checkpoint, number: int, called: Round, terms: list[Terms], public: dict[str, Any]
) -> Permit:
    names = [setup.plan.clients[i].name for i in called.clients]
    turns = [Turn(name, number, int(copy)) for name, copy in zip(names, called.copies)]
    request = fingerprint(state.weights, number, *(part for item in sorted(public.items()) for part in item))
    return setup.gate.grant(turns, terms, request)


def _rows(setup: Setup, clients: Index, permit: Permit) -> Rows:
    """Draw the batches of some rows."""
    batches = []
    for turn, terms, i in zip(permit.turns, permit.terms, clients):
        records = setup.plan.clients[i].records
        drawn = setup.gate.source.batches(turn, terms.what, terms.sampling, records, terms.count)
        batches.append([setup.train[i][one] for one in drawn])
    return Rows(permit.turns, batches, setup.records)


def _chunk(
    setup: Setup, state: Checkpoint, clients: Index, permit: Permit, start: Release, public: dict[str, Any]
) -> Upload:
    local, count = setup.work.local, len(setup.plan.clients)
    where = torch.from_numpy(clients)
    kept = {name: _client_state(state, name, count)[where].to(state.weights.device) for name in local.state}
    before = Release.public(kept, "state from earlier releases")
    rows = _rows(setup, clients, permit)
    try:
        upload, after = take_turn(setup.work, rows, start, before, public, permit, setup.gate)
    except RuntimeError as error:
        names = ", ".join(sorted({t.client for t in permit.turns}))
        raise SordinoError(f"round {permit.turns[0].round}, local steps of {names}: {error}") from error
    for name in local.state:
        _client_state(state, name, count)[where] = after.value[name].to("cpu")
    return upload


def _client_state(state: Checkpoint, name: str, clients: int) -> Tensor:
    if name not in state.clients:
        state.clients[name] = torch.zeros(clients, len(state.weights))
    return state.clients[name]


def _who_can_pay(setup: Setup, called: Round, taken: Index) -> Round:
    """Of the scheduled participations, those whose client can still pay for a turn."""
    left = setup.turns_left - taken
    keep = called.copies < left[called.clients]
    return Round(called.clients[keep], called.copies[keep], called.weights[keep])


def _index(plan: Plan) -> dict[str, int]:
    return {client.name: i for i, client in enumerate(plan.clients)}


def _chunks(setup: Setup, called: Round, terms: list[Terms]) -> Iterator[slice]:
    """Consecutive rows with equal step counts, as many as fit; one at a time where rows differ in their weights."""
    work = setup.work
    width = max(1, CHUNK_BYTES // (4 * work.engine.dimension))
    first = 0
    while first < len(terms):
        count = terms[first].count
        most = width if work.stack else max(1, min(width, int(CHUNK_RECORDS // max(1.0, terms[first].divisor))))
        last = first + 1
        while (work.stack or count == 1) and last < min(len(terms), first + most) and terms[last].count == count:
            last += 1
        yield slice(first, last)
        first = last


def _facts(setup: Setup, called: Round, number: int, heard: dict[str, Tensor]) -> Facts:
    plan = setup.plan
    clients = [plan.clients[i] for i in called.clients]
    variances = plan.variances()[called.clients]
    known = {"oracle_variances": variances, "lr": plan.training.lr, "clients": len(plan.clients)}
    return Facts(
        clients=called.clients,
        sizes=np.array([c.records for c in clients], dtype=np.float64),
        epsilons=np.array([c.budget.epsilon for c in clients]),
        batches=np.array([c.terms.divisor for c in clients]),
        noises=np.array([c.noise for c in clients]),
        steps=np.array([c.terms.count for c in clients], dtype=np.float64),
        variances=variances,
        selection=called.weights,
        layout=tuple(setup.work.engine.layout),
        round=number,
        extra={**known, **{name: value for name, value in heard.items() if name != "update"}},
    )
