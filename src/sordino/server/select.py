"""Who is asked in which round, drawn before training from public randomness, so that everybody's noise can be set.

>>> p = privacy_aware(sizes, variances, weight)
>>> schedule = draw(p, rounds=100, select=10, seed=0, rule="privacy-aware")
>>> schedule.counts          # T_k: what each client's noise is calibrated for

With replacement: a client drawn twice in a round takes part twice, as two virtual copies with their own batch and noise
and two charges. Selecting clients amplifies nothing; the schedule is public.

When budgets run dry, clients leave or join, a schedule is changed in one of three ways, told apart by what they do to
the participations T_k that noise was calibrated for (rule R6):

- ``without`` empties places and gives nobody a turn more: a declared plan stays valid.
- ``within`` gives places away, but never beyond a declared number of turns: valid if noise was calibrated for that.
- ``redraw`` draws the rest of a schedule from new probabilities: T_k changes, so re-plan (under an RDP filter once
  training has begun).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sordino.errors import BadInput
from sordino.server.checks import Array, Index, at_least, distribution, importance_weights, whole
from sordino.server.noise_factors import closed_form_factors as closed_form_factors
from sordino.server.noise_factors import default_weight as default_weight
from sordino.server.noise_factors import noise_factors as noise_factors
from sordino.server.problem import compensation as compensation
from sordino.server.problem import privacy_aware as privacy_aware
from sordino.server.problem import unbiased as unbiased
from sordino.server.problem import uniform as uniform

NOBODY = -1
"""Fills a place in a round that no client takes."""

_STREAM = 0x5E1EC7
"""Keeps the schedule's draws apart from other public randomness under the same seed."""


@dataclass(frozen=True, eq=False)
class Round:
    """One round: the clients asked, which virtual copy of its client each place is (0, 1, …), and what it counts."""

    clients: Index
    copies: Index
    weights: Array


@dataclass(frozen=True, eq=False)
class Schedule:
    """Which client takes which place of which round, fixed before training.

    Attributes
    ----------
    rule: name of the rule that drew it.
    clients: N, how many clients there are.
    asked: [rounds, places], client of each place or ``NOBODY``. Asked to train; or, where ``caps`` is set, asked for a
        loss, and ``choose`` picks who trains.
    weights: [rounds, places], importance weight of each place: the aggregate is the mean over a round's rows of
        weight · update. 1 unless the rule compensates.
    select: N_select, how many train in a round.
    seed: the public seed of the draws.
    probabilities: p, from which places are drawn; None where everyone takes part.
    importance: c_k, what one participation counts as long as every client can be drawn; None: 1.
    caps: T_k, the most trainings of each client (power-of-choice); None where ``asked`` says who trains.
    """

    rule: str
    clients: int
    asked: Index
    weights: Array
    select: int
    seed: int
    probabilities: Array | None = None
    importance: Array | None = None
    caps: Index | None = None

    def __post_init__(self) -> None:
        for name in ("asked", "weights", "probabilities", "importance", "caps"):
            if (held := getattr(self, name)) is not None:
                view = np.asarray(held).view()
                view.setflags(write=False)  # noise is calibrated for it: nobody changes a schedule, one makes another
                object.__setattr__(self, name, view)

    @cached_property
    def rounds(self) -> int:
        """T^g, the number of rounds."""
        return int(self.asked.shape[0])

    @property
    def counts(self) -> Index:
        """T_k: participations that each client's noise must be calibrated for (the cap where trainings adapt)."""
        return self._times_asked() if self.caps is None else self.caps

    @property
    def queries(self) -> Index:
        """Q_k: loss queries that each client answers beside training; known in advance, charged like any release."""
        return np.zeros(self.clients, dtype=np.int64) if self.caps is None else self._times_asked()

    def round(self, number: int) -> Round:
        """Round ``number`` (from 1), without empty places."""
        if not 1 <= number <= self.rounds:
            raise BadInput(f"round {number} is outside the schedule's rounds 1 to {self.rounds}")
        taken = self.asked[number - 1] != NOBODY
        clients = self.asked[number - 1][taken]
        return Round(clients, _copies(clients), self.weights[number - 1][taken])

    def _times_asked(self) -> Index:
        return np.bincount(self.asked[self.asked != NOBODY], minlength=self.clients).astype(np.int64)


def _copies(clients: Index) -> Index:
    """The number of each place's virtual copy: how often its client has occurred before in the round."""
    order = np.argsort(clients, kind="stable")
    sorted_clients = clients[order]
    starts = np.searchsorted(sorted_clients, sorted_clients, side="left")
    found = np.empty(clients.size, dtype=np.int64)
    found[order] = np.arange(clients.size) - starts
    return found


def _generator(seed: int, *key: int) -> np.random.Generator:
    """The public generator of schedules under a study's seed."""
    return np.random.default_rng(np.random.SeedSequence(whole(seed, "seed", 0), spawn_key=(_STREAM, *key)))


