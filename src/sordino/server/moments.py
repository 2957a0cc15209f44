"""Least squares from released second moments: how sites' moments are combined, and the linear head they determine."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sordino.errors import BadInput
from sordino.made import part
from sordino.server.facts import Array, Facts, Layout, Memory, Outcome
from sordino.server.rule import Aggregate, weighted

LEAST_CLASS = 0.1
"""A class counts at least this share of its even part: noise can make a count tiny, and its mean huge."""

LEAST_RIDGE = 1e-6
"""Of the mean eigenvalue, where no noise asks for more: features may be collinear."""


@part
def least_squares(*, weight: float = 8.0, ridge: float = 1.0) -> Aggregate:
    """Combine the moments of all rounds (one is enough), and show the linear head that they determine.

    S = Σ v_i S_i, S_i a row's mean moments, with v_i ∝ 1/(1/n_i + D σ_i²/C²): the variance of a mean of n_i records
    plus that of its noise in D directions, in units of C². Where noise is small sites count by size, where it is large
    by its inverse variance; from public facts alone. ``ridge`` multiplies λ = σ√(2D), the spectral norm of S's noise;
    ``weight`` is s of the clients' half.
    """
    if not (math.isfinite(ridge) and ridge >= 0):
        raise BadInput(f"aggregate.ridge is {ridge!r}: it multiplies the noise that the ridge is made for, and is ≥ 0")

    def combine(updates: Tensor, facts: Facts, memory: Memory) -> Outcome:
        wide = _width(facts.layout)
        pace = facts.lr * facts.steps
        variances = facts.variances / pace**2
        shares = _shares(facts, variances, wide)
        found = weighted(updates, shares / pace).double().cpu()
        variance = float((shares**2 * variances).sum())
        count = int(memory.get("count", 0)) + 1
        if count > 1:
            found = memory["moments"] + (found - memory["moments"]) / count
            variance = (memory["variance"] * (count - 1) ** 2 + variance) / count**2
        kept = {"moments": found, "variance": variance, "count": count}
        head = solve(read(found, facts.layout, weight), math.sqrt(variance), weight, ridge)
        still = updates.new_zeros(updates.shape[1])
        return Outcome(still, shares, kept, shown=head.to(updates))

    return Aggregate("least-squares", combine, partner=f"moments of weight {weight:g}")


def _shares(facts: Facts, variances: Array, wide: int) -> Array:
    """v_i, in proportion to 1/(1/n_i + D σ_i²/C²), sum 1."""
    noise = variances * wide / facts.clip**2 if math.isfinite(facts.clip) else np.zeros_like(variances)
    shares = facts.selection / (1.0 / facts.sizes + noise)
    return np.asarray(shares / shares.sum())


@dataclass(frozen=True)
class Statistics:
    """Combined moments: A = mean xxᵀ [D, D], B = mean x tᵀ [D, k]; the last feature is 1 with an ``intercept``."""

    second: Tensor
    cross: Tensor
    intercept: bool


def _width(layout: Layout) -> int:
    """D, from the length D(D + 1)/2 of the second moments."""
    sizes = {name: math.prod(shape) for name, shape, _ in layout}
    if "second" not in sizes:
        raise BadInput("aggregate 'least-squares' combines moments, and clients sent gradients: use local 'moments'")
    return (math.isqrt(8 * sizes["second"] + 1) - 1) // 2


def read(flat: Tensor, layout: Layout, weight: float) -> Statistics:
    """A and B from a flat vector of moments φ."""
    held = {name: flat[start : start + math.prod(shape)].view(shape) for name, shape, start in layout}
    wide = _width(layout)
    row, column = torch.triu_indices(wide, wide)
    second = flat.new_zeros(wide, wide)
    second[row, column] = torch.where(row == column, held["second"], held["second"] / math.sqrt(2.0))
    second[column, row] = second[row, column]
    cross = held["cross"].T / weight
    if "sums" in held:
        cross = torch.cat([cross, held["sums"][None] / weight])
    return Statistics(second, cross, "sums" in held)


def solve(found: Statistics, deviation: float, weight: float, ridge: float = 1.0) -> Tensor:
    """The head's flat parameters, weights [k, F] and then biases, from moments whose noise has this deviation.

    Without an intercept W = (A₊ + λI)⁻¹B, A₊ without its negative eigenvalues. With one, features are centred at their
    mean m first, so that λ shrinks neither the mean nor the bias: W = (C₊ + λI)⁻¹(B − m tᵀ), b = t̄ − mᵀW. For classes
    the head is the discriminant of the same moments (``_discriminant``), whose directions are those of least squares on
    indicators and whose scores are log-probabilities, as cross-entropy wants them.
    """
    if not found.intercept:
        return (_repaired(found.second, deviation, ridge)[1] @ found.cross).T.reshape(-1)
    total = max(float(found.second[-1, -1]), deviation, 1e-300)
    mean = found.second[:-1, -1] / total
    centred = found.second[:-1, :-1] - total * torch.outer(mean, mean)
    spread, inverse = _repaired(centred, deviation, ridge)
    if found.cross.shape[1] > 1:
        slopes, biases = _discriminant(found.cross, total, mean, spread / total, inverse * total, deviation / weight)
    else:
        slopes = inverse @ (found.cross[:-1] - torch.outer(mean, found.cross[-1]))
        biases = found.cross[-1] / total - mean @ slopes
    return torch.cat([slopes.T.reshape(-1), biases])


def _repaired(second: Tensor, deviation: float, ridge: float) -> tuple[Tensor, Tensor]:
    """S₊ and (S₊ + λI)⁻¹, λ = ridge·σ√(2D): noise of σ on the diagonal and σ/√2 beside it has that spectral norm."""
    values, vectors = torch.linalg.eigh(second)
    values = values.clamp(min=0)
    added = max(ridge * deviation * math.sqrt(2 * len(second)), LEAST_RIDGE * float(values.mean()), 1e-300)
    inverse: Tensor = (vectors / (values + added)) @ vectors.T
    return (vectors * values) @ vectors.T, inverse


def _discriminant(
    cross: Tensor, total: float, mean: Tensor, covariance: Tensor, inverse: Tensor, deviation: float
) -> tuple[Tensor, Tensor]:
    """The linear discriminant: log p_k + a(w_kᵀ(x − m) − ½ q_k), w_k = P d_k, d_k = μ_k − m, P the ridged inverse.

    q_k = d_kᵀP d_k, less what noise of σ/n_k in μ_k adds to it, tr(P)(σ/n_k)². Counts n_k are drawn to even ones by as
    much as their noise explains of how they differ. a = Σ p_k q_k / Σ p_k w_kᵀΣw_k undoes what the ridge took from the
    scores' scale; where the means are little but noise it is near 0, and the classes' shares p_k decide.
    """
    counts = cross[-1]
    even, spread = total / len(counts), float(counts.var(correction=0))
    between = max(spread - deviation**2, 0.0)
    trust = between / (between + deviation**2) if deviation > 0 else 1.0
    counts = (even + trust * (counts - counts.mean())).clamp(min=LEAST_CLASS * even)
    shares = counts / counts.sum()
    apart = cross[:-1] / counts - mean[:, None]
    slopes = inverse @ apart
    lengths = (apart * slopes).sum(0) - (deviation / counts) ** 2 * inverse.trace()
    seen = float(shares @ (slopes * (covariance @ slopes)).sum(0))
    scale = max(float(shares @ lengths), 0.0) / seen if seen > 0 else 0.0
    slopes = slopes * scale
    return slopes, shares.log() - mean @ slopes - scale * lengths / 2
