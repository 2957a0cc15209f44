"""The fast engine's own copy of a model: its trainable leaves run through the tape, the rest as written."""

from __future__ import annotations

import copy
from collections.abc import Callable

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
    hollow: dict[int, object] = {
        id(parameter): nn.Parameter(parameter.new_full((), torch.nan).expand(parameter.shape), requires_grad=False)
        for parameter in model.parameters()
        if parameter.requires_grad
    }
    shadow = copy.deepcopy(model, hollow)
    layers = layers_of(shadow, slots)
    for layer in layers:
        _route(shadow.get_submodule(layer.name), layer, run)
    for module in shadow.modules():
        if getattr(module, "inplace", False):
            setattr(module, "inplace", False)  # noqa: B010  (what it would write over, a layer may have recorded)
        if type(module) is nn.Sequential:
            _pool_before_relu(module)
    return shadow, layers


def _route(module: nn.Module, layer: Layer, run: Callable[[Layer, Tensor], Tensor]) -> None:
    padding = padding_before(module)

    def forward(x: Tensor) -> Tensor:
        return run(layer, x if padding is None else padding(x))

    module.forward = forward


class Padding(nn.Module):
    """Padding as a module of its own."""

    def __init__(self, amounts: list[int], mode: str) -> None:
        super().__init__()
        self.amounts, self.mode = amounts, mode

    def forward(self, x: Tensor) -> Tensor:
        """The padded records."""
        return functional.pad(x, self.amounts, self.mode)


def padding_before(module: nn.Module) -> Padding | None:
    """Padding that the layer's rule does not know (reflected, circular, "same"), to be done before it."""
    if not isinstance(module, nn.Conv1d | nn.Conv2d):
        return None
    if module.padding_mode == "zeros" and not isinstance(module.padding, str):
        return None
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return Padding(list(module._reversed_padding_repeated_twice), mode)


def _pool_before_relu(sequence: nn.Sequential) -> None:
    """Swap ReLU and the max-pooling after it: the same function and gradient on a quarter of the numbers."""
    for index in range(len(sequence) - 1):
        first, second = sequence[index], sequence[index + 1]
        if type(first) is nn.ReLU and type(second) is nn.MaxPool2d and not second.return_indices:
            sequence[index], sequence[index + 1] = second, first
