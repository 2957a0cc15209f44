"""Selection rules as distributions over clients: whom to draw, and what a draw should count."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from sordino.errors import BadInput
from sordino.server.select.checks import Array, distribution, record_counts, whole


def unbiased(sizes: ArrayLike) -> Array:
    """u_k = n_k/Σn: the average of the drawn updates estimates the update of F = Σ u_k f_k without bias."""
    records = record_counts(sizes)
    return np.asarray(records / records.sum(), dtype=np.float64)


def uniform(clients: int) -> Array:
    """p_k = 1/N: every client alike, whatever its size; estimates the update of the plain mean of the f_k."""
    count = whole(clients, "clients")
    return np.full(count, 1.0 / count)


def compensation(probabilities: ArrayLike, sizes: ArrayLike) -> Array:
    """Importance weights c_k = u_k/p_k that keep the objective unbiased for any p.

    With m = N_select draws k_1 … k_m from p the aggregate (1/m) Σ_j c_{k_j} Δ_{k_j} has the expectation
    Σ p_k c_k Δ_k = Σ u_k Δ_k. The weights are *not* divided by their sum in a round: that would bring a bias back.

    Notes
    -----
    The expected noise on the aggregate is C² T Σ (p_k c_k)² V_k = C² T Σ u_k² V_k: the same for every p. Compensation
    takes back what drawing quiet clients more often had gained; it changes the sampling variance only.
    """
    target = unbiased(sizes)
    chosen = distribution(probabilities, target.size)
    if (chosen == 0.0).any():
        where = int(np.flatnonzero(chosen == 0.0)[0])
        raise BadInput(
            f"probabilities[{where}] is 0: a client that is never drawn cannot be compensated for; "
            "give it a positive probability or leave it out of sizes"
        )
    return np.asarray(target / chosen, dtype=np.float64)
