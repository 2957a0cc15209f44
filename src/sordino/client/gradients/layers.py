"""Rules for layers other than convolutions: Linear, Embedding, and the normalisations of single records."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from sordino.client.gradients import fused, groups, products
from sordino.client.gradients.lengths import Length, squared_by_gram, squared_norms, squared_outer
from sordino.client.gradients.tape import PER_RECORD, Held, Layer, Saved, Segments, Tape
from sordino.client.gradients.types import Slot

FEW_ENTRIES = 2**17


class LinearLayer(Layer):
    """``y = x Wᵀ + b`` for x of ``[n, in]`` or ``[n, …, in]``.

    With one position, ‖g‖² = ‖dy‖² ‖x‖², and the weighted sum is one product over all records of a row. With t
    positions the product dyᵀx is made for every record and held, or where that is large the norm is
    Σ_{s,t} (x_s·x_t)(dy_s·dy_t).
    """

    method, reason = "ghost", "‖g‖ = ‖dy‖·‖x‖ for one position; for many, dyᵀx where it is small"

    def forward(self, x: Tensor, tape: Tape) -> tuple[Tensor, Saved]:
        """One product, or one per row where weights are stacked."""
        weight, bias = self.weight(tape), self.bias(tape)
        if not tape.stacked:
            plain = not products.serves(x, weight)
            return functional.linear(x, weight, bias) if plain else products.product(x, weight, bias), (x,)
        flat = x.reshape(weight.shape[0], -1, x.shape[-1])
        cuts = _cuts(flat, weight)
        if cuts > 1:
            out = _cut_product(flat, weight, cuts)
            out = out if bias is None else out.add_(bias.unsqueeze(1))
        elif bias is None:
            out = torch.bmm(flat, weight.transpose(1, 2))
        else:
            out = torch.baddbmm(bias.unsqueeze(1), flat, weight.transpose(1, 2))
        return out.view(*x.shape[:-1], -1), (x,)

    def input_gradient(self, dy: Tensor, saved: Saved, tape: Tape) -> Tensor:
        """``dx = dy W``."""
        weight = self.weight(tape)
        if not tape.stacked:
            return products.product(dy, weight.t()) if products.serves(dy, weight.t()) else dy @ weight
        flat = dy.reshape(weight.shape[0], -1, dy.shape[-1])
        return torch.bmm(flat, weight).view(*dy.shape[:-1], -1)

    def record(self, dy: Tensor, saved: Saved, tape: Tape) -> None:
        """Squared norms, and what the sum needs: gradients where they are made and not large, else x and dy."""
        x3, dy3 = tape.folded(saved[0]), tape.folded(dy)
        n, positions, wide = x3.shape
        if positions > 1 and "bias" in self.own:
            self._keep(tape, "bias", dy3.sum(1))
        if positions > 1 and "weight" in self.own and makes_gradients(positions, wide, dy3.shape[2]):
            room = tape.room(self.name, "weight", (dy3.shape[2] * wide,), dy3)
            tape.note(Length(products.gradients(x3, dy3, room.view(n, -1, wide))))
        elif positions > 1 and "weight" in self.own:
            tape.hold(self.name, "x", x3)
            tape.hold(self.name, "dy", dy3)
            tape.note(squared_by_gram(x3, dy3))
        elif positions == 1 and self.own:
            self._record_single(x3[:, 0], dy3[:, 0], tape)

    def _record_single(self, x: Tensor, dy: Tensor, tape: Tape) -> None:
        tape.hold(self.name, "dy", dy.unsqueeze(1))
        if "weight" in self.own:
            tape.hold(self.name, "x", x.unsqueeze(1))
            if fused.serves(x):
                tape.note(Length(fused.outer_squares(x, dy, "bias" in self.own)))
                return
            tape.note(squared_outer(x, dy))
        if "bias" in self.own:
            tape.note(Length(squared_norms(dy)))

    def _keep(self, tape: Tape, key: str, gradients: Tensor) -> None:
        tape.hold(self.name, key, gradients)
        tape.note(Length(squared_norms(gradients)))

    def joined(self, runs: list[tuple[Tensor, Saved]]) -> tuple[Tensor, Saved]:
        """The positions of all runs, one after the other."""
        return cat_positions([dy for dy, _ in runs]), (cat_positions([saved[0] for _, saved in runs]),)

    def pull(self, factors: Tensor, held: Held, segments: Segments, out: Tensor) -> None:
        """``Σ_j a_j g_j`` of gradients that are held, else ``Σ_j a_j dy_jᵀ x_j`` as one product a row."""
        if "weight" in held:
            segments.weighted(factors, held["weight"], self.own["weight"].part(out))
        elif "weight" in self.own and held["x"].shape[1] == 1 and segments.skips(held["x"]):
            fused.weighted_outer(factors, held["dy"][:, 0], held["x"][:, 0], self.own["weight"].part(out))
        elif "weight" in self.own:
            segments.outer(held["dy"] * factors.view(-1, 1, 1), held["x"], self.own["weight"].part(out))
        if "bias" in self.own:
            segments.weighted(factors, held["bias"] if "bias" in held else held["dy"][:, 0], self.own["bias"].part(out))

    def skipped(self, held: Held) -> set[str]:
        """With one position, what is held of it too."""
        return PER_RECORD | {"x", "dy"} if "x" in held and held["x"].shape[1] == 1 else PER_RECORD


def makes_gradients(positions: int, wide: int, deep: int) -> bool:
    """Whether to make and hold a record's gradient ``[deep, wide]`` rather than x and dy.

    A gradient costs as many products as its share of the sum would, which then is a pass over what is held; inner
    products of positions come on top of that sum, in float64. They pay where positions are few beside the weights. What
    is held is up to four times as large as x and dy.
    """
    return wide * deep <= positions * (wide + deep) * min(max(1.0, positions / 16), 4.0)


def cat_positions(values: list[Tensor]) -> Tensor:
    """``[n, …, k]`` each, as one ``[n, positions, k]``."""
    return torch.cat([each.reshape(each.shape[0], -1, each.shape[-1]) for each in values], 1)


def _cuts(x: Tensor, weight: Tensor) -> int:
    """Into how many parts to cut a long product on a GPU, so that more than a few blocks work at it."""
    rows, outputs, features = weight.shape
    few = x.is_cuda and rows * x.shape[1] * outputs <= FEW_ENTRIES
    return next((cuts for cuts in (16, 8, 4) if few and features % cuts == 0 and features // cuts >= 64), 1)


def _cut_product(x: Tensor, weight: Tensor, cuts: int) -> Tensor:
    """``x Wᵀ`` of every row as the sum of ``cuts`` products over parts of the features."""
    rows, outputs, _ = weight.shape
    left, right = (each.unflatten(2, (cuts, -1)).transpose(1, 2).flatten(0, 1) for each in (x, weight))
    return torch.bmm(left, right.transpose(1, 2)).view(rows, cuts, -1, outputs).sum(1)


class EmbeddingLayer(Layer):
    """Rows of a table. A record's gradient has the rows Σ_{s: i_s = i} dy_s of the indices i it holds, no others."""

    method, reason = "per-record", "the rows that a record reads; no per-record table"

    def __init__(self, name: str, module: nn.Embedding, slots: dict[str, Slot]) -> None:
        super().__init__(name, module, slots)
        self.entries, self.wide, self.padding = module.num_embeddings, module.embedding_dim, module.padding_idx

    def forward(self, x: Tensor, tape: Tape) -> tuple[Tensor, Saved]:
        """Look up, each record in its own row's table where weights are stacked."""
        table = self.weight(tape)
        if not tape.stacked:
            return functional.embedding(x, table), (x,)
        shift = tape.per_record(torch.arange(table.shape[0], device=x.device) * self.entries)
        moved = x + shift.view(-1, *[1] * (x.dim() - 1))
        return functional.embedding(moved, table.reshape(-1, self.wide)), (x,)

    def input_gradient(self, dy: Tensor, saved: Saved, tape: Tape) -> Tensor:
        """Indices have no gradient; autograd never asks."""
        return torch.zeros_like(saved[0])

    def record(self, dy: Tensor, saved: Saved, tape: Tape) -> None:
        """Hold the gradient's rows, every one where its index comes first; the padding index has none."""
        if self.own:
            slopes, index = self.unpadded(dy, saved, tape)
            rows = gathered(slopes, index)
            tape.note(Length(squared_norms(rows)))
            tape.hold(self.name, "rows", rows)
            tape.hold(self.name, "index", index)

    def unpadded(self, dy: Tensor, saved: Saved, tape: Tape) -> tuple[Tensor, Tensor]:
        """Slopes ``[n, t, k]`` by records, exactly 0 at padding whatever they are there, and the indices ``[n, t]``."""
        dy3 = tape.folded(dy)
        index = saved[0].reshape(dy3.shape[:2])
        return dy3 if self.padding is None else dy3.masked_fill((index == self.padding).unsqueeze(2), 0), index

    def joined(self, runs: list[tuple[Tensor, Saved]]) -> tuple[Tensor, Saved]:
        """The positions of all runs, one after the other."""
        index = torch.cat([saved[0].reshape(len(saved[0]), -1) for _, saved in runs], 1)
        return cat_positions([dy for dy, _ in runs]), (index,)

    def pull(self, factors: Tensor, held: Held, segments: Segments, out: Tensor) -> None:
        """Add scaled rows into each row's table."""
        if self.own:
            self.own["weight"].part(out).copy_(summed_rows(factors, held, segments, self.entries))


