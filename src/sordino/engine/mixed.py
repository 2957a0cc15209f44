"""Rows of different methods in one stack: gradients are computed together, each part of the rows has its own rules.

A stretch of rows belongs to runs that do the same at a client, under one broadcast. What comes out is an ordinary
``Work``: the turn, the gate and the gradient engine do not know that they serve several methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sordino.client.ask import Question
from sordino.client.clip import Clip, Public, per_row
from sordino.client.local import Local, State
from sordino.client.turn import Work
from sordino.errors import CannotStack


@dataclass(frozen=True)
class Stretch:
    """Some rows of a stack: which, and what their clients do."""

    rows: slice
    work: Work

    @property
    def count(self) -> int:
        """How many rows of the stack belong to it."""
        return int(self.rows.stop - self.rows.start)


def labelled(place: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """The broadcast, the state or the upload of a part, under names that no other part has."""
    return {f"{place}/{name}": value for name, value in values.items()}


def own(place: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """Of a mixed stack's broadcast, state or uploads, what belongs to a part."""
    start = f"{place}/"
    return {name.removeprefix(start): value for name, value in values.items() if name.startswith(start)}


def mix(parts: Sequence[Stretch], like: Tensor) -> Work:
    """One ``Work`` for all rows, each part by its own rules.

    Broadcast, state and uploads carry the part's place in their names; ``like`` says dtype and device.
    """
    lead = parts[0].work
    also = tuple(_question(parts, place, like) for place in range(len(lead.also)))
    return replace(lead, clip=_clip(parts, like), local=_local(parts), also=also)


def columns(publics: Sequence[Mapping[str, Any]], like: Tensor) -> dict[str, Any]:
    """One broadcast for all rows: a value where they agree, else a column of numbers or a vector a row."""
    merged: dict[str, Any] = {}
    for name, value in publics[0].items():
        values = [one[name] for one in publics]
        if all(isinstance(v, Tensor) for v in values):
            merged[name] = value if all(v is value for v in values) else torch.stack(values)
        elif all(v == value for v in values):
            merged[name] = value
        elif all(isinstance(v, (int, float)) for v in values):
            merged[name] = torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
        else:
            raise CannotStack(f"runs that broadcast different {name!r} cannot share a stack: run them one by one")
    return merged


def _clip(parts: Sequence[Stretch], like: Tensor) -> Clip:
    def factors(losses: Tensor, norms: Tensor, public: Public) -> Tensor:
        each = enumerate(parts)
        return torch.cat([p.work.clip.factors(losses[p.rows], norms[p.rows], own(i, public)) for i, p in each])

    def bound(public: Public) -> Tensor:
        each = enumerate(parts)
        return torch.cat([per_row(p.work.clip.bound(own(i, public)), p.count, like) for i, p in each])

    return Clip("mixed", factors, bound)


def _question(parts: Sequence[Stretch], place: int, like: Tensor) -> Question:
    asked = [(i, p, p.work.also[place]) for i, p in enumerate(parts)]

    def values(losses: Tensor, norms: Tensor, public: Public) -> Tensor:
        return torch.cat([one.values(losses[p.rows], norms[p.rows], own(i, public)) for i, p, one in asked])

    def bound(public: Public) -> Tensor:
        return torch.cat([per_row(one.bound(own(i, public)), p.count, like) for i, p, one in asked])

    return Question(asked[0][2].what, values, bound)


def _local(parts: Sequence[Stretch]) -> Local:
    asked = [one.what for one in parts[0].work.also]

    def told(place: int, part: Stretch, public: Public) -> dict[str, Any]:
        """The part's broadcast, and what its rows released beside the gradient of this step."""
        return {**own(place, public), **{what: public[what][part.rows] for what in asked if what in public}}

    def update(params: Tensor, state: State, gradient: Tensor, public: Public) -> tuple[Tensor, State]:
        after: State = {}
        for place, part in enumerate(parts):
            here, heard = params[part.rows], told(place, part, public)
            moved, left = part.work.local.update(here, own(place, state), gradient[part.rows], heard)
            if moved.data_ptr() != here.data_ptr():
                here.copy_(moved)
            after |= labelled(place, left)
        return params, after

    def finish(params: Tensor, start: Tensor, state: State, public: Public) -> tuple[dict[str, Tensor], State]:
        upload: dict[str, Tensor] = {}
        after: State = {}
        for place, part in enumerate(parts):
            here, heard = own(place, state), told(place, part, public)
            sent, left = part.work.local.finish(params[part.rows], start[part.rows], here, heard)
            upload |= labelled(place, sent)
            after |= labelled(place, left)
        return upload, after

    def begin(start: Tensor, state: State) -> tuple[Tensor, State]:
        params, after = start.clone(), dict(state)
        for place, part in enumerate(parts):
            if part.work.local.begin is not None:
                params[part.rows], first = part.work.local.begin(start[part.rows], own(place, state))
                after |= labelled(place, first)
        return params, after

    return Local("mixed", update, finish, begin=begin)
