"""One forward and one backward pass in which every trainable layer leaves its per-record gradient on a tape."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sordino.client.gradients import fused
from sordino.client.gradients.lengths import Length
from sordino.client.gradients.types import LayerPlan, Slot
from sordino.errors import BadInput

Held = dict[str, Tensor]
Saved = tuple[Tensor, ...]
SMALL, LARGE = 2**16, 2**19
PER_RECORD = {"grads", "weight", "bias"}
"""Held keys that only ``Segments.weighted`` reads."""


class Unsupported(BadInput):
    """The fast engine cannot serve a model; the message says which layer and why."""


class Layer(ABC):
    """One trainable leaf of the model: how it runs, is differentiated, is recorded and is summed.

    Attributes
    ----------
    slots: where it reads its trained parameters.
    own: those of them that it records and sums itself; a weight that it shares with another layer is not among them.
    recorder: the layer that all runs are recorded by, itself or one for a shared weight.
    """

    method: str
    reason: str

    def __init__(self, name: str, module: nn.Module, slots: dict[str, Slot]) -> None:
        self.name, self.kind, self.slots = name, type(module).__name__, slots
        self.own = slots
        self.recorder: Layer = self
        self._fixed = {key: value.detach() for key, value in module.named_parameters(recurse=False)}

    def plan(self) -> LayerPlan:
        """How the layer is served, and why."""
        return LayerPlan(self.name, self.kind, self.method, self.reason)

    def weight(self, tape: Tape) -> Tensor:
        """The layer's weight in this pass, trained or fixed; rows first where weights are stacked."""
        return self._value("weight", tape)

    def bias(self, tape: Tape) -> Tensor | None:
        """The layer's bias in the same way, where it has one."""
        return self._value("bias", tape) if "bias" in self._fixed else None

    def _value(self, key: str, tape: Tape) -> Tensor:
        if key in self.slots:
            return self.slots[key].view(tape.params)
        fixed = self._fixed[key]
        return fixed.expand(tape.params.shape[0], *fixed.shape) if tape.stacked else fixed

    @abstractmethod
    def forward(self, x: Tensor, tape: Tape) -> tuple[Tensor, Saved]:
        """Output, and what the backward pass needs."""

    @abstractmethod
    def input_gradient(self, dy: Tensor, saved: Saved, tape: Tape) -> Tensor:
        """Gradient with respect to the layer's input."""

    @abstractmethod
    def record(self, dy: Tensor, saved: Saved, tape: Tape) -> None:
        """Add the layer's ‖g_j‖² to the tape and hold there what the weighted sum will need."""

    def backward(self, dy: Tensor, saved: Saved, tape: Tape, further: bool) -> Tensor:
        """Record the layer; the gradient of its input, or any tensor where nothing further back needs it."""
        dx = self.input_gradient(dy, saved, tape) if further else dy
        self.record(dy, saved, tape)
        return dx

    @abstractmethod
    def pull(self, factors: Tensor, held: Held, segments: Segments, out: Tensor) -> None:
        """Write Σ_j factors_j · g_j into the layer's own slots of ``out[rows, d]``."""

    def skipped(self, held: Held) -> set[str]:
        """Which of what is held a record with factor 0 is not read in, where ``Segments.skips`` is true."""
        return PER_RECORD

    def record_runs(self, runs: list[Run], tape: Tape) -> None:
        """Record several runs of one pass, whose gradients add up: as one run over all their positions."""
        dy, saved = self.joined([(one.dy, one.saved) for one in runs]) if len(runs) > 1 else runs[0][1:]
        self.record(dy, saved, tape)

    def joined(self, runs: list[tuple[Tensor, Saved]]) -> tuple[Tensor, Saved]:
        """One run with the positions, hence the gradient, of several together."""
        raise Unsupported(f"layer '{self.name}' ({self.kind}) runs {len(runs)} times in one pass")


class Run(NamedTuple):
    """What one run of a layer left for its recording."""

    layer: Layer
    dy: Tensor
    saved: Saved


