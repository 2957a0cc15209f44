"""Simulation: all clients on one machine. A round is: ask → choose → charge → turns → combine → step → look."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino.client.clip import per_row
from sordino.client.rows import Records, Rows
from sordino.client.turn import Upload, Work, answer, take_turn
from sordino.engine.checkpoint import Checkpoint
from sordino.engine.clipping import watch_clipping
from sordino.engine.evaluate import Observer
from sordino.engine.keeping import Left, keep, kept_rows
from sordino.engine.mapped import Table
from sordino.engine.sharded import Shard
from sordino.engine.telling import told
from sordino.engine.weighing import weighed
from sordino.errors import SordinoError
from sordino.methods.asking import Ask
from sordino.methods.plan import Plan
from sordino.privacy.gate import Gate, Permit, Terms, fingerprint
from sordino.privacy.generators import Turn
from sordino.privacy.types import Release
from sordino.server.facts import Facts
from sordino.server.running import Running
from sordino.server.select import Round, choose

CHUNK_BYTES = 1 << 26
"""How much a chunk's weight matrix may take: small enough to stay near the cache, large enough to share passes."""

CHUNK_RECORDS = 512
"""How many records of rows with equal weights go through one pass on a CPU."""

STACK_BYTES = 1 << 30
STACK_RECORDS = 1 << 16
"""The same for rows stacked on a GPU, whatever their weights."""

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
    key: str = ""
    """The run's own key where it shares a source of randomness with other runs."""
    payable: dict[str, int] = field(default_factory=dict)
    """How many turns each client's ledger can pay; a client that is not listed pays all of them."""
    spending: Callable[[Index], dict[str, float] | None] = lambda turns: None
    """From the turns each client has taken: what to show of the ε spent so far."""
    shard: Shard | None = None
    """This process's share, where several simulate one run together."""

    @property
    def turns_left(self) -> Index:
        """The most turns each client can take in this run."""
        most = [self.payable.get(c.name, 1 << 40) for c in self.plan.clients]
        # Where the whole run was declared as one turn, a client pays all of it or nothing.
        most = [(1 << 40 if one else 0) if c.whole else one for one, c in zip(most, self.plan.clients)]
        return np.array(most, dtype=np.int64)


def simulate(setup: Setup, state: Checkpoint) -> Iterator[Checkpoint]:
    """Run the rounds that are left; yields the state after each. Nothing is lost when the caller stops asking."""
    taken = turns_taken(setup, state)
    for number in range(state.round + 1, setup.plan.schedule.rounds + 1):
        started = time.perf_counter()
        record, asked = one_round(setup, state, number, taken)
        np.add.at(taken, asked, 1)
        look(setup, state, record, taken)
        state.seconds += time.perf_counter() - started
        yield state


def turns_taken(setup: Setup, state: Checkpoint) -> Index:
    """How many turns each client took in the rounds so far."""
    place = {client.name: i for i, client in enumerate(setup.plan.clients)}
    taken = np.zeros(len(place), dtype=np.int64)
    for record in state.history:
        np.add.at(taken, [place[name] for name in record["participants"]], 1)
    return taken


def is_time(plan: Plan, number: int) -> bool:
    """Whether this round is evaluated: every ``training.evaluate`` rounds, and the last."""
    return number % plan.training.evaluate == 0 or number == plan.schedule.rounds


def look(setup: Setup, state: Checkpoint, record: dict[str, Any], taken: Index) -> None:
    """End a round: evaluate when it is time to, and put its record into the history."""
    state.round = record["round"]
    if is_time(setup.plan, state.round):
        record |= setup.observer.look(state.shown)
        record["spent_epsilon"] = None if setup.plan.method.adaptive else setup.spending(taken)
    else:
        record |= {"accuracy": None, "loss": None, "psi": None}
    state.history.append(record)


def one_round(setup: Setup, state: Checkpoint, number: int, taken: Index) -> tuple[dict[str, Any], Index]:
    """One round. Changes ``state``; returns what to show of it, and who took part."""
    opened = open_round(setup, state, number, taken)
    uploads = _turns(setup, state, opened) if len(opened.called.clients) else {}
    return close_round(setup, state, opened, uploads), opened.called.clients


@dataclass(frozen=True)
class Opened:
    """A round whose questions are answered and whose turns are charged: who takes one, and under which broadcast."""

    number: int
    called: Round
    heard: dict[str, Tensor]
    public: dict[str, Any]
    permit: Permit


