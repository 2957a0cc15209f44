"""What an attacker can do at best: how often it guesses right whether a record was used, and how many it finds.

With P the distribution of everything released with the record and Q without it, and δ(ε) = sup_S P(S) − e^ε·Q(S) the
hockey-stick divergence of the composed pair, for an attacker who knows everything but the one record:

* *Success.* Used or not with even odds, the best guess is right with probability (1 + TV)/2, TV = δ(0).
* *True positives.* A rule that calls at most a share a of unused records used (false positives) calls at most
  min_ε e^ε·a + δ(ε) of the used ones so. Both directions of the pair are asked, and the larger counts: a rule may
  as well single out records that were *not* used.

δ(ε) comes from the same dominating lattices as ε does (``lattice``), composed without a tilt: here δ is large, and
precision relative to 1 will do. Full batches alone are one Gaussian of z: Φ(1/(2z)), and Φ(Φ⁻¹(a) + 1/z). Discreteness
of shared noise is added as ``discrete`` says. Where there is no such distribution (batches of fixed size, filters), the
(ε, δ) that is promised bounds both: TV ≤ (e^ε − 1 + 2δ)/(e^ε + 1), and 1 − max(0, 1 − δ − e^ε·a, e^−ε·(1 − δ − a)).

Guarantees: no figure is below the true one of the composition. Against direct integration it is less than 1e-4 above,
except for true positives beyond 99 %, of which a + TV is told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from scipy import fft
from scipy.special import ndtr, ndtri

from sordino.privacy.accounting import discrete
from sordino.privacy.accounting.lattice import LARGEST_WINDOW, LossPair, discretise, extent, tilted_by
from sordino.privacy.accounting.parts import Composition, Floats, Kind, normal_form
from sordino.privacy.types import Event

FALSE_POSITIVES = 0.01
"""The share of unused records that an attacker may call used: what a serious attack is held to."""

_TAIL = 1e-10  # probability of losses beyond the window, which count as certainty
_FINENESS = 1e-3  # step² times the number of releases, over the variance of the whole loss
_COARSEST = 0.05
_LARGEST_LATTICE = 1 << 20
_FIRST_LOOK = 1 << 12
_ORDERS = tuple(2.0**k for k in range(-6, 9))


class Attack(NamedTuple):
    """The best an attacker can do.

    Attributes
    ----------
    success: how often it guesses right, used or not, from even odds.
    true_positives: the share of used records it finds if it may be wrong about 1 % of the unused ones.
    exact: whether both follow from what was released; else from ε and δ alone, which allows for more.
    """

    success: float
    true_positives: float
    exact: bool

    def told(self) -> dict[str, Any]:
        """The same for JSON, with what it is held to and what it follows from."""
        rates = {"success": self.success, "true_positives": self.true_positives, "false_positives": FALSE_POSITIVES}
        return {**rates, "from": "releases" if self.exact else "epsilon"}

    def or_worse(self, other: Attack) -> Attack:
        """What holds for a record that is in one of two parts, not knowing which."""
        return Attack(
            max(self.success, other.success),
            max(self.true_positives, other.true_positives),
            self.exact and other.exact,
        )


NOTHING = Attack(0.5, FALSE_POSITIVES, True)
"""Against somebody who saw nothing."""
CERTAINTY = Attack(1.0, 1.0, True)
"""Against somebody who saw what no noise protects."""


def best_attack(events: Sequence[Event], epsilon: float, delta: float, declared: bool = True) -> Attack:
    """The best attack on everything in ``events``, of which (ε, δ) is promised.

    ``declared``: rate and noise of all of it were fixed in advance; else (a filter) only the promise bounds anything.
    """
    composition = normal_form(events)
    if not composition:
        return NOTHING
    if any(part.noise == 0.0 for part in composition):
        return CERTAINTY
    if not declared or any(part.kind is Kind.FIXED for part in composition):
        return from_promise(epsilon, delta)
    more = discrete.allowance(events)
    if more.ratio > discrete.COARSEST:
        return CERTAINTY
    return _composed(composition, more.ratio, more.tail)


def from_promise(epsilon: float, delta: float) -> Attack:
    """The best attack that (ε, δ) allows, whatever was released."""
    if math.isinf(epsilon) or epsilon > 500.0:
        return CERTAINTY._replace(exact=False)
    most, a = math.exp(epsilon), FALSE_POSITIVES
    variation = min(1.0, (math.expm1(epsilon) + 2 * delta) / (most + 1))
    found = 1 - max(0.0, 1 - delta - most * a, (1 - delta - a) / most)
    return Attack((1 + variation) / 2, min(1.0, found), False)


@lru_cache(maxsize=4096)
def _composed(composition: Composition, ratio: float, tail: float) -> Attack:
    if not ratio and all(part.kind is Kind.GAUSSIAN for part in composition):
        shift = math.sqrt(sum(part.times / part.noise**2 for part in composition))
        return Attack(float(ndtr(shift / 2)), float(ndtr(ndtri(FALSE_POSITIVES) + shift)), True)
    pairs, counts = _lattices(composition), [part.times for part in composition]
    found = _one_way(pairs, counts, ratio, tail)
    if any(part.kind is Kind.POISSON for part in composition):
        found = found.or_worse(_one_way([pair.reversed() for pair in pairs], counts, ratio, tail))
    return found


def _lattices(composition: Composition) -> list[LossPair]:
    """The dominating lattices of all parts, with one step, fine against the deviation of the whole loss."""
    releases = sum(part.times for part in composition)
    ends = [extent(part, _TAIL / releases, 700.0) for part in composition]
    first = [discretise(part, (high - low) / _FIRST_LOOK, low, high) for part, (low, high) in zip(composition, ends)]
    variance = tilted_by(first, [part.times for part in composition], 0.0).deviation ** 2
    step = min(math.sqrt(_FINENESS * variance / releases), _COARSEST)
    step = max(
        step, max(high - low for low, high in ends) / _LARGEST_LATTICE, 16 * math.sqrt(variance) / LARGEST_WINDOW
    )
    return [discretise(part, step, low, high) for part, (low, high) in zip(composition, ends)]


def _one_way(pairs: list[LossPair], counts: list[int], ratio: float, tail: float) -> Attack:
    """Both figures in one direction, from δ(ε) at ε ≥ 0 (discreteness: at ε + 2H it is e^H·δ(ε) + (1 + e^(ε+H))·β)."""
    losses, mass, lost = _compose(pairs, counts)
    own, image = _above(mass), _above(mass * np.exp(-losses))
    # δ as a function of e^ε is linear between the losses, so that its least sum with e^ε·a is at one of them; the
    # first is at −2H, where what discreteness adds has brought it to 0.
    at = np.concatenate([[-2 * ratio], losses[losses > -2 * ratio]])
    after = np.searchsorted(losses, at, side="right")
    deltas = np.clip(own[after] - np.exp(at) * image[after], 0.0, 1.0) + lost
    deltas = math.exp(ratio) * deltas + (1 + np.exp(np.minimum(at + ratio, 600.0))) * tail
    rates = np.exp(at + 2 * ratio) * FALSE_POSITIVES + deltas
    success = (1 + min(1.0, float(deltas[0]))) / 2
    return Attack(success, min(1.0, float(rates.min())), True)


def _above(mass: Floats) -> Floats:
    """Mass from every place on, and 0 past the last."""
    return np.append(np.cumsum(mass[::-1])[::-1], 0.0)


def _compose(pairs: list[LossPair], counts: list[int]) -> tuple[Floats, Floats, float]:
    """(losses, their mass under P, mass of infinite loss) of the whole composition, cut to losses that matter.

    What lies above the window counts as infinite; what lies below it wraps around to losses that are larger, which is
    on the safe side as well.
    """
    step = pairs[0].step
    up = [(s, tilted_by(pairs, counts, s).cumulant) for s in _ORDERS]
    down = [(s, tilted_by(pairs, counts, -s).cumulant) for s in _ORDERS]
    cut = -math.log(_TAIL)
    highest = sum(c * float(one.losses[-1]) for one, c in zip(pairs, counts))
    base = sum(c * one.start for one, c in zip(pairs, counts))
    high = min(highest, min((value + cut) / s for s, value in up))
    low = max(base, max(-(value + cut) / s for s, value in down))
    points = int(fft.next_fast_len(min(max(math.ceil((high - low) / step), 1) + 2, LARGEST_WINDOW), real=True))
    first = math.floor((low - base) / step)
    product = np.zeros(points // 2 + 1, dtype=complex)
    with np.errstate(divide="ignore"):
        for one, count in zip(pairs, counts):
            folded = np.pad(one.mass, (0, -one.mass.size % points)).reshape(-1, points).sum(axis=0)
            product += count * np.log(fft.rfft(folded, points))
    mass = np.maximum(np.roll(fft.irfft(np.exp(product), points), -first), 0.0)
    losses: Floats = np.asarray(base + step * (first + np.arange(points)), dtype=float)
    top = float(losses[-1])
    beyond = 0.0 if top >= highest else math.exp(min(0.0, min(value - s * top for s, value in up)))
    rounding = 4e-16 * (64 + sum(counts)) * math.sqrt(points)
    lost = sum(count * one.lost for one, count in zip(pairs, counts)) + beyond + rounding
    # Below −700, e^−loss is no number; such losses have no part in δ(ε) for ε ≥ −2H.
    keep = losses > -600.0
    return losses[keep], mass[keep], lost
