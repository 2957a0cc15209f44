"""Who is asked in which round, drawn before training from public randomness, so that everybody's noise can be set.

With replacement: a client drawn twice in a round takes part twice, as two virtual copies with their own batch and noise
and two charges. Selecting clients amplifies nothing; the schedule is public.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sordino.errors import BadInput
from sordino.server.select.checks import Array, Index, whole

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
