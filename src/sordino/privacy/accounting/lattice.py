"""One release as a pair of distributions on a lattice of privacy losses that dominates the real pair.

With the record the output follows P = (1−q)·N(0, σ²) + q·N(1, σ²), without it Q = (1−q)·N(0, σ²) + q·N(c, σ²), where
c = 0 when the record's term is erased and c = −1 when another takes its place; the loss is L = ln dP/dQ, increasing in
the output. Cut the loss axis at l_k = start + k·step. In the cell [l_k, l_k+1] move the mass to its two ends so that
both the P mass m and the Q mass w of the cell stay what they are: b = (m − w e^(l_k))/(1 − e^(−step)) goes to l_k+1
and m − b to l_k. The curve α ↦ sup_S P(S) − αQ(S), the hockey-stick divergence at every α ≥ 0, is thereby replaced by
chords of a convex curve ("connect the dots", Doroshenko et al. 2022): the lattice pair dominates in *both*
directions, and so does every composition of such pairs.

Guarantees: for every ε, positive or negative, the hockey-stick divergence of the lattice pair is at least that of the
real pair, up to float rounding (relative 1e-12 of a cell), for which ``pld`` adds a margin.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr, ndtri

from sordino.privacy.accounting.parts import Floats, Kind, Part


class Lattice(NamedTuple):
    """P masses at start + k·step, k = 0, 1, …; ``lost`` is P mass of infinite loss, ``lost_back`` Q mass of −∞."""

    start: float
    step: float
    mass: Floats
    lost: float
    lost_back: float

    @property
    def losses(self) -> Floats:
        """l_k of every point."""
        return np.asarray(self.start + self.step * np.arange(self.mass.size))

    def reversed(self) -> Lattice:
        """The pair (Q, P): mass p_k e^(−l_k) at −l_k. For Poisson sampling: a record added instead of removed."""
        losses = self.losses
        back = self.mass * np.exp(-losses)
        return Lattice(-float(losses[-1]), self.step, back[::-1].copy(), self.lost_back, self.lost)


def spread(part: Part) -> float:
    """σ where the record's own term moves the sum by 1: replace-one noise is stated over 2, the distance of two."""
    return 2.0 * part.noise if part.kind is Kind.EXCHANGE else part.noise


def _loss(x: float, rate: float, variance: float) -> float:
    """ln(1 − q + q e^((x − 1/2)/σ²)): the loss at output x when the record's term is erased."""
    return float(np.logaddexp(math.log1p(-rate), math.log(rate) + (x - 0.5) / variance))


def extent(part: Part, tail: float, most: float) -> tuple[float, float]:
    """The losses [low, high] the lattice should cover: beyond them lies mass of at most ``tail``, or a loss > most."""
    q, sigma = part.rate, spread(part)
    if part.kind is Kind.GAUSSIAN:
        high = 0.5 / sigma**2 - float(ndtri(tail)) / sigma
        return max(-high, -most), min(high, most)
    x = max(-sigma * float(ndtri(min(tail / 2, 0.5))), 1.0 - sigma * float(ndtri(min(tail / (2 * q), 0.5))))
    high = _loss(x, q, sigma**2)
    if part.kind is Kind.EXCHANGE:
        high -= _loss(-x, q, sigma**2)
        return max(-high, -most), min(high, most)
    return math.log1p(-q), min(high, most)


def _outputs(part: Part, low: float, offsets: Floats) -> Floats:
    """The outputs x at which the loss is low + offset.

    Gaussian: x = 1/2 + σ²l. Erased: x = 1/2 + σ²(ln((1−q)/q) + ln(e^offset − 1)), low being ln(1−q). Exchanged:
    x = σ²(l/2 + arsinh((1−q)/q · e^(1/(2σ²)) · sinh(l/2))), in logarithms, since the argument overflows.
    """
    variance = spread(part) ** 2
    if part.kind is Kind.GAUSSIAN:
        return np.asarray(0.5 + variance * (low + offsets))
    log_odds = math.log1p(-part.rate) - math.log(part.rate)
    with np.errstate(divide="ignore"):
        if part.kind is Kind.POISSON:
            return np.asarray(0.5 + variance * (log_odds + offsets + np.log(-np.expm1(-offsets))))
        half = np.abs(low + offsets) / 2
        log_argument = log_odds + 0.5 / variance + half + np.log(-np.expm1(-2 * half)) - math.log(2.0)
    arsinh = np.logaddexp(0.5 * np.logaddexp(0.0, 2 * log_argument), log_argument)
    return np.asarray(variance * np.sign(low + offsets) * (half + arsinh))


def _cells(points: Floats) -> Floats:
    """Standard normal mass between consecutive points, from the nearer tail, so that small masses stay exact."""
    tails = ndtr(-np.abs(points))
    left, right = tails[:-1], tails[1:]
    inner = np.where(points[:-1] >= 0, left - right, 1.0 - left - right)
    return np.asarray(np.where(points[1:] <= 0, right - left, inner))


def discretise(part: Part, step: float, low: float, high: float) -> Lattice:
    """The dominating lattice of one release, with points at low, low + step, … up to ``high`` or just above."""
    offsets = np.asarray(step * np.arange(max(1, math.ceil((high - low) / step)) + 1), dtype=float)
    x = _outputs(part, low, offsets)
    q, sigma = part.rate, spread(part)
    other = -1.0 if part.kind is Kind.EXCHANGE else 0.0
    base, with_record, without = (_cells((x - c) / sigma) for c in (0.0, 1.0, other))
    mass = (1.0 - q) * base + q * with_record
    starts = low + offsets[:-1]
    # m − w e^l without the cancellation of nearly equal terms; past e^700 rounding up to l_k+1 dominates as well.
    growth = np.expm1(np.minimum(starts, 700.0))
    excess = q * (with_record - without) - growth * ((1.0 - q) * base + q * without)
    up = np.where(starts > 700.0, mass, np.clip(excess / -math.expm1(-step), 0.0, mass))
    points = np.zeros(mass.size + 1)
    points[1:] += up
    points[:-1] += mass - up

    def beyond(sign: float, end: float) -> tuple[float, float]:
        centre, one, c = (float(ndtr(sign * (end - c) / sigma)) for c in (0.0, 1.0, other))
        return (1.0 - q) * centre + q * one, (1.0 - q) * centre + q * c

    below, below_back = beyond(1.0, float(x[0]))
    above, above_back = beyond(-1.0, float(x[-1]))
    top = low + float(offsets[-1])
    kept = min(above_back * math.exp(top), above) if top < 700.0 else 0.0
    kept_back = min(below * math.exp(-low), below_back) if low > -700.0 else 0.0
    points[0] += below
    points[-1] += kept
    return Lattice(low, step, points, above - kept, below_back - kept_back)
