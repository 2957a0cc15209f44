"""What it costs that the noise of a shared release is discrete, and a sum of several sites' shares.

Accountants know the continuous Gaussian. Rounding its output to the lattice is post-processing, so their figures hold
for noise ⌊σX⌉; honest sites' shares add up to something else, h discrete Gaussians of deviation s each (in steps), but
the two differ by factors near 1 wherever the noise is within t deviations. With σ = √h·s, for every integer k:

* one discrete Gaussian of deviation σ against ⌊σX⌉. The mass of the cell around k over exp(−k²/(2σ²))/(√(2π)σ) is
  E exp(−kv/σ² − v²/(2σ²)), v uniform on [−½, ½]: at least exp(−1/(24σ²)) by Jensen's inequality, at most
  sinh(u)/u ≤ exp(u²/6) with u = k/(2σ²). The discrete one's constant is √(2π)σ up to a factor 1 + 2.1·exp(−2π²σ²),
  less than exp(1/(24σ²)). So |ln(ratio)| ≤ (t² + 1)/(24σ²) for |k| ≤ tσ.
* h discrete Gaussians against one (Kairouz, Liu & Steinke 2021): :func:`sum_distance`.
* any of them is beyond t deviations with probability at most 2·exp(−t²/2).

η is the sum of both logarithms over the d numbers of a release. Let P, Q be everything released, with a record and
without, under ⌊σX⌉, and P', Q' under shared noise; sampling makes mixtures of them, which changes nothing. With H = Σ η
and β = Σ d·2·exp(−t²/2) over all releases, P'(S) ≤ e^H P(S) + β and Q(S) ≤ e^H Q'(S) + β. So if (P, Q) is
(ε, δ)-private, (P', Q') is (ε + 2H, e^H δ + (1 + e^(ε+H))β)-private.

A filter adds up Rényi divergences of order α instead. Within t deviations P' ≤ e^H P; against e^(−H) Q, each release's
divergence is then larger by at most (2α−1)/(α−1)·η, along every path, and e^(−H) Q(S) ≤ Q'(S) + β. So δ grows by
(1 + e^ε)β, less than a filter leaves over for rounding (``filters.SAFETY``) for every ε below 300.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from sordino.errors import BadInput
from sordino.privacy.trust import Shared
from sordino.privacy.types import Budget, Event

REACH = 30.0  # t
TAIL = 2 * math.exp(-(REACH**2) / 2)  # 7·10⁻¹⁹⁶
SMALLEST = 5.0  # steps: below, sums of discrete Gaussians are not near one any more
RESERVE = 1e-9  # the share of δ that is set aside for noise beyond t deviations
COARSEST = 20.0  # an H above is no promise: ε + 40
SHARES = (1e-6, 1e-4, 1e-3, 0.01, 0.05, 0.2, 0.5)  # of ε, to be tried one after another where noise is to be found


def sum_distance(deviation: float, shares: int) -> float:
    """5·Σ_{k=1}^{h−1} exp(−2π²s²·k/(k+1)): bounds |ln(ratio)| of h discrete Gaussians' sum and one of √h·s, everywhere.

    Adding X of deviation a and Y of deviation b gives P(X+Y = k) ∝ exp(−k²/(2(a²+b²)))·Σ_x exp(−(x−μ_k)²/(2ρ²)), with
    1/ρ² = 1/a² + 1/b². By Poisson's formula the last sum is √(2π)ρ·(1 + 2Σ_{j≥1} exp(−2π²ρ²j²)·cos(2πjμ_k)): between
    1 ± 2.1·exp(−2π²ρ²) for ρ ≥ ½, so the ratio's logarithm is at most 5·exp(−2π²ρ²). Here a² = k·s² and b² = s².
    """
    k = np.arange(1, shares)
    return 5.0 * float(np.exp(-2 * math.pi**2 * deviation**2 * k / (k + 1)).sum())


@lru_cache(maxsize=4096)
def ratio(shared: Shared) -> float:
    """η = d·((t² + 1)/(24·h·s²) + distance of the sum): how far one shared release is from a rounded Gaussian.

    1/s² is a mean over the d numbers, so no number has a deviation below s/√d, which is what the second term is
    computed with.
    """
    least = shared.deviation / math.sqrt(shared.width)
    if not least >= SMALLEST:
        raise BadInput(
            f"shared noise of {shared.deviation:.3g} steps in {shared.width} numbers is too coarse: it needs "
            f"{SMALLEST * math.sqrt(shared.width):.3g} steps at least; use a finer lattice, or more noise"
        )
    return shared.width * (_cells(shared) + sum_distance(least, shared.honest))


def _cells(shared: Shared) -> float:
    """(t² + 1)/(24·h·s²)."""
    return (REACH**2 + 1) / (24 * shared.honest * shared.deviation**2)


class Allowance(NamedTuple):
    """H = Σ η of a composition, and β, the probability that any of its noise is beyond t deviations."""

    ratio: float = 0.0
    tail: float = 0.0

    def delta(self, delta: float) -> float:
        """At which δ the continuous accountant is asked: (1 − 10⁻⁹)·e^(−H)·δ."""
        return delta * (1 - RESERVE) * math.exp(-min(self.ratio, COARSEST)) if self.tail else delta

    def epsilon(self, continuous: float, delta: float) -> float:
        """ε of the discrete noise, from that of the continuous noise at :meth:`delta`: 2H more.

        ∞ where (1 + e^ε)·β is more than was set aside, at an ε of hundreds, or where H is no promise any more.
        """
        if not self.tail:
            return continuous
        found = continuous + 2 * self.ratio
        return found if self.ratio <= COARSEST and found <= self.largest(delta) else math.inf

    def largest(self, delta: float) -> float:
        """The largest ε for which (1 + e^ε)·β ≤ 10⁻⁹·δ."""
        room = RESERVE * delta / self.tail if self.tail else math.inf
        return math.log(room - 1) if room > 1 else -math.inf


def allowance(events: Sequence[Event]) -> Allowance:
    """What these releases need beyond continuous noise; nothing where nothing is shared."""
    own = _noisy(events)
    return Allowance(
        math.fsum(count * ratio(shared) for shared, count in own),
        math.fsum(count * shared.width * TAIL for shared, count in own),
    )


def _noisy(events: Sequence[Event]) -> list[tuple[Shared, int]]:
    """Shared releases with a noise that can be compared at all, and how often."""
    return [(e.shared, e.count) for e in events if e.shared is not None and e.count and 0.0 < e.noise < math.inf]


def renyi(order: float, total: float) -> float:
    """(2α−1)/(α−1)·H: by how much the Rényi divergence of order α of shared releases is larger."""
    return (2 * order - 1) / (order - 1) * total


def aim(events: Sequence[Event], budget: Budget, share: float = SHARES[0]) -> tuple[float, float]:
    """(ε, δ) that continuous noise may cost if ``share`` of ε is set aside for discreteness; unshared, the budget's."""
    tail = math.fsum(count * shared.width * TAIL for shared, count in _noisy(events))
    if not tail or budget.is_public:
        return float(budget.epsilon), float(budget.delta)
    epsilon = min(budget.epsilon, Allowance(0.0, tail).largest(budget.delta))
    return epsilon * (1 - share), Allowance(share * epsilon / 2, tail).delta(budget.delta)


