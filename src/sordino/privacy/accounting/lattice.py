"""Dominating lattices of privacy losses: one release as a pair of distributions, and where many of them fall to δ.

*One release.* With the record the output follows P = (1−q)·N(0, σ²) + q·N(1, σ²), without it Q = (1−q)·N(0, σ²) +
q·N(c, σ²), where c = 0 when the record's term is erased and c = −1 when another takes its place; the loss is
L = ln dP/dQ, increasing in the output. Cut the loss axis at l_k = start + k·step. In the cell [l_k, l_k+1] move the
mass to its two ends so that both the P mass m and the Q mass w of the cell stay what they are:
b = (m − w e^(l_k))/(1 − e^(−step)) goes to l_k+1 and m − b to l_k. The curve α ↦ sup_S P(S) − αQ(S), the hockey-stick
divergence at every α ≥ 0, is thereby replaced by chords of a convex curve ("connect the dots", Doroshenko et al. 2022):
the lattice pair dominates in *both* directions, and so does every composition of such pairs.

*Composition.* The masses of every lattice are tilted, p_k e^(θ l_k)/M(θ), so that the composed loss centres on ε: a
short circular convolution then suffices, and the tail is found with *relative* precision however small δ is. With r the
composed tilted masses, δ(ε) = ΠM^count · Σ_{l>ε} e^(−θl) r(l) (1 − e^(ε−l)). What is left out is added to δ: mass of
infinite loss (Σ count·lost), Chernoff's bound on the loss above the window, and float rounding. Mass that wraps around
from either side only adds, and the window's length makes it negligible.

Guarantees: for every ε, positive or negative, the hockey-stick divergence of the lattice pair is at least that of the
real pair, up to float rounding (relative 1e-12 of a cell), for which ``crossing`` adds a margin; an ε that ``crossing``
returns with side 0 is at least the ε of the composed lattice pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import fft
from scipy.special import ndtr, ndtri

from sordino.privacy.accounting.parts import Floats, Indices, Kind, Part

TRUNCATED = 1e-5
LARGEST_WINDOW = 1 << 22
_ROUNDING = 16 * float(np.finfo(float).eps)
_FEW = 256
_PROBES = 33

Tails = Callable[[Indices], Floats]


class LossPair(NamedTuple):
    """One release: the mass that P has at the losses start + k·step, k = 0, 1, …

    ``lost`` is the P mass of infinite loss, ``lost_back`` the Q mass of a loss of −∞.
    """

    start: float
    step: float
    mass: Floats
    lost: float
    lost_back: float

    @property
    def losses(self) -> Floats:
        """The privacy loss l_k of every point."""
        return np.asarray(self.start + self.step * np.arange(self.mass.size))

    def reversed(self) -> LossPair:
        """The pair (Q, P): mass p_k e^(−l_k) at −l_k. For Poisson sampling: a record added instead of removed."""
        losses = self.losses
        back = self.mass * np.exp(-losses)
        return LossPair(-float(losses[-1]), self.step, back[::-1].copy(), self.lost_back, self.lost)


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


def discretise(part: Part, step: float, low: float, high: float) -> LossPair:
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
    return LossPair(low, step, points, above - kept, below_back - kept_back)


class Guess(NamedTuple):
    """Where to look: the tilt θ, the expected ε, and the standard deviation of the tilted loss."""

    tilt: float
    epsilon: float
    deviation: float


class Tilted(NamedTuple):
    """A composition under the tilt θ: ln masses + θl per part, ln M(θ) per part, and K, K', K'' of the whole."""

    logs: list[Floats]
    norms: list[float]
    cumulant: float
    mean: float
    deviation: float


def tilted_by(lattices: list[LossPair], counts: list[int], tilt: float) -> Tilted:
    """The composition of ``counts`` of each lattice under the tilt θ: K(θ) = Σ count·ln Σ_k p_k e^(θ l_k)."""
    logs, norms, value, mean, variance = [], [], 0.0, 0.0, 0.0
    for lattice, count in zip(lattices, counts):
        losses = lattice.losses
        with np.errstate(divide="ignore"):
            log = np.log(lattice.mass) + tilt * losses
        peak = float(log.max())
        weight = np.exp(log - peak)
        total = float(weight.sum())
        # Sums, not BLAS products: its threads fight with ours and with whatever else the machine does.
        centre = float((weight * losses).sum()) / total
        norm = peak + math.log(total)
        logs.append(log)
        norms.append(norm)
        value += count * norm
        mean += count * centre
        variance += count * float((weight * (losses - centre) ** 2).sum()) / total
    return Tilted(logs, norms, value, mean, math.sqrt(variance))


def _above(lattices: list[LossPair], counts: list[int], tilted: Tilted, tilt: float) -> list[tuple[float, float]]:
    """(order s, K(s)) for a few orders s > θ: Chernoff's bound on the loss above x is e^(K(s) − s·x)."""
    out = []
    for c in (0.0, 2.0, 4.0, 6.0, 9.0):
        order, value = tilt + c / max(tilted.deviation, 1e-12), 0.0
        for lattice, count, log in zip(lattices, counts, tilted.logs):
            more = log + (order - tilt) * lattice.losses
            peak = float(more.max())
            value += count * (peak + math.log(float(np.exp(more - peak).sum())))
        out.append((order, value))
    return out


