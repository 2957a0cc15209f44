"""Accountants: what noisy releases cost, how much noise a budget needs, how many releases it affords. No torch.

For one client or many at once: first what is asked, with events or plain numbers, then the accountants by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from sordino.errors import BadInput
from sordino.privacy.accounting import cumulant, discrete, pld, published, rdp
from sordino.privacy.accounting.parts import (
    SAFETY,
    Composition,
    Floats,
    Kind,
    most_that_fit,
    normal_form,
    scaled,
    smallest_scale,
    table,
)
from sordino.privacy.types import Adjacency, Budget, Event, Sampling, Scheme

Epsilons = Callable[[Sequence[Composition], Floats], Floats]
Scales = Callable[[Sequence[Composition], Floats, Floats], Floats]

_PLD_TOLERANCE = 3e-4
_RDP_TOLERANCE = 1e-4
_CACHE: dict[tuple[str, Composition, float], float] = {}
_LARGEST_CACHE = 200_000
_MOST_STEPS = 10**9
_BOUNDS = ("pld", "rdp")  # accountants whose ε is promised: those as published only pick noise


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
    (rate, noise) of every event was fixed in advance. Noise 0 gives ∞; no release gives 0. Where noise is shared, what
    its discreteness costs is included (``accounting.discrete``).
    """
    delta = np.broadcast_to(np.asarray(deltas, dtype=float), (len(events),))
    wrong = delta[~((delta > 0) & (delta < 1))]
    if wrong.size:
        raise BadInput(f"delta is {float(wrong[0])!r}: it must lie strictly between 0 and 1, well below 1/records")
    chosen = accountant_named(accountant)
    allowed = [_allowance(own, accountant) for own in events]
    keys = [(accountant, normal_form(own), more.delta(float(one))) for own, one, more in zip(events, delta, allowed)]
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
    return np.array([more.epsilon(known[key], float(one)) for key, one, more in zip(keys, delta, allowed)])


def _allowance(events: Sequence[Event], accountant: str) -> discrete.Allowance:
    """What discrete noise costs beyond the continuous noise that accountants know."""
    return discrete.allowance(events) if accountant in _BOUNDS else discrete.Allowance()


def calibrate_events(
    templates: Sequence[Sequence[Event]], budgets: Sequence[Budget], accountant: str = "pld"
) -> Floats:
    """For each client the smallest factor s on its events' noises with which the composition meets its budget.

    The templates' relative noises state how the budget is split among the events (see ``split``). ε = ∞ gives 0, and
    so does a template that releases nothing. Shared noise is scaled in steps of its lattice as well.

    Guarantees: ``composed_epsilon`` of the scaled events is at most the budget's ε, with ``pld`` within 0.05 % of it.
    """
    if len(templates) != len(budgets):
        raise BadInput(f"{len(templates)} templates for {len(budgets)} budgets: give one of each per client")
    for own, budget in zip(templates, budgets):
        _same_adjacency(own, budget)
    chosen = accountant_named(accountant)
    bound = accountant in _BOUNDS
    aims = [discrete.aim(own, one) if bound else (one.epsilon, one.delta) for own, one in zip(templates, budgets)]
    keys = [(normal_form(own), float(e), float(d)) for own, (e, d) in zip(templates, aims)]
    needed = [i for i, (composition, target, _) in enumerate(keys) if composition and math.isfinite(target)]
    if any(part.noise == 0.0 for i in needed for part in keys[i][0]):
        raise BadInput("a template with noise 0 stays not private at any scale: give every event a noise > 0")
    out = np.zeros(len(keys))
    distinct = list(dict.fromkeys(keys[i] for i in needed))
    if distinct:
        compositions, target, delta = zip(*distinct)
        found = dict(zip(distinct, chosen.scales(compositions, np.array(target), np.array(delta))))
        out[needed] = [found[keys[i]] for i in needed]
    for i in needed if bound else ():
        out[i] = discrete.fitted(
            templates[i],
            budgets[i],
            float(out[i]),
            lambda e, d, i=i: float(chosen.scales([keys[i][0]], np.array([e]), np.array([d]))[0]),  # type: ignore[misc]
            lambda scaled, i=i: float(composed_epsilon([scaled], [budgets[i].delta], accountant)[0]),  # type: ignore[misc]
        )
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


