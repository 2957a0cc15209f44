"""Selection rules as distributions over clients: by size, alike, and the solution of Problem 1, exact in one sort.

    min_p  ‖p − u‖₁ + √(‖p − u‖₁² + η Σ p_k² V_k)    over the simplex,    u_k = n_k/Σn

Write W_k = η V_k, s = ‖p − u‖₁ and f for the objective. Multiplying the stationarity condition by the root gives

    σ_k f + p_k W_k = ν,    σ_k ∈ ∂|p_k − u_k|:

at the optimum the *marginal noise* p_k W_k is u_k W_k clipped to an interval [lo, hi] of width 2f. Clients below lo
are raised to p_k = lo/W_k, clients above hi are lowered to hi/W_k, everyone between keeps u_k exactly. What is raised
equals what is lowered; call it m = s/2. Along the path m ↦ p(m) the objective is convex, the sets change at sorted
values of u_k W_k, and between two changes the condition hi − lo = 2f is a quadratic equation. So: sort, prefix sums,
two binary searches for the sets, one closed form. Clients with V_k = 0 (public data) take all raised mass, at lo = 0.

V_k is the variance that client k adds to one coordinate of its *averaged* gradient, per participation-step it will make
and in units of C²: σ_k² = V_k T_k K C² (T_k participations of K local steps). For Gaussian noise it hardly depends on
T_k, so it can be taken at a nominal participation before anybody has been drawn.
"""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np
from numpy.typing import ArrayLike

from sordino.errors import BadInput
from sordino.server.checks import Array, distribution, noise_variances, positive, record_counts, whole

NEGLIGIBLE = 1e-290
"""Weighted variances below this count as 0: they change the objective by less than 1e-145, and 1/W stays finite."""


def unbiased(sizes: ArrayLike) -> Array:
    """u_k = n_k/Σn: the average of the drawn updates estimates the update of F = Σ u_k f_k without bias."""
    records = record_counts(sizes)
    return np.asarray(records / records.sum(), dtype=np.float64)


def uniform(clients: int) -> Array:
    """p_k = 1/N: every client alike, whatever its size; estimates the update of the plain mean of the f_k."""
    count = whole(clients, "clients")
    return np.full(count, 1.0 / count)


def compensation(probabilities: ArrayLike, sizes: ArrayLike) -> Array:
    """Importance weights c_k = u_k/p_k that keep the objective unbiased for any p.

    With m = N_select draws k_1 … k_m from p the aggregate (1/m) Σ_j c_{k_j} Δ_{k_j} has the expectation
    Σ p_k c_k Δ_k = Σ u_k Δ_k. The weights are *not* divided by their sum in a round: that would bring a bias back.

    Notes
    -----
    The expected noise on the aggregate is C² T Σ (p_k c_k)² V_k = C² T Σ u_k² V_k: the same for every p. Compensation
    takes back what drawing quiet clients more often had gained; it changes the sampling variance only.
    """
    target = unbiased(sizes)
    chosen = distribution(probabilities, target.size)
    never = np.flatnonzero(chosen == 0.0)
    if never.size:
        raise BadInput(
            f"probabilities[{never[0]}] is 0: a client that is never drawn cannot be compensated for; "
            "give it a positive probability or leave it out of sizes"
        )
    return np.asarray(target / chosen, dtype=np.float64)


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
    factor = positive(weight, "weight", "η weighs noise against bias and must be a finite number ≥ 0", or_zero=True)
    with np.errstate(over="ignore"):
        noise = factor * noise_variances(variances, shares.size)
    if not np.isfinite(noise).all():
        raise BadInput(f"weight × variances overflows at weight {factor:g}: lower the weight")
    noise = np.where(noise < NEGLIGIBLE, 0.0, noise)  # W_k
    marginal = shares * noise
    if marginal.max() - marginal.min() <= 2.0 * math.sqrt(float((shares * marginal).sum())):
        return shares
    return _solve(shares, noise, marginal)


class _Sorted:
    """Clients with noise in order of marginal noise y_k = u_k W_k, with running sums (entry i: the first i clients).

    ``share`` is u and ``capacity`` 1/W; ``public`` says whether there are clients without noise beside them. Sums
    ``above_*`` start at the top and are not differences, because the quietest clients would drown them.
    """

    def __init__(self, marginal: Array, share: Array, capacity: Array, public: bool) -> None:
        self.marginal, self.share, self.capacity, self.public = marginal, share, capacity, public
        self.below_capacity, self.below_share = _running(capacity), _running(share)
        self.below_noise = _running(share * marginal)
        self.above_capacity, self.above_share = _running(capacity[::-1])[::-1], _running(share[::-1])[::-1]

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
    table = _Sorted(marginal[order], shares[order], 1.0 / noise[order], public=noisy.size < noise.size)
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


def _running(values: Array) -> Array:
    """Sums of the first 0, 1, …, n values."""
    return np.concatenate(([0.0], np.cumsum(values)))
