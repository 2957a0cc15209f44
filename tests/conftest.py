"""Small real federations that many tests share."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton: its interpreter needs no GPU

import sordino as sd

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def digits():
    """Six clients with some of scikit-learn's digits and very different budgets."""
    source = sd.data.load("digits").subset(600, seed=0)
    clients = source.partition("dirichlet", clients=6, beta=0.5, seed=0, minimum=30)
    return clients.with_budgets([0.5, 1.0, 2.0, 4.0, 8.0, 1.0], delta=1e-4)
