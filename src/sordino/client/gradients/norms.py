"""GroupNorm, InstanceNorm and LayerNorm: small parameters, so the per-record gradients are kept as they are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sordino.client.gradients.segments import Segments
from sordino.client.gradients.tape import Entry, Saved, Tape
from sordino.client.gradients.types import LayerPlan, Slot


def affine_entry(
    slots: tuple[Slot | None, Slot | None], weight_grads: Tensor | None, bias_grads: Tensor | None
) -> Entry:
    """Entry of per-record gradients of a scale and a shift, ``[n, size]`` each."""
    pairs = [
        (slot, grads.flatten(1)) for slot, grads in zip(slots, (weight_grads, bias_grads)) if slot and grads is not None
    ]
    squares = torch.stack([grads.square().sum(1) for _, grads in pairs]).sum(0)

    def pull(factors: Tensor, held: list[Tensor], segments: Segments) -> list[tuple[Slot, Tensor]]:
        return [(slot, segments.weighted(factors, grads)) for (slot, _), grads in zip(pairs, held)]

    return Entry([grads for _, grads in pairs], squares, pull)


class GroupNormLayer:
    """``y = γ (x − μ)/s + β`` with μ, s over groups of channels; InstanceNorm is one channel a group.

    Per record: g_β = Σ dy and g_γ = (Σ dy·x − μ Σ dy)/s over positions.
    """

    def __init__(self, name: str, module: nn.GroupNorm | nn.InstanceNorm2d, slots: dict[str, Slot]) -> None:
        self.name, self.kind = name, type(module).__name__
        self.weight_slot, self.bias_slot = slots.get("weight"), slots.get("bias")
        self.fixed = (module.weight.detach(), module.bias.detach())
        self.groups = module.num_groups if isinstance(module, nn.GroupNorm) else module.num_features
        self.eps = module.eps

    def plan(self) -> LayerPlan:
        """How the layer is served."""
        return LayerPlan(self.name, self.kind, "per-record", "two numbers a channel; kept for the sum")

    def _values(self, tape: Tape) -> tuple[Tensor, Tensor]:
        weight = self.fixed[0] if self.weight_slot is None else tape.weight(self.weight_slot)
        bias = self.fixed[1] if self.bias_slot is None else tape.weight(self.bias_slot)
        return weight, bias

    def forward(self, x: Tensor, tape: Tape) -> tuple[Tensor, Saved]:
        """Native group norm; a stacked scale and shift come after it."""
        weight, bias = self._values(tape)
        n, channels, area = x.shape[0], x.shape[1], x[0, 0].numel()
        plain = weight.dim() == 1 and bias.dim() == 1
        scale, shift = (weight, bias) if plain else (None, None)
        out, mean, rstd = torch.native_group_norm(x, scale, shift, n, channels, area, self.groups, self.eps)
        if not plain:
            axes = x.dim() - 2
            out = out * self._spread(weight, axes, tape) + self._spread(bias, axes, tape)
        return out, (x, mean, rstd)

    @staticmethod
    def _spread(values: Tensor, axes: int, tape: Tape) -> Tensor:
        return tape.per_record(values, axes) if values.dim() == 2 else values.reshape(1, -1, *([1] * axes))

    def input_gradient(self, dy: Tensor, saved: Saved, tape: Tape) -> Tensor:
        """Native backward for the input alone."""
        x, mean, rstd = saved
        weight, _ = self._values(tape)
        n, channels, area = dy.shape[0], dy.shape[1], dy[0, 0].numel()
        scale: Tensor | None = weight
        if weight.dim() == 2:
            dy, scale = dy * self._spread(weight, dy.dim() - 2, tape), None
        dx: Tensor = torch.ops.aten.native_group_norm_backward(
            dy, x, mean, rstd, scale, n, channels, area, self.groups, [True, False, False]
        )[0]
        return dx

    def record(self, dy: Tensor, saved: Saved, tape: Tape) -> Entry:
        """Per-record gradients of scale and shift."""
        x, mean, rstd = saved
        n, channels = dy.shape[:2]
        over = tuple(range(2, dy.dim()))
        shift = dy.sum(over) if over else dy
        product = (dy * x).sum(over) if over else dy * x
        per_group = channels // self.groups
        mean_of = mean.view(n, self.groups, 1).expand(-1, -1, per_group).reshape(n, channels)  # type: ignore[union-attr]
        rstd_of = rstd.view(n, self.groups, 1).expand(-1, -1, per_group).reshape(n, channels)  # type: ignore[union-attr]
        scale = (product - mean_of * shift) * rstd_of
        return affine_entry((self.weight_slot, self.bias_slot), scale, shift)


class LayerNormLayer:
    """``y = γ (x − μ)/s + β`` with μ, s over the last axes; γ and β have those axes."""

    def __init__(self, name: str, module: nn.LayerNorm, slots: dict[str, Slot]) -> None:
        self.name = name
        self.weight_slot, self.bias_slot = slots.get("weight"), slots.get("bias")
        self.shape, self.eps = list(module.normalized_shape), module.eps
        self.fixed_weight = module.weight.detach()
        self.fixed_bias = None if module.bias is None else module.bias.detach()

    def plan(self) -> LayerPlan:
        """How the layer is served."""
        return LayerPlan(self.name, "LayerNorm", "per-record", "one scale a feature; kept for the sum")

    def _values(self, tape: Tape) -> tuple[Tensor, Tensor | None]:
        weight = self.fixed_weight if self.weight_slot is None else tape.weight(self.weight_slot)
        bias = self.fixed_bias if self.bias_slot is None else tape.weight(self.bias_slot)
        return weight, bias

    def _spread(self, values: Tensor, x: Tensor, tape: Tape) -> Tensor:
        if values.dim() == len(self.shape):
            return values
        between = [1] * (x.dim() - 1 - len(self.shape))
        return tape.per_record(values, 0).reshape(x.shape[0], *between, *self.shape)

    def forward(self, x: Tensor, tape: Tape) -> tuple[Tensor, Saved]:
        """Normalise, then scale and shift."""
        out, mean, rstd = torch.native_layer_norm(x, self.shape, None, None, self.eps)
        weight, bias = self._values(tape)
        out = out * self._spread(weight, x, tape)
        return out if bias is None else out + self._spread(bias, x, tape), (x, mean, rstd)

    def input_gradient(self, dy: Tensor, saved: Saved, tape: Tape) -> Tensor:
        """Native backward for the input alone."""
        x, mean, rstd = saved
        weight, _ = self._values(tape)
        dx: Tensor = torch.ops.aten.native_layer_norm_backward(
            dy * self._spread(weight, dy, tape), x, self.shape, mean, rstd, None, None, [True, False, False]
        )[0]
        return dx

    def record(self, dy: Tensor, saved: Saved, tape: Tape) -> Entry:
        """Per-record gradients of scale and shift, summed over the axes before the normalised ones."""
        x, mean, rstd = saved
        over = tuple(range(1, dy.dim() - len(self.shape)))
        scale = dy * ((x - mean) * rstd)  # type: ignore[operator]
        if over:
            scale, dy = scale.sum(over), dy.sum(over)
        return affine_entry((self.weight_slot, self.bias_slot), scale, dy)
