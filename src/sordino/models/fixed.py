"""What a network does to a record before its first trained layer: the same at every step, so it need be done once."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from sordino.models.isolation import isolated
from sordino.models.scatter import RecordNorm, Scatter

BATCH, BYTES = 8192, 1 << 26
"""Records that go through the fixed modules at a time, and the most memory that their output may take."""


@isolated
class FixedFeatures(nn.Module):
    """``relu(x·W + c)`` with W and c drawn once and held as buffers, never trained and never released."""

    weight: Tensor
    bias: Tensor

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        drawn = nn.Linear(features, hidden)
        self.register_buffer("weight", drawn.weight.detach().clone())
        self.register_buffer("bias", drawn.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Features of a batch of flat records."""
        return torch.relu(nn.functional.linear(x, self.weight, self.bias))


@isolated
class Standardise(nn.Module):
    """``(x − mean)/deviation`` with public constants: a fixed map of every record by itself."""

    def __init__(self, mean: float, deviation: float) -> None:
        super().__init__()
        self.mean, self.deviation = mean, deviation

    def forward(self, x: Tensor) -> Tensor:
        """The records, shifted and scaled by the two constants."""
        return (x - self.mean) / self.deviation


WORTH = (FixedFeatures, Standardise, Scatter, RecordNorm)
PURE = (nn.Flatten, *WORTH)
"""Modules that give the same for a record whenever they are asked, one record at a time, and train nothing."""


def split_fixed(model: nn.Module) -> tuple[nn.Module | None, nn.Module]:
    """The fixed modules at the model's beginning (None where they are not worth it), and the rest under its old names.

    Both parts share their modules with the model.
    """
    if type(model) is not nn.Sequential:
        return None, model
    parts = [(name, module) for name, module in model._modules.items() if module is not None]
    count = next((k for k, (_, module) in enumerate(parts) if type(module) not in PURE), len(parts))
    if count == len(parts) or not any(type(module) in WORTH for _, module in parts[:count]):
        return None, model
    return nn.Sequential(OrderedDict(parts[:count])), nn.Sequential(OrderedDict(parts[count:]))


def apply_fixed(fixed: nn.Module, x: Tensor) -> Tensor:
    """The fixed modules' output for all records, some at a time, on the device of x."""
    fixed = fixed.to(x.device)
    with torch.no_grad():
        one: Tensor = fixed(x[:1])
        found = one.new_empty(len(x), *one.shape[1:])
        size = max(1, min(BATCH, BYTES // max(1, one.nbytes)))
        for some, out in zip(x.split(size), found.split(size)):
            out.copy_(fixed(some))
    return found
