"""A spy on the wire: everything a site sent must be a charged release, byte for byte, or a declared public fact."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from sordino.engine.federation import wire
from sordino.engine.federation.wire import unpack

FACTS = {
    wire.FACTS: {
        *("name", "records", "held", "epsilon", "delta", "adjacency", "key"),
        *("releases", "spent_epsilon", "run_epsilon", "replace_one_epsilon", "own_epsilon"),
        *("against", "not_private", "composition", "training_epsilon", "held_epsilon", "attack"),
    },
    wire.ACCEPTED: {"payable", "evaluations"},
    wire.ANSWER: {"round", "copy", "descriptor"},
    wire.UPLOAD: {"round", "copy", "descriptor"},
    wire.COUNTS: {"round"},
    wire.REFUSED: {"reason", "budget", "name", "records", "held", "epsilon", "delta", "adjacency"},
    wire.UNAVAILABLE: set(),
}
"""What a reply of each kind may say in plain; all of it is a declared fact, or follows from the ledger's counts."""


def check_wire(replies: Iterable[bytes], ledger: Path, private: bool = True) -> int:
    """Check every reply of one site; returns how many were releases. A method that is NOT PRIVATE charges nothing."""
    with sqlite3.connect(f"file:{ledger}?mode=ro", uri=True) as book:
        rows = book.execute("SELECT number, body, request FROM entries WHERE kind = 'stored'").fetchall()
        charged = book.execute("SELECT number, request FROM entries WHERE kind = 'charge'").fetchall()
    stored = {json.loads(body)["sha256"]: (number, request) for number, body, request in rows}
    releases = 0
    for reply in replies:
        packet = unpack(reply)
        assert set(packet.facts) <= FACTS[packet.kind], packet.facts
        if packet.tensors:
            assert packet.kind in (wire.ANSWER, wire.UPLOAD, wire.COUNTS)
            releases += 1
            if not private:
                continue
            number, request = stored[hashlib.sha256(reply).hexdigest()]
            assert any(paid < number and one == request for paid, one in charged), "stored without a charge before it"
    return releases
