"""The least noise there could be: what one coordinate of the combined gradient suffers, rule by rule.

With z_i, b_i and the clip C of client i, its own mean gradient has noise of deviation s_i = C z_i/b_i. Rules combine
with weights w, Σw = 1. Noise per site leaves √(Σ w_i² s_i²), which 1/s² weights make least: 1/√(Σ 1/s_i²). One dose of
noise on the sum, which every budget is content with, is 1/(Σ 1/s_i) for a curator whom all trust, and √(n/h) times
that where the sites make it together and only h of n are honest (docs/shared-noise.md).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from papers.theory_robust import noise_power
from sordino import privacy
from sordino.server import aggregate
from sordino.server.columns import inverse_weights
from sordino.server.facts import Array

STRICTEST, BY_SIZE, BY_BUDGET, ESTIMATED = "minimum ε", "DP-FedAvg", "WeiAvg", "Robust-HDP"
OPTIMUM, SHARED, CURATOR = "optimum weights", "noise shared, half conspiring", "a trusted curator"


def deviations(epsilons: Array, delta: float, rates: Array, batches: Array, rounds: int, clip: float = 1.0) -> Array:
    """s_i = C z_i/b_i with z_i by the tight accountant for one step a round."""
    noises = privacy.calibrate(epsilons, delta, rates, rounds, accountant="pld")
    return np.asarray(clip * np.asarray(noises) / batches)


def left_over(
    epsilons: Array, delta: float, records: Array, batches: Array, rounds: int, dimension: int
) -> Mapping[str, float]:
    """By rule the deviation of the noise on the combined gradient, for clip 1.

    Robust-HDP's weights are estimated from a drawn matrix of so many coordinates: every client's noise, and a common
    signal of 0.03 times the median one.
    """
    rates = batches / records
    own = deviations(epsilons, delta, rates, batches, rounds)
    strict = deviations(np.full_like(epsilons, epsilons.min()), delta, rates, batches, rounds)
    shares = records / records.sum()
    random = np.random.default_rng(0)
    signal = 0.03 * np.median(own) * random.standard_normal((dimension, 1))
    updates = np.asarray(signal + own * random.standard_normal((dimension, len(own))), dtype=np.float32)
    curator = 1.0 / float((1.0 / own).sum())
    return {
        STRICTEST: _left(shares, strict),
        BY_SIZE: _left(shares, own),
        BY_BUDGET: _left(epsilons / epsilons.sum(), own),
        ESTIMATED: _left(np.asarray(aggregate.robust_hdp(updates)), own),
        OPTIMUM: _left(inverse_weights(own**2), own),
        SHARED: float(np.sqrt(len(own) / (len(own) - len(own) // 2))) * curator,
        CURATOR: curator,
    }


def _left(weights: Array, own: Array) -> float:
    return float(np.sqrt(noise_power(weights, own**2)))