def draw(
    probabilities: ArrayLike,
    rounds: int,
    select: int,
    seed: int,
    rule: str = "custom",
    importance: ArrayLike | None = None,
) -> Schedule:
    """Draw ``select`` clients a round from ``probabilities``, with replacement, for all rounds at once.

    ``importance`` holds c_k of ``compensation``, what one participation of each client counts; 1 if left out.
    """
    chosen = distribution(probabilities)
    length, places = whole(rounds, "rounds"), whole(select, "select")
    counted = importance_weights(importance, chosen.size)
    asked = _generator(seed).choice(chosen.size, size=(length, places), p=chosen).astype(np.int64)
    return Schedule(rule, chosen.size, asked, counted[asked], places, int(seed), chosen, counted)


def everyone(clients: int, rounds: int) -> Schedule:
    """All N clients in every round."""
    count, length = whole(clients, "clients"), whole(rounds, "rounds")
    asked = np.broadcast_to(np.arange(count, dtype=np.int64), (length, count))
    return Schedule("everyone", count, asked, np.broadcast_to(np.ones(count), asked.shape), count, 0)


def power_of_choice(
    sizes: ArrayLike, rounds: int, candidates: int, select: int, seed: int, headroom: float = 2.0
) -> Schedule:
    """Candidate sets of power-of-choice: each round d different clients ∝ n_k; the m with the largest loss train.

    The sets are drawn now, which fixes the loss queries Q_k. Trainings follow the losses, so they are capped: at
    T_k = min(Q_k, ⌈h Q_k m/d⌉), h times a candidate's fair share. Noise is calibrated for Q_k queries and T_k
    trainings together; a larger ``headroom`` h lets the rule insist on the same clients, and costs them √h in noise.
    ``candidates`` is d and ``select`` is m ≤ d.
    """
    shares = unbiased(sizes)
    length, pool, places = whole(rounds, "rounds"), whole(candidates, "candidates"), whole(select, "select")
    if pool < places:
        raise BadInput(f"candidates={pool} is below select={places}: ask at least as many losses as clients train")
    if shares.size < pool:
        raise BadInput(
            f"candidates={pool} different clients are asked a round, but there are only {shares.size}: ask fewer"
        )
    if not headroom >= 1.0:
        raise BadInput(f"headroom is {headroom!r}: caps are this many times a candidate's fair share, 1 or more")
    # The d smallest of independent Exp(u_k) times are d draws ∝ u_k without replacement.
    times = _generator(seed).exponential(size=(length, shares.size)) / shares
    asked = np.argsort(times, axis=1)[:, :pool].astype(np.int64)
    queries = np.bincount(asked.ravel(), minlength=shares.size)
    caps = np.minimum(queries, np.ceil(headroom * places * queries / pool)).astype(np.int64)
    return Schedule("power-of-choice", shares.size, asked, np.ones(asked.shape), places, int(seed), shares, caps=caps)


def choose(candidates: ArrayLike, losses: ArrayLike, select: int, used: ArrayLike, caps: ArrayLike) -> Index:
    """Who trains: the ``select`` candidates with the largest released loss whose trainings are below their cap.

    Largest loss first, ties in the order of the set; fewer than ``select`` when caps are reached.

    Parameters
    ----------
    candidates : this round's candidate set.
    losses : their *released* (charged, noisy) losses at w; NaN for one that did not answer.
    used, caps : per client of the study, trainings so far and T_k.
    """
    asked = np.asarray(candidates, dtype=np.int64)
    told = np.asarray(losses, dtype=np.float64)
    if asked.ndim != 1 or told.shape != asked.shape:
        raise BadInput(f"{told.size} losses for {asked.size} candidates: give one released loss per candidate")
    taken, most = np.asarray(used, dtype=np.int64), np.asarray(caps, dtype=np.int64)
    if taken.shape != most.shape or (asked >= taken.size).any():
        raise BadInput(f"used and caps need one entry for each client of the study, not {taken.size} and {most.size}")
    may = (asked != NOBODY) & ~np.isnan(told) & (taken[asked] < most[asked])
    ranked = np.flatnonzero(may)[np.argsort(-told[may], kind="stable")]
    return np.asarray(asked[ranked[: whole(select, "select")]], dtype=np.int64)


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
    kept = None if schedule.probabilities is None else np.where(gone, 0.0, schedule.probabilities)
    if kept is None or not kept.any():
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
    chances = np.zeros(schedule.clients) if schedule.probabilities is None else schedule.probabilities
    source = _generator(schedule.seed, start)
    factor = _compensated(schedule, left >= 1.0)
    for place in range(first * asked.shape[1], asked.size):
        client = int(asked.flat[place])
        if client == NOBODY:
            continue
        if left[client] < 1.0:
            ready = np.where(left >= 1.0, chances, 0.0)
            client = int(source.choice(ready.size, p=ready / ready.sum())) if ready.any() else NOBODY
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
    fresh = _generator(schedule.seed, start).choice(chosen.size, size=asked[first:].shape, p=chosen)
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
