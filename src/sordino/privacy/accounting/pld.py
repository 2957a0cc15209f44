"""Tight ε of compositions by privacy loss distributions: pessimistic, certified, a millisecond or two per client.

Every release becomes a dominating lattice pair (``lattice``). Its masses are tilted, p_k e^(θ l_k)/M(θ), so that the
composed loss centres on ε: then a short circular convolution suffices and the tail is found with *relative* precision
however small δ is. With the composed tilted masses r on the window,
    δ(ε) = M^T Σ_{l>ε} e^(−θl) r(l) (1 − e^(ε−l))   (both directions; the worse counts).
What is left out is added to δ: mass of infinite loss (Σ count·lost), Chernoff's bound on the loss above the window,
and float rounding. Mass that wraps around from below only adds, and is made negligible by the window's length.

Guarantees: ``epsilon_of`` never returns less than the true ε of the composition; typically it is 1e-4 relative above.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import fft
from scipy.special import ndtr

from sordino.privacy.accounting import cumulant, rdp
from sordino.privacy.accounting.lattice import Lattice, discretise, extent
from sordino.privacy.accounting.parts import Composition, Floats, Kind, table

TIGHTNESS = 2e-5
_LARGEST_WINDOW = 1 << 22
_LARGEST_LATTICE = 1 << 20
_TRUNCATED = 1e-5
_ATTEMPTS = 16
_FEW = 256
_SMALLEST = 3e-3
_PROBES = 33
_ROUNDING = 16 * np.finfo(float).eps


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


def _lattices(composition: Composition, delta: float, guess: Guess, tightness: float) -> list[Lattice]:
    """The dominating lattices of one composition, all with one step.

    Splitting a loss over the two ends of its cell raises K(θ) by about θ(1+θ)step²/12 a release, so ε by
    count·(1+θ)step²/12: the step is chosen so that this is ``tightness`` of ε.
    """
    releases = float(sum(part.count for part in composition))
    scale = max(guess.epsilon, 0.1 * guess.deviation, _SMALLEST)
    step = min(math.sqrt(12 * tightness * scale / ((1 + guess.tilt) * releases)), 0.3 / (1 + guess.tilt))
    back = sum(-part.count * math.log1p(-part.rate) for part in composition if part.kind is Kind.POISSON)
    most = guess.epsilon + 3 * guess.deviation + 30.0 + back
    tail = _TRUNCATED * delta / releases
    ends = [extent(part, tail, most) for part in composition]
    step = max(step, max(high - low for low, high in ends) / _LARGEST_LATTICE)
    step = max(step, 8 * guess.deviation / _LARGEST_WINDOW)
    return [discretise(part, step, low, high) for part, (low, high) in zip(composition, ends)]


def _tilted(lattices: list[Lattice], counts: list[int], tilt: float) -> Tilted:
    logs, norms, value, mean, variance = [], [], 0.0, 0.0, 0.0
    for lattice, count in zip(lattices, counts):
        losses = lattice.losses
        with np.errstate(divide="ignore"):
            log = np.log(lattice.mass) + tilt * losses
        peak = float(log.max())
        weight = np.exp(log - peak)
        total = float(weight.sum())
        centre = float(weight @ losses) / total
        norm = peak + math.log(total)
        logs.append(log)
        norms.append(norm)
        value += count * norm
        mean += count * centre
        variance += count * float(weight @ (losses - centre) ** 2) / total
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
    log_tiny = math.log(_TRUNCATED * delta)
    tilt, epsilon = guess.tilt, guess.epsilon
    margin = max(min(0.75 * deviation, 4 / tilt), 2 / tilt, 4 * step)
    high = min((value - log_tiny) / order for order, value in bounds)
    wrap = min((value - order * epsilon - log_tiny) / (order - tilt) for order, value in bounds[1:])
    low = epsilon - margin
    length = margin + max(high - epsilon, wrap, -log_tiny / tilt, margin)
    points = min(math.ceil(length / step) + 2, _LARGEST_WINDOW)
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
        return np.asarray(np.cos(phase) @ product.real - np.sin(phase) @ product.imag)

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


def _crossing(lattices: list[Lattice], counts: list[int], delta: float, guess: Guess) -> tuple[float, int]:
    """(ε, 0) where the certified δ(ε) falls to delta; (edge, ∓1) when that lies below/above what the tilt can see."""
    step, tilt = lattices[0].step, guess.tilt
    tilted = _tilted(lattices, counts, tilt)
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


def _steepest(epsilon: float, delta: float) -> float:
    """A tilt beyond any useful one: θ is about ln(1/δ)/ε to 2 ln(1/δ)/ε for small ε, and √(ln(1/δ)/ε) for large."""
    return 3 * (math.log(1 / delta) + 5) / max(min(epsilon, math.sqrt(epsilon)), 1e-6)


def _aim(lattices: list[Lattice], counts: list[int], delta: float, epsilon: float, tilt: float) -> Guess:
    """The tilt whose saddle point lies at ε: K'(θ) − 1/θ − 1/(1+θ) = ε, by safeguarded Newton steps from ``tilt``."""
    low, high = 0.0, _steepest(epsilon, delta)
    tilt = min(tilt, high / 2)
    for _ in range(40):
        tilted = _tilted(lattices, counts, tilt)
        off = tilted.mean - 1 / tilt - 1 / (1 + tilt) - epsilon
        curve = tilted.deviation**2 + tilt**-2.0 + (1 + tilt) ** -2.0
        low, high = (low, tilt) if off > 0 else (tilt, high)
        if abs(off) <= 0.05 * math.sqrt(curve) or high < 1.01 * low:
            break
        tilt = min(max(tilt - off / curve, tilt / 4), 4 * tilt)
        if not low < tilt < high:
            tilt = (low + high) / 2
    return Guess(tilt, epsilon, tilted.deviation)


