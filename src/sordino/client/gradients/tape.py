"""One forward and one backward pass in which every trainable layer leaves its per-record gradient on a tape."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from sordino.client.gradients.layout import view_of
from sordino.client.gradients.lengths import Length
from sordino.client.gradients.segments import Segments
from sordino.client.gradients.types import LayerPlan, Slot

Held = dict[str, Tensor]
Saved = tuple[Tensor, ...]


class Layer(Protocol):
    """One trainable leaf of the model: how it runs, differentiates, is recorded and is summed."""

    name: str

    def plan(self) -> LayerPlan:
        """How the layer is served, and why."""

    def forward(self, x: Tensor, tape: Tape) -> tuple[Tensor, Saved]:
        """Output, and what the backward pass needs."""

    def input_gradient(self, dy: Tensor, saved: Saved, tape: Tape) -> Tensor:
        """Gradient with respect to the layer's input."""

    def record(self, dy: Tensor, saved: Saved, tape: Tape) -> None:
        """Add the layer's ‖g_j‖² to the tape and hold there what the weighted sum will need."""

    def pull(self, factors: Tensor, held: Held, segments: Segments, sums: Sums) -> None:
        """Write Σ_j factors_j · g_j of the layer's own slots."""


class Workspace:
    """Buffers that outlive a pass. Fresh large allocations would be paged in anew at every step."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, key: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of that shape with arbitrary content, valid until the key is taken again."""
        size = math.prod(shape)
        flat = self._buffers.get(key)
        if flat is None or flat.numel() < size or flat.dtype != dtype or flat.device != device:
            # Poisson batches change size at every step: some room above spares a new buffer each time.
            flat = torch.empty(size + size // 8, dtype=dtype, device=device)
            self._buffers[key] = flat
        return flat[:size].view(shape)


class Batch:
    """What the passes over one batch leave behind, filled window by window.

    Attributes
    ----------
    records
        How many there are, n.
    held
        Per layer, tensors with the records as first axis, from which the weighted sums are computed.
    """

    def __init__(self, records: int, workspace: Workspace) -> None:
        self.records = records
        self.held: dict[str, Held] = {}
        self._workspace = workspace

    def room(self, layer: str, key: str, tail: tuple[int, ...], like: Tensor, copies: int | None) -> Tensor:
        """Space held under a layer's key, the same for all windows: ``[n, *tail]``, or ``[n, copies, *tail]``."""
        own = self.held.setdefault(layer, {})
        if key not in own:
            # Each copy is contiguous over the records, which batched products need of their result.
            space = self._workspace.take(f"{layer}/{key}", (copies or 1, self.records, *tail), like.dtype, like.device)
            own[key] = space.transpose(0, 1) if copies else space[0]
        return own[key]


@dataclass
class Tape:
    """State of one pass over a window of a batch.

    Attributes
    ----------
    params
        ``[d]`` when the records of the window share one vector of weights, else ``[rows, d]`` with the same number
        of records in every row.
    window
        The records of this pass, ``start .. stop``.
    scratch
        Buffers that are free again after the pass.
    lengths
        How many records of each row count, ``[rows]`` (one row where weights are shared); the rest is padding.
    mixed
        Whether activations and their gradients may be computed in TF32; never gradients of parameters and norms.
    squares
        ‖g_j‖² of the window's records from every group of parameters, ``[window]`` or ``[window, parts]``.
    excesses
        What rounding may add to ‖g_j‖ beyond that, ``[window]`` each.
    used
        How often each layer ran.
    volume
        Numbers the layers have put out.
    """

    params: Tensor
    batch: Batch
    window: tuple[int, int]
    scratch: Workspace
    lengths: Tensor
    mixed: bool = False
    squares: list[Tensor] = field(default_factory=list)
    excesses: list[Tensor] = field(default_factory=list)
    used: dict[str, int] = field(default_factory=dict)
    volume: int = 0

    @property
    def stacked(self) -> bool:
        """Whether every row has weights of its own."""
        return self.params.dim() == 2

    def value(self, slot: Slot | None, fixed: Tensor) -> Tensor:
        """The values of a slot, or the fixed tensor where it is not trained; rows first where weights are stacked."""
        if slot is not None:
            return view_of(self.params, slot)
        return fixed.expand(self.params.shape[0], *fixed.shape) if self.stacked else fixed

    def per_record(self, values: Tensor) -> Tensor:
        """Stacked values spread over the records of the window: ``[rows, …]`` to ``[n, …]``."""
        records = self.window[1] - self.window[0]
        rows = values.shape[0]
        return values.unsqueeze(1).expand(rows, records // rows, *values.shape[1:]).flatten(0, 1)

    def note(self, length: Length) -> None:
        """Count the length of a group of parameters' gradients."""
        self.squares.append(length.square)
        if length.excess is not None:
            self.excesses.append(length.excess)

    def room(self, layer: str, key: str, tail: tuple[int, ...], like: Tensor, copies: int | None = None) -> Tensor:
        """Space for the window's records in a tensor held for the whole batch: ``[window, (copies,) *tail]``."""
        return self.batch.room(layer, key, tail, like, copies)[self.window[0] : self.window[1]]

    def hold(self, layer: str, key: str, values: Tensor) -> None:
        """Hold values of the window's records; by reference where the window is the whole batch."""
        if values.shape[0] == self.batch.records:
            self.batch.held.setdefault(layer, {})[key] = values
        else:
            self.room(layer, key, tuple(values.shape[1:]), values).copy_(values)


@dataclass(frozen=True)
class Sums:
    """Where the weighted sums go: ``out[rows, d]``, slot by slot."""

    out: Tensor

    def of(self, slot: Slot) -> Tensor:
        """View of one slot, ``[rows, size]``."""
        return self.out[:, slot.offset : slot.offset + slot.size]

    def put(self, slot: Slot, total: Tensor) -> None:
        """Write ``[rows, *shape]`` into a slot, where shape is the slot's."""
        self.of(slot).view(-1, *slot.shape).copy_(total)

    def put_taps_first(self, slot: Slot, total: Tensor) -> None:
        """Write a kernel's ``[rows, outputs, taps, channels]`` into its slot, ``[outputs, channels, kh, kw]``."""
        outputs, channels = slot.shape[:2]
        taps_first = total.view(total.shape[0], outputs, -1, channels)
        self.of(slot).view(total.shape[0], outputs, channels, -1).copy_(taps_first.transpose(2, 3))


class Recorded(torch.autograd.Function):
    """A layer whose backward pass computes the gradient of its input only and records the rest on the tape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, layer: Layer, tape: Tape) -> Tensor:
        """Run the layer. ``anchor`` is a leaf that requires a gradient, so that the first layer is reached too."""
        out, ctx.saved = layer.forward(x.detach(), tape)
        ctx.layer, ctx.tape = layer, tape
        tape.volume += out.numel()
        # Without its history as a view, or the model could not write over it.
        return out.data

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        """Record the layer; hand on the gradient of its input where something before it needs one."""
        layer, tape, dy, saved = ctx.layer, ctx.tape, grads[0], ctx.saved
        ctx.saved = None  # activations go as the pass goes
        tape.used[layer.name] = tape.used.get(layer.name, 0) + 1
        dx = layer.input_gradient(dy, saved, tape) if ctx.needs_input_grad[0] else None
        layer.record(dy, saved, tape)
        return dx, None, None, None