class Accountant(NamedTuple):
    """How one accountant finds ε of compositions at their δ, and the scales of noises that meet (ε, δ); its words."""

    epsilons: Epsilons
    scales: Scales
    words: str


def _routed(compositions: Sequence[Composition], routes: Sequence[Callable[..., Floats]], *columns: Floats) -> Floats:
    """Every composition by its route: full-batch Gaussians alone, sampled ones, those partly without replacement."""
    kinds = [{part.kind for part in composition} for composition in compositions]
    ways = np.array([2 if Kind.FIXED in own else 0 if own == {Kind.GAUSSIAN} else 1 for own in kinds])
    out = np.empty(len(compositions))
    for way, route in enumerate(routes):
        at = np.flatnonzero(ways == way)
        if at.size:
            out[at] = route([compositions[int(i)] for i in at], *(column[at] for column in columns))
    return out


def _tight_epsilons(compositions: Sequence[Composition], deltas: Floats) -> Floats:
    return _routed(compositions, (_exact_epsilons, pld.epsilons, rdp.epsilons), deltas)


def _tight_scales(compositions: Sequence[Composition], target: Floats, deltas: Floats) -> Floats:
    return _routed(compositions, (_exact_scales, _pld_scales, _rdp_scales), target, deltas)


def _exact_epsilons(compositions: Sequence[Composition], deltas: Floats) -> Floats:
    return cumulant.gaussian_epsilon(np.array([1 / own[0].noise for own in compositions]), deltas)


def _exact_scales(compositions: Sequence[Composition], target: Floats, deltas: Floats) -> Floats:
    noise = np.array([own[0].noise for own in compositions])
    return np.asarray(1 / (noise * cumulant.gaussian_mu(target * (1 - SAFETY), deltas)))


def _pld_scales(compositions: Sequence[Composition], target: Floats, deltas: Floats) -> Floats:
    for composition, delta in zip(compositions, deltas):
        # A δ above the chance that a record is ever sampled would be met without any noise: no protection at all.
        chance = sum(part.times * part.rate for part in composition)
        if chance <= delta:
            raise BadInput(
                f"delta is {delta:g}, but a record is sampled with probability {chance:.3g} at most: releasing it "
                "without noise would meet that. Choose delta well below 1/records"
            )
    start, slope = cumulant.saddle_scale(table(compositions), target * (1 - 4 * pld.TIGHTNESS), deltas)
    return smallest_scale(_cost(pld.epsilons, compositions, deltas), target, start, slope, _PLD_TOLERANCE)


def _rdp_scales(compositions: Sequence[Composition], target: Floats, deltas: Floats) -> Floats:
    return _renyi_scales(rdp.epsilons, compositions, target, deltas)


def _renyi_scales(epsilons: Epsilons, compositions: Sequence[Composition], target: Floats, deltas: Floats) -> Floats:
    """The smallest scales by evaluating ``epsilons``, from the better of two limits."""
    start = cumulant.limit_scale(table(compositions), target, deltas)
    slope = np.full(target.shape, -1.2)
    return smallest_scale(_cost(epsilons, compositions, deltas), target, start, slope, _RDP_TOLERANCE)


def _cost(epsilons: Epsilons, compositions: Sequence[Composition], deltas: Floats) -> Callable[..., Floats]:
    """ε of some of the compositions with their noises scaled."""
    return lambda at, scales: epsilons([scaled(compositions[int(i)], float(s)) for i, s in zip(at, scales)], deltas[at])


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
