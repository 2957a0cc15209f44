"""Several runs at once: their rows share one stack, so that a whole study is one big batch on a GPU.

Runs share the model; they may differ in everything else: method, seed, budgets, batch sizes, learning rate, number of
rounds (a run that ends earlier, or diverges, drops out), and data set, as long as records have one shape. Each keeps
its own ledger, key, state and result, and ends as it would have ended alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sordino.client.recorded import Recorder
from sordino.client.rows import Records, Rows
from sordino.client.turn import Work, take_turn
from sordino.engine import rounds
from sordino.engine.checkpoint import Checkpoint, Left
from sordino.engine.mixed import Stretch, columns, labelled, mix, own
from sordino.engine.seat import Seat
from sordino.engine.simulate import (
    Index,
    Setup,
    advance,
    chunks,
    draw_ahead,
    is_over,
    know_sizes,
    look,
    open_round,
    receive,
)
from sordino.errors import BadInput, CannotStack, Diverged
from sordino.methods.identity import identity
from sordino.privacy.gate import Permit
from sordino.privacy.types import Release
from sordino.server.facts import Outcome
from sordino.server.rule import combine_rounds


def simulate_together(
    setups: Sequence[Setup], states: Sequence[Checkpoint], lost: dict[int, Diverged]
) -> Iterator[int]:
    """Run all rounds of all runs, round by round; yields each round's number when every run has finished it.

    A run that diverges drops out: ``lost`` says by its place why.
    """
    _check(setups)
    recorder = setups[0].work.recorder
    records, first = _pool([one.records for one in setups])
    know_sizes(setups[0], states[0])
    rules = [_rules(one.work) for one in setups]
    taken = [rounds.turns_taken(setup.plan, state.history) for setup, state in zip(setups, states)]
    for i, state in enumerate(states):
        if not rounds.all_finite(state.weights):  # lost before the stack was stopped, in a round that is charged
            lost[i] = rounds.diverged(state.round + 1)
    for number in range(1, max(setup.plan.schedule.rounds for setup in setups) + 1):
        due = [i for i, s in enumerate(setups) if states[i].round < number <= s.plan.schedule.rounds]
        live = [i for i in due if i not in lost and not is_over(setups[i], states[i], number, taken[i])]
        started = time.perf_counter()
        opened = {i: open_round(setups[i], states[i], number, taken[i]) for i in live}
        seats = [
            Seat(i, place, setups[i], states[i], one, first[i], rules[i])
            for i, one in opened.items()
            for place in range(len(one.called.clients))
        ]
        uploads = _turns(seats, records, recorder)
        got = {i: receive(setups[i], states[i], opened[i], uploads.pop(i, {})) for i in live}
        outcomes = _combined({i: one for i, (one, _) in got.items()})
        for i in live:
            try:
                record = advance(*got.pop(i), states[i], outcomes.pop(i, None))
            except Diverged as error:
                lost[i] = error
                continue
            np.add.at(taken[i], opened[i].called.clients, 1)
            look(setups[i], states[i], record, taken[i])
        spent = (time.perf_counter() - started) / max(1, len(live))
        for i in live:
            states[i].seconds += spent
        if live:
            yield number


def _combined(got: Mapping[int, rounds.Received]) -> dict[int, Outcome]:
    """What the runs' rules make of the round, those of one kind at once; nothing where nobody sent anything."""
    calls = {i: one.call for i, one in got.items() if one.call is not None}
    return dict(zip(calls, combine_rounds([got[i].course.plan.rule for i in calls], list(calls.values()))))


def _rules(work: Work) -> Hashable:
    """What clients do, by what their rules are and never by what they are called: two may share a name."""
    return tuple(identity(one, here=True) for one in (work.clip, work.local, *work.also))


def _turns(seats: Sequence[Seat], records: Records, recorder: Recorder | None) -> dict[int, dict[str, Tensor]]:
    """All rows' turns in shared chunks; uploads by run and name, in the order of each run's own rows."""
    uploads: dict[int, dict[str, Tensor]] = {}
    left: dict[int, list[Left]] = {}
    for alike in _grouped(seats, lambda seat: seat.released):
        for chunk in chunks(alike[0].setup.work, [seat.terms for seat in alike]):
            for some, sent, after in _chunk([alike[row] for row in chunk], records, recorder):
                _collect(uploads.setdefault(some[0].run, {}), some, sent)
                left.setdefault(some[0].run, []).append((_clients(some), after))
    for one in {seat.run: seat for seat in seats}.values():
        if one.state.weights.is_cuda:  # which is at work meanwhile
            draw_ahead(one.setup, one.opened)
    states = {seat.run: seat.state for seat in seats}
    for run, turns in left.items():
        states[run].keep(turns)
    return uploads


