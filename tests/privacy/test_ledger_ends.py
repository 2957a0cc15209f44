"""However a process ends, short of a kill, its ledger is sealed; and then a changed byte is found wherever it is."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from ledger_cases import REQUEST, charge, ended_well, forked, small_ledger

from sordino.errors import BadInput, LedgerDamaged
from sordino.privacy import ledger_file
from sordino.privacy.ledger import Ledger
from sordino.privacy.ledger_format import anchor_path, read_anchor

SITE = """\
[site]
name = "north"
server = "127.0.0.1:1"
[data]
path = "north.csv"
[data.schema]
target = "sick"
classes = ["no", "yes"]
[data.schema.numeric]
age = [0, 100]
[budget]
epsilon = 2.0
delta = 1e-5
"""

STUDY = """\
[study]
rounds = 100000
[data]
name = "digits"
records = 200
clients = 2
[budgets]
epsilon = 50.0
[model]
name = "logistic"
[training]
evaluate = 100000
"""


def sealed(path: Path) -> bool:
    anchor = read_anchor(path)
    return anchor is not None and anchor.seal is not None


def work(path: Path, simulated: bool, end: BaseException | None) -> None:
    """What a site or a simulation does with a ledger, and how it ends."""
    with Ledger(path, durable=not simulated) as ledger:
        for number in range(8):
            ledger.charge([charge(f"round {number}")])
        if not simulated:
            for number in range(4):
                ledger.store("hospital 3", "a", f"round {number}", REQUEST, os.urandom(3000))
            ledger.forget("hospital 3", "a", keep=1)  # leaves pages that nothing uses
        if end is not None:
            raise end


def made(path: Path, simulated: bool, end: BaseException | None) -> Path:
    path.parent.mkdir()
    small_ledger(path, turns=20, simulated=simulated).close()
    with suppress(ValueError, KeyboardInterrupt):
        work(path, simulated, end)
    return path


def terminated(command: list[str], folder: Path, begun: Path, least: int = 1) -> int:
    """Start a command, send it SIGTERM once its ledger holds entries, and return its exit code."""
    with open(folder / "said", "wb") as said:
        child = subprocess.Popen([sys.executable, "-m", "sordino", *command], cwd=folder, stdout=said, stderr=said)
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until and child.poll() is None:
            anchor = read_anchor(begun) if begun.exists() else None
            if anchor is not None and anchor.entries >= least:
                break
            time.sleep(0.05)
        assert child.poll() is None, (folder / "said").read_text()
        child.send_signal(signal.SIGTERM)
        return child.wait(60)
    finally:
        child.kill()


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Ledgers of sites and simulations that ended in every way but a kill."""
    folder = tmp_path_factory.mktemp("ended")
    ways = {"return": None, "exception": ValueError("something else"), "ctrl-c": KeyboardInterrupt()}
    found = [made(folder / f"{how}-{s}" / "ledger.db", s, end) for how, end in ways.items() for s in (False, True)]
    site, run = folder / "site", folder / "run"
    for place in (site, run):
        place.mkdir()
    (site / "SITE.toml").write_text(SITE)
    (site / "north.csv").write_text("age,sick\n" + "30,no\n40,yes\n" * 20)
    assert terminated(["join", "SITE.toml", "--insecure"], site, site / "ledger.db", 2) == 130
    (run / "study.toml").write_text(STUDY)
    assert terminated(["run", "study.toml", "--out", "out"], run, run / "out" / "ledger.db", 20) == 130
    return [*found, site / "ledger.db", run / "out" / "ledger.db"]


def test_every_end_but_a_kill_seals(ended: list[Path]) -> None:
    assert len(ended) == 8
    for path in ended:
        assert sealed(path), path
        with Ledger(path, readonly=True) as ledger:
            assert ledger.verify()


def test_a_random_byte_in_two_hundred_ledgers_is_found_in_all(ended: list[Path], tmp_path: Path) -> None:
    chance = random.Random(0)
    header = [24, 27, 36, 39, 92, 96, 99]  # counters that no entry depends on: changes, free pages, versions
    missed = []
    for number in range(200):
        source = ended[number % len(ended)]
        path = Path(shutil.copy(source, tmp_path / "ledger.db"))
        shutil.copy(anchor_path(source), anchor_path(path))
        victim = anchor_path(path) if number % 20 == 19 else path
        data = bytearray(victim.read_bytes())
        place = header[number % len(header)] if number % 10 == 0 else chance.randrange(len(data))
        data[place] ^= chance.randrange(1, 256)
        victim.write_bytes(bytes(data))
        try:
            with Ledger(path, readonly=True) as ledger:
                ledger.verify()
            missed.append((source, place))
        except (LedgerDamaged, BadInput):
            pass
    assert not missed


def test_a_byte_changed_while_a_site_has_its_ledger_open_is_found(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    small_ledger(path, turns=50, epsilon=4.0).close()
    ledger = Ledger(path)
    chance = random.Random(1)
    for number in range(20):
        ledger.charge([charge(f"round {number}", count=1)])
        assert sealed(path)
        with Ledger(path, readonly=True) as other:
            assert other.verify()
        whole = path.read_bytes()
        data = bytearray(whole)
        data[chance.randrange(len(data))] ^= 0x40
        path.write_bytes(bytes(data))
        with pytest.raises((LedgerDamaged, BadInput)):
            Ledger(path, readonly=True).verify()
        if number % 4 == 0:
            with pytest.raises((LedgerDamaged, BadInput)):  # nor does the site seal it over
                ledger.charge([charge("never", count=1)])
        path.write_bytes(whole)
    ledger.close()
    assert sealed(path)


def test_a_killed_site_left_a_seal_with_its_last_charge(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    small_ledger(path).close()

    def child() -> None:
        Ledger(path).charge([charge("round 1")])
        os.kill(os.getpid(), signal.SIGKILL)

    assert not ended_well(forked(child))
    assert sealed(path)
    assert Ledger(path, readonly=True).verify()


def test_a_refused_or_empty_transaction_leaves_the_seal_on(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    ledger = small_ledger(path)
    with pytest.raises(BadInput):
        ledger.charge([charge("round 1", client="nobody")])
    assert sealed(path)
    ledger.close_run("no such run")
    assert sealed(path)
    ledger.close()


def test_what_is_damaged_is_not_sealed_over(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    small_ledger(path).close()
    older = path.read_bytes()

    def child() -> None:
        with Ledger(path) as ledger:
            ledger.charge([charge("round 1")])
            path.write_bytes(older)
            raise ValueError("an error of another kind")

    assert not ended_well(forked(child))
    with pytest.raises(LedgerDamaged, match="older copy"):
        Ledger(path)


def test_a_large_ledger_is_sealed_where_time_allows_and_always_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_file, "SEALED_ALWAYS", 0)
    monkeypatch.setattr(ledger_file, "SEALING", 1e-9)
    path = tmp_path / "ledger.db"
    ledger = small_ledger(path)
    ledger.charge([charge("round 1")])
    assert not sealed(path)
    with Ledger(path, readonly=True) as other:
        assert not other.verify()  # what it says: not every byte was covered
    ledger.close()
    assert sealed(path)
