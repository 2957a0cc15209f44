"""Where the composed hockey-stick divergence falls to δ: one circular convolution of tilted masses.

The masses of every lattice are tilted, p_k e^(θ l_k)/M(θ), so that the composed loss centres on ε: then a short circle
suffices, and the tail is found with *relative* precision however small δ is. With r the composed tilted masses,
    δ(ε) = ΠM^count · Σ_{l>ε} e^(−θl) r(l) (1 − e^(ε−l)).
What is left out is added to δ: mass of infinite loss (Σ count·lost), Chernoff's bound on the loss above the window, and
float rounding. Mass that wraps around from either side only adds, and the window's length makes it negligible.

Guarantees: an ε returned by ``crossing`` with side 0 is at least the ε of the composed lattice pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import fft

from sordino.privacy.accounting.lattice import Lattice
from sordino.privacy.accounting.parts import Floats

TRUNCATED = 1e-5
LARGEST_WINDOW = 1 << 22
_ROUNDING = 16 * float(np.finfo(float).eps)
_FEW = 256
_PROBES = 33

Indices = NDArray[np.int64]
Tails = Callable[[Indices], Floats]


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


def tilted_by(lattices: list[Lattice], counts: list[int], tilt: float) -> Tilted:
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


def _above(lattices: list[Lattice], counts: list[int], tilted: Tilted, tilt: float) -> list[tuple[float, float]]:
    """(order s, K(s)) for a few orders s > θ: Chernoff's bound on the loss above x is e^(K(s) − s·x)."""
    orders = [tilt + c / max(tilted.deviation, 1e-12) for c in (0.0, 2.0, 4.0, 6.0, 9.0)]
    out = []
    for order in orders:
        value = 0.0
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


def _tails(lattices: list[Lattice], counts: list[int], tilted: Tilted, tilt: float, points: int) -> Tails:
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


def crossing(lattices: list[Lattice], counts: list[int], delta: float, guess: Guess) -> tuple[float, int]:
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
