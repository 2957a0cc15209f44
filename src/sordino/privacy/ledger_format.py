"""What a ledger looks like on disk: chained entries, the anchor beside the file, SQLite tables and their versions.

Every entry carries h_k = SHA-256(h_{k-1} ‖ entry_k) with h_0 = 64 zeros, so that no entry can be changed, dropped or
moved without breaking all later hashes. A chain alone cannot tell that its *end* is missing: the anchor, a small file
next to the ledger, holds the number of entries and the last hash.

A new ledger is an empty file taken through all versions' steps, so creating and migrating are the same code. Entries
are never rewritten by a step: their hashes must stay what they were. A step may add tables, indexes, and columns that
are empty in old entries.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import NamedTuple

from sordino.errors import BadInput, LedgerDamaged, SordinoError

START = "0" * 64
RESTORE = "restore the ledger and its .anchor file together from a backup; sordino will not start it anew"
APPLICATION = 0x534F5244  # "SORD" in SQLite's application_id: tells a ledger from any other database
PATIENCE = 60.0  # seconds to wait for another process's transaction


class Entry(NamedTuple):
    """One line of the ledger. Fields that a kind of entry does not need are None and are left out of the hash."""

    number: int
    time: str
    kind: str
    client: str | None = None
    run: str | None = None
    what: str | None = None
    key: str | None = None
    attempt: int | None = None
    amount: int | None = None
    used: int | None = None
    request: str | None = None
    body: str | None = None


class Anchor(NamedTuple):
    """What the file beside the ledger says: whose it is, how many entries, the last hash.

    ``seal`` is the SHA-256 of the whole ledger file: it covers bytes that no entry uses. It follows every commit at a
    site and every end of a process but a kill; it is absent while a transaction is written, and after a kill in it.
    """

    ledger: str
    entries: int
    head: str
    seal: str | None = None


def link(previous: str, entry: Entry) -> str:
    """h_k = SHA-256(h_{k-1} ‖ entry_k) as hex, the entry written as a JSON object in ASCII, fields in order.

    Empty fields are left out so that a later version can add a column without changing the hash of old entries.
    Spelt out because it runs for every entry that is ever read, at half the time of ``json.dumps``.
    """
    fields = [
        f'"{name}":{encode_basestring_ascii(value) if isinstance(value, str) else value}'
        for name, value in zip(Entry._fields, entry)
        if value is not None
    ]
    return hashlib.sha256((previous + "{" + ",".join(fields) + "}").encode("ascii")).hexdigest()


def anchor_path(ledger: Path) -> Path:
    """Where the anchor of a ledger lies."""
    return ledger.with_name(ledger.name + ".anchor")


def _anchor_text(fields: dict[str, object]) -> bytes:
    """The one way an anchor is written, checksum included: a byte that means nothing cannot be changed either."""
    check = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**fields, "check": check}) + "\n").encode("ascii")


def write_anchor(ledger: Path, anchor: Anchor, durable: bool = True) -> None:
    """Replace the anchor atomically. Call it with the ledger locked and *after* its commit.

    Guarantees: a reader sees the old anchor or the new one, whole; so the anchor may lag behind the ledger after a
    crash, and never leads it. (Its folder is not synced: the next commit's sync on the same disk takes care of that.)
    """
    path = anchor_path(ledger)
    draft = path.with_name(path.name + ".tmp")
    with open(draft, "wb") as file:
        file.write(_anchor_text(anchor._asdict()))
        file.flush()
        if durable:
            os.fsync(file.fileno())
    os.replace(draft, path)


def read_anchor(ledger: Path) -> Anchor | None:
    """The anchor of a ledger, None where there is no such file; an unreadable one raises ``LedgerDamaged``."""
    path = anchor_path(ledger)
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        fields = json.loads(text)
        del fields["check"]
        anchor = Anchor(**fields)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise LedgerDamaged(f"{path} is not readable as a ledger's anchor: {RESTORE}") from error
    if text != _anchor_text(fields):
        raise LedgerDamaged(f"{path} was changed outside sordino: {RESTORE}")
    return anchor


_ENTRIES = (
    """CREATE TABLE entries (
  number INTEGER PRIMARY KEY,
  time TEXT NOT NULL,
  kind TEXT NOT NULL,
  client TEXT, run TEXT, what TEXT, key TEXT,
  attempt INTEGER, amount INTEGER, used INTEGER,
  request TEXT, body TEXT,
  hash TEXT NOT NULL
) STRICT""",
    "CREATE UNIQUE INDEX charge_keys ON entries (client, run, key, attempt) WHERE kind = 'charge'",
    """CREATE TRIGGER entries_in_order BEFORE INSERT ON entries
WHEN NEW.number <> (SELECT COALESCE(MAX(number), 0) + 1 FROM entries)
BEGIN SELECT RAISE(ABORT, 'entries are numbered without gaps'); END""",
    """CREATE TRIGGER entries_unchanged BEFORE UPDATE ON entries
BEGIN SELECT RAISE(ABORT, 'entries cannot be changed'); END""",
    """CREATE TRIGGER entries_kept BEFORE DELETE ON entries
BEGIN SELECT RAISE(ABORT, 'entries cannot be removed'); END""",
)
_RELEASES = (
    "CREATE TABLE releases (number INTEGER PRIMARY KEY REFERENCES entries (number), payload BLOB NOT NULL) STRICT",
    "CREATE INDEX stored_keys ON entries (client, run, key, request) WHERE kind = 'stored'",
    """CREATE TRIGGER releases_unchanged BEFORE UPDATE ON releases
BEGIN SELECT RAISE(ABORT, 'stored releases cannot be changed'); END""",
)

# Version 1: entries. Version 2: durable copies of releases, for byte-identical resends. Version 3: the same tables;
# entries say which filter admitted a plan, whose ledger it is, and what was released without noise.
STEPS: tuple[tuple[str, ...], ...] = (_ENTRIES, _RELEASES, ())
VERSION = len(STEPS)


def migrate(db: sqlite3.Connection, version: int, target: int = VERSION) -> None:
    """Take the file from ``version`` to ``target``, inside the caller's transaction."""
    for step in STEPS[version:target]:
        for statement in step:
            db.execute(statement)
    db.execute(f"PRAGMA user_version = {target}")
    db.execute(f"PRAGMA application_id = {APPLICATION}")


def version_of(db: sqlite3.Connection, path: Path) -> int:
    """The schema version: 0 for an empty file; what is not a ledger or is newer than this sordino is refused."""
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    application = int(db.execute("PRAGMA application_id").fetchone()[0])
    tables = int(db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0])
    if tables == 0 and version == 0 and application == 0:
        return 0
    if application != APPLICATION or version < 1:
        raise LedgerDamaged(f"{path} is not a sordino ledger: name another file, or {RESTORE}")
    if version > VERSION:
        raise BadInput(
            f"{path} was written by a newer sordino (ledger version {version}, this one knows up to {VERSION}): "
            "update sordino"
        )
    return version


