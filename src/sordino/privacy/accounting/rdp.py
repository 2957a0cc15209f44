"""Rényi accounting, vectorised over clients: R(α) of every release, summed, converted to ε at the best order.

Sampled Gaussian (Mironov, Talwar & Zhang 2019): R(α) = ln A_α/(α−1), A_α = E_{x~N(0,z²)}[(1−q+q e^((2x−1)/(2z²)))^α];
a finite binomial sum at integer orders, an integral at the others. Conversion (Canonne, Kamath & Steinke 2020):
ε = R + ln((α−1)/α) − (ln δ + ln α)/(α−1), the least over the orders. Gaussian: R(α) = α/(2z²).

Fixed-size batches without replacement, under replace-one (Wang, Balle & Kasiviswanathan 2019, Theorem 27, the form
tightened for Gaussian noise), at integer orders:
A_α ≤ 1 + Σ_{j=2..α} q^j binom(α,j) min(4·√(B(2⌊j/2⌋)·B(2⌈j/2⌉)), 2 e^((j−1)j/(2z²))), with B(l) = E_Q[(dP/dQ − 1)^l]
= E[(e^Z − 1)^l], Z ~ N(−1/(2z²), 1/z²), at even l. Between integers (α−1)R(α) is convex, so linear interpolation bounds
it. z is the noise over the sensitivity of a replacement (2C). dp-accounting computes B by finite differences one
client at a time; here it is an integral of a positive function, accurate when z is large, over all clients at once.
Above order 256 only the second term of the minimum is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import gammaln, logsumexp

from sordino.privacy.accounting.parts import Composition, Floats, Kind, PartTable, table

# dp-accounting's default orders, so that the two agree to rounding.
ORDERS: tuple[float, ...] = (
    *(1 + k / 10 for k in range(1, 100)),
    *(float(k) for k in range(11, 64)),
    128.0,
    256.0,
    512.0,
    1024.0,
)
_ROUNDED_UP = 2e-15
_CHUNK = 2_000_000
_MOST_NODES = 50_000
_LARGEST_EXACT = 256
_STEP = 0.25
_CHUNK_FIXED = 1_000_000


def curve(parts: PartTable, orders: Sequence[float] = ORDERS) -> Floats:
    """R(α) of every client's composition: [clients, orders]."""
    each = np.empty((parts.owner.size, len(orders)))
    for kind in Kind:
        at = np.flatnonzero(parts.kind == kind.value)
        if not at.size:
            continue
        q, z = parts.rate[at], parts.noise[at]
        if kind is Kind.GAUSSIAN:
            each[at] = np.asarray(orders) / (2 * z[:, None] ** 2)
        elif kind is Kind.POISSON:
            each[at] = sampled(q, z, orders)
        elif kind is Kind.FIXED:
            each[at] = fixed_size(q, z, orders)
        else:
            each[at] = exchanged(q, 2 * z, orders)  # z is over the distance of two records' terms, σ over one's
    each *= parts.times[:, None]
    out = np.zeros((parts.clients, len(orders)))
    np.add.at(out, parts.owner, each)
    return out


def sampled(rate: Floats, noise: Floats, orders: Sequence[float]) -> Floats:
    """R(α) of one Poisson-sampled Gaussian release for each (rate, noise): [rows, orders]."""
    out = np.empty((rate.size, len(orders)))
    fractional = [k for k, order in enumerate(orders) if order != round(order)]
    for k, order in enumerate(orders):
        if order == round(order):
            out[:, k] = _integer(rate, noise, round(order))
    if fractional:
        out[:, fractional] = _fractional(rate, noise, np.array([orders[k] for k in fractional]))
    return np.asarray((np.maximum(out, 0.0) + _ROUNDED_UP) / (np.asarray(orders) - 1.0))


def _integer(rate: Floats, noise: Floats, order: int) -> Floats:
    """ln Σ_k binom(α,k)(1−q)^(α−k) q^k e^(k(k−1)/(2z²))."""
    k = np.arange(order + 1)
    log_binomial = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
    terms = log_binomial + np.outer(np.log(rate), k) + np.outer(np.log1p(-rate), order - k)
    terms += np.outer(0.5 / noise**2, k * (k - 1.0))
    peak = terms.max(axis=1)
    terms -= peak[:, None]
    return np.asarray(peak + np.log(np.exp(terms, out=terms).sum(axis=1)))


def _fractional(rate: Floats, noise: Floats, orders: Floats) -> Floats:
    """ln A_α by the trapezoid rule, which converges geometrically here.

    The integrand is analytic for |Im x| < πz² and Gaussian beyond: with steps of min(0.7z, z²/2) the error is
    below 1e-13. Where the noise is so small that this takes too many nodes, the order is left out (∞: still valid).
    """
    step = np.minimum(0.7 * noise, 0.5 * noise**2)
    nodes = np.ceil((18 * noise + orders.max()) / step).astype(int)
    out = np.full((rate.size, orders.size), math.inf)
    by_size = np.argsort(nodes)
    by_size = by_size[nodes[by_size] <= _MOST_NODES]
    first = 0
    while first < by_size.size:
        last = first + 1
        while last < by_size.size and nodes[by_size[last]] * orders.size * (last + 1 - first) <= _CHUNK:
            last += 1
        rows = by_size[first:last]
        out[rows] = _trapezoid(rate[rows], noise[rows], orders, step[rows], int(nodes[rows[-1]]) + 1)
        first = last
    return out


