"""A privacy filter: what an account may release when later settings follow from earlier releases.

PLD composes releases whose (q, z) were fixed in advance. Where they were not, Rényi divergences of *one* order α, fixed
before the first release, still add up along every path (Feldman & Zrnic 2021): if Σ ρ_α ≤ ρ_max whatever happens, all
of it together has Rényi divergence at most ρ_max, hence is (ε, δ)-private with ρ_max = ε − offset(α, δ), where
offset(α, δ) = ln((α−1)/α) − (ln δ + ln α)/(α−1) is the conversion of ``rdp``. ρ_α of shared noise includes what its
discreteness costs (``accounting.discrete``).

The order is a function of what was declared before the first release, so it needs no declaration of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from sordino.privacy.accounting import discrete, rdp
from sordino.privacy.accounting.parts import Composition, Floats, most_that_fit, normal_form, table
from sordino.privacy.types import Budget, Event

ORDERS: tuple[float, ...] = (
    *(1.01, 1.02, 1.05),
    *(order for order in rdp.ORDERS if order < 64),
    *(float(round(64 * 1.08**k)) for k in range(96)),
)
"""Orders an account may have. Frozen: which one an old account has must not depend on who reads its ledger."""

SAFETY = 1e-9
"""Share of ρ_max that is never given out, for float rounding."""


def offset(order: float, delta: float) -> float:
    """What converting costs: ε = R + offset(α, δ)."""
    return math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)


def room(budget: Budget, order: float) -> float:
    """ρ_max: how much Rényi divergence of this order the budget allows; negative where it allows none."""
    return (budget.epsilon - offset(order, budget.delta)) * (1 - SAFETY)


@lru_cache(maxsize=65536)
def _divergence(composition: Composition, order: float) -> float:
    if any(part.noise == 0.0 for part in composition):
        return math.inf
    return float(rdp.curve(table([composition]), [order])[0, 0])


def divergence(events: Sequence[Event], order: float) -> float:
    """Σ ρ_α of these releases: the Rényi divergence of order α that they have at most, in both directions."""
    composition = normal_form(events)
    more = discrete.renyi(order, discrete.allowance(events).ratio)
    return _divergence(composition, order) + more if composition else 0.0


def _usable(budget: Budget) -> tuple[list[float], Floats]:
    """The orders with room, up to the best one for Gaussians, and their room; sampled releases want a smaller one."""
    rooms = np.array([room(budget, order) for order in ORDERS])
    best = int(np.argmax(rooms / np.array(ORDERS)))
    at = [k for k in range(best + 1) if rooms[k] > 0]
    return [ORDERS[k] for k in at], rooms[at]


@lru_cache(maxsize=65536)
def _best(composition: Composition, budget: Budget, ratio: float) -> tuple[float, float]:
    orders, rooms = _usable(budget)
    if not orders:
        return ORDERS[-1], math.inf
    if not composition:
        return orders[-1], 0.0
    if any(part.noise == 0.0 for part in composition):
        return orders[-1], math.inf
    more = np.array([discrete.renyi(order, ratio) for order in orders])
    shares = (rdp.curve(table([composition]), orders)[0] + more) / rooms
    place = int(np.argmin(shares))
    return orders[place], float(shares[place])


def order_for(declared: Sequence[Event], budget: Budget) -> float:
    """The order α of an account with this opening budget: where what was declared first takes the least of ρ_max."""
    return _best(normal_form(declared), budget, discrete.allowance(declared).ratio)[0]


def share(events: Sequence[Event], budget: Budget) -> float:
    """The least share of ρ_max, over all orders, that these releases take; above 1 they do not fit a filter."""
    return _best(normal_form(events), budget, discrete.allowance(events).ratio)[1]


def odometer(events: Sequence[Event], order: float, delta: float) -> float:
    """ε that the filter's meter shows for what was released: Σ ρ_α + offset(α, δ); 0 for nothing."""
    spent = divergence(events, order)
    return max(0.0, spent + offset(order, delta)) if spent > 0.0 else 0.0


def turns_within(
    turn: Sequence[Event], budget: Budget, turns: int, committed: Sequence[Event], order: float | None
) -> int:
    """The largest m ≤ turns for which ``committed`` and m turns fit the filter; ``order`` None: at the best order.

    Guarantees: with an order, divergence(committed + m × turn) ≤ room; without, there is an order with which it is.
    """

    def fits(m: int) -> bool:
        events = [*committed, *(event.times(event.count * m) for event in turn)]
        if order is None:
            return share(events, budget) <= 1.0
        return divergence(events, order) <= room(budget, order)

    return most_that_fit(turns, fits)
