"""``gate.bounded`` on a GPU as one kernel instead of twenty: each takes longer to start than to run."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(factors, norms, bound, out, total, records, most, tiny, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    factor = tl.load(factors + at, mask=inside, other=0.0)
    norm = tl.load(norms + at, mask=inside, other=0.0)
    limit = tl.load(bound + at // records, mask=inside, other=0.0).to(tl.float64)
    kept = tl.where(factor > most, most, tl.where(factor < -most, -most, factor))
    # NaN is not below ∞, so that one comparison finds whatever is not finite, in factor or norm.
    size = tl.where(tl.abs(factor) < float("inf"), tl.abs(kept).to(tl.float64) * norm, float("inf"))
    scale = tl.where(size <= limit, 1.0, limit / size)
    found = tl.where(size < float("inf"), kept.to(tl.float64) * scale, 0.0).to(tl.float32)
    tl.store(out + at, tl.where(tl.abs(found) < tiny, 0.0, found), mask=inside)


def bounded(factors: Tensor, norms: Tensor, bound: Tensor, most: float, tiny: float) -> Tensor:
    """Factors (float32) limited as ``gate.bounded`` says; ``bound`` has an entry a factor, or one a row of them."""
    factors, bound = factors.contiguous(), bound.contiguous()
    out = torch.empty_like(factors)
    total = factors.numel()
    if total:
        grid = (triton.cdiv(total, BLOCK),)
        wide = norms.double().expand(factors.shape).contiguous()
        _kernel[grid](factors, wide, bound, out, total, total // bound.numel(), most, tiny, BLOCK=BLOCK)
    return out
