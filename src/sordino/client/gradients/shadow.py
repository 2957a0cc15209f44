"""The fast engine's own copy of a model: its trainable leaves run by their rules, the rest as written."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sordino.client.gradients.convolution import ConvLayer
from sordino.client.gradients.layers import EmbeddingLayer, GroupNormLayer, LayerNormLayer, LinearLayer
from sordino.client.gradients.patches import pads_with_zeros
from sordino.client.gradients.tape import Layer
from sordino.client.gradients.types import Slot
from sordino.errors import BadInput

_RULES: dict[type[nn.Module], Callable[[str, Any, dict[str, Slot]], Layer]] = {
    nn.Linear: LinearLayer,
    nn.Embedding: EmbeddingLayer,
    nn.Conv1d: ConvLayer,
    nn.Conv2d: ConvLayer,
    nn.GroupNorm: GroupNormLayer,
    nn.InstanceNorm1d: GroupNormLayer,
    nn.InstanceNorm2d: GroupNormLayer,
    nn.InstanceNorm3d: GroupNormLayer,
    nn.LayerNorm: LayerNormLayer,
}


class Unsupported(BadInput):
    """The fast engine cannot serve a model; the message says which layer and why."""


def shadow_of(
    model: nn.Module, slots: list[Slot], run: Callable[[Layer, Tensor], Tensor]
) -> tuple[nn.Module, list[Layer]]:
    """Copy a model so that every leaf with trainable parameters calls ``run(layer, x)``, or raise Unsupported.

    The copy's own trainable weights become NaN views of a single number. They cost no memory, and code that reads them
    past the leaf's ``forward`` cannot go unnoticed.
    """
    hollow: dict[int, object] = {
        id(parameter): nn.Parameter(parameter.new_full((), torch.nan).expand(parameter.shape), requires_grad=False)
        for parameter in model.parameters()
        if parameter.requires_grad
    }
    shadow = copy.deepcopy(model, hollow)
    layers = [_layer(name, shadow.get_submodule(name), own) for name, own in slots_by_layer(slots).items()]
    for layer in layers:
        _route(shadow.get_submodule(layer.name), layer, run)
    for module in shadow.modules():
        if getattr(module, "inplace", False):
            setattr(module, "inplace", False)  # noqa: B010  (what it would write over, a layer may have recorded)
        if type(module) is nn.Sequential:
            pool_before_relu(module)
    return shadow, layers


def slots_by_layer(slots: list[Slot]) -> dict[str, dict[str, Slot]]:
    """The slots of every module that owns trainable parameters, by the module's name and the parameter's own."""
    owned: dict[str, dict[str, Slot]] = {}
    for slot in slots:
        owner, _, own = slot.name.rpartition(".")
        owned.setdefault(owner, {})[own] = slot
    return owned


def _layer(name: str, module: nn.Module, own: dict[str, Slot]) -> Layer:
    kind = type(module)
    if kind not in _RULES:
        raise Unsupported(f"layer '{name}' ({kind.__name__}) has no fast rule")
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq):
        raise Unsupported(f"layer '{name}' renormalises its table or scales gradients by frequency")
    return _RULES[kind](name, module, own)


def _route(module: nn.Module, layer: Layer, run: Callable[[Layer, Tensor], Tensor]) -> None:
    padding = padding_before(module)
    module.forward = lambda x: run(layer, x if padding is None else padding(x))


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
    if not isinstance(module, nn.Conv1d | nn.Conv2d) or pads_with_zeros(module):
        return None
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return Padding(list(module._reversed_padding_repeated_twice), mode)


def pool_before_relu(sequence: nn.Sequential | list[nn.Module]) -> None:
    """Swap every ReLU and the max-pooling after it: the same function and gradient on a quarter of the numbers."""
    for index in range(len(sequence) - 1):
        first, second = sequence[index], sequence[index + 1]
        if type(first) is nn.ReLU and type(second) is nn.MaxPool2d and not second.return_indices:
            sequence[index], sequence[index + 1] = second, first


def in_order(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules of nested sequences, with their names, in the order in which they run."""
    if type(module) is not nn.Sequential:
        yield name, module
        return
    for key, child in module._modules.items():
        if child is not None:
            yield from in_order(f"{name}.{key}" if name else key, child)
