"""A run over the network in which one key comes late, one is rotated and one is revoked, while it goes on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from federation_network import NAMES, Network
from federation_rig import table

from sordino.engine.federation.keyring import revoke, rotate

ROUNDS = 8


def until(what: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.mark.slow
def test_keys_may_come_late_and_change_while_a_run_goes_on(tmp_path: Path):
    network = Network.lay(tmp_path, dict.fromkeys(NAMES, 200.0))
    late = network.keys.public("cleo").read_bytes()
    network.keys.public("cleo").unlink()
    study = table("dp-fedavg", network.clients, rounds=ROUNDS, steps=2, rate=0.2, lr=0.5)
    study["deployment"] |= {"timeout": 8.0, "enrol": 90.0}
    done: list[tuple[dict[str, Any], Path]] = []
    with network:
        thread = threading.Thread(target=lambda: done.append(network.run(study)))
        thread.start()
        folder = tmp_path / "run-0"
        until(lambda: (folder / "now.json").exists())
        network.keys.public("cleo").write_bytes(late)  # during enrolment: the run waits for her
        until(lambda: (folder / "log.jsonl").exists())
        first = json.loads((folder / "keys.json").read_text())
        revoke(network.keys, "bert")
        new = rotate(network.keys, "anna")
        network.sites["anna"].stop()
        network.start("anna")
        thread.join(300)
    (result, _), *_ = done
    took_part = [set(record["participants"]) for record in result["rounds"]]
    assert took_part[0] == set(NAMES)
    assert "bert" not in took_part[-1] | took_part[-2]
    assert "anna" in took_part[-1], "with her new key"
    assert all("cleo" in one for one in took_part)
    pinned = json.loads((folder / "keys.json").read_text())
    assert pinned == {**first, "anna": new}
