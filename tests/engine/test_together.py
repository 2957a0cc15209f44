"""Several runs in one stack end as each would have ended alone."""

import numpy as np
import pytest

import sordino as sd
from sordino import methods
from sordino.errors import BadInput
from sordino.study.many import train_together
from sordino.study.run import prepare


def test_stacked_runs_equal_runs_alone(digits):
    """Different methods, seeds, learning rates and numbers of steps by client."""
    wanted = [
        ("dp-fedavg", 0, {"lr": 0.3}),
        ("weiavg", 1, {"lr": 0.1}),
        ("minimum-epsilon", 0, {"lr": 0.3}),
        ("declared-variance", 2, {"lr": 0.2}),
    ]
    common = {"rounds": 3, "batch": [8, 8, 16, 16, 8, 8], "epochs": 0.5, "clip": 0.7}
    runs = [prepare(digits, "cnn-small", m, s, None, {**common, **kw}) for m, s, kw in wanted]
    together = train_together(runs, device="cpu")
    for (method, seed, options), one in zip(wanted, together):
        alone = sd.train(digits, "cnn-small", method, seed=seed, **common, **options)
        gap = np.linalg.norm(one.weights - alone.weights) / np.linalg.norm(alone.weights)
        assert gap < 1e-5
        assert one.privacy == alone.privacy
        assert one.result["final"]["loss"] == pytest.approx(alone.result["final"]["loss"], rel=1e-3)


def test_runs_with_questions_and_broadcasts_of_their_own_equal_runs_alone(digits):
    """Fair clipping: every run has its own mean loss and its own loss bound, a column of the stack."""
    fair = methods.get("fedfdp", {"clip": {"name": "fair", "weight": 0.5}})
    common = {"rounds": 3, "rate": 0.2, "steps": 2, "lr": 0.2, "clip": 8.0}
    runs = [prepare(digits, "logistic", fair, seed, None, common) for seed in (0, 1)]
    for seed, one in enumerate(train_together(runs, device="cpu")):
        alone = sd.train(digits, "logistic", fair, seed=seed, **common)
        assert np.linalg.norm(one.weights - alone.weights) / np.linalg.norm(alone.weights) < 1e-5


def test_runs_that_do_different_things_at_clients_are_refused(digits):
    common = {"rounds": 1, "rate": 0.2}
    runs = [prepare(digits, "logistic", m, 0, None, common) for m in ("dp-fedavg", "fedavg")]
    with pytest.raises(BadInput, match="cannot share a stack"):
        train_together(runs, device="cpu")
