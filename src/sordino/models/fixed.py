"""What a network does to a record before its first trained layer: the same at every step, so it need be done once."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from sordino.models.zoo import FixedFeatures, Standardise

PURE = (nn.Flatten, FixedFeatures, Standardise)
"""Modules that give the same for a record whenever they are asked, one record at a time, and train nothing."""

WORTH = (FixedFeatures, Standardise)
BATCH = 8192


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
        return torch.cat([fixed(some) for some in x.split(BATCH)])
