"""Paid evaluation as people read it: in a plan before, in summaries and in the report after."""

import json
import math

import numpy as np
import pytest
import report_fixture as fixture
from rich.console import Console

import sordino as sd
from sordino.study.compare import comparison_table, plain_results
from sordino.study.evaluated import best_of, estimate_of, half_width
from sordino.study.report import render


@pytest.fixture(scope="module")
def clients():
    return sd.data.load("digits").partition("iid", clients=3, seed=0).with_budgets([1.0, 3.0, 9.0], delta=1e-4)


@pytest.fixture(scope="module")
def runs(clients):
    keys = {"rounds": 6, "lr": 1.0, "evaluation": {"every": 2, "share": 0.3, "keep": "best"}}
    return [sd.train(clients, "logistic", name, **keys).result for name in ("dp-fedavg", "weiavg")]


def shown(thing):
    console = Console(width=120)
    with console.capture() as caught:
        console.print(thing)
    return " ".join(caught.get().split())


def test_a_plan_says_how_precise_evaluation_will_be_and_what_it_costs(clients):
    view = sd.plan(clients, "logistic", "dp-fedavg", rounds=6, evaluation={"every": 2, "share": 0.3, "spend": 0.5})
    found = view.to_dict()["evaluation"]
    assert found["times"] == 3
    assert found["training_epsilon"] == 0.0
    judging = view.plan.judging
    for one, terms, held, budget in zip(found["sites"], judging.terms, judging.held, (1.0, 3.0, 9.0)):
        assert one["held"] == held
        assert one["noise"] == terms.noise("correct")
        assert one["half_width"] == pytest.approx(
            min(1.0, 1.96 * math.sqrt(0.8 * 0.2 / held + one["noise"] ** 2 / held**2))
        )
        assert one["epsilon"] == pytest.approx(0.5 * budget, rel=1e-3)
    total = sum(one["held"] for one in found["sites"])
    noise = math.sqrt(sum(one["noise"] ** 2 for one in found["sites"]))
    assert found["pooled"]["half_width"] == pytest.approx(half_width(total, noise))
    text = shown(view)
    assert "evaluated 3 times, on held-out records" in text
    assert "training records pay nothing" in text
    assert sd.plan(clients, "logistic", "dp-fedavg", rounds=6).to_dict()["evaluation"] is None


def test_the_expected_half_width_is_the_spread_of_simulated_estimates():
    draw, held, noise = np.random.default_rng(0), 150, 9.0
    seen = (draw.binomial(held, 0.8, 40_000) + draw.normal(0, noise, 40_000)) / held
    assert half_width(held, noise) == pytest.approx(1.96 * seen.std(), rel=0.02)


def test_numbers_to_predict_have_no_accuracy_to_promise():
    clients = sd.data.load("least-squares").partition("iid", clients=2, seed=0).with_budgets(4.0, delta=1e-3)
    found = sd.plan(clients, "logistic", "dp-fedavg", rounds=4, evaluation={}).evaluation
    assert found["pooled"]["half_width"] is None
    assert found["pooled"]["noise"] > 0


def test_a_summary_tells_the_estimate_with_its_interval_and_the_best_of_several(runs):
    one = shown(comparison_table(runs[:1]))
    row = estimate_of(runs[0])
    assert row["round"] == runs[0]["kept"]["round"]
    assert f"{100 * row['value']:.1f} % [{100 * row['low']:.1f}, {100 * row['high']:.1f}]" in one
    both = shown(comparison_table(runs))
    assert both.count("best by paid evaluation") == 1
    assert "[tune] tries settings under one budget" in both
    better = int(np.argmax([estimate_of(run)["value"] for run in runs]))
    assert best_of(runs) == better


def test_the_best_is_not_named_unless_every_run_paid(runs):
    assert best_of([runs[0], {**runs[1], "evaluation": None}]) is None
    assert best_of([runs[0], {**runs[1], "private": False}]) is None
    assert best_of(runs[:1]) is None


def test_the_report_has_a_section_that_was_paid_for_with_both_accounts(runs):
    page = render(plain_results(runs))
    assert "How good is it? (paid for)" in page
    assert "Best by paid evaluation" in page
    assert "Covered: what is chosen by paid estimates" in page
    assert "Not covered: tuning and choosing" not in page
    assert "Not covered: the observer's metrics" in page
    data = json.loads(page.split('<script type="application/json"', 1)[1].split(">", 1)[1].split("</script>", 1)[0])
    chart = next(one for one in data["charts"] if one["id"] == "evaluated")
    band, line, observer = chart["traces"][:3]
    rows = [row for row in runs[0]["evaluation"] if row["metric"] == "accuracy"]
    assert line["y"] == pytest.approx([row["value"] for row in rows], abs=1e-3)
    ends = [*(row["high"] for row in rows), *(row["low"] for row in reversed(rows))]
    assert band["y"] == pytest.approx(ends, abs=1e-3)
    assert observer["y"] == pytest.approx([row["accuracy"] for row in runs[0]["rounds"]], abs=1e-3)
    statements = " ".join(data["clients"]["texts"])
    assert "held-out ones" in statements


def test_a_report_without_evaluation_says_that_choosing_is_not_covered():
    page = render([fixture.result()])
    assert "paid for)" not in page
    assert "Not covered: tuning and choosing" in page
