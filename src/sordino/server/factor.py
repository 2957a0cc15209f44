"""Noise variances by maximum-likelihood factor analysis of the n×n Gram matrix.

Updates are a few shared directions plus each client's own noise, so over d coordinates

    G = MᵀM/d ≈ A·Aᵀ + diag(ψ),      A of n×r, ψ_i = σ_i².

With θ_1 ≤ … ≤ θ_n the eigenvalues of ψ^(-1/2) G ψ^(-1/2) and ω_j its eigenvectors, the best A for given ψ is known, and
what is left to minimise is (Jöreskog 1967)

    d·f(ψ) = d·Σ_{j ≤ n−r} (θ_j − ln θ_j − 1),      ∂f/∂ln ψ_i = Σ_{j ≤ n−r} (1 − θ_j) ω_ij².

Gauss–Newton with the Hessian (Σ_{j ≤ n−r} ω_ij ω_kj)² needs about ten n×n eigenproblems; M itself is read once.

*Guard.* When r is too large, the likelihood is nearly flat where one client's noise passes for a factor (ψ_i → 0, a
"Heywood case"), and that client would get all the weight. The prior Π ψ_i^a with a = 1 tips flat directions towards
more noise; where ψ_i is determined by the data it moves it by a/(d/2), that is, not at all.

*Rank.* The smallest r whose likelihood-ratio statistic d·f is not too large for χ² with ((n−r)² − n − r)/2 degrees of
freedom. The test needs Gaussian noise, which differential privacy provides, and asks nothing of the shared part.

*Rounds.* Noise variances stay, shared directions change: rounds are pooled by adding their d·f over a common ψ, each
with its own rank. Pooling also lifts the limit (n−r)² ≥ n + r up to which one round can tell factors from noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from sordino.errors import BadInput
from sordino.server.facts import Array

GUARD = 1.0
"""a: the exponent of the prior on each noise variance."""
LEVEL = 0.05
"""How improbable a fit must be for one more factor."""
FLOOR = 1e-7
"""Smallest share of a client's power that noise may have."""
MOST = 32
"""The largest rank that is tried."""


@dataclass(frozen=True)
class Factors:
    """The noise variances ψ_i = σ̂_i² of one round, its rank r, and whether the search for them converged."""

    variances: Array
    rank: int
    converged: bool


@dataclass(frozen=True)
class GramOfRound:
    """One round's Gram matrix MᵀM/d: of which clients, over how many coordinates, with how many shared directions."""

    clients: NDArray[np.int64]
    gram: Array
    rows: int
    rank: int


def largest_rank(clients: int) -> int:
    """The largest r with (n − r)² ≥ n + r: more factors cannot be told from noise in one round."""
    rank = math.floor((2 * clients + 1 - math.sqrt(8 * clients + 1)) / 2 + 1e-9)
    return max(0, min(rank, MOST))


def fit(gram: Array, rows: int, rank: int | None = None) -> Factors:
    """Factor analysis of G = MᵀM/d with d = ``rows``; the rank by successive likelihood-ratio tests unless given."""
    count = len(gram)
    _check(gram, rows)
    if rank is not None and not 0 <= rank < count:
        raise BadInput(f"rank {rank} is impossible for {count} clients: use 0 to {count - 1}")
    chosen = _choose_rank(gram, rows) if rank is None else rank
    logs, _, converged = _descend([GramOfRound(np.arange(count), gram, rows, chosen)], count)
    return Factors(np.exp(logs), chosen, converged)


def _choose_rank(gram: Array, rows: int) -> int:
    """The smallest rank that the likelihood-ratio test does not reject; the largest possible if it rejects them all."""
    count = len(gram)
    most = largest_rank(count)
    for rank in range(most):
        freedom = ((count - rank) ** 2 - count - rank) / 2
        allowed = float(stats.chi2.isf(LEVEL, freedom))
        _, statistic, _ = _descend([GramOfRound(np.arange(count), gram, rows, rank)], count, hopeless_above=allowed)
        if statistic <= allowed:
            return rank
    return most


def pool(rounds: Sequence[GramOfRound], clients: int) -> tuple[Array, bool]:
    """(σ̂² of clients 0 … clients−1, converged) from several rounds with common noise; NaN for clients never seen."""
    for one in rounds:
        _check(one.gram, one.rows)
    logs, _, converged = _descend(rounds, clients)
    return np.exp(logs), converged


