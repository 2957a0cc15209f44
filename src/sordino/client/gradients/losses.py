"""Per-record losses by name, and their gradients with respect to the model's outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from sordino.client.gradients import fused, loops
from sordino.errors import BadInput


@dataclass(frozen=True)
class Loss:
    """A loss per record and its gradient, written out so that a chain of layers needs no autograd."""

    values: Callable[[Tensor, Tensor], Tensor]
    """From ``outputs[n, …]``, ``y[n]`` to ℓ ``[n]``; differentiable."""
    graded: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """The same to ℓ ``[n]`` and ∂ℓ_j/∂outputs_j in the shape of the outputs."""
    each: Callable[[Tensor, Tensor, Tensor], list[float]]
    """The same with every record by itself, slopes written into a third tensor; NaN where a label is none."""


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """ℓ_j = −log softmax(outputs_j)[y_j]."""
    return functional.cross_entropy(outputs, y, reduction="none")


def graded_cross_entropy(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The loss ℓ_j and its gradient, softmax(outputs_j) less 1 at the label."""
    if outputs.dim() == 2 and outputs.shape[1] <= fused.MOST_CLASSES and fused.serves(outputs):
        return fused.cross_entropy(outputs, y)
    logs = functional.log_softmax(outputs, 1)
    label = y.unsqueeze(1)
    slopes = logs.exp().scatter_add_(1, label, torch.full_like(label, -1, dtype=logs.dtype))
    return -logs.gather(1, label).squeeze(1), slopes


def half_squared_error(outputs: Tensor, y: Tensor) -> Tensor:
    """ℓ_j = ½ Σ (outputs_j − y_j)², summed over outputs where there are several."""
    return graded_half_squared_error(outputs, y)[0]


def graded_half_squared_error(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The loss ℓ_j and its gradient, outputs_j − y_j."""
    gap = outputs.reshape(outputs.shape[0], -1) - y.reshape(y.shape[0], -1)
    return 0.5 * gap.square().sum(1), gap.view(outputs.shape)


def moments(outputs: Tensor, y: Tensor) -> Tensor:
    """ℓ_j = −a_j − ⟨b_j, t_j⟩ for outputs (a, b) of ``models.moments``; t is a label's indicator, or a number."""
    if y.is_floating_point():
        return -outputs[:, 0] - outputs[:, 1] * y
    return -outputs[:, 0] - outputs[:, 1:].gather(1, y.unsqueeze(1)).squeeze(1)


def graded_moments(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The loss ℓ_j and its gradient, −1 and −t."""
    slopes = torch.zeros_like(outputs)
    slopes[:, 0] = -1.0
    if y.is_floating_point():
        slopes[:, 1] = -y
    else:
        slopes[:, 1:].scatter_(1, y.unsqueeze(1), -1.0)
    return moments(outputs, y), slopes


def _each_moments(outputs: Tensor, y: Tensor, slopes: Tensor) -> list[float]:
    losses, found = graded_moments(outputs, y)
    slopes.copy_(found)
    return [float(one) for one in losses]


_LOSSES = {
    "cross-entropy": Loss(cross_entropy, graded_cross_entropy, loops.cross_entropies),
    "half-squared-error": Loss(half_squared_error, graded_half_squared_error, loops.half_squared_errors),
    "moments": Loss(moments, graded_moments, _each_moments),
}


def loss_by_name(name: str) -> Loss:
    """The per-record loss of that name."""
    if name not in _LOSSES:
        raise BadInput(f"unknown loss '{name}'; choose one of: {', '.join(_LOSSES)}")
    return _LOSSES[name]
