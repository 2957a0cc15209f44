"""Keyed standard normals for many rows in one kernel: Philox with a 64-bit key a row, the column as counter.

A value depends on its row's key and its column alone, so draws do not depend on how rows are stacked.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(out, keys, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.randn(tl.load(keys + row), columns)
    tl.store(out + row.to(tl.int64) * width + columns, values, mask=columns < width)


def fill(out: Tensor, keys: Tensor) -> Tensor:
    """Fill ``out[rows, width]`` (float32, contiguous, CUDA) with standard normals keyed by ``keys[rows]`` (int64)."""
    rows, width = out.shape
    _kernel[(rows, triton.cdiv(width, 1024))](out, keys, width, BLOCK=1024)
    return out
