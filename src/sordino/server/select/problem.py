"""Problem 1 of privacy-aware selection, solved exactly in one sort.

    min_p  ‖p − u‖₁ + √(‖p − u‖₁² + η Σ p_k² V_k)    over the simplex,    u_k = n_k/Σn

Write W_k = η V_k, s = ‖p − u‖₁ and f for the objective. Multiplying the stationarity condition by the root gives

    σ_k f + p_k W_k = ν,    σ_k ∈ ∂|p_k − u_k|:

at the optimum the *marginal noise* p_k W_k is u_k W_k clipped to an interval [lo, hi] of width 2f. Clients below lo
are raised to p_k = lo/W_k, clients above hi are lowered to hi/W_k, everyone between keeps u_k exactly. What is raised
equals what is lowered; call it m = s/2. Along the path m ↦ p(m) the objective is convex, the sets change at sorted
values of u_k W_k, and between two changes the condition hi − lo = 2f is a quadratic equation. So: sort, prefix sums,
two binary searches for the sets, one closed form. Clients with V_k = 0 (public data) take all raised mass, at lo = 0.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from sordino.errors import BadInput
from sordino.server.select.checks import Array, at_least, distribution, non_negative, vector
from sordino.server.select.rules import unbiased

NEGLIGIBLE = 1e-290
"""Weighted variances below this count as 0: they change the objective by less than 1e-145, and 1/W stays finite."""


def privacy_aware(sizes: ArrayLike, variances: ArrayLike, weight: float) -> Array:
    """Selection probabilities p that minimise ‖p − u‖₁ + √(‖p − u‖₁² + η Σ p_k² V_k).

    Parameters
    ----------
    sizes : n_k > 0, records of each client.
    variances : V_k ≥ 0, noise factors (``noise_factors``, ``closed_form_factors``); 0 for public data.
    weight : η ≥ 0, what noise costs against bias (``default_weight``).

    Returns
    -------
    p, all positive, summing to 1. p = u, bit for bit, iff √η (max u_kV_k − min u_kV_k) ≤ 2 √(Σ u_k² V_k). The optimum
    is unique unless several clients have V_k = 0; those then share what they gain in proportion to n_k.
    """
    shares = unbiased(sizes)
    noise = weighted_variances(variances, weight, shares.size)
    marginal = shares * noise
    if marginal.max() - marginal.min() <= 2.0 * math.sqrt(float((shares * marginal).sum())):
        return shares
    return _solve(shares, noise, marginal)


def objective(probabilities: ArrayLike, sizes: ArrayLike, variances: ArrayLike, weight: float) -> float:
    """Problem 1's objective ‖p − u‖₁ + √(‖p − u‖₁² + η Σ p_k² V_k) at any distribution p."""
    shares = unbiased(sizes)
    chosen = distribution(probabilities, shares.size)
    noise = weighted_variances(variances, weight, shares.size)
    gap = float(np.abs(chosen - shares).sum())
    return gap + math.hypot(gap, math.sqrt(float((chosen * (chosen * noise)).sum())))


def weighted_variances(variances: ArrayLike, weight: float, clients: int) -> Array:
    """W_k = η V_k, with what cannot matter set to 0."""
    factor = non_negative(weight, "weight", "η weighs noise against bias and must be a finite number ≥ 0")
    found = at_least(vector(variances, "variances", clients), 0.0, "variances", "a variance is never negative")
    with np.errstate(over="ignore"):
        noise = factor * found
    if not np.isfinite(noise).all():
        raise BadInput(f"weight × variances overflows at weight {factor:g}: lower the weight")
    return np.where(noise < NEGLIGIBLE, 0.0, noise)


@dataclass(frozen=True)
class _Sorted:
    """Clients with noise, ordered by marginal noise y_k = u_k W_k, with running sums (entry i: the first i clients).

    ``above_*`` are summed from the top, not taken as differences, because the quietest clients would drown them.
    """

    marginal: Array
    share: Array
    capacity: Array
    below_capacity: Array
    below_share: Array
    below_noise: Array
    above_capacity: Array
    above_share: Array
    public: bool

    def raised_mass(self, index: int) -> float:
        """Mass needed to raise everyone below client ``index`` to its marginal noise."""
        return float(self.marginal[index] * self.below_capacity[index] - self.below_share[index])

    def is_past(self, index: int) -> bool:
        """Whether lowering everyone above client ``index`` to its marginal noise overshoots: then hi − lo ≤ 2f."""
        high, capacity = float(self.marginal[index]), float(self.above_capacity[index + 1])
        mass = float(self.above_share[index + 1]) - high * capacity
        if mass <= 0.0:
            return False
        raised = 0 if self.public else bisect_left(range(self.marginal.size), mass, key=self.raised_mass)
        if raised > index:
            return True
        low = 0.0 if self.public else float((mass + self.below_share[raised]) / self.below_capacity[raised])
        between = float(self.below_noise[index + 1] - self.below_noise[raised])
        noise = low * (low * float(self.below_capacity[raised])) + between + high * (high * capacity)
        return high - low <= 4.0 * mass + 2.0 * math.hypot(2.0 * mass, math.sqrt(noise))

    def is_raised_enough(self, index: int, kept: int) -> bool:
        """Whether the optimum that raises those below client ``index``, and lowers from ``kept`` on, stays below it."""
        raised = (float(self.below_capacity[index]), float(self.below_share[index]))
        lowered = (float(self.above_capacity[kept]), float(self.above_share[kept]))
        low, _, _ = _levels(raised, lowered, float(self.below_noise[kept] - self.below_noise[index]))
        return bool(low <= self.marginal[index])


