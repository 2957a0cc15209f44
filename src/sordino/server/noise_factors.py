"""How much noise each client's participation brings, as Problem 1 of privacy-aware selection weighs it."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from sordino.errors import BadInput
from sordino.privacy.types import Adjacency
from sordino.server.checks import Array, at_least, positive, record_counts, vector, whole

LARGE_EPSILON = 30.0


"""Beyond this ℓ = ε − ln r to 14 digits, and e^ε need not be computed (it would overflow)."""


def noise_factors(
    noises: ArrayLike, batches: ArrayLike, turns: ArrayLike, steps: int, adjacency: str | Adjacency = Adjacency.ZERO_OUT
) -> Array:
    """V_k = (Δ z_k/b_k)²/(T_k K) from calibrated noise multipliers.

    Parameters
    ----------
    noises : z_k ≥ 0, multiplier of the release's sensitivity (0 for public data).
    batches : b_k > 0, expected batch size, by which the noisy sum is divided; one number stands for all clients.
    turns : T_k ≥ 1, participations the multiplier was calibrated for; one number stands for all clients.
    steps : K, local steps of one participation.
    adjacency : sets the sensitivity Δ·C of a clipped sum: Δ = 2 under replace-one, else 1.
    """
    multiplier = at_least(vector(noises, "noises"), 0.0, "noises", "a noise multiplier is never negative")
    batch, taken = (
        vector(np.broadcast_to(np.asarray(given, dtype=np.float64), multiplier.shape), name)
        for given, name in ((batches, "batches"), (turns, "turns"))
    )
    if (batch <= 0).any():
        raise BadInput("batches must be > 0: the noisy sum is divided by the expected batch size")
    at_least(taken, 1.0, "turns", "evaluate noise at one participation or more, e.g. rounds · select / clients")
    sensitivity = Adjacency.parse(adjacency).sensitivity
    return np.asarray((sensitivity * multiplier / batch) ** 2 / (taken * whole(steps, "steps")), dtype=np.float64)


def closed_form_factors(
    sizes: ArrayLike,
    batches: ArrayLike,
    epsilons: ArrayLike,
    deltas: ArrayLike,
    adjacency: str | Adjacency = Adjacency.ZERO_OUT,
) -> Array:
    """The paper's eq. 7: V = 8 ln(e + rℓ/δ)/(n² r² ℓ²), ℓ = ln(1 + (e^ε − 1)/r), r = b/n; 0 where ε = ∞.

    Under replace-one the sensitivity is 2C where the paper has C: four times the variance.

    Guarantees: none. Composing first and amplifying once afterwards, as the derivation does, is not a valid bound; use
    it to reproduce published noise, never to state an ε.
    """
    records = record_counts(sizes)
    budget = np.asarray(epsilons, dtype=np.float64)
    if budget.shape != records.shape or np.isnan(budget).any() or (budget <= 0).any():
        raise BadInput("epsilons must hold one ε > 0 per client (inf for public data)")
    delta = vector(deltas, "deltas", records.size)
    if ((delta <= 0) | (delta >= 1)).any():
        raise BadInput("deltas must lie strictly between 0 and 1: take them well below 1/records")
    batch = vector(batches, "batches", records.size)
    if ((batch <= 0) | (batch > records)).any():
        raise BadInput("batches must lie in (0, records]: an expected batch cannot exceed the client's records")
    rate = batch / records
    is_private = np.isfinite(budget)
    finite = np.where(is_private, budget, 1.0)
    small = np.log1p(np.expm1(np.minimum(finite, LARGE_EPSILON)) / rate)
    amplified = np.where(finite <= LARGE_EPSILON, small, finite - np.log(rate))
    factor = 8.0 * np.log(math.e + rate * amplified / delta) / (records * rate * amplified) ** 2
    return np.where(is_private, Adjacency.parse(adjacency).sensitivity ** 2 * factor, 0.0)


def default_weight(dimension: int, rounds: int, steps: int = 1, smoothness: float = 1.0) -> float:
    """η = 2 D √T L with T = rounds · K: the weight that makes Problem 1 the non-vanishing part of Theorem 2.

    Parameters
    ----------
    dimension : D, parameters of the model.
    rounds, steps : communication rounds and local steps K.
    smoothness : L in the units of Theorem 2's step; 1 unless something better is known.

    Notes
    -----
    Everything here is public, and neither the learning rate α nor the clip C enters. Redoing Theorem 2 with a constant
    step α gives η = 2 D T · αLC/B₁, where B₁/L is how far the start lies from the solution: αC√T by the theorem's own
    step, so that α and C cancel. The extremes, a solution as far as T steps can reach at all and a step as long as
    stability allows, are L = 1/√T and L = √T; L = 1 is their geometric mean.
    """
    length = whole(rounds, "rounds") * whole(steps, "steps")
    size = whole(dimension, "dimension")
    return 2.0 * size * math.sqrt(length) * positive(smoothness, "smoothness", "L must be a finite number > 0")
