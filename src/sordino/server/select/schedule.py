"""Who is asked in which round, drawn before training from public randomness, so that everybody's noise can be set.

With replacement: a client drawn twice in a round takes part twice, as two virtual copies with their own batch and noise
and two charges. Selecting clients amplifies nothing; the schedule is public.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from sordino.errors import BadInput
from sordino.server.select.checks import Array, Index, distribution, importance_weights, whole
from sordino.server.select.problem import unbiased

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
    """Rounds × places of clients, fixed before training.

    Attributes
    ----------
    rule: name of the rule that drew it.
    clients: N.
    asked: [rounds, places], client of each place or ``NOBODY``. Asked to train; or, where ``caps`` is set, asked for a
        loss, and ``choose`` picks who trains.
    weights: [rounds, places], importance weight of each place: the aggregate is the mean over a round's rows of
        weight · update. 1 unless the rule compensates.
    select: N_select, how many train in a round.
    seed: public.
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

    @property
    def rounds(self) -> int:
        """T^g."""
        return int(self.asked.shape[0])

    @property
    def counts(self) -> Index:
        """T_k: participations that each client's noise must be calibrated for (the cap where trainings adapt)."""
        return self._times_asked() if self.caps is None else self.caps

    @property
    def queries(self) -> Index:
        """Q_k: loss queries that each client answers besides; known in advance, charged like any release."""
        return np.zeros(self.clients, dtype=np.int64) if self.caps is None else self._times_asked()

    def round(self, number: int) -> Round:
        """Round ``number`` (from 1), without empty places."""
        if not 1 <= number <= self.rounds:
            raise BadInput(f"round {number} is outside the schedule's rounds 1 to {self.rounds}")
        taken = self.asked[number - 1] != NOBODY
        clients = self.asked[number - 1][taken]
        return Round(clients, occurrences(clients), self.weights[number - 1][taken])

    def _times_asked(self) -> Index:
        return np.bincount(self.asked[self.asked != NOBODY], minlength=self.clients).astype(np.int64)


def occurrences(clients: Index) -> Index:
    """How often each entry has occurred before in the list: the number of its virtual copy."""
    order = np.argsort(clients, kind="stable")
    sorted_clients = clients[order]
    starts = np.searchsorted(sorted_clients, sorted_clients, side="left")
    found = np.empty(clients.size, dtype=np.int64)
    found[order] = np.arange(clients.size) - starts
    return found


def generator(seed: int, *key: int) -> np.random.Generator:
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
    asked = generator(seed).choice(chosen.size, size=(length, places), p=chosen).astype(np.int64)
    return Schedule(rule, chosen.size, asked, counted[asked], places, int(seed), chosen, counted)


def everyone(clients: int, rounds: int) -> Schedule:
    """All N clients in every round."""
    count, length = whole(clients, "clients"), whole(rounds, "rounds")
    asked = np.broadcast_to(np.arange(count, dtype=np.int64), (length, count))
    return Schedule("everyone", count, asked, np.broadcast_to(np.ones(count), asked.shape), count, 0)


def power_of_choice(
    sizes: ArrayLike,
    rounds: int,
    candidates: int,
    select: int,
    seed: int,
    headroom: float = 2.0,
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
    times = generator(seed).exponential(size=(length, shares.size)) / shares
    asked = np.argsort(times, axis=1)[:, :pool].astype(np.int64)
    queries = np.bincount(asked.ravel(), minlength=shares.size)
    caps = np.minimum(queries, np.ceil(headroom * places * queries / pool)).astype(np.int64)
    ones = np.ones(asked.shape)
    return Schedule("power-of-choice", shares.size, asked, ones, places, int(seed), shares, caps=caps)


def choose(candidates: ArrayLike, losses: ArrayLike, select: int, used: ArrayLike, caps: ArrayLike) -> Index:
    """Who trains: the ``select`` candidates with the largest released loss whose trainings are below their cap.

    Parameters
    ----------
    candidates : this round's candidate set.
    losses : their *released* (charged, noisy) losses at w; NaN for one that did not answer.
    used, caps : per client of the study, trainings so far and T_k.

    Returns
    -------
    At most ``select`` clients, largest loss first, ties in the order of the set; fewer when caps are reached.
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