def _solve(shares: Array, noise: Array, marginal: Array) -> Array:
    """The optimum when it is not u: find who is lowered, then who is raised, then the levels in closed form.

    Levels, not masses, drive both searches: a client lowered almost to nothing leaves no trace in a mass.
    """
    noisy = np.flatnonzero(noise > 0.0)
    order = noisy[np.argsort(marginal[noisy], kind="stable")]
    table = _sorted(marginal[order], shares[order], 1.0 / noise[order], public=noisy.size < noise.size)
    kept = bisect_left(range(order.size), True, key=lambda index: not table.is_past(index))
    raised = 0
    if not table.public:
        kept = max(kept, 1)  # somebody is raised, even where rounding hides by how much
        raised = 1 + bisect_left(range(1, kept), True, key=lambda index: table.is_raised_enough(index, kept))
    below, above = slice(0, raised), slice(kept, None)
    low, high, mass = _levels(  # from fresh, pairwise sums: the running ones served the search
        None if table.public else (float(table.capacity[below].sum()), float(table.share[below].sum())),
        (float(table.capacity[above].sum()), float(table.share[above].sum())),
        float((table.share[raised:kept] * table.marginal[raised:kept]).sum()),
    )
    found = shares.copy()
    found[order[below]] = low * table.capacity[below]
    found[order[above]] = high * table.capacity[above]
    if table.public:
        free = noise == 0.0
        found[free] *= 1.0 + mass / float(shares[free].sum())
    return found


def _levels(
    raised: tuple[float, float] | None, lowered: tuple[float, float], between: float
) -> tuple[float, float, float]:
    """(lo, hi, m) for fixed sets: D = hi − lo solves (d₁+4) D² − 8 d₀ D − 4 d₁ Q_min = 0.

    ``raised`` (A, B_A) and ``lowered`` (E, B_E) hold Σ 1/W and Σ u of the sets (``raised`` None: public clients take
    everything, 1/A = 0), ``between`` the noise Σ u² W of the rest. lo = (B_A + m)/A, hi = (B_E − m)/E,
    d₀ = B_E/E − B_A/A, d₁ = 1/A + 1/E, and Q_min is the noise at lo = hi. No difference of near-equal numbers enters
    lo or hi.
    """
    out_capacity, out_share = lowered
    if raised is None:
        offset, slope, least = out_share / out_capacity, 1.0 / out_capacity, between
    else:
        in_capacity, in_share = raised
        offset = out_share / out_capacity - in_share / in_capacity
        slope = 1.0 / in_capacity + 1.0 / out_capacity
        level = (in_share + out_share) / (in_capacity + out_capacity)
        least = between + level * (in_share + out_share)
    half = 2.0 * offset / (slope + 4.0)
    width = 2.0 * half + 2.0 * math.hypot(half, math.sqrt(least * (slope / (slope + 4.0))))
    mass = max((offset - width) / slope, 0.0)
    if raised is None:
        return 0.0, width, mass
    return (in_share + mass) / in_capacity, level + width * in_capacity / (in_capacity + out_capacity), mass


def _sorted(marginal: Array, share: Array, capacity: Array, public: bool) -> _Sorted:
    """Running sums over clients already in order."""
    return _Sorted(
        marginal=marginal,
        share=share,
        capacity=capacity,
        below_capacity=_running(capacity),
        below_share=_running(share),
        below_noise=_running(share * marginal),
        above_capacity=_running(capacity[::-1])[::-1],
        above_share=_running(share[::-1])[::-1],
        public=public,
    )


def _running(values: Array) -> Array:
    """Sums of the first 0, 1, …, n values."""
    found = np.zeros(values.size + 1)
    np.cumsum(values, out=found[1:])
    return found
