"""Least squares from released moments: equal to numpy without noise, bounded, charged once, and the same deployed."""

import math

import numpy as np
import pytest
import torch

import sordino as sd
from sordino import methods
from sordino.client.gradients import build
from sordino.client.gradients.losses import loss_by_name
from sordino.errors import BadInput
from sordino.methods import Method
from sordino.models.moments import Moments
from sordino.parts import aggregate, local
from sordino.privacy.gate import bounded
from sordino.server.moments import LEAST_RIDGE, Statistics, solve

ONCE = {"rounds": 1, "sampling": "full"}


def regression(records=400, features=5, clients=4):
    random = np.random.default_rng(0)
    x = random.normal(size=(records, features)).astype(np.float32)
    y = (x @ random.normal(size=features) + 0.7 + 0.1 * random.normal(size=records)).astype(np.float32)
    parts = np.array_split(np.arange(records), clients)
    return sd.data.from_arrays([(x[p], y[p]) for p in parts], task="regression", test=0.0)


def open_method(**options):
    """The same method without clipping and noise: plain least squares on all records."""
    return Method("open", local=local.moments(), aggregate=aggregate.least_squares(**options), private=False)


def plain_solution(x, y, bias):
    """Least squares by numpy on all records, with or without an intercept."""
    whole = np.c_[x, np.ones(len(x))] if bias else x
    return np.linalg.lstsq(whole.astype(np.float64), y.astype(np.float64), rcond=None)[0]


@pytest.mark.parametrize("model", ["linear", "logistic"])
def test_without_noise_it_is_least_squares_on_everybodys_records(model):
    clients = regression()
    run = sd.train(clients, model, open_method(), **ONCE)
    where = np.concatenate(clients.train)
    wanted = plain_solution(clients.x[where], clients.y[where], bias=model == "logistic")
    np.testing.assert_allclose(run.weights, wanted, atol=2e-4)


def plain_discriminant(x, y, classes):
    """log p_k + a(w_kᵀ(x − m) − ½ q_k) from all records, by definition."""
    x = x.astype(np.float64)
    mean, shares = x.mean(0), np.bincount(y, minlength=classes) / len(y)
    covariance = np.cov(x.T, bias=True)
    covariance_inverse = np.linalg.inv(covariance + LEAST_RIDGE * np.trace(covariance) / len(mean) * np.eye(len(mean)))
    apart = np.stack([x[y == k].mean(0) - mean for k in range(classes)], 1)
    slopes = covariance_inverse @ apart
    lengths = (apart * slopes).sum(0)
    scale = shares @ lengths / (shares @ (slopes * (covariance @ slopes)).sum(0))
    return (scale * slopes).T, np.log(shares) - scale * (mean @ slopes + lengths / 2)


def test_without_noise_classes_get_the_discriminant_of_everybodys_records():
    clients = sd.data.load("breast-cancer").partition("dirichlet", clients=5, beta=1.0, seed=0)
    run = sd.train(clients, "logistic", open_method(), **ONCE)
    where = np.concatenate(clients.train)
    slopes, biases = plain_discriminant(clients.x[where], clients.y[where], 2)
    test = np.concatenate(clients.test)
    with torch.no_grad():
        found = run.model(torch.from_numpy(clients.x[test])).numpy()
    wanted = clients.x[test] @ slopes.T + biases
    np.testing.assert_allclose(found[:, 1] - found[:, 0], wanted[:, 1] - wanted[:, 0], rtol=0.02, atol=0.05)
    assert run.result["final"]["accuracy"] > 0.9


def test_the_ridge_is_what_numpy_makes_of_it():
    random = np.random.default_rng(1)
    x, y = random.normal(size=(50, 4)), random.normal(size=(50, 1))
    second, cross = torch.from_numpy(x.T @ x / 50), torch.from_numpy(x.T @ y / 50)
    found = solve(Statistics(second, cross, intercept=False), deviation=0.1, weight=8.0, ridge=2.0)
    ridge = 2.0 * 0.1 * math.sqrt(2 * 4)
    wanted = np.linalg.solve(x.T @ x / 50 + ridge * np.eye(4), x.T @ y / 50)
    np.testing.assert_allclose(found, wanted[:, 0])


def test_what_noise_made_negative_is_left_out():
    second = torch.diag(torch.tensor([1.0, -0.5], dtype=torch.float64))
    found = solve(Statistics(second, torch.ones(2, 1, dtype=torch.float64), False), 0.05, 8.0)
    ridge = 0.05 * 2.0
    np.testing.assert_allclose(found, [1 / (1 + ridge), 1 / ridge])


