"""Compositions of events: what they cost, how much noise they need, how many of them a budget affords."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from sordino.errors import BadInput
from sordino.privacy.accounting.accountants import accountant as _accountant
from sordino.privacy.accounting.parts import Composition, Floats, normal_form
from sordino.privacy.accounting.search import most_that_fit
from sordino.privacy.types import Adjacency, Budget, Event, Sampling, Scheme

_CACHE: dict[tuple[str, Composition, float], float] = {}
_LARGEST_CACHE = 200_000
_MOST_STEPS = 10**9


def spent(compositions: Sequence[Composition], deltas: Floats, accountant: str) -> Floats:
    """ε of normal forms at their δ; every distinct (accountant, composition, δ) is computed once."""
    book = _accountant(accountant)
    keys = [(accountant, composition, float(delta)) for composition, delta in zip(compositions, deltas)]
    known: dict[tuple[str, Composition, float], float] = {}
    for key in keys:
        if not key[1]:
            known[key] = 0.0
        elif any(part.noise == 0.0 for part in key[1]):
            known[key] = math.inf
        elif key in _CACHE:
            known[key] = _CACHE[key]
    missing = list(dict.fromkeys(key for key in keys if key not in known))
    if missing:
        found = book.epsilons([key[1] for key in missing], np.array([key[2] for key in missing]))
        known.update(zip(missing, (float(one) for one in found)))
        if len(_CACHE) + len(missing) > _LARGEST_CACHE:
            _CACHE.clear()
        _CACHE.update((key, known[key]) for key in missing)
    return np.array([known[key] for key in keys])


def scales(compositions: Sequence[Composition], epsilon: Floats, deltas: Floats, accountant: str) -> Floats:
    """The smallest factor on each composition's noises that meets (ε, δ); 0 where nothing is released or ε = ∞."""
    book = _accountant(accountant)
    out = np.zeros(len(compositions))
    needed = [i for i, own in enumerate(compositions) if own and math.isfinite(epsilon[i])]
    if any(part.noise == 0.0 for i in needed for part in compositions[i]):
        raise BadInput("a template with noise 0 stays not private at any scale: give every event a noise > 0")
    keys = [(compositions[i], float(epsilon[i]), float(deltas[i])) for i in needed]
    distinct = list(dict.fromkeys(keys))
    if distinct:
        own, target, delta = zip(*distinct)
        found = dict(zip(distinct, book.scales(own, np.array(target), np.array(delta))))
        out[needed] = [found[key] for key in keys]
    return out


def _deltas(deltas: ArrayLike, clients: int) -> Floats:
    out = np.broadcast_to(np.asarray(deltas, dtype=float), (clients,))
    if not np.all((out > 0) & (out < 1)):
        raise BadInput("every delta must lie strictly between 0 and 1, well below 1/records")
    return out


def _same_adjacency(events: Sequence[Event], budget: Budget) -> None:
    wrong = {event.adjacency.value for event in events if event.adjacency is not budget.adjacency}
    if wrong:
        raise BadInput(
            f"a budget under {budget.adjacency} cannot be charged with events under {', '.join(sorted(wrong))}: "
            "state both under one adjacency"
        )


def composed_epsilon(events: Sequence[Sequence[Event]], deltas: ArrayLike, accountant: str = "pld") -> Floats:
    """ε of each client's composition of events, at its δ.

    Guarantees
    ----------
    With ``pld`` and ``rdp``: an upper bound on the ε of everything released, in any order, provided that (rate, noise)
    of every event was fixed in advance. Noise 0 gives ∞; no release gives 0.
    """
    return spent([normal_form(own) for own in events], _deltas(deltas, len(events)), accountant)


def calibrate_events(
    templates: Sequence[Sequence[Event]], budgets: Sequence[Budget], accountant: str = "pld"
) -> Floats:
    """For each client the smallest factor s on its events' noises with which the composition meets its budget.

    The templates' relative noises state how the budget is split among the events (see ``split``). ε = ∞ gives 0.

    Guarantees
    ----------
    ``composed_epsilon`` of the scaled events is at most the budget's ε, and within 0.05 % of it with ``pld``.
    """
    if len(templates) != len(budgets):
        raise BadInput(f"{len(templates)} templates for {len(budgets)} budgets: give one of each per client")
    for own, budget in zip(templates, budgets):
        _same_adjacency(own, budget)
    target = np.array([budget.epsilon for budget in budgets], dtype=float)
    delta = np.array([budget.delta for budget in budgets], dtype=float)
    return scales([normal_form(own) for own in templates], target, delta, accountant)


def split(shares: ArrayLike, counts: ArrayLike, rates: ArrayLike) -> Floats:
    """Relative noises under which event j takes ``shares[j]`` of the budget: z_j = q_j·√(count_j/share_j).

    A share is a share of Σ count·q²/z², the squared parameter μ² of the Gaussian limit, in which releases add up.
    Shares are normalised to sum 1. Scale the result with ``calibrate_events``.
    """
    share, count, rate = (np.asarray(x, dtype=float) for x in (shares, counts, rates))
    if not (share.ndim == 1 and share.shape == count.shape == rate.shape and share.size):
        raise BadInput("shares, counts and rates must be lists of one length, one entry per event")
    if not (np.all(share > 0) and np.all(count > 0) and np.all((rate > 0) & (rate <= 1))):
        raise BadInput("shares and counts must be positive, rates must lie in (0, 1]")
    return np.asarray(rate * np.sqrt(count * share.sum() / share))


def affordable(
    turn: Sequence[Event], budget: Budget, turns: int, spent: Sequence[Event] = (), accountant: str = "pld"
) -> int:
    """The largest m ≤ turns with ε(spent + m × turn) ≤ ε of the budget; 0 when not even one turn fits.

    Guarantees
    ----------
    ε(m) ≤ target < ε(m+1) as ``composed_epsilon`` computes them (the second unless m = turns).
    """
    if turns < 0:
        raise BadInput(f"turns is {turns}: it must be ≥ 0")
    _same_adjacency([*turn, *spent], budget)

    def fits(m: int) -> bool:
        events = [*spent, *(event.times(event.count * m) for event in turn)]
        return float(composed_epsilon([events], [budget.delta], accountant)[0]) <= budget.epsilon

    return turns if budget.is_public else most_that_fit(turns, fits)


def steps_within(
    epsilon: float,
    delta: float,
    rate: float,
    noise: float,
    accountant: str = "pld",
    sampling: str = "poisson",
    adjacency: str = "zero-out",
) -> int:
    """The largest number of steps T with ε(T) ≤ epsilon, so ε(T) ≤ epsilon < ε(T+1); at most 10⁹."""
    relation = Adjacency.parse(adjacency)
    step = Event("step", Sampling(Scheme.parse(sampling), float(rate)), float(noise), 1, relation)
    budget = Budget(float(epsilon), float(delta), relation)
    most = 1
    while most < _MOST_STEPS and affordable([step.times(most)], budget, 1, accountant=accountant):
        most *= 2
    return affordable([step], budget, min(most, _MOST_STEPS), accountant=accountant)


def replace_one_epsilon(events: Sequence[Event], delta: float) -> float:
    """The replace-one figure of the same releases: their sensitivity is 2C, so z over it is half as large.

    Events that are already under replace-one stay as they are. Always by the tight accountant.
    """
    moved = [
        event
        if event.adjacency is Adjacency.REPLACE_ONE
        else replace(event, noise=event.noise / 2.0, adjacency=Adjacency.REPLACE_ONE)
        for event in events
    ]
    return float(composed_epsilon([moved], [delta])[0])