def _window(
    bounds: list[tuple[float, float]], guess: Guess, deviation: float, step: float, delta: float
) -> tuple[float, int]:
    """(low, points) of the window: from below ε to where Chernoff leaves 1e-5 δ, long enough to damp what wraps.

    What wraps from below is damped by e^(−θ·length); what wraps from above is raised by as much, so the tilted mass
    above ε + length has to be small itself.
    """
    log_tiny = math.log(TRUNCATED * delta)
    tilt, epsilon = guess.tilt, guess.epsilon
    margin = max(min(0.75 * deviation, 4 / tilt), 2 / tilt, 4 * step)
    high = min((value - log_tiny) / order for order, value in bounds)
    wrap = min((value - order * epsilon - log_tiny) / (order - tilt) for order, value in bounds[1:])
    low = epsilon - margin
    length = margin + max(high - epsilon, wrap, -log_tiny / tilt, margin)
    points = min(math.ceil(length / step) + 2, LARGEST_WINDOW)
    return low, int(fft.next_fast_len(points, real=True))


def _tails(lattices: list[LossPair], counts: list[int], tilted: Tilted, tilt: float, points: int) -> Tails:
    """i ↦ Σ_{m≥1} r(i+m)·e^(−θmh)(1 − e^(−mh)) on the circle of ``points``, r the composed tilted masses.

    Index i stands for the loss Σ count·start + i·step, up to whole turns. The composition is a product of powers of
    spectra; the sum over the tail is one more factor, a difference of two geometric series. Where few frequencies
    are left (many releases), they are summed at the asked indices; else one inverse transform serves all.
    """
    step = lattices[0].step
    live = np.ones(points // 2 + 1, dtype=bool)
    spectra = []
    for log, norm, count in zip(tilted.logs, tilted.norms, counts):
        mass = np.exp(log - norm)
        if mass.size > points:
            mass = np.pad(mass, (0, -mass.size % points)).reshape(-1, points).sum(axis=0)
        spectrum = fft.rfft(mass, points)
        # Frequencies that a power drives below e^-46 of the total do not matter next to rounding.
        live &= spectrum.real**2 + spectrum.imag**2 > math.exp(-92.0 / count)
        spectra.append(spectrum)
    at = np.flatnonzero(live)
    product = np.exp(sum(count * np.log(spectrum[at]) for spectrum, count in zip(spectra, counts)))
    turn = 2j * np.pi * at / points
    near, far = (turn - (tilt + k) * step for k in (0, 1))
    wrapped = [math.exp(-(tilt + k) * step * points) for k in (0, 1)]
    product *= (np.exp(far) - wrapped[1]) / np.expm1(far) - (np.exp(near) - wrapped[0]) / np.expm1(near)
    if at.size > _FEW:
        out = np.zeros(live.size, dtype=complex)
        out[at] = product
        every = fft.irfft(out, points)
        return lambda indices: every[indices % points]
    product *= np.where((at == 0) | (2 * at == points), 1.0, 2.0) / points

    def some(indices: Indices) -> Floats:
        phase = (2 * np.pi / points) * (np.outer(indices % points, at) % points)
        return np.asarray((np.cos(phase) * product.real - np.sin(phase) * product.imag).sum(axis=1))

    return some


def _first_below(divergence: Tails, target: float, points: int) -> tuple[int, float, float] | None:
    """The first index whose divergence is at most target, with the values before it and at it (it falls); or none."""
    low, high, above, below = 0, points - 1, math.inf, -math.inf
    while high - low > 1 or math.isinf(above):
        probes = np.unique(np.linspace(low, high, _PROBES).astype(int))
        values = divergence(probes)
        enough = values <= target
        if not enough[-1]:
            return None
        k = int(enough.argmax())
        if k == 0:
            return 0, math.inf, float(values[0])
        low, high, above, below = int(probes[k - 1]), int(probes[k]), float(values[k - 1]), float(values[k])
    return high, above, below


def crossing(lattices: list[LossPair], counts: list[int], delta: float, guess: Guess) -> tuple[float, int]:
    """(ε, 0) where the certified δ(ε) falls to delta; (edge, ∓1) when that lies below/above what the tilt can see."""
    step, tilt = lattices[0].step, guess.tilt
    tilted = tilted_by(lattices, counts, tilt)
    bounds = _above(lattices, counts, tilted, tilt)
    low, points = _window(bounds, guess, tilted.deviation, step, delta)
    base = sum(count * lattice.start for lattice, count in zip(lattices, counts))
    first = math.ceil((low - base) / step)
    low, top = base + first * step, base + (first + points - 1) * step
    log_scale = tilted.cumulant - tilt * low
    left_out = sum(count * lattice.lost for lattice, count in zip(lattices, counts))
    left_out += math.exp(min(0.0, min(value - order * top for order, value in bounds)))
    left_out += _ROUNDING * (64 + sum(counts)) * math.exp(min(log_scale, 600.0))
    if left_out >= delta:
        return top, 1
    target = math.exp(min(math.log(delta - left_out) - log_scale, 600.0))
    tails = _tails(lattices, counts, tilted, tilt, points)

    def divergence(k: Indices) -> Floats:
        return np.asarray(tails(first + k) * np.exp(-tilt * step * k))

    found = _first_below(divergence, target, points)
    if found is None:
        return top, 1
    k, above, below = found
    if k == 0:
        return low, -1
    # Between lattice points the divergence is linear in e^ε.
    share = (above - target) / (above - below)
    return low + (k - 1) * step + math.log1p(share * math.expm1(step)), 0
