"""Data that live: records come, are corrected, and go; who has spent what is known by their ids, under a secret key.

Those who come together are a *cohort* with an account of its own, opened unspent. An id is in one cohort for ever:
whoever goes and comes back finds what was spent there. A record spends its own cohort's account and no other, so its ε
is that account's. An id is kept as BLAKE2b(key, id), twelve bytes that say nothing to whoever lacks the ledger's key.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sordino.errors import BadInput
from sordino.privacy.held import HELD

JOINED, WITHDRAWN, RETURNED = "joined", "withdrawn", "returned"
"""What may happen to ids."""

MARK = 12
"""Bytes of a mark. Two ids with one mark would be in the older one's cohort: no account is ever fresher for it."""

_SINCE = re.compile(r" \(since ([1-9]\d*)\)$")


def since(cohort: int) -> str:
    """What a cohort's account is called, after the site's: nothing for the first, which has the site's own account."""
    return "" if cohort == 1 else f" (since {cohort})"


def cohort_of(account: str) -> int:
    """The cohort whose account this is."""
    found = _SINCE.search(account)
    return 1 if found is None else int(found[1])


def is_held(account: str) -> bool:
    """Whether an account is one of held-out records."""
    return _SINCE.sub("", account).endswith(HELD)


def twin(account: str) -> str:
    """The account of the same cohort's other part: held-out records for training records, and the other way round."""
    own = _SINCE.sub("", account)
    other = own.removesuffix(HELD) if own.endswith(HELD) else own + HELD
    return other + account[len(own) :]


def canonical(said: object) -> str:
    """An id as it is compared: width, case and spacing of letters do not tell two people apart.

    Where they do after all, both are in one cohort and go together: nobody is taken for new who is not.
    """
    return " ".join(unicodedata.normalize("NFKC", str(said)).casefold().split())


def marks_of(key: bytes, ids: Iterable[str]) -> list[bytes]:
    """The mark of every id, which must be canonical."""
    return [hashlib.blake2b(one.encode(), key=key[:64], digest_size=MARK).digest() for one in ids]


@dataclass(frozen=True)
class Change:
    """Some ids of one cohort came, went or came back, at one start of the site: how many, and which by entry."""

    entry: int
    time: str
    what: str
    cohort: int
    count: int


@dataclass(frozen=True)
class Seats:
    """Who takes part in a run, settled when it was accepted: cohorts, and how many records were declared."""

    entry: int
    time: str
    cohorts: tuple[int, ...]
    count: int


@dataclass
class Life:
    """All that a ledger says about living data: the key and column of ids, what happened to them, who sat in which run.

    ``seats`` are by run and whether they are of held-out records.
    """

    entry: int
    time: str
    column: str
    key: str
    changes: list[Change] = field(default_factory=list)
    seats: dict[tuple[str, bool], Seats] = field(default_factory=dict)

    @property
    def cohorts(self) -> int:
        """How many cohorts there are; the first exists before anybody came."""
        return max((one.cohort for one in self.changes), default=1)

    def happened(self, change: Change) -> None:
        """Note a change; one that cannot follow from those before it raises."""
        newest = self.cohorts + (1 if self.changes else 0)
        if change.what not in (JOINED, WITHDRAWN, RETURNED) or change.count < 1 or not 1 <= change.cohort <= newest:
            raise ValueError("ids come, go or come back, in a cohort that there is")
        if change.cohort > self.cohorts and change.what != JOINED:
            raise ValueError("nobody leaves a cohort before somebody came")
        self.changes.append(change)

    def seated(self, run: str, held: bool, seats: Seats) -> None:
        """Note who takes part in a run; it is settled once."""
        if (run, held) in self.seats or not seats.cohorts or max(seats.cohorts) > self.cohorts:
            raise ValueError("who takes part in a run is settled once, of cohorts that there are")
        self.seats[run, held] = seats


@dataclass(frozen=True)
class Known:
    """What is known of an id: its cohort, the entry with which it last came, whether it is away."""

    cohort: int
    entry: int
    away: bool = False


def roll(changes: Iterable[tuple[Change, bytes]], known: Mapping[bytes, Known] | None = None) -> dict[bytes, Known]:
    """Every mark that was ever noted, from what was known and the changes since with their marks, end to end."""
    found = dict(known or {})
    for change, marks in changes:
        if len(marks) != MARK * change.count:
            raise BadInput(f"entry {change.entry} speaks of {change.count} ids and holds {len(marks) / MARK:g}")
        for start in range(0, len(marks), MARK):
            mark = marks[start : start + MARK]
            away = change.what == WITHDRAWN
            found[mark] = Known(change.cohort, found[mark].entry if away else change.entry, away)
    return found


def changes_to(known: Mapping[bytes, Known], here: Iterable[bytes], newest: int) -> dict[tuple[str, int], list[bytes]]:
    """What happened since the roll was last called: marks by what and cohort; ``newest`` is whoever is new's.

    Marks are sorted, so that their order says nothing of the file's.
    """
    present, found = set(here), dict[tuple[str, int], list[bytes]]()
    for mark in sorted(present - known.keys()):
        found.setdefault((JOINED, newest), []).append(mark)
    for mark in sorted(known):
        one = known[mark]
        if one.away is (mark in present):
            found.setdefault((RETURNED if one.away else WITHDRAWN, one.cohort), []).append(mark)
    return found


def takes_part(left: Mapping[int, float], epsilon: float) -> tuple[int, ...]:
    """The cohorts that take part in a run which may cost ε: whose account has as much left.

    Where none has, those that have most: they pay for as many turns as they can.
    """
    least = min(epsilon, max(left.values(), default=0.0))
    return tuple(sorted(cohort for cohort, rest in left.items() if rest >= least))
