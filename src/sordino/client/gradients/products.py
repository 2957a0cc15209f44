"""Products of a linear layer over many positions on a CPU, as convolutions of one tap.

The library that torch takes products from knows some processors badly: there its convolutions are twice as fast at the
same work (115 against 260 GFLOP/s a core, AMD EPYC with AVX-512), and a record's gradient dyᵀx by our own loop is too.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from sordino.client.gradients import weights
from sordino.client.gradients.lengths import squared_norms
from sordino.client.gradients.patches import Geometry

ONE_TAP = Geometry((1, 1), (1, 1), (0, 0), (1, 1))
LEAST = 2**20
"""Multiplications below which a plain product is as good."""


def serves(x: Tensor, weight: Tensor) -> bool:
    """Whether x ``[n, …, in]`` has positions and the product with ``weight[out, in]`` is large enough."""
    here = x.device.type == "cpu" and x.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    several = x.dim() > 2 and len(x) > 1 and min(weight.shape) >= weights.FEWEST_CHANNELS
    return here and several and x.numel() * weight.shape[0] >= LEAST


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x Wᵀ + b``; with slopes and Wᵀ the gradient of the input."""
    out = functional.conv2d(as_image(x), weight.contiguous()[:, :, None, None], bias)
    return out.permute(0, 2, 3, 1).reshape(*x.shape[:-1], -1)


def gradients(x: Tensor, dy: Tensor, out: Tensor) -> Tensor:
    """Write every record's dyᵀx into ``out[n, deep, wide]`` from ``x[n, t, wide]``, ``dy[n, t, deep]``; their ‖·‖²."""
    seen = as_image(x)
    if weights.serves(seen):
        return weights.gradients(seen, as_image(dy), ONE_TAP, 1, out)
    torch.bmm(dy.transpose(1, 2), x, out=out)
    return squared_norms(out.flatten(1))


def as_image(x: Tensor) -> Tensor:
    """``[n, …, k]`` as images ``[n, k, positions, 1]`` with channels last, a view where x is contiguous."""
    return x.reshape(len(x), -1, 1, x.shape[-1]).permute(0, 3, 1, 2)
