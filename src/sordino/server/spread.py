"""Random effects: weights that count how much clients differ, beside how noisy they are.

Client i's update is u_i = μ_i + e_i: what it would have sent without noise, plus noise of known variance ψ_i. The
server wants Σ p_i μ_i (p: the objective's shares) and combines Σ w_i u_i. Per coordinate the squared error is

    E(w) = κ·(w − p)ᵀ Γ (w − p) + Σ w_i² ψ_i,      Γ_ij = μ_iᵀμ_j/d,   Σ w_i = 1,   w ≥ 0.

The first part is bias: who is not heard pulls less than its share. κ is the *horizon*: noise of successive rounds
averages out, bias adds up, so over a memory of κ rounds bias counts κ times (see docs/methods/random-effects.md).

*Structured* (the default): Γ from the Gram matrix of the updates, G − diag(ψ), averaged over rounds and made positive.
It knows who resembles whom: a quiet client may stand in for a noisy one that wants the same. ``least_error`` minimises
E exactly.

*Exchangeable*: Γ = τ²·I plus what all share. Then w_i = (κτ²p_i + ν)/(ψ_i + κτ²), and for equal shares w_i ∝
1/(ψ_i + κτ²): the random-effects weights of meta-analysis. τ² by REML over all coordinates.

Limits: clients that agree (Γ = 0) get w_i ∝ 1/ψ_i; without noise, or for κ → ∞, w = p. A client that claims to have no
noise gains at most its share, because its excess power then counts as an opinion and not as precision.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import minimize_scalar

from sordino.errors import BadInput
from sordino.server.columns import inverse_weights
from sordino.server.facts import Array

SPREADS = ("structured", "reml")


def weigh(gram: Array, variances: Array, shares: Array, spread_by: str, horizon: float) -> Array:
    """Weights from G = MᵀM/d (of one round, or averaged over rounds) and ψ, by either view of Γ."""
    if spread_by == "structured":
        return least_error(structure(gram, variances), variances, shares, horizon)
    if spread_by == "reml":
        return exchangeable(variances, reml(gram, variances), shares, horizon)
    raise BadInput(f"spread_by {spread_by!r} is unknown: use one of {', '.join(SPREADS)}")


def structure(gram: Array, variances: Array) -> Array:
    """Γ = the positive part of G − diag(ψ): Gram matrix of the updates without their noise."""
    clean = gram - np.diag(variances)
    values, vectors = np.linalg.eigh((clean + clean.T) / 2.0)
    return np.asarray((vectors * np.maximum(values, 0.0)) @ vectors.T)


def least_error(structured: Array, variances: Array, shares: Array, horizon: float) -> Array:
    """The w ≥ 0, Σw = 1 that minimises κ(w − p)ᵀΓ(w − p) + Σ w_i²ψ_i: an active-set method, exact.

    Parameters
    ----------
    structured : Γ, n×n, positive semidefinite.
    variances : ψ ≥ 0.
    shares : p ≥ 0, Σp = 1.
    horizon : κ ≥ 0.
    """
    _check(variances, shares, horizon)
    count = len(variances)
    typical = float(np.mean(variances + horizon * np.diag(structured)))
    if typical == 0.0:
        return shares.copy()
    # A ridge far below any variance keeps the system solvable when several clients are exact and agree.
    matrix = (horizon * structured + np.diag(variances)) / typical + 1e-12 * np.eye(count)
    wanted = (horizon * structured @ shares) / typical + 1e-12 * shares
    inside = np.ones(count, dtype=bool)
    for _ in range(10 * count):
        weights, level = _on_face(matrix, wanted, inside)
        if (weights < -1e-12).any():
            inside &= weights > -1e-12
            continue
        slope = matrix @ weights - wanted - level
        slope[inside] = 0.0
        if slope.min() >= -1e-9:
            break
        inside[int(slope.argmin())] = True
    weights = np.maximum(weights, 0.0)
    return np.asarray(weights / weights.sum())


def _on_face(matrix: Array, wanted: Array, inside: np.ndarray) -> tuple[Array, float]:
    """Minimise ½wᵀAw − bᵀw with Σw = 1 over the coordinates inside, others 0; also the multiplier of the sum."""
    index = np.flatnonzero(inside)
    solved = np.linalg.solve(matrix[np.ix_(index, index)], np.stack([wanted[index], np.ones(len(index))], axis=1))
    level = (1.0 - solved[:, 0].sum()) / solved[:, 1].sum()
    weights = np.zeros(len(matrix))
    weights[index] = solved[:, 0] + level * solved[:, 1]
    return weights, float(level)


def exchangeable(variances: Array, spread: float, shares: Array, horizon: float = 1.0) -> Array:
    """w_i = (κτ²p_i + ν)/(ψ_i + κτ²), ν so that Σw = 1: random-effects weights with τ² = ``spread``."""
    _check(variances, shares, horizon)
    if not spread >= 0.0:
        raise BadInput(f"the spread τ² between clients is {spread!r}: it must be ≥ 0")
    between = horizon * spread
    if between == 0.0:
        return inverse_weights(variances)
    if math.isinf(between):
        return shares.copy()
    precision = 1.0 / (variances + between)
    level = (1.0 - between * float(shares @ precision)) / float(precision.sum())
    weights = np.maximum((between * shares + level) * precision, 0.0)
    return np.asarray(weights / weights.sum())


def reml(gram: Array, variances: Array) -> float:
    """τ² by restricted maximum likelihood from G = MᵀM/d and ψ: one common mean per coordinate, d coordinates.

    Minimises Σ ln(ψ_i + τ²) + ln Σ a_i + Σ a_i ‖u_i − ū‖²/d over τ², a_i = 1/(ψ_i + τ²), ū the a-weighted mean.
    """
    power = np.diag(gram)
    largest = float(power.max())
    if len(gram) < 2 or largest == 0.0:
        return 0.0
    smallest = 1e-9 * largest

    def criterion(log_spread: float) -> float:
        precision = 1.0 / (variances + math.exp(log_spread))
        total = float(precision.sum())
        mean = precision / total
        apart = power - 2.0 * gram @ mean + mean @ gram @ mean
        return float(-np.log(precision).sum() + math.log(total) + precision @ apart)

    # The criterion may have two valleys when variances differ by orders of magnitude: look everywhere, then refine.
    grid = np.linspace(math.log(smallest), math.log(2.0 * largest), 60)
    best = int(np.argmin([criterion(x) for x in grid]))
    if best == 0:
        return 0.0
    around = (float(grid[best - 1]), float(grid[min(best + 1, len(grid) - 1)]))
    return math.exp(float(minimize_scalar(criterion, bounds=around, method="bounded").x))


def _check(variances: Array, shares: Array, horizon: float) -> None:
    if not (np.isfinite(variances).all() and (variances >= 0).all()):
        raise BadInput("noise variances must be finite and ≥ 0")
    if (
        shares.shape != variances.shape
        or (shares < 0).any()
        or not math.isclose(float(shares.sum()), 1.0, rel_tol=1e-6)
    ):
        raise BadInput("shares must be ≥ 0, one per client, and sum to 1")
    if not 0.0 <= horizon < math.inf:
        raise BadInput(f"horizon is {horizon!r}: the number of rounds over which noise averages out, a number ≥ 0")