def gathered(dy: Tensor, index: Tensor) -> Tensor:
    """Rows ``[n, t, k]`` of every record's gradient: Σ_s dy_s over its equal indices where one comes first, else 0."""
    same = index.unsqueeze(2) == index.unsqueeze(1)
    first = ~same.tril(-1).any(2, keepdim=True)
    return torch.bmm((same & first).to(dy.dtype), dy)


def summed_rows(factors: Tensor, held: Held, segments: Segments, entries: int) -> Tensor:
    """Tables ``[rows, entries·k]`` with every row's sum of its records' scaled rows, each added at its index."""
    index, rows = held["index"], held["rows"]
    shift = torch.arange(segments.rows, device=index.device) * entries
    counts = torch.tensor(segments.bounds, device=index.device).diff()
    moved = index + shift.repeat_interleave(counts, output_size=segments.records).unsqueeze(1)
    table = factors.new_zeros(segments.rows * entries, rows.shape[2])
    table.index_add_(0, moved.reshape(-1), (rows * factors.view(-1, 1, 1)).flatten(0, 1))
    return table.view(segments.rows, -1)


class Affine(Layer):
    """Scale γ and shift β after a normalisation: few parameters, so the per-record gradients are held as they are."""

    method, reason = "per-record", "two numbers a channel; held for the sum"

    def keep(self, tape: Tape, scale: Tensor, shift: Tensor) -> None:
        """Hold the trained ones of the gradients ``[inputs, …]`` of scale and shift, a record's inputs added up."""
        for key in self.own:
            flat = (scale if key == "weight" else shift).flatten(1)
            flat = flat if tape.copies == 1 else flat.unflatten(0, (-1, tape.copies)).sum(1)
            tape.hold(self.name, key, flat)
            tape.note(Length(squared_norms(flat)))

    def pull(self, factors: Tensor, held: Held, segments: Segments, out: Tensor) -> None:
        """Weighted sums of what is held."""
        for key, slot in self.own.items():
            segments.weighted(factors, held[key], slot.part(out))


