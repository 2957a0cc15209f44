"""Noise as three papers compute it, for reproductions. None of these is what a ledger charges.

``rdp-robust-hdp``: Rényi accounting as in Robust-HDP's code, with its orders and the looser classical conversion
ε = R(α) + ln(1/δ)/(α−1). Valid, not tight; it has a floor ln(1/δ)/(α_max−1) below which it certifies nothing.

``closed-form-selection``: σ² = V·T·C² on the averaged gradient, V = 8 ln(e + rℓ/δ)/(n²r²ℓ²), ℓ = ln(1+(e^ε−1)/r), so
z = √(8T ln(e + rℓ/δ))/ℓ. NOT VALID as an accountant (it amplifies once, after composing): it only picks noise.

``wor-paper``: Wang–Balle–Kasiviswanathan amplification by sampling without replacement in its general form, at the
single order α* = 1 + ⌈2 ln(1/δ)/ε⌉, a quarter of ε for each of at most two kinds of release (AdaptDP-FedAvg's
Theorem 1; ``share=1/2`` is its DP-FedAvg counterpart, Theorem 4). Valid, but often certifies no noise at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import gammaln, logsumexp

from sordino.errors import BadInput
from sordino.privacy.accounting import rdp
from sordino.privacy.accounting.parts import Composition, Floats, Kind, Part, halved, normal_form, scaled, table
from sordino.privacy.types import Budget, Event

ROBUST_HDP_ORDERS: tuple[float, ...] = (*(1 + k / 10 for k in range(1, 100)), *(float(k) for k in range(12, 65)))
PHASE_SHARE = 0.25


def robust_hdp_epsilons(compositions: Sequence[Composition], deltas: Floats) -> Floats:
    """ε = min over α of R(α) + ln(1/δ)/(α−1)."""
    curve = rdp.curve(table(compositions), ROBUST_HDP_ORDERS)
    return np.asarray((curve - np.log(deltas)[:, None] / (np.asarray(ROBUST_HDP_ORDERS) - 1)).min(axis=1))


def robust_hdp_floor(deltas: Floats) -> Floats:
    """The ε that this accountant can never go below, whatever the noise."""
    return np.asarray(-np.log(deltas) / (ROBUST_HDP_ORDERS[-1] - 1))


def closed_form_noise(epsilon: Floats, delta: Floats, rate: Floats, steps: Floats) -> Floats:
    """z = √(8T ln(e + rℓ/δ))/ℓ with ℓ = ln(1 + (e^ε − 1)/r)."""
    log_odds = np.where(epsilon < 500.0, np.log1p(np.expm1(np.minimum(epsilon, 500.0)) / rate), epsilon - np.log(rate))
    return np.asarray(np.sqrt(8 * steps * np.log(math.e + rate * log_odds / delta)) / log_odds)


def _columns(compositions: Sequence[Composition]) -> tuple[Floats, Floats, Floats]:
    """(noise, rate, count) of compositions that have one kind of release each."""
    if any(len(composition) != 1 for composition in compositions):
        raise BadInput("accountant 'closed-form-selection' knows one kind of release: use 'pld' for several")
    parts = table(compositions)
    return parts.noise, parts.rate, parts.times


def closed_form_epsilons(compositions: Sequence[Composition], deltas: Floats) -> Floats:
    """The ε at which the closed form asks for exactly this noise."""
    noise, rate, count = _columns(compositions)
    low, high = np.full(noise.shape, -40.0), np.full(noise.shape, 40.0)
    found = halved(lambda log: closed_form_noise(np.exp(log), deltas, rate, count) <= noise, low, high, 100)
    return np.asarray(np.exp(found[1]))


def closed_form_scales(compositions: Sequence[Composition], epsilon: Floats, deltas: Floats) -> Floats:
    """The closed form's noise over the template's."""
    noise, rate, count = _columns(compositions)
    return np.asarray(closed_form_noise(epsilon, deltas, rate, count) / noise)


def _order(epsilon: float, delta: float) -> int:
    return 1 + math.ceil(2 * math.log(1 / delta) / epsilon)


def _wor_rdp(part: Part, order: int) -> float:
    """S(ε(·), γ)(α) with ε(j) = j/(2z²) and ε(∞) = ∞; z = ∞ is allowed and shows what no noise can remove."""
    precision = part.noise**-2.0
    if part.kind is Kind.GAUSSIAN:
        return float(order * precision / 2)
    j = np.arange(2, order + 1)
    log_binomial = gammaln(order + 1) - gammaln(j + 1) - gammaln(order - j + 1)
    terms = math.log(2.0) + j * (j - 1) * precision / 2
    if precision < math.log(2.0):
        terms[0] = math.log(4 * math.expm1(precision)) if precision > 0 else -math.inf
    total = np.logaddexp(0.0, logsumexp(terms + log_binomial + j * math.log(part.rate)))
    return part.times * float(total) / (order - 1)


def _check_wor(composition: Composition) -> None:
    if len(composition) > 2 or any(part.kind not in (Kind.FIXED, Kind.GAUSSIAN) for part in composition):
        raise BadInput(
            "accountant 'wor-paper' covers at most two kinds of release, by fixed-size batches without replacement "
            "or full batches: use sampling='fixed' with adjacency='replace-one', or accountant='pld'"
        )


def _wor_enough(composition: Composition, epsilon: float, delta: float, share: float) -> bool:
    order = _order(epsilon, delta)
    return all(_wor_rdp(part, order) <= share * epsilon for part in composition)


def _wor_epsilon(own: Composition, delta: float, share: float) -> float:
    _check_wor(own)
    ends = math.log(1e-3), math.log(1e12)
    return math.exp(halved(lambda log: _wor_enough(own, math.exp(log), delta, share), *ends, 80)[1])


def _wor_scale(own: Composition, epsilon: float, delta: float, share: float) -> float:
    _check_wor(own)
    if not _wor_enough(scaled(own, math.inf), epsilon, delta, share):
        order = _order(epsilon, delta)
        left = sum(_wor_rdp(part._replace(noise=math.inf), order) for part in own)
        raise BadInput(
            f"'wor-paper' certifies no noise at all here: at its order α* = {order} the terms j ≥ 3 alone cost "
            f"{left:.3g}, and the release may cost {share:g}·ε = {share * epsilon:.3g}, however large the noise. "
            "Raise epsilon, lower the rate or the steps, or use accountant='pld' (the tightened bound)"
        )
    found = halved(lambda log: _wor_enough(scaled(own, math.exp(log)), epsilon, delta, share), -25.0, 25.0, 80)
    return math.exp(found[1])


def wor_epsilons(compositions: Sequence[Composition], deltas: Floats, share: float = PHASE_SHARE) -> Floats:
    """The smallest ε for which the paper's rule accepts this noise."""
    return np.array([_wor_epsilon(own, float(delta), share) for own, delta in zip(compositions, deltas)])


def wor_scales(compositions: Sequence[Composition], epsilon: Floats, deltas: Floats) -> Floats:
    """The smallest scale the paper's rule accepts; an error where it accepts none."""
    each = zip(compositions, epsilon, deltas)
    return np.array([_wor_scale(own, float(target), float(delta), PHASE_SHARE) for own, target, delta in each])


def wor_phase_scales(events: Sequence[Event], budget: Budget) -> list[float]:
    """The paper's noise for each kind of release on its own: ε/4 for each of two phases (Theorem 1), ε/2 for one.

    Factors on the events' noises; 0 where ε = ∞. An error where its formula certifies nothing, or knows no such case.
    """
    if budget.is_public:
        return [0.0] * len(events)
    if len(events) > 2:
        raise BadInput("calibrate = 'wor-paper' covers at most two kinds of release: use calibrate = 'tight'")
    share = 0.5 / len(events)
    return [_wor_scale(normal_form([one]), budget.epsilon, budget.delta, share) for one in events]
