"""Methods with an adaptive radius, as they really run: equal to a blackboard loop, both phases charged, in limits."""

import importlib.util
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import sordino as sd
from papers.published_levels import levels_table, published_levels
from sordino.data.dataset import Dataset
from sordino.errors import BadInput
from sordino.methods import get
from sordino.methods.asking import squared_norm, under_radius
from sordino.privacy.accounting import calibrate
from sordino.privacy.generators import Keyed
from sordino.study import run as running
from sordino.study.audit import Trial, audit_method
from sordino.study.file import make_study

_spec = importlib.util.spec_from_file_location("adaptive_loop", Path(__file__).with_name("adaptive_loop.py"))
adaptive_loop = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(adaptive_loop)

SETTINGS = {"rate": 0.2, "lr": 0.3, "clip": 5.0}


def close(a, b):
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.fixture(scope="module")
def tiny(digits):
    """Two clients with budgets that leave the radius room to move."""
    source = sd.data.load("digits").subset(150, seed=0)
    return source.partition("iid", clients=2, seed=0, test=0.0, sizes=(1, 2))


@pytest.fixture(scope="module")
def least_squares():
    """T1: (x−b)ᵀZZᵀ(x−b)/(2n), two clients of 2000 records; interpolated by x = b, so gradients vanish there."""
    generator = np.random.default_rng(0)
    z = generator.standard_normal((4000, 10)).astype(np.float32) / math.sqrt(10)
    y = (z @ generator.standard_normal(10)).astype(np.float32)
    source = Dataset("artificial", z, y, "regression", None, np.ones(4000, bool))
    return source.partition("iid", clients=2, seed=0, test=0.0)