def order_of(x: Tensor) -> torch.memory_format:
    """Channels last or first: a CPU's kernels take both, but the same for an input and its gradient; a GPU's first."""
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if last and x.device.type == "cpu" else torch.contiguous_format


class GroupNormLayer(Affine):
    """``y = γ (x − μ)/s + β`` with μ, s over groups of channels; InstanceNorm is one channel a group.

    Per record: g_β = Σ dy and g_γ = (Σ dy·x − μ Σ dy)/s over positions.
    """

    def __init__(self, name: str, module: nn.GroupNorm | nn.InstanceNorm2d, slots: dict[str, Slot]) -> None:
        super().__init__(name, module, slots)
        self.groups = module.num_groups if isinstance(module, nn.GroupNorm) else module.num_features
        self.eps = module.eps

    def forward(self, x: Tensor, tape: Tape) -> tuple[Tensor, Saved]:
        """Native group norm; a stacked scale and shift come after it."""
        weight, bias = self.weight(tape), self.bias(tape)
        x = x.contiguous(memory_format=order_of(x))
        n, channels, area = x.shape[0], x.shape[1], x[0, 0].numel()
        scale, shift = (None, None) if tape.stacked else (weight, bias)
        if not tape.stacked and groups.serves(x):
            normed = groups.forward(x, scale, shift, self.groups, self.eps)
            return normed.out, (x, normed.mean, normed.inverse)
        out, mean, rstd = torch.native_group_norm(x, scale, shift, n, channels, area, self.groups, self.eps)
        if tape.stacked and bias is not None:
            out = out * _over_positions(weight, x.dim(), tape) + _over_positions(bias, x.dim(), tape)
        return out, (x, mean, rstd)

    def backward(self, dy: Tensor, saved: Saved, tape: Tape, further: bool) -> Tensor:
        """Both at once where there is a compiled loop: they read the same numbers."""
        x, mean, rstd = saved
        if tape.stacked or not groups.serves(x):
            return super().backward(dy, saved, tape, further)
        dy = dy.contiguous(memory_format=order_of(x))
        back = groups.backward(dy, x, mean, rstd, self.weight(tape), further)
        self.keep(tape, back.scale, back.shift)
        return dy if back.input is None else back.input

    def input_gradient(self, dy: Tensor, saved: Saved, tape: Tape) -> Tensor:
        """Native backward for the input alone."""
        x, mean, rstd = saved
        weight: Tensor | None = self.weight(tape)
        if tape.stacked and weight is not None:
            dy, weight = dy * _over_positions(weight, dy.dim(), tape), None
        dy = dy.contiguous(memory_format=order_of(x))
        sizes = (dy.shape[0], dy.shape[1], dy[0, 0].numel(), self.groups)
        dx: Tensor = torch.ops.aten.native_group_norm_backward(dy, x, mean, rstd, weight, *sizes, [True, False, False])[
            0
        ]
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
        self.keep(tape, (product - mean_of * shift) * rstd_of, shift)


