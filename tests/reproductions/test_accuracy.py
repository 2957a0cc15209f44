"""The accuracy benchmark: its probe is the product's own training, its fit finds what is there, its page counts."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

import papers
import sordino as sd
from papers import accuracy, accuracy_page, accuracy_probe, accuracy_search
from papers.accuracy_probe import Point
from papers.accuracy_rule import fit, regret_of
from papers.accuracy_triples import Asked, triples
from papers.make import Workshop
from sordino.methods.auto import Rule
from sordino.study.run import prepare
from sordino.study.session import train_prepared


@pytest.fixture(scope="module")
def clients():
    return sd.data.load("digits").subset(600).partition("dirichlet", clients=5, beta=1.0, minimum=20, seed=3)


def mapped(ready):
    """The run, its features computed by hand."""
    x = sd.models.apply_fixed(ready.fixed, torch.from_numpy(ready.clients.x)).numpy()
    return replace(ready, clients=replace(ready.clients, x=x))


def trained(federation, point):
    settings = {key: getattr(point, key) for key in ("rounds", "rate", "lr", "cooldown", "pull")}
    settings |= {"clip": 1.0, "evaluate": point.rounds}
    server = {"name": "recent", "share": point.share} if point.share else {"name": "plain"}
    method = sd.methods.get("auto", {"aggregate": {"name": "balanced", "spread": point.spread}, "server": server})
    run = sd.train(federation, method=method, seed=7, **settings)
    ready = prepare(federation, "auto", method, 7, None, settings)
    linear = run.model[-1] if isinstance(run.model[-1], torch.nn.Linear) else list(run.model.modules())[-1]
    weights = linear.weight.detach().T
    return weights, run, accuracy_search.heads_of(mapped(ready), halved=10**9)


def test_without_noise_the_probe_ends_where_auto_does(clients):
    points = [Point(30, 1.0, 3.0, 0.5, 0.0, 1.0, 0.1), Point(30, 1.0, 1.0, 1.0, 1 / 30, 1.0, 0.0)]
    for place, point in enumerate(points):
        weights, run, heads = trained(clients.with_budgets("inf"), point)
        probed = accuracy_probe.train(heads, points, seed=0, noisy=False)[place]
        assert torch.allclose(probed, weights, atol=1e-4)
        score = accuracy_search.scores(heads, probed[None], None)[0]
        assert score == pytest.approx(100 * run.result["final"]["accuracy"], abs=0.3)


def test_the_probes_one_noise_has_the_variance_of_everybodys(clients):
    federation = clients.with_budgets([0.3, 4.0, 1.0, 0.5, 2.0], delta=1e-5)
    point = Point(1, 1.0, 1.0, 0.0, 0.0, 0.7, 0.0)
    quiet, _, _ = trained(federation.with_budgets([1e5] * 5), point)
    weights, _, heads = trained(federation, point)
    exact = heads.deviation(point.spread, 1)
    probed = accuracy_probe.train(heads, [point] * 4, seed=1) - accuracy_probe.train(heads, [point] * 4, 1, noisy=False)
    assert float(probed.std()) == pytest.approx(exact, rel=0.03)
    # Budgets change the weights of clients, and so the mean: the noise is far larger here.
    assert float((weights - quiet).std()) == pytest.approx(exact, rel=0.08)
    by_hand = math.sqrt(sum((w * z) ** 2 for w, z in zip(heads.weights(0.7, 1), heads.noise)))
    assert exact == pytest.approx(by_hand)


def test_points_of_different_rounds_are_not_probed_together(clients):
    _, _, heads = trained(clients.with_budgets(8.0), Point(1, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0))
    with pytest.raises(ValueError, match="same rounds and rate"):
        accuracy_probe.train(heads, [Point(1, 1.0, 1, 0, 0, 1, 0), Point(2, 1.0, 1, 0, 0, 1, 0)], 0)


def test_r_squared_is_judged_about_the_training_mean():
    random = np.random.default_rng(0)
    arrays = [(random.random((n, 2), dtype=np.float32), random.random(n, dtype=np.float32)) for n in (40, 60)]
    federation = sd.data.from_arrays(arrays, task="regression")
    mean = np.mean([float(federation.y[j]) for part in federation.train for j in part])
    total = 0.0
    for part, test in zip(federation.train, federation.test):
        total += len(part) * sum((float(federation.y[j]) - mean) ** 2 for j in test) / len(test)
    expected = total / sum(len(part) for part in federation.train)
    assert accuracy_search.variance(federation) == pytest.approx(expected, rel=1e-5)


def searched(name, classes, best, random):
    points = []
    low, high = (3 / classes, 300 / classes) if classes else (0.01, 1.5)
    for rounds in (200, 500):
        for noise in np.exp(random.uniform(np.log(low), np.log(high), 200)):
            score = 80 - 5 * np.log(noise / best) ** 2
            points.append({"rounds": rounds, "rate": 0.1, "share": 0.1, "noise": float(noise), "score": float(score)})
        points.append({"rounds": rounds, "rate": 0.1, "share": 0.0, "noise": float(low), "score": 1000.0})
    return {"set": name, "classes": classes, "points": points}


def test_the_fit_finds_the_noise_that_costs_least():
    random = np.random.default_rng(0)
    truth = Rule(25.0, 0.8, 0.1)
    every = [searched(name, k, truth.target(k), random) for name, k in (("a", 2), ("b", 10), ("c", None))]
    rule, regret = fit(every)
    for classes in (2, 10, None):
        assert rule.target(classes) == pytest.approx(truth.target(classes), rel=0.15)
    assert regret < 0.2
    assert max(regret_of(rule, every)) < 0.3
    assert regret_of(Rule(250.0, 0.8, 0.1), every)[0] == pytest.approx(6.0), "far off, a triple counts no more than 6"


def test_without_a_set_the_rule_does_not_know_it():
    random = np.random.default_rng(1)
    found = [searched("a", 10, 1.0, random), searched("b", 10, 8.0, random), searched("school", None, 0.3, random)]
    instead = [searched("least-squares", None, 0.05, random)]
    assert accuracy.without(found, instead, "a")[0].target(10) == pytest.approx(8.0, rel=0.2)
    assert accuracy.without(found, instead, "b")[0].target(10) == pytest.approx(1.0, rel=0.2)
    assert accuracy.without(found, instead, "school")[0].regression == pytest.approx(0.05, rel=0.2)
    assert accuracy.without(found, instead, None)[0].regression == pytest.approx(0.3, rel=0.2)


def test_epsilons_rotate_and_stay_in_their_range():
    every = triples()
    assert len(every) == 24
    assert {one.base for one in every} == {0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0}
    for one in every:
        low, high = one.range
        drawn = one.epsilons(0)
        assert len(drawn) == one.clients
        assert 0.1 <= low <= min(drawn) <= max(drawn) <= high <= 8.0
        assert one.epsilons(0) == drawn
        assert (one.epsilons(1) != drawn) == (one.federation == 1)


def test_an_interval_is_students():
    mean, low, high = accuracy_page.interval([1.0, 2.0, 6.0])
    expected = stats.t.interval(0.95, 2, loc=3.0, scale=stats.sem([1.0, 2.0, 6.0]))
    assert (mean, low, high) == pytest.approx((3.0, *expected))
    assert accuracy_page.interval([1.0]) == (1.0, -math.inf, math.inf)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    folder = tmp_path_factory.mktemp("accuracy")
    return papers.run("accuracy/auto", folder, quick=True, data=folder)


def test_the_quick_version_runs_everything_and_goes_on(quick):
    assert quick.about["left"] == 0
    result = json.loads((quick.folder / "results.json").read_text())
    assert len(result["rows"]) == 2
    assert set(result["rows"][0]["scores"]) == {accuracy_page.AUTO, accuracy_page.WINNER, *accuracy.RIVALS}
    assert [one["without"] for one in result["fits"]] == [None, "digits", "breast-cancer"]
    assert all(len(points) == 8 for points in result["searched"].values())
    for run in result["runs"]:
        assert run["privacy"]["largest_share"] <= 1.0
    page = (quick.folder / "table.md").read_text()
    assert "auto − winner" in page
    before = {path: path.stat().st_mtime_ns for path in quick.folder.glob("*/*")}
    again = papers.run("accuracy/auto", quick.folder, quick=True, data=quick.folder)
    assert {path: path.stat().st_mtime_ns for path in quick.folder.glob("*/*")} == before, "nothing is made again"
    assert again.about["left"] == 0


def test_kept_features_change_no_run(quick, tmp_path):
    cell = triples()[0].cell(Asked("", "auto", {"rounds": 5, "rate": 0.2, "lr": 2.0, "evaluate": 5}), 0)
    runs = [
        train_prepared(Workshop(features=features).prepared(cell), "cpu", [], tmp_path / str(place))
        for place, features in enumerate((None, quick.folder / "features", tmp_path / "features"))
    ]
    assert torch.equal(runs[0].weights, runs[1].weights)
    assert torch.equal(runs[0].weights, runs[2].weights)


def test_auto_is_settled_as_the_product_settles_it():
    triple = triples()[0]
    rule = sd.methods.auto.RULE
    found = accuracy_search._settled(Workshop(), triple, rule, 0)["training"]
    federation = Workshop().federation(triple.cell(Asked("", "auto", {}), 0))
    ready = prepare(federation, "auto", "auto", 0, None, {})
    assert {key: getattr(ready.plan.training, key) for key in found} == found
