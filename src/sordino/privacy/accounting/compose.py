"""What releases cost, how much noise they need, how many of them a budget affords: for one client or many at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from sordino.errors import BadInput
from sordino.privacy.accounting.accountants import accountant_named
from sordino.privacy.accounting.parts import Composition, Floats, normal_form
from sordino.privacy.accounting.search import most_that_fit
from sordino.privacy.types import Adjacency, Budget, Event, Sampling, Scheme

_CACHE: dict[tuple[str, Composition, float], float] = {}
_LARGEST_CACHE = 200_000
_MOST_STEPS = 10**9


def epsilon(
    noise: ArrayLike,
    delta: ArrayLike,
    rate: ArrayLike,
    steps: ArrayLike,
    sampling: str = "poisson",
    accountant: str = "pld",
    adjacency: str = "zero-out",
) -> float | Floats:
    """ε of ``steps`` Gaussian releases from sampled batches: scalars or arrays, broadcast against each other.

    Parameters
    ----------
    noise: z, standard deviation over the true sensitivity under ``adjacency`` (C for zero-out, 2C for replace-one).
    delta, rate, steps: δ in (0, 1), q in (0, 1], T ≥ 0.
    sampling: ``poisson``, ``fixed`` (without replacement, needs replace-one) or ``full`` (rate 1).
    accountant: ``pld`` (tight; for fixed batches the tightened Rényi bound), ``rdp``, or as published:
        ``rdp-robust-hdp``, ``closed-form-selection`` (not a valid guarantee), ``wor-paper``.

    Returns
    -------
    ε ≥ 0; ∞ for noise 0, 0 for no steps. A float when every argument is a scalar.
    """
    z, d, q, t = _broadcast(noise=noise, delta=delta, rate=rate, steps=steps)
    found = composed_epsilon(_steps(z, q, t, sampling, adjacency), d.ravel(), accountant)
    return float(found[0]) if z.shape == () else found.reshape(z.shape)


def calibrate(
    epsilon: ArrayLike,
    delta: ArrayLike,
    rate: ArrayLike,
    steps: ArrayLike,
    sampling: str = "poisson",
    accountant: str = "pld",
    adjacency: str = "zero-out",
) -> float | Floats:
    """The smallest noise multiplier with which ``steps`` releases cost at most ``epsilon`` at ``delta``.

    Arguments as in ``epsilon``. ε = ∞ (public data) gives 0, and so do no steps.

    Guarantees: ``epsilon`` of the result is at most the ε asked for (exactly that function, on the safe side), and
    with ``pld`` within 0.05 % of it.
    """
    e, d, q, t = _broadcast(epsilon=epsilon, delta=delta, rate=rate, steps=steps)
    budgets = [Budget(float(x), float(y), Adjacency.parse(adjacency)) for x, y in zip(e.ravel(), d.ravel())]
    found = calibrate_events(_steps(np.ones_like(e), q, t, sampling, adjacency), budgets, accountant)
    return float(found[0]) if e.shape == () else found.reshape(e.shape)


def _broadcast(**named: ArrayLike) -> list[Floats]:
    out = []
    for name, value in named.items():
        try:
            out.append(np.asarray(value, dtype=float))
        except (TypeError, ValueError):
            raise BadInput(f"{name} is {value!r}: it must be a number or an array of numbers") from None
    try:
        return list(np.broadcast_arrays(*out))
    except ValueError:
        shapes = ", ".join(f"{name} {value.shape}" for name, value in zip(named, out))
        raise BadInput(f"the arguments do not broadcast to one shape: {shapes}") from None


def _steps(noise: Floats, rate: Floats, steps: Floats, sampling: str, adjacency: str) -> list[list[Event]]:
    """One kind of release for each client; ``Event`` and ``Sampling`` check their values."""
    for t in steps.ravel():
        if not (math.isfinite(t) and t == round(t)):
            raise BadInput(f"steps is {float(t)!r}: it must be a whole number ≥ 0")
    scheme, relation = Scheme.parse(sampling), Adjacency.parse(adjacency)
    return [
        [Event("steps", Sampling(scheme, float(q)), float(z), int(t), relation)]
        for z, q, t in zip(noise.ravel(), rate.ravel(), steps.ravel())
    ]


def composed_epsilon(events: Sequence[Sequence[Event]], deltas: ArrayLike, accountant: str = "pld") -> Floats:
    """ε of each client's composition of events, at its δ; equal clients are computed once.

    Guarantees: with ``pld`` and ``rdp``, an upper bound on the ε of everything released, in any order, provided that
    (rate, noise) of every event was fixed in advance. Noise 0 gives ∞; no release gives 0.
    """
    delta = np.broadcast_to(np.asarray(deltas, dtype=float), (len(events),))
    wrong = delta[~((delta > 0) & (delta < 1))]
    if wrong.size:
        raise BadInput(f"delta is {float(wrong[0])!r}: it must lie strictly between 0 and 1, well below 1/records")
    chosen = accountant_named(accountant)
    keys = [(accountant, normal_form(own), float(one)) for own, one in zip(events, delta)]
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
        found = chosen.epsilons([key[1] for key in missing], np.array([key[2] for key in missing]))
        known.update(zip(missing, (float(one) for one in found)))
        if len(_CACHE) + len(missing) > _LARGEST_CACHE:
            _CACHE.clear()
        _CACHE.update((key, known[key]) for key in missing)
    return np.array([known[key] for key in keys])


def calibrate_events(
    templates: Sequence[Sequence[Event]], budgets: Sequence[Budget], accountant: str = "pld"
) -> Floats:
    """For each client the smallest factor s on its events' noises with which the composition meets its budget.

    The templates' relative noises state how the budget is split among the events (see ``split``). ε = ∞ gives 0, and
    so does a template that releases nothing.

    Guarantees: ``composed_epsilon`` of the scaled events is at most the budget's ε, with ``pld`` within 0.05 % of it.
    """
    if len(templates) != len(budgets):
        raise BadInput(f"{len(templates)} templates for {len(budgets)} budgets: give one of each per client")
    for own, budget in zip(templates, budgets):
        _same_adjacency(own, budget)
    chosen = accountant_named(accountant)
    keys = [(normal_form(own), float(one.epsilon), float(one.delta)) for own, one in zip(templates, budgets)]
    needed = [i for i, (composition, target, _) in enumerate(keys) if composition and math.isfinite(target)]
    if any(part.noise == 0.0 for i in needed for part in keys[i][0]):
        raise BadInput("a template with noise 0 stays not private at any scale: give every event a noise > 0")
    out = np.zeros(len(keys))
    distinct = list(dict.fromkeys(keys[i] for i in needed))
    if distinct:
        compositions, target, delta = zip(*distinct)
        found = dict(zip(distinct, chosen.scales(compositions, np.array(target), np.array(delta))))
        out[needed] = [found[keys[i]] for i in needed]
    return out


def _same_adjacency(events: Sequence[Event], budget: Budget) -> None:
    wrong = {event.adjacency.value for event in events if event.adjacency is not budget.adjacency}
    if wrong:
        raise BadInput(
            f"a budget under {budget.adjacency} cannot be charged with events under {', '.join(sorted(wrong))}: "
            "state both under one adjacency"
        )


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

    Guarantees: ε(m) ≤ target < ε(m+1) as ``composed_epsilon`` computes them (the second unless m = turns).
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
    budget = Budget(float(epsilon), float(delta), Adjacency.parse(adjacency))
    step = Event("step", Sampling(Scheme.parse(sampling), float(rate)), float(noise), 1, budget.adjacency)
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
