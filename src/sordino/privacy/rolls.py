"""A ledger that knows whose records it is kept for: it calls the roll of ids, and notes who sits in which run."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Sequence

from sordino.errors import BadInput, LedgerDamaged
from sordino.privacy.book import Book, check_names
from sordino.privacy.held import HELD
from sordino.privacy.ledger_file import Draft, check_payload
from sordino.privacy.ledger_format import RESTORE
from sordino.privacy.living import (
    Change,
    Known,
    Life,
    Seats,
    canonical,
    changes_to,
    marks_of,
    roll,
    since,
)
from sordino.privacy.reading import Reading

NOBODY = Known(0, 0, away=True)
"""What is known of somebody who was never there: withdrawn before the first time."""


class Rolls(Reading):
    """The part of a ledger that keeps ids: under a secret key, in its own chained entries, for ever."""

    def life(self) -> Life | None:
        """What the ledger knows of ids that come and go; None where it knows none."""
        return self._book().life

    def call_roll(self, column: str, ids: Sequence[str], withdrawn: Iterable[str] = ()) -> list[Known]:
        """Note who is new, who is gone and who is back, in one transaction; what is known of every one of ``ids``.

        Whoever is new joins the newest cohort if nothing was ever asked of it, else a new one. ``withdrawn`` are away,
        although their records are there. The first call makes everybody there the first cohort.

        Guarantees: an id is in one cohort for ever; spellings that differ in case or spacing are one id; nobody joins
        a cohort that has declared anything. Two processes see one roll.
        """
        check_names(column=column)
        everybody, out = [canonical(one) for one in ids], {canonical(one) for one in withdrawn}
        while True:
            life = self._book().life
            key = secrets.token_bytes(32) if life is None else bytes.fromhex(life.key)
            marks, away = marks_of(key, everybody), set(marks_of(key, out))
            with self._file.transaction() as draft:
                book = self._file.book
                if (book.life is None) is not (life is None):
                    continue  # another process was first: its key counts
                if book.life is None:
                    _check_beginning(book, str(self.path))
                    draft.add("living", {"column": column, "key": key.hex()})
                elif book.life.column != column:
                    raise BadInput(
                        f"{self.path} knows people by the column {book.life.column!r}, not by {column!r}: everybody "
                        "would be new, with nothing spent; name that column as data.id"
                    )
                known, here = self._known(book.life), [one for one in marks if one not in away]
                spent = life is None and bool(book.blocks or book.unprotected)
                # Where records were used before their ids were noted, those who are out now may have been among them.
                for present in (marks, here) if spent else (here,):
                    known = _note(draft, known, present, _newest(book))
            return [known.get(one, NOBODY) if one not in away else _gone(known.get(one)) for one in marks]

    def settle(self, run: str, held: bool, cohorts: Sequence[int], count: int) -> Seats:
        """Who takes part in a run, of training or of held-out records: as it was settled first, or as is said now."""
        check_names(run=run)
        with self._file.transaction() as draft:
            life = self._file.book.life
            if life is None:
                raise BadInput(f"{self.path} knows no ids: call the roll first")
            if (run, held) in life.seats:
                return life.seats[run, held]
            body = {"cohorts": sorted(cohorts), "count": int(count), "held": bool(held)}
            entry = draft.add("seated", body, run=run)
        return Seats(entry.number, entry.time, tuple(sorted(cohorts)), int(count))

    def _known(self, life: Life | None) -> dict[bytes, Known]:
        """Every id that was ever noted, from entries and the marks that belong to them."""
        return roll((change, self._marks(change)) for change in (() if life is None else life.changes))

    def _marks(self, change: Change) -> bytes:
        row = self._file.db.execute(
            "SELECT body, payload FROM entries JOIN releases USING (number) WHERE number = ?", (change.entry,)
        ).fetchone()
        if row is None:
            raise LedgerDamaged(f"the ids of entry {change.entry} in {self.path} are gone: {RESTORE}")
        check_payload(self.path, change.entry, *row)
        return bytes(row[1])


def _note(draft: Draft, known: dict[bytes, Known], present: Sequence[bytes], newest: int) -> dict[bytes, Known]:
    """Draft what happened; what is known then."""
    found = []
    for (what, cohort), marks in changes_to(known, present, newest).items():
        payload = b"".join(marks)
        body = {"cohort": cohort, "count": len(marks), "sha256": hashlib.sha256(payload).hexdigest()}
        entry = draft.add("ids", body, what=what)
        draft.releases.append((entry.number, payload))
        found.append((Change(entry.number, entry.time, what, cohort, len(marks)), payload))
    return roll(found, known)


def _gone(one: Known | None) -> Known:
    return NOBODY if one is None else Known(one.cohort, one.entry, away=True)


def _newest(book: Book) -> int:
    """The cohort of whoever is new: the last one while nothing was ever asked of it, else the next."""
    if book.life is None or not book.life.changes:
        return 1
    last = book.life.cohorts
    if not book.bindings:
        return last
    own = [book.bindings[-1].account + part + since(last) for part in ("", HELD)]
    used = any(book.standings.get(one) or (one in book.accounts and book.accounts[one].not_private) for one in own)
    return last + 1 if used else last


def _check_beginning(book: Book, path: str) -> None:
    """Refuse to begin where it cannot be told who was there: records were charged, and exchanged since."""
    if len(book.bindings) > 1 and (book.blocks or book.unprotected):
        raise BadInput(
            f"{path} was bound anew ({book.bindings[-1].time}) and has charges: who was among the earlier records is "
            "not known, and somebody who comes back would look new; leave data.living away, so that everybody counts "
            "as those who were there"
        )
