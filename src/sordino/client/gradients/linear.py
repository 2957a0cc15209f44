"""Linear and Embedding layers: norms without gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from sordino.client.gradients import fused
from sordino.client.gradients.lengths import Length, squared_outer, squared_sum, squared_where_equal
from sordino.client.gradients.segments import Segments
from sordino.client.gradients.tape import Held, Saved, Sums, Tape
from sordino.client.gradients.types import LayerPlan, Slot

FEW_ENTRIES = 2**17


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

    def forward(self, x: Tensor, tape: Tape) -> tuple[Tensor, Saved]:
        """One product, or one per row where weights are stacked."""
        weight = tape.value(self.weight_slot, self.fixed_weight)
        bias = None if self.fixed_bias is None else tape.value(self.bias_slot, self.fixed_bias)
        if not tape.stacked:
            return functional.linear(x, weight, bias), (x,)
        flat = x.reshape(weight.shape[0], -1, x.shape[-1])
        transposed = weight.transpose(1, 2)
        cuts = _cuts(flat, weight)
        if cuts > 1:
            out = _cut_product(flat, weight, cuts)
            out = out if bias is None else out.add_(bias.unsqueeze(1))
        elif bias is None:
            out = torch.bmm(flat, transposed)
        else:
            out = torch.baddbmm(bias.unsqueeze(1), flat, transposed)
        return out.view(*x.shape[:-1], -1), (x,)

    def input_gradient(self, dy: Tensor, saved: Saved, tape: Tape) -> Tensor:
        """``dx = dy W``."""
        weight = tape.value(self.weight_slot, self.fixed_weight)
        if not tape.stacked:
            return dy @ weight
        flat = dy.reshape(weight.shape[0], -1, dy.shape[-1])
        return torch.bmm(flat, weight).view(*dy.shape[:-1], -1)

    def record(self, dy: Tensor, saved: Saved, tape: Tape) -> None:
        """Squared norms by the cheapest way; x and dy themselves are held."""
        (x,) = saved
        x3 = x.reshape(x.shape[0], -1, x.shape[-1])
        dy3 = dy.reshape(dy.shape[0], -1, dy.shape[-1])
        tape.hold(self.name, "dy", dy3)
        if self.weight_slot is not None:
            tape.hold(self.name, "x", x3)
            if x3.shape[1] == 1 and fused.serves(x3):
                tape.note(Length(fused.outer_squares(x3[:, 0], dy3[:, 0], self.bias_slot is not None)))
                return
            tape.note(squared_outer(x3, dy3))
        if self.bias_slot is not None:
            tape.note(squared_sum(dy3))

    def pull(self, factors: Tensor, held: Held, segments: Segments, sums: Sums) -> None:
        """``Σ_j a_j dy_jᵀ x_j`` as one product a row."""
        scaled = held["dy"] * factors.view(-1, 1, 1)
        if self.weight_slot is not None:
            segments.outer(scaled, held["x"], sums.of(self.weight_slot))
        if self.bias_slot is not None:
            segments.weighted(factors, held["dy"].sum(1), sums.of(self.bias_slot))


def _cuts(x: Tensor, weight: Tensor) -> int:
    """Into how many parts to cut a long product on a GPU, so that more than a few blocks work at it."""
    rows, outputs, features = weight.shape
    few = x.is_cuda and rows * x.shape[1] * outputs <= FEW_ENTRIES
    return next((cuts for cuts in (16, 8, 4) if few and features % cuts == 0 and features // cuts >= 64), 1)


def _cut_product(x: Tensor, weight: Tensor, cuts: int) -> Tensor:
    """``x Wᵀ`` of every row as the sum of ``cuts`` products over parts of the features."""
    rows, outputs, _ = weight.shape
    left = x.unflatten(2, (cuts, -1)).transpose(1, 2).flatten(0, 1)
    right = weight.unflatten(2, (cuts, -1)).transpose(1, 2).flatten(0, 1)
    return torch.bmm(left, right.transpose(1, 2)).view(rows, cuts, -1, outputs).sum(1)


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
        table = tape.value(self.slot, x)
        if not tape.stacked:
            return functional.embedding(x, table), (x,)
        shift = tape.per_record(torch.arange(table.shape[0], device=x.device) * self.entries)
        moved = x + shift.view(-1, *[1] * (x.dim() - 1))
        return functional.embedding(moved, table.reshape(-1, self.wide)), (x,)

    def input_gradient(self, dy: Tensor, saved: Saved, tape: Tape) -> Tensor:
        """Indices have no gradient; autograd never asks."""
        return torch.zeros_like(saved[0])

    def record(self, dy: Tensor, saved: Saved, tape: Tape) -> None:
        """Squared norms from the Gram matrix of dy where indices coincide."""
        index = saved[0].reshape(saved[0].shape[0], -1)
        dy3 = dy.reshape(dy.shape[0], -1, self.wide)
        if self.padding is not None:
            dy3 = dy3.masked_fill((index == self.padding).unsqueeze(2), 0)
        tape.note(squared_where_equal(dy3, index))
        tape.hold(self.name, "dy", dy3)
        tape.hold(self.name, "index", index)

    def pull(self, factors: Tensor, held: Held, segments: Segments, sums: Sums) -> None:
        """Add scaled rows into each row's table."""
        index = held["index"]
        shift = torch.arange(segments.rows, device=index.device) * self.entries
        counts = torch.tensor(segments.bounds, device=index.device).diff()
        moved = index + shift.repeat_interleave(counts, output_size=segments.records).unsqueeze(1)
        table = factors.new_zeros(segments.rows * self.entries, self.wide)
        scaled = held["dy"] * factors.view(-1, 1, 1)
        table.index_add_(0, moved.reshape(-1), scaled.reshape(-1, self.wide))
        sums.of(self.slot).copy_(table.view(segments.rows, -1))
