"""The accountants by name: ε of compositions, the noise a target needs, and the words for privacy statements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from sordino.errors import BadInput
from sordino.privacy.accounting import cumulant, pld, published, rdp
from sordino.privacy.accounting.parts import Composition, Floats, Kind, scaled, table
from sordino.privacy.accounting.search import SAFETY, Indices, smallest_scale
from sordino.privacy.types import Scheme

Epsilons = Callable[[Sequence[Composition], Floats], Floats]
Scales = Callable[[Sequence[Composition], Floats, Floats], Floats]

_PLD_TOLERANCE = 3e-4
_RDP_TOLERANCE = 1e-4


class Accountant(NamedTuple):
    """(compositions, δ) → ε; (compositions, ε, δ) → scale of the noises; what to call it in a statement."""

    epsilons: Epsilons
    scales: Scales
    words: str


def _routes(compositions: Sequence[Composition]) -> list[Indices]:
    """Which are full-batch Gaussians alone (exact), which sampled (PLD), which partly without replacement (Rényi)."""
    kinds = [{part.kind for part in composition} for composition in compositions]
    route = np.array([2 if Kind.FIXED in own else 0 if own == {Kind.GAUSSIAN} else 1 for own in kinds])
    return [np.flatnonzero(route == k) for k in range(3)]


def _pick(compositions: Sequence[Composition], at: Indices) -> list[Composition]:
    return [compositions[int(i)] for i in at]


def _tight_epsilons(compositions: Sequence[Composition], deltas: Floats) -> Floats:
    exact, sampled, fixed = _routes(compositions)
    out = np.empty(len(compositions))
    if exact.size:
        mu = np.array([1 / own[0].noise for own in _pick(compositions, exact)])
        out[exact] = cumulant.gaussian_epsilon(mu, deltas[exact])
    if sampled.size:
        out[sampled] = pld.epsilons(_pick(compositions, sampled), deltas[sampled])
    if fixed.size:
        out[fixed] = rdp.epsilons(_pick(compositions, fixed), deltas[fixed])
    return out


def _tight_scales(compositions: Sequence[Composition], target: Floats, deltas: Floats) -> Floats:
    exact, sampled, fixed = _routes(compositions)
    out = np.empty(len(compositions))
    if exact.size:
        noise = np.array([own[0].noise for own in _pick(compositions, exact)])
        out[exact] = 1 / (noise * cumulant.gaussian_mu(target[exact] * (1 - SAFETY), deltas[exact]))
    if fixed.size:
        out[fixed] = _rdp_scales(_pick(compositions, fixed), target[fixed], deltas[fixed])
    if sampled.size:
        own, goal, delta = _pick(compositions, sampled), target[sampled], deltas[sampled]
        _refuse_idle_delta(own, delta)
        start, slope = cumulant.saddle_scale(table(own), goal * (1 - 4 * pld.TIGHTNESS), delta)
        cost = _cost(pld.epsilons, own, delta)
        out[sampled] = smallest_scale(cost, goal, start, slope, _PLD_TOLERANCE)
    return out


def _refuse_idle_delta(compositions: Sequence[Composition], deltas: Floats) -> None:
    """A δ above the chance that a record is ever sampled would be met without any noise: no protection at all."""
    for composition, delta in zip(compositions, deltas):
        chance = sum(part.times * part.rate for part in composition)
        if chance <= delta:
            raise BadInput(
                f"delta is {delta:g}, but a record is sampled with probability {chance:.3g} at most: releasing it "
                "without noise would meet that. Choose delta well below 1/records"
            )


def _cost(epsilons: Epsilons, compositions: Sequence[Composition], deltas: Floats) -> Callable[..., Floats]:
    """ε of some of the compositions with their noises scaled."""

    def cost(at: Indices, scales: Floats) -> Floats:
        return epsilons([scaled(own, float(s)) for own, s in zip(_pick(compositions, at), scales)], deltas[at])

    return cost


def _renyi_scales(epsilons: Epsilons, compositions: Sequence[Composition], target: Floats, deltas: Floats) -> Floats:
    """The smallest scales by evaluating ``epsilons``, from the better of two limits."""
    start = cumulant.limit_scale(table(compositions), target, deltas)
    slope = np.full(target.shape, -1.2)
    return smallest_scale(_cost(epsilons, compositions, deltas), target, start, slope, _RDP_TOLERANCE)


def _rdp_scales(compositions: Sequence[Composition], target: Floats, deltas: Floats) -> Floats:
    return _renyi_scales(rdp.epsilons, compositions, target, deltas)


def _robust_hdp_scales(compositions: Sequence[Composition], target: Floats, deltas: Floats) -> Floats:
    floor = published.robust_hdp_floor(deltas)
    if np.any(target <= floor * (1 + 1e-6)):
        worst = int(np.argmin(target / floor))
        raise BadInput(
            f"'rdp-robust-hdp' certifies no ε at or below {floor[worst]:.4g} for δ = {deltas[worst]:g} (its largest "
            f"order is {published.ROBUST_HDP_ORDERS[-1]:g}); {target[worst]:.4g} was asked for: use accountant='pld'"
        )
    return _renyi_scales(published.robust_hdp_epsilons, compositions, target, deltas)


_BY_NAME: dict[str, Accountant] = {
    "pld": Accountant(_tight_epsilons, _tight_scales, "privacy loss distributions (tight, rounded up)"),
    "rdp": Accountant(rdp.epsilons, _rdp_scales, "Rényi differential privacy"),
    "rdp-robust-hdp": Accountant(
        published.robust_hdp_epsilons,
        _robust_hdp_scales,
        "Rényi differential privacy as published with Robust-HDP (classical conversion, orders up to 64)",
    ),
    "closed-form-selection": Accountant(
        published.closed_form_epsilons,
        published.closed_form_scales,
        "closed form published with privacy-aware client selection: picks noise, NOT a valid guarantee",
    ),
    "wor-paper": Accountant(
        published.wor_epsilons,
        published.wor_scales,
        "sampling without replacement as published with AdaptDP-FedAvg (general bound at one Rényi order)",
    ),
}
ACCOUNTANTS: tuple[str, ...] = tuple(_BY_NAME)


def accountant_named(name: str) -> Accountant:
    """The accountant of that name, or an error that lists the names."""
    if name not in _BY_NAME:
        raise BadInput(f"accountant {name!r} is unknown: use one of {', '.join(ACCOUNTANTS)}")
    return _BY_NAME[name]


def label(accountant: str, sampling: str | Scheme = Scheme.POISSON) -> str:
    """The accountant in plain words, for privacy statements. PLD has no fixed-size sampling: the words say so."""
    words = accountant_named(accountant).words
    scheme = Scheme.parse(sampling)
    if scheme is Scheme.FIXED and accountant in ("pld", "rdp"):
        return "Rényi bound for fixed-size batches without replacement (tightened Wang–Balle–Kasiviswanathan)"
    return "Gaussian mechanism (exact)" if scheme is Scheme.FULL and accountant == "pld" else words