def scaled(events: Sequence[Event], scale: float) -> list[Event]:
    """The events with all noise multiplied, in units of sensitivities and in steps of the lattice."""
    return [
        replace(
            event,
            noise=event.noise * scale,
            shared=event.shared and replace(event.shared, deviation=event.shared.deviation * scale),
        )
        for event in events
    ]


def fitted(
    events: Sequence[Event],
    budget: Budget,
    first: float,
    scale_for: Callable[[float, float], float],
    epsilon_of: Callable[[Sequence[Event]], float],
) -> float:
    """The scale of shared noise: ``first``, found for :func:`aim`, where what was set aside is enough, else more.

    ``scale_for`` (ε, δ) → the scale for continuous noise; ``epsilon_of`` → ε with discreteness.

    Guarantees: ``epsilon_of`` the scaled events is at most the budget's ε.
    """
    own = _noisy(events)
    if not own:
        return first
    total = math.fsum(count * shared.width * _cells(shared) for shared, count in own)
    finest = max(SMALLEST * math.sqrt(shared.width) / shared.deviation for shared, _ in own) * (1 + 1e-12)
    found = math.inf
    for share in SHARES:
        epsilon, delta = aim(events, budget, share)
        scale = first if share == SHARES[0] else scale_for(epsilon, delta)
        # 2H falls as 1/scale²; distances of sums are less than 10⁻⁹ of it from 5 steps upwards.
        least = max(finest, math.sqrt(2 * total * (1 + 1e-9) / (share * epsilon / (1 - share))))
        found = min(found, max(scale, least))
        if least <= scale:
            break
    while epsilon_of(scaled(events, found)) > budget.epsilon:
        found *= 1 + 1e-5
    return found
