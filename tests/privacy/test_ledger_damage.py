"""A ledger that was changed, cut, emptied, replaced, or cannot be written: a clear refusal, never a silent reset."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import sqlite3
from pathlib import Path

import pytest
from ledger_cases import REQUEST, charge, ended_well, forked, small_ledger

from sordino.errors import BadInput, LedgerDamaged, SordinoError
from sordino.privacy.ledger import Ledger
from sordino.privacy.ledger_format import anchor_path, read_anchor, write_anchor


@pytest.fixture(scope="module")
def sealed_ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger with charges and a stored release, closed in order."""
    path = tmp_path_factory.mktemp("sealed") / "ledger.db"
    with small_ledger(path, turns=50, epsilon=4.0) as ledger:
        for i in range(0, 30, 10):
            ledger.charge([charge(f"round {i + j}") for j in range(10)])
        ledger.store("hospital 3", "a", "round 29", REQUEST, b"release " * 2000)
    return path


@pytest.fixture
def path(sealed_ledger: Path, tmp_path: Path) -> Path:
    shutil.copy(anchor_path(sealed_ledger), tmp_path)
    return Path(shutil.copy(sealed_ledger, tmp_path))


def crashed(path: Path) -> None:
    """Leave the ledger as a kill in the middle of a commit does: the seal was off, and the anchor had not followed."""
    ledger = Ledger(path)
    ledger.charge([charge("last")])
    ledger._file.close(orderly=False)
    unseal(path)


def unseal(path: Path) -> None:
    anchor = read_anchor(path)
    assert anchor is not None
    write_anchor(path, anchor._replace(seal=None))


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x40
    path.write_bytes(bytes(data))


def tamper(path: Path, *statements: str) -> None:
    """Change the file as someone with SQLite would, taking the triggers out of the way and putting them back."""
    db = sqlite3.connect(path)
    triggers = db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
    for name, _ in triggers:
        db.execute(f"DROP TRIGGER {name}")
    for statement in statements:
        db.execute(statement)
    for _, sql in triggers:
        db.execute(sql)
    db.commit()
    db.close()


def test_a_flipped_byte_anywhere_in_a_closed_ledger_is_noticed(path: Path) -> None:
    whole = path.read_bytes()
    some = random.Random(0).sample(range(len(whole)), 60)
    for position in [0, 16, 18, 19, 24, 28, 60, 68, 95, 100, 4095, len(whole) // 2, len(whole) - 1, *some]:
        path.write_bytes(whole)
        flip(path, position)
        with pytest.raises(SordinoError, match=r"restore|newer") as caught:
            Ledger(path)
        assert isinstance(caught.value, LedgerDamaged | BadInput), position
        with pytest.raises((LedgerDamaged, BadInput)):
            Ledger(path, readonly=True)
    path.write_bytes(whole)
    Ledger(path).verify()


def test_after_a_crash_a_flipped_byte_of_any_entry_is_noticed(path: Path) -> None:
    crashed(path)
    whole = path.read_bytes()
    for text in (b"hospital 3", b"round 7", b"gradient", REQUEST.encode(), b'"delta"', b"charge", b"2.0"):
        path.write_bytes(whole)
        flip(path, whole.index(text))
        with pytest.raises(LedgerDamaged):
            Ledger(path)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE entries SET amount = 1, used = used - 9 WHERE kind = 'charge' AND number = 33",
        "UPDATE entries SET body = replace(body, '4.0', '9.0') WHERE kind = 'account'",
        "UPDATE entries SET client = 'hospital 4' WHERE number = 10",
        "DELETE FROM entries WHERE number = (SELECT MAX(number) FROM entries)",
        "DELETE FROM entries WHERE number = 12",
        "DELETE FROM entries",
    ],
)
def test_entries_changed_behind_the_triggers_are_noticed(path: Path, statement: str) -> None:
    for sealed in (True, False):
        if not sealed:
            crashed(path)
        saved = path.read_bytes()
        tamper(path, statement)
        with pytest.raises(LedgerDamaged):
            Ledger(path)
        path.write_bytes(saved)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE entries SET used = 0",
        "DELETE FROM entries WHERE number = 5",
        "INSERT INTO entries (number, time, kind, hash) VALUES (999, '', 'charge', '')",
        "UPDATE releases SET payload = x'00'",
    ],
)
def test_the_file_itself_refuses_to_be_rewritten(path: Path, statement: str) -> None:
    db = sqlite3.connect(path)
    with pytest.raises(sqlite3.IntegrityError):
        db.execute(statement)
    db.close()


