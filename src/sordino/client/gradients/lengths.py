"""How long a record's gradient is: squared norms in float64, and how far what is summed may exceed them.

Clipping rests on an upper bound of what is *really added* to a sum. Three things can make a computed norm too small:

- float32 squares vanish below 1e-19: every norm gets ``VANISHES``·√(number of entries) on top;
- float32 sums of at most ``BLOCK`` squares are off by at most 128·2⁻²⁴ of themselves, everything after them is
  float64: norms get a share of ``ROUNDING`` on top;
- where a gradient dyᵀx over positions t is never made, its norm follows from inner products, and the sum that is really
  computed adds large numbers that may cancel. Both errors are in proportion to B = Σ_t ‖x_t‖‖dy_t‖ and not to the
  gradient: the products are taken in float64, and (t + 4)·2⁻²⁴·B, the rounding of the sum itself, is an ``excess``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128
ROUNDING = 1.2e-5
"""Above 2·(128/2 + 4)·2⁻²⁴ = 8.2e-6: two norms are multiplied at most, and a factor rounds once."""

VANISHES = 1.1e-19
"""The square root of the smallest normal float32 is 1.08e-19."""

WIDENED = 1 << 19
"""Numbers that are widened to float64 at a time."""

SINGLE, DOUBLE = 2.0**-24, 2.0**-53


class Length(NamedTuple):
    """‖g‖² of every record, ``[n]`` or ``[n, parts]`` in float64, and what may be added to ‖g‖ by rounding."""

    square: Tensor
    excess: Tensor | None = None


def limits(length: Length, entries: int) -> Tensor:
    """Upper bounds of what records add per unit of their factor, from squared norms ``[n]`` over all parameters."""
    found = length.square.sqrt().mul_(1 + ROUNDING).add_(VANISHES * math.sqrt(entries))
    return found if length.excess is None else found.add_(length.excess)


def squared_norms(values: Tensor) -> Tensor:
    """‖values_j‖² of ``[n, …]`` in float64, without a temporary of that size: short float32 sums, then float64 ones."""
    if values.dtype == torch.float64:
        return torch.sum(values.square().flatten(1), 1)
    if not values.is_contiguous():
        values = values.contiguous()
    flat = values.view(len(values), -1)
    whole = flat.shape[1] // BLOCK * BLOCK
    parts = []
    if whole:
        parts.append(torch.linalg.vector_norm(flat[:, :whole].unflatten(1, (-1, BLOCK)), dim=-1))
    if whole < flat.shape[1]:
        parts.append(torch.linalg.vector_norm(flat[:, whole:], dim=-1, keepdim=True))
    found = [torch.sum(one.double().square_(), 1) for one in parts]
    return found[0] if len(found) == 1 else found[0].add_(found[1])


def squared_outer(x: Tensor, dy: Tensor) -> Length:
    """‖dy ⊗ x‖² = ‖dy‖²‖x‖² per record of ``x[n, i]``, ``dy[n, o]``."""
    # Norms are multiplied, not squares: with a floor each, since one may be tiny and the other huge.
    norms = [squared_norms(one).sqrt_().add_(VANISHES * math.sqrt(one.shape[1])) for one in (x, dy)]
    return Length(norms[0].mul_(norms[1]).square_())


def squared_by_gram(x: Tensor, dy: Tensor) -> Length:
    """‖Σ_t dy_t ⊗ x_t‖² = Σ_{s,t} (x_s·x_t)(dy_s·dy_t), in float64, with what cancellation may hide on top."""
    return squared_from_products(inner_products(x), inner_products(dy), x.shape[2] + dy.shape[2])


def squared_from_products(seen: Tensor, slopes: Tensor, additions: int) -> Length:
    """‖Σ_t dy_t ⊗ x_t‖² from x_s·x_t and dy_s·dy_t, ``[n, t, t]`` each, sums of so many products in all."""
    reach = (seen.diagonal(dim1=1, dim2=2) * slopes.diagonal(dim1=1, dim2=2)).sqrt_().sum(1)
    return widened(seen.mul_(slopes).sum((1, 2)), reach, seen.shape[1], additions)


def widened(square: Tensor, reach: Tensor, positions: int, additions: int) -> Length:
    """‖g‖² as inner products gave it, with what cancellation may hide on top; ``reach`` is B = Σ_t ‖x_t‖‖dy_t‖."""
    square.clamp_min_(0).add_(reach.square().mul_((additions + 2 * positions**2) * DOUBLE))
    return Length(square, reach.mul_((positions + 4) * SINGLE))


def inner_products(values: Tensor) -> Tensor:
    """Inner products of every pair of positions, ``[n, t, i]`` to ``[n, t, t]`` in float64.

    A few records at a time on a CPU, since a large copy would be paged in anew at every step.
    """
    some = len(values) if values.is_cuda else max(1, WIDENED // max(1, values[0].numel()))
    found = values.new_empty((len(values), values.shape[1], values.shape[1]), dtype=torch.float64)
    for start in range(0, len(values), some):
        wide = values[start : start + some].double()
        torch.bmm(wide, wide.transpose(1, 2), out=found[start : start + some])
    return found


def squared_with_rows(x: Tensor, dy: Tensor, rows: Tensor, index: Tensor) -> Length:
    """‖Σ_t dy_t ⊗ x_t + Σ_s e_{i_s} ⊗ r_s‖² of ``x[n, t, i]``, ``dy[n, t, o]``, ``rows[n, s, i]``, ``index[n, s]``.

    Rows are positions whose slopes are unit vectors, so the bounds are those of :func:`squared_by_gram`. Of two rows
    of one index one is 0.
    """
    seen, slopes = inner_products(x), inner_products(dy)
    reach = (seen.diagonal(dim1=1, dim2=2) * slopes.diagonal(dim1=1, dim2=2)).sqrt_().sum(1)
    wide = rows.double()
    squares = wide.square().sum(2)
    reach.add_(squares.sqrt().sum(1))
    picked = dy.gather(2, index.unsqueeze(1).expand(-1, dy.shape[1], -1)).double()
    both = torch.bmm(x.double(), wide.transpose(1, 2)).mul_(picked).sum((1, 2))
    square = seen.mul_(slopes).sum((1, 2)).add_(squares.sum(1)).add_(both, alpha=2).clamp_min_(0)
    positions = x.shape[1] + rows.shape[1]
    square.add_(reach.square().mul_((2 * x.shape[2] + dy.shape[2] + 2 * positions**2) * DOUBLE))
    return Length(square, reach.mul_((positions + 4) * SINGLE))
