"""Uploads added up as they come: Σ w_i Δ_i without ever holding more than a chunk of updates.

For rules whose weights follow from public facts alone (``rule.weights``). The defence is that of ``server.defend``: a
row that is not finite is refused, one beyond its limit is scaled down. The limit depends on everybody's norm, but is
never below what steps and noise explain; so a row within that counts at once, and only others wait for the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino.errors import SordinoError
from sordino.server.defend import SLACK, Screened, bounded_line, limits_of, reach, refused_line, row_norms
from sordino.server.facts import Array, Facts
from sordino.server.rule import Aggregate

PROPORTION = 1e-9
"""How far from proportional the weights of the rows that were kept may be to those they were added up with."""


@dataclass(frozen=True)
class _Waiting:
    row: int
    update: Tensor


class Running:
    """The updates of one round, added up.

    ``weights[rows]`` are what the rule gives if every row is kept; ``combined`` scales the sum when some are not.
    """

    def __init__(self, facts: Facts, weights: Array, dimension: int) -> None:
        self.facts = facts
        self.shape = (len(facts.clients), dimension)
        self._weights = weights
        signal, noise = reach(facts, dimension)
        self._sure = SLACK * (signal + noise)
        self._norms = np.full(len(facts.clients), np.nan)
        self._taken = np.zeros(len(facts.clients), bool)
        self._waiting: list[_Waiting] = []
        self._total: Tensor | None = None

    @classmethod
    def of(cls, rule: Aggregate, facts: Facts, dimension: int) -> Running | None:
        """A sum for this rule, or None where the rule needs its matrix or nothing bounds a row in advance."""
        if rule.weights is None or rule.needs or rule.receive is not None:  # it looks at more than a sum of updates
            return None
        if not np.isfinite(reach(facts, dimension)[0]).all():
            return None
        return cls(facts, rule.weights(facts), dimension)

    def add(self, rows: NDArray[np.int64], updates: Tensor) -> None:
        """Take the updates of these rows, ``[len(rows), d]``, which now belong to the sum: it may write over them."""
        norms = self._norms[rows] = row_norms(updates)
        self._taken[rows] = True
        sure = norms <= self._sure[rows]
        for i in np.flatnonzero(~sure & np.isfinite(norms)):
            self._waiting.append(_Waiting(int(rows[i]), updates[i].clone()))
        if not sure.all():
            updates, rows = updates[torch.from_numpy(sure).to(updates.device)], rows[sure]
        if len(rows):
            self._count(updates, self._weights[rows])

    def _count(self, updates: Tensor, weights: Array) -> None:
        factors = torch.as_tensor(weights, dtype=updates.dtype, device=updates.device)
        part = updates[0].mul_(factors[0]) if len(updates) == 1 else factors @ updates
        self._total = part if self._total is None else self._total.add_(part)

    def join(self, add_up: Callable[[Tensor], Tensor], like: Tensor) -> None:
        """Become the sum of all processes' sums; ``add_up`` adds a tensor up over them. Rows taken elsewhere count."""
        norms = torch.from_numpy(np.where(self._taken, self._norms, 0.0)).to(like.device)
        self._norms = add_up(norms).cpu().numpy()
        self._settle()
        total = torch.zeros(self.shape[1], dtype=like.dtype, device=like.device) if self._total is None else self._total
        self._total = add_up(total)

    def _limits(self) -> tuple[NDArray[np.int64], Facts, Array]:
        """Who is kept, their facts, and the limit of every row."""
        kept = np.flatnonzero(np.isfinite(self._norms))
        known = self.facts.only(kept) if len(kept) < len(self._norms) else self.facts
        limits = np.full(len(self._norms), np.inf)
        limits[kept] = limits_of(self._norms[kept], known, self.shape[1])
        return kept, known, limits

    def _settle(self) -> None:
        """Count the rows that waited for everybody's norm."""
        limits = self._limits()[2] if self._waiting else self._norms
        for one in self._waiting:
            factor = min(1.0, limits[one.row] / self._norms[one.row])
            self._count(one.update[None], self._weights[[one.row]] * factor)
        self._waiting = []

    def screened(self) -> Screened:
        """Who is kept and what was done, once every row was added."""
        self._settle()
        kept, known, limits = self._limits()
        finite = np.isfinite(self._norms)
        lines = [refused_line(self.facts, i, False) for i in np.flatnonzero(~finite).tolist()]
        beyond = np.flatnonzero(finite & (self._norms > limits)).tolist()
        lines += [bounded_line(self.facts, i, self._norms[i], limits[i]) for i in beyond]
        known = replace(known, norms=np.minimum(self._norms, limits)[kept])
        return Screened(self, known, kept, tuple(lines))

    def combined(self, weights: Array) -> Tensor:
        """Σ w_i Δ_i for weights in proportion to those that the rows were added up with."""
        used = self._weights[np.isfinite(self._norms)]
        factor = float(weights.sum() / used.sum()) if used.any() else 1.0
        if self._total is None or np.abs(weights - factor * used).max() > PROPORTION * max(
            np.abs(weights).max(), 1e-300
        ):
            raise SordinoError(
                f"round {self.facts.round}: the clients that counted most were refused, and the others were added up "
                "with too little weight: look at the log for who sent what, and leave them out"
            )
        return self._total if factor == 1.0 else self._total.mul_(factor)

    def new_zeros(self, width: int) -> Tensor:
        """A step of length zero."""
        like: Any = self._total
        return torch.zeros(width) if like is None else like.new_zeros(width)
