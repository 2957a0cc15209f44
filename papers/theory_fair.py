"""The formulas of FedFDP as functions: Theorem 1's bound and the best fairness weight."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sordino.errors import BadInput


@dataclass(frozen=True)
class Convex:
    """The constants of Theorem 1: F_i L-smooth and μ-strongly convex, gradients of norm at most G.

    Attributes: ``smoothness`` L, ``convexity`` μ, ``gradient`` G, ``heterogeneity`` Γ = F* − Σ p_i F_i*,
    ``noise_variance`` σ²C²d/B̂² of the averaged gradient (B̂ the smallest batch), ``distance`` E‖w₁ − w*‖².
    """

    smoothness: float
    convexity: float
    gradient: float
    heterogeneity: float = 0.0
    noise_variance: float = 0.0
    distance: float = 0.0

    def __post_init__(self) -> None:
        for name in ("smoothness", "convexity", "gradient"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise BadInput(f"{name} is {getattr(self, name)!r}: Theorem 1 needs a finite number > 0")
        for name in ("heterogeneity", "noise_variance", "distance"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise BadInput(f"{name} is {getattr(self, name)!r}: Theorem 1 needs a finite number ≥ 0")


def theorem1(rounds: int, factor: float, at: Convex) -> float:
    """Theorem 1 of FedFDP: E[F(w_t)] − F* ≤ L/(2t) · (A/(μ²(2C_t − 1)) + E‖w₁ − w*‖²).

    A = G²C_t³ + 3G²C_t² + 2LΓC_t + 2σ²C²d/B̂²; ``factor`` C_t is the mean clipping factor Σ p_i mean_j C_t^ij, and
    must exceed ½: below, the published induction does not go through.
    """
    if rounds < 1:
        raise BadInput(f"rounds is {rounds!r}: the bound holds from round 1 on")
    if not (math.isfinite(factor) and factor > 0.5):
        raise BadInput(f"the mean clipping factor is {factor!r}: Theorem 1 needs more than ½; use a larger clip")
    square = at.gradient**2
    variance = square * factor**3 + 3 * square * factor**2
    variance += 2 * at.smoothness * at.heterogeneity * factor + 2 * at.noise_variance
    return at.smoothness / (2 * rounds) * (variance / (at.convexity**2 * (2 * factor - 1)) + at.distance)


def coefficients(least: float, most: float, at: Convex) -> tuple[float, float, float, float, float]:
    """a₁ … a₅ of eq. 17 for losses with Q₀ ≤ F_j − F ≤ Q₁ (``least``, ``most``), so 1 + Q₀λ ≤ C_t ≤ 1 + Q₁λ.

    P(λ) = L/(2μ²T) · (a₁λ³ + a₂λ² + a₃λ + a₄)/(a₅λ + 1). The published a₃ and a₄ lack the μ² on E‖w₁ − w*‖²; λ* does
    not depend on that term.
    """
    square, drift = at.gradient**2, 2 * at.smoothness * at.heterogeneity
    away = at.convexity**2 * at.distance
    return (
        square * most**3,
        6 * square * most**2,
        9 * square * most + drift * most + 2 * least * away,
        4 * square + drift + 2 * at.noise_variance + away,
        2 * least,
    )


@dataclass(frozen=True)
class Weight:
    """A fairness weight λ*, and why it is what it is."""

    value: float
    why: str


def optimal_lambda(a1: float, a2: float, a3: float, a4: float, a5: float) -> Weight:
    """λ* that minimises (a₁λ³ + a₂λ² + a₃λ + a₄)/(a₅λ + 1) over λ ≥ 0: the positive root of eq. 19's cubic

    2a₁a₅λ³ + (3a₁ + a₂a₅)λ² + 2a₂λ + a₃ − a₄a₅, which is increasing for λ > 0. It exists iff a₃ < a₄a₅, which needs
    a₅ = 2Q₀ > 0: every record's loss above the mean. Otherwise the bound grows with λ from 0 on and the answer is 0.
    """
    if not all(math.isfinite(a) for a in (a1, a2, a3, a4, a5)) or a1 <= 0 or a2 < 0:
        raise BadInput("optimal_lambda needs finite coefficients with a1 > 0 and a2 ≥ 0: see coefficients()")
    if a5 <= 0:
        return Weight(0.0, f"a5 = 2·Q0 = {a5:g} ≤ 0: some record's loss lies below the mean, so the condition fails")
    if a3 >= a4 * a5:
        return Weight(0.0, f"a3 = {a3:g} ≥ a4·a5 = {a4 * a5:g}: the bound grows with λ from 0 on")

    def slope(x: float) -> float:
        return 2 * a1 * a5 * x**3 + (3 * a1 + a2 * a5) * x**2 + 2 * a2 * x + a3 - a4 * a5

    low, high = 0.0, 1.0
    while slope(high) < 0:
        low, high = high, 2 * high
    while high - low > 1e-15 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return Weight(high, f"a3 = {a3:g} < a4·a5 = {a4 * a5:g}: the positive root of the cubic")
