"""Principal component pursuit for tall thin matrices: M = L + S, L of low rank, S sparse or simply noise.

    min ‖L‖_* + λ‖S‖₁   subject to   L + S = M,      λ = 1/√max(d, n)

The alternating directions of Candès et al. keep two matrices, S and the dual Y. Both are parts of one, T = S + Y/μ:
with the threshold t = λ/μ, Y/μ = clip(T, ±t) and S is the rest. So an iteration is one pass over the rows,

    X = M − S + Y/μ,    L = X·P (singular values shrunk by 1/μ),    T ← T + ρ(M − L − S),    ρ = 1.6,

where P = V·diag(max(0, 1 − 1/(μs)))·Vᵀ comes from the n×n Gram matrix XᵀX = V·diag(s²)·Vᵀ, which the same pass
accumulates for the next iteration. Memory: the input, one matrix of its size, and a few blocks of rows.

Two choices replace thousands of iterations by about a hundred. The start is S = M, Y = λ·sign(M): with noise nearly
everything belongs to S, and from S = 0 an entry can only travel t per iteration. And t is half the typical size of an
entry (the median over columns of the mean |entry|) where the customary μ = dn/(4Σ|M|) makes it 4/√d of the mean.

The residual ‖M − L − S‖ is small long before the noise variances σ̂_i² = ‖S_:,i‖²/d have settled, because the noisiest
columns hide the others in one norm. So the stop looks at σ̂² itself and extrapolates how far it still has to go.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sordino.server.columns import Matrix, as_columns, check_finite, inverse_weights, like, one_thread, row_blocks
from sordino.server.facts import Array

RELAXATION = 1.6
CHECK = 10
"""Iterations between two looks at the variances."""
WINDOW = 6
"""Looks over which the rate of change is judged, beside that of the last two."""
FOR_WEIGHTS = 1e-4
"""The residual that is small enough where only the variances are wanted, whose own test does the rest."""
SAMPLE = 200_000
"""Rows that rules look at when there are more."""
BLOCK = 1 << 16
"""Entries in a block of rows: a few such buffers stay in the cache."""


class NotSettled(UserWarning):
    """Principal component pursuit stopped at its iteration limit with its variances still moving."""


@dataclass(frozen=True)
class Pursuit:
    """What principal component pursuit found, and how far it got.

    Attributes
    ----------
    low_rank, sparse: L and S of the rows looked at; None when parts were not asked for.
    variances: σ̂_i² = ‖S_:,i‖²/d.
    singular_values: of L, largest first; matrix_singular_values: of the rows of M looked at.
    iterations: passes over the rows.
    residual: ‖M − L − S‖/‖M‖.
    unsettled: how much further the variances are expected to move, relatively, at most.
    converged: whether all tolerances were met; never true at the iteration limit otherwise.
    rows: indices of the rows looked at; None for all.
    projection: n×n map Q with L ≈ M·Q, the warm start for a similar matrix (next round's).
    """

    low_rank: Tensor | None
    sparse: Tensor | None
    variances: Array
    singular_values: Array
    matrix_singular_values: Array
    iterations: int
    residual: float
    unsettled: float
    converged: bool
    rows: Tensor | None
    projection: Tensor

    @property
    def weights(self) -> Array:
        """w_i ∝ 1/σ̂_i², summing to 1."""
        return inverse_weights(self.variances)

    @property
    def rank(self) -> int:
        """The rank of the low-rank part L."""
        return int((self.singular_values > 0).sum())


def decompose(matrix: Matrix) -> tuple[Any, Any]:
    """(L, S) with ‖M − L − S‖/‖M‖ ≤ 1e-6 and settled noise variances, of the same kind (array or tensor) as M.

    Warns ``NotSettled`` when the iteration limit came first; ``solve`` has the details.
    """
    found = solve(matrix)
    warn_unsettled(found)
    return like(matrix, found.low_rank), like(matrix, found.sparse)


def warn_unsettled(found: Pursuit) -> None:
    """Warn when the iteration limit came before convergence, and say by how much it was missed."""
    if found.converged:
        return
    warnings.warn(
        f"principal component pursuit stopped after {found.iterations} iterations at residual {found.residual:.1e} "
        f"with variances that may still move by {found.unsettled:.1%}: pass a larger iterations= to pursuit.solve",
        NotSettled,
        stacklevel=3,
    )


def solve(
    matrix: Matrix,
    *,
    tolerance: float = 1e-3,
    residual: float = 1e-6,
    iterations: int = 3000,
    rows: int | None = None,
    seed: int = 0,
    start: Tensor | None = None,
    parts: bool = True,
) -> Pursuit:
    """Principal component pursuit of M[d, n], with everything there is to know about how it went.

    n×n eigenproblems are solved in float64. An all-zero column stays zero in L and S and has σ̂² = 0.

    Parameters
    ----------
    matrix : M, a column per client; tensor (any device) or array. Computed in float32 unless it is float64.
    tolerance : how far the variances may still be expected to move, relatively.
    residual : largest ‖M − L − S‖/‖M‖; ``FOR_WEIGHTS`` is enough for weights, L itself takes longer to settle.
    iterations : the limit; ``converged`` tells whether it came first.
    rows : look at that many rows, drawn at random by ``seed``, when M has more: they estimate the same variances.
    start : ``projection`` of an earlier result for the same clients in the same order.
    parts : whether to return L and S, or only what is n×n and smaller.
    """
    return solve_looked_at(look_at(matrix, rows, seed), tolerance, residual, iterations, start, parts)


class LookedAt(NamedTuple):
    """What is decomposed: the rows looked at, which those are (None: all), and the size of a typical entry."""

    columns: Tensor
    rows: Tensor | None
    scale: float

    @property
    def threshold(self) -> float:
        """t, half of that size."""
        return 0.5 * self.scale


def look_at(matrix: Matrix, rows: int | None, seed: int) -> LookedAt:
    """The matrix, or so many of its rows."""
    columns = as_columns(matrix)
    chosen = None
    if rows is not None and rows < columns.shape[0]:
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(columns.shape[0], generator=generator)[:rows].sort().values
        columns = columns[chosen.to(columns.device)]
    return LookedAt(columns, chosen, _typical_entry(columns))


def solve_looked_at(
    given: LookedAt, tolerance: float, residual: float, iterations: int, start: Tensor | None, parts: bool
) -> Pursuit:
    """``solve`` of what is looked at."""
    columns = given.columns
    if given.scale == 0.0:
        zero, nothing = torch.zeros_like(columns) if parts else None, np.zeros(columns.shape[1])
        still = torch.zeros(len(nothing), len(nothing), dtype=torch.float64)
        return Pursuit(zero, zero, nothing, nothing, nothing, 0, 0.0, 0.0, True, given.rows, still)
    with one_thread():
        work = Work.begun(columns, given.threshold, start)
        return finish(work, _iterate(work, tolerance, residual, iterations), given.rows, parts)


def _typical_entry(columns: Tensor) -> float:
    """Median over the non-zero columns of the mean |entry|: one client's scale cannot move it."""
    total = torch.zeros(columns.shape[1], dtype=torch.float64)
    for block in row_blocks(columns, BLOCK):
        total += block.abs().sum(0, dtype=torch.float64).cpu()
    check_finite(total)
    means = total[total > 0] / columns.shape[0]
    return float(means.median()) if len(means) else 0.0


class Work:
    """The matrices of a run: M, T (allocated once) and the current Gram matrix, with λ and the threshold t = λ/μ."""

    def __init__(self, columns: Tensor, threshold: float, state: Tensor, gram: Tensor) -> None:
        self.columns, self.threshold, self.state, self.gram = columns, threshold, state, gram
        self.lam = 1.0 / math.sqrt(max(columns.shape))

    @staticmethod
    def begun(columns: Tensor, threshold: float, start: Tensor | None) -> Work:
        """The first T = S + Y/μ with S = M, or what ``start`` leaves of it, and Y = λ·sign(S)."""
        gram = torch.zeros(columns.shape[1], columns.shape[1], dtype=torch.float64)
        work = Work(columns, threshold, torch.empty_like(columns), gram)
        remove = None if start is None else start.to(columns)
        for entry, state in work.blocks():
            state.copy_(entry if remove is None else entry - entry @ remove)
            state.add_(state.sign(), alpha=threshold)
            work._add_gram(entry, state)
        return work

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of the same rows of M and T."""
        return zip(row_blocks(self.columns, BLOCK), row_blocks(self.state, BLOCK))

    def target(self, entry: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """(X, Y/μ) of a block of rows: Y/μ = clip(T) and X = M − S + Y/μ = M − T + 2 clip(T)."""
        clipped = state.clamp(-self.threshold, self.threshold)
        return (entry - state).add_(clipped, alpha=2.0), clipped

    def _add_gram(self, entry: Tensor, state: Tensor) -> None:
        """Accumulate XᵀX for the next iteration."""
        target, _ = self.target(entry, state)
        self.gram += (target.T @ target).to("cpu", torch.float64)

    def shrink(self) -> tuple[Tensor, Array]:
        """(P, singular values of L = X·P) from XᵀX: singular values shrunk by 1/μ = t/λ."""
        level = self.threshold / self.lam
        squares, vectors = torch.linalg.eigh(self.gram)
        singular = squares.clamp_min(0.0).sqrt()
        factors = (1.0 - level / singular.clamp_min(level)).clamp_min(0.0)
        kept = (singular - level).clamp_min(0.0).flip(0).numpy()
        return (vectors * factors) @ vectors.T, kept

    def step(self, look: bool) -> tuple[Array, float] | None:
        """T ← T + ρ(M − L − S) and the next Gram matrix, in one pass.

        With ``look``, also (‖S_:,i‖², ‖M − L − S‖²) as they were before the step.
        """
        projection, _ = self.shrink()
        rest = (torch.eye(len(projection), dtype=torch.float64) - projection).to(self.columns)
        self.gram = torch.zeros_like(self.gram)
        sums, off = torch.zeros(len(projection), dtype=torch.float64), 0.0
        for entry, state in self.blocks():
            target, clipped = self.target(entry, state)
            residual = torch.mm(target, rest).sub_(clipped)
            if look:
                sums += (state - clipped).square_().sum(0).to("cpu", torch.float64)
                off += float(residual.square().sum())
            state.add_(residual, alpha=RELAXATION)
            self._add_gram(entry, state)
        return (sums.numpy(), off) if look else None


class Looks:
    """What the looks at one matrix's variances have shown; ``size`` is ‖M‖."""

    def __init__(self, size: float, tolerance: float, residual: float) -> None:
        self.size, self.tolerance, self.residual = size, tolerance, residual
        self.expected = math.inf
        """How far the variances are still expected to move."""
        self._before: Array | None = None
        self._changes: list[float] = []

    def settled(self, squares: Array, off: float) -> bool:
        """Whether ‖S_:,i‖² have settled, as this look shows them, and ‖M − L − S‖², which is ``off``, is small."""
        if self._before is not None:
            self._changes.append(_largest_change(self._before, squares))
        self._before, self.expected = squares, _expected_change(self._changes)
        return self.expected <= self.tolerance and math.sqrt(off) / self.size <= self.residual


Went = tuple[int, float, bool]
"""The iterations made, how far the variances are still expected to move, and whether it converged."""


def _iterate(work: Work, tolerance: float, residual: float, limit: int) -> Went:
    """Iterate until the variances have settled and the residual is small, or the limit is reached."""
    size = math.sqrt(sum(float(block.square().sum(dtype=torch.float64)) for block in row_blocks(work.columns, BLOCK)))
    looks, iteration = Looks(size, tolerance, residual), 0
    for iteration in range(1, limit + 1):
        seen = work.step(look=is_look(iteration, limit))
        if seen is not None and looks.settled(*seen):
            return iteration, looks.expected, True
    return iteration, looks.expected, False


def is_look(iteration: int, limit: int) -> bool:
    """Whether the variances are looked at in this iteration."""
    return iteration % CHECK == 0 or iteration == limit


def _largest_change(before: Array, after: Array) -> float:
    """max_i |ln(after_i/before_i)|; columns that are and stay zero have not changed."""
    alive = (before > 0) | (after > 0)
    if not alive.any():
        return 0.0
    with np.errstate(divide="ignore"):
        return float(np.abs(np.log(after[alive]) - np.log(before[alive])).max())


def _expected_change(changes: list[float]) -> float:
    """What is left to come if changes go on shrinking as they did: c·r/(1 − r), by the rate r of the last two looks, or
    twice what that of the last six says, if it is less: from look to look the largest change is of another column."""
    if len(changes) < 3:
        return math.inf
    first, second, last = changes[-3:]
    if max(second, last) < 1e-6:  # down to rounding errors, whose ratio means nothing
        return max(second, last)
    soon = _left(last, max(last / second, second / first)) if min(first, second) > 0.0 else math.inf
    if len(changes) < WINDOW or min(changes[-WINDOW:]) == 0.0:
        return soon
    recent, earlier = max(second, last), max(changes[-WINDOW], changes[1 - WINDOW])
    return min(soon, 2.0 * _left(recent, (recent / earlier) ** (1 / (WINDOW - 2))))


def _left(change: float, ratio: float) -> float:
    ratio = max(0.5, ratio)
    return change * ratio / (1.0 - ratio) if ratio < 1.0 else math.inf


def finish(work: Work, went: Went, chosen: Tensor | None, parts: bool) -> Pursuit:
    """One last pass: L, S, the variances and the projection for a warm start."""
    projection, singular = work.shrink()
    apply = projection.to(work.columns)
    low = torch.empty_like(work.columns) if parts else None
    width = work.columns.shape[1]
    squares = torch.zeros(width, dtype=torch.float64)
    own, cross = (torch.zeros(width, width, dtype=torch.float64) for _ in range(2))
    off = 0.0
    for (entry, state), place in zip(work.blocks(), row_blocks(work.columns if low is None else low, BLOCK)):
        target, clipped = work.target(entry, state)
        part = torch.mm(target, apply)
        own += (entry.T @ entry).to("cpu", torch.float64)
        cross += (entry.T @ part).to("cpu", torch.float64)
        state.sub_(clipped)
        squares += state.square().sum(0).to("cpu", torch.float64)
        off += float((entry - part).sub_(state).square_().sum())
        if low is not None:
            place.copy_(part)
    iterations, unsettled, converged = went
    return Pursuit(
        low_rank=low,
        sparse=work.state if parts else None,
        variances=squares.numpy() / work.columns.shape[0],
        singular_values=singular,
        matrix_singular_values=np.sqrt(np.maximum(np.linalg.eigvalsh(own.numpy())[::-1], 0.0)),
        iterations=iterations,
        residual=math.sqrt(off / float(own.trace())),
        unsettled=unsettled,
        converged=converged,
        rows=chosen,
        projection=torch.linalg.lstsq(own, cross, driver="gelsd").solution,
    )
