"""Chains of simple layers over a few records that are kept apart: the fast half of :mod:`alone`.

What is copied, compared, multiplied or added number by number gives the same bits wherever a record lies in a block, so
that is done for all records of the block at once. What adds many numbers up (products of matrices, a loss) is called
for every record by itself, always with the same shapes and the same alignment in memory. So a record's gradient is a
bit-exact function of the weights and that record, as if it had been alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from sordino.client.gradients import loops
from sordino.client.gradients.chain import Backward, Stage, in_order, plain_stage, pool_before_relu, slots_by_layer
from sordino.client.gradients.patches import Geometry, Pair, last_padded, pads_with_zeros, patches_view, planes_view
from sordino.client.gradients.tape import Workspace
from sordino.client.gradients.types import Slot
from sordino.models import why_not_isolated
from sordino.models.fixed import PURE

FEW_CHANNELS = 4
LINE = 16
"""Floats in 64 bytes: every record's part of a buffer begins on such a boundary."""


class Unserved(Exception):
    """Records of this shape (which is public) are not served here."""


class Space:
    """A thread's buffers, used again for every block: fresh ones would be paged in each time.

    ``grads``: where the gradients of the block's records go, ``[n, d]``.
    """

    grads: Tensor

    def __init__(self) -> None:
        self.scratch, self._like = Workspace(), torch.empty(0, dtype=torch.float32, device="cpu")

    def lanes(self, key: str, records: int, shape: tuple[int, ...]) -> Tensor:
        """An empty float32 ``[records, *shape]`` in which every record lies on a boundary of its own."""
        size = math.prod(shape)
        room = self.scratch.take(key, (records, -(-size // LINE) * LINE), self._like)
        found: Tensor = room[:, :size].unflatten(1, shape)
        return found

    def in_lanes(self, key: str, x: Tensor) -> Tensor:
        """The same numbers, every record on a boundary of its own and in one piece."""
        inner = x[0].is_contiguous() if len(x) else True
        if inner and x.stride(0) % LINE == 0 and x.data_ptr() % (4 * LINE) == 0:
            return x
        return self.lanes(key, len(x), tuple(x.shape[1:])).copy_(x)


Maker = Callable[[Tensor], Stage[Space]]
"""A module of a chain under given weights ``[d]``; on its way back it writes the gradients of its parameters."""


class _Convolution:
    """Patches times weights, a product a record, with channels last.

    A patch holds (row, column, channel) of what the kernel sees. Where channels are few, shifted images take the place
    of patches, so that copies are long: then it is (channel, row, column), and a record's matrix is turned.
    ``_kernels`` are ``[patch, outputs]``, ``_native`` the same as the native convolution takes them, channels last.
    """

    def __init__(self, name: str, geometry: Geometry, own: dict[str, Slot], flat: Tensor) -> None:
        self._name, self._geometry, self._own = name, geometry, own
        weight = own["weight"].view(flat)
        self._few = weight.shape[1] <= FEW_CHANNELS
        self._kernels = (weight if self._few else weight.permute(0, 2, 3, 1)).flatten(1).t().contiguous()
        self._native = weight.contiguous(memory_format=torch.channels_last).clone()
        self._shift = own["bias"].view(flat).clone() if "bias" in own else flat.new_zeros(len(weight))

    def __call__(self, x: Tensor, space: Space) -> tuple[Tensor, Backward]:
        size = self._geometry.output(*x.shape[2:])
        view, room, seen = self._seen(x, size, space)
        out = space.lanes(f"{self._name}/out", len(x), (seen.shape[1], len(self._shift)))
        loops.seen_products(view, room, seen, self._kernels, out)
        out += self._shift

        def backward(dy: Tensor, further: bool) -> Tensor:
            slopes = space.in_lanes(f"{self._name}/dy", dy.permute(0, 2, 3, 1).flatten(1, 2))
            found = space.lanes(f"{self._name}/grads", len(dy), (len(self._shift), len(self._kernels)))
            loops.slope_products(slopes, seen, found)
            if self._few:
                in_order = found.unflatten(2, (x.shape[1], *self._geometry.kernel))
            else:
                in_order = found.unflatten(2, (*self._geometry.kernel, x.shape[1])).permute(0, 1, 4, 2, 3)
            self._own["weight"].view(space.grads).copy_(in_order)
            if "bias" in self._own:
                shifts = space.lanes(f"{self._name}/shifts", len(dy), (len(self._shift),))
                loops.column_sums(slopes, slopes.new_ones(slopes.shape[1]), shifts)
                self._own["bias"].view(space.grads).copy_(shifts)
            return self._input_gradient(slopes.unflatten(1, size).permute(0, 3, 1, 2), x, space) if further else dy

        return out.unflatten(1, size).permute(0, 3, 1, 2), backward

    def _seen(self, x: Tensor, size: Pair, space: Space) -> tuple[Tensor, Tensor, Tensor]:
        """What the kernel sees as a view, room for a copy of it, and that copy as ``[n, positions, patch]``."""
        (n, channels), positions, kernel = x.shape[:2], size[0] * size[1], self._geometry.kernel
        if self._few:
            copied = space.lanes(f"{self._name}/seen", n, (len(self._kernels), positions))
            room = copied.unflatten(1, (channels, *kernel)).unflatten(4, size)
            return planes_view(x, self._geometry), room, copied.transpose(1, 2)
        view = patches_view(last_padded(x, self._geometry), self._geometry)
        copied = space.lanes(f"{self._name}/seen", n, (positions, len(self._kernels)))
        return view, copied.unflatten(1, size).unflatten(3, (*kernel, channels)), copied

    def _input_gradient(self, slopes: Tensor, x: Tensor, space: Space) -> Tensor:
        """By the native kernel, an image a call."""
        back = space.lanes(f"{self._name}/back", len(x), (*x.shape[2:], x.shape[1])).permute(0, 3, 1, 2)
        like = torch.zeros_like(back[:1])  # only its size is looked at
        _, *places = (list(sides) for sides in self._geometry)
        loops.input_gradients(slopes, like, self._native, *places, back)
        return back


class _Product:
    """A linear layer of flat records, x Wᵀ + b: a product of matrix and vector a record."""

    def __init__(self, name: str, own: dict[str, Slot], flat: Tensor) -> None:
        self._name, self._own, self._matrix = name, own, own["weight"].view(flat).clone()
        self._turned = self._matrix.t().contiguous()
        self._shift = own["bias"].view(flat).clone() if "bias" in own else flat.new_zeros(len(self._matrix))

    def __call__(self, x: Tensor, space: Space) -> tuple[Tensor, Backward]:
        if x.dim() != 2:
            raise Unserved
        seen = space.in_lanes(f"{self._name}/seen", x)
        out = space.lanes(f"{self._name}/out", len(x), (self._matrix.shape[0],))
        loops.vector_products(self._matrix, seen, out)
        out += self._shift

        def backward(dy: Tensor, further: bool) -> Tensor:
            torch.mul(dy[:, :, None], seen[:, None, :], out=self._own["weight"].view(space.grads))
            if "bias" in self._own:
                self._own["bias"].view(space.grads).copy_(dy)
            if not further:
                return dy
            back = space.lanes(f"{self._name}/back", len(dy), (self._matrix.shape[1],))
            loops.vector_products(self._turned, space.in_lanes(f"{self._name}/dy", dy), back)
            return back

        return out, backward


def _tangent(name: str) -> Stage[Space]:
    """tanh(x): a function whose last bit may depend on where a number lies, so each record's is called alone.

    The slope 1 − y² is made of single multiplications and subtractions.
    """

    def stage(x: Tensor, space: Space) -> tuple[Tensor, Backward]:
        seen = space.in_lanes(f"{name}/seen", x)
        out = space.lanes(f"{name}/out", len(x), tuple(x.shape[1:]))
        loops.tangents(seen, out)
        return out, lambda dy, further: dy * (1 - out * out)

    return stage


def _before(module: nn.Module) -> Stage[Space]:
    """A module before the first trained layer, given one record at a time."""

    def stage(x: Tensor, space: Space) -> tuple[Tensor, Backward]:
        return torch.cat([module(one[None].clone()) for one in x]), lambda dy, further: dy

    return stage


def stages_of(model: nn.Module, slots: list[Slot]) -> tuple[list[Maker], int] | None:
    """How each module of a chain is served and which is the first to train; None where one is not served here.

    Only modules that are known to treat records one by one, and that remember nothing, go side by side.
    """
    if why_not_isolated(model) is not None:
        return None
    by_layer = slots_by_layer(slots)
    makers: list[Maker] = []
    first: int | None = None
    named = list(in_order("", model))
    modules = [module for _, module in named]
    pool_before_relu(modules)
    for (name, _), module in zip(named, modules):
        found = _maker(name, module, by_layer.pop(name, {}), first is not None)
        if found is None:
            return None
        if first is None and type(module) in (nn.Conv2d, nn.Linear):
            first = len(makers)
        makers.append(found)
    return None if first is None or by_layer else (makers, first)


def _maker(name: str, module: nn.Module, own: dict[str, Slot], trained: bool) -> Maker | None:
    whole = "weight" in own and (getattr(module, "bias", None) is None) == ("bias" not in own)
    if type(module) is nn.Conv2d and whole and pads_with_zeros(module) and module.groups == 1:
        return lambda flat: _Convolution(name, Geometry.of(module), own, flat)
    if type(module) is nn.Linear and whole:
        return lambda flat: _Product(name, own, flat)
    if own or (type(module) not in PURE and any(True for _ in module.parameters())):
        return None
    stage: Stage[Space] | None = plain_stage(name, module)
    if stage is None and not trained and type(module) in PURE:
        stage = _before(module)
    if stage is None and type(module) is nn.Tanh:
        stage = _tangent(name)
    return None if stage is None else lambda flat: stage
