"""The public names are a contract: they are there from ``import sordino as sd`` alone."""

import inspect
import subprocess
import sys

import numpy as np
import pytest

import sordino as sd

NAMES = [
    "data.load",
    "models.build",
    "models.private_ready",
    "methods.register",
    "privacy.calibrate",
    "privacy.epsilon",
    "privacy.Ledger",
    "privacy.audit",
    "server.select.privacy_aware",
    "server.aggregate.robust_hdp",
    "server.aggregate.factor_hdp",
    "server.aggregate.random_effects",
    "server.pursuit.decompose",
    "server.pursuit.solve",
    "server.bounds.rank",
    "train",
    "plan",
    "load",
    "Method",
    "Run.predict",
    "Run.export",
    "Classifier.fit",
    "Regressor.fit",
]


def test_every_public_name_is_reached_in_a_fresh_process():
    code = "import sordino as sd\n" + "\n".join(f"sd.{name}" for name in NAMES)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_order_of_positional_arguments_is_fixed():
    order = ["delta", "rate", "steps", "sampling", "accountant", "adjacency"]
    assert list(inspect.signature(sd.privacy.calibrate).parameters) == ["epsilon", *order]
    assert list(inspect.signature(sd.privacy.epsilon).parameters) == ["noise", *order]
    assert isinstance(sd.privacy.epsilon(2.0, 1e-5, 0.05, 268), float)


def test_weights_of_columns_are_a_distribution():
    updates = np.random.default_rng(0).standard_normal((500, 8)) * np.linspace(1, 4, 8)
    for rule in (sd.server.aggregate.robust_hdp, sd.server.aggregate.factor_hdp, sd.server.aggregate.random_effects):
        weights = np.asarray(rule(updates))
        assert weights.shape == (8,)
        assert (weights >= 0).all()
        assert weights.sum() == pytest.approx(1.0)
    low, sparse = sd.server.pursuit.decompose(updates)
    assert np.linalg.norm(updates - np.asarray(low) - np.asarray(sparse)) <= 1e-5 * np.linalg.norm(updates)
