"""Linear and Embedding layers: norms without gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from sordino.client.gradients.segments import Segments
from sordino.client.gradients.tape import Entry, Saved, Tape
from sordino.client.gradients.types import LayerPlan, Slot


class LinearLayer:
    """``y = x Wᵀ + b`` for x of ``[n, in]`` or ``[n, …, in]``.

    With one position, ‖g‖² = ‖dy‖² ‖x‖². With t positions either the ghost norm Σ_{s,t} (x_s·x_t)(dy_s·dy_t) or the
    per-record product dyᵀx, whichever costs less. The weighted sum is one product over all records of a row.
    """

    def __init__(self, name: str, module: nn.Linear, slots: dict[str, Slot]) -> None:
        self.name = name
        self.weight_slot, self.bias_slot = slots.get("weight"), slots.get("bias")
        self.fixed_weight = module.weight.detach()
        self.fixed_bias = None if module.bias is None else module.bias.detach()

    def plan(self) -> LayerPlan:
        """How the layer is served."""
        return LayerPlan(self.name, "Linear", "ghost", "‖g‖ = ‖dy‖·‖x‖ for one position; no per-record gradient")

    def _values(self, tape: Tape) -> tuple[Tensor, Tensor | None]:
        weight = self.fixed_weight if self.weight_slot is None else tape.weight(self.weight_slot)
        bias = self.fixed_bias if self.bias_slot is None else tape.weight(self.bias_slot)
        return weight, bias

    def forward(self, x: Tensor, tape: Tape) -> tuple[Tensor, Saved]:
        """One product, or one per row where weights are stacked."""
        weight, bias = self._values(tape)
        if weight.dim() == 2:
            out = functional.linear(x, weight, bias if bias is None or bias.dim() == 1 else None)
            if bias is not None and bias.dim() == 2:
                out = out + tape.per_record(bias, 0).unflatten(1, (*[1] * (x.dim() - 2), -1))
            return out, (x,)
        rows = tape.segments.rows
        flat = x.reshape(rows, -1, x.shape[-1])
        transposed = weight.transpose(1, 2)
        if bias is None:
            out = torch.bmm(flat, transposed)
        else:
            spread = (bias if bias.dim() == 2 else bias.expand(rows, -1)).unsqueeze(1)
            out = torch.baddbmm(spread, flat, transposed)
        return out.view(*x.shape[:-1], -1), (x,)

    def input_gradient(self, dy: Tensor, saved: Saved, tape: Tape) -> Tensor:
        """``dx = dy W``."""
        weight, _ = self._values(tape)
        if weight.dim() == 2:
            return dy @ weight
        flat = dy.reshape(tape.segments.rows, -1, dy.shape[-1])
        return torch.bmm(flat, weight).view(*dy.shape[:-1], -1)

    def record(self, dy: Tensor, saved: Saved, tape: Tape) -> Entry:
        """Squared norms by the cheapest way; the sums from x and dy themselves."""
        (x,) = saved
        x3 = x.reshape(x.shape[0], -1, x.shape[-1])  # type: ignore[union-attr]
        dy3 = dy.reshape(dy.shape[0], -1, dy.shape[-1])
        squares = torch.zeros_like(dy3[:, 0, 0])
        if self.weight_slot is not None:
            squares = squares + squared_outer(x3, dy3)
        if self.bias_slot is not None:
            squares = squares + dy3.sum(1).square().sum(1)
        return Entry([x3, dy3], squares, self._pull)

    def _pull(self, factors: Tensor, held: list[Tensor], segments: Segments) -> list[tuple[Slot, Tensor]]:
        x3, dy3 = held
        out: list[tuple[Slot, Tensor]] = []
        if self.weight_slot is not None:
            out.append((self.weight_slot, segments.outer(dy3 * factors.view(-1, 1, 1), x3)))
        if self.bias_slot is not None:
            out.append((self.bias_slot, segments.weighted(factors, dy3.sum(1))))
        return out


def squared_outer(x: Tensor, dy: Tensor) -> Tensor:
    """‖Σ_t dy_t ⊗ x_t‖² per record of ``x[n, t, i]``, ``dy[n, t, o]``, by the way with fewer products."""
    positions, wide, deep = x.shape[1], x.shape[2], dy.shape[2]
    if positions == 1:
        return x.square().sum((1, 2)) * dy.square().sum((1, 2))
    if positions * (wide + deep) <= wide * deep:
        ghost = torch.bmm(x, x.transpose(1, 2)) * torch.bmm(dy, dy.transpose(1, 2))
        return ghost.sum((1, 2)).clamp_min(0)
    return torch.bmm(dy.transpose(1, 2), x).square().sum((1, 2))


class EmbeddingLayer:
    """Rows of a table. ‖g‖² = Σ over pairs of positions with the same index of dy_s·dy_t."""

    def __init__(self, name: str, module: nn.Embedding, slots: dict[str, Slot]) -> None:
        self.name = name
        self.slot = slots["weight"]
        self.entries, self.wide = module.num_embeddings, module.embedding_dim
        self.padding = module.padding_idx

    def plan(self) -> LayerPlan:
        """How the layer is served."""
        return LayerPlan(self.name, "Embedding", "ghost", "pairs of equal indices; no per-record table")

    def forward(self, x: Tensor, tape: Tape) -> tuple[Tensor, Saved]:
        """Look up, each record in its own row's table where weights are stacked."""
        table = tape.weight(self.slot)
        if not tape.stacked:
            return functional.embedding(x, table), (x,)
        shift = torch.arange(tape.segments.rows, device=x.device).mul_(self.entries)
        moved = x + tape.per_record(shift, x.dim() - 1)
        return functional.embedding(moved, table.reshape(-1, self.wide)), (x,)

    def input_gradient(self, dy: Tensor, saved: Saved, tape: Tape) -> Tensor:
        """Indices have no gradient; autograd never asks."""
        return torch.zeros_like(dy)

    def record(self, dy: Tensor, saved: Saved, tape: Tape) -> Entry:
        """Squared norms from the Gram matrix of dy where indices coincide."""
        (x,) = saved
        index = x.reshape(x.shape[0], -1)  # type: ignore[union-attr]
        dy3 = dy.reshape(dy.shape[0], -1, self.wide)
        if self.padding is not None:
            dy3 = dy3.masked_fill((index == self.padding).unsqueeze(2), 0)
        same = index.unsqueeze(2) == index.unsqueeze(1)
        gram = torch.bmm(dy3, dy3.transpose(1, 2))
        squares = torch.where(same, gram, torch.zeros_like(gram)).sum((1, 2)).clamp_min(0)

        def pull(factors: Tensor, held: list[Tensor], segments: Segments) -> list[tuple[Slot, Tensor]]:
            table = dy3.new_zeros(segments.rows * self.entries, self.wide)
            shift = torch.arange(segments.rows, device=index.device) * self.entries
            counts = torch.tensor(segments.bounds, device=index.device).diff()
            moved = index + shift.repeat_interleave(counts, output_size=segments.records).unsqueeze(1)
            scaled = held[0] * factors.view(-1, 1, 1)
            table.index_add_(0, moved.reshape(-1), scaled.reshape(-1, self.wide))
            return [(self.slot, table)]

        return Entry([dy3], squares, pull)
