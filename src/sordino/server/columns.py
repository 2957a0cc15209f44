"""Update matrices with a column per client: what is accepted, and weights from variances."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino.errors import BadInput
from sordino.server.facts import Array

Matrix = Tensor | NDArray[Any]


def as_columns(matrix: Matrix) -> Tensor:
    """M[d, n] as a floating tensor: float64 stays, everything else becomes float32. Refuses what has no meaning."""
    columns = matrix if isinstance(matrix, Tensor) else torch.from_numpy(np.asarray(matrix))
    if columns.ndim != 2 or 0 in columns.shape:
        raise BadInput(f"an update matrix is [d, n] with a column per client, not of shape {tuple(columns.shape)}")
    columns = columns.detach()
    return columns if columns.dtype == torch.float64 else columns.float()


def check_finite(sizes: Tensor | Array) -> None:
    """Refuse columns whose size (a norm, a mean) is not a number: they hold NaN or infinity, or overflow."""
    bad = np.flatnonzero(~np.isfinite(np.asarray(sizes))).tolist()
    if bad:
        raise BadInput(f"columns {bad} hold NaN, infinity or absurdly large values: leave these clients out")


def like(matrix: Matrix, value: Tensor | Array | None) -> Any:
    """``value`` as the kind that ``matrix`` is: an array for an array, a tensor of its dtype for a tensor."""
    if isinstance(matrix, Tensor):
        dtype = matrix.dtype if matrix.dtype.is_floating_point else torch.float32
        return torch.as_tensor(value, dtype=dtype, device=matrix.device)
    return value.cpu().numpy() if isinstance(value, Tensor) else value


def inverse_weights(variances: Array) -> Array:
    """w_i ∝ 1/σ_i², summing to 1. Clients with σ² = 0 share everything; with σ² = ∞ they get nothing."""
    variances = np.asarray(variances, dtype=np.float64)
    exact = variances == 0.0
    if exact.any():
        return np.asarray(exact / exact.sum())
    smallest = variances.min()
    if not np.isfinite(smallest):
        return np.full(len(variances), 1.0 / len(variances))
    weights = smallest / variances
    return np.asarray(weights / weights.sum())


def block_entries(columns: Tensor, entries: int) -> int:
    """How many entries a block of rows may have, where so many fit a processor's cache."""
    return entries if columns.device.type == "cpu" else max(entries, 1 << 26)


def row_blocks(columns: Tensor, entries: int) -> Iterator[Tensor]:
    """Views of consecutive rows with about that many entries each; larger ones where they need not fit a cache."""
    height = max(1, block_entries(columns, entries) // columns.shape[1])
    for first in range(0, columns.shape[0], height):
        yield columns[first : first + height]


@contextmanager
def one_thread() -> Iterator[None]:
    """Blocks that fit the cache are too small to share: on a busy machine threads wait for each other 10 to 100×."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def gram(columns: Tensor, block: int = 1 << 18) -> Array:
    """G = MᵀM/d, n×n: one pass over the rows, products in the matrix's precision, sums of blocks in float64.

    Refuses columns that hold NaN or infinity, by number.
    """
    height, width = columns.shape
    total = torch.zeros(width, width, dtype=torch.float64)
    with one_thread():
        for rows in row_blocks(columns, block):
            total += (rows.T @ rows).to("cpu", torch.float64)
    found = total.numpy() / height
    check_finite(np.diag(found))
    return np.asarray(found)
