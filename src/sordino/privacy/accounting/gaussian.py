"""The Gaussian mechanism without sampling, exactly: δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ), μ = 1/z.

Full-batch releases compose into one of them; it is also the limit of many sampled releases, which makes it the
starting point of the searches.
"""

from __future__ import annotations

import numpy as np
from scipy.special import log_ndtr, ndtr

from sordino.privacy.accounting.parts import Floats

_HALVINGS = 200


def log_delta(epsilon: Floats, mu: Floats) -> Floats:
    """ln δ(ε) of the Gaussian mechanism with μ = sensitivity/σ."""
    high = log_ndtr(mu / 2 - epsilon / mu)
    low = epsilon + log_ndtr(-mu / 2 - epsilon / mu)
    gap = np.minimum(low - high, -1e-300)
    return np.asarray(high + np.log(-np.expm1(gap)))


def epsilon_of(mu: Floats, delta: Floats) -> Floats:
    """The smallest ε ≥ 0 with δ(ε) ≤ delta, rounded up: bisection, 0 where total variation is at most delta."""
    mu, delta = np.broadcast_arrays(np.asarray(mu, dtype=float), np.asarray(delta, dtype=float))
    low = np.zeros(mu.shape)
    high = mu**2 / 2 + mu * np.sqrt(2 * np.log(1 / delta)) + 1e-300
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        enough = log_delta(middle, mu) <= np.log(delta)
        high = np.where(enough, middle, high)
        low = np.where(enough, low, middle)
        if np.all(high - low <= 4e-16 * high):
            break
    return np.where(2 * ndtr(mu / 2) - 1 <= delta, 0.0, high)


def mu_of(epsilon: Floats, delta: Floats) -> Floats:
    """The largest μ with δ(ε) ≤ delta, rounded down; ε finite and positive."""
    epsilon, delta = np.broadcast_arrays(np.asarray(epsilon, dtype=float), np.asarray(delta, dtype=float))
    low = np.full(epsilon.shape, 1e-12)
    high = np.sqrt(2 * epsilon) + 40.0
    for _ in range(_HALVINGS):
        middle = np.sqrt(low * high)
        fits = log_delta(epsilon, middle) <= np.log(delta)
        low = np.where(fits, middle, low)
        high = np.where(fits, high, middle)
        if np.all(high - low <= 4e-16 * high):
            break
    return low