def _worst(lattices: list[Lattice], counts: list[int]) -> float:
    """The largest finite loss of the composition."""
    return sum(c * (one.start + one.step * (one.mass.size - 1)) for one, c in zip(lattices, counts))


def _reverse_fits(
    lattices: list[Lattice], counts: list[int], delta: float, guess: Guess
) -> bool:
    """Whether Chernoff's bound alone shows δ ≤ delta at ε: e^(K − θε)·θ^θ/(1+θ)^(1+θ) bounds the divergence."""
    tilt = guess.tilt
    value = _tilted(lattices, counts, tilt).cumulant
    bound = value - tilt * guess.epsilon + tilt * math.log(tilt) - (1 + tilt) * math.log1p(tilt)
    lost = sum(count * lattice.lost for lattice, count in zip(lattices, counts))
    return lost < delta and bound < math.log(delta - lost) - 1e-6


def _reverse(lattices: list[Lattice], counts: list[int], delta: float, forward: float, tilt: float) -> float:
    """ε of the direction (Q, P) where it exceeds ``forward``, else ``forward``."""
    back = [lattice.reversed() for lattice in lattices]
    if _worst(back, counts) <= forward and sum(c * one.lost for one, c in zip(back, counts)) < delta:
        return forward
    epsilon = forward
    for _ in range(_ATTEMPTS):
        guess = _aim(back, counts, delta, epsilon, tilt)
        if _reverse_fits(back, counts, delta, guess):
            return epsilon
        found, side = _crossing(back, counts, delta, guess)
        if side <= 0:
            return max(found, forward) if side == 0 else epsilon
        epsilon, tilt = 1.5 * epsilon + guess.deviation, guess.tilt
    return math.inf


def _one(composition: Composition, delta: float, guess: Guess, tightness: float) -> float:
    """The certified ε of one composition, from a guess that may be wrong."""
    counts = [part.count for part in composition]
    floor, ceiling = 0.0, math.inf
    for _ in range(_ATTEMPTS):
        lattices = _lattices(composition, delta, guess, tightness)
        found, side = _crossing(lattices, counts, delta, guess)
        if side == 0 or (side < 0 and found <= 0.0):
            forward = max(found, 0.0)
            if all(part.kind is not Kind.POISSON for part in composition):
                return forward
            return _reverse(lattices, counts, delta, forward, guess.tilt)
        if side < 0:
            ceiling = min(ceiling, found)
        else:
            floor = max(floor, guess.epsilon)
        if floor >= ceiling:
            break
        if math.isinf(ceiling):
            epsilon = 2 * floor + guess.deviation
        else:
            epsilon = ceiling / 3 if floor == 0.0 else (floor + ceiling) / 2
        guess = _aim(lattices, counts, delta, epsilon, guess.tilt)
    # δ(ceiling) ≤ delta is certified, so it bounds ε, if not tightly; the other direction has to hold there too.
    return ceiling if math.isinf(ceiling) else _reverse(lattices, counts, delta, ceiling, guess.tilt)


def _total_variation(composition: Composition) -> float:
    """A bound on δ(0): the sum of the releases' total variations q·(2Φ(1/(2z)) − 1). Below δ, ε is 0."""
    return sum(part.count * part.rate * (2 * float(ndtr(0.5 / part.noise)) - 1) for part in composition)


def _guesses(compositions: Sequence[Composition], deltas: Floats) -> list[Guess]:
    """Where to look, for every composition: its saddle point, or the rare limit where records are hardly sampled."""
    parts = table(compositions)
    saddle = cumulant.saddle_point(parts, parts.noise, deltas)
    rare = cumulant.rarely(parts, parts.noise)
    expected = np.where(rare, cumulant.rare_epsilon(parts, deltas), np.maximum(saddle.epsilon, 0.0))
    out = []
    for tilt, epsilon, variance, delta in zip(saddle.tilt, expected, saddle.variance, deltas):
        steep = _steepest(float(epsilon), float(delta))
        out.append(Guess(min(float(tilt), steep), float(epsilon), math.sqrt(float(variance))))
    return out


def epsilons(compositions: Sequence[Composition], deltas: Floats, tightness: float = TIGHTNESS) -> Floats:
    """ε of every composition at its δ; a Rényi bound in the few extreme cases where no window is found."""
    guesses = _guesses(compositions, deltas)

    def one(i: int) -> float:
        delta, composition = float(deltas[i]), compositions[i]
        if _total_variation(composition) <= delta:
            return 0.0
        found = _one(composition, delta, guesses[i], tightness)
        if math.isinf(found) and all(part.kind is not Kind.EXCHANGE for part in composition):
            return float(rdp.epsilons([composition], deltas[i : i + 1])[0])
        return found

    workers = min(4, len(os.sched_getaffinity(0)), 1 + len(compositions) // 4)
    if workers == 1:
        return np.array([one(i) for i in range(len(compositions))])
    with ThreadPoolExecutor(workers) as pool:
        return np.array(list(pool.map(one, range(len(compositions)))))