def _structure(db: sqlite3.Connection) -> set[tuple[str, str, str]]:
    """Tables, indexes and triggers with their SQL."""
    rows = db.execute("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL")
    return {(str(kind), str(name), str(sql)) for kind, name, sql in rows}


def check_structure(db: sqlite3.Connection, version: int, path: Path) -> None:
    """Refuse a file whose tables or append-only triggers are not those of its version, or whose pages disagree."""
    with closing(sqlite3.connect(":memory:")) as plain:
        migrate(plain, 0, version)
        expected = _structure(plain)
    if _structure(db) != expected:
        raise LedgerDamaged(f"the tables or triggers of {path} were changed outside sordino: {RESTORE}")
    found = db.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if found != "ok":
        raise LedgerDamaged(f"{path} is damaged ({found}): {RESTORE}")


def check_path(path: Path, readonly: bool) -> None:
    """Refuse paths at which SQLite would fail obscurely or start an empty ledger where one has been."""
    if not path.parent.is_dir():
        raise BadInput(f"the folder {path.parent} of the ledger does not exist: create it, or name another path")
    if path.is_dir():
        raise BadInput(f"{path} is a folder: the ledger is a file, name one inside it")
    if not path.exists():
        if anchor_path(path).exists():
            raise LedgerDamaged(f"{path} is gone but {anchor_path(path).name} says that it held charges: {RESTORE}")
        if readonly:
            raise BadInput(f"there is no ledger at {path}")
    elif not readonly and path.stat().st_mode & 0o222 == 0:  # checked by hand: root may write to it all the same
        raise BadInput(f"{path} is read-only: a ledger has to record charges, allow writing to it")


def connect(path: Path, readonly: bool, durable: bool = True) -> sqlite3.Connection:
    """Open the file so that a committed transaction survives a crash and, if ``durable``, a loss of power.

    Guarantees: rollback journal and synchronous=FULL, the journal being truncated and synced at every commit (a
    deleted one could come back after a power loss and undo the commit). No second file holds committed data.
    """
    mode = "ro" if readonly else "rwc"
    db = sqlite3.connect(f"{path.as_uri()}?mode={mode}", uri=True, timeout=PATIENCE, isolation_level=None)
    db.execute("PRAGMA trusted_schema = OFF")
    if not readonly:
        db.execute("PRAGMA journal_mode = TRUNCATE")
        db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'OFF'}")
    return db


_DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT}
_DENIED = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_AUTH}


def _explanation(error: sqlite3.Error, path: Path) -> SordinoError:
    code = getattr(error, "sqlite_errorcode", None)
    primary = None if code is None else code & 0xFF
    garbled = code is None and "decode" in str(error)  # text that is no text: Python's word, not SQLite's
    if primary in _DAMAGE or code == sqlite3.SQLITE_IOERR_SHORT_READ or garbled:
        return LedgerDamaged(f"{path} is damaged or not a ledger ({error}): {RESTORE}")
    if code == sqlite3.SQLITE_READONLY_ROLLBACK:
        return BadInput(f"{path} holds a transaction that a crash cut short: open it for writing once to undo it")
    if primary in _DENIED:
        return BadInput(f"{path} cannot be written ({error}): allow writing to the file and its folder")
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return SordinoError(f"{path} is locked by another process for more than {PATIENCE:.0f} s: try again later")
    if primary == sqlite3.SQLITE_FULL:
        return BadInput(f"no room for {path} ({error}), nothing was recorded: free disk space and try again")
    if primary is None:
        return SordinoError(f"{path} cannot be used like this ({error}): open the ledger where it is used")
    return BadInput(f"{path} could not be read or written ({error}), nothing was recorded: check the disk")


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn SQLite's errors inside the block into sordino's."""
    try:
        yield
    except sqlite3.Error as error:
        raise _explanation(error, path) from error
    except UnicodeDecodeError as error:  # so does Python's module when it passes on what SQLite says of garbled tables
        raise LedgerDamaged(f"{path} is damaged ({error.reason}): {RESTORE}") from error
