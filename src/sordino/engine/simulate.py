"""Simulation: all clients on one machine. A round is: ask → choose → charge → turns → combine → step → look."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino.client.rows import Records, Rows
from sordino.client.turn import Upload, Work, answer, take_turn
from sordino.engine import rounds
from sordino.engine.checkpoint import Checkpoint, Left
from sordino.engine.chosen import keep_best, settled
from sordino.engine.clipping import watch_clipping
from sordino.engine.evaluate import Observer
from sordino.engine.mapped import Table
from sordino.engine.scoring import Scoring
from sordino.engine.sharded import ALONE, Shard
from sordino.errors import SordinoError
from sordino.methods.asking import Ask
from sordino.methods.plan import Plan
from sordino.privacy.drawing import Members, draw_batches, draws_of
from sordino.privacy.gate import Gate, Permit, Terms, fingerprint
from sordino.privacy.generators import Batches, Keyed, Turn
from sordino.privacy.types import Release
from sordino.server.facts import Outcome, ServerState
from sordino.server.running import Running
from sordino.server.select import Round
from sordino.server.summed import Summed

CHUNK_BYTES = 1 << 26
"""How much a chunk's weight matrix may take: small enough to stay near the cache, large enough to share passes."""

CHUNK_RECORDS = 512
"""How many records of rows with equal weights go through one pass on a CPU."""

CHUNK_HELD = 1 << 22
"""Bytes that the records of rows with different weights may hold in one pass on a CPU.

Rows of small models share passes, whose cost is mostly Python's; of larger ones each is a pass of its own.
"""

STACK_BYTES = 1 << 30
STACK_RECORDS = 1 << 16
"""The same for rows stacked on a GPU, whatever their weights."""

STACK_HELD = 1 << 32
"""Bytes that the records of one pass on a GPU may hold until they are pulled: several runs' processes share it."""

Index = NDArray[np.int64]

log = logging.getLogger("sordino.engine")


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
    shard: Shard = ALONE
    """This process's share, where several simulate one run together."""
    scoring: Scoring | None = None
    """How the run is judged on held-out records, as a deployment would be; None where it is not."""
    members: tuple[Members, ...] = ()
    """Of every client which of its training records are in which group; empty where nobody has groups."""

    def batches(self, client: int, turn: Turn, terms: Terms) -> Batches:
        """The batches of one turn, as positions among all records."""
        own = self.members[client] if self.members else None
        drawn = draw_batches(self.gate.source, turn, terms, self.plan.clients[client].records, own)
        return drawn.of(self.train[client])

    @property
    def course(self) -> rounds.Course:
        """What the server knows all through the run; in a simulation, also the noise that was really used."""
        return rounds.Course(self.plan, tuple(self.work.engine.layout), oracle=True)

    def own_models(self, state: Checkpoint) -> Callable[[int], Tensor] | None:
        """Every client's own model by its place, where the method gives them one; None where all share one."""
        local = self.work.local
        if local.begin is None:
            return None
        begin, count = local.begin, len(self.plan.clients)

        def of(client: int) -> Tensor:
            kept = state.kept_rows(local.state, np.array([client]), count)
            return begin(state.weights[None], kept)[0][0]

        return of


def simulate(setup: Setup, state: Checkpoint) -> Iterator[Checkpoint]:
    """Run the rounds that are left; yields the state after each. Nothing is lost when the caller stops asking.

    It ends early when nobody can pay for another turn.
    """
    know_sizes(setup, state)
    taken = rounds.turns_taken(setup.plan, state.history)
    for number in range(state.round + 1, setup.plan.schedule.rounds + 1):
        if is_over(setup, state, number, taken):
            return
        started = time.perf_counter()
        record, asked = one_round(setup, state, number, taken)
        np.add.at(taken, asked, 1)
        look(setup, state, record, taken)
        state.seconds += time.perf_counter() - started
        yield state


def is_over(setup: Setup, state: Checkpoint, number: int, taken: Index) -> bool:
    """Whether the run has settled, or nobody can pay for a turn of this round or a later one."""
    if settled(setup.plan, state.history):
        return True
    return rounds.exhausted(setup.plan, state.server, rounds.turns_left(setup.plan, setup.payable) - taken, number)


