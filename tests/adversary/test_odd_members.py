"""One member with odd declarations, offers, uploads or last words cannot stop a run: only that member is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_rig import Rig, five_clients, table
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.engine.federation import wire
from sordino.engine.federation.declaration import check_declaration, check_payable, check_spent, readable
from sordino.engine.federation.limits import Policy
from sordino.engine.federation.wire import Packet, pack, unpack
from sordino.errors import BadInput
from sordino.study.conduct import conduct, set_up
from sordino.study.deploy import Served, prepare
from sordino.study.file import make_study

HONEST = {"name": "client-00", "records": 300, "epsilon": 2.0, "delta": 1e-5, "adjacency": "zero-out"}

ODD: dict[str, dict[str, Any]] = {
    "records 10^30": {"records": 10**30},
    "no records": {"records": 0},
    "records as text": {"records": "300"},
    "records true": {"records": True},
    "half a record": {"records": 300.5},
    "fewer than a batch": {"records": 1},
    "delta 1e-320": {"delta": 1e-320},
    "delta 0.999": {"delta": 0.999},
    "delta not a number": {"delta": math.nan},
    "epsilon 1e308": {"epsilon": 1e308},
    "epsilon 10^400": {"epsilon": 10**400},
    "epsilon 1e-300": {"epsilon": 1e-300},
    "epsilon negative": {"epsilon": -math.inf},
    "epsilon a list": {"epsilon": [1.0]},
    "adjacency missing": {"adjacency": None},
    "adjacency unknown": {"adjacency": "none"},
    "adjacency another": {"adjacency": "replace-one"},
    "adjacency a dict": {"adjacency": {}},
}


@pytest.fixture(scope="module")
def clients():
    return five_clients((2.0, 8.0, math.inf))


def run_with(
    tmp_path: Path, clients: Any, change: Callable[[Packet, Packet], bytes | None], absent: str = "refuse"
) -> dict[str, Any]:
    """A run whose first member's replies are changed: ``change(request, reply)`` gives other bytes, or None."""
    study = table("dp-fedavg", clients, rounds=2, steps=2, batch=16, lr=0.5)
    study["deployment"] |= {"enrol": 0.1, "timeout": 5.0, "absent": absent}

    def fault(name: str, request: bytes, reply: bytes) -> bytes:
        other = change(unpack(request), unpack(reply)) if name == "client-00" else None
        return reply if other is None else other

    with Rig(tmp_path / "sites", clients, study, everywhere=Policy()) as rig:
        rig.wires.fault = fault
        set_up(tmp_path / "run", make_study(study), resume=False)
        conduct(tmp_path / "run", rig.wires)
    result: dict[str, Any] = json.loads((tmp_path / "run" / "result.json").read_text())
    others = ["client-01", "client-02"]
    assert all(set(others) <= set(record["participants"]) for record in result["rounds"]), "the others go on"
    return result


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_an_odd_declaration_is_refused_and_the_others_go_on(tmp_path: Path, clients, odd: dict[str, Any]):
    def lie(asked: Packet, reply: Packet) -> bytes | None:
        return pack(replace(reply, facts={**reply.facts, **odd})) if asked.kind == wire.HELLO else None

    result = run_with(tmp_path, clients, lie)
    assert [one["client"] for one in result["privacy"]] == ["client-01", "client-02"]
    assert set(result["refused"]) == {"client-00"}


@pytest.mark.parametrize("odd", [10**30, -1, 3, 1.5, "2", None, True, [2]], ids=str)
def test_an_odd_number_of_payable_turns_is_refused_and_the_others_go_on(tmp_path: Path, clients, odd: Any):
    def lie(asked: Packet, reply: Packet) -> bytes | None:
        return pack(Packet(wire.ACCEPTED, {"payable": odd})) if asked.kind == wire.OFFER else None

    result = run_with(tmp_path, clients, lie)
    assert "payable" in result["refused"]["client-00"]
    assert all("client-00" not in record["participants"] for record in result["rounds"])


