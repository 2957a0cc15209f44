"""Confidence intervals from noisy counts: proportions, ratios, averages and spreads under sampling and known noise.

The counts x̃ = x + noise have independent Gaussian noise of known deviation; x is drawn by m records that fall into
cells (or none), independently. Every interval is the set of values that a two-sided test does not reject. An estimate
is moved into its range *before* the test is inverted: that makes intervals longer, never shorter, and never empty.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import gammaln, ndtr, ndtri, xlog1py, xlogy

Array = NDArray[np.float64]
Interval = tuple[float, float]

POINTS = 2001
"""Values at which a test is inverted; between two of them the limit is found on a straight line."""

DRAWS = 16_000
"""Draws of a simulated distribution: a tail of 2.5 % is then known to 0.12 %."""


def normal(level: float) -> float:
    """q with P(|N(0, 1)| ≤ q) = ``level``."""
    return float(ndtri(0.5 + level / 2.0))


def proportion(count: float, total: int, deviation: float, level: float) -> Interval:
    """The interval of a in c̃ ~ Binomial(m, a) + N(0, s²): Clopper and Pearson's (1934), with noise. Exact.

    The limits solve P_a(C̃ ≥ c̃) = α/2 and P_a(C̃ ≤ c̃) = α/2. For records of several sites with unequal a_i, a is
    Σ m_i a_i/m, and the count varies less than a binomial (Hoeffding 1956): the interval is then too long, if anything.
    """
    inside = min(max(count, 0.0), float(total))
    tail = (1.0 - level) / 2.0
    return _lower(inside, total, deviation, tail), 1.0 - _lower(total - inside, total, deviation, tail)


def _lower(count: float, total: int, deviation: float, tail: float) -> float:
    """The a with P_a(C̃ ≥ count) = tail; 0 where even a = 0 is not rejected."""

    def excess(chance: float) -> float:
        centre, reach = total * chance, 9.0 * np.sqrt(total * chance * (1.0 - chance)) + 30.0
        hits = np.arange(max(0.0, np.floor(centre - reach)), min(total, np.ceil(centre + reach)) + 1.0)
        ways = gammaln(total + 1.0) - gammaln(hits + 1.0) - gammaln(total - hits + 1.0)
        mass = np.exp(ways + xlogy(hits, chance) + xlog1py(total - hits, -chance))
        above = ndtr((hits - count) / deviation) if deviation > 0 else hits >= count
        return float(mass @ above) - tail

    return 0.0 if excess(0.0) >= 0.0 else float(brentq(excess, 0.0, 1.0, xtol=1e-9))


def mean_of_proportions(counts: Array, totals: Array, deviations: Array, level: float) -> Interval:
    """The interval of θ = Σ a_i/n from c̃_i ~ Binomial(m_i, a_i) + N(0, s_i²), by a score test.

    Its variance at θ is the largest that any a_i with mean θ have: max Σ (a_i(1 − a_i)/m_i + s_i²/m_i²)/n², reached at
    a_i = (1 − λ m_i)/2 clipped to [0, 1].
    """
    slopes = np.linspace(-1.0, 1.0, POINTS)[:, None] / totals.min()
    worst = np.clip(0.5 * (1.0 - slopes * totals), 0.0, 1.0)
    variance = (worst * (1.0 - worst) / totals + (deviations / totals) ** 2).sum(1) / len(totals) ** 2
    means = worst.mean(1)
    return accepted(
        float((counts / totals).mean()), 1.0, lambda grid: np.interp(grid, means[::-1], variance[::-1]), level
    )


def accepted(
    value: float, scale: float, variance: Callable[[Array], Array], level: float, span: Interval = (0.0, 1.0)
) -> Interval:
    """Fieller's interval (1954): all θ of ``span`` with |value − θ|·scale ≤ q √variance(θ), closed to an interval."""
    grid = np.linspace(*span, POINTS)
    inside = float(np.clip(value, *span))
    gap = np.abs(inside - grid) * scale - normal(level) * np.sqrt(variance(grid))
    held = np.flatnonzero(gap <= 0.0)
    if not held.size:  # the accepted values lie between two points of the grid, around ``inside``
        place = int(np.clip(np.searchsorted(grid, inside), 1, POINTS - 1))
        return float(grid[place - 1]), float(grid[place])
    first, last = int(held[0]), int(held[-1])
    low, high = float(grid[first]), float(grid[last])
    step = float(grid[1] - grid[0])
    if first:
        low -= step * float(gap[first] / (gap[first] - gap[first - 1]))
    if last < POINTS - 1:
        high += step * float(gap[last] / (gap[last] - gap[last + 1]))
    return min(low, inside), max(high, inside)


def sampled(counts: Array, weights: Array, deviation: float) -> Array:
    """Σ_b x_b w_b², what sampling adds to the variance of Σ w_b x̃_b, from noisy counts; weights ``[…, b]``.

    Counts drawn by records that fall into one cell or none have at most this variance, also pooled over unequal sites.
    One deviation of its own noise is added, as of counts known to one record at best: an empty cell does not prove that
    records never fall into it (no error among n records leaves a chance of about 3/n).
    """
    squares = weights**2
    found: Array = np.maximum(squares @ counts, 0.0) + max(deviation, 1.0) * np.sqrt((squares**2).sum(-1))
    return found


