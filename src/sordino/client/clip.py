"""Clipping rules: how much each record counts, before the gate bounds it.

A rule is two small pure functions. ``factors(losses, norms, public)`` gives a_j for every record of a batch;
``bound(public)`` gives the radius C. The gate then enforces |a_j|·‖g_j‖ ≤ C, so a rule can be wrong about utility
but not about privacy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Public = Mapping[str, Any]
"""What the server broadcast for this turn: learning rate, clip radius, and whatever the method adds.

A number stands for all rows; where rows of several runs share a stack, or the server tells every client something
else, it may be a column [rows, 1] instead.
"""


@dataclass(frozen=True)
class Clip:
    """A clipping rule by name.

    ``needs``: the questions whose answers it uses. ``moves``: its radius changes from round to round, worth showing.
    """

    name: str
    factors: Callable[[Tensor, Tensor, Public], Tensor]
    bound: Callable[[Public], Tensor | float]
    needs: tuple[str, ...] = ()
    moves: bool = False


def _ones(losses: Tensor, norms: Tensor, public: Public) -> Tensor:
    return torch.ones_like(norms)


def flat() -> Clip:
    """Every record counts once, up to norm C: a_j = min(1, C/‖g_j‖) (Abadi et al. 2016)."""
    return Clip("flat", _ones, lambda public: public["clip"])


def per_record(public: Public, owner: Tensor, rows: int) -> Public:
    """A broadcast to ``rows`` rows as the records of a flat batch see it: columns [rows, 1] by each record's owner."""
    return {
        name: value[owner, 0] if isinstance(value, Tensor) and value.shape == (rows, 1) else value
        for name, value in public.items()
    }


def per_row(value: Tensor | float, rows: int, like: Tensor) -> Tensor:
    """A public number, or a column of them, as a vector with an entry for every row."""
    if isinstance(value, Tensor) and value.dim():
        return value.to(like).reshape(-1)
    return torch.full((rows,), float(value), dtype=like.dtype, device=like.device)
