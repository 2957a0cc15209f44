"""Attacks: what somebody would try who wants to publish the break. Each must fail here, and say so when it does not.

One federation over a real network serves all attacks on it; nobody trains until somebody asks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))  # where the rigs of federations are


@pytest.fixture(scope="session")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """Three sites and a server with TLS and keys, as processes. Cleo's key came after the server had started."""
    pytest.importorskip("flwr")
    from federation_network import NAMES, Network

    laid = Network.lay(tmp_path_factory.mktemp("attacked"), dict.fromkeys(NAMES, 200.0))
    late = laid.keys.public("cleo").read_bytes()
    laid.keys.public("cleo").unlink()
    with laid:
        laid.keys.public("cleo").write_bytes(late)
        time.sleep(1.1)  # a look into the folder holds for a second
        laid.link.refresh()
        log, until = laid.folder / "link" / "superlink.log", time.monotonic() + 60
        while log.read_text().count("Activated node_id") < len(NAMES) and time.monotonic() < until:
            time.sleep(0.2)
        yield laid