def open_round(setup: Setup, state: Checkpoint, number: int, taken: Index) -> Opened:
    """Ask, choose, charge. Nobody's turn has begun."""
    plan = setup.plan
    called = _who_can_pay(setup, state, plan.schedule.round(number), taken)
    own = [one for one in plan.method.ask if one.batch == "own"]
    heard = {}
    for place, ask in enumerate(own if len(called.clients) else ()):
        heard[ask.question.what] = _ask(setup, state, number, called, ask, place)
    if plan.schedule.caps is not None and heard:
        losses = heard[own[0].question.what].double().cpu().numpy()
        kept = np.sort(choose(called.clients, losses, plan.schedule.select, taken, plan.schedule.caps))
        called = Round(kept, np.zeros_like(kept), np.ones(len(kept)))
    public = broadcast(setup, state)
    terms = _turn_terms(setup, state, called)
    return Opened(number, called, heard, public, _grant(setup, state, number, called, terms, public))


def close_round(setup: Setup, state: Checkpoint, opened: Opened, uploads: dict[str, Any]) -> dict[str, Any]:
    """Combine the uploads, step, and say what to show of the round."""
    plan, called, number = setup.plan, opened.called, opened.number
    record: dict[str, Any] = {"round": number, "participants": [plan.clients[i].name for i in called.clients]}
    if not uploads:
        return record | {"note": "no client could pay for this round"}
    known = {**opened.heard, **uploads, **_pace(setup, state, opened)}
    facts = _facts(setup, called, number, opened.public, known, opened.permit.terms)
    record |= _clipping(setup, state, opened)
    for ask in plan.method.ask:
        if ask.batch == "step":
            state.server = ask.conclude(uploads[ask.question.what][:, 0], facts, state.server)
    if "update" not in uploads:  # nobody sent a whole one
        uploads = {**uploads, "update": state.weights.new_zeros(len(called.clients), len(state.weights))}
    outcome = plan.method.aggregate(uploads["update"], facts, state.server)
    rate = plan.training.server_lr
    stepped = plan.method.server(state.weights, outcome.delta if rate == 1 else outcome.delta * rate, outcome.state)
    state.weights, state.shown, state.server = stepped
    if not all_finite(state.weights):
        raise SordinoError(
            f"the model is no longer finite after round {number}: training diverged; use a smaller training.lr"
        )
    if outcome.weights is not None:
        counted = np.bincount(called.clients, outcome.weights, minlength=len(plan.clients))
        record["weights"] = {plan.clients[i].name: float(counted[i]) for i in dict.fromkeys(called.clients.tolist())}
        if is_time(plan, number):
            names = [c.name for c in plan.clients]
            record |= weighed(facts, outcome.weights, names, record.get("observer", {}))
    return record | ({"diagnostics": outcome.diagnostics} if outcome.diagnostics else {})


def all_finite(weights: Tensor) -> bool:
    """Whether every entry is a finite number. A sum tells in one pass without a copy, unless it overflows."""
    return bool(torch.isfinite(weights.sum())) or bool(torch.isfinite(weights).all())


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
    answers = torch.zeros(len(terms), device=state.weights.device)
    for rows in _own_chunks(setup, called.clients, terms):
        part = permit.split(rows)
        drawn = draw_rows(setup, called.clients[rows], part)
        heard = told(public, called.clients[rows])
        answers[rows] = answer(setup.work, ask.question, drawn, start, heard, part, setup.gate).value[:, 0]
    answers = answers if setup.shard is None else setup.shard.summed(answers)
    state.server = ask.conclude(answers, _facts(setup, called, number, public, {}), state.server)
    return answers


def _turns(setup: Setup, state: Checkpoint, opened: Opened) -> dict[str, Any]:
    """Everyone's turn, chunk by chunk; the uploads by name, a row each, or added up where the rule is a sum."""
    start = Release.public(state.weights, "weights from the server")
    facts = _facts(setup, opened.called, opened.number, opened.public, {}, opened.permit.terms)
    added = Running.of(setup.plan.method.aggregate, facts, setup.work.engine.dimension)
    uploads: dict[str, Any] = {} if added is None else {"update": added}
    left: list[Left] = []
    twice = len(np.unique(opened.called.clients)) < len(opened.called.clients)
    for rows in _own_chunks(setup, opened.called.clients, opened.permit.terms):
        clients = opened.called.clients[rows]
        upload, after = _chunk(setup, state, clients, opened.permit.split(rows), start, opened.public)
        collect(uploads, upload, rows, len(opened.permit.terms))
        left.append((clients, {name: after.value[name] for name in setup.work.local.state}))
        if not twice:  # with copies of a client, what turns left is kept after all of them
            keep(state, left)
            left = []
    keep(state, left)
    return uploads if setup.shard is None else setup.shard.joined(uploads, len(opened.permit.terms), state.weights)


