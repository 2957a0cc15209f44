"""Theorem 2's convergence bound of DP-FedAvg under client selection, by what each rule does to bias and noise.

Symbols of the paper: p selection probabilities, u shares of the data, D parameters, C clip, V_k noise factors,
T = T^g·K iterations, L smoothness. An upper bound, usually loose: it orders rules, it does not predict accuracy. The
whole theorems are in ``papers.theory_selection``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from sordino.server.checks import distribution, importance_weights, noise_variances, positive, whole
from sordino.server.problem import unbiased


@dataclass(frozen=True)
class Ranked:
    """A rule before training: the bound, its ‖q − u‖₁ (``bias``), its variance on the aggregate (``noise``)."""

    rule: str
    bound: float
    bias: float
    noise: float


def rank(
    rules: Mapping[str, ArrayLike | tuple[ArrayLike, ArrayLike]],
    sizes: ArrayLike,
    variances: ArrayLike,
    dimension: int,
    iterations: int,
    smoothness: float = 1.0,
    clip: float = 1.0,
) -> tuple[Ranked, ...]:
    """Order selection rules by the non-vanishing part of Theorem 2, best first.

    The bound is ½ [‖q − u‖₁ + √(‖q − u‖₁² + 2 √T L D Σ q_k² V_k)] with q_k = p_k c_k.

    Parameters
    ----------
    rules : name → p, or (p, c) for a rule that counts a participation c_k times (``select.compensation``).
    iterations : T = rounds · K.

    Notes
    -----
    Problem 1 with η = 2D√T·L minimises this very bound, so ``privacy-aware`` at the default weight comes first by
    construction; what the ranking tells is by how much. Power-of-choice has no p before training and cannot be ranked.
    """
    shares = unbiased(sizes)
    growth = math.sqrt(whole(iterations, "iterations")) * positive(smoothness, "smoothness", "L must be finite and > 0")
    size, scale = whole(dimension, "dimension"), _scale(clip, iterations)
    found = []
    for name, given in rules.items():
        chosen, counted = given if isinstance(given, tuple) else (given, None)
        acting = distribution(chosen, shares.size) * importance_weights(counted, shares.size)
        bias = float(np.abs(acting - shares).sum())
        noise = float((acting**2 * noise_variances(variances, shares.size)).sum())
        bound = 0.5 * (bias + math.sqrt(bias**2 + 2.0 * growth * (size * noise)))
        found.append(Ranked(name, bound, bias, scale * noise))
    return tuple(sorted(found, key=lambda one: one.bound))


def aggregate_noise(
    probabilities: ArrayLike,
    variances: ArrayLike,
    iterations: int,
    clip: float = 1.0,
    importance: ArrayLike | None = None,
) -> float:
    """C² T Σ (p_k c_k)² V_k: variance of one coordinate of the averaged noisy gradient of a step, with T_k at its mean.

    The number of clients drawn cancels: more of them average more noise away, and all take part more often. That T_k is
    a draw adds (K/N_select) C² Σ c_k² V_k p_k (1−p_k) in expectation.
    """
    chosen = distribution(probabilities)
    acting = chosen * importance_weights(importance, chosen.size)
    return _scale(clip, iterations) * float((acting**2 * noise_variances(variances, chosen.size)).sum())


def _scale(clip: float, iterations: int) -> float:
    """C² T, checked."""
    return positive(clip, "clip", "C must be a finite number > 0") ** 2 * whole(iterations, "iterations")
