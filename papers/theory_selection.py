"""What the selection paper proves: its error terms, Theorems 1 and 2, and Corollaries 1 and 2.

Symbols of the paper: p^s selection probabilities, p^u = u shares of the data, D parameters, C clip, V_k noise factors,
T = T^g·K iterations, L smoothness, μ strong convexity, B₁ bound on gradient norms, B₂ bound on their dissimilarity,
β/(γ+t) the step of Theorem 1, Γ > 0 free. Upper bounds, usually loose: they order rules, they do not predict accuracy.
``sordino.server.bounds.rank`` orders rules by the part of Theorem 2 that does not vanish.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from sordino.errors import BadInput
from sordino.server.checks import (
    Array,
    at_least,
    distribution,
    noise_variances,
    positive,
    vector,
    whole,
)
from sordino.server.select import unbiased


def privacy_error(probabilities: ArrayLike, variances: ArrayLike, dimension: int) -> float:
    """G^DP = Σ_k (p_k^s)² D V_k (eq. 16): the error due to noise.

    One p is the chance of being drawn, the other the share of all participations that the noise must cover.
    """
    chosen = distribution(probabilities)
    return whole(dimension, "dimension") * float((chosen**2 * noise_variances(variances, chosen.size)).sum())


def selection_error(
    probabilities: ArrayLike,
    sizes: ArrayLike,
    distortions: ArrayLike | None = None,
    dissimilarity: float = 0.0,
    clip: float = 1.0,
) -> float:
    """G^select,clip = ‖p^s − p^u‖₁ + max_t ‖Δ_t‖₁ + B₂/C (eq. 15), Δ_t,k = u_k · mean_d |q_k,t(d) − 1|.

    Parameters
    ----------
    distortions : [clients] or [iterations, clients], mean_d |q_k,t(d) − 1| of ``distortion``; none: no clipping gap.
    dissimilarity, clip : B₂ and C.
    """
    shares = unbiased(sizes)
    gap = float(np.abs(distribution(probabilities, shares.size) - shares).sum())
    return gap + _clipping(shares, distortions, dissimilarity, clip)


def clipping_error(
    probabilities: ArrayLike, distortions: ArrayLike | None = None, dissimilarity: float = 0.0, clip: float = 1.0
) -> float:
    """G^b,clip = max_t ‖Δ_t^b‖₁ + B₂/C (eq. 17), Δ_t,k^b = p_k^s · mean_d |q_k,t(d) − 1|."""
    return _clipping(distribution(probabilities), distortions, dissimilarity, clip)


def distortion(record_norms: ArrayLike, mean_norm: float, clip: float) -> float:
    """mean_d |q(d) − 1| of one client, q(d) = max(1, ‖g(d)‖/C) / max(1, ‖∇F‖/C) (eq. 14).

    Guarantees: none. It is computed from records' gradients, so it is the observer's in a simulation, or a charged
    release; it never leaves a site as it is.
    """
    threshold = positive(clip, "clip", "C must be a finite number > 0")
    norms = at_least(vector(record_norms, "record_norms"), 0.0, "record_norms", "a norm is never negative")
    whole_norm = positive(mean_norm, "mean_norm", "‖∇F‖ must be a finite number ≥ 0", or_zero=True)
    factors = np.maximum(1.0, norms / threshold) / max(1.0, whole_norm / threshold)
    return float(np.abs(factors - 1.0).mean())


@dataclass(frozen=True)
class StronglyConvex:
    """The constants of Theorem 1.

    Attributes: ``smoothness`` L, ``convexity`` μ, ``gradient`` B₁, ``clip`` C, step β/(γ+t) by ``beta`` and ``gamma``,
    ``trade`` Γ, ``distance`` ‖w₁ − w^b,*‖₂, ``start`` F(w₁) − F*.
    """

    smoothness: float
    convexity: float
    gradient: float
    clip: float
    beta: float
    gamma: float = 1.0
    trade: float = 1.0
    distance: float = 0.0
    start: float = 0.0

    def __post_init__(self) -> None:
        for name in ("smoothness", "convexity", "gradient", "clip", "beta", "gamma", "trade"):
            positive(getattr(self, name), name, "Theorem 1 needs a finite number > 0")
        for name in ("distance", "start"):
            positive(getattr(self, name), name, "Theorem 1 needs a finite number ≥ 0", or_zero=True)
        if self.beta <= self.gradient / (self.clip * self.convexity):
            raise BadInput(f"beta={self.beta:g} must exceed B₁/(Cμ) = {self.gradient / (self.clip * self.convexity):g}")
        if self.gamma < 1.0:
            raise BadInput(f"gamma={self.gamma:g} must be at least 1")


def strongly_convex(iterations: float, selection: float, clipping: float, privacy: float, at: StronglyConvex) -> float:
    """Theorem 1 (eq. 18–19): a bound on √E[F(w_{T+1}) − F*].

    Z/√(γ+T) + √(18Γ βTL/(γ+T) · B₁C/μ · G^b,clip)
    + √(2L) βTC/(2(γ+T)) · [G^select,clip + √((1+1/Γ)(G^select,clip)² + (1+9Γ) G^DP)],
    Z² = (9/2) LΓγ‖w₁−w^b,*‖² + ((1+9Γ)/2) β²TL/(γ+T) C² + γ(F(w₁)−F*).

    ``iterations`` T; ``selection``, ``clipping``, ``privacy``: G^select,clip, G^b,clip, G^DP. (The paper's proof needs
    9Γ where its statement has 18Γ; the statement is kept.)
    """
    length = positive(iterations, "iterations", "T must be a finite number > 0")
    share = length / (at.gamma + length)
    vanishing = math.sqrt(
        4.5 * at.smoothness * at.trade * at.gamma * at.distance**2
        + 0.5 * (1.0 + 9.0 * at.trade) * at.beta**2 * share * at.smoothness * at.clip**2
        + at.gamma * at.start
    )
    return vanishing / math.sqrt(at.gamma + length) + _lasting(share, selection, clipping, privacy, at)


def strongly_convex_limit(selection: float, clipping: float, privacy: float, at: StronglyConvex) -> float:
    """Corollary 1 (eq. 21): Theorem 1 as T → ∞.

    √(18Γ βL · B₁C/μ · G^b,clip) + √L βC/√2 · [G^select,clip + √((1+1/Γ)(G^select,clip)² + (1+9Γ) G^DP)].
    """
    return _lasting(1.0, selection, clipping, privacy, at)


def non_convex(
    iterations: float, selection: float, privacy: float, smoothness: float, gradient: float = 1.0, start: float = 0.0
) -> float:
    """Theorem 2 (eq. 20): a bound on √((1/T) Σ_t E‖∇F(w̃_t)‖²).

    B₁/2 · [G^select,clip + √((G^select,clip)² + 2√T L G^DP)] + √((F(w₁)−F*)/√T + L B₁²/(2√T)).

    ``iterations`` T; ``selection``, ``privacy``: G^select,clip, G^DP; ``smoothness`` L; ``gradient`` B₁; ``start``
    F(w₁) − F*.
    """
    root = math.sqrt(positive(iterations, "iterations", "T must be a finite number > 0"))
    bias, noise, curve, bound, rest = _theorem_two(selection, privacy, smoothness, gradient, start)
    return bound * 0.5 * (bias + math.sqrt(bias**2 + 2.0 * root * curve * noise)) + math.sqrt(rest / root)


def best_iterations(
    selection: float, privacy: float, smoothness: float, gradient: float = 1.0, start: float = 0.0
) -> float:
    """Corollary 2: the T at which Theorem 2's bound is smallest; ∞ without noise, and never below 1.

    With A = (G^select,clip)², Q = 2L G^DP, R = F(w₁)−F* + LB₁²/2 and x = √T, f′ = 0 reads B₁²Q²x³ = 4R(A + Qx),
    which has one positive root. The bound falls before it and rises after it.
    """
    bias, noise, curve, bound, rest = _theorem_two(selection, privacy, smoothness, gradient, start)
    growth = 2.0 * curve * noise
    if growth == 0.0:
        return math.inf
    linear, constant = 4.0 * rest / (bound**2 * growth), 4.0 * rest * (bias / (bound * growth)) ** 2
    # From the right of the root of the convex x³ − linear·x − constant, Newton's steps fall towards it.
    root = math.sqrt(linear) + math.cbrt(constant)
    for _ in range(100):
        step = (root**3 - linear * root - constant) / (3.0 * root**2 - linear)
        root -= step
        if abs(step) <= 1e-15 * root:
            break
    return max(root**2, 1.0)


def _clipping(weights: Array, distortions: ArrayLike | None, dissimilarity: float, clip: float) -> float:
    """max_t Σ_k weight_k · distortion_k,t + B₂/C."""
    drift = positive(dissimilarity, "dissimilarity", "B₂ must be a finite number ≥ 0", or_zero=True)
    drift /= positive(clip, "clip", "C must be a finite number > 0")
    if distortions is None:
        return drift
    table = np.atleast_2d(np.asarray(distortions, dtype=np.float64))
    if table.ndim != 2 or table.shape[1] != weights.size or not (table >= 0.0).all():
        raise BadInput(f"distortions must be ≥ 0, of shape [clients] or [iterations, clients], not {table.shape}")
    return float((table @ weights).max()) + drift


def _lasting(share: float, selection: float, clipping: float, privacy: float, at: StronglyConvex) -> float:
    """What does not vanish in Theorem 1; ``share`` is T/(γ+T)."""
    bias = positive(selection, "selection", "G^select,clip must be a finite number ≥ 0", or_zero=True)
    clipped = positive(clipping, "clipping", "G^b,clip must be a finite number ≥ 0", or_zero=True)
    noise = positive(privacy, "privacy", "G^DP must be a finite number ≥ 0", or_zero=True)
    slope = at.beta * share
    inner = math.sqrt((1.0 + 1.0 / at.trade) * bias**2 + (1.0 + 9.0 * at.trade) * noise)
    return math.sqrt(18.0 * at.trade * slope * at.smoothness * at.gradient * at.clip / at.convexity * clipped) + (
        math.sqrt(at.smoothness / 2.0) * slope * at.clip * (bias + inner)
    )


def _theorem_two(
    selection: float, privacy: float, smoothness: float, gradient: float, start: float
) -> tuple[float, float, float, float, float]:
    """G^select,clip, G^DP, L, B₁ and R = F(w₁)−F* + LB₁²/2, checked."""
    bias = positive(selection, "selection", "G^select,clip must be a finite number ≥ 0", or_zero=True)
    noise = positive(privacy, "privacy", "G^DP must be a finite number ≥ 0", or_zero=True)
    curve = positive(smoothness, "smoothness", "L must be a finite number > 0")
    bound = positive(gradient, "gradient", "B₁ must be a finite number > 0")
    above = positive(start, "start", "F(w₁) − F* must be a finite number ≥ 0", or_zero=True)
    return bias, noise, curve, bound, above + 0.5 * curve * bound**2
