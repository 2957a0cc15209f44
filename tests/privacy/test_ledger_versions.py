"""Ledgers of earlier versions are taken along; those of later ones are refused."""

from __future__ import annotations

import os
import signal
import sqlite3
from pathlib import Path

import pytest
from ledger_cases import REQUEST, all_end_well, charge, ended_well, forked, plan, small_ledger

from sordino.errors import BadInput, LedgerDamaged
from sordino.privacy import ledger_file
from sordino.privacy.ledger import Ledger
from sordino.privacy.ledger_format import START, VERSION, Anchor, Entry, link, migrate, write_anchor


def version_one(path: Path) -> None:
    """A ledger as version 1 wrote it: entries, and no place for copies of releases."""
    body = '{"accountant": "pld", "adjacency": "zero-out", "delta": 1e-05, "epsilon": 2.0, "simulated": false}'
    turn = '{"caps": {"gradient": 50}, "payable": 5, "turn": [{"count": 10, "noise": 2.0, "rate": 0.05, '
    time = "2025-01-01T00:00:00+00:00"
    entries = [
        Entry(1, time, "ledger", body='{"id": "one", "version": 1}'),
        Entry(2, time, "account", client="hospital 3", body=body),
        Entry(3, time, "plan", "hospital 3", "a", body=turn + '"scheme": "poisson", "what": "gradient"}], "turns": 5}'),
        Entry(4, time, "charge", "hospital 3", "a", "gradient", "round 1", 0, 10, 10, REQUEST),
    ]
    db = sqlite3.connect(path, isolation_level=None)
    migrate(db, 0, target=1)
    head = START
    for entry in entries:
        head = link(head, entry)
        db.execute(f"INSERT INTO entries VALUES ({', '.join('?' * 13)})", (*entry, head))
    db.close()
    write_anchor(path, Anchor("one", 4, head))


def test_an_older_ledger_is_migrated_with_all_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    version_one(path)
    with Ledger(path) as ledger:
        assert [event.count for event in ledger.spent("hospital 3")] == [10]
        assert ledger.declare([plan(5)]) == {"hospital 3": 5}
        ledger.charge([charge("round 2")])
        ledger.store("hospital 3", "a", "round 2", REQUEST, b"release")
        ledger.verify()
    with Ledger(path) as ledger:
        assert ledger.stored("hospital 3", "a", "round 2", REQUEST) == b"release"
        assert ledger.head[0] == 7  # four old entries, the migration, a charge, a copy
        assert ledger._file.db.execute("PRAGMA user_version").fetchone()[0] == VERSION


def test_an_older_ledger_is_checked_before_it_is_migrated(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    version_one(path)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"round 1", b"round 9"))
    damaged = path.read_bytes()
    with pytest.raises(LedgerDamaged):
        Ledger(path)
    assert path.read_bytes() == damaged


def test_an_older_ledger_is_not_migrated_by_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    version_one(path)
    before = path.read_bytes()
    with pytest.raises(BadInput, match="open it for writing once"):
        Ledger(path, readonly=True)
    assert path.read_bytes() == before


def test_killed_in_the_middle_of_a_migration_it_migrates_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "old.db"
    version_one(path)

    def deadly(db: sqlite3.Connection, version: int) -> None:
        migrate(db, version)
        os.kill(os.getpid(), signal.SIGKILL)

    def child() -> None:
        monkeypatch.setattr(ledger_file, "migrate", deadly)
        Ledger(path)

    assert not ended_well(forked(child))
    with Ledger(path) as ledger:
        ledger.verify()
        assert [event.count for event in ledger.spent("hospital 3")] == [10]


def test_two_processes_that_migrate_at_once_migrate_once(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    version_one(path)
    assert all_end_well(*[lambda: Ledger(path).close()] * 4)
    with Ledger(path) as ledger:
        assert ledger.head[0] == 5


def test_a_newer_ledger_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "new.db"
    small_ledger(path).close()
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {VERSION + 1}")
    db.close()
    before = path.read_bytes()
    with pytest.raises(BadInput, match="update sordino"):
        Ledger(path)
    assert path.read_bytes() == before
