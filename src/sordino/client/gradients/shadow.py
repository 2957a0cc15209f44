"""The fast engine's own copy of a model: its trainable leaves run through the tape, the rest as written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sordino.client.gradients.rules import layers_of
from sordino.client.gradients.tape import Layer
from sordino.client.gradients.types import Slot


def shadow_of(
    model: nn.Module, slots: list[Slot], run: Callable[[Layer, Tensor], Tensor]
) -> tuple[nn.Module, list[Layer]]:
    """Copy a model so that every leaf with trainable parameters calls ``run(layer, x)``.

    The copy's own trainable weights become NaN views of a single number. They cost no memory, and code that reads them
    past the leaf's ``forward`` cannot go unnoticed.
    """
    shadow = copy.deepcopy(model)
    layers = layers_of(shadow, slots)
    for layer in layers:
        _route(shadow.get_submodule(layer.name), layer, run)
    for module in shadow.modules():
        if type(module) is nn.Sequential:
            _pool_before_relu(module)
        if type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
            setattr(module, "forward", _flattened)  # noqa: B010  (mypy knows no method replaced on an instance)
    return shadow, layers


def _route(module: nn.Module, layer: Layer, run: Callable[[Layer, Tensor], Tensor]) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.requires_grad:
            hollow = torch.full((), torch.nan, dtype=parameter.dtype).expand(parameter.shape)
            setattr(module, name, nn.Parameter(hollow, requires_grad=False))
    padding = _padding_before(module)

    def forward(x: Tensor) -> Tensor:
        return run(layer, x if padding is None else functional.pad(x, padding[0], padding[1]))

    module.forward = forward


def _padding_before(module: nn.Module) -> tuple[list[int], str] | None:
    """Padding that the layer's rule does not know (reflected, circular, "same"), to be done before it."""
    if not isinstance(module, nn.Conv1d | nn.Conv2d):
        return None
    if module.padding_mode == "zeros" and not isinstance(module.padding, str):
        return None
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return list(module._reversed_padding_repeated_twice), mode


def _pool_before_relu(sequence: nn.Sequential) -> None:
    """Swap ReLU and the max-pooling after it: the same function and gradient on a quarter of the numbers."""
    for index in range(len(sequence) - 1):
        first, second = sequence[index], sequence[index + 1]
        if type(first) is nn.ReLU and type(second) is nn.MaxPool2d and not second.return_indices:
            sequence[index], sequence[index + 1] = second, first


class _Flattened(torch.autograd.Function):
    """``x.flatten(1)`` whose gradient comes back in the memory order of x, where layers before it are fast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Flatten all axes but the records'."""
        ctx.shape = x.shape
        return x.flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """The gradient with channels last."""
        return grads[0].view(ctx.shape).contiguous(memory_format=torch.channels_last)


def _flattened(x: Tensor) -> Tensor:
    if x.dim() != 4 or x.is_contiguous():
        return x.flatten(1)
    out: Tensor = _Flattened.apply(x)  # type: ignore[no-untyped-call]
    return out