def _own_chunks(setup: Setup, clients: Index, terms: list[Terms]) -> Iterator[Index]:
    """The chunks of the rows that this process takes: all of them, or its share."""
    own = np.arange(len(terms)) if setup.shard is None else setup.shard.rows(clients)
    for rows in chunks(setup.work, [terms[i] for i in own]):
        yield own[rows]


def collect(uploads: dict[str, Any], upload: Upload, rows: Index, count: int) -> None:
    """Put a chunk's uploads where its rows belong; what a row did not upload is zero."""
    for name, release in upload.parts.items():
        if isinstance(uploads.get(name), Running):
            uploads[name].add(rows, release.value)
            continue
        if name not in uploads:
            uploads[name] = _room(count, release.value)
        uploads[name][torch.from_numpy(rows).to(release.value.device)] = release.value


def _room(count: int, like: Tensor) -> Tensor:
    """A matrix for everyone's rows; a large one lies on disk where rows do."""
    if like.device.type == "cpu" and like.dim() == 2:
        return Table(count, like.shape[1]).values
    return like.new_zeros(count, *like.shape[1:])


def _grant(
    setup: Setup, state: Checkpoint, number: int, called: Round, terms: list[Terms], public: dict[str, Any]
) -> Permit:
    names = [setup.plan.clients[i].name for i in called.clients]
    turns = [Turn(name, number, int(copy), setup.key) for name, copy in zip(names, called.copies)]
    request = fingerprint(state.weights, number, *(part for item in sorted(public.items()) for part in item))
    return setup.gate.grant(turns, terms, request)


def draw_rows(setup: Setup, clients: Index, permit: Permit) -> Rows:
    """Draw the batches of some rows."""
    batches = []
    for turn, terms, i in zip(permit.turns, permit.terms, clients):
        records = setup.plan.clients[i].records
        drawn = setup.gate.source.batches(turn, terms.what, terms.sampling, records, terms.count)
        batches.append(drawn.of(setup.train[i]))
    return Rows(permit.turns, batches, setup.records)


def _chunk(
    setup: Setup, state: Checkpoint, clients: Index, permit: Permit, start: Release, public: dict[str, Any]
) -> tuple[Upload, Release]:
    kept = kept_rows(state, setup.work.local.state, clients, len(setup.plan.clients))
    before = Release.public(kept, "state from earlier releases")
    rows = draw_rows(setup, clients, permit)
    try:
        return take_turn(setup.work, rows, start, before, told(public, clients), permit, setup.gate)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        from sordino.engine.debug import explain  # which looks through this module's loop

        raise SordinoError(explain(setup, state, clients, permit, public, error)) from error


def _steps_left(setup: Setup, state: Checkpoint) -> Index:
    """Local steps that each client's plan has left, where the server sets the pace."""
    total = np.array([c.turns * c.terms.count for c in setup.plan.clients], dtype=np.int64)
    used = state.server.get("steps_used")
    return total if used is None else total - used.cpu().numpy()


def _turn_terms(setup: Setup, state: Checkpoint, called: Round) -> list[Terms]:
    """The terms of everyone's turn; where the server sets the pace, so many steps of what the plan has left (R6)."""
    planned = [setup.plan.clients[i].terms for i in called.clients]
    if not setup.plan.method.adaptive:
        return planned
    left, pace = _steps_left(setup, state), state.server.get("public/steps")
    counts = []
    for i, one in zip(called.clients, planned):
        counts.append(int(min(pace or one.count, left[i])))
        left[i] -= counts[-1]
    return [replace(one, count=count) for one, count in zip(planned, counts)]


def _pace(setup: Setup, state: Checkpoint, opened: Opened) -> dict[str, Any]:
    """Book the steps of this round where the server sets the pace; what a rule needs to know to set the next."""
    if not setup.plan.method.adaptive:
        return {}
    left, clients = _steps_left(setup, state), opened.called.clients
    total = np.array([c.turns * c.terms.count for c in setup.plan.clients], dtype=np.int64)
    np.subtract.at(left, clients, [one.count for one in opened.permit.terms])
    state.server = {**state.server, "steps_used": torch.from_numpy(total - left)}
    return {"steps_left": left[clients], "step_budget": total[clients]}


