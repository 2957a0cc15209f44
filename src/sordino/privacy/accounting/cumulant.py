"""The cumulant function of the privacy loss, Λ(t) = ln E_Q[e^(tL)], and the saddle-point estimate of ε.

Λ of a composition is the sum over its releases. The hockey-stick divergence is the contour integral
δ(ε) = (1/2πi) ∫ e^(K(s) − sε)/(s(s+1)) ds with K(s) = ln E_P[e^(sL)] = Λ(s+1); at its saddle point θ
    ε = K'(θ) − 1/θ − 1/(1+θ),   ln δ ≈ K(θ) − θε − ln θ(1+θ) − ½ ln(2π(K''(θ) + θ^-2 + (1+θ)^-2))
(Alghamdi et al. 2023). It is good to about a percent of δ, so to a tenth of a percent of ε: a starting point,
vectorised over clients, never a guarantee. The tilt θ also tells ``lattice.crossing`` where to look.

Full-batch Gaussian releases compose into one of them, for which ε is exact; it is also the limit of many sampled ones,
which makes it the starting point of the searches.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr, ndtri

from sordino.privacy.accounting.parts import Floats, Kind, PartTable, halved

_NODES = 128
_SCOUTS = 20
_NATS = 34.0
_HALVINGS = 200
_LAST_DIGIT = 4e-16


def gaussian_log_delta(epsilon: Floats, mu: Floats) -> Floats:
    """ln δ(ε) of the Gaussian mechanism with μ = sensitivity/σ: δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ)."""
    high = log_ndtr(mu / 2 - epsilon / mu)
    low = epsilon + log_ndtr(-mu / 2 - epsilon / mu)
    gap = np.minimum(low - high, -1e-300)
    return np.asarray(high + np.log(-np.expm1(gap)))


def gaussian_epsilon(mu: Floats, delta: Floats) -> Floats:
    """The smallest ε ≥ 0 with δ(ε) ≤ delta, rounded up; 0 where total variation is at most delta."""
    log_delta, low = np.log(delta), np.zeros(mu.shape)
    high = mu**2 / 2 + mu * np.sqrt(2 * np.log(1 / delta)) + 1e-300
    found = halved(lambda e: gaussian_log_delta(e, mu) <= log_delta, low, high, _HALVINGS, precision=_LAST_DIGIT)
    return np.where(2 * ndtr(mu / 2) - 1 <= delta, 0.0, found[1])


def gaussian_mu(epsilon: Floats, delta: Floats) -> Floats:
    """The largest μ with δ(ε) ≤ delta, rounded down; ε finite and positive."""
    log_delta, low, high = np.log(delta), np.full(epsilon.shape, 1e-12), np.sqrt(2 * epsilon) + 40.0

    def too_loud(mu: Floats) -> NDArray[np.bool_]:
        return ~(gaussian_log_delta(epsilon, mu) <= log_delta)

    return halved(too_loud, low, high, _HALVINGS, geometric=True, precision=_LAST_DIGIT)[0]


class Saddle(NamedTuple):
    """Per client: the tilt θ, the estimated ε, and the variance K'' of the loss there."""

    tilt: Floats
    epsilon: Floats
    variance: Floats


def _log_weights(x: Floats, rate: Floats, sigma: Floats, order: Floats, exchange: bool) -> tuple[Floats, Floats]:
    """(ln q(x)·e^(tL(x)), L(x)) at outputs x, up to a constant."""
    variance = sigma**2
    with np.errstate(divide="ignore"):
        stay, move = np.log1p(-rate), np.log(rate)
    with_record = np.logaddexp(stay, move + (x - 0.5) / variance)
    without = np.logaddexp(stay, move - (x + 0.5) / variance) if exchange else np.zeros_like(x)
    loss = with_record - without
    return order * loss + without - x**2 / (2 * variance), loss


def _outputs(rate: Floats, sigma: Floats, order: Floats, farthest: Floats, exchange: bool) -> Floats:
    """Outputs [rows, nodes] that cover where the tilted density lives, found by scouts around its possible modes.

    Nothing beyond ``farthest`` counts: a large tilt would otherwise weigh outputs that never happen.
    """
    reach = 8.5 * sigma
    around = np.linspace(-1.0, 1.0, _SCOUTS)
    between = np.linspace(0.0, 1.0, _SCOUTS)
    scouts = np.concatenate(
        [reach * around, order * between, order + reach * around, (order - 1.0) * between - reach * (1 - between)],
        axis=1,
    )
    scouts = np.minimum(scouts, farthest)
    scouts.sort(axis=1)
    height, _ = _log_weights(scouts, rate, sigma, order, exchange)
    alive = height > height.max(axis=1, keepdims=True) - _NATS
    last = scouts.shape[1] - 1
    first = np.maximum(alive.argmax(axis=1) - 1, 0)
    final = np.minimum(last - alive[:, ::-1].argmax(axis=1) + 1, last)
    rows = np.arange(len(scouts))
    low, high = scouts[rows, first][:, None], scouts[rows, final][:, None]
    return np.asarray(low + (high - low) * np.linspace(0.0, 1.0, _NODES))


def _sampled(rate: Floats, sigma: Floats, order: Floats, tail: Floats, exchange: bool) -> tuple[Floats, Floats, Floats]:
    """Λ, Λ', Λ'' of one sampled release at ``order``, by the trapezoid rule, without outputs of mass < ``tail``."""
    q, s, t = rate[:, None], sigma[:, None], order[:, None]
    far = np.maximum(-sigma * ndtri(tail / 2), 1.0 - sigma * ndtri(np.minimum(tail / (2 * rate), 0.5)))
    x = _outputs(q, s, t, far[:, None], exchange)
    height, loss = _log_weights(x, q, s, t, exchange)
    peak = height.max(axis=1, keepdims=True)
    weight = np.exp(height - peak)
    total = weight.sum(axis=1)
    step = x[:, 1] - x[:, 0]
    value = np.log(total * step) + peak[:, 0] - 0.5 * np.log(2 * np.pi * sigma**2)
    mean = (weight * loss).sum(axis=1) / total
    variance = (weight * (loss - mean[:, None]) ** 2).sum(axis=1) / total
    return value, mean, variance