def deep(levels: int) -> bytes:
    """A packet whose facts are lists in lists."""
    facts = "[" * levels + "]" * levels
    about = json.dumps({"__metadata__": {"packet": '{"sordino":1,"kind":"facts","facts":{"name":' + facts + "}}"}})
    return len(about).to_bytes(8, "little") + about.encode()


@pytest.mark.parametrize("sent", [deep(200_000), b"", b"\xff" * 9, (1 << 60).to_bytes(8, "little")], ids=len)
def test_bytes_that_are_no_packet_are_refused_and_the_others_go_on(tmp_path: Path, clients, sent: bytes):
    result = run_with(tmp_path, clients, lambda asked, reply: sent if asked.kind == wire.HELLO else None, "go on")
    assert result["refused"] == {"client-00": "these bytes are no packet of sordino"}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_upload_that_is_not_finite_is_refused_and_the_others_go_on(tmp_path: Path, clients, value: float):
    def lie(asked: Packet, reply: Packet) -> bytes | None:
        if asked.kind != wire.TURN:
            return None
        return pack(replace(reply, tensors={name: torch.full_like(one, value) for name, one in reply.tensors.items()}))

    result = run_with(tmp_path, clients, lie)
    assert all("not finite" in record["refused"]["client-00"] for record in result["rounds"])


def test_odd_last_words_are_left_out_of_the_result(tmp_path: Path, clients):
    def lie(asked: Packet, reply: Packet) -> bytes | None:
        odd = {"spent_epsilon": -1.0, "releases": [{"what": {}}] * 3}
        return pack(replace(reply, facts={**reply.facts, **odd})) if asked.kind == wire.BYE else None

    told = {one["client"]: one["told_by"] for one in run_with(tmp_path, clients, lie)["privacy"]}
    assert told == {"client-00": "server", "client-01": "site", "client-02": "site"}


def test_a_reason_is_one_short_line_without_commands_to_a_terminal():
    assert readable("no\x1b[2J\nbudget" + "!" * 10_000) == "no [2J budget" + "!" * 287
    assert len(readable(10**5000)) < 40
    assert readable({"a": 1}) == "dict"


Json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from([*HONEST, "levels", "releases", "not_private", "spent_epsilon"]), Json))
def test_whatever_is_said_is_understood_or_refused(said: dict[str, Any]):
    for check in (lambda: check_declaration({**HONEST, **said}, "client-00", "zero-out"), lambda: check_spent(said)):
        try:
            found = check()
        except BadInput:
            continue
        assert json.loads(json.dumps(found)) == found or math.isinf(found["epsilon"])
    for one in said.values():
        try:
            assert 0 <= check_payable(one, 5) <= 5
        except BadInput:
            continue


@pytest.fixture(scope="module")
def ready(clients) -> Served:
    return prepare(make_study(table("dp-fedavg", clients, rounds=2, steps=2, batch=16, lr=0.5)), "run")


@settings(max_examples=15, deadline=None)
@given(
    records=st.sampled_from([1, 15, 16, 10**6, 10**12]),
    epsilon=st.sampled_from([1e-6, 1e-3, 1.0, 100.0, 1e4, math.inf]),
    delta=st.sampled_from([1e-30, 1e-12, 1e-5, 0.1]),
)
def test_what_passes_the_bounds_can_be_planned_or_is_left_out(
    ready: Served, records: int, epsilon: float, delta: float
):
    said = {**HONEST, "records": records, "epsilon": epsilon, "delta": delta}
    facts = {"client-00": check_declaration(said, "client-00", "zero-out"), "client-01": HONEST, "client-02": HONEST}
    kept, odd = ready.sound(facts)
    assert set(kept) | set(odd) == set(facts)
    assert set(odd) <= {"client-00"}
    assert len(ready.plan(kept).clients) == len(kept)


def test_a_study_that_suits_nobody_says_so_itself(clients):
    study = prepare(make_study(table("dp-fedavg", clients, steps=2, batch=10**9, lr=0.5)), "run")
    with pytest.raises(BadInput, match=r"training\.batch 1e\+09 is larger"):
        study.sound({"client-00": HONEST, "client-01": HONEST})
