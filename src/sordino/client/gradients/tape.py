"""One forward and one backward pass in which every trainable layer leaves its per-record gradient on a tape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from sordino.client.gradients.layout import view_of
from sordino.client.gradients.segments import Segments
from sordino.client.gradients.types import Slot

Saved = tuple[Tensor | None, ...]


@dataclass
class Entry:
    """What one layer keeps of a batch: squared norms now, the weighted sum later.

    Attributes
    ----------
    held
        Tensors with the records as first axis from which ``pull`` computes; records that must not contribute are
        zeroed in them first where they hold anything not finite.
    squares
        ‖g_j‖² of the layer's own parameters, ``[n]``.
    pull
        ``(factors[n], held, segments)`` to the weighted sum of every slot, ``[rows, *slot.shape]`` (or any shape of
        that size).
    """

    held: list[Tensor]
    squares: Tensor
    pull: Callable[[Tensor, list[Tensor], Segments], list[tuple[Slot, Tensor]]]


class Layer(Protocol):
    """One trainable leaf of the model: how it runs, differentiates and is recorded."""

    name: str

    def forward(self, x: Tensor, tape: Tape) -> tuple[Tensor, Saved]:
        """Output, and what the backward pass needs."""

    def input_gradient(self, dy: Tensor, saved: Saved, tape: Tape) -> Tensor:
        """Gradient with respect to the layer's input."""

    def record(self, dy: Tensor, saved: Saved, tape: Tape) -> Entry:
        """Per-record squared norms and the way to weighted sums."""


@dataclass
class Tape:
    """State of one pass.

    Attributes
    ----------
    params
        ``[d]`` when all records share one vector of weights, else ``[rows, d]``.
    entries
        Filled by the backward pass; a layer that was used twice has two entries.
    """

    params: Tensor
    segments: Segments
    entries: dict[str, list[Entry]] = field(default_factory=dict)

    @property
    def stacked(self) -> bool:
        """Whether every row has weights of its own."""
        return self.params.dim() == 2

    def weight(self, slot: Slot) -> Tensor:
        """The values of a slot: its shape, with rows first where weights are stacked."""
        return view_of(self.params, slot)

    def per_record(self, weight: Tensor, axes: int) -> Tensor:
        """Weights of a slot spread over records, ``[n or 1, *shape]``, to broadcast against ``axes`` more axes."""
        if not self.stacked:
            return weight.reshape(1, *weight.shape, *([1] * axes))
        width = self.segments.width or 0
        spread = weight.repeat_interleave(width, 0)
        return spread.reshape(*spread.shape, *([1] * axes))


class Recorded(torch.autograd.Function):
    """A layer whose backward pass computes the gradient of its input only and records the rest on the tape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, layer: Layer, tape: Tape) -> Tensor:
        """Run the layer. ``anchor`` is a leaf that requires a gradient, so that the first layer is reached too."""
        out, saved = layer.forward(x, tape)
        ctx.save_for_backward(*saved)
        ctx.layer, ctx.tape = layer, tape
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        """Record the layer; hand on the gradient of its input where something before it needs one."""
        layer, tape, dy = ctx.layer, ctx.tape, grads[0]
        saved = tuple(None if each is None else each.detach() for each in ctx.saved_tensors)
        dx = layer.input_gradient(dy, saved, tape) if ctx.needs_input_grad[0] else None
        tape.entries.setdefault(layer.name, []).append(layer.record(dy, saved, tape))
        return dx, None, None, None
