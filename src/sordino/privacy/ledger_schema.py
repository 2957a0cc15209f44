"""The ledger's SQLite file: tables, versions and how to step from one to the next, and SQLite's errors in plain words.

A new ledger is an empty file taken through all steps, so creating and migrating are the same code. Entries are never
rewritten by a step: their hashes must stay what they were. A step may add tables, indexes, and columns that are empty
in old entries.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sordino.errors import BadInput, LedgerDamaged, SordinoError
from sordino.privacy.chain import RESTORE, anchor_path

APPLICATION = 0x534F5244  # "SORD" in SQLite's application_id: tells a ledger from any other database
PATIENCE = 60.0  # seconds to wait for another process's transaction

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

_DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT}
_DENIED = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_AUTH}


def explanation(error: sqlite3.Error, path: Path) -> SordinoError:
    """SQLite's error as one that names the cause and the remedy."""
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
        raise explanation(error, path) from error
    except UnicodeDecodeError as error:  # so does Python's module when it passes on what SQLite says of garbled tables
        raise LedgerDamaged(f"{path} is damaged ({error.reason}): {RESTORE}") from error


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


def migrate(db: sqlite3.Connection, version: int, target: int = VERSION) -> None:
    """Take the file from ``version`` to ``target``, inside the caller's transaction."""
    for step in STEPS[version:target]:
        for statement in step:
            db.execute(statement)
    db.execute(f"PRAGMA user_version = {target}")
    db.execute(f"PRAGMA application_id = {APPLICATION}")


def structure(db: sqlite3.Connection) -> set[tuple[str, str, str]]:
    """Tables, indexes and triggers with their SQL."""
    rows = db.execute("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL")
    return {(str(kind), str(name), str(sql)) for kind, name, sql in rows}


def check_structure(db: sqlite3.Connection, version: int, path: Path) -> None:
    """Refuse a file whose tables or append-only triggers are not those of its version, or whose pages disagree."""
    plain = sqlite3.connect(":memory:")
    try:
        migrate(plain, 0, version)
        expected = structure(plain)
    finally:
        plain.close()
    if structure(db) != expected:
        raise LedgerDamaged(f"the tables or triggers of {path} were changed outside sordino: {RESTORE}")
    found = db.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if found != "ok":
        raise LedgerDamaged(f"{path} is damaged ({found}): {RESTORE}")
