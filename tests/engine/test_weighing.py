"""What a result records of the combination: declared against optimum weights, noise power, spectra."""

import numpy as np
import pytest
import torch

import sordino as sd
from sordino.engine.rounds import weighed
from sordino.server.facts import Facts
from sordino.server.rules import RULES


def variances(view) -> np.ndarray:
    """σ_i² = K (η C z_i/b_i)² from the plan's own figures, written out; η = 0.3, C = 1."""
    return np.array([c["steps"] * (0.3 * c["noise"] / c["batch"]) ** 2 for c in view.clients])


@pytest.mark.parametrize("method", ["dp-fedavg", "weiavg", "robust-hdp", "factor-hdp", "optimum"])
def test_every_evaluated_round_tells_declared_and_optimum_weights_and_the_noise_power(digits, method):
    settings = {"rounds": 2, "rate": 0.2, "lr": 0.3, "steps": 2}
    view = sd.plan(digits, "logistic", method, **settings)
    sigma = variances(view)
    best = (1 / sigma) / (1 / sigma).sum()
    done = sd.train(digits, "logistic", method, evaluate=2, **settings)
    first, last = done.metrics
    assert "declared_weights" not in first
    names = list(last["weights"])
    assert [last["declared_weights"][n] for n in names] == pytest.approx(best, rel=1e-5)
    assert [last["observer"]["optimum_weights"][n] for n in names] == pytest.approx(best, rel=1e-5)
    used = np.array([last["weights"][n] for n in names])
    assert last["observer"]["noise_power"] == pytest.approx((used**2 * sigma).sum() / 0.3**2, rel=1e-6)
    assert last["observer"]["least_noise_power"] == pytest.approx(1 / (1 / sigma).sum() / 0.3**2, rel=1e-6)
    assert last["observer"]["note"] == "seen in simulation, not released"
    if method == "optimum":
        assert last["observer"]["noise_power"] == pytest.approx(last["observer"]["least_noise_power"], rel=1e-6)


def test_without_noise_there_is_nothing_to_tell(digits):
    assert "observer" not in sd.train(digits, "logistic", "fedavg", rounds=1, rate=0.2).metrics[0]


def test_a_client_that_declares_less_noise_than_it_adds_is_seen_by_the_observer_only():
    ones = np.ones(3)
    declared, truth = np.array([1.0, 1.0, 0.01]), np.array([1.0, 1.0, 4.0])
    clients = np.array([0, 2, 2])
    facts = Facts(clients, ones, ones, ones, ones, ones, declared, ones, true_variances=truth, lr=2.0)
    found = weighed(facts, np.array([0.5, 0.25, 0.25]), ["a", "b", "c"], {"before": 1})
    assert found["declared_weights"] == pytest.approx({"a": 1 / 102, "c": 101 / 102}, rel=1e-5)
    seen = found["observer"]
    assert seen["optimum_weights"] == pytest.approx({"a": 1 / 2.25, "c": 1.25 / 2.25}, rel=1e-5)
    assert seen["noise_power"] == pytest.approx((0.25 + 0.0625 + 0.25) / 4)
    assert seen["before"] == 1


def test_spectra_of_the_updates_come_from_the_rules_that_look_at_them(digits):
    for method, low_rank in (("robust-hdp", True), ("factor-hdp", False), ("random-effects", False)):
        shown = sd.train(digits, "logistic", method, rounds=1, rate=0.2).metrics[0]["diagnostics"]
        spectrum = shown["update_singular_values"]
        assert len(spectrum) == 6
        assert spectrum == sorted(spectrum, reverse=True)
        assert ("low_rank_singular_values" in shown) == low_rank
    assert spectrum[0] > 0


@pytest.mark.parametrize("rule", ["robust-hdp", "factor-hdp", "random-effects"])
def test_the_spectrum_is_that_of_the_update_matrix(rule):
    draw = np.random.default_rng(0)
    noise = np.array([0.5, 1.0, 1.5, 2.0, 3.0])
    updates = draw.normal(size=(5, 400)) * noise[:, None]
    ones = np.ones(5)
    facts = Facts(np.arange(5), ones, ones, ones, noise, ones, noise**2, ones, lr=1.0)
    shown = RULES[rule]()(torch.from_numpy(updates), facts, {}).diagnostics
    assert shown["update_singular_values"] == pytest.approx(np.linalg.svd(updates)[1], rel=1e-6)


def test_a_refused_client_keeps_its_place_among_the_estimates():
    draw = np.random.default_rng(0)
    updates = torch.from_numpy(draw.normal(size=(5, 400)))
    updates[2] = torch.nan
    ones = np.ones(5)
    outcome = RULES["factor-hdp"]()(updates, Facts(np.arange(5), *([ones] * 7)), {})
    estimates = outcome.diagnostics["estimated_variances"]
    assert [one is None for one in estimates] == [False, False, True, False, False]
    assert outcome.weights[2] == 0.0