def _check(gram: Array, rows: int) -> None:
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1]:
        raise BadInput(f"a Gram matrix is n×n, not of shape {gram.shape}")
    if rows <= len(gram):
        raise BadInput(f"factor analysis of {len(gram)} clients needs more than {len(gram)} coordinates, not {rows}")
    if not np.isfinite(gram).all() or (np.diag(gram) <= 0).any():
        raise BadInput("a client's update is zero or not finite: leave it out (server.defend does)")


@dataclass(frozen=True)
class _Point:
    value: float
    statistic: float
    gradient: Array
    curvature: Array


def _evaluate(rounds: Sequence[GramOfRound], logs: Array) -> _Point:
    """Σ_t d_t f_t(ψ) − 2a Σ ln ψ_i with its gradient and Gauss–Newton Hessian, over the total number of coordinates."""
    total = float(sum(one.rows for one in rounds))
    gradient, curvature, statistic = np.zeros(len(logs)), np.zeros((len(logs), len(logs))), 0.0
    for one in rounds:
        scale = np.exp(-0.5 * logs[one.clients])
        values, vectors = np.linalg.eigh(one.gram * np.outer(scale, scale))
        keep = len(values) - one.rank
        theta, omega = np.maximum(values[:keep], 1e-300), vectors[:, :keep]
        share = one.rows / total
        statistic += one.rows * float((theta - np.log(theta) - 1.0).sum())
        gradient[one.clients] += share * (omega**2 * (1.0 - theta)).sum(1)
        curvature[np.ix_(one.clients, one.clients)] += share * (omega @ omega.T) ** 2
    pull = 2.0 * GUARD / total
    seen = np.isfinite(logs)
    value = statistic / total - pull * float(logs[seen].sum())
    return _Point(value, statistic, gradient - pull * seen, curvature)


def _descend(rounds: Sequence[GramOfRound], count: int, hopeless_above: float = math.inf) -> tuple[Array, float, bool]:
    """Minimise over ln ψ by Gauss–Newton with a line search, ψ_i between a small share of i's power and all of it.

    Gives up early when the statistic will clearly stay above ``hopeless_above``: a rank that does not fit often takes
    the longest.
    """
    power = np.zeros(count)
    start = np.full(count, math.nan)
    for one in rounds:
        power[one.clients] = np.maximum(power[one.clients], np.diag(one.gram))
        left = (1.0 - one.rank / (2.0 * len(one.gram))) / np.diag(np.linalg.pinv(one.gram))
        start[one.clients] = np.fmin(start[one.clients], np.clip(left, FLOOR * np.diag(one.gram), np.diag(one.gram)))
    seen = power > 0
    with np.errstate(divide="ignore"):
        high = np.log(power)
    low = high + math.log(FLOOR)
    logs = np.where(seen, np.log(start), math.nan)
    point = _evaluate(rounds, logs)
    for _ in range(200):
        pushed = (logs <= low) & (point.gradient > 0) | (logs >= high) & (point.gradient < 0)
        free = np.flatnonzero(seen & ~pushed)
        if len(free) == 0 or np.abs(point.gradient[free]).max() < 1e-9:
            return logs, point.statistic, True
        moved = _line_search(rounds, logs, point, free, low, high)
        if moved is None:
            return logs, point.statistic, bool(np.abs(point.gradient[free]).max() < 1e-6)
        step, gain = np.nanmax(np.abs(moved[0] - logs)), point.statistic - moved[1].statistic
        logs, point = moved
        if point.statistic - 30.0 * abs(gain) > hopeless_above:
            return logs, point.statistic, False
        if step < 1e-6:
            return logs, point.statistic, True
    return logs, point.statistic, False


def _line_search(
    rounds: Sequence[GramOfRound], logs: Array, point: _Point, free: NDArray[np.int64], low: Array, high: Array
) -> tuple[Array, _Point] | None:
    """A Gauss–Newton step, halved until it descends; None when no step does."""
    matrix = point.curvature[np.ix_(free, free)] + 1e-6 * np.eye(len(free))
    direction = np.zeros(len(logs))
    direction[free] = -np.linalg.solve(matrix, point.gradient[free])
    direction *= min(1.0, 1.5 / np.abs(direction).max())
    length = 1.0
    while length > 1e-6:
        trial = np.clip(logs + length * direction, low, high)
        there = _evaluate(rounds, trial)
        if there.value <= point.value + 1e-4 * float(point.gradient[free] @ (trial - logs)[free]):
            return trial, there
        length /= 2.0
    return None
