"""Weights and noise for a sum that is all the server sees: how loud everybody may be, and how much noise that takes.

Site i counts with weight w_i, and v is the noise on one coordinate of the sum that protects everybody, both in units of
the clip. A record of site i moves the sum by at most w_i/b_i, so its multiplier is z_i = v b_i/w_i, and its budget asks
for at least z_i: w_i ≤ a_i v with a_i = b_i/z_i. All sites' shares together make n/h times v² of variance (of n sites
h count, ``privacy.trust``). One strict site therefore need not drown all: it may count for less than its records.

    minimise  τ²‖w − p‖² + (n/h) v²   over v and w,   w_i ≤ a_i v,   Σ w = 1

τ² is how much clients' gradients differ per coordinate: the bias of hearing somebody less than its share p_i. For a
given v the nearest weights are w_i = min(p_i + λ, a_i v), λ ≥ 0 such that they sum to 1; what is left is convex in v
alone. Least noise: τ = 0 gives v = 1/Σa, where noise per site at its best weights has 1/√(Σa²).
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import minimize_scalar

from sordino.errors import BadInput
from sordino.server.facts import Array


def nearest(shares: Array, limits: Array) -> Array:
    """argmin ‖w − p‖² with w_i ≤ limit_i and Σ w = 1: w_i = min(p_i + λ, limit_i). Needs Σ limit ≥ 1 (or nearly)."""
    room = limits - shares
    order = np.argsort(room)
    held = np.concatenate([[0.0], np.cumsum(limits[order])])[:-1]  # what is taken by those at their limits
    free = np.cumsum(shares[order][::-1])[::-1]
    level = (1.0 - held - free) / np.arange(len(shares), 0, -1)  # λ if exactly so many are at their limits
    fits = np.flatnonzero(level <= room[order])
    if not len(fits):
        return limits.copy()
    return np.asarray(np.minimum(shares + level[fits[0]], limits))


def balance(most: Array, shares: Array, spread: float, ratio: float) -> tuple[Array, float]:
    """(w, v) that balance bias against noise.

    Parameters
    ----------
    most: a_i, the largest weight of each site per unit of v.
    shares: p, what each should count for; they sum to 1.
    spread: τ².
    ratio: n/h, and less where noise of many rounds averages out (over T of them, n/(h T)).
    """
    if not (most > 0).all() or not np.isfinite(most).all():
        raise BadInput("every site that shares noise needs a finite budget and noise of its own")
    least = 1.0 / float(most.sum())
    enough = float((shares / most).max())  # from here on w = p, and more noise brings nothing
    if spread <= 0 or enough <= least:
        return most * least, least

    def cost(level: float) -> float:
        apart = nearest(shares, most * level) - shares
        return spread * float(apart @ apart) + ratio * level**2

    found = minimize_scalar(cost, bounds=(least, enough), method="bounded", options={"xatol": 1e-9 * enough})
    level = min((least, float(found.x), enough), key=cost)
    weights = nearest(shares, most * level)
    return weights / weights.sum(), level
