"""Which of a site's records take part in a run, and whose accounts pay for it.

Where a site's data live, the records of a cohort are in all batches of a run or in none of it; see docs/living-data.md.
Cohorts are sampled alike, as one set of records: each of their accounts is charged for the same release.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from sordino.client.rows import Records
from sordino.engine.federation.limits import Declared
from sordino.errors import BadInput
from sordino.privacy.held import HELD
from sordino.privacy.ledger import Ledger
from sordino.privacy.living import Known, Seats, since, takes_part

NOT_YET = 1 << 62
"""The entry of seats that are not settled yet: it is beyond any."""


@dataclass(frozen=True)
class Roll:
    """Of every record of the site: its person's cohort (0: away), and the ledger's entry with which it last came."""

    cohorts: NDArray[np.int64]
    entries: NDArray[np.int64]

    @classmethod
    def of(cls, known: Sequence[Known]) -> Roll:
        """The roll, as the ledger called it."""
        cohorts = [0 if one.away else one.cohort for one in known]
        return cls(np.array(cohorts, dtype=np.int64), np.array([one.entry for one in known], dtype=np.int64))

    def only(self, where: NDArray[np.bool_]) -> Roll:
        """Some of the records."""
        return Roll(self.cohorts[where], self.entries[where])

    def members(self, seats: Seats) -> NDArray[np.int64]:
        """Places of the records that take part: of these cohorts, here now, and here when it was settled."""
        seated = np.isin(self.cohorts, seats.cohorts) & (self.entries < seats.entry)
        return np.flatnonzero(seated)


@dataclass(frozen=True)
class Part:
    """The site's training records, or its held-out ones: how many, who they are, what their account is called."""

    size: int
    roll: Roll | None
    account: str


@dataclass(frozen=True)
class Party:
    """Who takes part in a run, settled or not yet: how many records, and what the accounts that pay are called."""

    seats: Seats

    @property
    def count(self) -> int:
        """n, as the server was told; whoever withdrew since is a null row."""
        return self.seats.count

    @property
    def payers(self) -> tuple[str, ...]:
        """What the accounts that pay are called, after the part's own."""
        return tuple(since(one) for one in self.seats.cohorts)


class Attendance:
    """Who takes part in which run of a site: everybody, or where data live the cohorts whose accounts have enough.

    Guarantees: it depends on public counts alone (the ledger's charges, how many records each cohort has); it is
    settled before the first charge of a run and stays so, whatever the site's file becomes; a record whose cohort does
    not pay, or that was withdrawn, is in no batch.
    """

    def __init__(self, ledger: Ledger, parts: Sequence[Part]) -> None:
        self.ledger = ledger
        self.parts = parts
        self._chosen = lru_cache(maxsize=64)(self._choose)
        self._records = lru_cache(maxsize=4)(self._take)

    @classmethod
    def of(
        cls, ledger: Ledger, account: str, count: int, held: NDArray[np.bool_] | None, roll: Roll | None
    ) -> Attendance:
        """The attendance of a site with ``count`` records, of which some are held out."""
        if held is None:
            return cls(ledger, [Part(count, roll, account)])
        both = ((~held, account), (held, account + HELD))
        return cls(ledger, [Part(int(one.sum()), roll and roll.only(one), name) for one, name in both])

    @property
    def lives(self) -> bool:
        """Whether records of this site come and go."""
        return self.parts[0].roll is not None

    @property
    def accounts(self) -> list[list[str]]:
        """All accounts of every part."""
        life = self.ledger.life()
        cohorts = range(1, 1 + (1 if life is None else life.cohorts))
        return [[part.account + since(one) for one in cohorts] for part in self.parts]

    def party(self, run: str, held: bool, epsilon: float) -> Party:
        """Who takes part in a run that may cost ε: as it was settled, or by the rule."""
        if not self.lives or held >= len(self.parts):
            count = self.parts[held].size if held < len(self.parts) else 0
            return Party(Seats(NOT_YET, "", (1,), count))
        life = self.ledger.life()
        if life is not None and (run, held) in life.seats:
            return Party(life.seats[run, held])
        return self._chosen(run, held, epsilon)

    def _choose(self, run: str, held: bool, epsilon: float) -> Party:  # run: what the choice is remembered by
        part = self.parts[held]
        assert part.roll is not None
        sizes = {int(k): int((part.roll.cohorts == k).sum()) for k in np.unique(part.roll.cohorts) if k}
        left = self.ledger.left([part.account + since(k) for k in sizes])
        chosen = takes_part({k: left[part.account + since(k)] for k in sizes}, epsilon)
        return Party(Seats(NOT_YET, "", chosen, sum(sizes[k] for k in chosen)))

    def settle(self, run: str, held: bool, party: Party, payable: Mapping[str, int]) -> tuple[Party, int]:
        """Settle who takes part, of a party whose accounts can pay so many turns; how many turns all of them pay.

        A cohort that cannot pay for one turn sits out although it was declared: its records are null rows. Where
        nobody can, all are named and nothing is paid.
        """
        if not self.lives:
            return party, min(payable.values())
        if party.seats.entry == NOT_YET:
            able = [k for k in party.seats.cohorts if payable[since(k)] > 0] or list(party.seats.cohorts)
            party = Party(self.ledger.settle(run, held, able, party.count))
        self.members(held, party.seats)  # refused before anything is charged
        return party, min(payable.get(one, 0) for one in party.payers)

    def records(self, held: bool, party: Party, records: Records) -> Records:
        """Of a part's records those who take part, as many as were declared: null rows stand for whoever is away."""
        return self._records(held, party.seats, records) if self.lives else records

    def _take(self, held: bool, seats: Seats, records: Records) -> Records:
        where = self.members(held, seats)
        found, missing = records.only(torch.from_numpy(where)), seats.count - len(where)
        if missing == 0:
            return found
        there = torch.ones(len(found.y), dtype=torch.bool) if found.valid is None else found.valid
        blank = [one.new_zeros(missing, *one.shape[1:]) for one in (found.x, found.y, there)]
        x, y, valid = (torch.cat(pair) for pair in zip((found.x, found.y, there), blank))
        if found.members is None:
            return Records(x, y, valid)
        nobody = found.members.new_full((missing, found.members.shape[1]), -1)
        nobody[:, 0] = torch.arange(len(found.y), len(y))
        return Records(x, y, valid, members=torch.cat([found.members, nobody]))

    def members(self, held: bool, seats: Seats) -> NDArray[np.int64]:
        """Places, among the part's records, of those who take part."""
        part = self.parts[held]
        if part.roll is None:
            return np.arange(part.size)
        where = part.roll.members(seats)
        if len(where) > seats.count:
            raise BadInput(
                f"{len(where)} records of those who take part are there, and {seats.count} were declared when the run "
                "began: they have more records than then; this site takes part again from the next run on"
            )
        return where

    def declared(self, run: str, said: Declared, epsilon: float) -> Declared:
        """What the site says about its records in a run: how many of each part take part."""
        if not self.lives:
            return said
        own, held = (self.party(run, part, epsilon).count for part in (False, True))
        return replace(said, records=own, held=held)


def check_living(ledger: Ledger, living: bool) -> None:
    """Refuse to forget that a site's records are known by their ids."""
    if not living and ledger.life() is not None:
        raise BadInput(
            f"{ledger.path} knows this site's records by their ids, and each cohort has an account of its own: say "
            "data.living = true again"
        )