@pytest.mark.parametrize(("classes", "model"), [(3, "logistic"), (None, "logistic"), (None, "linear")])
def test_the_gradient_of_a_record_is_its_moments_whatever_the_weights(classes, model):
    module = Moments(sd.models.build(model, (4,), classes, 0), 8.0)
    engine = build(module, "moments")
    x = torch.randn(6, 4)
    y = torch.randn(6) if classes is None else torch.tensor([0, 1, 2, 0, 1, 2])
    for params in (torch.zeros(engine.dimension), torch.randn(engine.dimension)):
        graded = engine.shared(params, x, y, torch.arange(6), 6)
        found = graded.pull(torch.ones(6))
        for j in range(6):
            features = np.r_[x[j].numpy(), [1.0]] if model == "logistic" else x[j].numpy()
            outer = np.outer(features, features)
            target = np.array([y[j]]) if classes is None else np.eye(classes)[y[j]]
            row, column = np.triu_indices(len(features))
            pairs = np.where(row == column, 1, math.sqrt(2)) * outer[row, column]
            crossed = 8.0 * np.outer(target, features)
            last = [crossed[:, :4].ravel(), crossed[:, 4:].ravel()]
            np.testing.assert_allclose(found[j], -np.concatenate([pairs, *last]), rtol=1e-4, atol=1e-5)
            size = features @ features
            length = math.sqrt(size**2 + 64 * size * (target @ target))
            assert float(graded.norms[j]) == pytest.approx(length, rel=1e-5)
    losses, slopes = loss_by_name("moments").graded(outputs := torch.randn(6, 1 + (classes or 1)), y)
    outputs.requires_grad_()
    loss_by_name("moments").values(outputs, y).sum().backward()
    torch.testing.assert_close(slopes, outputs.grad)
    torch.testing.assert_close(losses, loss_by_name("moments").values(outputs, y).detach())


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_no_record_moves_a_release_by_more_than_the_clip(size):
    """Huge, tiny and ordinary records: what the gate adds up for one has norm at most C."""
    rule, public = methods.get("least-squares").clip, {"clip": 0.5, "lr": 1.0}
    engine = build(Moments(sd.models.build("logistic", (4,), None, 0), 8.0), "moments")
    x, y = size * torch.randn(20, 4), size * torch.randn(20)
    graded = engine.shared(torch.zeros(engine.dimension), x, y, torch.arange(20), 20)
    bound = torch.full((20,), 0.5)
    factors = bounded(rule.factors(graded.losses, graded.norms, public), graded.limits, bound)
    assert float(graded.pull(factors).norm(dim=1).max()) <= 0.5 * (1 + 1e-5)


def test_one_release_is_charged_and_uses_the_whole_budget(digits):
    run = sd.train(digits, "logistic", "least-squares", **ONCE)
    for one in run.privacy:
        assert [(e["what"], e["count"], e["rate"]) for e in one["releases"]] == [("gradient", 1, 1.0)]
        assert 0.99 * one["epsilon"] < one["spent_epsilon"] <= one["epsilon"]


def test_several_rounds_are_averaged_and_an_interrupted_run_goes_on(digits, tmp_path):
    """Moments of all rounds count alike: five rounds without noise end where one does, and so does a resumed run."""
    clients = regression()
    one, five = (sd.train(clients, "logistic", open_method(), rounds=n, sampling="full") for n in (1, 5))
    torch.testing.assert_close(one.weights, five.weights, atol=1e-5, rtol=1e-5)
    keys = {"rounds": 3, "rate": 0.3, "steps": 2}
    whole = sd.train(digits, "logistic", "least-squares", **keys)

    def stop(record):
        if record["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sd.train(digits, "logistic", "least-squares", out=tmp_path / "run", callbacks=[stop], **keys)
    resumed = sd.train(digits, "logistic", "least-squares", out=tmp_path / "run", resume=True, **keys)
    torch.testing.assert_close(resumed.weights, whole.weights, rtol=0, atol=0)


def test_sites_with_much_noise_count_little_and_others_by_size(digits):
    strict = digits.with_budgets([0.01, 1e4, 1e4, 1e4, 1e4, 1e4], delta=1e-4)
    weights = sd.train(strict, "logistic", "least-squares", **ONCE).metrics[0]["weights"]
    shares = np.array(list(weights.values()))
    assert shares[0] < 1e-3
    sizes = digits.sizes[1:] / digits.sizes[1:].sum()
    np.testing.assert_allclose(shares[1:] / shares[1:].sum(), sizes, rtol=0.05)


def test_fixed_features_and_a_saved_run(digits, tmp_path):
    run = sd.train(digits, "random-features", open_method(), out=tmp_path / "run", **ONCE)
    again = sd.load(tmp_path / "run")
    x = torch.from_numpy(digits.x[digits.test[0]])
    with torch.no_grad():
        torch.testing.assert_close(again.model(x), run.model(x))
    assert run.result["final"]["accuracy"] > 0.8


def test_other_models_and_halves_that_do_not_match_are_refused(digits):
    with pytest.raises(BadInput, match="one linear layer"):
        sd.train(digits, "mlp", "least-squares", **ONCE)
    with pytest.raises(BadInput, match="at most 4096"):
        Moments(sd.models.build("linear", (5000,), None, 0), 8.0)
    with pytest.raises(BadInput, match="do not go together"):
        methods.get("least-squares", {"local": {"name": "moments", "weight": 2.0}})
    with pytest.raises(BadInput, match="ridge"):
        aggregate.least_squares(ridge=-1.0)
    with pytest.raises(BadInput, match="weight"):
        local.moments(weight=0.0)


@pytest.mark.parametrize(("name", "least"), [("digits", 0.85), ("breast-cancer", 0.85)])
def test_it_is_good_at_once_with_moderate_budgets(name, least):
    clients = sd.data.load(name).partition("iid", clients=3, seed=0).with_budgets(4.0, delta=1e-5)
    assert sd.train(clients, "logistic", "least-squares", **ONCE).result["final"]["accuracy"] > least
