"""Two rules of one name are two rules: in a stack, and when a run goes on."""

import json
from functools import partial

import numpy as np
import pytest
import torch

import sordino as sd
from sordino.client.clip import Clip
from sordino.errors import BadInput
from sordino.methods.identity import identities, identity
from sordino.study.run import prepare
from sordino.study.session import train_together

SETTINGS = {"rounds": 2, "rate": 0.3, "lr": 0.3}
STRENGTH = 0.5


@pytest.fixture(scope="module")
def clients():
    source = sd.data.load("digits").subset(300, 0).partition("iid", clients=3, seed=0)
    return source.with_budgets([1.0, 2.0, 4.0], delta=1e-4)


def ruled(factors) -> sd.Method:
    return sd.Method("mine", clip=Clip("mine", factors, lambda public: public["clip"]))


def scaled(by: float) -> sd.Method:
    return ruled(lambda losses, norms, public: torch.full_like(norms, by))


def weights(run) -> np.ndarray:
    return run.weights.numpy()


def test_stacked_runs_keep_rules_apart_that_share_a_name(clients):
    both = [scaled(1.0), scaled(0.01)]
    ready = [prepare(clients, "logistic", method, 0, None, SETTINGS) for method in both]
    alone = [sd.train(clients, "logistic", method, **SETTINGS) for method in both]
    for one, other in zip(train_together(ready, "cpu"), alone):
        np.testing.assert_allclose(weights(one), weights(other), atol=1e-5)
    assert np.abs(weights(alone[0]) - weights(alone[1])).max() > 1e-3, "they do differ"


def test_equal_rules_made_twice_still_share_a_part(clients):
    ready = [prepare(clients, "logistic", name, 0, None, SETTINGS) for name in ("dp-fedavg", "robust-hdp")]
    made = [one.plan.method.clip for one in ready]
    assert made[0] is not made[1]
    assert identity(made[0], here=True) == identity(made[1], here=True)
    assert identity(scaled(0.5).clip, here=True) == identity(scaled(0.5).clip, here=True)


class Callable:
    """A rule that is an object."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, losses, norms, public):
        return self.factor() * torch.ones_like(norms)

    def factor(self) -> float:
        return self.by


def by_global(losses, norms, public):
    return STRENGTH * torch.ones_like(norms)


def by_default(losses, norms, public, by=1.0):
    return by * torch.ones_like(norms)


def test_an_identity_sees_code_closures_defaults_fields_and_globals(monkeypatch):
    before = identity(by_global)
    assert before == identity(by_global)
    monkeypatch.setitem(globals(), "STRENGTH", 0.6)
    assert identity(by_global) != before
    different = [
        scaled(1.0).clip.factors,
        scaled(1.0 + 1e-9).clip.factors,
        lambda losses, norms, public: torch.ones_like(norms),
        lambda losses, norms, public: torch.zeros_like(norms),
        Callable(1.0),
        Callable(2.0),
        by_default,
        partial(by_default, by=2.0),
        partial(by_default, by=torch.tensor(2.0)),
        partial(by_default, by=torch.tensor(3.0)),
    ]
    assert len({identity(one) for one in different}) == len(different)
    assert identity(Callable(1.0), here=True) == identity(Callable(1.0), here=True)
    before = identity(Callable(1.0))
    monkeypatch.setattr(Callable, "factor", lambda self: -self.by)
    assert identity(Callable(1.0)) != before, "what an object's class does belongs to it"


def test_options_that_a_name_rounds_are_other_rules():
    near = [sd.methods.get("auto-clipping", {"clip": {"name": "automatic", "gamma": g}}) for g in (0.1, 0.1 + 1e-9)]
    assert near[0].clip.name == near[1].clip.name
    assert identities(near[0])["clip"] != identities(near[1])["clip"]
    asked = [sd.methods.get("power-of-choice"), sd.methods.get("power-of-choice")]
    assert identities(asked[0]) == identities(asked[1])


class Interrupted(Exception):
    """What stops a run after its first round."""


def stop(record):
    raise Interrupted


def test_a_run_does_not_go_on_with_another_rule_of_the_same_name(clients, tmp_path):
    with pytest.raises(Interrupted):
        sd.train(clients, "logistic", scaled(1.0), out=tmp_path, callbacks=[stop], **SETTINGS)
    with pytest.raises(BadInput, match="another clip, of the same name but with other code"):
        sd.train(clients, "logistic", scaled(0.01), out=tmp_path, resume=True, **SETTINGS)
    assert len(sd.train(clients, "logistic", scaled(1.0), out=tmp_path, resume=True, **SETTINGS).metrics) == 2


def test_a_run_does_not_go_on_with_another_model_of_the_same_class(clients, tmp_path):
    def model(act):
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8), act, torch.nn.Linear(8, 10))

    with pytest.raises(Interrupted):
        sd.train(clients, model(torch.nn.Tanh()), out=tmp_path, callbacks=[stop], **SETTINGS)
    with pytest.raises(BadInput, match="another model"):
        sd.train(clients, model(torch.nn.ReLU()), out=tmp_path, resume=True, **SETTINGS)
    assert sd.train(clients, model(torch.nn.Tanh()), out=tmp_path, resume=True, **SETTINGS).result


def test_folders_that_say_nothing_of_rules_still_go_on(clients, tmp_path, caplog):
    with pytest.raises(Interrupted):
        sd.train(clients, "logistic", scaled(1.0), out=tmp_path, callbacks=[stop], **SETTINGS)
    about = json.loads((tmp_path / "study.json").read_text())
    (tmp_path / "study.json").write_text(json.dumps(about | {"sordino": "0.0.1"}))
    sd.train(clients, "logistic", scaled(1.0), out=tmp_path, resume=True, **SETTINGS)
    assert "made by another version" in caplog.text
    caplog.clear()
    del about["rules"]
    (tmp_path / "study.json").write_text(json.dumps(about))
    assert sd.train(clients, "logistic", scaled(1.0), out=tmp_path, resume=True, **SETTINGS).result
    assert "version" not in caplog.text