def look(setup: Setup, state: Checkpoint, record: dict[str, Any], taken: Index) -> None:
    """End a round: evaluate when it is time to, and put its record into the history."""
    state.round = record["round"]
    if rounds.is_time(setup.plan, state.round):
        record |= setup.observer.look(state.shown, setup.own_models(state))
        if not math.isfinite(record["loss"]):
            log.warning(
                "round %d: the loss is not a finite number: training diverged; use a smaller training.lr", state.round
            )
        record["spent_epsilon"] = None if setup.plan.method.aggregate.sets_steps else setup.spending(taken)
    else:
        record |= {"accuracy": None, "loss": None, "psi": None}
    if setup.scoring is not None and setup.scoring.judging.is_time(state.round):
        record |= setup.scoring.look(state, setup.records, setup.key, setup.own_models(state))
    state.history.append(record)
    keep_best(setup.plan, state)


def one_round(setup: Setup, state: Checkpoint, number: int, taken: Index) -> tuple[dict[str, Any], Index]:
    """One round. Changes ``state``; returns what to show of it, and who took part."""
    opened = open_round(setup, state, number, taken)
    uploads = _turns(setup, state, opened) if len(opened.called.clients) else {}
    return close_round(setup, state, opened, uploads), opened.called.clients


@dataclass(frozen=True)
class Opened:
    """A round whose questions are answered and whose turns are charged: who takes one, and what they were sent."""

    number: int
    called: Round
    heard: dict[str, Tensor]
    sent: rounds.Broadcast
    permit: Permit


def open_round(setup: Setup, state: Checkpoint, number: int, taken: Index) -> Opened:
    """Ask, choose, charge. Nobody's turn has begun.

    All that a round releases is charged under what it opened with: what follows from answers is known up to rounding
    only, and a round that is repeated, perhaps by another number of processes or threads, is the same release.
    """
    plan = setup.plan
    opening = rounds.broadcast(plan, state.server).fingerprint_parts()
    state.request = fingerprint(state.weights, number, *opening) if setup.gate.private else ""  # of charges only
    left = rounds.turns_left(plan, setup.payable) - taken
    called = rounds.who_can_pay(plan, state.server, left, plan.schedule.round(number))
    own = rounds.own_questions(plan) if len(called.clients) else []
    # Where no answer changes who trains or for how long, questions and turns are one charge.
    at_once = plan.method.select.choose is None and not plan.method.aggregate.sets_steps
    permits = []
    if at_once:
        asked = [[plan.clients[i].asks[place] for i in called.clients] for place in range(len(own))]
        permits = _grant(setup, state, number, called, [*asked, rounds.turn_terms(plan, state.server, called)])
    heard: dict[str, Tensor] = {}
    for place, ask in enumerate(own):
        if ask.of == "participants" and (place == 0 or own[place - 1].of == "candidates"):
            called, heard = rounds.who_trains(plan, called, heard, taken, number)
        terms = [plan.clients[i].asks[place] for i in called.clients]
        permit = permits.pop(0) if at_once else _grant(setup, state, number, called, [terms])[0]
        heard[ask.question.what] = _ask(setup, state, number, called, ask, permit)
    if not own or own[-1].of == "candidates":
        called, heard = rounds.who_trains(plan, called, heard, taken, number)
    sent = rounds.broadcast(plan, state.server)
    if not at_once:
        permits = _grant(setup, state, number, called, [rounds.turn_terms(plan, state.server, called)])
    return Opened(number, called, heard, sent, permits[0])


def close_round(setup: Setup, state: Checkpoint, opened: Opened, uploads: dict[str, Any]) -> dict[str, Any]:
    """Combine the uploads, step, and say what to show of the round: in the first process, whose state is all's."""

    def closed() -> tuple[dict[str, Any], Tensor, Tensor, ServerState]:
        got, seen = receive(setup, state, opened, uploads)
        record = advance(got, seen, state, None if got.call is None else setup.plan.rule(*got.call))
        return record, state.weights, state.shown, state.server

    record, state.weights, state.shown, state.server = setup.shard.of_first(closed, state.weights.device)
    return record


def receive(
    setup: Setup, state: Checkpoint, opened: Opened, uploads: dict[str, Any]
) -> tuple[rounds.Received, dict[str, Any]]:
    """A round whose uploads are there, not yet combined, and what an observer sees of its clipping."""
    seen = _clipping(setup, state, opened) if uploads else {}
    told = opened.permit.terms, opened.sent, opened.heard, uploads
    return rounds.receive(setup.course, state, opened.number, opened.called, *told), seen


