"""Two rules of one name are two rules: in a stack, and when a run goes on."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import sordino as sd
from sordino.client import corrections, local
from sordino.client.ask import bounded_loss
from sordino.client.clip import Clip, automatic, flat, moving
from sordino.errors import BadInput
from sordino.methods import asking, selection
from sordino.methods.identity import identities, identity
from sordino.server import after, fair, rules
from sordino.server.facts import Outcome, Told
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


# Parts that a factory made, and what became of them


def test_stacked_runs_keep_apart_a_rule_and_what_replace_made_of_it(clients):
    """``replace`` keeps the name and the label of the factory: neither says what the changed value does."""
    changed = replace(flat(), factors=lambda losses, norms, public: torch.full_like(norms, 0.01))
    assert changed.name == flat().name
    assert changed.made == flat().made
    both = [sd.Method("mine"), sd.Method("mine", clip=changed)]
    ready = [prepare(clients, "logistic", method, 0, None, SETTINGS) for method in both]
    alone = [sd.train(clients, "logistic", method, **SETTINGS) for method in both]
    for one, other in zip(train_together(ready, "cpu"), alone):
        np.testing.assert_allclose(weights(one), weights(other), atol=1e-5)
    assert np.abs(weights(alone[0]) - weights(alone[1])).max() > 1e-3, "they do differ"


def _mean(updates, facts, memory):
    return Outcome(updates.mean(0), None, memory)


def shown(one) -> str:
    return one.__name__ if callable(one) else ", ".join(one)


CHANGED = [
    (flat, {"factors": by_global}),
    (flat, {"bound": lambda public: 2 * public["clip"]}),
    (local.sgd, {"update": lambda params, state, gradient, public: (params, state)}),
    (corrections.scaffold, {"state": ("control", "more")}),
    (rules.data_weighted, {"combine": _mean}),
    (rules.robust_hdp, {"combine": _mean}),
    (rules.robust_hdp, {"refuse_small": False}),
    (after.ema, {"take": lambda weights, outcome, memory: (weights, weights, memory)}),
    (selection.unbiased, {"schedule": lambda setting: None}),
    (selection.power_of_choice, {"choose": lambda asked: asked.clients}),
    (asking.loss, {"share": 0.3}),
    (asking.loss, {"conclude": lambda answers, facts: Told()}),
    (asking.squared_norm, {"question": bounded_loss()}),
    (bounded_loss, {"values": lambda losses, norms, public: losses}),
]


@pytest.mark.parametrize(("factory", "change"), CHANGED, ids=shown)
def test_a_part_that_replace_changed_is_not_what_its_factory_made(factory, change):
    made, other = factory(), replace(factory(), **change)
    assert made.made is not None
    assert made.made.still(made)
    assert not other.made.still(other)
    for here in (False, True):
        assert identity(other, here) != identity(made, here)


def test_the_label_of_another_part_does_not_lend_its_identity():
    mine = Clip("flat", by_global, lambda public: public["clip"])
    assert identity(replace(mine, made=flat().made)) != identity(flat())


def test_a_run_does_not_go_on_with_a_part_that_replace_changed(clients, tmp_path):
    changed = replace(flat(), factors=lambda losses, norms, public: torch.full_like(norms, 0.01))
    with pytest.raises(Interrupted):
        sd.train(clients, "logistic", sd.Method("mine"), out=tmp_path, callbacks=[stop], **SETTINGS)
    with pytest.raises(BadInput, match="another clip, of the same name but with other code"):
        sd.train(clients, "logistic", sd.Method("mine", clip=changed), out=tmp_path, resume=True, **SETTINGS)


EXPLICIT = [
    (rules.robust_hdp, {"every": 1}, {"every": 2}),
    (rules.factor_hdp, {"rounds": 5, "rank": None}, {"rank": 1}),
    (rules.pfa, {"directions": 1, "split": "mixture"}, {"directions": 2}),
    (fair.scaffold, {"combine": "data-weighted"}, {"combine": "uniform"}),
    (after.ema, {"decay": 0.9, "lr": 1.0}, {"decay": 0.8}),
    (after.ball, {"bound": None}, {"bound": 1.0}),
    (automatic, {"gamma": 0.01}, {"gamma": 0.02}),
    (corrections.fedprox, {"mu": 0.1}, {"mu": 0.2}),
    (selection.power_of_choice, {"candidates": None, "headroom": 2.0}, {"headroom": 3.0}),
    (selection.privacy_aware, {"headroom": 1.0}, {"headroom": 1.5}),
    (asking.loss, {"batch": "own", "kappa": 2.5}, {"kappa": 3.0}),
    (asking.squared_norm, {"share": 0.1}, {"share": 0.2}),
    (asking.squared_norm, {"tau": 1.0, "weigh": "clients"}, {"tau": 2.0}),
    (asking.under_radius, {"target": 0.5}, {"target": 0.7}),
    (bounded_loss, {"start": 2.5}, {"start": 3.0}),
]


@pytest.mark.parametrize(("factory", "defaults", "others"), EXPLICIT, ids=shown)
def test_the_identity_of_a_built_in_part_is_its_factory_and_options_given_or_not(factory, defaults, others):
    assert identity(factory()) == identity(factory())
    assert identity(factory(**defaults)) == identity(factory())
    assert identity(factory(**others)) != identity(factory())
    assert identity(factory(**others)) == identity(factory(**others))


def test_the_order_of_options_does_not_matter():
    ways = [{"every": 2, "rows": 100}, {"rows": 100, "every": 2}]
    assert len({identity(rules.robust_hdp(**one)) for one in ways}) == 1
    ways = [{"tau": 2.0, "floor": 0.1}, {"floor": 0.1, "tau": 2.0}]
    assert len({identity(asking.squared_norm(**one)) for one in ways}) == 1


def test_factories_with_equal_options_are_told_apart():
    made = [rules.uniform(), rules.data_weighted(), rules.weiavg(), rules.optimum(), flat(), moving(), local.sgd()]
    assert len({identity(one) for one in made}) == len(made)


def test_a_global_that_only_shares_its_name_with_an_attribute_does_not_count(monkeypatch):
    def rule(losses, norms, public):
        return norms.clamp(max=STRENGTH).abs()

    before = identity(rule)
    monkeypatch.setitem(rule.__globals__, "abs", "something else")
    monkeypatch.setitem(rule.__globals__, "clamp", "something else")
    assert identity(rule) == before
    monkeypatch.setitem(rule.__globals__, "STRENGTH", 0.25)
    assert identity(rule) != before
