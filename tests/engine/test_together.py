"""Several runs in one stack end as each would have ended alone."""

import numpy as np
import pytest

import sordino as sd
from sordino import methods
from sordino.errors import BadInput
from sordino.study.many import train_together
from sordino.study.run import prepare


def together_and_alone(cases, model="logistic"):
    """Train (clients, method, seed, settings) in one stack and one by one; the pairs of runs."""
    ready = [prepare(clients, model, method, seed, None, keys) for clients, method, seed, keys in cases]
    stacked = train_together(ready, device="cpu")
    return [
        (one, sd.train(clients, model, method, seed=seed, **keys))
        for one, (clients, method, seed, keys) in zip(stacked, cases)
    ]


def same(one, alone):
    gap = np.linalg.norm(one.weights - alone.weights) / np.linalg.norm(alone.weights)
    assert gap < 1e-5
    assert one.privacy == alone.privacy
    assert len(one.metrics) == len(alone.metrics)
    assert one.result["final"]["loss"] == pytest.approx(alone.result["final"]["loss"], rel=1e-3)


def test_stacked_runs_equal_runs_alone(digits):
    """Different methods, seeds, learning rates and numbers of steps by client."""
    common = {"rounds": 3, "batch": [8, 8, 16, 16, 8, 8], "epochs": 0.5, "clip": 0.7}
    cases = [
        (digits, "dp-fedavg", 0, {**common, "lr": 0.3}),
        (digits, "weiavg", 1, {**common, "lr": 0.1}),
        (digits, "minimum-epsilon", 0, {**common, "lr": 0.3}),
        (digits, "declared-variance", 2, {**common, "lr": 0.2}),
    ]
    for one, alone in together_and_alone(cases, "cnn-small"):
        same(one, alone)


WIDE = {"clip": {"name": "fair", "weight": 0.5}}
STACKABLE = {
    "dp-fedavg": ("dp-fedavg", {}),
    "fedfdp": ("fedfdp", WIDE),
    "fedfdp, same batch": ("fedfdp", {**WIDE, "ask": {"name": "loss", "batch": "step"}}),
    "dp-q-ffl": ("dp-q-ffl", {}),
    "dp-scaffold": ("dp-scaffold", {}),
    "dp-fedprox": ("dp-fedprox", {}),
    "dp-feddyn": ("dp-feddyn", {}),
    "ali-dpfl": ("ali-dpfl", {}),
    "adaptdp": ("adaptdp", {}),
    "adaptdp, averaged iterate": ("adaptdp", {"local": "averaged", "aggregate": "averaged"}),
    "adaptdp, a radius each": ("adaptdp", {"ask": {"name": "squared-norm", "per_client": True}}),
    "quantile-clipping": ("quantile-clipping", {}),
    "auto-clipping": ("auto-clipping", {}),
    "pfa-plus": ("pfa-plus", {}),
    "privacy-aware": ("privacy-aware", {}),
    "power-of-choice": ("power-of-choice", {}),
    "fedfair": ("fedfair", {}),
    "fedavg": ("fedavg", {}),
    "scaffold": ("scaffold", {}),
    "feddyn": ("feddyn", {}),
}


@pytest.fixture(scope="module")
def all_methods(digits):
    """Every kind of method twice, with another seed and learning rate, all in one stack."""
    cases = [
        (digits, methods.get(name, parts), seed, {"rounds": 3, "rate": 0.2, "steps": 2, "lr": lr, "clip": 4.0})
        for name, parts in STACKABLE.values()
        for seed, lr in ((0, 0.2), (1, 0.1))
    ]
    return together_and_alone(cases)


@pytest.mark.parametrize(("place", "case"), enumerate(STACKABLE))
def test_every_method_in_a_stack_of_all_ends_as_it_would_alone(all_methods, place, case):
    """State of clients, questions, broadcasts, pace and radius stay each run's own."""
    for one, alone in all_methods[2 * place : 2 * place + 2]:
        assert one.result["method"] == STACKABLE[case][0]
        same(one, alone)


def test_clients_keep_their_state_apart_when_two_copies_take_a_turn(digits):
    """Two turns of a client start from one state, alone or stacked, and it keeps what the last one left."""
    drawn = methods.get("dp-scaffold", {"select": "uniform"})
    cases = [(digits, drawn, seed, {"rounds": 4, "rate": 0.2, "steps": 2, "select": 8}) for seed in (0, 1)]
    for one, alone in together_and_alone(cases):
        assert any(len(set(r["participants"])) < len(r["participants"]) for r in alone.metrics)
        same(one, alone)


def test_budgets_batches_and_rounds_may_differ(digits):
    """A run that ends earlier drops out; what the others do does not change."""
    strict = digits.with_budgets(0.3, delta=1e-5)
    cases = [
        (digits, "dp-fedavg", 0, {"rounds": 2, "rate": 0.1, "steps": 1}),
        (strict, "dp-scaffold", 0, {"rounds": 5, "rate": 0.3, "steps": 2}),
        (strict, "dp-fedavg", 1, {"rounds": 3, "batch": 16, "epochs": 0.5}),
    ]
    pairs = together_and_alone(cases)
    for one, alone in pairs:
        same(one, alone)
    assert [len(one.metrics) for one, _ in pairs] == [2, 5, 3]


def test_data_sets_of_one_shape_share_a_stack(digits):
    """The same records dealt out otherwise, and other records."""
    source = sd.data.load("digits")
    elsewhere = source.subset(400, seed=3).partition("iid", clients=4, seed=1).with_budgets(2.0)
    dealt = sd.data.load("digits").partition("shards", clients=5, seed=2).with_budgets(1.0)
    keys = {"rounds": 2, "rate": 0.2, "steps": 2}
    cases = [(digits, "dp-fedavg", 0, keys), (elsewhere, "dp-scaffold", 0, keys), (dealt, "dp-fedavg", 0, keys)]
    for one, alone in together_and_alone(cases):
        same(one, alone)


def test_runs_without_a_common_model_are_refused(digits):
    runs = [prepare(digits, model, "dp-fedavg", 0, None, {"rounds": 1}) for model in ("logistic", "mlp")]
    with pytest.raises(BadInput, match="one model"):
        train_together(runs, device="cpu")
