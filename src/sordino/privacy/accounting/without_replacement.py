"""Rényi bound for fixed-size batches drawn without replacement, under replace-one.

Wang, Balle & Kasiviswanathan 2019, Theorem 27, the form tightened for Gaussian noise: at integer orders
A_α ≤ 1 + Σ_{j=2..α} q^j binom(α,j) min(4·√(B(2⌊j/2⌋)·B(2⌈j/2⌉)), 2 e^((j−1)j/(2z²))), with B(l) = E_Q[(dP/dQ − 1)^l]
= E[(e^Z − 1)^l], Z ~ N(−1/(2z²), 1/z²), at even l; R(α) = ln A_α/(α−1). Between integers (α−1)R(α) is convex, so linear
interpolation bounds it. z is the noise over the sensitivity of a replacement (2C).

dp-accounting computes B by finite differences one client at a time; here it is an integral of a positive function,
accurate when z is large, over all clients at once. Above order 256 only the second term of the minimum is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import gammaln, logsumexp

from sordino.privacy.accounting.parts import Floats

_LARGEST_EXACT = 256
_STEP = 0.25
_CHUNK = 1_000_000


def _even_moments(noise: Floats, largest: int) -> Floats:
    """ln B(l) for l = 2, 4, … ≥ largest: [rows, l/2]. Trapezoid rule with a step of 1/4 standard deviation."""
    powers = np.arange(2, largest + 2, 2)
    reach = 9.0 + math.sqrt(powers[-1])
    nodes = math.ceil((2 * reach + powers[-1] / float(noise.min())) / _STEP)
    x = -reach + _STEP * np.arange(nodes)
    shift = x / noise[:, None] - 0.5 / noise[:, None] ** 2
    with np.errstate(divide="ignore"):
        log_size = np.where(shift > 30, shift, np.log(np.abs(np.expm1(np.minimum(shift, 30.0)))))
    out = np.empty((noise.size, powers.size))
    for i, power in enumerate(powers):
        height = power * log_size - x**2 / 2
        peak = height.max(axis=1, keepdims=True)
        out[:, i] = peak[:, 0] + np.log(np.exp(height - peak).sum(axis=1))
    return np.asarray(out + math.log(_STEP) - 0.5 * math.log(2 * math.pi))


def _log_terms(noise: Floats, largest: int) -> tuple[Floats, Floats]:
    """ln of the two candidates of the minimum for j = 2 … largest: (4√(B·B), 2e^((j−1)j/(2z²)))."""
    j = np.arange(2, largest + 1)
    moments = _even_moments(noise, min(largest, _LARGEST_EXACT))
    tight = np.full((noise.size, j.size), math.inf)
    exact = j[j <= _LARGEST_EXACT]
    floor, ceiling = exact // 2 - 1, (exact + 1) // 2 - 1
    tight[:, : exact.size] = math.log(4.0) + 0.5 * (moments[:, floor] + moments[:, ceiling])
    return tight, math.log(2.0) + np.outer(0.5 / noise**2, j * (j - 1.0))


def _log_moments(rate: Floats, noise: Floats, orders: Sequence[int]) -> dict[int, Floats]:
    """ln A_α at integer orders."""
    largest = max(orders)
    tight, plain = _log_terms(noise, max(largest, 2))
    both = np.minimum(tight, plain)
    out: dict[int, Floats] = {1: np.zeros(rate.size)}
    for order in orders:
        if order == 1:
            continue
        j = np.arange(2, order + 1)
        log_binomial = gammaln(order + 1) - gammaln(j + 1) - gammaln(order - j + 1)
        least = both[:, : j.size]
        if order > _LARGEST_EXACT:
            least = np.concatenate([both[:, :1], plain[:, 1 : j.size]], axis=1)
        terms = least + np.outer(np.log(rate), j) + log_binomial
        out[order] = np.logaddexp(0.0, logsumexp(terms, axis=1))
    return out


def curve(rate: Floats, noise: Floats, orders: Sequence[float]) -> Floats:
    """R(α) of one release for each (rate, noise): [rows, orders]."""
    whole = sorted({math.floor(order) for order in orders} | {math.ceil(order) for order in orders})
    out = np.empty((rate.size, len(orders)))
    # Rows in order of noise, in chunks, because small noise needs long integrals.
    rows = np.argsort(-noise)
    size = max(1, _CHUNK // (2048 + int(1024 / max(float(noise.min()), 1e-3))))
    for first in range(0, rows.size, size):
        at = rows[first : first + size]
        logs = _log_moments(rate[at], noise[at], whole)
        for k, order in enumerate(orders):
            low, high = math.floor(order), math.ceil(order)
            share = order - low
            out[at, k] = ((1 - share) * logs[low] + share * logs[high]) / (order - 1)
    return out
