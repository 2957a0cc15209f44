"""Several runs at once: their rows share one stack, so that a whole study is one big batch on a GPU.

Runs may differ in method, seed, budgets and learning rate; they share the model, the records and what a client does
(clipping and local rule). Each keeps its own ledger, key, state and result, and ends as it would have ended alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sordino.client.rows import Rows
from sordino.client.turn import take_turn
from sordino.engine import rounds
from sordino.engine.checkpoint import Checkpoint
from sordino.engine.simulate import (
    Index,
    Opened,
    Setup,
    chunks,
    close_round,
    collect,
    draw_rows,
    look,
    open_round,
)
from sordino.errors import BadInput
from sordino.privacy.gate import Permit
from sordino.privacy.types import Release


def simulate_together(setups: Sequence[Setup], states: Sequence[Checkpoint]) -> Iterator[int]:
    """Run all rounds of all runs, round by round; yields each round's number when every run has finished it."""
    _check(setups)
    taken = [rounds.turns_taken(setup.plan, state.history) for setup, state in zip(setups, states)]
    for number in range(1, max(setup.plan.schedule.rounds for setup in setups) + 1):
        live = [i for i, s in enumerate(setups) if states[i].round < number <= s.plan.schedule.rounds]
        started = time.perf_counter()
        opened = {i: open_round(setups[i], states[i], number, taken[i]) for i in live}
        uploads = _turns(setups, states, opened)
        for i in live:
            record = close_round(setups[i], states[i], opened[i], uploads[i])
            np.add.at(taken[i], opened[i].called.clients, 1)
            look(setups[i], states[i], record, taken[i])
        spent = (time.perf_counter() - started) / max(1, len(live))
        for i in live:
            states[i].seconds += spent
        if live:
            yield number


def _turns(
    setups: Sequence[Setup], states: Sequence[Checkpoint], opened: dict[int, Opened]
) -> dict[int, dict[str, Tensor]]:
    """All runs' turns in shared chunks; uploads by run and name, in the order of each run's own rows."""
    seats = [(run, place) for run, one in opened.items() for place in range(len(one.called.clients))]
    gathered: dict[str, Tensor] = {}
    if seats:
        lead = setups[seats[0][0]]
        permit = Permit.joined([one.permit for one in opened.values()])
        for rows in chunks(lead.work, permit.terms):
            part, runs = permit.split(rows), [seats[r][0] for r in rows]
            start = Release.public(torch.stack([states[run].weights for run in runs]), "weights from the server")
            public = _columns([opened[run].public for run in runs], start.value)
            batches = [_batches(setups[run], opened[run], seats[r][1]) for run, r in zip(runs, rows)]
            held = Rows(part.turns, batches, lead.records)
            upload, _ = take_turn(lead.work, held, start, Release.public({}, "no state"), public, part, lead.gate)
            collect(gathered, upload, rows, len(seats))
    ends = np.cumsum([len(one.called.clients) for one in opened.values()])
    return {
        run: {name: values[end - len(one.called.clients) : end] for name, values in gathered.items()}
        if len(one.called.clients)
        else {}
        for (run, one), end in zip(opened.items(), ends)
    }


def _batches(setup: Setup, opened: Opened, place: int) -> list[Index]:
    client = opened.called.clients[place : place + 1]
    return draw_rows(setup, client, opened.permit.split([place])).batches[0]


def _columns(publics: Sequence[dict[str, Any]], like: Tensor) -> dict[str, Any]:
    """One broadcast for all rows: a number where runs agree, a column where they differ."""
    merged: dict[str, Any] = {}
    for name, value in publics[0].items():
        values = [one.get(name) for one in publics]
        if all(v is value or v == value for v in values if not isinstance(v, Tensor)) and not isinstance(value, Tensor):
            merged[name] = value
        elif all(isinstance(v, (int, float)) for v in values):
            merged[name] = torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
        else:
            raise BadInput(f"runs that broadcast {name!r} as a vector cannot share a stack: run them one by one")
    return merged


def _check(setups: Sequence[Setup]) -> None:
    lead = setups[0]
    for one in setups:
        same = (
            one.work.engine is lead.work.engine
            and one.records is lead.records
            and one.plan.method.private == lead.plan.method.private
            and one.work.clip.name == lead.work.clip.name
            and one.work.local.name == lead.work.local.name
            and [q.what for q in one.work.also] == [q.what for q in lead.work.also]
        )
        if not same or one.work.local.state or not one.work.stack:
            raise BadInput(
                f"runs of {one.plan.method.name!r} and {lead.plan.method.name!r} cannot share a stack: they differ in "
                "what a client does, keep state at clients, or were not set up for stacking"
            )
        if not one.key:
            raise BadInput("runs that share a stack need keys of their own: set Setup.key")