def _chunk(
    seats: Sequence[Seat], records: Records, recorder: Recorder | None
) -> Iterator[tuple[list[Seat], dict[str, Tensor], dict[str, Tensor]]]:
    """The turns of some rows in one stack: for every run, its seats, their uploads and their new state."""
    kinds = [_grouped(kind, lambda seat: seat.run) for kind in _grouped(seats, lambda seat: seat.doing)]
    ordered = [seat for runs in kinds for run in runs for seat in run]
    permit = Permit([seat.turn for seat in ordered], [seat.terms for seat in ordered])
    start = torch.stack([seat.state.weights for seat in ordered])
    parts: list[Stretch] = []
    state: dict[str, Tensor] = {}
    public: dict[str, Any] = {}
    begin = 0
    for place, runs in enumerate(kinds):
        work, rows = runs[0][0].setup.work, slice(begin, begin + sum(map(len, runs)))
        public |= labelled(place, columns([seat.public for run in runs for seat in run], start))
        parts.append(Stretch(rows, work))
        state |= labelled(place, _state_of(runs))
        begin = rows.stop
    work, doing = mix(parts, start), [(runs[0][0].rules, part.rows.stop) for runs, part in zip(kinds, parts)]
    if recorder is not None:
        work = replace(work, recorder=recorder.of_kind(tuple(doing)))
    upload, after = take_turn(
        work,
        Rows(permit.turns, [seat.batches() for seat in ordered], records),
        Release.public(start, "weights from the server"),
        Release.public(state, "state from earlier releases"),
        public,
        permit,
        ordered[0].setup.gate,
    )
    sent = {name: release.value for name, release in upload.parts.items()}
    for place, (runs, part) in enumerate(zip(kinds, parts)):
        answers = {one.what: sent[one.what][part.rows] for one in part.work.also}
        left = {name: value for name, value in own(place, after.value).items() if name in part.work.local.state}
        here = own(place, sent) | answers
        first = 0
        for run in runs:
            rows, first = slice(first, first + len(run)), first + len(run)
            yield run, {k: v[rows] for k, v in here.items()}, {k: v[rows] for k, v in left.items()}


def _state_of(runs: Sequence[Sequence[Seat]]) -> dict[str, Tensor]:
    """What the clients of these rows kept, each from the table of its own run."""
    names = runs[0][0].setup.work.local.state
    each = [run[0].state.kept_rows(names, _clients(run), len(run[0].setup.plan.clients)) for run in runs]
    return {name: torch.cat([one[name] for one in each]) for name in names}


def _collect(found: dict[str, Tensor], seats: Sequence[Seat], sent: dict[str, Tensor]) -> None:
    """Put the uploads of some of a run's rows where they belong; what a row did not upload is zero."""
    places = torch.tensor([seat.place for seat in seats], device=seats[0].state.weights.device)
    for name, values in sent.items():
        if name not in found:
            found[name] = values.new_zeros(len(seats[0].opened.called.clients), *values.shape[1:])
        found[name][places] = values


def _clients(seats: Sequence[Seat]) -> Index:
    return np.array([seat.opened.called.clients[seat.place] for seat in seats], dtype=np.int64)


def _grouped(seats: Iterable[Seat], by: Callable[[Seat], Hashable]) -> list[list[Seat]]:
    """Seats with equal keys together, in the order in which keys and seats come."""
    found: dict[Hashable, list[Seat]] = {}
    for seat in seats:
        found.setdefault(by(seat), []).append(seat)
    return list(found.values())


def _pool(all_records: Sequence[Records]) -> tuple[Records, list[int]]:
    """The records of all runs end to end, each data set once, and where each run's begin."""
    distinct = list({id(one): one for one in all_records}.values())
    ends = np.cumsum([0, *(len(one) for one in distinct)])
    begin = {id(one): int(start) for one, start in zip(distinct, ends)}
    first = [begin[id(one)] for one in all_records]
    if len(distinct) == 1:
        return distinct[0], first
    valid = None
    if any(one.valid is not None for one in distinct):
        valid = torch.cat([torch.ones_like(r.y, dtype=torch.bool) if r.valid is None else r.valid for r in distinct])
    x, y = torch.cat([r.x for r in distinct]), torch.cat([r.y for r in distinct])
    return Records(x, y, valid, members=_members(distinct)), first


def _members(distinct: Sequence[Records]) -> Tensor | None:
    """The records of every unit among those of all runs; None where no run has units of several records."""
    if all(one.members is None for one in distinct):
        return None
    own = [torch.arange(len(r.y), device=r.y.device)[:, None] if r.members is None else r.members for r in distinct]
    wide, starts = max(one.shape[1] for one in own), np.cumsum([0, *(len(r.y) for r in distinct)])
    moved = [torch.where(one < 0, one, one + int(start)) for one, start in zip(own, starts)]
    return torch.cat([functional.pad(one, (0, wide - one.shape[1]), value=-1) for one in moved])


def _check(setups: Sequence[Setup]) -> None:
    lead = setups[0]
    for one in setups:
        same = one.work.engine is lead.work.engine and one.work.augment == lead.work.augment
        if not same or not one.work.stack:
            raise CannotStack(
                f"runs of {one.plan.method.name!r} and {lead.plan.method.name!r} cannot share a stack: they have no "
                "model in common, or were not set up for stacking"
            )
        if not one.key:
            raise BadInput("runs that share a stack need keys of their own: set Setup.key")
