"""What each row should count for by size or by budget, and the combination of rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sordino.server.facts import Added, Array, Facts


def weighted(updates: Tensor | Added, weights: Array) -> Tensor:
    """Σ w_i Δ_i."""
    if not isinstance(updates, Tensor):
        return updates.combined(weights)
    return torch.as_tensor(weights, dtype=updates.dtype, device=updates.device) @ updates


def data_shares(facts: Facts) -> Array:
    """n_i/Σn over the rows."""
    return np.asarray(facts.sizes / facts.sizes.sum())


def budget_shares(epsilons: Array) -> Array:
    """ε_i/Σε; rows with ε = ∞ share everything, the limit of the formula."""
    public = np.isinf(epsilons)
    if public.any():
        return np.asarray(public / public.sum())
    return np.asarray(epsilons / epsilons.sum())
