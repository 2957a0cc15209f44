"""Every method with shared noise: it runs to its end within everybody's budget, or is refused with cause and remedy."""

import math
import re

import numpy as np
import pytest

import sordino as sd
from sordino.errors import BadInput
from sordino.methods import get, names

KEYS = {"rounds": 2, "rate": 0.2, "lr": 0.3, "clip": 0.7}
TRUST = {"noise": "shared", "colluders": 2}

RUN = [
    "auto", "dp-fedavg", "minimum-epsilon", "weiavg", "declared-variance", "fedfdp", "adaptdp", "quantile-clipping",
    "auto-clipping", "uniform", "unbiased", "unbiased-compensated", "privacy-aware", "dp-fedprox",
]  # fmt: skip
CAUSES = {
    "not private": r"adds no noise \(NOT PRIVATE\); use",
    "single updates": r"looks at single updates, and the server sees their sum alone; use",
    "single answers": r"looks at single answers, and the server sees their sum alone; use",
    "own model": r"goes on from what one client released.*use local",
}


def cause_of(name):
    method = get(name)
    if not method.private:
        return "not private"
    return {"power-of-choice": "single answers", "mr-mtl": "own model"}.get(name, "single updates")


@pytest.mark.parametrize("name", names())
def test_a_method_runs_or_says_why_not_and_what_to_do(digits, name):
    more = {"select": 4} if get(name).select.draws and name != "power-of-choice" else {}
    if name not in RUN:
        with pytest.raises(BadInput, match=f"'{re.escape(name)}'.*{CAUSES[cause_of(name)]}"):
            sd.train(digits, "logistic", name, trust=TRUST, **KEYS)
        return
    run = sd.train(digits, "logistic", name, trust=TRUST, **KEYS, **more)
    assert len(run.metrics) == 2
    assert math.isfinite(run.result["final"]["loss"])
    for one, epsilon in zip(run.privacy, [0.5, 1.0, 2.0, 4.0, 8.0, 1.0]):
        assert one["spent_epsilon"] <= epsilon
        assert one["own_epsilon"] >= one["spent_epsilon"]
        if one["releases"] and any(r["count"] for r in one["releases"]):
            assert one["trust"].startswith("against the server")
    assert run.result["study"]["trust"] == {"noise": "shared", "colluders": 2, "dropouts": 0}


def test_all_that_must_run_are_there():
    assert set(RUN) <= set(names())


@pytest.mark.parametrize(
    ("method", "more", "told"),
    [
        ("dp-fedavg", {"steps": 2}, "takes 2 local steps.*use training.steps = 1"),
        ("dp-fedavg", {"epochs": 1}, "local steps.*use training.steps = 1"),
        (("dp-fedavg", {"local": "scaffold", "aggregate": "scaffold"}), {}, "single updates.*use"),
        (("adaptdp", {"ask": {"name": "squared-norm", "per_client": True}}), {}, "single answers.*leave it out"),
        (("privacy-aware", {"select": {"name": "privacy-aware", "headroom": 2.0}}), {}, "headroom.*leave it at 1"),
    ],
)
def test_what_a_sum_cannot_do_is_refused_with_a_remedy(digits, method, more, told):
    chosen = method if isinstance(method, str) else get(*method)
    with pytest.raises(BadInput, match=told):
        sd.train(digits, "logistic", chosen, trust=TRUST, **{**KEYS, **more})


def test_nobody_with_a_finite_budget_has_no_noise_to_share(digits):
    with pytest.raises(BadInput, match=r"nobody has a finite budget.*give somebody one"):
        sd.plan(digits.with_budgets([math.inf] * 6, delta=1e-4), "logistic", "dp-fedavg", trust=TRUST, **KEYS)


def test_a_round_of_public_sites_only_is_refused(digits):
    clients = digits.with_budgets([1.0] + [math.inf] * 5, delta=1e-4)
    with pytest.raises(BadInput, match=r"nobody with a finite budget is asked.*ask more"):
        sd.plan(clients, "logistic", "uniform", trust=TRUST, **{**KEYS, "rounds": 30}, select=1)


def test_noise_per_site_is_the_default_and_changes_nothing(digits):
    plain = sd.train(digits, "logistic", "dp-fedavg", **KEYS)
    said = sd.train(digits, "logistic", "dp-fedavg", trust={"noise": "per-site"}, **KEYS)
    assert (plain.weights == said.weights).all()
    assert "trust" not in plain.result["study"]
    assert {one["trust"] for one in plain.privacy} == {"against the server and all other sites together"}


def test_a_result_with_a_public_site_is_read_as_it_was_written(digits, tmp_path):
    clients = digits.with_budgets([0.5, 1.0, math.inf, 4.0, 8.0, 1.0], delta=1e-4)
    run = sd.train(clients, "logistic", "dp-fedavg", out=tmp_path / "run", trust=TRUST, **KEYS)
    assert run.privacy[2]["own_epsilon"] == math.inf
    assert sd.load(tmp_path / "run").privacy == run.privacy


def test_conclusions_see_the_mean_of_all_answers_and_no_single_one(digits):
    """A question of one's own whose conclusion looks at everything it is given."""
    seen = []
    method = get("quantile-clipping")
    (ask,) = method.ask

    def curious(answers, facts):
        seen.append((answers.shape, facts.answers, facts.uploads, facts.sizes.sum()))
        return ask.conclude(answers, facts)

    from dataclasses import replace

    spying = replace(method, name="spying", ask=(replace(ask, conclude=curious),))
    sd.train(digits, "logistic", spying, trust=TRUST, **KEYS)
    assert len(seen) == 2
    for shape, answers, uploads, size in seen:
        assert shape == (1,)
        assert not answers
        assert not uploads
        assert size == np.sum(digits.sizes)