def line():
    model = nn.Linear(10, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


@pytest.mark.parametrize("averaging", [True, False])
@pytest.mark.parametrize(
    ("sampling", "adjacency", "size", "reach"),
    [
        ("poisson", "zero-out", None, None),
        ("poisson", "zero-out", "full", None),
        ("fixed", "replace-one", 12.0, None),
        ("poisson", "zero-out", None, 1.5),
    ],
)
def test_adaptdp_equals_a_plain_record_by_record_loop(tiny, sampling, adjacency, size, reach, averaging):
    """With everything the paper has: τ, b^C, the projection, and both outputs x^(out) and x_R."""
    clients = tiny.with_budgets([200.0, 400.0], delta=1e-4, adjacency=adjacency)
    ask = squared_norm(share=0.3, size=size, reach=reach, tau=0.2, floor=0.01)
    method = replace(get("adaptdp", {"server": {"name": "ball", "bound": 0.9}}), ask=ask)
    if averaging:
        method = get(method, {"local": "averaged", "aggregate": "averaged"})
    settings = {"rounds": 2, "steps": 2, "sampling": sampling, **SETTINGS}
    ready = running.prepare(clients, "logistic", method, 0, None, settings)
    done = sd.train(clients, "logistic", method, seed=0, **settings)
    last, out, radii = adaptive_loop.adaptdp(
        ready.template, clients, ready.plan, ready.key, 2, tau=0.2, floor=0.01, ball=0.9, reach=reach
    )
    assert [one["clip"] for one in done.metrics] == pytest.approx(radii, rel=1e-5)
    assert all(0.05 < one < 5.0 for one in radii), "neither limit hides a difference"
    assert float(last.norm()) == pytest.approx(0.9), "the projection does something"
    assert close(done.weights, out if averaging else last) < 1e-5


@pytest.mark.parametrize("sigmas", [-10.0, 10.0])
def test_the_radius_stays_in_its_limits_under_extreme_draws(digits, monkeypatch, sigmas):
    honest = Keyed.normal

    def forced(self, turns, what, step, out, scale):
        if what == "squared-norm/squared-norm":
            return out.add_(sigmas * scale[:, None])
        return honest(self, turns, what, step, out, scale)

    monkeypatch.setattr(Keyed, "normal", forced)
    done = sd.train(digits, "logistic", "adaptdp", rounds=3, **SETTINGS)
    assert all(1e-3 * 5.0 <= one["clip"] <= 5.0 for one in done.metrics)
    assert done.metrics[0]["clip"] == pytest.approx(5e-3 if sigmas < 0 else 5.0)
    assert torch.isfinite(done.weights).all()


def test_the_radius_falls_along_a_converging_run(least_squares):
    clients = least_squares.with_budgets(8.0, delta=1e-4)
    done = sd.train(clients, line(), "adaptdp", rounds=40, batch=100, steps=20, lr=0.1, clip=3.0, evaluate=40)
    radii = np.array([one["clip"] for one in done.metrics])
    assert done.result["final"]["loss"] < 0.01 * 0.5, "it converges"
    assert radii[-10:].mean() < 0.6 * radii[0]
    assert np.corrcoef(np.arange(40), radii)[0, 1] < -0.5
    power = np.array([one["diagnostics"]["noise_power"] for one in done.metrics])
    assert power[-10:].mean() < 0.5 * power[0], "the declared noise follows the radius"
    assert np.allclose(power / radii**2, power[0] / radii[0] ** 2)


def test_a_bound_that_follows_the_radius_lets_it_fall_below_the_noise_floor_of_a_fixed_one(least_squares):
    clients = least_squares.with_budgets(2.0, delta=1e-4)
    settings = {"rounds": 40, "batch": 100, "steps": 20, "lr": 0.1, "clip": 1.0, "evaluate": 40}
    fixed = sd.train(clients, line(), "adaptdp", **settings)
    follows = sd.train(clients, line(), replace(get("adaptdp"), ask=squared_norm(reach=1.5)), **settings)
    assert follows.metrics[-1]["clip"] < 0.2 * fixed.metrics[-1]["clip"]
    assert follows.result["final"]["loss"] < 0.3 * fixed.result["final"]["loss"]


def test_the_bound_that_follows_the_radius_keeps_its_claim():
    found = audit_method(replace(get("adaptdp"), ask=squared_norm(reach=1.5)), Trial(epsilon=2.0, canaries=50_000))
    assert found.passed
    assert found.claimed <= 2.0


def test_both_phases_are_charged_and_together_spend_the_budget(digits):
    done = sd.train(digits, "logistic", "adaptdp", rounds=3, steps=2, **SETTINGS)
    for one in done.privacy:
        assert sorted((r["what"], r["count"]) for r in one["releases"]) == [("gradient", 6), ("squared-norm", 3)]
        assert 0.97 * one["epsilon"] < one["spent_epsilon"] <= one["epsilon"]


BESIDE = {"ask": {"name": "squared-norm", "batch": "step", "tau": 0.2, "margin": 0.0}}


def test_a_first_phase_beside_the_gradients_is_one_event_with_them_and_sets_the_next_radius(digits):
    clients = digits.with_budgets(100.0, delta=1e-4)
    done = sd.train(clients, "logistic", get("adaptdp", BESIDE), rounds=3, steps=2, **SETTINGS)
    assert [one["clip"] == 5.0 for one in done.metrics] == [True, False, False]
    for one in done.privacy:
        assert [(r["what"], r["count"]) for r in one["releases"]] == [("gradient+squared-norm", 6)]
        assert 0.97 * one["epsilon"] < one["spent_epsilon"] <= one["epsilon"]


def test_beside_the_gradients_the_radius_is_that_of_a_batch_of_its_own(least_squares):
    """Weights held nearly still, so that a round's delay does not matter; τ and ν̃ as they are."""
    clients = least_squares.with_budgets(8.0, delta=1e-4)
    settings = {"rounds": 20, "batch": 100, "steps": 5, "lr": 1e-4, "clip": 2.0, "evaluate": 20}
    plain = {"name": "squared-norm", "margin": 0.0}
    own = sd.train(clients, line(), get("adaptdp", {"ask": plain}), **settings)
    beside = sd.train(clients, line(), get("adaptdp", {"ask": {**plain, "batch": "step"}}), **settings)
    radii = [np.mean([one["clip"] for one in done.metrics[1:]]) for done in (own, beside)]
    assert radii[1] == pytest.approx(radii[0], rel=0.1)
    assert radii[1] < 1.5, "the clip hides no difference"


@pytest.fixture(scope="module")
def near_and_far():
    """Two clients with least-squares records whose gradients differ by a factor of nine."""
    generator = np.random.default_rng(1)
    z = generator.standard_normal((1000, 10)).astype(np.float32) / math.sqrt(10)
    y = (z @ generator.standard_normal(10)).astype(np.float32)
    z[500:], y[500:] = 3 * z[500:], 3 * y[500:]
    source = Dataset("artificial", z, y, "regression", None, np.ones(1000, bool))
    halves = [np.arange(500), np.arange(500, 1000)]
    made = source.partition("iid", clients=2, seed=0, test=0.0)
    return replace(made, train=halves).with_budgets(2000.0, delta=1e-4)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize(
    ("method", "ask"),
    [
        ("adaptdp", {"name": "squared-norm", "margin": 0.0, "tau": 0.5}),
        ("adaptdp", {"name": "squared-norm", "margin": 0.0, "tau": 0.5, "reach": 3.0}),
        ("quantile-clipping", {"name": "under-radius", "rate": 0.5}),
    ],
)
def test_every_client_may_have_a_radius_of_its_own(near_and_far, method, ask, steps):
    """Each is what the client's own gradients make it; a common one lies between them. Weights stand still."""
    settings = {"rounds": 30, "batch": 100, "steps": steps, "lr": 1e-5, "clip": 9.0, "evaluate": 30}
    own = sd.train(near_and_far, line(), get(method, {"ask": {**ask, "per_client": True}}), **settings)
    common = sd.train(near_and_far, line(), get(method, {"ask": ask}), **settings)
    norms = np.abs(near_and_far.y) * np.linalg.norm(near_and_far.x, axis=1)
    expected = [
        np.median(norms[part]) if method == "quantile-clipping" else np.sqrt((np.minimum(norms[part], 9.0) ** 2).mean())
        for part in near_and_far.train
    ]
    last = own.metrics[-1]
    assert list(last["clips"].values()) == pytest.approx(expected, rel=0.3)
    assert expected[0] < common.metrics[-1]["clip"] < expected[1]
    assert "clips" not in common.metrics[-1]
    if method == "quantile-clipping":
        assert last["observer"]["clipped_share"] == pytest.approx(0.5, abs=0.12)


def test_noise_follows_every_clients_own_radius(near_and_far):
    """Declared variances, which aggregation rules weigh by, are in proportion to the squares of the radii."""
    ask = {"name": "squared-norm", "margin": 0.0, "tau": 0.5, "per_client": True}
    method = get("adaptdp", {"ask": ask, "aggregate": "declared-variance"})
    done = sd.train(near_and_far, line(), method, rounds=2, batch=100, steps=2, lr=1e-3, clip=9.0)
    for one in done.metrics:
        radii, weights = (np.array(list(one[key].values())) for key in ("clips", "weights"))
        assert weights[0] / weights[1] == pytest.approx((radii[1] / radii[0]) ** 2, rel=0.05)


def test_the_quantiles_answer_is_charged_with_the_gradient_of_its_batch(digits):
    """One event: z_eff = (z⁻² + z_b⁻²)^(−1/2), so the gradient's own noise is larger than that of dp-fedavg."""
    done = sd.train(digits, "logistic", "quantile-clipping", rounds=3, steps=2, **SETTINGS)
    for one in done.privacy:
        assert [(r["what"], r["count"]) for r in one["releases"]] == [("gradient+under-radius", 6)]
    ours = sd.plan(digits, "logistic", "quantile-clipping", rounds=3, **SETTINGS).plan.clients
    plain = sd.plan(digits, "logistic", "dp-fedavg", rounds=3, **SETTINGS).plan.clients
    for mine, theirs in zip(ours, plain):
        assert mine.terms.event.noise == pytest.approx(theirs.noise, rel=1e-3)
        assert mine.noise == pytest.approx(theirs.noise / math.sqrt(0.95), rel=1e-3)


@pytest.mark.parametrize("share", [0.02, 0.4])
def test_a_larger_share_for_the_radius_means_less_noise_on_it_and_more_on_gradients(digits, share):
    method = replace(get("adaptdp"), ask=squared_norm(share=share))
    for one in sd.plan(digits, "logistic", method, rounds=5, steps=3, **SETTINGS).plan.clients:
        gradient, asked = one.terms, one.asks[0]
        spent = asked.event.count * 5 / asked.noise("squared-norm") ** 2
        assert spent / (spent + 15 / gradient.noise("gradient") ** 2) == pytest.approx(share, rel=1e-6)
        assert one.epsilon == pytest.approx(one.budget.epsilon, rel=1e-3)


@pytest.mark.parametrize("times", [0.1, 10.0])
def test_quantile_clipping_finds_the_median_gradient_norm_from_far_away(least_squares, times):
    """The case in which other implementations stay where they started."""
    clients = least_squares.with_budgets(4.0, delta=1e-4)
    settings = {"batch": 100, "steps": 2, "lr": 0.001, "rounds": 60, "evaluate": 60}
    first = sd.train(clients, line(), "quantile-clipping", clip=1.0, **settings | {"rounds": 1})
    median = first.metrics[0]["observer"]["median_norm"]
    done = sd.train(clients, line(), "quantile-clipping", clip=times * median, **settings)
    last = done.metrics[-1]
    assert last["clip"] == pytest.approx(last["observer"]["median_norm"], rel=0.15)


def test_quantile_clipping_tracks_another_quantile_when_asked(least_squares):
    clients = least_squares.with_budgets(4.0, delta=1e-4)
    method = replace(get("quantile-clipping"), ask=under_radius(target=0.9, rate=0.4))
    done = sd.train(clients, line(), method, rounds=60, batch=100, steps=2, lr=0.001, clip=0.5, evaluate=60, seed=1)
    assert done.metrics[-1]["observer"]["clipped_share"] == pytest.approx(0.1, abs=0.05)


def test_what_the_observer_sees_is_right_and_marked_as_not_released(digits):
    done = sd.train(digits, "logistic", "adaptdp", rounds=1, **SETTINGS)
    seen, clip = done.metrics[0]["observer"], done.metrics[0]["clip"]
    assert "not released" in seen["note"]
    ready = running.prepare(digits, "logistic", "adaptdp", 0, None, {"rounds": 1, **SETTINGS})
    where = np.concatenate(digits.train)
    x, y = torch.from_numpy(digits.x[where]).double(), torch.from_numpy(digits.y[where])
    norms = np.array([float(g.norm()) for g in adaptive_loop.record_gradients(ready.template.double(), x, y)])
    assert seen["clipped_share"] == pytest.approx((norms > clip).mean(), abs=2 / len(norms))
    assert seen["median_norm"] == pytest.approx(np.median(norms), rel=1e-4)
    for q in (0.5, 0.7, 1.0):
        assert seen["tau"][f"{q:g}"] == pytest.approx(np.quantile(norms**2, q) / (norms**2).mean(), rel=1e-4)


@pytest.mark.parametrize("method", ["dp-fedavg", "auto-clipping"])
def test_methods_with_a_fixed_radius_are_not_watched(digits, method):
    done = sd.train(digits, "logistic", method, rounds=1, **SETTINGS)
    assert "clip" not in done.metrics[0]
    assert "clipped_share" not in done.metrics[0]["observer"]


T1 = {"rounds": 150, "batch": 100, "steps": 20, "sampling": "fixed", "lr": 0.1, "clip": 3.0}


def test_wor_paper_gives_each_of_two_phases_a_quarter_and_a_single_one_half(least_squares):
    clients = least_squares.with_budgets(30.0, delta=1e-4, adjacency="replace-one")
    two = sd.plan(clients, line(), replace(get("adaptdp"), calibrate="wor-paper"), **T1).plan.clients[0]
    quarter = ("fixed", "wor-paper", "replace-one")
    assert two.noise == pytest.approx(calibrate(30.0, 1e-4, 0.05, 3000, *quarter), rel=1e-6)
    assert two.asks[0].noise("squared-norm") == pytest.approx(calibrate(30.0, 1e-4, 0.05, 150, *quarter), rel=1e-6)
    assert two.epsilon <= 30.0
    one = sd.plan(clients, line(), replace(get("dp-fedavg"), calibrate="wor-paper"), **T1).plan.clients[0]
    assert one.noise < two.noise
    tight = sd.plan(clients, line(), "adaptdp", **T1).plan.clients[0]
    assert tight.noise < two.noise, "the default accountant needs less noise for the same promise"


def test_wor_paper_with_a_full_first_phase_is_remark_3(least_squares):
    """R·α/(2z²) ≤ ε/4 at α* = 1 + ⌈2 ln(1/δ)/ε⌉."""
    clients = least_squares.with_budgets(30.0, delta=1e-4, adjacency="replace-one")
    method = replace(get("adaptdp"), ask=squared_norm(size="full"), calibrate="wor-paper")
    asked = sd.plan(clients, line(), method, **T1).plan.clients[0].asks[0]
    order = 1 + math.ceil(2 * math.log(1e4) / 30.0)
    assert asked.noise("squared-norm") == pytest.approx(math.sqrt(150 * order / (2 * 30.0 / 4)), rel=1e-6)
    assert asked.divisor == 2000


@pytest.mark.parametrize("method", ["adaptdp", "dp-fedavg"])
def test_wor_paper_says_where_it_certifies_nothing(least_squares, method):
    clients = least_squares.with_budgets(1.0, delta=1e-4, adjacency="replace-one")
    with pytest.raises(BadInput, match="certifies no noise at all"):
        sd.plan(clients, line(), replace(get(method), calibrate="wor-paper"), **T1)
    assert sd.plan(clients, line(), method, **T1).plan.clients[0].epsilon <= 1.0, "the tight accountant does"


def test_batches_without_replacement_train_end_to_end_within_budget(least_squares):
    clients = least_squares.with_budgets(30.0, delta=1e-4, adjacency="replace-one")
    method = replace(get("adaptdp"), calibrate="wor-paper")
    done = sd.train(clients, line(), method, **T1 | {"rounds": 5})
    for one in done.privacy:
        assert one["sampling"] == "fixed"
        assert one["adjacency"] == "replace-one"
        assert one["spent_epsilon"] <= 30.0
        assert len(one["releases"]) == 2


def test_a_study_file_can_set_every_option():
    study = make_study(
        {
            "method": {
                "name": "adaptdp",
                "ask": {"name": "squared-norm", "share": 0.2, "size": "full", "tau": 2.0, "weigh": "precision"},
                "local": "averaged",
                "aggregate": "averaged",
                "server": {"name": "ball", "bound": 10.0},
            }
        }
    )
    chosen = study.chosen_method()
    assert (
        chosen.describe()["ask"]
        == "squared-norm (own batch of full, share 0.2) → root-mean-square(tau=2.0, weigh=precision)"
    )
    assert chosen.describe()["server"] == "ball(bound=10.0)"
    with pytest.raises(BadInput, match="no option 'taw'"):
        get("adaptdp", {"ask": {"name": "squared-norm", "taw": 2.0}})


@pytest.mark.parametrize("size", ["half", 0.0, -3])
def test_a_senseless_batch_size_of_a_question_is_refused(size):
    with pytest.raises(BadInput, match=r"ask\.size"):
        squared_norm(size=size)


def test_the_published_levels_are_not_private_by_their_own_formula():
    levels = {(one.task[:2], one.level): one for one in published_levels()}
    assert levels["T3", 1].epsilon == pytest.approx(1.2e6, rel=0.05)
    assert levels["T2", 3].epsilon == pytest.approx(5.0, rel=0.1)
    assert [key for key, one in levels.items() if one.epsilon < 50] == [("T2", 3)]
    assert all(one.tightened <= one.epsilon for one in levels.values())


def test_the_documentation_shows_these_levels():
    page = Path(__file__).parents[2] / "docs" / "methods" / "adaptdp.md"
    assert levels_table() in page.read_text()