def advance(got: rounds.Received, seen: dict[str, Any], state: Checkpoint, outcome: Outcome | None) -> dict[str, Any]:
    """Step by what the rule made of the round, and say what to show of it."""
    closed = rounds.advance(got, state, outcome)
    if "observer" in closed and "observer" in seen:
        seen["observer"] |= closed["observer"]
    return closed | seen


def _ask(setup: Setup, state: Checkpoint, number: int, called: Round, ask: Ask, permit: Permit) -> Tensor:
    """Ask everyone called and let the server conclude; returns the answers, one a row."""
    sent = rounds.broadcast(setup.plan, state.server)
    start = Release.public(state.weights, "weights from the server")
    count = len(permit.terms)
    chunked = list(_own_chunks(setup, called.clients, permit.terms))

    def ask_chunk(rows: Index) -> Tensor:
        part = permit.split(rows)
        drawn = draw_rows(setup, called.clients[rows], part)
        told = sent.told(called.clients[rows])
        found: Tensor = answer(setup.work, ask.question, drawn, start, told, part, setup.gate).value[:, 0]
        return found

    heard = setup.shard.together(lambda: [ask_chunk(rows) for rows in chunked])
    if len(chunked) == 1 and np.array_equal(chunked[0], np.arange(count)):
        answers = heard[0]
    else:
        answers = torch.zeros(count, device=state.weights.device)
        for rows, values in zip(chunked, heard):
            answers[rows] = values
    answers = setup.shard.summed(answers)

    def concluded() -> ServerState:
        rounds.conclude(setup.course, state, number, called, ask, answers, sent)
        return state.server

    state.server = setup.shard.of_first(concluded, state.weights.device)
    return answers


def _turns(setup: Setup, state: Checkpoint, opened: Opened) -> dict[str, Any]:
    """Everyone's turn, chunk by chunk; the uploads by name, a row each, or added up where the rule is a sum."""
    start = Release.public(state.weights, "weights from the server")
    facts = rounds.facts(setup.course, opened.called, opened.number, opened.sent, opened.permit.terms)
    added = rounds.summed_up(setup.course, facts) or Running.of(setup.plan.rule, facts, setup.work.engine.dimension)
    uploads: dict[str, Any] = {} if added is None else {"update": added}
    setup.shard.together(lambda: _take_turns(setup, state, opened, start, uploads))
    return setup.shard.joined(uploads, len(opened.permit.terms), state.weights)


def _take_turns(setup: Setup, state: Checkpoint, opened: Opened, start: Release, uploads: dict[str, Any]) -> None:
    """The turns of this process's rows; their uploads are put where they belong, and what clients keep is kept."""
    left: list[Left] = []
    twice = len(np.unique(opened.called.clients)) < len(opened.called.clients)
    chunked = list(_own_chunks(setup, opened.called.clients, opened.permit.terms))
    for place, rows in enumerate(chunked, 1):
        clients = opened.called.clients[rows]
        upload, after = _chunk(setup, state, clients, opened.permit.split(rows), start, opened.sent)
        if state.weights.is_cuda and place == len(chunked):  # before anybody waits for the device
            draw_ahead(setup, opened)
        collect(uploads, upload, rows, len(opened.permit.terms))
        left.append((clients, {name: after.value[name] for name in setup.work.local.state}))
        if not twice:  # with copies of a client, what turns left is kept after all of them
            state.keep(left)
            left = []
    state.keep(left)


def draw_ahead(setup: Setup, opened: Opened) -> None:
    """Draw the next round's batches for the same participations while the device works; keyed, so they are the same."""
    source = setup.gate.source
    if isinstance(source, Keyed):
        rows = zip(opened.permit.turns, opened.permit.terms, opened.called.clients)
        source.expect(
            [
                draw
                for turn, one, i in rows
                for draw in draws_of(turn._replace(round=opened.number + 1), one, setup.plan.clients[i].records)
            ]
        )


def _own_chunks(setup: Setup, clients: Index, terms: list[Terms]) -> Iterator[Index]:
    """The chunks of the rows that this process takes: all of them, or its share."""
    own = setup.shard.rows(clients)
    for rows in chunks(setup.work, [terms[i] for i in own]):
        yield own[rows]