def cumulants(parts: PartTable, noise: Floats, order: Floats, delta: Floats) -> tuple[Floats, Floats, Floats]:
    """Λ, Λ', Λ'' of every client's composition at the client's ``order``, with ``noise`` per part.

    Tails that δ does not see (1e-5 of it, over all releases) are left out.
    """
    t = order[parts.owner]
    tail = (1e-5 * delta / parts.total(parts.times))[parts.owner]
    out = np.zeros((3, parts.owner.size))
    for kind in (Kind.GAUSSIAN, Kind.POISSON, Kind.EXCHANGE):
        at = parts.kind == kind.value
        if not at.any():
            continue
        if kind is Kind.GAUSSIAN:
            precision = noise[at] ** -2.0
            out[:, at] = t[at] * (t[at] - 1) / 2 * precision, (t[at] - 0.5) * precision, precision
        else:
            exchange = kind is Kind.EXCHANGE
            sigma = 2 * noise[at] if exchange else noise[at]
            out[:, at] = _sampled(parts.rate[at], sigma, t[at], tail[at], exchange)
    value, mean, variance = (parts.total(parts.times * row) for row in out)
    return value, mean, variance


def gaussian_limit(parts: PartTable, noise: Floats) -> Floats:
    """μ of the central limit of each composition: √(Σ count·q²(e^(1/z²) − 1)), capped where it stops meaning much."""
    variance = np.where(parts.kind == Kind.EXCHANGE.value, 4 * noise**2, noise**2)
    one = parts.rate**2 * np.expm1(np.minimum(1 / variance, 8.0))
    one = np.where(parts.kind == Kind.EXCHANGE.value, 4 * one, one)
    one = np.where(parts.kind == Kind.GAUSSIAN.value, noise**-2.0, one)
    return np.sqrt(parts.total(parts.times * one))


def saddle_point(
    parts: PartTable, noise: Floats, delta: Floats, start: Floats | None = None, rounds: int = 40
) -> Saddle:
    """Solve ln δ(θ) = ln delta for θ: safeguarded Newton, d ln δ/dθ ≈ −θ·(K'' + θ^-2 + (1+θ)^-2)."""
    if start is None:
        mu = np.maximum(gaussian_limit(parts, noise), 1e-9)
        start = np.clip(np.sqrt(2 * np.log(1 / delta)) / mu, 1e-3, 1e7)
    tilt, low, high = start.copy(), np.zeros_like(start), np.full_like(start, np.inf)
    for _ in range(rounds):
        value, mean, variance = cumulants(parts, noise, tilt + 1.0, delta)
        curve = variance + tilt**-2.0 + (1 + tilt) ** -2.0
        epsilon = mean - 1 / tilt - 1 / (1 + tilt)
        log_delta = value - tilt * epsilon - np.log(tilt * (1 + tilt)) - 0.5 * np.log(2 * np.pi * curve)
        off = log_delta - np.log(delta)
        settled = np.abs(off) < 1e-3
        if settled.all():
            break
        low = np.where(off > 0, tilt, low)
        high = np.where(off < 0, tilt, high)
        proposal = tilt * np.exp(np.clip(off / (tilt**2 * curve), -1.5, 1.5))
        inside = (proposal > low) & (proposal < high)
        middle = np.where(np.isinf(high), 2 * tilt, np.sqrt(np.maximum(low, high * 1e-3) * high))
        tilt = np.where(settled, tilt, np.where(inside, proposal, middle))
    return Saddle(tilt, epsilon + off / tilt, variance)


