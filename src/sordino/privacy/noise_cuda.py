"""Keyed standard normals for many rows in one kernel: Philox with a 64-bit key a row, column and step as counters.

A value depends on its row's key, the step and its column alone, so draws do not depend on how rows are stacked.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    out, keys, scale, step, width, ADD: tl.constexpr, THERE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    if THERE:
        step = tl.load(step)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    none = columns * 0
    first, second, _, _ = tl.philox(tl.load(keys + row), columns, none + step, none, none)
    values, _ = tl.pair_uniform_to_normal(tl.uint_to_uniform_float(first), tl.uint_to_uniform_float(second))
    place = out + row.to(tl.int64) * width + columns
    if ADD:
        values = tl.load(place, mask=columns < width, other=0.0) + tl.load(scale + row) * values
    tl.store(place, values, mask=columns < width)


def fill(out: Tensor, keys: Tensor, step: int | Tensor, scale: Tensor | None = None) -> Tensor:
    """Fill ``out[rows, width]`` (float32) with standard normals keyed by ``keys[rows]`` (int64) and step.

    With ``scale[rows]`` (float32): add scale·N(0, 1) to what it holds. A step that is an int32 tensor is read there.
    """
    rows, width = out.shape
    given, there = keys if scale is None else scale, isinstance(step, Tensor)
    grid = rows, triton.cdiv(width, 1024)
    _kernel[grid](out, keys, given, step, width, ADD=scale is not None, THERE=there, BLOCK=1024)
    return out
