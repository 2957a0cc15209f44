"""A fault drill with the commands as people run them: random kills of sites and of every part of the server."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from federation_network import NAMES, Network
from federation_rig import table
from federation_spy import check_wire

import sordino as sd
from sordino.engine.federation.processes import Child
from sordino.privacy.ledger import Ledger

KILLS = 20
ROUNDS = 12
BOUND = 15.0
LONGEST = 560.0


@pytest.mark.slow
@pytest.mark.parametrize("trust", [{}, {"noise": "shared", "dropouts": 1}], ids=["own noise", "shared noise"])
def test_training_survives_twenty_random_kills(tmp_path: Path, trust: dict):
    """It finishes, no ledger is below what was sent, nobody is over budget, no wait is longer than was said.

    With shared noise no sum is opened that is not whole: one that was would be of the size of its masks.
    """
    network = Network.lay(tmp_path, dict.fromkeys(NAMES, 16.0))
    steps = 1 if trust else 2
    study = table("dp-fedavg", network.clients, rounds=ROUNDS, steps=steps, rate=0.2, lr=0.5) | {"trust": trust}
    study["deployment"] |= {"timeout": BOUND, "enrol": 120.0}
    (tmp_path / "study.toml").write_text(_toml(study))
    drill = Drill(network, tmp_path / "run")
    try:
        drill.go(random.Random(20))
    finally:
        drill.stop()
    result = json.loads((drill.folder / "result.json").read_text())
    assert len(result["rounds"]) == ROUNDS
    assert len(drill.killed) == KILLS, drill.killed
    assert {what for what, _ in drill.killed} >= {"site", "server"}
    for name in NAMES:
        releases = check_wire(set(network.sent(name)), tmp_path / f"{name}.db")  # a set: a resend is the same bytes
        with Ledger(tmp_path / f"{name}.db", readonly=True) as book:
            book.verify()
            charged = sum(event.count for event in book.spent(name)) / steps
            assert charged >= releases > 0
            assert book.epsilon()[name] <= 16.0
    assert sd.load(drill.folder).weights.abs().max() < 100.0
    assert "makes no sense" not in (drill.folder / "coordinator.log").read_text()
    waits = re.findall(r"answered in ([\d.]+) s", (drill.folder / "coordinator.log").read_text())
    assert len(waits) >= ROUNDS
    assert max(map(float, waits)) <= BOUND + 5.0


class Drill:
    """The server and the sites as processes, somebody who kills them, and somebody who starts them again."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self.folder = network, folder
        self.killed: list[tuple[str, str]] = []
        self.server: Child | None = None

    def go(self, chance: random.Random) -> None:
        for name in NAMES:
            self.network.start(name)
        started, due = time.monotonic(), 0.0
        while not (self.folder / "result.json").exists():
            assert time.monotonic() - started < LONGEST, f"not finished: {self.killed}"
            if self.server is None or not self.server.running:
                self._serve()
            for name in NAMES:
                if not self.network.sites[name].running:
                    self.network.start(name)
            first_round = (self.folder / "log.jsonl").exists()
            if first_round and len(self.killed) < KILLS and time.monotonic() > due:
                self._kill(chance)
                due = time.monotonic() + chance.uniform(2.0, 14.0)
            time.sleep(0.3)

    def _serve(self) -> None:
        arguments = [sys.executable, "-m", "sordino", "serve", str(self.network.folder / "study.toml")]
        arguments += ["--keys", str(self.network.keys.folder), "--port", str(self.network.link.port)]
        arguments += ["--out", str(self.folder), "--resume"]
        self.server = Child(arguments, dict(os.environ), self.network.folder / "serve.log")

    def _kill(self, chance: random.Random) -> None:
        """Kill one process without warning: a site or its SuperNode; the server, its SuperLink or its coordinator."""
        kinds = {
            "site": [self.network.sites[chance.choice(NAMES)].process.pid],
            "supernode": _below(self.network.sites[chance.choice(NAMES)].process.pid, "federation.worker"),
            "server": [self.server.process.pid],
            "superlink": _below(self.server.process.pid, "flower-superlink"),
            "coordinator": _below(self.server.process.pid, "flwr-serverapp"),
        }
        kind = chance.choices(list(kinds), weights=[5, 3, 2, 2, 3])[0]
        for pid in kinds[kind][:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.killed.append((kind, time.strftime("%X")))

    def stop(self) -> None:
        for one in (self.server, *self.network.sites.values()):
            if one is not None:
                one.stop()


def _below(pid: int, word: str) -> list[int]:
    """Processes that ``pid`` started, or those that these started, and so on, with ``word`` in their command."""
    rows = subprocess.run(["ps", "-ewwo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    table = [line.split(None, 2) for line in rows.splitlines()]
    found, family = [], {pid}
    for _ in range(6):
        family |= {int(row[0]) for row in table if int(row[1]) in family}
    for row in table:
        if int(row[0]) in family - {pid} and len(row) > 2 and word in row[2]:
            found.append(int(row[0]))
    return found


def _toml(study: dict) -> str:
    """A study's tables as a file; JSON's numbers, texts and lists are TOML's too."""
    lines = []
    for section, keys in study.items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    return "\n".join(lines)
