"""Aggregation rules: (updates[rows, d], facts, state) → outcome. Pure functions, by name in ``RULES``."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sordino.server.facts import Array, Facts, Outcome, Rule, State


def weighted(updates: Tensor, weights: Array) -> Tensor:
    """Σ w_i Δ_i."""
    return torch.as_tensor(weights, dtype=updates.dtype, device=updates.device) @ updates


def data_weighted(updates: Tensor, facts: Facts, state: State) -> Outcome:
    """w_i = n_i / Σ n, over those who answered."""
    weights = facts.sizes / facts.sizes.sum()
    return Outcome(weighted(updates, weights), weights, state)


def uniform(updates: Tensor, facts: Facts, state: State) -> Outcome:
    """w_i = 1 / rows."""
    weights = np.full(len(facts.sizes), 1.0 / len(facts.sizes))
    return Outcome(weighted(updates, weights), weights, state)


RULES: dict[str, Rule] = {"data-weighted": data_weighted, "uniform": uniform}
