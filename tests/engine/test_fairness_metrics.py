"""What an observer sees of fairness, for every run of every method."""

import json

import numpy as np
import pytest
import torch

import sordino as sd
from sordino.engine.evaluate import by_budget, spread
from sordino.study.result import to_json

KEYS = ("psi", "accuracy_variance", "worst_decile", "best_decile", "worst_accuracy")


@pytest.mark.parametrize("method", ["dp-fedavg", "fedfdp", "fedavg"])
def test_every_evaluated_round_and_the_end_tell_how_unequal_clients_fare(digits, method):
    done = sd.train(digits, "logistic", method, rounds=2, rate=0.2)
    for record in [*done.metrics, done.result["final"]]:
        accuracy = np.array(record["client_accuracy"])
        loss = np.array(record["client_loss"])
        shares = digits.sizes / digits.sizes.sum()
        mean = sum(s * f for s, f in zip(shares, loss))
        assert record["psi"] == pytest.approx(sum(s * (f - mean) ** 2 for s, f in zip(shares, loss)))
        assert record["accuracy_variance"] == pytest.approx(sum((a - accuracy.mean()) ** 2 for a in accuracy) / 6)
        assert record["worst_decile"] == pytest.approx(accuracy.min())
        assert record["best_decile"] == pytest.approx(accuracy.max())
    assert set(KEYS) <= set(json.loads(to_json(done.result))["final"])


def test_the_end_also_tells_unfairness_on_the_records_that_were_trained_on(digits):
    done = sd.train(digits, "logistic", "fedavg", rounds=2, rate=0.2)
    losses = []
    for one in digits.train:
        out = done.model(torch.from_numpy(digits.x[one]))
        losses.append(torch.nn.functional.cross_entropy(out, torch.from_numpy(digits.y[one])).item())
    shares = digits.sizes / digits.sizes.sum()
    mean = sum(s * f for s, f in zip(shares, losses))
    assert done.result["final"]["train_loss"] == pytest.approx(mean, rel=1e-5)
    psi = sum(s * (f - mean) ** 2 for s, f in zip(shares, losses))
    assert done.result["final"]["train_psi"] == pytest.approx(psi, rel=1e-4)


def test_a_model_whose_loss_is_no_number_is_neither_good_nor_fair(digits, caplog):
    """Weights of 1e30 are finite, what a hidden layer makes of them is not."""
    done = sd.train(digits, "mlp", "fedavg", rounds=1, rate=0.2, server_lr=1e30)
    told = json.loads(to_json(done.result))
    for record in [*told["rounds"], told["final"]]:
        assert record["loss"] is None
        assert record["psi"] is None
    assert told["final"]["train_loss"] is None
    assert "training diverged" in caplog.text


def test_deciles_are_means_of_a_tenth_of_the_clients():
    found = spread(np.arange(100)[::-1] / 100)
    assert found["worst_decile"] == pytest.approx(np.mean(np.arange(10)) / 100)
    assert found["best_decile"] == pytest.approx(np.mean(np.arange(90, 100)) / 100)


def test_clients_are_grouped_by_budget_strictest_first(digits):
    groups = sd.train(digits, "logistic", rounds=2, rate=0.2).result["final"]["by_budget"]
    found = [(g["least_epsilon"], g["most_epsilon"], g["clients"]) for g in groups]
    assert found == [(0.5, 0.5, 1), (1, 2, 3), (4, 8, 2)]


def test_a_group_is_the_mean_of_its_clients_and_equal_budgets_stay_together():
    epsilons, accuracy, loss = [1.0, 9.0, 1.0, 3.0], [0.2, 0.9, None, 0.5], [4.0, 1.0, 2.0, None]
    strict, middle, loose = by_budget(epsilons, accuracy, loss)
    assert (strict["clients"], strict["accuracy"], strict["loss"]) == (2, 0.2, 3.0)
    assert (middle["accuracy"], middle["loss"]) == (0.5, None)
    assert (loose["accuracy"], loose["loss"]) == (0.9, 1.0)
    assert by_budget([2.0, 2.0], [0.1, 0.2], [1.0, 1.0]) == []
    assert by_budget([1.0, np.inf], None, [1.0, 2.0])[1]["accuracy"] is None