def test_missing_triggers_are_noticed(path: Path) -> None:
    crashed(path)
    db = sqlite3.connect(path)
    db.execute("DROP TRIGGER entries_kept")
    db.close()
    with pytest.raises(LedgerDamaged, match="triggers"):
        Ledger(path)


def test_a_changed_stored_release_is_noticed_and_not_sent(path: Path) -> None:
    crashed(path)
    tamper(path, "UPDATE releases SET payload = x'00'")
    with Ledger(path) as ledger:
        with pytest.raises(LedgerDamaged, match="stored release"):
            ledger.verify()
        with pytest.raises(LedgerDamaged, match="stored release"):
            ledger.stored("hospital 3", "a", "round 29", REQUEST)


@pytest.mark.parametrize("keep", [0, 1, 100, 4096, 8192, 0.5, -1])
def test_a_truncated_file_is_noticed(path: Path, keep: float) -> None:
    for sealed in (True, False):
        if not sealed:
            crashed(path)
        whole = path.read_bytes()
        path.write_bytes(whole[: int(len(whole) * keep) if keep == 0.5 else int(keep)])
        with pytest.raises(LedgerDamaged, match="restore"):
            Ledger(path)
        with pytest.raises(LedgerDamaged, match="restore"):
            Ledger(path)  # and it stays refused
        path.write_bytes(whole)


def test_an_older_copy_of_the_file_is_noticed(path: Path, tmp_path: Path) -> None:
    shutil.copy(path, tmp_path / "copy")
    with Ledger(path) as ledger:
        ledger.charge([charge("later")])
    shutil.copy(tmp_path / "copy", path)
    with pytest.raises(LedgerDamaged, match="older copy"):
        Ledger(path)


def test_an_older_copy_put_back_while_the_ledger_is_open_is_noticed(path: Path, tmp_path: Path) -> None:
    shutil.copy(path, tmp_path / "copy")
    ledger = Ledger(path)
    ledger.charge([charge("later")])
    path.write_bytes((tmp_path / "copy").read_bytes())
    with pytest.raises(LedgerDamaged):
        ledger.charge([charge("even later")])


def fork_of(path: Path, *keys: str) -> bytes:
    """The ledger as it would be had these draws been charged instead, one by one."""
    folder = path.parent / "fork"
    folder.mkdir()
    shutil.copy(anchor_path(path), folder)
    with Ledger(shutil.copy(path, folder)) as ledger:
        for key in keys:
            ledger.charge([charge(key)])
    return (folder / path.name).read_bytes()


@pytest.mark.parametrize("keys", [("two",), ("two", "three")])
def test_a_ledger_that_went_its_own_way_does_not_fit_the_anchor(path: Path, keys: tuple[str, ...]) -> None:
    fork = fork_of(path, *keys)
    with Ledger(path) as ledger:
        ledger.charge([charge("one")])
    path.write_bytes(fork)
    with pytest.raises(LedgerDamaged):
        Ledger(path)


def test_a_ledger_of_the_same_length_put_in_place_of_an_open_one_is_noticed(path: Path) -> None:
    fork = fork_of(path, "three", "four")
    ledger = Ledger(path)
    ledger.charge([charge("one"), charge("two")])
    path.write_bytes(fork)
    with pytest.raises(LedgerDamaged, match="not the one seen before"):
        ledger.charge([charge("five")])


