"""The ledger's file: chained entries on disk, checked as they are read, written one durable transaction at a time."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sqlite3
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

from sordino.errors import BadInput, LedgerDamaged, SordinoError
from sordino.privacy.book import Book, apply
from sordino.privacy.ledger_format import (
    RESTORE,
    START,
    VERSION,
    Anchor,
    Entry,
    anchor_path,
    check_path,
    check_structure,
    connect,
    explained,
    link,
    migrate,
    read_anchor,
    version_of,
    write_anchor,
)
from sordino.privacy.planning import unfit

log = logging.getLogger("sordino.ledger")

SEALED_UP_TO = 256 * 2**20  # bytes; the seal reads the file into memory
SEALED_ALWAYS = 8 * 2**20  # bytes; up to here every commit seals the file anew (about 10 ms), above where time allows
SEALING = 0.05  # the share of its time that a large ledger may spend on seals
LOOKS = 10  # how often, a tenth of a second apart, a check waits for the process that is writing to seal the file
FIELDS = ", ".join(Entry._fields)
_INSERT = f"INSERT INTO entries ({FIELDS}, hash) VALUES ({', '.join('?' * (len(Entry._fields) + 1))})"


class Draft:
    """The entries of a transaction that is being written."""

    def __init__(self, last: int) -> None:
        self.entries: list[Entry] = []
        self.releases: list[tuple[int, bytes]] = []
        self._last = last
        self._time = datetime.now(UTC).isoformat(timespec="seconds")

    def add(self, kind: str, body: dict[str, Any] | None = None, **fields: Any) -> Entry:
        """Append an entry; it gets its number here and its hash at the commit."""
        text = None if body is None else json.dumps(body, sort_keys=True, allow_nan=False)
        self.entries.append(Entry(self._last + len(self.entries) + 1, self._time, kind, body=text, **fields))
        return self.entries[-1]


class LedgerFile:
    """One SQLite file of chained entries and the book they add up to.

    Guarantees: whatever ``book`` shows was read from entries whose hashes were checked; a transaction is on disk, or
    nothing of it is; entries of other processes are read and checked before anything is decided.
    """

    def __init__(self, path: str | os.PathLike[str], readonly: bool = False, durable: bool = True) -> None:
        self.path = Path(path).resolve()
        self.readonly = readonly
        self.durable = durable
        self.book = Book()
        self.entries = 0
        self.head = START
        self._process = os.getpid()
        self._closed = False
        self.sealed = False
        self._next_seal = 0.0  # when a large file may be sealed again, by time.monotonic
        check_path(self.path, readonly)
        with explained(self.path):
            self.db = connect(self.path, readonly, durable)
            try:
                self._open()
            except BaseException:
                self.db.close()
                raise

    def _open(self) -> None:
        anchor = read_anchor(self.path)
        with self._begun():  # one snapshot: another process may be creating the ledger right now
            version = version_of(self.db, self.path)
        if version == 0:
            if anchor is not None or self.readonly:
                raise LedgerDamaged(f"{self.path} is empty: {RESTORE}")
            with self._begun("IMMEDIATE"):
                if version_of(self.db, self.path) == 0:  # another process may have been first
                    migrate(self.db, 0)
                    entry = Draft(0).add("ledger", {"id": uuid.uuid4().hex, "version": VERSION})
                    self.db.execute(_INSERT, (*entry, link(START, entry)))
                self.db.execute("COMMIT")
            version = VERSION
        self._inspect(anchor, version)
        if version < VERSION:
            if self.readonly:
                raise BadInput(f"{self.path} has an older format ({version}): open it for writing once to update it")
            with self.transaction() as draft:
                version = version_of(self.db, self.path)  # another process may have been first
                if version < VERSION:
                    migrate(self.db, version)
                    draft.add("migrated", {"from": version, "to": VERSION})
                    for one in unfit(self.book):
                        draft.add("closed", {"reason": "no filter covers it"}, client=one.plan.client, run=one.plan.run)
        elif not self.readonly and (anchor is None or anchor.seal is None or anchor.entries < self.entries):
            self._write_anchor()

    def _inspect(self, anchor: Anchor | None, version: int) -> None:
        """Read and check everything, in one read transaction. ``anchor`` was read before: it may lag, never lead."""
        with self._begun():
            self.refresh()
            if self.path.stat().st_size < self._size():  # SQLite reads a page that is cut short as if zeros followed
                raise LedgerDamaged(f"{self.path} was truncated: {RESTORE}")
            self.sealed = self._check_seal(anchor)
            if not self.sealed:
                check_structure(self.db, version, self.path)
        if anchor is None and self.entries > 1:
            anchor = read_anchor(self.path)  # another process may just have created the ledger
        if anchor is None:
            if self.entries > 1:
                raise LedgerDamaged(f"{anchor_path(self.path)} is missing: {RESTORE}")
            return
        if anchor.ledger != self.book.identity:
            raise LedgerDamaged(f"{self.path} and its anchor belong to different ledgers: {RESTORE}")
        if anchor.entries > self.entries:
            raise LedgerDamaged(
                f"{self.path} holds {self.entries} entries, its anchor has seen {anchor.entries}: "
                f"the file was truncated or replaced by an older copy; {RESTORE}"
            )
        self._check_entry(anchor.entries, anchor.head)

    def _check_seal(self, anchor: Anchor | None) -> bool:
        """Whether a seal covers the file as it is now; raises ``LedgerDamaged`` where it does not fit."""
        if anchor is None or anchor.seal is None or anchor.entries != self.entries:
            return False
        if self._seal() == anchor.seal:
            return True
        if read_anchor(self.path) != anchor:  # a writer has just taken it off
            return False
        raise LedgerDamaged(f"bytes of {self.path} were changed outside sordino: {RESTORE}")

    def _check_entry(self, number: int, head: str) -> None:
        row = self.db.execute("SELECT hash FROM entries WHERE number = ?", (number,)).fetchone()
        if row is None or row[0] != head:
            raise LedgerDamaged(f"entry {number} of {self.path} is not the one seen before: {RESTORE}")

    def refresh(self) -> None:
        """Read, check and add to the book the entries that this object has not seen yet."""
        self._check_usable()
        with explained(self.path):
            if self.entries:
                self._check_entry(self.entries, self.head)
            rows = self.db.execute(
                f"SELECT {FIELDS}, hash FROM entries WHERE number > ? ORDER BY number", (self.entries,)
            )
            for *fields, digest in rows:
                entry = Entry(*fields)
                if entry.number != self.entries + 1 or link(self.head, entry) != digest:
                    raise LedgerDamaged(f"entry {self.entries + 1} of {self.path} was changed or removed: {RESTORE}")
                self._admit(entry, digest)
            if self.entries == 0:
                raise LedgerDamaged(f"{self.path} holds no entries: {RESTORE}")

    def _admit(self, entry: Entry, digest: str) -> None:
        apply(self.book, entry)
        self.entries, self.head = entry.number, digest

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read what is new, and let the block look at a state that does not change under it."""
        self._check_usable()
        with explained(self.path), self._begun():
            self.refresh()
            yield

    @contextmanager
    def transaction(self) -> Iterator[Draft]:
        """Lock the ledger, read what is new, let the block draft entries, and commit them durably.

        Guarantees: an error in the block or in the commit leaves the file as it was. The anchor follows the commit, and
        so does the seal, at a site: a copy of the file as it lies on disk between two charges can be verified whole.
        """
        self._check_usable()
        if self.readonly:
            raise BadInput(f"{self.path} was opened read-only: open it for writing to record anything")
        broken = False
        with explained(self.path):
            try:
                with self._begun("IMMEDIATE"):
                    self.refresh()
                    broken = self._break_seal()
                    draft = Draft(self.entries)
                    yield draft
                    links = list(accumulate(draft.entries, link, initial=self.head))[1:]
                    self.db.executemany(_INSERT, [(*e, digest) for e, digest in zip(draft.entries, links)])
                    self.db.executemany("INSERT INTO releases (number, payload) VALUES (?, ?)", draft.releases)
                    self.db.execute("COMMIT" if draft.entries else "ROLLBACK")
            except BaseException as error:
                if broken and not self.db.in_transaction and not isinstance(error, LedgerDamaged):
                    with suppress(SordinoError, sqlite3.Error):  # it is sealed again when the ledger is closed
                        self._write_anchor()
                raise
            for entry, digest in zip(draft.entries, links):
                self._admit(entry, digest)
        if draft.entries or broken:
            self._write_anchor()

    def _write_anchor(self, seal: bool = False) -> None:
        """Note the chain's end beside the file, under the ledger's lock so that the anchor never goes backwards.

        The file is sealed there too: with ``seal``, and otherwise where that costs little beside a durable commit.
        """
        with explained(self.path), self._begun("IMMEDIATE"):
            self.refresh()
            seal |= self.durable and (self._size() <= SEALED_ALWAYS or time.monotonic() >= self._next_seal)
            anchor = Anchor(self.book.identity, self.entries, self.head, self._seal() if seal else None)
            self._replace_anchor(anchor, "; the last charge is recorded, nothing was drawn for it")

    def _replace_anchor(self, anchor: Anchor, outcome: str) -> None:
        try:
            write_anchor(self.path, anchor, self.durable)
        except OSError as error:
            raise BadInput(
                f"{anchor_path(self.path)} could not be written ({error.strerror}){outcome}: free disk space or fix "
                "the permissions, then go on"
            ) from error

    def _break_seal(self) -> bool:
        """Take the seal off before the file is touched, so that a crash cannot leave a seal that does not fit.

        Where looking costs little it must fit: what was changed is not sealed over. Returns whether one was there.
        """
        anchor = read_anchor(self.path)
        if anchor is None or anchor.seal is None:
            return False
        if self._size() <= SEALED_ALWAYS:
            self._check_seal(anchor)
        self._replace_anchor(anchor._replace(seal=None), ", nothing was recorded")
        return True

    def _seal(self) -> str | None:
        """SHA-256 of the file as it lies on disk; None where it is too large to hold in memory. For transactions.

        It reads through SQLite: opening and closing the file by hand would drop this process's locks on it. And through
        a connection of its own, because this object's remembers pages and would not see what became of them.
        """
        if self._size() > SEALED_UP_TO:
            return None
        start = time.monotonic()
        with closing(connect(self.path, readonly=True)) as db:
            db.execute("BEGIN")
            db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()  # says what is wrong, where serialize does not
            digest = hashlib.sha256(db.serialize()).hexdigest()
        self._next_seal = time.monotonic() + (time.monotonic() - start) / SEALING
        return digest

    def _size(self) -> int:
        pages, size = (self.db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
        return int(pages) * int(size)

    def copy(self, path: Path) -> None:
        """A consistent copy of the entries at ``path``, and an anchor for it."""
        with closing(sqlite3.connect(path)) as target:
            self.db.backup(target)
            seal = None if self._size() > SEALED_UP_TO else hashlib.sha256(target.serialize()).hexdigest()
        write_anchor(path, Anchor(self.book.identity, self.entries, self.head, seal), self.durable)

    def verify(self) -> bool:
        """Read the whole file anew from disk and check it, stored releases too; raises ``LedgerDamaged``.

        Returns whether a seal covers every byte. Without one (it is off while a process writes, and after a kill in
        that moment) entries, stored releases and structure were checked, and bytes that none of them uses were not.
        """
        fresh = LedgerFile(self.path, readonly=True)
        looks = LOOKS if self.readonly else 0
        while not fresh.sealed and looks > 0:
            fresh.close()
            time.sleep(0.1)
            fresh, looks = LedgerFile(self.path, readonly=True), looks - 1
        try:
            with explained(self.path):
                rows = fresh.db.execute(
                    "SELECT number, body, payload FROM releases LEFT JOIN entries USING (number) ORDER BY number"
                )
                for count, body, payload in rows:
                    check_payload(self.path, count, body, payload)
                gone = fresh.db.execute(
                    "SELECT number FROM entries LEFT JOIN releases USING (number) "
                    "WHERE kind = 'ids' AND payload IS NULL"
                ).fetchone()
                if gone is not None:
                    raise LedgerDamaged(f"the ids of entry {gone[0]} in {self.path} are gone: {RESTORE}")
            return fresh.sealed
        finally:
            fresh.close(orderly=False)

    def close(self, orderly: bool = True) -> None:
        """Close the file. An orderly close seals it, so that any byte changed later is noticed."""
        if self._closed or self._process != os.getpid():
            return
        try:
            if orderly and not self.readonly:
                anchor = read_anchor(self.path)
                if anchor is None or anchor.seal is None or anchor.entries != self.entries:
                    self._write_anchor(seal=True)
        finally:
            self._closed = True
            self.db.close()

    def close_after(self, error: BaseException | None) -> None:
        """Close the file when something went wrong, or Ctrl-C came; it is sound all the same, and is sealed.

        It is read anew from disk first: this object may have been stopped half-way through reading. What is damaged is
        not sealed, and nothing that goes wrong here hides ``error``.
        """
        if self._closed or self._process != os.getpid():
            return
        self.close(orderly=False)
        if self.readonly or isinstance(error, LedgerDamaged):
            return
        try:
            anchor = read_anchor(self.path)
            if anchor is None or anchor.seal is None:
                LedgerFile(self.path, durable=self.durable).close()
        except SordinoError as trouble:
            log.warning("%s could not be sealed: %s", self.path, trouble)

    @contextmanager
    def _begun(self, mode: str = "DEFERRED") -> Iterator[None]:
        """A transaction of SQLite, which is undone unless the block commits it."""
        self.db.execute(f"BEGIN {mode}")
        try:
            yield
        finally:
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")

    def _check_usable(self) -> None:
        if self._process != os.getpid():
            raise SordinoError(f"{self.path} was opened before a fork: open the ledger again in this process")
        if self._closed:
            raise SordinoError(f"{self.path} is closed: open the ledger again")


def check_payload(path: Path, entry: int, body: str | None, payload: bytes) -> None:
    """Refuse a stored release that is not the one its entry speaks of."""
    if body is None or hashlib.sha256(payload).hexdigest() != json.loads(body).get("sha256"):
        raise LedgerDamaged(f"the stored release of entry {entry} in {path} was changed: {RESTORE}")