def collect(uploads: dict[str, Any], upload: Upload, rows: Index, count: int) -> None:
    """Put a chunk's uploads where its rows belong; what a row did not upload is zero."""
    for name, release in upload.parts.items():
        if isinstance(uploads.get(name), (Running, Summed)):
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


def _grant(setup: Setup, state: Checkpoint, number: int, called: Round, each: Sequence[list[Terms]]) -> list[Permit]:
    """Charge everyone called for all of these, in one transaction; a permit for each."""
    names = [setup.plan.clients[i].name for i in called.clients]
    turns = [Turn(name, number, int(copy), setup.key) for name, copy in zip(names, called.copies)]
    granted = setup.gate.grant(turns * len(each), [one for terms in each for one in terms], state.request)
    count = len(turns)
    return [granted.split(range(place * count, (place + 1) * count)) for place in range(len(each))]


def draw_rows(setup: Setup, clients: Index, permit: Permit) -> Rows:
    """Draw the batches of some rows."""
    batches = [setup.batches(int(i), turn, terms) for turn, terms, i in zip(permit.turns, permit.terms, clients)]
    return Rows(permit.turns, batches, setup.records)


def _chunk(
    setup: Setup, state: Checkpoint, clients: Index, permit: Permit, start: Release, sent: rounds.Broadcast
) -> tuple[Upload, Release]:
    kept = state.kept_rows(setup.work.local.state, clients, len(setup.plan.clients))
    before = Release.public(kept, "state from earlier releases")
    rows = draw_rows(setup, clients, permit)
    try:
        return take_turn(setup.work, rows, start, before, sent.told(clients), permit, setup.gate)
    except torch.OutOfMemoryError:  # no client's fault, and taking the rows again would not tell whose
        raise
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        from sordino.engine.debug import explain  # which looks through this module's loop

        raise SordinoError(explain(setup, state, clients, permit, sent, error)) from error


def know_sizes(setup: Setup, state: Checkpoint) -> None:
    """Let the engine find out what a record takes before rows are stacked by it, and not in the first round.

    The first round would be cut into other stacks than the next ones, and a run that goes on would round otherwise than
    one that was never stopped.
    """
    work, where = setup.work, setup.records.y.device
    if work.alone is None and len(setup.records):
        x, y, _ = work.seen(setup.records.at(torch.zeros(1, dtype=torch.long, device=where)), 1, 0)
        work.engine.settle(state.weights, x, y)


def chunks(work: Work, terms: list[Terms]) -> Iterator[Index]:
    """Rows with equal step counts and batch sizes, as many as fit into one pass; a row is never cut."""
    if work.alone is not None:
        yield from np.arange(len(terms))[:, None]
        return
    width = max(1, (STACK_BYTES if work.stack else CHUNK_BYTES) // (4 * work.engine.dimension))
    held = (STACK_HELD if work.stack else CHUNK_HELD) // max(1, work.engine.bytes_per_record)
    counts = np.array([one.count for one in terms])
    divisors = np.array([one.divisor for one in terms])
    # Rows that end before their weights part: their batches lie end to end, whatever their sizes.
    equal = (counts == 1) & (not work.stack and work.local.begin is None)
    order = np.arange(len(terms)) if equal.all() else np.lexsort((np.arange(len(terms)), divisors, counts))
    first = 0
    while first < len(order):
        lead = order[first]
        records = CHUNK_RECORDS // work.copies if equal[lead] else held
        if work.stack:
            records = min(STACK_RECORDS // work.copies, held)
        most = max(1, min(width, int(records // max(1.0, divisors[lead]))))
        last = first + 1
        while last < min(len(order), first + most) and counts[order[last]] == counts[lead]:
            if not equal[lead] and divisors[order[last]] > 1.5 * divisors[lead]:
                break
            last += 1
        yield order[first:last]
        first = last


def _clipping(setup: Setup, state: Checkpoint, opened: Opened) -> dict[str, Any]:
    """The round's radius where it moves, and, when it is time to look, what an observer sees of it."""
    found = rounds.moving_clip(setup.plan, opened.called, opened.sent)
    if found and rounds.is_time(setup.plan, opened.number):
        told = opened.sent.told(np.arange(len(setup.train)))
        seen = watch_clipping(setup.work, setup.records, setup.train, state.weights, told, opened.number)
        found["observer"] = seen | {"note": "seen in simulation, not released"}
    return found
