"""Seven ways to the per-record gradients of a convolution, and which is the cheapest.

Every way records ‖g_j‖² and holds what it needs for Σ_j a_j g_j; g_j = dy_jᵀ P_j with P_j the patches of record j.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from sordino.client.gradients import fused, weights
from sordino.client.gradients.lengths import Length, squared_by_gram, squared_norms, squared_outer
from sordino.client.gradients.patches import Geometry, last_padded, patches_view, planes_view
from sordino.client.gradients.positions import products_of, squared_convolution
from sordino.client.gradients.tape import Held, Saved, Segments, Tape, Workspace
from sordino.client.gradients.types import Slot, in_full

GHOST_GAIN = 24  # products that one held number is worth: written once, read twice
FEW_CHANNELS = 4
FEW_RECORDS = 32  # a batch to plan for
LARGEST_INPUT = 1e20


def way_for(geometry: Geometry, channels: tuple[int, int], groups: int, x: Tensor, bias: bool, copies: int = 1) -> Way:
    """The cheapest way for one layer, from and to so many channels, at the size of its input x, where that lies."""
    inputs, outputs = channels
    positions = copies * math.prod(geometry.output(*x.shape[-2:]))
    seen = inputs // groups * geometry.taps
    if groups > 1:
        return Patches(geometry, groups)
    fewest = min(products_of(geometry, (x.shape[-2], x.shape[-1]), copies))
    if x.device.type == "cpu" and fewest * inputs + positions**2 * outputs <= GHOST_GAIN * seen * outputs:
        reason = f"{positions} positions against {seen * outputs} weights: Gram matrices are smaller"
        return Positions(geometry, reason)
    if x.device.type != "cpu" and mostly_weights(positions, seen, outputs):
        reason = f"{positions} positions against {seen * outputs} weights: Gram matrices are smaller"
        return Ghost(geometry, reason, many=FEW_RECORDS * positions > outputs)
    if fused.serves(x):
        return Fused(geometry, bias) if copies == 1 else Patches(geometry, groups)
    if inputs <= FEW_CHANNELS:
        return Planes(geometry)
    if weights.serves(x):
        return Compiled(geometry, groups)
    return RowWindows(geometry) if geometry.dense else Patches(geometry, groups)


def mostly_weights(positions: int, seen: int, outputs: int) -> bool:
    """Whether Gram matrices of patches take less than a record's gradient of so many weights, made and held."""
    return positions**2 * (seen + outputs) <= GHOST_GAIN * seen * outputs


class Way(ABC):
    """One way to a convolution's per-record gradients."""

    method = "per-record"
    reason = ""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    @abstractmethod
    def record(self, layer: str, saved: Saved, dy: Tensor, tape: Tape) -> None:
        """Record squared norms; ``dy`` is ``[inputs, positions, outputs]``."""

    def pull(self, factors: Tensor, held: Held, segments: Segments, out: Tensor, slot: Slot) -> None:
        """Write the weighted sum into the weight's slot: here of gradients held as ``[n, outputs·taps·channels]``."""
        total = factors.new_empty(segments.rows, slot.size)
        segments.weighted(factors, held["grads"].flatten(1), total)
        _put_taps_first(total, out, slot)


def _put_taps_first(total: Tensor, out: Tensor, slot: Slot) -> None:
    """Write a kernel's ``[rows, outputs, taps, channels]`` into its slot, ``[outputs, channels, kh, kw]``."""
    rows, outputs, channels = len(total), *slot.shape[:2]
    taps_first = total.view(rows, outputs, -1, channels)
    slot.part(out).view(rows, outputs, channels, -1).copy_(taps_first.transpose(2, 3))


