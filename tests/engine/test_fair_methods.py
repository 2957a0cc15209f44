"""The fairness methods: equal to loops on a blackboard, FedAvg where theory says so, and refused where senseless."""

import importlib.util
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import sordino as sd
from sordino import methods
from sordino.errors import BadInput
from sordino.privacy import accounting
from sordino.study import run as running
from sordino.study import session

_spec = importlib.util.spec_from_file_location("plain_fair", Path(__file__).with_name("plain_fair.py"))
plain = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(plain)

SETTINGS = {"rate": 0.2, "lr": 0.3, "clip": 0.7}
SAME_BATCH = {"ask": {"name": "loss", "batch": "step"}}


def distance(a, b):
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.fixture
def same_draws(monkeypatch):
    """Batches and noise that do not depend on the method, so that two methods can be compared."""
    monkeypatch.setattr(session.Prepared, "key", property(lambda self: "the same for all"))


def trained(clients, method, parts=None, **settings):
    return sd.train(clients, "logistic", methods.get(method, parts), seed=0, **{"rounds": 3, **SETTINGS, **settings})


def expected(clients, method, reference, parts=None, **settings):
    keys = {"rounds": 3, **SETTINGS, **settings}
    return reference(plain.Plain(running.prepare(clients, "logistic", methods.get(method, parts), 0, None, keys)))


WIDE = {"name": "fair", "weight": 0.5}
"""Tested with a clip that few records reach: where all are clipped, factors do not matter."""

