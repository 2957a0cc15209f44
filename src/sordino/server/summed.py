"""Updates of which the server sees the weighted sum alone: Σ w_i Δ_i, weights fixed before the run.

Nothing is screened: nobody can look at one update. What one site can spoil is bounded at the sites (docs/shared-noise).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino.server.defend import Screened
from sordino.server.facts import Array, Facts, Memory, Outcome
from sordino.server.rule import Aggregate, weighted


class Summed:
    """The sum of one round's updates, as it is added up in a simulation or comes out of masked messages."""

    def __init__(self, facts: Facts, weights: Array, dimension: int, total: Tensor | None = None) -> None:
        self.facts = facts
        self.shape = (len(facts.clients), dimension)
        self._weights = weights
        self._total = total

    def add(self, rows: NDArray[np.int64], updates: Tensor) -> None:
        """Take the updates of these rows, ``[len(rows), d]``."""
        part = torch.as_tensor(self._weights[rows], dtype=updates.dtype, device=updates.device) @ updates
        self._total = part if self._total is None else self._total.add_(part)

    def join(self, add_up: Callable[[Tensor], Tensor], like: Tensor) -> None:
        """Become the sum of all processes' sums; ``add_up`` adds a tensor up over them."""
        total = torch.zeros(self.shape[1], dtype=like.dtype, device=like.device) if self._total is None else self._total
        self._total = add_up(total)

    def screened(self) -> Screened:
        """Everybody, as they came."""
        return Screened(self, self.facts, np.arange(self.shape[0]), ())

    def combined(self, weights: Array) -> Tensor:
        """Σ w_i Δ_i for weights in proportion to those of the sum."""
        factor = float(weights.sum() / self._weights.sum())
        return self.new_zeros(self.shape[1]) if self._total is None else self._total * factor

    def new_zeros(self, width: int) -> Tensor:
        """A step of length zero."""
        like: Any = self._total
        return torch.zeros(width) if like is None else like.new_zeros(width)


def summed(rule: Aggregate, weights: Array) -> Aggregate:
    """The rule that adds up with these weights, one a client, in place of ``rule``, which said what it would like."""

    def weigh(facts: Facts) -> Array:
        own = weights[facts.clients]
        return np.asarray(own / own.sum())

    def combine(updates: Any, facts: Facts, memory: Memory) -> Outcome:
        found = weigh(facts)
        return Outcome(weighted(updates, found), found, memory)

    return Aggregate(f"{rule.name}, noise shared", combine, weights=weigh, aims="given")