def ratio(
    counts: Array, top: Array, below: Array, deviation: float, level: float, span: Interval = (0.0, 1.0)
) -> tuple[float, Interval]:
    """θ = Σ t_b x_b/Σ d_b x_b and its interval, from T(θ) = Σ (t_b − θ d_b) x̃_b, whose mean at the true θ is 0.

    Var T(θ) = s² Σ (t_b − θ d_b)² + ``sampled``. Where the denominator is not clearly positive, all of ``span``.
    """
    bottom = float(below @ counts)
    if bottom <= normal(level) * deviation * np.sqrt(float(below @ below)):
        return _unknown(float(top @ counts), bottom, span), span

    def variance(grid: Array) -> Array:
        weights = top - grid[:, None] * below
        noise: Array = deviation**2 * (weights**2).sum(1)
        return noise + sampled(counts, weights, deviation)

    value = float(top @ counts) / bottom
    return float(np.clip(value, *span)), accepted(value, bottom, variance, level, span)


def pairs(ones: Array, zeros: Array, worth: Array, deviation: float, level: float) -> tuple[float, Interval]:
    """θ = Σ_jl W_jl x_j y_l/(Σ x Σ y) over pairs of a record of class 1 (bin j) and one of class 0 (bin l).

    T(θ) = x̃ᵀ(W − θ)ỹ has mean 0 at the true θ, for x̃ and ỹ have independent noises. Given ỹ its noise is normal with
    variance s²‖(W − θ)ỹ‖²; s²(‖(W − θ)ỹ‖² + ‖(W − θ)ᵀx̃‖²) is at least as large as its variance on average.
    [0, 1] where either class is not clearly present.
    """
    positives, negatives = float(ones.sum()), float(zeros.sum())
    top, bottom = float(ones @ worth @ zeros), positives * negatives
    if min(positives, negatives) <= normal(level) * deviation * np.sqrt(len(ones)):
        return _unknown(top, min(bottom, positives, negatives), (0.0, 1.0)), (0.0, 1.0)

    def variance(grid: Array) -> Array:
        of_ones = worth @ zeros - grid[:, None] * negatives
        of_zeros = ones @ worth - grid[:, None] * positives
        noise: Array = deviation**2 * ((of_ones**2).sum(1) + (of_zeros**2).sum(1))
        return noise + sampled(ones, of_ones, deviation) + sampled(zeros, of_zeros, deviation)

    value = top / bottom
    return float(np.clip(value, 0.0, 1.0)), accepted(value, bottom, variance, level)


def _unknown(top: float, bottom: float, span: Interval) -> float:
    """The value shown where the interval is all of its range: the ratio if there is one, else the middle."""
    return float(np.clip(top / bottom, *span)) if bottom > 0.0 else (span[0] + span[1]) / 2.0


def spread(values: Array, variances: Array, shares: Array, level: float, seed: int) -> tuple[float, Interval]:
    """Ψ = Σ p_i (e_i − Σ p_j e_j)², at most 1/4, from ẽ_i ~ N(e_i, w_i): debiased, with an interval by simulation.

    Q = Σ p_i (ẽ_i − ẽ)² is ‖u + ζ‖² with ‖u‖² = Ψ and ζ ~ N(0, Γ), Γ = √A diag(w) √A, A = diag(p) − ppᵀ; its mean is
    Ψ + tr Γ, its variance 2 tr Γ² + 4 uᵀΓu. A value of Ψ is kept if Q lies in neither tail of α/2 for some u of that
    length; tried are the axes of Γ on which that variance is largest and smallest.
    """
    if len(values) == 1:
        return 0.0, (0.0, 0.0)
    root = np.sqrt(variances)
    inner = np.diag(shares) - np.outer(shares, shares)
    eigen = np.maximum(np.linalg.eigvalsh(root[:, None] * inner * root), 0.0)[1:]  # the smallest belongs to Σ p_i e_i
    excess = float(values @ inner @ values) - float(eigen.sum())
    value = min(max(excess, 0.0), 0.25)
    draws = max(DRAWS // 8, min(DRAWS, 2_000_000 // len(values)))
    noise = np.random.default_rng(seed).standard_normal((draws, len(eigen))) * np.sqrt(eigen)
    lengths, axes = (noise**2).sum(1), noise[:, [0, -1]]
    seen, tail = value + float(eigen.sum()), (1.0 - level) / 2.0

    def above(psi: float) -> float:
        return float((lengths[:, None] + 2.0 * np.sqrt(psi) * axes + psi >= seen).mean(0).max()) - tail

    def beyond(psi: float) -> float:
        return float((lengths[:, None] + 2.0 * np.sqrt(psi) * axes + psi <= seen).mean(0).max()) - tail

    low = 0.0 if above(0.0) >= 0.0 else _crossing(above, 0.0, value)
    high = 0.25 if beyond(0.25) >= 0.0 else _crossing(beyond, value, 0.25)
    return value, (min(low, value), max(high, value))


def _crossing(rule: Callable[[float], float], low: float, high: float) -> float:
    """Where ``rule``, a step function of one change of sign, changes it."""
    at_low = rule(low) >= 0.0
    for _ in range(30):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if (rule(middle) >= 0.0) == at_low else (low, middle)
    return 0.5 * (low + high)