CASES = {
    "fedfair": ("fedfair", plain.fedfair, None),
    "fedfdp": ("fedfdp", plain.fedfdp, {"clip": WIDE}),
    "fedfdp, same batch": ("fedfdp", plain.fedfdp_same_batch, {"clip": WIDE, **SAME_BATCH}),
    "scaffold": ("scaffold", plain.scaffold, None),
    "dp-scaffold": ("dp-scaffold", plain.scaffold, None),
    "fedprox": ("fedprox", plain.fedprox, None),
    "dp-fedprox": ("dp-fedprox", plain.fedprox, None),
    "feddyn": ("feddyn", plain.feddyn, None),
    "dp-feddyn": ("dp-feddyn", plain.feddyn, None),
    "q-ffl": ("q-ffl", plain.q_ffl, None),
    "dp-q-ffl": ("dp-q-ffl", plain.q_ffl, None),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("steps", [1, 2])
def test_every_method_equals_a_plain_loop(digits, case, steps):
    method, reference, parts = CASES[case]
    settings = {"steps": steps, "clip": 8.0 if method == "fedfdp" else 0.7}
    if method == "fedfdp":
        reference = partial(reference, weight=0.5)
    done = trained(digits, method, parts, **settings)
    assert distance(done.weights, expected(digits, method, reference, parts, **settings)) < 1e-5


def test_a_bounded_fair_step_equals_a_plain_loop_where_the_bound_is_reached(digits):
    parts = {"local": {"name": "fair", "weight": 2.0, "most": 1.5}}
    settings = {"steps": 3, "lr": 2.0}
    done = trained(digits, "fedfair", parts, **settings)
    bounded = partial(plain.fedfair, weight=2.0, most=1.5)
    assert distance(done.weights, expected(digits, "fedfair", bounded, parts, **settings)) < 1e-5
    published = {"local": {"name": "fair", "weight": 2.0}}
    assert distance(trained(digits, "fedfair", published, **settings).weights, done.weights) > 1e-2


def test_feedback_that_diverges_stays_finite_with_a_bound(digits):
    """A client whose loss grows takes longer steps, and its loss grows: the bound cuts that."""
    settings = {"rounds": 12, "steps": 10, "lr": 8.0}
    lost = trained(digits, "fedfair", {"local": {"name": "fair", "weight": 1.0}}, **settings)
    assert not np.isfinite(lost.result["final"]["loss"])
    done = trained(digits, "fedfair", {"local": {"name": "fair", "weight": 1.0, "most": 3.0}}, **settings)
    assert np.isfinite(done.result["final"]["loss"])
    assert done.result["final"]["accuracy"] > 0.5


@pytest.mark.parametrize("case", ["fedfdp", "fedfdp, same batch", "fedfair"])
def test_the_loss_makes_a_difference(digits, case):
    method, reference, parts = CASES[case]
    done = trained(digits, method, parts, clip=8.0)
    assert distance(done.weights, expected(digits, method, partial(reference, weight=0), parts, clip=8.0)) > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_stacked_rows_give_the_same_weights(digits, case, monkeypatch):
    """The layout that a GPU uses, on the CPU."""
    method, _, parts = CASES[case]
    one_by_one = trained(digits, method, parts, steps=2)
    plain_work = session.Work
    monkeypatch.setattr(session, "Work", lambda *a, **k: plain_work(*a, **{**k, "stack": True}))
    assert distance(trained(digits, method, parts, steps=2).weights, one_by_one.weights) < 1e-5


def test_ali_dpfl_equals_a_plain_loop_and_spends_no_more_than_planned(digits):
    settings = {"rounds": 6, "steps": 4}
    done = trained(digits, "ali-dpfl", **settings)
    weights, paces = expected(digits, "ali-dpfl", plain.ali_dpfl, **settings)
    assert distance(done.weights, weights) < 1e-5
    assert paces[0] == 4
    assert len(set(paces)) > 1
    for one in done.privacy:
        assert [(r["what"], r["count"]) for r in one["releases"]] == [("gradient", sum(paces))]
        assert one["spent_epsilon"] <= one["epsilon"]


def test_ali_dpfl_takes_single_steps_when_there_are_as_many_rounds_as_steps(digits):
    done = trained(digits, "ali-dpfl", rounds=4, steps=1)
    assert [one["releases"][0]["count"] for one in done.privacy] == [4] * 6


def test_ali_dpfl_spends_its_whole_budget_where_it_is_told_to(digits):
    """It plans steps that it then does not take: more rounds, and ε(T) ≤ ε < ε(T + 1) with the steps really taken."""
    settings = {"rounds": 6, "steps": 8}
    short = trained(digits, "ali-dpfl", **settings)
    whole = trained(digits, "ali-dpfl", {"aggregate": {"name": "ali-dpfl", "whole_budget": True}}, **settings)
    planned = 6 * 8
    taken = [one["releases"][0]["count"] for one in short.privacy]
    assert len(short.result["rounds"]) == 6
    assert max(taken) < planned, "else this shows nothing"
    assert len(whole.result["rounds"]) > 6
    for one, before in zip(whole.privacy, short.privacy):
        release = one["releases"][0]
        assert release["count"] == planned
        assert before["spent_epsilon"] < one["spent_epsilon"] <= one["epsilon"]
        assert accounting.epsilon(release["noise"], one["delta"], 0.2, planned + 1) > one["epsilon"], "no room for more"
    assert whole.result["stopped"]["refused"] is False


def test_ali_dpfl_does_not_go_on_where_clients_are_drawn(digits):
    parts = {"aggregate": {"name": "ali-dpfl", "whole_budget": True}, "select": "uniform"}
    with pytest.raises(BadInput, match="every client in every round"):
        trained(digits, "ali-dpfl", parts, rounds=4, steps=2, select=3)


def test_ali_dpfl_goes_on_after_a_stop_as_if_there_had_been_none(digits, tmp_path):
    settings = {"rounds": 6, "steps": 4, **SETTINGS}
    whole = sd.train(digits, "logistic", "ali-dpfl", seed=0, **settings)

    def stop(record):
        if record["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sd.train(digits, "logistic", "ali-dpfl", seed=0, out=tmp_path / "run", callbacks=[stop], **settings)
    resumed = sd.train(digits, "logistic", "ali-dpfl", seed=0, out=tmp_path / "run", resume=True, **settings)
    assert torch.equal(resumed.weights, whole.weights)
    assert [p["releases"] for p in resumed.privacy] == [p["releases"] for p in whole.privacy]


def test_a_weight_of_zero_releases_no_loss_and_is_dp_fedavg_exactly(digits, same_draws):
    fair = trained(digits, "fedfdp", {"clip": {"name": "fair", "weight": 0}}, steps=2)
    assert torch.equal(fair.weights, trained(digits, "dp-fedavg", steps=2).weights)
    assert all([r["what"] for r in one["releases"]] == ["gradient"] for one in fair.privacy)


def test_a_weight_above_zero_releases_the_loss_within_the_same_budget(digits):
    own = trained(digits, "fedfdp", steps=2)
    same = trained(digits, "fedfdp", SAME_BATCH, steps=2)
    for one, other in zip(own.privacy, same.privacy):
        assert [(r["what"], r["count"]) for r in one["releases"]] == [("gradient", 6), ("loss", 3)]
        assert [(r["what"], r["count"]) for r in other["releases"]] == [("gradient+loss", 6)]
        assert max(one["spent_epsilon"], other["spent_epsilon"]) <= one["epsilon"]


@pytest.mark.parametrize(
    ("method", "parts", "base"),
    [
        ("fedfair", {"local": {"name": "fair", "weight": 0}}, "fedavg"),
        ("fedprox", {"local": {"name": "fedprox", "mu": 0}}, "fedavg"),
        ("dp-fedprox", {"local": {"name": "fedprox", "mu": 0}}, "dp-fedavg"),
    ],
)
def test_a_correction_of_size_zero_is_fedavg_exactly(digits, same_draws, method, parts, base):
    assert torch.equal(trained(digits, method, parts, steps=3).weights, trained(digits, base, steps=3).weights)


@pytest.mark.parametrize(("method", "base"), [("fedprox", "fedavg"), ("dp-fedprox", "dp-fedavg")])
def test_fedprox_with_one_step_is_fedavg(digits, same_draws, method, base):
    assert torch.equal(trained(digits, method).weights, trained(digits, base).weights)


@pytest.mark.parametrize(("method", "base"), [("scaffold", "fedavg"), ("dp-scaffold", "dp-fedavg")])
def test_scaffold_with_one_step_is_fedavg_when_everyone_takes_part(digits, same_draws, method, base):
    """Σ p_i(c − c_i) = 0: corrections cancel in the mean, and do not when there are several steps."""
    assert distance(trained(digits, method).weights, trained(digits, base).weights) < 1e-5
    assert distance(trained(digits, method, steps=3).weights, trained(digits, base, steps=3).weights) > 1e-4


def test_feddyn_with_one_step_is_heavy_ball_momentum(digits, same_draws):
    """s ← (1 − ηα)s + Δ and w ← w + s + (the step of this round), Δ = −ηḡ − ηαs: FedDyn without local work."""
    alpha, lr = 0.4, SETTINGS["lr"]
    done = trained(digits, "feddyn", {"local": {"name": "feddyn", "alpha": alpha}}, rounds=3)

    def heavy_ball(p):
        w, s = p.start.clone(), torch.zeros_like(p.start)
        for number in range(1, 4):
            gradient = torch.zeros_like(w)
            for i in p.everyone:
                terms = p.plan.clients[i].terms
                gradient += p.shares[i] * p.gradient(w, i, number, 0, p.batches(i, number, terms)[0], terms)
            step = -lr * (gradient + alpha * s)
            s = s + step
            w = w + step + s
        return w

    assert distance(done.weights, expected(digits, "feddyn", heavy_ball)) < 1e-5


def test_q_ffl_with_q_zero_is_the_plain_mean(digits, same_draws):
    done = trained(digits, "q-ffl", {"aggregate": {"name": "q-ffl", "q": 0}}, steps=2)
    assert distance(done.weights, trained(digits, "fedavg", {"aggregate": "uniform"}, steps=2).weights) < 1e-6


@pytest.mark.parametrize(
    ("method", "parts"),
    [
        ("fedfdp", {"select": "unbiased", "aggregate": "uniform"}),
        ("fedfdp", {"select": "power-of-choice", "ask": {"name": "loss", "of": "candidates"}, "aggregate": "uniform"}),
        ("dp-scaffold", {"select": "unbiased"}),
        ("dp-scaffold", {"aggregate": {"name": "scaffold", "combine": "declared-variance"}}),
        ("dp-feddyn", {"select": "uniform", "aggregate": {"name": "feddyn", "combine": "uniform"}}),
        ("dp-q-ffl", {"select": "unbiased", "clip": {"name": "fair", "weight": 0.2}}),
        ("ali-dpfl", {"select": "unbiased", "local": {"name": "fedprox", "mu": 0.1}}),
        ("ali-dpfl", {"aggregate": {"name": "ali-dpfl", "combine": "weiavg", "convexity": 1.0}}),
        ("dp-fedprox", {"aggregate": "random-effects", "server": {"name": "ema", "decay": 0.5}}),
        ("dp-scaffold", {"clip": {"name": "fair"}, "ask": SAME_BATCH["ask"]}),
        ("dp-fedavg", {"local": {"name": "fair", "weight": 0.1}, "ask": SAME_BATCH["ask"]}),
    ],
)
def test_parts_compose_and_nobody_overspends(digits, method, parts):
    settings = {} if "select" not in parts else {"select": 3}
    done = trained(digits, method, parts, rounds=4, steps=2, **settings)
    assert torch.isfinite(done.weights).all()
    assert all(p["spent_epsilon"] <= p["epsilon"] for p in done.privacy)


@pytest.mark.parametrize(
    ("method", "parts", "why"),
    [
        ("dp-fedavg", {"clip": "fair"}, "needs every client's released 'loss'"),
        ("dp-fedavg", {"local": "fair"}, "from the batch of every step"),
        ("fedfdp", {"local": "fair"}, "from the batch of every step"),
        ("dp-fedavg", {"aggregate": "q-ffl"}, "needs every client's released 'loss'"),
        ("dp-fedavg", {"local": "scaffold"}, "do not go together"),
        ("dp-scaffold", {"aggregate": "weiavg"}, "do not go together"),
        ("dp-scaffold", {"aggregate": "feddyn"}, "do not go together"),
        ("dp-feddyn", {"local": {"name": "feddyn", "alpha": 0}}, "alpha is 0"),
        ("fedfdp", {"select": "power-of-choice"}, "not asked first"),
        ("fedfdp", {"clip": {"name": "fair", "weight": -1}}, "λ"),
        ("fedfdp", {"ask": {"name": "loss", "start": float("inf")}}, "loss bound"),
    ],
)
def test_senseless_pairs_are_refused_with_a_reason(method, parts, why):
    with pytest.raises(BadInput, match=why):
        methods.get(method, parts)


def test_unknown_rules_to_combine_with_are_refused(digits):
    with pytest.raises(BadInput, match=r"aggregate\.combine = 'mean'"):
        trained(digits, "dp-scaffold", {"aggregate": {"name": "scaffold", "combine": "mean"}})