class Workspace:
    """Buffers that outlive a pass. Fresh large allocations would be paged in anew at every step."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, key: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A buffer of that shape with arbitrary content, valid until the key is taken again."""
        size, dtype = math.prod(shape), dtype or like.dtype
        flat = self._buffers.get(key)
        if flat is None or flat.numel() < size or flat.dtype != dtype or flat.device != like.device:
            # Poisson batches change size at every step: some room above spares a new buffer each time.
            flat = torch.empty(size + size // 8, dtype=dtype, device=like.device)
            self._buffers[key] = flat
        return flat[:size].view(shape)


@dataclass
class Tape:
    """State of one pass over a window of a batch."""

    params: Tensor
    """``[d]`` where the window's records share one vector of weights, else ``[rows, d]``, as many records in each."""
    window: tuple[int, int]
    """The records of this pass, ``start .. stop``."""
    records: int
    """Number of records in the whole batch."""
    held: dict[str, Held]
    """What the passes over the batch leave behind, filled window by window: per layer, tensors with all records as
    first axis, from which the weighted sums are computed."""
    kept: Workspace
    """The buffers in which those tensors lie."""
    scratch: Workspace
    """Buffers that are free again after the pass."""
    lengths: Tensor
    """How many records of each row count, ``[rows]`` (one row where weights are shared); the rest is padding."""
    mixed: bool
    """Whether activations and their gradients may be computed in TF32; never gradients of parameters and norms."""
    squares: list[Tensor] = field(default_factory=list)
    """‖g_j‖² of the window's records from every group of parameters, ``[window]`` or ``[window, parts]``."""
    excesses: list[Tensor] = field(default_factory=list)
    """What rounding may add to ‖g_j‖ beyond that, ``[window]`` each."""
    ran: dict[str, int] = field(default_factory=dict)
    """How often each layer ran in the forward pass, by who records it."""
    waiting: dict[str, list[Run]] = field(default_factory=dict)
    """Runs of layers that ran more than once, or share a weight: recorded together at the end of the pass."""
    volume: int = 0
    """Numbers the layers have put out."""
    copies: int = 1
    """How many inputs in succession belong to one record: layers run on inputs, and are recorded by records."""
    lent: list[Tensor] = field(default_factory=list)
    """What work beside the pass reads: kept until the pass has waited for it."""

    @property
    def stacked(self) -> bool:
        """Whether every row has weights of its own."""
        return self.params.dim() == 2

    def per_record(self, values: Tensor) -> Tensor:
        """Stacked values spread over the inputs of the window: ``[rows, …]`` to ``[n·copies, …]``."""
        records = (self.window[1] - self.window[0]) * self.copies
        rows = values.shape[0]
        return values.unsqueeze(1).expand(rows, records // rows, *values.shape[1:]).flatten(0, 1)

    def folded(self, values: Tensor) -> Tensor:
        """Positions of all of a record's inputs as its own: ``[n·copies, …, k]`` to ``[n, copies·positions, k]``."""
        return values.reshape(values.shape[0] // self.copies, -1, values.shape[-1])

    def waits(self, layer: Layer) -> bool:
        """Whether a layer is recorded at the end of the pass only: it ran more than once, or shares a weight."""
        return layer.recorder is not layer or self.ran[layer.name] > 1

    def beside(self, work: Callable[[], None], *read: Tensor) -> None:
        """Do what nothing in the rest of the pass waits for; on a GPU beside it, since few kernels keep one busy.

        ``read``: the tensors that it reads, whose memory nobody else may have before it is done.
        """
        if not self.params.is_cuda:
            work()
            return
        side = _side_stream(self.params.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        self.lent += read

    def join(self) -> None:
        """Wait, on the device, for the work beside the pass."""
        if self.lent:
            torch.cuda.current_stream().wait_stream(_side_stream(self.params.device))
            self.lent.clear()

    def finish(self) -> None:
        """Record what waited for the end of the pass."""
        for runs in self.waiting.values():
            runs[0].layer.recorder.record_runs(runs, self)
        self.waiting.clear()

    def note(self, length: Length) -> None:
        """Count the length of a group of parameters' gradients."""
        self.squares.append(length.square)
        if length.excess is not None:
            self.excesses.append(length.excess)

    def room(self, layer: str, key: str, tail: tuple[int, ...], like: Tensor, copies: int | None = None) -> Tensor:
        """Space for the window's records in a tensor held for the whole batch: ``[window, (copies,) *tail]``."""
        own = self.held.setdefault(layer, {})
        if key not in own:
            # Each copy is contiguous over the records, which batched products need of their result.
            space = self.kept.take(f"{layer}/{key}", (copies or 1, self.records, *tail), like)
            own[key] = space.transpose(0, 1) if copies else space[0]
        return own[key][self.window[0] : self.window[1]]

    def hold(self, layer: str, key: str, values: Tensor) -> None:
        """Hold values of the window's records; by reference where the window is the whole batch."""
        if values.shape[0] == self.records:
            self.held.setdefault(layer, {})[key] = values
        else:
            self.room(layer, key, tuple(values.shape[1:]), values).copy_(values)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Taped(torch.autograd.Function):
    """A layer whose backward pass computes the gradient of its input only and records the rest on the tape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, layer: Layer, tape: Tape) -> Tensor:
        """Run the layer. ``anchor`` is a leaf that requires a gradient, so that the first layer is reached too."""
        out, ctx.saved = layer.forward(x.detach(), tape)
        ctx.layer, ctx.tape = layer, tape
        tape.volume += out.numel()
        tape.ran[layer.recorder.name] = tape.ran.get(layer.recorder.name, 0) + 1
        # Without its history as a view, or the model could not write over it.
        return out.data

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        """Record the layer; hand on the gradient of its input where something before it needs one."""
        layer, tape, dy, saved = ctx.layer, ctx.tape, grads[0], ctx.saved
        ctx.saved = None  # activations go as the pass goes
        further = ctx.needs_input_grad[0]
        if tape.waits(layer):
            dx = layer.input_gradient(dy, saved, tape) if further else None
            tape.waiting.setdefault(layer.recorder.name, []).append(Run(layer, dy, saved))
            return dx, None, None, None
        dx = layer.backward(dy, saved, tape, further)
        return dx if further else None, None, None, None


@dataclass(frozen=True)
class Segments:
    """Which row each record of a flat batch belongs to: row r owns the records ``bounds[r] .. bounds[r+1]``."""

    bounds: tuple[int, ...]
    """Python numbers, so that no sum over rows waits for a device."""
    width: int | None
    """Records per row where all rows have the same number, else None."""

    @staticmethod
    def regular(rows: int, width: int) -> Segments:
        """Segments in which every row has ``width`` records."""
        bounds = tuple(range(0, rows * width + 1, width)) if width else (0,) * (rows + 1)
        return Segments(bounds, width)

    @staticmethod
    def ragged(rows_of: Tensor, rows: int) -> Segments:
        """Segments from the sorted row number of every record."""
        counts = np.bincount(rows_of.cpu().numpy(), minlength=rows)
        width = int(counts[0]) if rows and counts.min() == counts.max() else None
        return Segments((0, *counts.cumsum().tolist()), width)

    @property
    def rows(self) -> int:
        """How many rows, that is clients' turns, the batch holds."""
        return len(self.bounds) - 1

    @property
    def records(self) -> int:
        """Number of records over all rows."""
        return self.bounds[-1]

    @cached_property
    def pieces(self) -> list[tuple[int, int, int]]:
        """``(row, start, stop)`` of every row that has records."""
        return [(row, a, b) for row, (a, b) in enumerate(pairwise(self.bounds)) if b > a]

    def skips(self, values: Tensor) -> bool:
        """Whether :meth:`weighted` leaves a record with factor 0 unread, whatever its values."""
        return bool(self.width) and self.rows > 1 and fused.serves(values)

    def weighted(self, factors: Tensor, values: Tensor, out: Tensor) -> None:
        """Σ_j factors_j · values_j per row: ``[n]``, ``[n, p]`` into ``out[rows, p]``."""
        if self.skips(values):
            fused.weighted(factors, values.contiguous(), out)
            return
        if self.width and self.rows > 1:
            weights = factors.view(self.rows, 1, self.width)
            out.copy_(torch.bmm(weights, values.view(self.rows, self.width, -1)).squeeze(1))
            return
        for row, start, stop in self._prepared(out):
            torch.mv(values[start:stop].t(), factors[start:stop], out=out[row])

    def outer(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """Σ over a row's records and positions of left ⊗ right: ``[n, t, o]``, ``[n, t, i]`` to ``out[rows, o·i]``."""
        wide, deep = left.shape[2], right.shape[2]
        # On a CPU a large matrix is better written where it belongs than written aside and copied.
        if self.width and self.rows > 1 and (out.device.type != "cpu" or wide * deep <= SMALL):
            left = left.reshape(self.rows, -1, wide)
            out.copy_(torch.bmm(left.transpose(1, 2), right.reshape(self.rows, -1, deep)).flatten(1))
            return
        for row, start, stop in self._prepared(out):
            flat = left[start:stop].reshape(-1, wide)
            _product(flat.t(), right[start:stop].reshape(-1, deep), out[row].view(wide, deep))

    def _prepared(self, out: Tensor) -> list[tuple[int, int, int]]:
        if len(self.pieces) < self.rows:
            out.zero_()
        return self.pieces


def _product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """``left @ right``; a large one cut into as many rows of blocks as there are threads.

    The native product of a thin pair into a large matrix leaves all threads but one idle.
    """
    threads = torch.get_num_threads()
    wide, deep = out.shape
    if threads == 1 or wide % threads or wide * deep < LARGE:
        torch.mm(left, right, out=out)
        return
    cut = left.unflatten(0, (threads, wide // threads))
    torch.bmm(cut, right.expand(threads, -1, -1), out=out.view(threads, wide // threads, deep))
