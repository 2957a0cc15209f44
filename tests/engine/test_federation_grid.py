"""Packets over Flower's Grid: every wait is bounded, a site that comes back is asked again, a name belongs to a key."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import Message
from flwr.supercore.task_identity import TaskIdentity

from sordino.engine.federation import grid as module
from sordino.engine.federation import wire
from sordino.engine.federation.certificates import certify
from sordino.engine.federation.grid import TRIES, GridTransport
from sordino.engine.federation.keyring import Keyring
from sordino.engine.federation.signing import load_private, seal
from sordino.engine.federation.wire import Packet, from_records, pack, to_records


@dataclass
class Script:
    """A Grid of Flower's messages whose nodes do what a test says: ``behave`` returns a reply, an error or None."""

    nodes: dict[int, tuple[str, str]]
    behave: Callable[[int, bytes], bytes | str | None]
    ring: Keyring | None = None
    """Nodes have the keys of the sites they are named after, and sign with them."""
    pushed: list[tuple[int, bytes]] = field(default_factory=list)
    replies: dict[str, Any] = field(default_factory=dict)

    def get_nodes(self) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(node_id=node, name=name, last_activated_at=since, public_key=self._key(name))
            for node, (name, since) in self.nodes.items()
        ]

    def _key(self, name: str) -> bytes:
        members = {} if self.ring is None else self.ring.members()
        return members[name].node_key if name in members else b"somebody else's"

    def _signed(self, node: int, request: bytes, reply: bytes) -> bytes:
        name = self.nodes[node][0]
        return reply if self.ring is None else seal(load_private(self.ring.keys.private(name)), name, request, reply)

    def push_messages(self, messages: list[Message]) -> list[str]:
        ids = []
        for one in messages:
            node, data = one.metadata.dst_node_id, from_records(one.content)
            self.pushed.append((node, data))
            ids.append(f"message {len(self.pushed)}")
            reply = self.behave(node, data)
            if isinstance(reply, bytes):
                content = to_records(self._signed(node, data, reply))
                answer: Any = SimpleNamespace(has_error=lambda: False, content=content)
            elif isinstance(reply, str):
                answer = SimpleNamespace(has_error=lambda: True, error=SimpleNamespace(code=1, reason=reply))
            else:
                continue
            answer.metadata = SimpleNamespace(reply_to_message_id=ids[-1])
            self.replies[ids[-1]] = answer
        return ids

    def pull_messages(self, ids: list[str]) -> list[Any]:
        return [self.replies.pop(one) for one in list(ids) if one in self.replies]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "POLL", 0.01)
    monkeypatch.setattr(module, "LOOK", 0.02)
    monkeypatch.setattr(module, "WHO", 0.2)
    for name in ("_task_id", "_run_id", "_node_id"):  # what Flower knows of the process that makes a message
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Keyring:
    return Keyring(certify(tmp_path_factory.mktemp("keys"), ["a", "b"]))


def talk(script: Script, seconds: float = 0.5, names: tuple[str, ...] = ("a", "b")):
    """Ask every site once; the replies by name, and how long it took."""
    found: dict[str, bytes] = {}
    requests = [(name, f"to {name}".encode()) for name in names]
    began = time.monotonic()
    GridTransport(script, script.ring).exchange(
        requests, seconds, lambda i, reply: found.__setitem__(requests[i][0], reply)
    )
    return found, time.monotonic() - began


def test_replies_come_back_to_who_was_asked_and_nobody_waits_longer(ring: Keyring):
    script = Script({1: ("a", "t"), 2: ("b", "t")}, lambda node, data: data[::-1], ring)
    found, took = talk(script, seconds=30.0)
    assert found == {"a": b"a ot", "b": b"b ot"}
    assert took < 2.0


def test_a_silent_site_costs_the_bound_and_no_more(ring: Keyring):
    script = Script({1: ("a", "t"), 2: ("b", "t")}, lambda node, data: data if node == 1 else None, ring)
    found, took = talk(script)
    assert set(found) == {"a"}
    assert 0.5 <= took < 0.9
    assert len(script.pushed) == 2, "a node that stays is asked once"


def test_a_site_that_comes_back_within_the_bound_gets_the_same_packet_again(ring: Keyring):
    script = Script({1: ("a", "first start")}, lambda node, data: None, ring)
    began = time.monotonic()

    def behave(node: int, data: bytes) -> bytes | None:
        return b"here" if script.nodes[1][1] == "second start" else None

    def nodes() -> list[SimpleNamespace]:
        if time.monotonic() - began > 0.2:
            script.nodes[1] = ("a", "second start")
        return Script.get_nodes(script)

    script.behave = behave
    script.get_nodes = nodes
    found, _ = talk(script, seconds=5.0, names=("a",))
    assert found == {"a": b"here"}
    assert script.pushed == [(1, b"to a")] * 2


def test_a_site_whose_process_keeps_dying_is_given_up_before_it_has_paid_often(ring: Keyring):
    script = Script({1: ("a", "t")}, lambda node, data: "the site's process does not answer", ring)
    found, took = talk(script, seconds=30.0, names=("a",))
    assert found == {}
    assert len(script.pushed) == TRIES
    assert took < 5.0


def test_an_error_of_flowers_speaks_for_nobody(ring: Keyring):
    """It is not signed, so it cannot refuse in a site's name: the site is asked again, and then it is missing."""
    script = Script({1: ("a", "t")}, lambda node, data: "refused: says somebody", ring)
    found, _ = talk(script, names=("a",))
    assert found == {}


def test_a_node_with_another_key_is_nobody(ring: Keyring):
    script = Script({1: ("a", "t"), 2: ("", "t"), 3: ("c", "t")}, lambda node, data: data, ring)
    assert GridTransport(script, ring).names() == {"a"}


def test_without_authentication_nodes_are_asked_for_their_names():
    def behave(node: int, data: bytes) -> bytes | None:
        if node == 3:
            return None
        return pack(Packet(wire.FACTS, {"name": "ab"[node - 1]}))

    script = Script({1: ("", "t"), 2: ("", "t"), 3: ("", "t")}, behave)
    transport = GridTransport(script, None)
    assert transport.names() == {"a", "b"}
    asked = len(script.pushed)
    assert transport.names() == {"a", "b"}
    assert len(script.pushed) == asked, "who answered is known, who did not is left alone for a while"
