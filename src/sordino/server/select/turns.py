"""When budgets run dry, clients leave or join: schedules changed so that the accounting still holds.

Three changes, told apart by what they do to the participations T_k that noise was calibrated for (rule R6):

- ``without`` empties places and gives nobody a turn more: a declared plan stays valid.
- ``within`` gives places away, but never beyond a declared number of turns: valid if noise was calibrated for that.
- ``redraw`` draws the rest of a schedule from new probabilities: T_k changes, so re-plan (under an RDP filter once
  training has begun).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sordino.errors import BadInput
from sordino.server.select.checks import Array, Index, at_least, distribution, importance_weights
from sordino.server.select.schedule import NOBODY, Schedule, generator


def last_rounds(schedule: Schedule) -> Index:
    """The last round (from 1) in which each client is asked, when its budget for this study ends; 0: never asked."""
    found = np.zeros(schedule.clients, dtype=np.int64)
    for number, places in enumerate(schedule.asked, start=1):
        found[places[places != NOBODY]] = number
    return found


def without(schedule: Schedule, clients: Iterable[int], start: int = 1) -> Schedule:
    """The schedule in which ``clients`` are not asked from round ``start`` on; their places stay empty.

    Guarantees: no client is asked more often than before, so noise calibrated for the old counts still suffices. A rule
    that compensates does so for the clients that remain.
    """
    gone = np.zeros(schedule.clients, dtype=bool)
    for client in clients:
        if not 0 <= client < schedule.clients:
            raise BadInput(f"client {client} is not among the schedule's {schedule.clients} clients (from 0)")
        gone[client] = True
    first = _first(schedule, start)
    asked, weights = schedule.asked.copy(), schedule.weights.copy()
    rest = asked[first:]
    rest[(rest != NOBODY) & gone[rest]] = NOBODY
    if schedule.probabilities is None:
        return replace(schedule, asked=asked)
    kept = np.where(gone, 0.0, schedule.probabilities)
    if not kept.any():
        return replace(schedule, asked=asked)
    factor = _compensated(schedule, ~gone)
    weights[first:] *= factor
    importance = importance_weights(schedule.importance, schedule.clients) * factor
    return replace(schedule, asked=asked, weights=weights, probabilities=kept / kept.sum(), importance=importance)


def within(schedule: Schedule, turns: ArrayLike, start: int = 1) -> Schedule:
    """The schedule in which, from round ``start`` on, no client takes part more than ``turns`` times.

    Places are filled in order of time. One whose client has no turn left is drawn again from p over those who have; it
    stays empty when nobody has. Each place is thus a draw from p restricted to the clients that can still pay.

    Guarantees: counts from ``start`` on never exceed ``turns``.
    """
    if schedule.caps is not None:
        raise BadInput("power-of-choice has caps of its own: use without() for clients that cannot pay")
    left = _allowances(turns, schedule.clients)
    first = _first(schedule, start)
    importance = importance_weights(schedule.importance, schedule.clients)
    asked, weights = schedule.asked.copy(), schedule.weights.copy()
    source = generator(schedule.seed, start)
    factor = _compensated(schedule, left >= 1.0)
    for place in range(first * asked.shape[1], asked.size):
        client = int(asked.flat[place])
        if client == NOBODY:
            continue
        if left[client] < 1.0:
            client = _another(schedule.probabilities, left, source)
        asked.flat[place] = client
        if client == NOBODY:
            continue
        weights.flat[place] = importance[client] * factor
        left[client] -= 1.0
        if left[client] < 1.0:
            factor = _compensated(schedule, left >= 1.0)
    return replace(schedule, asked=asked, weights=weights)


def redraw(schedule: Schedule, probabilities: ArrayLike, start: int, importance: ArrayLike | None = None) -> Schedule:
    """The schedule with rounds from ``start`` on drawn afresh from new probabilities (Problem 1 solved again).

    ``probabilities`` may be longer than before: clients that joined are numbered after the old ones. One that left has
    probability 0. Counts change: noise has to be planned again.
    """
    if schedule.probabilities is None or schedule.caps is not None:
        raise BadInput(f"a schedule by {schedule.rule!r} is not drawn from probabilities: draw a new one instead")
    chosen = distribution(probabilities)
    if chosen.size < schedule.clients:
        raise BadInput(
            f"{chosen.size} probabilities for {schedule.clients} clients: give a client that left probability 0"
        )
    first = _first(schedule, start)
    counted = importance_weights(importance, chosen.size)
    asked, weights = schedule.asked.copy(), schedule.weights.copy()
    fresh = generator(schedule.seed, start).choice(chosen.size, size=asked[first:].shape, p=chosen)
    asked[first:], weights[first:] = fresh, counted[fresh]
    return replace(
        schedule, clients=chosen.size, asked=asked, weights=weights, probabilities=chosen, importance=counted
    )


def _allowances(turns: ArrayLike, clients: int) -> Array:
    """Whole turns that each client may still take: ≥ 0, ∞ for no limit; one number stands for all."""
    given = np.asarray(turns, dtype=np.float64)
    given = np.full(clients, given) if given.ndim == 0 else given
    if given.shape != (clients,):
        raise BadInput(f"turns has shape {given.shape} for {clients} clients: give one number per client")
    if np.isnan(given).any():
        raise BadInput("turns holds NaN: give each client a number of turns (inf for no limit)")
    return np.floor(at_least(given, 0.0, "turns", "a client cannot have fewer than 0 turns"))


def _first(schedule: Schedule, start: int) -> int:
    """Row of round ``start``; one past the last round is allowed and changes nothing."""
    if not 1 <= start <= schedule.rounds + 1:
        raise BadInput(f"start={start} is outside the schedule's rounds 1 to {schedule.rounds}")
    return start - 1


def _compensated(schedule: Schedule, alive: NDArray[np.bool_]) -> float:
    """What importance weights are multiplied by when only the clients A can be drawn: (p(A)/u(A)) / (p/u), u = Σ p c.

    Draws then follow p_k/p(A) and should stand for u_k/u(A), u_k = p_k c_k: c_k becomes c_k p(A)/u(A).
    """
    if schedule.probabilities is None or schedule.importance is None:
        return 1.0
    drawn, meant = schedule.probabilities, schedule.probabilities * schedule.importance
    left = float(meant[alive].sum())
    return float(drawn[alive].sum() / left * (meant.sum() / drawn.sum())) if left > 0.0 else 1.0


def _another(probabilities: Array | None, left: Array, source: np.random.Generator) -> int:
    """A client drawn from p over those with a turn left, or nobody."""
    if probabilities is None:
        return NOBODY
    ready = np.where(left >= 1.0, probabilities, 0.0)
    total = float(ready.sum())
    return NOBODY if total == 0.0 else int(source.choice(ready.size, p=ready / total))
