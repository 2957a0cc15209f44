"""Conv1d and Conv2d: native convolutions in channels-last order. The ways to their gradients are in ``ways.py``."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from sordino.client.gradients import fused
from sordino.client.gradients.lengths import Length, squared_norms
from sordino.client.gradients.patches import Geometry, last_padded, patches_view, scattered
from sordino.client.gradients.tape import Held, Layer, Saved, Segments, Tape
from sordino.client.gradients.types import LayerPlan, Slot
from sordino.client.gradients.ways import Fused, Planes, Way, by_group, way_for

SMALL_IMAGE = 16  # at so few positions the native kernels prefer channels first


class ConvLayer(Layer):
    """A convolution over two axes (one axis is a height of 1), padded with zeros.

    With x's patches P ``[positions, channels·taps]`` and dy ``[positions, outputs]`` of a record, g = dyᵀP. Which way
    leads there is chosen once the size of the input is known (:func:`way_for`).
    """

    def __init__(self, name: str, module: nn.Conv1d | nn.Conv2d, slots: dict[str, Slot]) -> None:
        super().__init__(name, module, slots)
        self.one_axis = isinstance(module, nn.Conv1d)
        self.geometry, self.groups = Geometry.of(module), module.groups
        self.inputs, self.outputs = module.in_channels, module.out_channels
        self.method, self.reason = "fast", "the way is chosen when the size of its input is known"
        self.way: Way | None = None
        self.with_pool: Way | None = None
        """Where the layer is recorded together with the pool after it: how; it then takes the place of its own way."""
        self._way_on: tuple[str, int] = ("", 1)

    def plan(self) -> LayerPlan:
        """How the layer is served, and why."""
        plan, way = super().plan(), self.with_pool
        return plan if way is None else plan._replace(method=way.method, reason=way.reason)

    def weight(self, tape: Tape) -> Tensor:
        """The kernels with two axes, ``[(rows,) outputs, channels, kh, kw]``."""
        return self._two_axes(super().weight(tape))

    def _two_axes(self, x: Tensor) -> Tensor:
        return x.unsqueeze(-2) if self.one_axis else x

    def _own_axes(self, x: Tensor) -> Tensor:
        return x.squeeze(-2) if self.one_axis else x

    def forward(self, x: Tensor, tape: Tape) -> tuple[Tensor, Saved]:
        """Native convolution; products of patches where weights are stacked or the input has a single channel."""
        x4 = self._two_axes(x)
        self._choose(x4, tape)
        weight, bias = self.weight(tape), self.bias(tape)
        saved: Saved = (x4,)
        if tape.stacked and self._fused(x4):
            framed = fused.framed(x4, self.geometry, tape.lengths)
            saved = (x4, framed.images)
            out, _ = fused.forward(framed, weight, bias, self.geometry, tape.lengths, tape.mixed)
        elif tape.stacked:
            out = self._stacked_forward(x4, weight, bias)
        elif isinstance(self.way, Planes) and self.inputs == 1 and x4.device.type == "cpu":
            out, saved = self.way.forward(self.name, x4, weight, bias, tape.scratch)
        else:
            if math.prod(self.geometry.output(*x4.shape[2:])) <= SMALL_IMAGE:
                saved = (x4 := x4.contiguous(),)
            _, stride, padding, dilation = self.geometry
            out = functional.conv2d(of_few_sizes(x4), weight, bias, stride, padding, dilation, self.groups)[: len(x4)]
        return self._own_axes(out), saved

    def input_gradient(self, dy: Tensor, saved: Saved, tape: Tape) -> Tensor:
        """Native backward for the input alone."""
        dy4, x, weight = self._two_axes(dy), saved[0], self.weight(tape)
        if tape.stacked and self._fused(dy4):
            size = (x.shape[2], x.shape[3])
            framed = fused.framed_slopes(dy4, dy4, 1, size, self.geometry, tape.lengths)
            dx = fused.input_gradient(framed, weight, size, self.geometry, tape.lengths, tape.mixed)
        elif tape.stacked:
            dx = self._stacked_input_gradient(dy4, x, weight)
        else:
            slopes = of_few_sizes(dy4)
            inputs = x if slopes is dy4 else x.new_empty(1).expand(len(slopes), *x.shape[1:])
            _, *places = self.geometry
            wanted = [True, False, False]  # of the gradients of input, weight and bias
            dx = torch.ops.aten.convolution_backward(
                slopes, inputs, weight, None, *places, False, [0, 0], self.groups, wanted
            )[0][: len(dy4)]
            if dx.device.type == "cpu" and dx.shape[2] * dx.shape[3] > SMALL_IMAGE:  # as what is before it has it
                dx = dx.contiguous(memory_format=torch.channels_last)
        return self._own_axes(dx)

    def _fused(self, x: Tensor) -> bool:
        return self.groups == 1 and fused.frames(self.geometry) and fused.serves(x)

    def pools(self, x: Tensor, tape: Tape, pool: Geometry) -> bool:
        """Whether a rectified pool of this geometry can be taken in the same kernel."""
        side = pool.kernel[0]
        plain = pool == Geometry((side, side), (side, side), (0, 0), (1, 1))
        return plain and side in (2, 4) and tape.stacked and not self.one_axis and self._fused(x)

    def forward_pooled(self, x: Tensor, tape: Tape, pool: int, first: bool) -> tuple[Tensor, Saved]:
        """Convolution, the largest of each pool × pool window, rectified; which it was. ``first``: channels first."""
        self._choose(x, tape)
        weight, bias = self.weight(tape), self.bias(tape)
        framed = fused.framed(x, self.geometry, tape.lengths)
        out, taken = fused.forward(framed, weight, bias, self.geometry, tape.lengths, tape.mixed, pool, first)
        return out, (x, framed.images, taken)

    def backward_pooled(self, dy: Tensor, saved: Saved, tape: Tape, pool: Geometry, further: bool) -> Tensor:
        """Record the layer from the gradient of its pooled output; differentiate its input where asked."""
        x, framed, taken = saved
        if "weight" not in self.slots or not isinstance(self.way, Fused):
            spread = fused.pooled_back(dy, taken, self.geometry.output(*x.shape[2:]), pool)
            return self.backward(spread, (x,), tape, further)
        if further:
            return self._backward_framed(self.way, dy, taken, pool.kernel[0], (x, framed), tape)
        self.way.record_pooled(self.name, (x, framed), dy, taken, pool.kernel[0], tape)
        return dy

    def backward(self, dy: Tensor, saved: Saved, tape: Tape, further: bool) -> Tensor:
        """Record the layer beside the pass where that goes on, and differentiate its input."""
        dy4 = self._two_axes(dy)
        if not (further and tape.stacked and self._fused(dy4)):
            return super().backward(dy, saved, tape, further)
        if "weight" in self.slots and isinstance(self.way, Fused):
            return self._own_axes(self._backward_framed(self.way, dy4, dy4, 1, saved, tape))
        tape.beside(lambda: self.record(dy, saved, tape), dy, *saved)
        return self.input_gradient(dy, saved, tape)

    def _backward_framed(
        self, way: Fused, dy: Tensor, taken: Tensor, pool: int, saved: Saved, tape: Tape
    ) -> Tensor:  # fmt: skip
        """The same from one frame of slopes for both."""
        size = (saved[0].shape[2], saved[0].shape[3])
        slopes = fused.framed_slopes(dy, taken, pool, size, self.geometry, tape.lengths)
        tape.beside(lambda: way.record_framed(self.name, saved, slopes, tape), slopes.images, *saved)
        return fused.input_gradient(slopes, self.weight(tape), size, self.geometry, tape.lengths, tape.mixed)

    def _choose(self, x: Tensor, tape: Tape) -> None:
        here = x.device.type, tape.copies
        if self.way is None or self._way_on != here:
            self.way = self.find_way(x, tape.copies)
            self._way_on, self.method, self.reason = here, self.way.method, self.way.reason

    def find_way(self, x: Tensor, copies: int) -> Way:
        """The cheapest way at the size of the input x, of which a record has so many."""
        return way_for(self.geometry, (self.inputs, self.outputs), self.groups, x, "bias" in self.slots, copies)

    def _stacked_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Patches times weights, row by row in one batched product."""
        rows, n = weight.shape[0], x.shape[0]
        high, wide = self.geometry.output(*x.shape[2:])
        seen = by_group(patches_view(last_padded(x, self.geometry), self.geometry), self.groups)
        flat = seen.reshape(rows, n // rows, self.groups, high * wide, -1).transpose(1, 2)
        flat = flat.reshape(rows * self.groups, n // rows * high * wide, -1)
        out = torch.bmm(flat, self._kernels(weight).transpose(1, 2))
        out = out.view(rows, self.groups, n // rows, high, wide, -1).permute(0, 2, 3, 4, 1, 5)
        out = out.reshape(rows, n // rows, high, wide, self.outputs)
        if bias is not None:
            out = out + bias.view(rows, 1, 1, 1, -1)
        return out.flatten(0, 1).permute(0, 3, 1, 2)

    def _stacked_input_gradient(self, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """dy times weights gives the gradient of the patches, which is added back to the input."""
        rows, n = weight.shape[0], x.shape[0]
        high, wide = dy.shape[2:]
        last = dy.permute(0, 2, 3, 1).reshape(rows, -1, self.groups, self.outputs // self.groups)
        flat = last.transpose(1, 2).reshape(rows * self.groups, -1, self.outputs // self.groups)
        seen = torch.bmm(flat, self._kernels(weight))
        seen = seen.view(rows, self.groups, n // rows, high, wide, *self.geometry.kernel, -1)
        seen = seen.permute(0, 2, 3, 4, 5, 6, 1, 7).reshape(n, high, wide, *self.geometry.kernel, self.inputs)
        return scattered(seen, (x.shape[2], x.shape[3]), self.geometry)

    def _kernels(self, weight: Tensor) -> Tensor:
        """``[rows, outputs, channels/groups, kh, kw]`` to ``[rows·groups, outputs/groups, taps·channels/groups]``."""
        rows, grouped = weight.shape[0], self.outputs // self.groups
        split = weight.view(rows, self.groups, grouped, *weight.shape[2:]).permute(0, 1, 2, 4, 5, 3)
        return split.reshape(rows * self.groups, grouped, -1)

    def record(self, dy: Tensor, saved: Saved, tape: Tape) -> None:
        """Per-record products, or ghost norms where they are cheaper."""
        if self.way is None:
            raise RuntimeError("a convolution was recorded before it ran")
        last = self._two_axes(dy).flatten(2).transpose(1, 2)
        if "weight" in self.slots:
            self.way.record(self.name, saved, last, tape)
            if isinstance(self.way, Fused):  # which takes the bias with it
                return
        if "bias" in self.slots:
            shift = tape.room(self.name, "bias", (self.outputs,), last)
            torch.sum(tape.folded(last), 1, out=shift)
            tape.note(Length(squared_norms(shift)))

    def pull(self, factors: Tensor, held: Held, segments: Segments, out: Tensor) -> None:
        """Weighted sums of what the way holds."""
        way = self.with_pool or self.way
        if "weight" in self.slots and way is not None:
            way.pull(factors, held, segments, out, self.slots["weight"])
        if "bias" in self.slots:
            segments.weighted(factors, held["bias"], self.slots["bias"].part(out))


def of_few_sizes(x: Tensor) -> Tensor:
    """On a GPU, the records with zeros behind them up to one of few numbers: its library plans anew for every size."""
    missing = usual_size(len(x)) - len(x) if x.is_cuda else 0
    return functional.pad(x, (0, 0, 0, 0, 0, 0, 0, missing)) if missing else x


def usual_size(records: int) -> int:
    """The next of few numbers: multiples of 32, and of an eighth of a power of two beyond 256."""
    step = max(32, 1 << max(0, records.bit_length() - 4))
    return -(-records // step) * step
