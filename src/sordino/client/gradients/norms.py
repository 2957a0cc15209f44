"""GroupNorm, InstanceNorm and LayerNorm: small parameters, so the per-record gradients are held as they are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sordino.client.gradients.lengths import Length, squared_norms
from sordino.client.gradients.segments import Segments
from sordino.client.gradients.tape import Held, Saved, Sums, Tape
from sordino.client.gradients.types import LayerPlan, Slot


class _Affine:
    """Scale and shift after a normalisation: what GroupNorm and LayerNorm share."""

    def __init__(self, name: str, module: nn.Module, slots: dict[str, Slot]) -> None:
        self.name, self.kind = name, type(module).__name__
        self.slots = slots
        self.fixed = {key: value.detach() for key, value in module.named_parameters(recurse=False)}

    def plan(self) -> LayerPlan:
        """How the layer is served."""
        return LayerPlan(self.name, self.kind, "per-record", "two numbers a channel; held for the sum")

    def value(self, key: str, tape: Tape) -> Tensor | None:
        """Scale ("weight") or shift ("bias"), where the layer has one."""
        return tape.value(self.slots.get(key), self.fixed[key]) if key in self.fixed else None

    def keep(self, tape: Tape, grads: dict[str, Tensor]) -> None:
        """Hold per-record gradients ``[n, …]`` of the trained ones."""
        for key in self.slots:
            flat = grads[key].flatten(1)
            tape.hold(self.name, key, flat)
            tape.note(Length(squared_norms(flat)))

    def pull(self, factors: Tensor, held: Held, segments: Segments, sums: Sums) -> None:
        """Weighted sums of what is held."""
        for key, slot in self.slots.items():
            segments.weighted(factors, held[key], sums.of(slot))


def order_of(x: Tensor) -> torch.memory_format:
    """Channels last or first: a CPU's kernels take both, but the same for an input and its gradient; a GPU's first."""
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if last and x.device.type == "cpu" else torch.contiguous_format


class GroupNormLayer(_Affine):
    """``y = γ (x − μ)/s + β`` with μ, s over groups of channels; InstanceNorm is one channel a group.

    Per record: g_β = Σ dy and g_γ = (Σ dy·x − μ Σ dy)/s over positions.
    """

    def __init__(self, name: str, module: nn.GroupNorm | nn.InstanceNorm2d, slots: dict[str, Slot]) -> None:
        super().__init__(name, module, slots)
        self.groups = module.num_groups if isinstance(module, nn.GroupNorm) else module.num_features
        self.eps = module.eps

    def forward(self, x: Tensor, tape: Tape) -> tuple[Tensor, Saved]:
        """Native group norm; a stacked scale and shift come after it."""
        weight, bias = self.value("weight", tape), self.value("bias", tape)
        x = x.contiguous(memory_format=order_of(x))
        n, channels, area = x.shape[0], x.shape[1], x[0, 0].numel()
        fused = (None, None) if tape.stacked else (weight, bias)
        out, mean, rstd = torch.native_group_norm(x, *fused, n, channels, area, self.groups, self.eps)
        if tape.stacked and weight is not None and bias is not None:
            out = out * self._spread(weight, x.dim(), tape) + self._spread(bias, x.dim(), tape)
        return out, (x, mean, rstd)

    @staticmethod
    def _spread(values: Tensor, axes: int, tape: Tape) -> Tensor:
        return tape.per_record(values).view(-1, values.shape[1], *[1] * (axes - 2))

    def input_gradient(self, dy: Tensor, saved: Saved, tape: Tape) -> Tensor:
        """Native backward for the input alone."""
        x, mean, rstd = saved
        weight = self.value("weight", tape)
        n, channels, area = dy.shape[0], dy.shape[1], dy[0, 0].numel()
        if tape.stacked and weight is not None:
            dy, weight = dy * self._spread(weight, dy.dim(), tape), None
        dy = dy.contiguous(memory_format=order_of(x))
        dx: Tensor = torch.ops.aten.native_group_norm_backward(
            dy, x, mean, rstd, weight, n, channels, area, self.groups, [True, False, False]
        )[0]
        return dx

    def record(self, dy: Tensor, saved: Saved, tape: Tape) -> None:
        """Per-record gradients of scale and shift."""
        x, mean, rstd = saved
        n, channels = dy.shape[:2]
        over = tuple(range(2, dy.dim()))
        shift = dy.sum(over) if over else dy
        product = (dy * x).sum(over) if over else dy * x
        per_group = channels // self.groups
        mean_of, rstd_of = (each.view(n, -1).repeat_interleave(per_group, 1) for each in (mean, rstd))
        self.keep(tape, {"weight": (product - mean_of * shift) * rstd_of, "bias": shift})


class LayerNormLayer(_Affine):
    """``y = γ (x − μ)/s + β`` with μ, s over the last axes; γ and β have those axes."""

    def __init__(self, name: str, module: nn.LayerNorm, slots: dict[str, Slot]) -> None:
        super().__init__(name, module, slots)
        self.shape, self.eps = list(module.normalized_shape), module.eps

    def _spread(self, values: Tensor, x: Tensor, tape: Tape) -> Tensor:
        if not tape.stacked:
            return values
        between = [1] * (x.dim() - 1 - len(self.shape))
        return tape.per_record(values).view(x.shape[0], *between, *self.shape)

    def forward(self, x: Tensor, tape: Tape) -> tuple[Tensor, Saved]:
        """Normalise, then scale and shift."""
        x = x.contiguous()
        out, mean, rstd = torch.native_layer_norm(x, self.shape, None, None, self.eps)
        weight, bias = self.value("weight", tape), self.value("bias", tape)
        if weight is not None:
            out = out * self._spread(weight, x, tape)
        return out if bias is None else out + self._spread(bias, x, tape), (x, mean, rstd)

    def input_gradient(self, dy: Tensor, saved: Saved, tape: Tape) -> Tensor:
        """Native backward for the input alone."""
        x, mean, rstd = saved
        weight = self.value("weight", tape)
        if weight is not None:
            dy = dy * self._spread(weight, dy, tape)
        dx: Tensor = torch.ops.aten.native_layer_norm_backward(
            dy.contiguous(), x, self.shape, mean, rstd, None, None, [True, False, False]
        )[0]
        return dx

    def record(self, dy: Tensor, saved: Saved, tape: Tape) -> None:
        """Per-record gradients of scale and shift, summed over the axes before the normalised ones."""
        x, mean, rstd = saved
        over = tuple(range(1, dy.dim() - len(self.shape)))
        scale = (x - mean).mul_(rstd).mul_(dy)
        self.keep(tape, {"weight": scale.sum(over), "bias": dy.sum(over)} if over else {"weight": scale, "bias": dy})
