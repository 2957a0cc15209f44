"""kill -9 at any moment of charge → draw → store → send: the ledger never shows less than what was sent."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ledger_cases import REQUEST, charge, ended_well, forked, plan, small_ledger

from sordino.errors import BadInput
from sordino.privacy import ledger_file
from sordino.privacy.ledger import Ledger
from sordino.privacy.ledger_format import read_anchor

PLENTY = 100_000


def site(path: Path, sent: Path, stop_after: str = "") -> None:
    """A site that answers round after round for ever: resend what is stored, otherwise charge, draw, store, send."""

    def step(name: str) -> None:
        if name == stop_after:
            os.kill(os.getpid(), signal.SIGKILL)

    ledger = Ledger(path)
    log = os.open(sent, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    start = sent.read_bytes().count(b"\n")
    for number in range(start, PLENTY):
        key = f"round {number}"
        release = ledger.stored("hospital 3", "a", key, REQUEST)
        if release is None:
            ledger.charge([charge(key, count=1)])
            step("charge")
            release = os.urandom(300).hex().encode()
            step("draw")
            ledger.store("hospital 3", "a", key, REQUEST, release)
            step("store")
        os.write(log, release + b"\n")
        step("send")


def check(path: Path, sent: Path) -> int:
    """What was sent was charged, and every whole release that was sent is the stored one. Returns charges."""
    lines = sent.read_bytes().split(b"\n") if sent.exists() else [b""]
    with Ledger(path) as ledger:
        ledger.verify()
        charged = sum(event.count for event in ledger.spent("hospital 3"))
        assert charged >= len([line for line in lines if line])
        for number, line in enumerate(lines[:-1]):
            assert ledger.stored("hospital 3", "a", f"round {number}", REQUEST) == line
    return charged


def drill(folder: Path, kills: int, seed: int) -> None:
    path, sent = folder / "ledger.db", folder / "sent"
    small_ledger(path, turns=PLENTY, epsilon=1e6).close()
    moments = random.Random(seed)
    charged = 0
    for _ in range(kills):
        child = forked(lambda: site(path, sent))
        time.sleep(moments.uniform(0.0, 0.12))
        os.kill(child, signal.SIGKILL)
        assert not ended_well(child)
        now = check(path, sent)
        assert now >= charged
        charged = now
    assert sent.read_bytes().count(b"\n") > 0


def test_twenty_random_kills_lose_no_charge(tmp_path: Path) -> None:
    drill(tmp_path, kills=20, seed=0)


@pytest.mark.slow
def test_two_hundred_random_kills_lose_no_charge(tmp_path: Path) -> None:
    drill(tmp_path, kills=200, seed=1)


@pytest.mark.parametrize(
    ("step", "charges", "stored", "sent_lines"),
    [("charge", 1, False, 0), ("draw", 1, False, 0), ("store", 1, True, 0), ("send", 1, True, 1)],
)
def test_killed_after_each_step(tmp_path: Path, step: str, charges: int, stored: bool, sent_lines: int) -> None:
    path, sent = tmp_path / "ledger.db", tmp_path / "sent"
    small_ledger(path).close()
    assert not ended_well(forked(lambda: site(path, sent, stop_after=step)))
    with Ledger(path) as ledger:
        assert sum(event.count for event in ledger.spent("hospital 3")) == charges
        assert (ledger.stored("hospital 3", "a", "round 0", REQUEST) is not None) == stored
    assert sent.read_bytes().count(b"\n") == sent_lines


@pytest.mark.parametrize("moment", ["before the anchor", "after the anchor"])
def test_killed_around_the_anchor_it_lags_and_never_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    path = tmp_path / "ledger.db"
    small_ledger(path).close()
    real: Callable[..., None] = ledger_file.write_anchor

    def deadly(ledger: Path, anchor: ledger_file.Anchor, durable: bool = True) -> None:
        if anchor.entries < 4:  # the seal comes off first, with the three entries there are
            return real(ledger, anchor, durable)
        if moment == "after the anchor":
            real(ledger, anchor, durable)
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    def child() -> None:
        monkeypatch.setattr(ledger_file, "write_anchor", deadly)
        Ledger(path).charge([charge("round 1")])

    assert not ended_well(forked(child))
    anchor = read_anchor(path)
    assert anchor is not None
    assert anchor.entries == (3 if moment == "before the anchor" else 4)
    with Ledger(path) as ledger:
        assert ledger.head[0] == 4
        assert sum(event.count for event in ledger.spent("hospital 3")) == 10
    caught_up = read_anchor(path)
    assert caught_up is not None
    assert caught_up.entries == 4


def test_killed_half_way_through_a_write_it_is_as_before(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with small_ledger(path) as ledger:
        before = ledger.head

    def child() -> None:
        ledger = Ledger(path)
        db = ledger._file.db
        db.execute("PRAGMA cache_size = 1")  # pages of the open transaction go to disk early
        with ledger._file.transaction() as draft:
            draft.add("not-private", {"reason": "x" * 50_000}, client="hospital 3")
            db.execute("INSERT INTO releases VALUES (1, zeroblob(200000))")
            db.execute("INSERT INTO releases VALUES (2, zeroblob(200000))")
            os.kill(os.getpid(), signal.SIGKILL)

    assert not ended_well(forked(child))
    assert (tmp_path / "ledger.db-journal").stat().st_size > 0
    anchor = read_anchor(path)
    assert anchor is not None
    assert anchor.seal is None  # it came off before the file was touched: undoing need not restore every unused byte
    with pytest.raises(BadInput, match="open it for writing once"):
        Ledger(path, readonly=True)
    with Ledger(path) as ledger:
        ledger.verify()
        assert ledger.head == before


def test_killed_while_it_is_created_it_can_be_created_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    moments = random.Random(2)

    def child() -> None:
        while True:
            small_ledger(path).close()

    for _ in range(10):
        for file in tmp_path.iterdir():
            file.unlink()
        victim = forked(child)
        time.sleep(moments.uniform(0.0, 0.02))
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        with small_ledger(path) as ledger:
            assert ledger.declare([plan(5)]) == {"hospital 3": 5}
