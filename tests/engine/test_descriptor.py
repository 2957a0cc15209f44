"""Charters and descriptors: one text for one meaning, and another for every other."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from federation_rig import five_clients, table

from sordino.engine.federation.descriptor import (
    Descriptor,
    charter_of,
    hashed_tensors,
    participants_of,
    read_charter,
)
from sordino.engine.federation.masks import signed_key
from sordino.errors import BadInput, SordinoError
from sordino.study.deploy import prepare
from sordino.study.file import make_study

ABOUT = Descriptor("charter", 1, 0, 0, ("anna", "bert"), (0.1,), "weights", "broadcast")


@pytest.fixture(scope="module")
def planned():
    clients = five_clients()
    study = table("adaptdp", clients, 2, steps=1, rate=0.2, lr=0.5)
    study["trust"] = {"noise": "shared", "colluders": 1, "dropouts": 1}
    ready = prepare(make_study(study), "run1")
    facts = {
        name: {"records": len(mine), "epsilon": b.epsilon, "delta": b.delta, "adjacency": "zero-out"}
        for name, mine, b in zip(clients.names, clients.train, clients.budgets)
    }
    return ready, ready.plan(facts)


@pytest.fixture(scope="module")
def charter(planned):
    ready, plan = planned
    enrolled = ec.generate_private_key(ec.SECP256R1())
    keys = {c.name: signed_key(enrolled, c.name, "run1", X25519PrivateKey.generate()) for c in plan.clients}
    return charter_of(plan, ready.brief, keys)


def test_a_charter_is_read_as_it_was_written(charter):
    again = read_charter(json.loads(charter.text))
    assert again == charter
    assert again.digest == charter.digest
    assert [one.name for one in again.releases[1].parts] == ["squared-norm"]
    assert [len(one.rates) for one in again.seats] == [2] * 5


def test_every_number_in_a_charter_changes_its_digest(charter):
    """Whatever a server could tell one site and not another."""

    def leaves(value, path=()):
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, one in items:
            yield from leaves(one, (*path, key))
        if not isinstance(value, (dict, list)):
            yield path

    plain, seen = json.loads(charter.text), {charter.digest}
    for path in leaves(plain):
        changed = json.loads(charter.text)
        place = changed
        for key in path[:-1]:
            place = place[key]
        old = place[path[-1]]
        place[path[-1]] = not old if isinstance(old, bool) else old + ("0" if isinstance(old, str) else old * 1e-9)
        if isinstance(old, int) and not isinstance(old, bool):
            place[path[-1]] = old + 1
        try:
            digest = read_charter(changed).digest
        except BadInput:
            continue
        assert digest not in seen, path
        seen.add(digest)
    assert len(seen) > 40


def test_a_run_whose_sites_add_their_own_noise_has_no_charter(planned):
    ready, plan = planned
    with pytest.raises(SordinoError, match="no charter"):
        charter_of(replace(plan, sharing=None), ready.brief, {})


@pytest.mark.parametrize(
    "change",
    [
        {"charter": "another"},
        {"round": 2},
        {"attempt": 1},
        {"release": 1},
        {"participants": ("anna", "bert", "cleo")},
        {"participants": ("annabert",)},
        {"bounds": (0.1000001,)},
        {"bounds": (0.1, 0.1)},
        {"weights": "others"},
        {"broadcast": "another"},
    ],
)
def test_everything_in_a_descriptor_changes_its_digest(change):
    assert replace(ABOUT).digest == ABOUT.digest
    assert replace(ABOUT, **change).digest != ABOUT.digest


@pytest.mark.parametrize(
    "said", [[], "client-00", None, ["client-01", "client-00"], ["client-00"] * 2, ["nobody"], [1], {"client-00": 1}]
)
def test_participants_are_sites_in_order_each_once(charter, said):
    with pytest.raises(BadInput, match=r"takes? part in a round"):
        participants_of(charter, said)


def test_tensors_are_told_apart_by_name_kind_shape_and_every_bit():
    one = torch.tensor([1.0, 2.0])
    others = [
        {"b": one},
        {"a": one.double()},
        {"a": one[None]},
        {"a": torch.tensor([1.0, -2.0])},
        {"a": torch.tensor([0.0, 2.0])},
        {"a": torch.tensor([-0.0, 2.0])},
        {"a": one[:1], "b": one[1:]},
        {},
    ]
    found = [hashed_tensors({"a": one}), hashed_tensors({"a": one}, {"lr": 0.5}), *map(hashed_tensors, others)]
    assert len(set(found)) == len(found)
    assert hashed_tensors({"a": one, "b": one}) == hashed_tensors({"b": one, "a": one.clone()})
