"""The model that suits records of a shape when nobody names one, and how far a model's outputs follow its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from sordino.errors import BadInput
from sordino.models.scatter import SMALLEST

SEEN = 16
"""Records, drawn at random, on which a model's reach is measured."""


def usual(
    shape: tuple[int, ...],
    ranged: tuple[int, float, float] | None,
    options: Mapping[str, Any],
    tokens: int | None = None,
) -> tuple[str, dict[str, Any]]:
    """Name and options of the model for records of a shape: a linear head on fixed features of length 1, one constant.

    Images get scattering features; tables bins over declared ranges, where ``ranged`` says how many of the first
    numbers have one, and which; texts (of so many ``tokens``) which words they have; other records are only brought to
    length 1. ``features`` among the options take their place.
    """
    if other := sorted(set(options) - {"features"}):
        raise BadInput(f"model 'auto' has no option {other[0]}: name a model, or give features")
    if "features" in options:
        return "logistic", {"features": options["features"]}
    if tokens is not None:
        return "text-bag", {}
    if len(shape) == 3 and min(shape[1:]) >= SMALLEST:
        return "scatter-linear", {}
    if ranged is not None:
        columns, low, high = ranged
        return "linear", {"features": {"name": "binned", "columns": columns, "low": low, "high": high}}
    return "linear", {"features": "unit"}


def reach(model: nn.Module, shape: tuple[int, ...], tokens: int | None = None) -> float:
    """How far an output moves when the weights move by 1 along its gradient: √(mean of ‖∂f_j/∂w‖²).

    The mean is over outputs j and a few records of numbers drawn uniformly from [0, 1] by a fixed seed (of texts: of
    token ids but padding's), at the model's own weights. No client's record is seen. A linear head on features of
    length 1 has 1.
    """
    parameters = [one for one in model.parameters() if one.requires_grad]
    drawn = torch.rand((SEEN, *shape), generator=torch.Generator().manual_seed(0))
    if tokens is not None:
        drawn = 1 + (drawn * (tokens - 1)).long().clamp(max=tokens - 2)
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    try:
        for record in drawn:
            outputs = model(record[None])[0].reshape(-1)
            for output in outputs:
                slopes = torch.autograd.grad(output, parameters, retain_graph=True, allow_unused=True)
                total += sum(float(one.square().sum()) for one in slopes if one is not None)
                count += 1
    except (RuntimeError, TypeError, IndexError) as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise BadInput(f"lr = 'auto' needs a model that takes records of numbers in [0, 1] ({why}): give lr") from error
    finally:
        model.train(was_training)
    found = math.sqrt(total / max(1, count))
    if not (math.isfinite(found) and found > 0):
        raise BadInput("lr = 'auto': this model's outputs do not follow its first weights: give lr")
    return found


def weight_size(model: nn.Module) -> float:
    """The root mean square of a network's first weights, which noise must not drown; ∞ where one layer is trained.

    The output of a linear head is as far from its weights' noise as from their signal, wherever they started. In a
    network every layer works on what the one before makes of the record.
    """
    trained = [one.detach() for one in model.parameters() if one.requires_grad]
    if sum(one.dim() > 1 for one in trained) < 2:
        return math.inf
    return math.sqrt(sum(float(one.square().sum()) for one in trained) / sum(one.numel() for one in trained))