def _over_positions(values: Tensor, axes: int, tape: Tape) -> Tensor:
    return tape.per_record(values).view(-1, values.shape[1], *[1] * (axes - 2))


class LayerNormLayer(Affine):
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
        """Normalise, scale and shift; a stacked scale and shift come after it."""
        x = x.contiguous()
        weight, bias = self.weight(tape), self.bias(tape)
        scale, shift = (None, None) if tape.stacked else (weight, bias)
        out, mean, rstd = torch.native_layer_norm(x, self.shape, scale, shift, self.eps)
        if tape.stacked:
            out = out * self._spread(weight, x, tape)
            out = out if bias is None else out + self._spread(bias, x, tape)
        return out, (x, mean, rstd)

    def input_gradient(self, dy: Tensor, saved: Saved, tape: Tape) -> Tensor:
        """Native backward for the input alone."""
        x, mean, rstd = saved
        weight: Tensor | None = self.weight(tape)
        if tape.stacked and weight is not None:
            dy, weight = dy * self._spread(weight, dy, tape), None
        # Where there is a scale, the native kernel asks for a shift too, and does not read it.
        given = (dy.contiguous(), x, self.shape, mean, rstd, weight, weight, [True, False, False])
        dx: Tensor = torch.ops.aten.native_layer_norm_backward(*given)[0]
        return dx

    def record(self, dy: Tensor, saved: Saved, tape: Tape) -> None:
        """Per-record gradients of scale and shift, summed over the axes before the normalised ones."""
        x, mean, rstd = saved
        normed = tape.scratch.take("normed", tuple(x.shape), x)
        product = torch.sub(x, mean, out=normed).mul_(dy)
        between = dy.shape[1 : dy.dim() - len(self.shape)]
        if not between:
            self.keep(tape, product.mul_(rstd), dy)
            return
        n, positions = len(x), between.numel()
        scale = torch.bmm(rstd.reshape(n, 1, positions), product.view(n, positions, -1)).squeeze(1)
        self.keep(tape, scale, dy.reshape(n, positions, -1).sum(1))

    def joined(self, runs: list[tuple[Tensor, Saved]]) -> tuple[Tensor, Saved]:
        """The positions of all runs, one after the other."""

        def cat(values: list[Tensor]) -> Tensor:
            tails = [each.shape[each.dim() - len(self.shape) :] for each in values]
            return torch.cat([each.reshape(len(each), -1, *tail) for each, tail in zip(values, tails)], 1)

        x, mean, rstd = (cat([saved[k] for _, saved in runs]) for k in range(3))
        return cat([dy for dy, _ in runs]), (x, mean, rstd)