def by_group(seen: Tensor, groups: int) -> Tensor:
    """Patches ``[n, ho, wo, kh, kw, c]`` to ``[n·groups, positions, taps·c/groups]``."""
    n, high, wide, _, _, channels = seen.shape
    if groups == 1:
        return seen.reshape(n, high * wide, -1)
    split = seen.view(*seen.shape[:5], groups, channels // groups).permute(0, 5, 1, 2, 3, 4, 6)
    return split.reshape(n * groups, high * wide, -1)


def add_products(left: Tensor, right: Tensor, out: Tensor, copies: int, groups: int = 1) -> None:
    """Σ over a record's inputs of left·right: ``[n·copies·groups, a, t]``, ``[…, t, b]`` to ``out[n·groups, a, b]``."""
    if copies == 1:
        torch.bmm(left, right, out=out)
        return
    left, right = (one.unflatten(0, (-1, copies, groups)) for one in (left, right))
    for place in range(copies):
        one, other = left[:, place].flatten(0, 1), right[:, place].flatten(0, 1)
        out.baddbmm_(one, other, beta=min(place, 1))  # 0: what lies there is not read


class Patches(Way):
    """All patches copied, one product per record and group. Any stride, dilation and groups."""

    reason = "patches times output gradient; held for the sum"

    def __init__(self, geometry: Geometry, groups: int) -> None:
        super().__init__(geometry)
        self.groups = groups

    def record(self, layer: str, saved: Saved, dy: Tensor, tape: Tape) -> None:
        """One product per record and group."""
        tape.note(Length(squared_norms(self.gradients(layer, saved, dy, tape))))

    def gradients(self, layer: str, saved: Saved, dy: Tensor, tape: Tape) -> Tensor:
        """Every record's gradient, held: ``[n, groups, outputs/groups, taps·channels/groups]``."""
        n, positions, outputs = dy.shape
        seen = by_group(patches_view(last_padded(saved[0], self.geometry), self.geometry), self.groups)
        if self.groups > 1:
            dy = dy.view(n, positions, self.groups, -1).transpose(1, 2).reshape(n * self.groups, positions, -1)
        grads = tape.room(layer, "grads", (self.groups, outputs // self.groups, seen.shape[2]), dy)
        flat = grads.view(-1, outputs // self.groups, seen.shape[2])
        add_products(dy.transpose(1, 2), seen, flat, tape.copies, self.groups)
        return grads


class Compiled(Patches):
    """One product per record from the image itself by a compiled loop. Any stride and dilation, no groups."""

    reason = "compiled: one product a record, no patches; held for the sum"

    def record(self, layer: str, saved: Saved, dy: Tensor, tape: Tape) -> None:
        """One product per record, its norm with it."""
        x = saved[0]
        if not weights.serves(x):
            super().record(layer, saved, dy, tape)
            return
        grads = tape.room(layer, "grads", (dy.shape[2], x.shape[1] * self.geometry.taps), dy)
        slopes = dy.unflatten(1, self.geometry.output(*x.shape[2:])).permute(0, 3, 1, 2)
        tape.note(Length(weights.gradients(x, slopes, self.geometry, tape.copies, grads)))


class Fused(Way):
    """One kernel from input and output gradient to every record's gradient and its norm, on a GPU."""

    reason = "one kernel a layer, patches never copied; held for the sum"

    def __init__(self, geometry: Geometry, bias: bool) -> None:
        super().__init__(geometry)
        self.bias = bias

    def record(self, layer: str, saved: Saved, dy: Tensor, tape: Tape) -> None:
        """Per-record gradients, those of a bias with them, and their squared norms."""
        slopes = dy.unflatten(1, self.geometry.output(*saved[0].shape[2:])).contiguous()
        self.record_framed(layer, saved, fused.Frame(slopes), tape)

    def record_framed(self, layer: str, saved: Saved, dy: fused.Frame, tape: Tape) -> None:
        """The same from dy in a frame."""
        given = self._given(layer, saved, dy.images, tape)
        tape.note(Length(fused.record_gradients(self._framed(saved, tape), dy, *given)))

    def record_pooled(self, layer: str, saved: Saved, dy: Tensor, taken: Tensor, pool: int, tape: Tape) -> None:
        """The same where ``dy[n, c, h, w]`` belongs to the largest of the output's windows; ``taken`` says which."""
        if saved[0].shape[1] * self.geometry.taps <= fused.FEW_SEEN:
            given = self._given(layer, saved, dy.movedim(1, -1), tape)
            tape.note(Length(fused.pooled_gradients(self._framed(saved, tape), dy, taken, pool, *given)))
        else:
            size = (saved[0].shape[2], saved[0].shape[3])
            slopes = fused.framed_slopes(dy, taken, pool, size, self.geometry, tape.lengths)
            self.record_framed(layer, saved, slopes, tape)

    def _framed(self, saved: Saved, tape: Tape) -> fused.Frame:
        """The input in its frame, which the forward pass may have left."""
        return fused.Frame(saved[1]) if len(saved) > 1 else fused.framed(saved[0], self.geometry, tape.lengths)

    def _given(
        self, layer: str, saved: Saved, dy: Tensor, tape: Tape
    ) -> tuple[tuple[int, int], Geometry, Tensor, Tensor, Tensor | None]:
        """The output's size and how kernels lie, who is real, and where gradients go; ``dy[…, o]``."""
        outputs, size = dy.shape[-1], self.geometry.output(*saved[0].shape[2:])
        grads = tape.room(layer, "grads", (outputs, saved[0].shape[1] * self.geometry.taps), dy)
        shifts = tape.room(layer, "bias", (outputs,), dy) if self.bias else None
        return size, self.geometry, tape.lengths, grads, shifts

    def pull(self, factors: Tensor, held: Held, segments: Segments, out: Tensor, slot: Slot) -> None:
        """Weighted sum of the held gradients, put in the parameter's order."""
        values = held["grads"].flatten(1)
        if segments.skips(values):
            fused.weighted(factors, values, slot.part(out), self.geometry.taps, slot.shape[1])
        else:
            super().pull(factors, held, segments, out, slot)


class RowWindows(Way):
    """Windows along the width copied once; each kernel row is a product with a slice of them. Stride 1, no groups."""

    reason = "stride 1: one product per kernel row, no patches; held for the sum"

    def record(self, layer: str, saved: Saved, dy: Tensor, tape: Tape) -> None:
        """One product per record and kernel row."""
        kh, kw = self.geometry.kernel
        high, wide = self.geometry.output(*saved[0].shape[2:])
        padded = last_padded(saved[0], self.geometry)
        n, height, _, channels = padded.shape
        # What the kernel's row k sees at every output position is then the slice of rows ``k .. k + high``.
        view = padded.as_strided((n, height, wide, kw * channels), padded.stride(), padded.storage_offset())
        windows = tape.scratch.take("windows", (view.shape[0], view.shape[1] * wide, view.shape[3]), dy)
        windows.view(view.shape).copy_(view)
        turned = dy.transpose(1, 2)
        grads = tape.room(layer, "grads", (dy.shape[2], windows.shape[2]), dy, copies=kh)
        for row in range(kh):
            add_products(turned, windows[:, row * wide : (row + high) * wide], grads[:, row], tape.copies)
            tape.note(Length(squared_norms(grads[:, row])))

    def pull(self, factors: Tensor, held: Held, segments: Segments, out: Tensor, slot: Slot) -> None:
        """Weighted sum of every kernel row, put in the parameter's order."""
        kh, kw = self.geometry.kernel
        outputs, channels = slot.shape[:2]
        total = factors.new_empty(kh, segments.rows, outputs * kw * channels)
        for row in range(kh):
            segments.weighted(factors, held["grads"][:, row].flatten(1), total[row])
        in_order = total.view(kh, segments.rows, outputs, kw, channels).permute(1, 2, 4, 0, 3)
        slot.part(out).view(segments.rows, outputs, channels, kh, kw).copy_(in_order)


class Planes(Way):
    """Shifted copies of an image with few channels serve the forward pass and the gradient."""

    reason = "few channels: shifted images serve the forward pass and the gradient; held for the sum"

    def forward(
        self, layer: str, x: Tensor, weight: Tensor, bias: Tensor | None, scratch: Workspace
    ) -> tuple[Tensor, Saved]:
        """The convolution as one product per record, written channels-last (the native one is not, at one channel)."""
        planes = self._planes(layer, x, scratch)
        n = x.shape[0]
        kernels = weight.new_empty(planes.shape[1], weight.shape[0])
        kernels[:-1] = weight.reshape(weight.shape[0], -1).t()
        kernels[-1] = 0 if bias is None else bias
        out = scratch.take(f"{layer}/out", (n, planes.shape[2], weight.shape[0]), x)
        torch.bmm(planes.transpose(1, 2), kernels.expand(n, -1, -1), out=out)
        high, wide = self.geometry.output(*x.shape[2:])
        return out.view(n, high, wide, -1).permute(0, 3, 1, 2), (x, planes)

    def _planes(self, layer: str, x: Tensor, scratch: Workspace) -> Tensor:
        """``[n, channels·taps + 1, positions]``; the last plane is 1 and adds the bias."""
        view = planes_view(x, self.geometry)
        shape = (x.shape[0], x.shape[1] * self.geometry.taps + 1, view.shape[4] * view.shape[5])
        planes = scratch.take(f"{layer}/planes", shape, x)
        planes[:, :-1].view(view.shape).copy_(view)
        planes[:, -1] = 1
        return planes

    def record(self, layer: str, saved: Saved, dy: Tensor, tape: Tape) -> None:
        """One product per record."""
        planes = saved[1] if len(saved) > 1 else self._planes(layer, saved[0], tape.scratch)
        grads = tape.room(layer, "grads", (planes.shape[1] - 1, dy.shape[2]), dy)
        add_products(planes[:, :-1], dy, grads, tape.copies)
        tape.note(Length(squared_norms(grads)))

    def pull(self, factors: Tensor, held: Held, segments: Segments, out: Tensor, slot: Slot) -> None:
        """Weighted sum of the held gradients, put in the parameter's order."""
        total = factors.new_empty(segments.rows, slot.size)
        segments.weighted(factors, held["grads"].flatten(1), total)
        turned = total.view(segments.rows, -1, slot.shape[0]).transpose(1, 2)
        slot.part(out).view(segments.rows, slot.shape[0], -1).copy_(turned)


class Ghost(Way):
    """‖g‖² = ⟨P Pᵀ, dy dyᵀ⟩ and the sum as one product over the records of a row; no per-record gradient at all.

    Many positions: patches are copied with channels last, in long runs, and the sum is put in the parameter's order.
    Few positions: patches are small and take the parameter's order, so that the large sum need not be reordered.
    """

    method = "ghost"

    def __init__(self, geometry: Geometry, reason: str, many: bool) -> None:
        super().__init__(geometry)
        self.reason, self.many = reason, many

    def record(self, layer: str, saved: Saved, dy: Tensor, tape: Tape) -> None:
        """Gram matrices; patches and dy are held."""
        seen = patches_view(last_padded(saved[0], self.geometry), self.geometry)
        if not self.many:
            seen = seen.permute(0, 1, 2, 5, 3, 4)
        dy = tape.folded(dy)
        flat = seen.reshape(dy.shape[0], dy.shape[1], -1)
        tape.hold(layer, "seen", flat)
        tape.hold(layer, "dy", dy)
        tape.note(squared_outer(flat[:, 0], dy[:, 0]) if dy.shape[1] == 1 else squared_by_gram(flat, dy))

    def pull(self, factors: Tensor, held: Held, segments: Segments, out: Tensor, slot: Slot) -> None:
        """``Σ_j a_j dy_jᵀ P_j`` as one product a row."""
        scaled = held["dy"] * factors.view(-1, 1, 1)
        if not self.many:
            segments.outer(scaled, held["seen"], slot.part(out))
            return
        total = factors.new_empty(segments.rows, slot.size)
        segments.outer(scaled, held["seen"], total)
        _put_taps_first(total, out, slot)


class Positions(Way):
    """Norms by inner products of positions; input and dy are held, and the native kernel makes the sum of them.

    The sum of a row is the weight's gradient for inputs x_j and slopes a_j·dy_j, as in training without privacy.
    """

    method = "ghost"

    def __init__(self, geometry: Geometry, reason: str) -> None:
        super().__init__(geometry)
        self.reason = reason

    def record(self, layer: str, saved: Saved, dy: Tensor, tape: Tape) -> None:
        """Gram matrices; input and dy are held with the order in which they lie."""
        x, copies = saved[0], tape.copies
        slopes = dy.transpose(1, 2).unflatten(2, self.geometry.output(*x.shape[2:]))
        for key, images in (("x", x), ("dy", slopes)):
            last = images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()
            by_record = images.unflatten(0, (-1, copies))
            tape.hold(layer, f"{key} last" if last else key, by_record.movedim(2, 4) if last else by_record)
        if copies * slopes.shape[2] * slopes.shape[3] == 1:
            seen = patches_view(last_padded(x, self.geometry), self.geometry)
            length = squared_outer(seen.reshape(len(x), 1, -1), dy)
        else:
            length = squared_convolution(x, slopes, self.geometry, copies)
        # Beside inputs beyond these, a·dy may be too small a number to keep its digits: the record contributes nothing.
        beyond = x.abs().reshape(len(x) // copies, -1).amax(1) > LARGEST_INPUT
        beyond = beyond.view(-1, *[1] * (length.square.dim() - 1))
        tape.note(length._replace(square=length.square.masked_fill(beyond, torch.inf)))

    def pull(self, factors: Tensor, held: Held, segments: Segments, out: Tensor, slot: Slot) -> None:
        """``Σ_j a_j dy_jᵀ P_j`` as one native gradient a row."""
        x, dy = (held[key] if key in held else held[f"{key} last"].movedim(4, 2) for key in ("x", "dy"))
        (kh, kw), *places = self.geometry
        like = out.new_empty(1).expand(slot.shape[0], slot.shape[1], kh, kw)
        whole = slot.part(out)
        if len(segments.pieces) < segments.rows:
            whole.zero_()
        for row, start, stop in segments.pieces:
            scaled = dy[start:stop] * factors[start:stop].view(-1, 1, 1, 1, 1)
            given = scaled.flatten(0, 1), x[start:stop].flatten(0, 1), like, None
            with in_full():
                found = torch.ops.aten.convolution_backward(*given, *places, False, [0, 0], 1, [False, True, False])[1]
            whole[row].view(like.shape).copy_(found)
