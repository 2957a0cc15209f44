"""Chains of simple layers over a few records that are kept apart: the fast half of :mod:`alone`.

What is copied, compared, multiplied or added number by number gives the same bits wherever a record lies in a block, so
that is done for all records of the block at once. What adds many numbers up (products of matrices, a loss) is called
for every record by itself, always with the same shapes and the same alignment in memory. So a record's gradient is a
bit-exact function of the weights and that record, as if it had been alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from sordino.client.gradients import loops
from sordino.client.gradients.chain import in_order
from sordino.client.gradients.layout import view_of
from sordino.client.gradients.patches import Geometry, Pair, patches_view
from sordino.client.gradients.tape import Workspace
from sordino.client.gradients.types import Slot
from sordino.models import why_not_isolated
from sordino.models.fixed import PURE

Backward = Callable[[Tensor, Tensor, bool], Tensor]
"""From the gradient of a stage's output: write the gradients of its parameters into ``[n, d]``, and give that of its
input where something further back needs it."""

FEW_CHANNELS = 4
LINE = 16
"""Floats in 64 bytes: every record's part of a buffer begins on such a boundary."""


class Unserved(Exception):
    """Records of this shape (which is public) are not served here."""


class Space:
    """A thread's buffers, used again for every block: fresh ones would be paged in each time."""

    def __init__(self) -> None:
        self._buffers = Workspace()

    def lanes(self, key: str, records: int, shape: tuple[int, ...]) -> Tensor:
        """An empty float32 ``[records, *shape]`` in which every record lies on a boundary of its own."""
        size = math.prod(shape)
        wide = -(-size // LINE) * LINE
        room = self._buffers.take(key, (records, wide), torch.float32, torch.device("cpu"))
        found: Tensor = room[:, :size].unflatten(1, shape)
        return found

    def in_lanes(self, key: str, x: Tensor) -> Tensor:
        """The same numbers, every record on a boundary of its own and in one piece."""
        inner = x[0].is_contiguous() if len(x) else True
        if inner and x.stride(0) % LINE == 0 and x.data_ptr() % (4 * LINE) == 0:
            return x
        return self.lanes(key, len(x), tuple(x.shape[1:])).copy_(x)


class Stage(Protocol):
    """One module of a chain, with the weights it has now."""

    def forward(self, x: Tensor, space: Space) -> tuple[Tensor, Backward]:
        """Outputs of all records, and the way back."""


@dataclass(frozen=True)
class Convolution:
    """Patches times weights, a product a record, with channels last.

    A patch holds (row, column, channel) of what the kernel sees. Where channels are few, shifted images take the place
    of patches, so that copies are long: then it is (channel, row, column), and a record's matrix is turned.
    """

    name: str
    weight: Slot
    bias: Slot | None
    geometry: Geometry
    few: bool
    kernels: Tensor
    """``[patch, outputs]``."""
    native: Tensor
    """The kernels as the native convolution takes them, channels last."""
    shift: Tensor

    def forward(self, x: Tensor, space: Space) -> tuple[Tensor, Backward]:
        """Convolve every record by a matrix product of its own."""
        size = self.geometry.output(x.shape[2], x.shape[3])
        view, room, seen = self._seen(x, size, space)
        out = space.lanes(f"{self.name}/out", len(x), (seen.shape[1], len(self.shift)))
        loops.seen_products(view, room, seen, self.kernels, out)
        out += self.shift

        def backward(dy: Tensor, grads: Tensor, further: bool) -> Tensor:
            slopes = space.in_lanes(f"{self.name}/dy", dy.permute(0, 2, 3, 1).flatten(1, 2))
            found = space.lanes(f"{self.name}/grads", len(dy), (len(self.shift), len(self.kernels)))
            loops.slope_products(slopes, seen, found)
            view_of(grads, self.weight).copy_(self._in_order(found, x.shape[1]))
            if self.bias is not None:
                shifts = space.lanes(f"{self.name}/shifts", len(dy), (len(self.shift),))
                loops.column_sums(slopes, slopes.new_ones(slopes.shape[1]), shifts)
                view_of(grads, self.bias).copy_(shifts)
            return self._input_gradient(slopes.unflatten(1, size).permute(0, 3, 1, 2), x, space) if further else dy

        return out.unflatten(1, size).permute(0, 3, 1, 2), backward

    def _seen(self, x: Tensor, size: Pair, space: Space) -> tuple[Tensor, Tensor, Tensor]:
        """What the kernel sees as a view, room for a copy of it, and that copy as ``[n, positions, patch]``."""
        n, channels, positions = x.shape[0], x.shape[1], size[0] * size[1]
        if self.few:
            view = planes(x, self.geometry, size)
            copied = space.lanes(f"{self.name}/seen", n, (len(self.kernels), positions))
            room = copied.unflatten(1, (channels, *self.geometry.kernel)).unflatten(4, size)
            return view, room, copied.transpose(1, 2)
        view = patches_view(padded_last(x, self.geometry), self.geometry)
        copied = space.lanes(f"{self.name}/seen", n, (positions, len(self.kernels)))
        return view, copied.unflatten(1, size).unflatten(3, (*self.geometry.kernel, channels)), copied

    def _in_order(self, found: Tensor, channels: int) -> Tensor:
        """Gradients ``[n, outputs, patch]`` in the parameter's order."""
        if self.few:
            return found.unflatten(2, self.weight.shape[1:])  # type: ignore[no-any-return]
        shaped: Tensor = found.unflatten(2, (*self.geometry.kernel, channels))
        return shaped.permute(0, 1, 4, 2, 3)

    def _input_gradient(self, slopes: Tensor, x: Tensor, space: Space) -> Tensor:
        """By the native kernel, an image a call."""
        back = space.lanes(f"{self.name}/back", len(x), (*x.shape[2:], x.shape[1])).permute(0, 3, 1, 2)
        like = torch.zeros_like(back[:1])  # only its size is looked at
        g = self.geometry
        stride, padding, dilation = list(g.stride), list(g.padding), list(g.dilation)
        loops.input_gradients(slopes, like, self.native, stride, padding, dilation, back)
        return back


def planes(x: Tensor, geometry: Geometry, size: Pair) -> Tensor:
    """Shifted images of every record, a view ``[n, channels, kh, kw, high, wide]``."""
    (high, wide), (sh, sw), (dh, dw) = geometry.padding, geometry.stride, geometry.dilation
    n, channels, height, width = x.shape
    padded = x.new_zeros(n, channels, height + 2 * high, width + 2 * wide)
    padded[:, :, high : high + height, wide : wide + width] = x
    at_n, at_c, at_h, at_w = padded.stride()
    strides = (at_n, at_c, dh * at_h, dw * at_w, sh * at_h, sw * at_w)
    return padded.as_strided((n, channels, *geometry.kernel, *size), strides)


def padded_last(x: Tensor, geometry: Geometry) -> Tensor:
    """Every record with zeros around it, ``[n, height, width, channels]``."""
    (high, wide), (n, channels, height, width) = geometry.padding, x.shape
    padded = x.new_zeros(n, height + 2 * high, width + 2 * wide, channels)
    padded[:, high : high + height, wide : wide + width] = x.permute(0, 2, 3, 1)
    return padded


@dataclass(frozen=True)
class Product:
    """A linear layer of flat records: a product of matrix and vector a record."""

    name: str
    weight: Slot
    bias: Slot | None
    matrix: Tensor
    turned: Tensor
    shift: Tensor

    def forward(self, x: Tensor, space: Space) -> tuple[Tensor, Backward]:
        """x Wᵀ + b."""
        if x.dim() != 2:
            raise Unserved
        seen = space.in_lanes(f"{self.name}/seen", x)
        out = space.lanes(f"{self.name}/out", len(x), (self.matrix.shape[0],))
        loops.vector_products(self.matrix, seen, out)
        out += self.shift

        def backward(dy: Tensor, grads: Tensor, further: bool) -> Tensor:
            torch.mul(dy[:, :, None], seen[:, None, :], out=view_of(grads, self.weight))
            if self.bias is not None:
                view_of(grads, self.bias).copy_(dy)
            if not further:
                return dy
            back = space.lanes(f"{self.name}/back", len(dy), (self.matrix.shape[1],))
            loops.vector_products(self.turned, space.in_lanes(f"{self.name}/dy", dy), back)
            return back

        return out, backward


class Rectifier:
    """max(x, 0)."""

    def forward(self, x: Tensor, space: Space) -> tuple[Tensor, Backward]:
        """A comparison a number."""
        out = torch.relu(x)
        return out, lambda dy, grads, further: torch.ops.aten.threshold_backward(dy, out, 0)


@dataclass(frozen=True)
class Tangent:
    """tanh(x): a function whose last bit may depend on where a number lies, so each record's is called alone."""

    name: str

    def forward(self, x: Tensor, space: Space) -> tuple[Tensor, Backward]:
        """Record by record; the slope 1 − y² is made of single multiplications and subtractions."""
        seen = space.in_lanes(f"{self.name}/seen", x)
        out = space.lanes(f"{self.name}/out", len(x), tuple(x.shape[1:]))
        loops.tangents(seen, out)
        return out, lambda dy, grads, further: dy * (1 - out * out)


@dataclass(frozen=True)
class Pool:
    """Largest value of every window."""

    geometry: Geometry

    def forward(self, x: Tensor, space: Space) -> tuple[Tensor, Backward]:
        """Comparisons, and where the largest was."""
        places = (self.geometry.kernel, self.geometry.stride, self.geometry.padding, self.geometry.dilation, False)
        out, index = torch.ops.aten.max_pool2d_with_indices(x, *places)

        def backward(dy: Tensor, grads: Tensor, further: bool) -> Tensor:
            kind = torch.contiguous_format if index.is_contiguous() else torch.channels_last
            given = (one.contiguous(memory_format=kind) for one in (dy, x))
            dx: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(*given, *places, index)
            return dx

        return out, backward


class Flat:
    """All axes but the records' as one."""

    def forward(self, x: Tensor, space: Space) -> tuple[Tensor, Backward]:
        """In the order of the axes."""
        shape = x.shape
        return x.flatten(1), lambda dy, grads, further: dy.unflatten(1, shape[1:])


@dataclass(frozen=True)
class Before:
    """A module before the first trained layer, given one record at a time."""

    module: nn.Module

    def forward(self, x: Tensor, space: Space) -> tuple[Tensor, Backward]:
        """The module's output for each record, which it is given alone."""
        return torch.cat([self.module(one[None].clone()) for one in x]), lambda dy, grads, further: dy


Maker = Callable[[Tensor], Stage]
"""A stage under given weights ``[d]``."""


def stages_of(model: nn.Module, slots: Sequence[Slot]) -> list[Maker] | None:
    """How each module of a chain is served, or None where one of them is not served here.

    Only modules that are known to treat records one by one, and that remember nothing, go side by side.
    """
    if why_not_isolated(model) is not None:
        return None
    by_layer: dict[str, dict[str, Slot]] = {}
    for slot in slots:
        layer, _, own = slot.name.rpartition(".")
        by_layer.setdefault(layer, {})[own] = slot
    makers: list[Maker] = []
    trained = False
    for name, module in _pool_first(list(in_order("", model))):
        found = _maker(name, module, by_layer.pop(name, {}), trained)
        if found is None:
            return None
        trained = trained or type(module) in (nn.Conv2d, nn.Linear)
        makers.append(found)
    return makers if trained and not by_layer else None


def _pool_first(chain: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """ReLU after max-pooling instead of before it: the same function and gradient on a quarter of the numbers."""
    for k in range(len(chain) - 1):
        if type(chain[k][1]) is nn.ReLU and type(chain[k + 1][1]) is nn.MaxPool2d:
            chain[k], chain[k + 1] = chain[k + 1], chain[k]
    return chain


def _maker(name: str, module: nn.Module, own: dict[str, Slot], trained: bool) -> Maker | None:
    if type(module) is nn.Conv2d and "weight" in own and _plain(module, own):
        return lambda flat: _convolution(name, module, own, flat)
    if type(module) is nn.Linear and "weight" in own and (module.bias is None) == ("bias" not in own):
        return lambda flat: _product(name, own, flat)
    if own or any(True for _ in module.parameters()):
        return None
    if type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
        return lambda flat: Flat()
    if not trained and type(module) in PURE:
        return lambda flat: Before(module)
    if type(module) is nn.MaxPool2d and not (module.return_indices or module.ceil_mode):
        sides = [_pair(one) for one in (module.kernel_size, module.stride, module.padding, module.dilation)]
        return lambda flat: Pool(Geometry(*sides))
    if type(module) is nn.ReLU:
        return lambda flat: Rectifier()
    return (lambda flat: Tangent(name)) if type(module) is nn.Tanh else None


def _plain(module: nn.Conv2d, own: dict[str, Slot]) -> bool:
    zeros = module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return zeros and module.groups == 1 and (module.bias is None) == ("bias" not in own)


def _pair(value: int | tuple[int, ...]) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _convolution(name: str, module: nn.Conv2d, own: dict[str, Slot], flat: Tensor) -> Convolution:
    sides = [_pair(one) for one in (module.kernel_size, module.stride, module.padding, module.dilation)]  # type: ignore[arg-type]
    weight, geometry = view_of(flat, own["weight"]), Geometry(*sides)
    few = weight.shape[1] <= FEW_CHANNELS
    turned = (weight if few else weight.permute(0, 2, 3, 1)).flatten(1)
    shift = view_of(flat, own["bias"]).clone() if "bias" in own else flat.new_zeros(len(weight))
    native = weight.contiguous(memory_format=torch.channels_last).clone()
    return Convolution(name, own["weight"], own.get("bias"), geometry, few, turned.t().contiguous(), native, shift)


def _product(name: str, own: dict[str, Slot], flat: Tensor) -> Product:
    matrix = view_of(flat, own["weight"]).clone()
    shift = view_of(flat, own["bias"]).clone() if "bias" in own else flat.new_zeros(len(matrix))
    return Product(name, own["weight"], own.get("bias"), matrix, matrix.t().contiguous(), shift)