def _who_can_pay(setup: Setup, state: Checkpoint, called: Round, taken: Index) -> Round:
    """Of the scheduled participations, those whose client can still pay for a turn."""
    left = setup.turns_left - taken
    keep = called.copies < left[called.clients]
    if setup.plan.method.adaptive:
        pace = np.array([state.server.get("public/steps") or c.terms.count for c in setup.plan.clients])
        keep &= called.copies * pace[called.clients] < _steps_left(setup, state)[called.clients]
    return Round(called.clients[keep], called.copies[keep], called.weights[keep])


def chunks(work: Work, terms: list[Terms]) -> Iterator[Index]:
    """Rows with equal step counts and batch sizes, as many as fit; one at a time where rows differ in their weights."""
    width = max(1, (STACK_BYTES if work.stack else CHUNK_BYTES) // (4 * work.engine.dimension))
    counts = np.array([one.count for one in terms])
    divisors = np.array([one.divisor for one in terms])
    order = np.lexsort((np.arange(len(terms)), divisors, counts)) if work.stack else np.arange(len(terms))
    first = 0
    while first < len(order):
        count, batch = counts[order[first]], divisors[order[first]]
        records = STACK_RECORDS if work.stack else CHUNK_RECORDS
        most = max(1, min(width, int(records // max(1.0, batch)))) if work.stack or count == 1 else 1
        last = first + 1
        while last < min(len(order), first + most) and counts[order[last]] == count:
            if work.stack and divisors[order[last]] > 1.5 * batch:
                break
            last += 1
        yield order[first:last]
        first = last


def _clipping(setup: Setup, state: Checkpoint, opened: Opened) -> dict[str, Any]:
    """The round's radius where it moves, and, when it is time to look, what an observer sees of it."""
    plan, clip = setup.plan, setup.work.clip
    if not clip.moves or not plan.method.private:
        return {}
    radii = _radii(setup, opened.called, opened.public)
    found: dict[str, Any] = {"clip": float(radii.mean())}
    if len(set(radii.tolist())) > 1:
        found["clips"] = {plan.clients[i].name: c for i, c in zip(opened.called.clients, radii.tolist())}
    if is_time(plan, opened.number):
        seen = watch_clipping(setup.work, setup.records, setup.train, state.weights, opened.public)
        found["observer"] = seen | {"note": "seen in simulation, not released"}
    return found


def _radii(setup: Setup, called: Round, public: dict[str, Any]) -> NDArray[np.float64]:
    """C of every row."""
    bound = setup.work.clip.bound(told(public, called.clients))
    return per_row(bound, len(called.clients), torch.zeros((), dtype=torch.float64)).numpy()


def _facts(
    setup: Setup,
    called: Round,
    number: int,
    public: dict[str, Any],
    heard: dict[str, Any],
    terms: list[Terms] | None = None,
) -> Facts:
    plan = setup.plan
    clients = [plan.clients[i] for i in called.clients]
    steps = np.array([one.count for one in terms or [c.terms for c in clients]], dtype=np.float64)
    variances = plan.variances(1.0 if plan.method.private else None)[called.clients]
    variances = variances * (_radii(setup, called, public) ** 2 if plan.method.private else 1.0)
    variances = variances * steps / np.array([c.terms.count for c in clients])
    known = {"oracle_variances": variances, "lr": plan.training.lr, "clients": len(plan.clients)}
    known |= {"clip": public["clip"], "rounds": plan.schedule.rounds, "server_lr": plan.training.server_lr}
    known["records"] = int(plan.population.sizes.sum())
    known["answer_noise"] = plan.answer_noise(called.clients)
    return Facts(
        clients=called.clients,
        sizes=np.array([c.records for c in clients], dtype=np.float64),
        epsilons=np.array([c.budget.epsilon for c in clients]),
        batches=np.array([c.terms.divisor for c in clients]),
        noises=np.array([c.noise for c in clients]),
        steps=steps,
        variances=variances,
        selection=called.weights,
        layout=tuple(setup.work.engine.layout),
        round=number,
        extra={**known, **{name: value for name, value in heard.items() if name != "update"}},
    )
