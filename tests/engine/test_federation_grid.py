"""Packets over Flower's Grid: every wait is bounded, a site that comes back is asked again, names belong to keys."""

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
from sordino.engine.federation.door import from_records, to_records
from sordino.engine.federation.grid import TRIES, GridTransport
from sordino.engine.federation.wire import Packet, pack, unpack


@dataclass
class Script:
    """A Grid of Flower's messages whose nodes do what a test says: ``behave`` returns a reply, an error or None."""

    nodes: dict[int, tuple[str, str]]
    behave: Callable[[int, bytes], bytes | str | None]
    pushed: list[tuple[int, bytes]] = field(default_factory=list)
    replies: dict[str, Any] = field(default_factory=dict)

    def get_nodes(self) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(node_id=node, name=name, last_activated_at=since)
            for node, (name, since) in self.nodes.items()
        ]

    def push_messages(self, messages: list[Message]) -> list[str]:
        ids = []
        for one in messages:
            node, data = one.metadata.dst_node_id, from_records(one.content)
            self.pushed.append((node, data))
            ids.append(f"message {len(self.pushed)}")
            reply = self.behave(node, data)
            if isinstance(reply, bytes):
                answer: Any = SimpleNamespace(has_error=lambda: False, content=to_records(reply))
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


def talk(script: Script, seconds: float = 0.5, trusting: bool = False, names: tuple[str, ...] = ("a", "b")):
    """Ask every site once; the replies by name, and how long it took."""
    found: dict[str, bytes] = {}
    requests = [(name, f"to {name}".encode()) for name in names]
    began = time.monotonic()
    GridTransport(script, trusting).exchange(
        requests, seconds, lambda i, reply: found.__setitem__(requests[i][0], reply)
    )
    return found, time.monotonic() - began


def test_replies_come_back_to_who_was_asked_and_nobody_waits_longer():
    script = Script({1: ("a", "t"), 2: ("b", "t")}, lambda node, data: data[::-1])
    found, took = talk(script, seconds=30.0)
    assert found == {"a": b"a ot", "b": b"b ot"}
    assert took < 2.0


def test_a_silent_site_costs_the_bound_and_no_more():
    script = Script({1: ("a", "t"), 2: ("b", "t")}, lambda node, data: data if node == 1 else None)
    found, took = talk(script)
    assert set(found) == {"a"}
    assert 0.5 <= took < 0.9
    assert len(script.pushed) == 2, "a node that stays is asked once"


def test_a_site_that_comes_back_within_the_bound_gets_the_same_packet_again():
    script = Script({1: ("a", "first start")}, lambda node, data: None)
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


def test_a_site_whose_process_keeps_dying_is_given_up_before_it_has_paid_often():
    script = Script({1: ("a", "t")}, lambda node, data: "unavailable: the site's process does not answer")
    found, took = talk(script, seconds=30.0, names=("a",))
    assert found == {}
    assert len(script.pushed) == TRIES
    assert took < 5.0


def test_a_guards_refusal_is_a_refusal():
    script = Script({1: ("a", "t")}, lambda node, data: "<'refused: the app that was sent is not sordino's shell'>")
    found, _ = talk(script, names=("a",))
    assert unpack(found["a"]).kind == wire.REFUSED
    assert "not sordino's shell" in unpack(found["a"]).facts["reason"]


def test_a_node_without_a_registered_name_is_nobody():
    script = Script({1: ("a", "t"), 2: ("", "t")}, lambda node, data: pack(Packet(wire.FACTS, {"name": "b"})))
    assert GridTransport(script).names() == {"a"}


def test_without_authentication_nodes_are_asked_for_their_names():
    def behave(node: int, data: bytes) -> bytes | None:
        if node == 3:
            return None
        return pack(Packet(wire.FACTS, {"name": "ab"[node - 1]}))

    script = Script({1: ("", "t"), 2: ("", "t"), 3: ("", "t")}, behave)
    transport = GridTransport(script, trusting=True)
    assert transport.names() == {"a", "b"}
    asked = len(script.pushed)
    assert transport.names() == {"a", "b"}
    assert len(script.pushed) == asked, "who answered is known, who did not is left alone for a while"
