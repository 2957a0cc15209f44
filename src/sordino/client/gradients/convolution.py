"""Conv1d and Conv2d: patches in channels-last order, then one small product per record."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sordino.client.gradients.segments import Segments
from sordino.client.gradients.tape import Entry, Saved, Tape
from sordino.client.gradients.types import LayerPlan, Slot

Pair = tuple[int, int]


class ConvLayer:
    """A convolution over two axes (one axis is a height of 1), padded with zeros.

    With x's patches P ``[positions, kernel·channels]`` and dy ``[positions, outputs]`` of a record, g = dyᵀP.
    """

    def __init__(self, name: str, module: nn.Conv1d | nn.Conv2d, slots: dict[str, Slot]) -> None:
        self.name, self.kind = name, type(module).__name__
        self.one_axis = isinstance(module, nn.Conv1d)
        self.weight_slot, self.bias_slot = slots.get("weight"), slots.get("bias")
        self.fixed_weight = module.weight.detach()
        self.fixed_bias = None if module.bias is None else module.bias.detach()
        self.kernel, self.stride, self.dilation = (
            self._pair(each, 1) for each in (module.kernel_size, module.stride, module.dilation)
        )
        padding = module.padding if not isinstance(module.padding, str) else (0,) * len(module.kernel_size)
        self.padding = self._pair(padding, 0)
        self.groups = module.groups
        self.inputs, self.outputs = module.in_channels, module.out_channels

    def _pair(self, values: tuple[int, ...], filler: int) -> Pair:
        return (filler, values[0]) if self.one_axis else (values[0], values[1])

    def plan(self) -> LayerPlan:
        """How the layer is served."""
        return LayerPlan(self.name, self.kind, "per-record or ghost", "by the cost at the size of its input")

    def _values(self, tape: Tape) -> tuple[Tensor, Tensor | None]:
        weight = self.fixed_weight if self.weight_slot is None else tape.weight(self.weight_slot)
        bias = self.fixed_bias if self.bias_slot is None else tape.weight(self.bias_slot)
        return (weight.unsqueeze(-2) if self.one_axis else weight), bias

    def _rows_of(self, tape: Tape) -> list[tuple[slice, Tensor, Tensor | None]]:
        """Weights per slice of records: one slice where weights are shared, one per row where they are stacked."""
        weight, bias = self._values(tape)
        if not tape.stacked:
            return [(slice(None), weight, bias)]
        return [
            (slice(a, b), weight[row] if weight.dim() == 5 else weight, bias[row] if bias is not None and bias.dim() == 2 else bias)
            for row, a, b in tape.segments.pieces()
        ]

    def forward(self, x: Tensor, tape: Tape) -> tuple[Tensor, Saved]:
        """Native convolution, one per row where weights are stacked."""
        x4 = x.unsqueeze(-2) if self.one_axis else x
        parts = [
            functional.conv2d(x4[part], weight, bias, self.stride, self.padding, self.dilation, self.groups)
            for part, weight, bias in self._rows_of(tape)
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.squeeze(-2) if self.one_axis else out, (x,)

    def _backward(self, dy: Tensor, x: Tensor, weight: Tensor, mask: list[bool]) -> Any:
        return torch.ops.aten.convolution_backward(
            dy, x, weight, None, self.stride, self.padding, self.dilation, False, [0, 0], self.groups, mask
        )

    def input_gradient(self, dy: Tensor, saved: Saved, tape: Tape) -> Tensor:
        """Native backward for the input alone."""
        x = saved[0]
        x4, dy4 = (x.unsqueeze(-2), dy.unsqueeze(-2)) if self.one_axis else (x, dy)  # type: ignore[union-attr]
        parts = [
            self._backward(dy4[part], x4[part], weight, [True, False, False])[0]  # type: ignore[index]
            for part, weight, _ in self._rows_of(tape)
        ]
        dx: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        return dx.squeeze(-2) if self.one_axis else dx

    def record(self, dy: Tensor, saved: Saved, tape: Tape) -> Entry:
        """Per-record products, or ghost norms where they are cheaper."""
        x = saved[0]
        x4, dy4 = (x.unsqueeze(-2), dy.unsqueeze(-2)) if self.one_axis else (x, dy)  # type: ignore[union-attr]
        n = dy.shape[0]
        last = dy4.permute(0, 2, 3, 1).reshape(n, -1, self.outputs)
        held: list[Tensor] = []
        squares = torch.zeros_like(last[:, 0, 0])
        if self.weight_slot is not None:
            grads = torch.bmm(self._by_group(last, 1).transpose(1, 2), self._by_group(self._patches(x4), self.kernel[0] * self.kernel[1]))
            held.append(grads.reshape(n, -1))
            squares = squares + held[0].square().sum(1)
        if self.bias_slot is not None:
            held.append(last.sum(1))
            squares = squares + held[-1].square().sum(1)
        return Entry(held, squares, self._pull)

    def _patches(self, x: Tensor) -> Tensor:
        """``[n, positions, kernel height · kernel width · channels]``."""
        (ph, pw), (kh, kw), (sh, sw), (dh, dw) = self.padding, self.kernel, self.stride, self.dilation
        padded = functional.pad(x.permute(0, 2, 3, 1), (0, 0, pw, pw, ph, ph)).contiguous()
        n, height, width, channels = padded.shape
        high, wide = (height - dh * (kh - 1) - 1) // sh + 1, (width - dw * (kw - 1) - 1) // sw + 1
        at_n, at_h, at_w, at_c = padded.stride()
        view = padded.as_strided(
            (n, high, wide, kh, kw, channels), (at_n, sh * at_h, sw * at_w, dh * at_h, dw * at_w, at_c)
        )
        return view.reshape(n, high * wide, kh * kw * channels)

    def _by_group(self, values: Tensor, taps: int) -> Tensor:
        """``[n, positions, taps·channels]`` to ``[n·groups, positions, taps·channels/groups]``."""
        if self.groups == 1:
            return values
        n, positions, total = values.shape
        split = values.view(n, positions, taps, self.groups, total // taps // self.groups)
        return split.permute(0, 3, 1, 2, 4).reshape(n * self.groups, positions, -1)

    def _pull(self, factors: Tensor, held: list[Tensor], segments: Segments) -> list[tuple[Slot, Tensor]]:
        out: list[tuple[Slot, Tensor]] = []
        if self.weight_slot is not None:
            flat = segments.weighted(factors, held[0])
            taps, deep = self.kernel[0] * self.kernel[1], self.inputs // self.groups
            out.append((self.weight_slot, flat.view(-1, self.outputs, taps, deep).transpose(2, 3)))
        if self.bias_slot is not None:
            out.append((self.bias_slot, segments.weighted(factors, held[-1])))
        return out
