"""The trainable parameters of a model as one flat vector."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sordino.client.gradients.types import Slot
from sordino.errors import BadInput


def layout_of(model: nn.Module) -> list[Slot]:
    """Slots of the trainable parameters, in the model's own order."""
    slots: list[Slot] = []
    offset = 0
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            slots.append(Slot(name, tuple(parameter.shape), offset))
            offset += parameter.numel()
    if not slots:
        raise BadInput("the model has no trainable parameter; set requires_grad on what should be trained")
    return slots


def dimension_of(slots: list[Slot]) -> int:
    """Length of the flat vector, d."""
    return slots[-1].offset + slots[-1].size


def flatten(model: nn.Module, slots: list[Slot]) -> Tensor:
    """A model's trainable parameters as one new vector."""
    named = dict(model.named_parameters())
    return torch.cat([named[slot.name].detach().reshape(-1) for slot in slots])


def load(model: nn.Module, slots: list[Slot], flat: Tensor) -> None:
    """Copy a flat vector into a model's trainable parameters."""
    if flat.shape != (dimension_of(slots),):
        raise BadInput(f"expected {dimension_of(slots)} parameters in one vector, got shape {tuple(flat.shape)}")
    named = dict(model.named_parameters())
    with torch.no_grad():
        for slot in slots:
            named[slot.name].copy_(flat[slot.offset : slot.offset + slot.size].view(slot.shape))


def view_of(params: Tensor, slot: Slot) -> Tensor:
    """One tensor's view of flat parameters: ``[rows, *shape]`` of a matrix, ``shape`` of a vector."""
    part = params[..., slot.offset : slot.offset + slot.size]
    return part.view(*params.shape[:-1], *slot.shape)