def rarely(parts: PartTable, noise: Floats) -> NDArray[np.bool_]:
    """Whether a record is hardly ever sampled, but then seen: there the rare limit is better than the saddle point."""
    loud = parts.total((noise > 1.5).astype(float)) == 0
    return np.asarray(loud & (parts.total(parts.times * parts.rate) < 0.6))


def _limits(parts: PartTable, epsilon: Floats, delta: Floats) -> tuple[Floats, Floats]:
    """ln of the factors on every noise that meet ε in the rare limit (slightly too small) and in the central limit."""
    mu, log_delta = gaussian_mu(epsilon, delta), np.log(delta)

    def rare_enough(log_scale: Floats) -> NDArray[np.bool_]:
        return ~(_rare_log_delta(parts, np.exp(log_scale), epsilon) > log_delta)

    def central_enough(log_scale: Floats) -> NDArray[np.bool_]:
        return ~(gaussian_limit(parts, parts.noise * np.exp(log_scale)[parts.owner]) > mu)

    low, high = np.full(epsilon.shape, -12.0), np.full(epsilon.shape, 20.0)
    return halved(rare_enough, low, high, 36)[1], halved(central_enough, low, high, 36)[1]


def limit_scale(parts: PartTable, epsilon: Floats, delta: Floats) -> Floats:
    """A factor on every noise that roughly meets ε: the larger of the two limits'."""
    return np.exp(np.maximum(*_limits(parts, epsilon, delta)))


def saddle_scale(parts: PartTable, epsilon: Floats, delta: Floats) -> tuple[Floats, Floats]:
    """(scale, slope): the factor on every noise with which the estimate meets ε, and d ln ε/d ln scale there."""
    rare, central = _limits(parts, epsilon, delta)
    log_scale = np.maximum(rare, central)
    floor, ceiling = log_scale - 1.0, log_scale + 1.0
    tilt: Floats | None = None
    slope = np.full_like(epsilon, -1.2)
    before: tuple[Floats, Floats] | None = None
    for _ in range(8):
        point = saddle_point(parts, parts.noise * np.exp(log_scale)[parts.owner], delta, tilt, rounds=10)
        tilt = point.tilt
        off = np.log(np.maximum(point.epsilon, 1e-3 * epsilon)) - np.log(epsilon)
        if before is not None:
            moved = log_scale - before[0]
            secant = (off - before[1]) / np.where(np.abs(moved) > 1e-7, moved, 1.0)
            slope = np.where(np.abs(moved) > 1e-7, np.clip(secant, -8.0, -0.3), slope)
        # A client that has settled stays, so that its noise does not depend on who else is calibrated with it.
        settled = np.abs(off) < 1e-4
        if settled.all():
            break
        before = (log_scale, off)
        moved_to = np.clip(log_scale - np.clip(off / slope, -0.5, 0.5), floor, ceiling)
        log_scale = np.where(settled, log_scale, moved_to)
    rare_scale = np.exp(rare + 0.01)
    seldom = rarely(parts, parts.noise * rare_scale[parts.owner])
    return np.where(seldom, rare_scale, np.exp(log_scale)), np.where(seldom, -3.0, slope)


def _rare_log_delta(parts: PartTable, scale: Floats, epsilon: Floats) -> Floats:
    """ln Σ count·δ₁(ε) with δ₁ the divergence of one release: right where a record is hardly ever sampled."""
    sigma = parts.noise * scale[parts.owner]
    sigma = np.where(parts.kind == Kind.EXCHANGE.value, 2 * sigma, sigma)
    own = epsilon[parts.owner]
    raised = np.where(own < 600.0, np.log1p(np.expm1(np.minimum(own, 600.0)) / parts.rate), own - np.log(parts.rate))
    one = parts.rate * np.exp(gaussian_log_delta(raised, 1 / sigma))
    return np.log(np.maximum(parts.total(parts.times * one), 1e-300))


def rare_epsilon(parts: PartTable, delta: Floats) -> Floats:
    """ε with Σ count·δ₁(ε) = δ, slightly too small: an estimate where a record is hardly ever sampled."""
    scale, log_delta = np.ones(delta.shape), np.log(delta)
    low, high = np.full(delta.shape, 1e-6), np.full(delta.shape, 1e6)
    return halved(lambda e: _rare_log_delta(parts, scale, e) <= log_delta, low, high, 30, geometric=True)[1]
