"""Broken, poisoned and untruthful updates: refused or bounded, with a line that says so. Honest ones pass unchanged.

What the server knows in advance bounds what a client can send. Noise of σ_i per coordinate has norm σ_i√d; K local
steps of clipped gradients reach at most K·η·C. Both follow from public facts (η·C = b σ/(z√K), the same for all), so

    NaN, infinity          refused: weight 0
    zeros, or smaller      refused by rules that reward small updates; kept by the others, where it does no harm
      than its noise
    far beyond its reach   scaled down to ``SLACK`` times what its steps and noise can explain
    more noise than told   counted with the variance that its norm proves (``believable``)
    less noise than told   estimated variances are not believed below ``FLOOR`` times what the plan asked for
    wrong shape            refused before it enters the matrix
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino.errors import BadInput
from sordino.server.facts import Array, Facts

SLACK = 5.0
"""How many times its own reach, or the typical reach, a client's update may have."""
LOOSE = 100.0
"""How many times the typical norm an update may have where gradients were not clipped."""
FLOOR = 0.25
"""Share of the planned noise variance below which an estimate is not believed."""
NORM_BLOCK = 4096
"""Entries whose squares are summed in float32."""


@dataclass(frozen=True)
class Screened:
    """A round's updates after the defence: rows that may count, their facts, which they are, and what was done.

    ``updates`` are the rows themselves, [kept, d]; or what adds them up, for rules that need no more
    (``server.running``).
    """

    updates: Any
    facts: Facts
    kept: NDArray[np.int64]
    lines: tuple[str, ...]


def step_length(facts: Facts) -> float:
    """η·C, the longest local step: the median over rows of b σ/(z√K), infinite when nobody adds noise.

    It is the same for all clients, so the median is exact, and one untruthful client does not move it.
    """
    noisy = (facts.noises > 0) & (facts.variances > 0) & (facts.steps > 0)
    if not noisy.any():
        return math.inf
    spreads = np.sqrt(facts.variances[noisy])
    return float(np.median(facts.batches[noisy] * spreads / (facts.noises[noisy] * np.sqrt(facts.steps[noisy]))))


def reach(facts: Facts, dimension: int) -> tuple[Array, Array]:
    """(K_i·η·C, σ_i√d): how far local steps and noise can take each update, from public facts."""
    # A Poisson batch may be larger than expected, and noise longer: six standard deviations.
    larger = 1.0 + 6.0 / np.sqrt(np.maximum(facts.batches, 1.0))
    return step_length(facts) * np.maximum(facts.steps, 1.0) * larger, np.sqrt(facts.variances) * (
        math.sqrt(dimension) + 6.0
    )


def row_norms(updates: Tensor) -> Array:
    """‖Δ_i‖ of every row, to about 1e-7: squares are summed over short blocks first, and no copy is made.

    A row that overflows or vanishes in float32 is looked at again in float64.
    """
    width = updates.shape[1]
    whole = width // NORM_BLOCK * NORM_BLOCK
    blocks = torch.linalg.vector_norm(updates[:, :whole].unflatten(1, (-1, NORM_BLOCK)), dim=2).double()
    rest = torch.linalg.vector_norm(updates[:, whole:], dim=1).double()
    norms = torch.hypot(torch.linalg.vector_norm(blocks, dim=1), rest).cpu().numpy()
    for i in np.flatnonzero(~(np.isfinite(norms) & (norms > 1e-15))):
        norms[i] = float(torch.linalg.vector_norm(updates[i], dtype=torch.float64))
    return np.asarray(norms)


def screen(updates: Tensor, facts: Facts, *, refuse_small: bool = False) -> Screened:
    """Refuse rows with an upload that is not finite (and updates too small for their noise, if asked); bound the rest.

    ``facts.uploads``, what was sent beside the updates, is screened alike; what is as wide as an update is also bounded
    like one.
    """
    _check_shapes(updates, facts)
    norms = row_norms(updates)
    finite = np.isfinite(norms)
    for values in facts.uploads.values():
        finite &= torch.isfinite(values).flatten(1).all(1).cpu().numpy()
    small = (norms == 0.0) | (norms**2 < FLOOR * updates.shape[1] * facts.variances)
    refused = ~finite | (small & refuse_small)
    lines = [refused_line(facts, i, bool(finite[i])) for i in np.flatnonzero(refused).tolist()]
    kept = np.flatnonzero(~refused)
    if len(kept) < len(norms):
        updates, facts, norms = updates[torch.from_numpy(kept).to(updates.device)], facts.only(kept), norms[kept]
    uploads = dict(facts.uploads)
    for name, values in uploads.items():
        if values.shape == updates.shape:
            uploads[name] = _bounded(values, row_norms(values), facts, lines)[0]
    updates, norms = _bounded(updates, norms, facts, lines)
    return Screened(updates, replace(facts, norms=norms, uploads=uploads), kept, tuple(lines))


