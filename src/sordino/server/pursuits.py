"""Principal component pursuit of many matrices at once: the runs of a stack, each as ``pursuit.solve`` solves it.

An iteration over a small matrix costs less than starting its kernels and waiting for its n×n eigenproblem. Matrices of
one shape go through one iteration together, X[runs, d, n], with one wait for all; a matrix that has settled leaves, so
that it makes as many iterations as alone. A matrix too large for one block of rows keeps a processor busy by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sordino.server.columns import Matrix, block_entries, one_thread
from sordino.server.facts import Array
from sordino.server.pursuit import (
    BLOCK,
    RELAXATION,
    LookedAt,
    Looks,
    Pursuit,
    Work,
    finish,
    is_look,
    look_at,
    solve_looked_at,
)

TOGETHER = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Entries of the matrices that are solved together, by device; a batch holds about six times as many numbers."""


def solve_all(
    matrices: Sequence[Matrix],
    *,
    tolerance: float = 1e-3,
    residual: float = 1e-6,
    iterations: int = 3000,
    rows: int | None = None,
    seed: int = 0,
    starts: Sequence[Tensor | None] = (),
    parts: bool = True,
) -> list[Pursuit]:
    """What ``pursuit.solve`` finds for each of these, up to rounding; ``starts`` has an entry for each, or none."""
    warm = list(starts) or [None] * len(matrices)
    given = [look_at(matrix, rows, seed) for matrix in matrices]
    found: dict[int, Pursuit] = {}
    for places in _groups(given):
        if len(places) == 1:
            (place,) = places
            found[place] = solve_looked_at(given[place], tolerance, residual, iterations, warm[place], parts)
            continue
        with one_thread():
            batch = _Batch([given[i] for i in places], [warm[i] for i in places], tolerance, residual)
            found |= dict(zip(places, batch.solve(iterations, parts)))
    return [found[place] for place in range(len(given))]


def _groups(given: Sequence[LookedAt]) -> list[list[int]]:
    """Places of matrices that are solved together: small ones of one shape, as many as may be."""
    groups: dict[object, list[list[int]]] = {}
    for place, one in enumerate(given):
        columns = one.columns
        small = 0 < columns.numel() <= block_entries(columns, BLOCK) and one.scale > 0
        same = groups.setdefault((columns.shape, columns.dtype, columns.device) if small else place, [[]])
        if (len(same[-1]) + 1) * columns.numel() > TOGETHER.get(columns.device.type, 0) and same[-1]:
            same.append([])
        same[-1].append(place)
    return [group for same in groups.values() for group in same]


class _Batch:
    """M and T of several matrices of one shape, [runs, d, n], their Gram matrices and what each look has shown."""

    def __init__(
        self, given: Sequence[LookedAt], starts: Sequence[Tensor | None], tolerance: float, residual: float
    ) -> None:
        self.given = given
        self.columns = torch.stack([one.columns for one in given])
        self.state = self.columns.clone()
        if any(start is not None for start in starts):
            wide = self.columns.shape[2]
            remove = [torch.zeros(wide, wide, dtype=torch.float64) if one is None else one for one in starts]
            self.state -= self.columns @ torch.stack([one.cpu() for one in remove]).to(self.columns)
        thresholds = torch.tensor([one.threshold for one in given], dtype=torch.float64)
        self.reach = thresholds.to(self.columns)[:, None, None]
        self.level = (thresholds * math.sqrt(max(self.columns.shape[1:])))[:, None]
        self.state += self.state.sign() * self.reach
        self.gram = self._gram()
        sizes = self.columns.square().sum((1, 2), dtype=torch.float64).sqrt().tolist()
        self.looks = [Looks(size, tolerance, residual) for size in sizes]
        self.live = list(range(len(given)))

    def solve(self, limit: int, parts: bool) -> list[Pursuit]:
        """Iterate until every one has settled or the limit is reached; each leaves as soon as it has."""
        done: dict[int, Pursuit] = {}
        iteration = 0
        for iteration in range(1, limit + 1):
            seen = self._step(is_look(iteration, limit))
            ended = [k for k, one in enumerate(seen) if self.looks[self.live[k]].settled(*one)]
            if ended:
                done |= {self.live[k]: self._left(k, iteration, True, parts) for k in ended}
                self._keep([k for k in range(len(self.live)) if k not in ended])
            if not self.live:
                break
        done |= {place: self._left(k, iteration, False, parts) for k, place in enumerate(self.live)}
        return [done[place] for place in range(len(self.given))]

    def _left(self, k: int, iteration: int, converged: bool, parts: bool) -> Pursuit:
        """What the k-th that is still there has come to."""
        one, looks = self.given[self.live[k]], self.looks[self.live[k]]
        work = Work(one.columns, one.threshold, self.state[k].clone(), self.gram[k])
        return finish(work, (iteration, looks.expected, converged), one.rows, parts)

    def _keep(self, those: list[int]) -> None:
        self.live = [self.live[k] for k in those]
        self.columns, self.state, self.reach = (each[those] for each in (self.columns, self.state, self.reach))
        self.gram, self.level = self.gram[those], self.level[those]

    def _target(self) -> tuple[Tensor, Tensor]:
        """(X, Y/μ) as in ``Work.target``."""
        clipped = torch.minimum(torch.maximum(self.state, -self.reach), self.reach)
        return (self.columns - self.state).add_(clipped, alpha=2.0), clipped

    def _gram(self) -> Tensor:
        target, _ = self._target()
        return torch.bmm(target.transpose(1, 2), target).to("cpu", torch.float64)

    def _step(self, look: bool) -> list[tuple[Array, float]]:
        """``Work.step`` of all; what a look shows of each, or nothing."""
        squares, vectors = torch.linalg.eigh(self.gram)
        singular = squares.clamp_min(0.0).sqrt()
        factors = (1.0 - self.level / torch.maximum(singular, self.level)).clamp_min(0.0)
        projection = (vectors * factors[:, None, :]) @ vectors.transpose(1, 2)
        rest = (torch.eye(projection.shape[1], dtype=torch.float64) - projection).to(self.columns)
        target, clipped = self._target()
        residual = torch.bmm(target, rest).sub_(clipped)
        seen: list[tuple[Array, float]] = []
        if look:
            sums = (self.state - clipped).square_().sum(1).to("cpu", torch.float64)
            off = residual.square().sum((1, 2)).tolist()
            seen = [(one.numpy(), each) for one, each in zip(sums, off)]
        self.state.add_(residual, alpha=RELAXATION)
        self.gram = self._gram()
        return seen
