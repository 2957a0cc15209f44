"""Random effects: weights that count how much clients differ, beside how noisy they are.

Client i takes K_i local steps, so what it says about *one* step is y_i = u_i/K_i = μ_i + noise of variance
v_i = σ_i²/K_i². (Comparing whole updates would call a client quiet because it took few steps.) The server wants
Σ p_i μ_i, p the objective's shares, and combines Σ ω_i y_i with Σω = 1. Per coordinate the squared error is

    E(ω) = κ·(ω − p)ᵀ Γ (ω − p) + Σ ω_i² v_i,      Γ_ij = μ_iᵀμ_j/d.

The first part is bias: who is not heard pulls less than its share. κ is the *horizon*: noise of successive rounds
averages out, bias adds up, so bias counts about twice as often as there are rounds that the model remembers.

``reml`` (the default): clients are exchangeable, Γ = τ²·I plus what all share. Then

    ω_i = (κτ²p_i + ν)/(v_i + κτ²),

and for equal shares ω_i ∝ 1/(v_i + κτ²), the random-effects weights of meta-analysis. τ² is the restricted maximum
likelihood estimate over all coordinates *plus its standard error*: disagreement that noise hides is not agreement.

``structured``: Γ from the Gram matrix itself, G − diag(v) made positive. It knows who resembles whom, and needs far
less noise than there usually is to know it well.

Limits: clients that agree get ω_i ∝ 1/v_i; without noise, or for κ → ∞, ω = p. A client that claims to have no noise
gains little beyond its share, because its excess power then counts as an opinion and not as precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

from sordino.errors import BadInput
from sordino.server.columns import inverse_weights
from sordino.server.facts import Array


@dataclass(frozen=True)
class Spread:
    """τ², the variance between clients per coordinate, and its standard error."""

    estimate: float
    error: float


def weigh(
    gram: Array, variances: Array, shares: Array, rows: float, *, spread_by: str = "reml", horizon: float
) -> tuple[Array, Spread]:
    """(ω, τ²) from the Gram matrix G of the y_i (of one round, or averaged), v, p and the coordinates behind G."""
    if not (np.isfinite(variances).all() and (variances >= 0).all()):
        raise BadInput("noise variances must be finite and ≥ 0")
    whole = shares.shape == variances.shape and math.isclose(float(shares.sum()), 1.0, rel_tol=1e-6)
    if not whole or (shares < 0).any():
        raise BadInput("shares must be ≥ 0, one per client, and sum to 1")
    if not 0.0 <= horizon < math.inf:
        raise BadInput(f"horizon is {horizon!r}: how much more bias counts than noise of one round, a number ≥ 0")
    between = reml(gram, variances, rows)
    if spread_by == "reml":
        return exchangeable(variances, between.estimate + between.error, shares, horizon), between
    if spread_by == "structured":
        return least_error(structure(gram, variances), variances, shares, horizon), between
    raise BadInput(f"spread_by {spread_by!r} is unknown: use one of reml, structured")


def exchangeable(variances: Array, spread: float, shares: Array, horizon: float = 1.0) -> Array:
    """ω_i = (κτ²p_i + ν)/(v_i + κτ²), ν so that Σω = 1, with τ² = ``spread`` ≥ 0."""
    between = horizon * spread
    if between == 0.0:
        return inverse_weights(variances)
    if math.isinf(between):
        return shares.copy()
    precision = 1.0 / (variances + between)
    level = (1.0 - between * float(shares @ precision)) / float(precision.sum())
    weights = np.maximum((between * shares + level) * precision, 0.0)
    return np.asarray(weights / weights.sum())


def reml(gram: Array, variances: Array, rows: float) -> Spread:
    """τ² by restricted maximum likelihood from G = MᵀM/d and v: one common mean per coordinate, d = ``rows``.

    Minimises Σ ln(v_i + τ²) + ln Σ a_i + Σ a_i ‖y_i − ȳ‖²/d over τ², a_i = 1/(v_i + τ²), ȳ the a-weighted mean. The
    standard error is 1/√I with I = (d/2)(Σa² − 2Σa³/Σa + (Σa²)²/(Σa)²).
    """
    power = np.diag(gram)
    largest = float(np.maximum(power, variances).max())
    if len(gram) < 2 or largest == 0.0:
        return Spread(0.0, 0.0)

    def criterion(log_spread: float) -> float:
        precision = 1.0 / (variances + math.exp(log_spread))
        total = float(precision.sum())
        mean = precision / total
        apart = power - 2.0 * gram @ mean + mean @ gram @ mean
        return float(-np.log(precision).sum() + math.log(total) + precision @ apart)

    # The criterion may have two valleys when variances differ by orders of magnitude: look everywhere, then refine.
    grid = np.linspace(math.log(1e-9 * largest), math.log(2.0 * largest), 80)
    best = int(np.argmin([criterion(x) for x in grid]))
    estimate = 0.0
    if best > 0:
        around = (float(grid[best - 1]), float(grid[min(best + 1, len(grid) - 1)]))
        estimate = math.exp(float(minimize_scalar(criterion, bounds=around, method="bounded").x))
    floor = np.maximum(variances + estimate, 1e-9 * largest)
    first, second, third = (float((floor**-power_of).sum()) for power_of in (1, 2, 3))
    information = 0.5 * rows * (second - 2.0 * third / first + (second / first) ** 2)
    return Spread(estimate, information**-0.5 if information > 0.0 else math.inf)


def structure(gram: Array, variances: Array) -> Array:
    """Γ = the positive part of G − diag(v): Gram matrix of the y_i without their noise."""
    clean = gram - np.diag(variances)
    values, vectors = np.linalg.eigh((clean + clean.T) / 2.0)
    return np.asarray((vectors * np.maximum(values, 0.0)) @ vectors.T)


def least_error(structured: Array, variances: Array, shares: Array, horizon: float) -> Array:
    """The ω ≥ 0, Σω = 1 that minimises κ(ω − p)ᵀΓ(ω − p) + Σ ω_i²v_i: an active-set method, exact."""
    count = len(variances)
    typical = float(np.mean(variances + horizon * np.diag(structured)))
    if typical == 0.0:
        return shares.copy()
    # A ridge far below any variance keeps the system solvable when several clients are exact and agree.
    matrix = (horizon * structured + np.diag(variances)) / typical + 1e-12 * np.eye(count)
    wanted = (horizon * structured @ shares) / typical + 1e-12 * shares
    inside = np.ones(count, dtype=bool)
    weights = shares
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


def _on_face(matrix: Array, wanted: Array, inside: NDArray[np.bool_]) -> tuple[Array, float]:
    """Minimise ½ωᵀAω − bᵀω with Σω = 1 over the coordinates inside, others 0; also the multiplier of the sum."""
    index = np.flatnonzero(inside)
    solved = np.linalg.solve(matrix[np.ix_(index, index)], np.stack([wanted[index], np.ones(len(index))], axis=1))
    level = (1.0 - solved[:, 0].sum()) / solved[:, 1].sum()
    weights = np.zeros(len(matrix))
    weights[index] = solved[:, 0] + level * solved[:, 1]
    return weights, float(level)