def test_another_ledger_in_its_place_is_noticed(path: Path, tmp_path: Path) -> None:
    small_ledger(tmp_path / "other.db").close()
    shutil.copy(tmp_path / "other.db", path)
    with pytest.raises(LedgerDamaged, match="different ledgers"):
        Ledger(path)


def test_a_deleted_file_is_not_started_anew(path: Path) -> None:
    path.unlink()
    with pytest.raises(LedgerDamaged, match="gone"):
        Ledger(path)
    assert not path.exists()


def test_a_missing_or_changed_anchor_is_noticed(path: Path) -> None:
    anchor = anchor_path(path)
    text = anchor.read_text()
    fields = json.loads(text)
    for damaged in ("", "{}", "[]", text[:-20], json.dumps({**fields, "entries": 3})):
        anchor.write_text(damaged)
        with pytest.raises(LedgerDamaged, match="anchor"):
            Ledger(path)
    anchor.unlink()
    with pytest.raises(LedgerDamaged, match="missing"):
        Ledger(path)


def test_what_is_not_a_ledger_is_refused_and_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a database, and long enough to be taken for one" * 40)
    other = tmp_path / "other.db"
    db = sqlite3.connect(other)
    db.execute("CREATE TABLE shopping (item TEXT)")
    db.commit()
    db.close()
    for path in (text, other):
        before = path.read_bytes()
        with pytest.raises(LedgerDamaged, match="not a"):
            Ledger(path)
        assert path.read_bytes() == before


def test_a_read_only_file_is_refused_even_for_root(path: Path) -> None:
    path.chmod(0o444)
    with pytest.raises(BadInput, match="read-only"):
        Ledger(path)
    with Ledger(path, readonly=True) as ledger:
        ledger.verify()


def test_paths_that_cannot_hold_a_ledger_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="does not exist"):
        Ledger(tmp_path / "missing" / "ledger.db")
    with pytest.raises(BadInput, match="is a folder"):
        Ledger(tmp_path)
    with pytest.raises(BadInput, match="no ledger"):
        Ledger(tmp_path / "nothing.db", readonly=True)


def test_a_full_disk_refuses_the_charge_and_loses_nothing(path: Path) -> None:
    ledger = Ledger(path)
    pages = ledger._file.db.execute("PRAGMA page_count").fetchone()[0]
    ledger._file.db.execute(f"PRAGMA max_page_count = {pages}")
    before = ledger.head
    with pytest.raises(SordinoError, match="free disk space"):
        ledger.store("hospital 3", "a", "big", REQUEST, os.urandom(100_000))
    assert ledger.head == before
    ledger.close()
    with Ledger(path) as again:
        again.verify()
        assert again.head == before


def test_a_limit_on_file_size_refuses_the_charge_and_loses_nothing(path: Path) -> None:
    with Ledger(path) as ledger:
        before = ledger.head

    def child() -> None:
        with Ledger(path) as ledger:
            size = path.stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            with pytest.raises(SordinoError, match="nothing was recorded"):
                ledger.store("hospital 3", "a", "big", REQUEST, os.urandom(100_000))
            assert ledger.head == before

    assert ended_well(forked(child))
    with Ledger(path) as again:
        again.verify()
        assert again.head == before


def test_when_the_anchor_cannot_be_written_the_charge_stands_and_the_caller_hears_of_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(path)
    spent = sum(event.count for event in ledger.spent("hospital 3"))
    replace, calls = os.replace, []

    def full(source: str, target: str) -> None:
        calls.append(source)
        if len(calls) in (1, 3):
            raise OSError(28, "No space left on device")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(SordinoError, match=r"No space left.*nothing was recorded"):  # the seal does not come off
            ledger.charge([charge("unlucky")])
        assert sum(event.count for event in ledger.spent("hospital 3")) == spent
        with pytest.raises(SordinoError, match=r"No space left.*is recorded"):
            ledger.charge([charge("unlucky")])
    assert sum(event.count for event in ledger.spent("hospital 3")) == spent + 10
    ledger.close()
    Ledger(path).verify()
