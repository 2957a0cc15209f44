"""Which layers the fast engine can serve, and which rule serves each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from sordino.client.gradients.convolution import ConvLayer
from sordino.client.gradients.linear import EmbeddingLayer, LinearLayer
from sordino.client.gradients.norms import GroupNormLayer, LayerNormLayer
from sordino.client.gradients.tape import Layer
from sordino.client.gradients.types import Slot
from sordino.errors import BadInput


class Unsupported(BadInput):
    """The fast engine cannot serve a model; the message says which layer and why."""


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


def layers_of(model: nn.Module, slots: list[Slot]) -> list[Layer]:
    """One rule for every module that owns trainable parameters, or :class:`Unsupported`."""
    owned: dict[str, dict[str, Slot]] = {}
    for slot in slots:
        owner, _, own = slot.name.rpartition(".")
        owned.setdefault(owner, {})[own] = slot
    return [_layer(name, model.get_submodule(name), own) for name, own in owned.items()]


def _layer(name: str, module: nn.Module, own: dict[str, Slot]) -> Layer:
    kind = type(module)
    if kind not in _RULES:
        raise Unsupported(f"layer '{name}' ({kind.__name__}) has no fast rule")
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq):
        raise Unsupported(f"layer '{name}' renormalises its table or scales gradients by frequency")
    return _RULES[kind](name, module, own)


def refuse_reuse(used: dict[str, int]) -> None:
    """Raise for a layer that ran twice in one pass: its gradient is a sum, whose norm the rules do not see."""
    for name, count in used.items():
        if count > 1:
            raise Unsupported(f"layer '{name}' runs {count} times in one pass")
