"""Features in studies: runs, results, saved models, resuming, and what a site allows and computes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from federation_rig import Rig, five_clients, simulated, table

import sordino as sd
from sordino.client.rows import Records, seen_alone
from sordino.engine.federation import job, wire
from sordino.engine.federation.limits import Policy
from sordino.engine.federation.wire import Packet, pack, unpack
from sordino.errors import BadInput, SordinoError
from sordino.server.running import Running
from sordino.study.file import make_study

OWN = '''
from os import system
from pathlib import Path

import torch
from torch import nn

from sordino.models import extractor

Path(__file__).with_name("mark").write_text("imported")


@extractor
def public(shape, width=6, value=1.0):
    """A pre-trained network with batch normalisation, which nobody may train on."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        found = nn.Sequential(nn.Flatten(), nn.Linear(shape[-1] * shape[-2], width), nn.BatchNorm1d(width), nn.ReLU())
    found[2].running_mean.fill_(0.1 * value)
    return found


def unmarked(shape):
    return public(shape)
'''

SETTINGS = {"batch": 16.0, "steps": 2, "lr": 1.0, "clip": 1.0}


@pytest.fixture
def own(tmp_path, monkeypatch) -> Path:
    (tmp_path / "ownfeatures.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ownfeatures", raising=False)
    yield tmp_path
    sys.modules.pop("ownfeatures", None)


@pytest.fixture(scope="module")
def cancer():
    return sd.data.load("breast-cancer").partition("iid", clients=3, seed=0).with_budgets(4.0, 1e-4)


@pytest.mark.parametrize(
    ("features", "shape"),
    [
        ("random", [128]),
        ("polynomial", [496]),
        ("binned", [121]),
        ({"name": "binned", "bins": 4, "soft": False}, [121]),
    ],
    ids=str,
)
def test_a_table_is_learnt_on_features_and_the_result_tells_them(cancer, tmp_path, features, shape):
    run = sd.train(cancer, "logistic", "fedavg", 15, features=features, out=tmp_path / "run", batch=32, steps=4, lr=2.0)
    assert run.result["final"]["accuracy"] > 0.85
    told = run.result["study"]["model"]
    assert told["features"]["shape"] == shape
    assert told["features"]["name"] == (features if isinstance(features, str) else "binned")
    assert len(told["features"]["sha256"]) == 64
    assert told["options"] == {}
    x = torch.from_numpy(cancer.x[:5])
    assert torch.equal(sd.load(tmp_path / "run").model(x), run.model(x)), "the saved model takes records as they are"


def test_a_study_file_says_the_same(cancer, tmp_path):
    words = {
        "study": {"rounds": 2},
        "data": {"name": "breast-cancer", "partition": "iid", "clients": 3},
        "budgets": {"epsilon": 4.0},
        "model": {"name": "logistic", "features": {"name": "binned", "bins": 4}},
        "training": SETTINGS,
    }
    study = make_study(words)
    study.check()
    run = sd.train(study.federation(), method=study.chosen_method(), **study.arguments())
    other = sd.train(study.federation(), "logistic", features={"name": "binned", "bins": 4}, rounds=2, **SETTINGS)
    assert run.result["study"]["model"] == other.result["study"]["model"]
    assert torch.equal(run.weights, other.weights)
    plan = sd.plan(study.federation(), "logistic", features={"name": "binned", "bins": 4}, rounds=2, **SETTINGS)
    assert plan.dimension == (30 * 4 + 1) * 2 + 2
    for features, message in (("bined", "did you mean 'binned'"), ({"name": "binned", "bin": 3}, "no option bin")):
        with pytest.raises(BadInput, match=message):
            make_study({**words, "model": {"name": "logistic", "features": features}}).check()


def test_runs_without_features_are_described_as_before(digits):
    told = sd.train(digits, "logistic", rounds=1, **SETTINGS).result["study"]["model"]
    assert set(told) == {"name", "options", "shape", "classes", "parameters"}


def test_an_extractor_of_ones_own_is_applied_resumed_and_told_by_its_code_and_numbers(digits, own, tmp_path):
    arguments = {"model": "logistic", "features": {"name": "ownfeatures:public", "width": 8}, "out": tmp_path / "run"}

    class Stop(Exception):
        pass

    def stop(record):
        if record["round"] == 2:
            raise Stop

    with pytest.raises((Stop, SordinoError)):
        sd.train(digits, rounds=4, callbacks=[stop], **arguments, **SETTINGS)
    changed = {**arguments, "features": {"name": "ownfeatures:public", "width": 8, "value": 2.0}}
    with pytest.raises(BadInput):
        sd.train(digits, rounds=4, resume=True, **changed, **SETTINGS)
    run = sd.train(digits, rounds=4, resume=True, **arguments, **SETTINGS)
    whole = sd.train(digits, rounds=4, **{**arguments, "out": None}, **SETTINGS)
    assert torch.equal(run.weights, whole.weights)
    told = run.result["study"]["model"]["features"]
    assert told["name"] == "ownfeatures:public"
    assert told["options"] == {"width": 8}
    assert told["shape"] == [8]
    assert told["code"]
    x = torch.from_numpy(digits.x[:5])
    assert torch.equal(sd.load(tmp_path / "run").model(x), run.model(x))
    module = sys.modules["ownfeatures"]
    wanted = module.public((1, 8, 8), 8).eval()(x)
    assert torch.allclose(run.model.get_submodule("features")(x), wanted, atol=1e-6)
    (own / "ownfeatures.py").write_text(OWN.replace("0.1 * value", "0.2 * value"))
    sys.modules.pop("ownfeatures")
    with pytest.raises(BadInput, match="their hash differs"):
        sd.load(tmp_path / "run")


# Deployed


def deployed(features, clients, **training):
    return {**table("dp-fedavg", clients, rounds=2, **training), "model": {"name": "logistic", "features": features}}


@pytest.mark.parametrize(
    ("features", "kept"),
    [
        ("scatter", True),
        ({"name": "binned", "bins": 3}, True),
        ("ownfeatures:public", True),
        ("ownfeatures:public", False),
    ],
    ids=str,
)
def test_a_deployed_study_ends_where_its_simulation_ends(own, tmp_path, monkeypatch, features, kept):
    if not kept:
        monkeypatch.setattr(job, "KEPT", 0)
    # The server holds every site's update; a simulation that adds them up as they come rounds otherwise than a product.
    monkeypatch.setattr(Running, "of", lambda *given: None)
    clients = five_clients((4.0, 8.0))
    study = deployed(features, clients, steps=2, rate=0.1, lr=0.2)
    alone = simulated(clients, study, tmp_path / "simulated")
    allowed = Policy(modules=("ownfeatures",))
    with Rig(tmp_path, clients, study, alone.key, alone.noises, everywhere=allowed) as rig:
        state = rig.train()
        seen = [site._seen for site in rig.wires.sites.values()]
    assert all(bool(one) == kept for one in seen)
    assert torch.equal(state.shown, alone.weights)
    described = rig.ready.about(rig.facts, rig.ready.plan(rig.facts))["model"]
    assert described["features"]["sha256"]
    assert described["options"] == {}


def hello(rig, policy: Policy, model: dict, **changed) -> Packet:
    """What a site says to a study whose model a server describes like this."""
    site = rig.wires.sites[rig.clients.names[0]]
    before, site.policy = site.policy, policy
    try:
        brief = {**json.loads(json.dumps(rig.ready.brief)), "model": model, **changed}
        return unpack(site.handle(pack(Packet(wire.HELLO, {"brief": brief}))))
    finally:
        site.policy = before
        site._understood.cache_clear()


@pytest.fixture
def rig(own, tmp_path):
    clients = five_clients((4.0, 8.0))
    with Rig(tmp_path, clients, deployed("ownfeatures:public", clients, steps=1, rate=0.2)) as laid:
        (own / "mark").unlink()
        sys.modules.pop("ownfeatures")
        yield laid


def model(features):
    return {"name": "logistic", "options": {"features": features}}


@pytest.mark.parametrize("features", ["ownfeatures:public", {"name": "ownfeatures:public", "width": 6}], ids=str)
@pytest.mark.parametrize("modules", [(), ("other",), ("ownfeatures.more",)], ids=str)
def test_a_site_imports_no_extractor_that_its_officer_did_not_allow(rig, own, features, modules):
    reply = hello(rig, Policy(modules=modules), model(features))
    assert reply.kind == wire.REFUSED
    assert "not allowed here" in reply.facts["reason"]
    assert not (own / "mark").exists()


def test_a_site_calls_marked_factories_only(rig, own):
    allowed = Policy(modules=("ownfeatures",))
    assert hello(rig, allowed, model("ownfeatures:public")).kind == wire.FACTS
    made = own / "made by the server"
    for features in ("ownfeatures:unmarked", {"name": "ownfeatures:system", "command": f"touch '{made}'"}):
        reply = hello(rig, allowed, model(features))
        assert reply.kind == wire.REFUSED
        assert "not marked" in reply.facts["reason"]
    assert not made.exists()


def test_a_site_whose_extractor_holds_other_numbers_refuses(rig):
    allowed = Policy(modules=("ownfeatures",))
    other = {**rig.ready.brief["features"], "sha256": "0" * 64}
    reply = hello(rig, allowed, model("ownfeatures:public"), features=other)
    assert reply.kind == wire.REFUSED
    assert "other numbers here" in reply.facts["reason"]


def test_features_that_are_too_large_are_refused_before_they_are_built(rig):
    small = Policy(parameters=5000)
    for features in ({"name": "random", "hidden": 150_000}, {"name": "binned", "bins": 3000}):
        reply = hello(rig, small, model(features), parameters=100)
        assert reply.kind == wire.REFUSED
        assert "too large here" in reply.facts["reason"]


def test_a_record_on_which_features_fail_is_a_null_row_beside_those_that_were():
    class Picky(torch.nn.Module):
        def forward(self, x):
            if float(x.max()) > 1:
                raise ValueError
            return 2 * x

    records = Records(torch.tensor([[0.5], [3.0], [0.7]]), torch.zeros(3), torch.tensor([True, True, False]))
    seen = seen_alone(Picky(), records)
    assert seen.x.flatten().tolist() == pytest.approx([1.0, 0.0, 1.4])
    assert seen.valid.tolist() == [True, False, False]
