"""Adapters at sites: a deployed run is its simulation, adapters alone travel, and no server moves the frozen part."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from federation_rig import Rig, simulated, table
from federation_spy import check_wire

import sordino as sd
from sordino import models
from sordino.client.rows import Records
from sordino.engine.federation import wire
from sordino.engine.federation.exchange import offer_of
from sordino.engine.federation.limits import Policy
from sordino.engine.federation.wire import Packet, pack, unpack
from sordino.privacy.gate import exact_sums

OWN = '''
import torch
from torch import nn

SCALE = 1.0


def net(shape, classes, scale=1.0):
    """Public weights, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        made = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, classes))
    with torch.no_grad():
        made[1].weight.mul_(SCALE * scale)
    return made


def frozen(shape, classes):
    """The same with a head that is trained, and no adapters."""
    made = net(shape, classes)
    made[1].requires_grad_(False)
    return made
'''

STEPS = {"steps": 2, "rate": 0.2, "lr": 0.2}
MLP = {"name": "mlp", "options": {"hidden": 12}, "lora": {"rank": 2, "alpha": 4}}
NET = {"name": "ownlora:net", "lora": {"rank": 2, "alpha": 4}}
SHARED = {"noise": "shared", "colluders": 1, "dropouts": 1}
OURS = Policy(models=("mlp", "ownlora:net", "ownlora:frozen"), colluders=0)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The module of a model of one's own, as it is installed everywhere."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "ownlora.py").write_text(OWN)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("ownlora")
    sys.modules.pop("ownlora", None)


def few(*epsilon: float) -> sd.data.Federation:
    digits = sd.data.load("digits").subset(80 * len(epsilon), seed=0)
    return digits.partition("iid", clients=len(epsilon), seed=1).with_budgets(list(epsilon), 1e-4)


@pytest.fixture(scope="module")
def clients() -> sd.data.Federation:
    return few(4.0, 16.0)


def study(clients, model: dict[str, Any], method: str = "dp-fedavg", **training: Any) -> dict[str, Any]:
    return {**table(method, clients, **{**STEPS, **training}), "model": model}


@pytest.mark.parametrize(
    ("method", "model", "trust"),
    [("dp-scaffold", MLP, None), ("dp-fedavg", {**NET, "lora": {"rank": 2, "train": ["3"]}}, SHARED)],
    ids=["noise of their own", "shared noise"],
)
def test_a_deployed_run_is_its_simulation_and_sends_nothing_but_adapters(own, tmp_path, method, model, trust):
    clients = few(4.0, 8.0) if trust is None else few(4.0, 4.0, 8.0, 8.0)
    words = study(clients, model, method, steps=2 if trust is None else 1)
    words |= {} if trust is None else {"trust": trust}
    alone = simulated(clients, words, tmp_path / "simulated")
    with Rig(tmp_path, clients, words, alone.key, alone.noises, everywhere=OURS) as rig:
        state = rig.train()
        for name in clients.names:
            check_wire([reply for who, _, reply in rig.wires.heard if who == name], tmp_path / f"{name}.db")
    torch.testing.assert_close(state.shown, alone.weights, atol=1e-5, rtol=0)
    assert alone.result["study"]["model"]["frozen"] == rig.ready.brief["frozen"]
    held = rig.ready.template.get_submodule("1.base").weight.detach()
    trained = sum(one.numel() for one in rig.ready.template.parameters() if one.requires_grad)
    assert trained < held.numel()
    sent = [unpack(data).tensors for _, request, reply in rig.wires.heard for data in (request, reply)]
    assert {one.shape[-1] for tensors in sent for one in tensors.values()} == {trained}
    row = held[0].numpy().tobytes()
    assert not any(row in data for _, *both in rig.wires.heard for data in both)


# What a server may not do


@pytest.fixture(scope="module")
def rig(own, tmp_path_factory, clients):
    """Sites that agreed to a run; ``read`` is told whenever one of them reads a record."""
    folder, whole = tmp_path_factory.mktemp("sites"), Records.at
    with Rig(folder, clients, study(clients, NET), everywhere=OURS) as made, pytest.MonkeyPatch.context() as patch:
        made.server, made.read = made.coordinator(), []
        patch.setattr(Records, "at", lambda self, where: made.read.append(where) or whole(self, where))
        yield made


def first(rig: Rig):
    return rig.wires.sites[rig.clients.names[0]]


def told(
    rig: Rig, brief: dict[str, Any], kind: str = wire.TURN, number: int = 1, clip: float = 1.0, **tensors: torch.Tensor
) -> Packet:
    """What the first site says to a request with this brief."""
    client = rig.server.course.plan.clients[0]
    facts = {"brief": brief, "offer": offer_of(client), "round": number, "copy": 0, "count": client.terms.count}
    facts |= {"since": 0, "public": {"lr": 0.2, "clip": clip}}
    if rig.charter is not None:
        facts |= {"charter": json.loads(rig.charter.text), "participants": sorted(rig.clients.names)}
    return unpack(first(rig).handle(pack(Packet(kind, facts, {"weights": rig.ready.start, **tensors}))))


def changed(rig: Rig, without: str = "", **more: Any) -> dict[str, Any]:
    """The run's brief with something else in it, as a server would send it."""
    brief = json.loads(json.dumps(rig.ready.brief | more))
    brief.pop(without, None)
    return brief


def assert_refused(rig: Rig, brief: dict[str, Any], word: str, **tensors: torch.Tensor) -> None:
    """With a reason that holds the word, whatever was asked for, before a record is read or anything is charged."""
    for kind in (wire.HELLO, wire.OFFER, wire.TURN):
        if tensors and kind != wire.TURN:
            continue
        reply = told(rig, brief, kind, **tensors)
        assert reply.kind == wire.REFUSED, reply
        assert word in reply.facts["reason"]
    site = first(rig)
    assert not rig.read
    assert sum(event.count for event in site.ledger.spent(site.account)) == 0


OTHER = "has other frozen weights here than at the server: install the same version of sordino (or of the module"


@pytest.mark.parametrize(
    "change",
    [
        {"frozen": "0" * 64},
        {"frozen": None},
        {"frozen": float("nan")},
        {"without": "frozen"},
        {"model": {"name": "ownlora:net", "options": {}}},  # all weights trained, under the name of the adapted model
        {"model": {"name": "ownlora:net", "options": {"scale": 2.0, "lora": NET["lora"]}}},
        {"model": {"name": "mlp", "options": {"hidden": 12, "lora": NET["lora"]}}},
    ],
    ids=str,
)
def test_other_or_missing_frozen_weights_are_refused_before_anything_is_charged(rig, change):
    assert_refused(rig, changed(rig, **change), OTHER)


@pytest.mark.parametrize(
    ("lora", "word"),
    [
        ({"rank": 2, "alpha": 4, "targets": ["1"]}, OTHER),
        ({"rank": 2, "alpha": 4, "train": ["3"]}, OTHER),
        ({"rank": 3, "alpha": 4}, "has other tensors here than at the server"),
        ({"rank": 10**12, "alpha": 4}, "is more than the inputs and outputs of any layer, at most 64"),
        ({"rank": 10**30, "alpha": 4}, "is more than the inputs and outputs of any layer, at most 64"),
        ({"rank": 2, "alpha": 1e39}, "it is a number above 0, such as 16, and no larger than float32 holds"),
        ({"rank": 2, "alpha": 10**400}, "it is a number above 0"),
        ({"rank": 2, "targets": 5}, "it is a list of names"),
        ({"rank": 2, "weights": [1.0]}, "no option weights"),
    ],
    ids=lambda one: str(one)[:40],
)
def test_other_adapters_than_those_of_the_brief_are_refused(rig, lora, word):
    assert_refused(rig, changed(rig, model={"name": "ownlora:net", "options": {"lora": lora}}), word)


def test_a_request_brings_adapters_and_no_frozen_weights(rig):
    frozen = rig.ready.template.get_submodule("1.base").weight.detach()
    assert_refused(rig, rig.ready.brief, "tensors that nothing asks for", frozen=frozen)
    everything = torch.cat([one.detach().flatten() for one in rig.ready.template.parameters()])
    assert_refused(rig, rig.ready.brief, "is not a float32 vector of the model's 196 parameters", weights=everything)


def test_a_site_that_has_other_weights_on_its_disk_takes_no_part(rig, own, monkeypatch):
    """Nor does one that was started again with other weights, in the middle of a run."""
    assert told(rig, rig.ready.brief, wire.HELLO).kind == wire.FACTS
    monkeypatch.setattr(own, "SCALE", 1 + 1e-6)
    first(rig)._understood.cache_clear()
    assert_refused(rig, rig.ready.brief, OTHER)
    first(rig)._understood.cache_clear()


def test_frozen_weights_that_are_no_numbers_are_refused_also_where_both_sides_have_them(rig):
    """No record could contribute anything beside them, and every turn would be paid for."""
    options = {"scale": float("inf"), "lora": NET["lora"]}
    same = models.frozen(models.build("ownlora:net", rig.clients.shape, rig.clients.classes, 3, **options))
    brief = changed(rig, model={"name": "ownlora:net", "options": options}, frozen=same)
    assert_refused(rig, brief, "the model's weights '1.base.weight' hold NaN or infinity")


def test_frozen_layers_without_adapters_are_held_against_the_servers_too(own, tmp_path, clients, monkeypatch):
    with Rig(tmp_path / "sites", clients, study(clients, {"name": "ownlora:frozen"}), everywhere=OURS) as made:
        made.server, made.read = made.coordinator(), []
        assert not made.refused
        assert told(made, made.ready.brief).kind == wire.UPLOAD
        monkeypatch.setattr(own, "SCALE", 2.0)
        first(made)._understood.cache_clear()
        reply = told(made, made.ready.brief)
        assert OTHER in reply.facts["reason"]


def test_sites_that_share_noise_and_were_told_of_different_frozen_weights_notice(own, tmp_path):
    """The charter, of which all masks are made, is of one brief; frozen weights are part of that."""
    clients = few(4.0, 4.0, 8.0, 8.0)
    both = {**study(clients, NET, steps=1), "trust": SHARED}
    with Rig(tmp_path / "sites", clients, both, everywhere=OURS) as made:
        made.server, made.read = made.coordinator(), []
        assert told(made, made.ready.brief).kind == wire.UPLOAD
        model = {"name": "ownlora:net", "options": {"scale": 2.0, "lora": NET["lora"]}}
        with Rig(tmp_path / "others", clients, {**both, "model": {**NET, "options": {"scale": 2.0}}}) as other:
            brief = changed(made, model=model, frozen=other.ready.brief["frozen"])
        assert told(made, brief, wire.HELLO).kind == wire.FACTS, "by itself it is a study like any other"
        assert "of another run or another study" in told(made, brief).facts["reason"]


# Whatever the frozen weights are, a record adds no more than the clip

CHOSEN = {
    "as they come": (1.0, 4.0, None),
    "loud": (1e6, 4.0, 1e3),
    "frozen weights as large as floats go": (1e38, 4.0, None),
    "adapters that vanish and count a lot": (1.0, 3e38, 1e-30),
    "adapters as large as floats go": (1e-38, 1e-38, 3e38),
    "adapters that are no numbers": (1.0, 4.0, float("nan")),
    "adapters that are infinite": (1.0, 4.0, float("inf")),
}
"""What a server may choose: an option of the factory that scales its weights, α, and all adapters."""


def test_a_record_adds_at_most_the_clip_whatever_frozen_part_and_adapters_a_server_chose(
    own, tmp_path, clients, monkeypatch
):
    """By what is summed before the noise: Δ at most for one record, and nothing at all where its loss is no number."""
    sums: list[float] = []

    def seen(batch: Any, lattices: dict[str, Any]) -> dict[str, torch.Tensor]:
        found = exact_sums(batch, lattices)
        sums.append(float(found["gradient"].norm() / lattices["gradient"].sensitivity))
        return found

    monkeypatch.setattr("sordino.privacy.gate.exact_sums", seen)
    whole = study(clients, NET, steps=1, rate=None, sampling="full", clip=1e-2)
    whole["study"]["rounds"] = 3 * len(CHOSEN)
    with Rig(tmp_path / "sites", clients, whole, everywhere=OURS) as made:
        made.server, start, number = made.coordinator(), made.ready.start, 0
        site, records = first(made), len(clients.train[0])
        valid = torch.ones(records, dtype=torch.bool)
        for name, (scale, alpha, adapters) in CHOSEN.items():
            options = {"scale": scale, "lora": {"rank": 2, "alpha": alpha}}
            template = models.build("ownlora:net", clients.shape, clients.classes, 3, **options)
            brief = changed(made, model={"name": "ownlora:net", "options": options}, frozen=models.frozen(template))
            weights = start if adapters is None else torch.full_like(start, adapters)
            for some in (valid, torch.arange(records) == 5, ~valid):
                site.records, number = replace(site.records, valid=some), number + 1
                reply = told(made, brief, weights=weights, number=number, clip=1e-2)
                assert reply.kind == wire.UPLOAD, (name, reply)
            everyone, one, nobody = sums[-3:]
            assert nobody == 0
            assert one <= 1, name
            assert everyone <= records, name
            if name == "as they come":
                assert one > 0.99, "a record must reach the clip, or this shows nothing"
            if adapters is not None and not abs(adapters) < 1e30:
                assert everyone == 0, name