def _trapezoid(rate: Floats, noise: Floats, orders: Floats, step: Floats, nodes: int) -> Floats:
    x = -9 * noise[:, None] + step[:, None] * np.arange(nodes)
    exponent = (x - 0.5) / noise[:, None] ** 2
    loss = np.logaddexp(np.log1p(-rate)[:, None], np.log(rate)[:, None] + exponent)
    height = orders[:, None] * loss[:, None, :] - (x**2 / (2 * noise[:, None] ** 2))[:, None, :]
    peak = height.max(axis=2)
    height -= peak[:, :, None]
    total = np.exp(height, out=height).sum(axis=2)
    return np.asarray(peak + np.log(total) + (np.log(step) - 0.5 * np.log(2 * np.pi * noise**2))[:, None])


def exchanged(rate: Floats, sigma: Floats, orders: Sequence[float]) -> Floats:
    """R(α) of one Poisson-sampled release when a record is exchanged for another: [rows, orders].

    P = (1−q)·N(0, σ²) + q·N(1, σ²) against Q = (1−q)·N(0, σ²) + q·N(−1, σ²); x ↦ −x swaps them, so both directions are
    one. The modes of P^α Q^(1−α) lie in [0, 2α − 1], and beyond that it falls like a Gaussian of deviation σ.
    """
    out = np.full((rate.size, len(orders)), math.inf)
    for row, (q, s) in enumerate(zip(rate.tolist(), sigma.tolist())):
        for k, order in enumerate(orders):
            # Q has zeros at |Im x| = πσ², and its power 1 − α grows towards them like e^(α θ²/8) at Im x = θσ².
            finer = max(6.0, math.sqrt(34.0 * (order / 8 + s * s / 2)) / math.pi)
            step = min(0.5 * s, s * s / finer)
            nodes = math.ceil((20 * s + 2 * order - 1) / step) + 1
            if nodes <= _MOST_NODES:
                out[row, k] = _exchange_moment(q, s, order, -10 * s + step * np.arange(nodes), step)
    return np.asarray((np.maximum(out, 0.0) + _ROUNDED_UP) / (np.asarray(orders) - 1.0))


def _exchange_moment(rate: float, sigma: float, order: float, x: Floats, step: float) -> float:
    """ln ∫ P^α Q^(1−α) by the trapezoid rule at the outputs x."""
    stay, move, variance = math.log1p(-rate), math.log(rate), sigma**2
    here = np.logaddexp(stay, move + (x - 0.5) / variance)
    there = np.logaddexp(stay, move - (x + 0.5) / variance)
    height = order * here + (1 - order) * there - x**2 / (2 * variance)
    peak = float(height.max())
    return peak + math.log(float(np.exp(height - peak).sum()) * step) - 0.5 * math.log(2 * math.pi * variance)


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


def fixed_size(rate: Floats, noise: Floats, orders: Sequence[float]) -> Floats:
    """R(α) of one release for each (rate, noise): [rows, orders]."""
    whole = sorted({math.floor(order) for order in orders} | {math.ceil(order) for order in orders})
    out = np.empty((rate.size, len(orders)))
    # Rows in order of noise, in chunks, because small noise needs long integrals.
    rows = np.argsort(-noise)
    size = max(1, _CHUNK_FIXED // (2048 + int(1024 / max(float(noise.min()), 1e-3))))
    for first in range(0, rows.size, size):
        at = rows[first : first + size]
        logs = _log_moments(rate[at], noise[at], whole)
        for k, order in enumerate(orders):
            low, high = math.floor(order), math.ceil(order)
            share = order - low
            out[at, k] = ((1 - share) * logs[low] + share * logs[high]) / (order - 1)
    return out


def convert(rdp: Floats, deltas: Floats, orders: Sequence[float] = ORDERS) -> Floats:
    """ε at each client's δ: the least over the orders, at least 0; 0 where the KL bound √(1−e^(−R)) is below δ."""
    a = np.asarray(orders)
    log_delta = np.log(deltas)[:, None]
    each = rdp + np.log1p(-1 / a) - (log_delta + np.log(a)) / (a - 1)
    tiny = (np.expm1(-rdp) + deltas[:, None] ** 2 > 0).any(axis=1)
    return np.where(tiny, 0.0, np.maximum(each.min(axis=1), 0.0))


def epsilons(compositions: Sequence[Composition], deltas: Floats) -> Floats:
    """ε of every composition at its δ."""
    return convert(curve(table(compositions)), deltas)
