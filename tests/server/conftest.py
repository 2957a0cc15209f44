"""Update matrices with known noise: the published budgets' variances, and planted low-rank signals."""

import json
from functools import cache
from importlib.resources import files

import numpy as np
import pytest
import torch

from papers.theory_robust import update_variances
from sordino.privacy.accounting import calibrate

PUBLISHED = json.loads(files("sordino.data").joinpath("robust_hdp_budgets.json").read_text())
BATCHES = np.array(PUBLISHED["batch_sizes"], dtype=float)
DISTS = sorted(PUBLISHED["epsilons"])


@cache
def published_variances(name):
    """Per-coordinate noise variances (over η²) of the 20 clients: 200 rounds, one local epoch, c = 3, δ = 1e-4."""
    epsilons = np.array(PUBLISHED["epsilons"][name])
    steps = (200 * 2400 / BATCHES).astype(int)
    noises = calibrate(epsilons, 1e-4, BATCHES / 2400, steps, accountant="rdp-robust-hdp")
    return update_variances(noises, BATCHES, 2400 / BATCHES, clip=3.0)


def plant(variances, signal, *, rank=4, rows=28_938, seed=0):
    """Noise of these variances plus rank-r directions whose typical entry is ``signal`` × the median noise."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.tensor(np.sqrt(variances), dtype=torch.float32)
    noise = torch.randn(rows, len(variances), generator=generator) * spread
    shared = torch.randn(rows, rank, generator=generator) @ torch.randn(rank, len(variances), generator=generator)
    return noise + signal * float(np.median(np.sqrt(variances))) / rank**0.5 * shared


def excess(weights, variances):
    """Noise power over the least possible: Σw²σ² · Σσ⁻²."""
    weights = np.asarray(weights, dtype=float)
    return float((weights**2 * variances).sum() * (1 / variances).sum())


@pytest.fixture(scope="session")
def noise():
    """The helpers above under one name."""

    class Noise:
        dists = DISTS
        epsilons = PUBLISHED["epsilons"]
        batches = BATCHES
        variances = staticmethod(published_variances)
        plant = staticmethod(plant)
        excess = staticmethod(excess)

    return Noise