def _bounded(rows: Tensor, norms: Array, facts: Facts, lines: list[str]) -> tuple[Tensor, Array]:
    """The rows, scaled down where they are longer than steps and noise explain, and their norms then."""
    limits = limits_of(norms, facts, rows.shape[1])
    beyond = np.flatnonzero(norms > limits)
    if not len(beyond):
        return rows, norms
    lines += [bounded_line(facts, i, norms[i], limits[i]) for i in beyond.tolist()]
    factors = torch.ones(len(norms), dtype=rows.dtype, device=rows.device)
    factors[torch.from_numpy(beyond).to(rows.device)] = torch.as_tensor(limits[beyond] / norms[beyond]).to(factors)
    return rows * factors[:, None], np.minimum(norms, limits)


def refused_line(facts: Facts, row: int, finite: bool) -> str:
    """Why a row is refused."""
    why = "is smaller than its own noise should be" if finite else "holds NaN or infinity, or has a wrong shape"
    return f"round {facts.round}: client {facts.clients[row]} refused: its update {why}"


def bounded_line(facts: Facts, row: int, norm: float, limit: float) -> str:
    """That a row is scaled down."""
    return (
        f"round {facts.round}: client {facts.clients[row]} bounded: its update has norm {norm:.3g}, "
        f"more than {SLACK:g} times what steps and noise explain; scaled down to {limit:.3g}"
    )


def limits_of(norms: Array, facts: Facts, dimension: int) -> Array:
    """Largest norm each row may have: SLACK × the larger of its own reach and what is typical for its steps.

    Where nothing was clipped (a method without privacy) there is no reach to hold honest clients to: only what is
    LOOSE times the typical norm is scaled down, so that one broken client cannot destroy the model.
    """
    if len(norms) == 0:
        return norms
    steps = np.maximum(facts.steps, 1.0)
    typical = steps * float(np.median(norms / steps))
    signal, noise = reach(facts, dimension)
    limits = np.where(np.isfinite(signal), SLACK * np.maximum(signal + noise, typical), LOOSE * typical)
    return np.asarray(np.where(limits > 0.0, limits, math.inf))


def believable(facts: Facts, dimension: int) -> tuple[Array, list[str]]:
    """Declared variances, raised where a client's norm proves more noise: ((‖u_i‖ − K_iηC)/√d)²."""
    signal, noise = reach(facts, dimension)
    norms = np.asarray(facts.norms)
    proven = np.maximum(norms - signal, 0.0) ** 2 / dimension
    more = norms > signal + noise
    lines = [
        f"round {facts.round}: client {facts.clients[i]} declared noise variance {facts.variances[i]:.3g}, its update "
        f"shows at least {proven[i]:.3g}: counted with that"
        for i in np.flatnonzero(more)
    ]
    return np.where(more, np.maximum(proven, facts.variances), facts.variances), lines


def plausible(estimates: Array, facts: Facts) -> tuple[Array, list[str]]:
    """Estimated variances, raised to FLOOR × planned where a client seems to have added much less noise."""
    least = FLOOR * facts.variances
    lines = [
        f"round {facts.round}: client {facts.clients[i]} shows noise variance {estimates[i]:.3g} where the plan asked "
        f"for {facts.variances[i]:.3g}: counted with {least[i]:.3g}"
        for i in np.flatnonzero(estimates < least)
    ]
    return np.maximum(estimates, least), lines


def _check_shapes(updates: Tensor, facts: Facts) -> None:
    if updates.ndim != 2 or updates.shape[0] != len(facts.clients):
        raise BadInput(
            f"updates have shape {tuple(updates.shape)} but {len(facts.clients)} rows of facts: a row each is needed"
        )
