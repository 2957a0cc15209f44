"""A convolution with the rectified pool after it on a CPU, by compiled loops (``native/pooled.cpp``)."""

from __future__ import annotations

import ctypes
import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sordino import native
from sordino.client.gradients.convolution import ConvLayer
from sordino.client.gradients.lengths import Length
from sordino.client.gradients.patches import Geometry, Pair
from sordino.client.gradients.tape import Saved, Tape, Workspace
from sordino.client.gradients.ways import Way, mostly_weights

DEAD = 255
"""Which position of its window a number came from; 255: from none, it was rectified away."""

AGREEMENT = 1e-5
_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int


class Sizes(NamedTuple):
    """What the loops are told of a layer and its input, in the order of their own structure."""

    inputs: int
    copies: int
    channels: int
    height: int
    width: int
    outputs: int
    kernel: Pair
    stride: Pair
    padding: Pair
    pool: int
    pooled: Pair

    def whole(self) -> ctypes.Array[ctypes.c_int64]:
        """All numbers, as the loops read them."""
        flat = (*self[:6], *self.kernel, *self.stride, *self.padding, self.pool, *self.pooled)
        return (ctypes.c_int64 * len(flat))(*flat)


class Compiled(Way):
    """One loop a record from its image and the pooled gradient to the gradient of the weights and its norm.

    The pool leaves one number a window, so that a quarter of the products (at 2×2) are made, and no patch is copied.
    """

    reason = "compiled with its pool: a product a window, no patches; held for the sum"

    def __init__(self, geometry: Geometry, seen: tuple[Pair, int]) -> None:
        super().__init__(geometry)
        self.seen = seen
        """Size and copies of the inputs it was chosen for."""

    def record(self, layer: str, saved: Saved, dy: Tensor, tape: Tape) -> None:
        """Never asked: :func:`backward` records the layer."""
        raise RuntimeError("a convolution that is joined with its pool was recorded by itself")


def serves(layer: ConvLayer, x: Tensor, tape: Tape, pool: Geometry) -> bool:
    """Whether the loops run this convolution and its pool here; the layer is then recorded and summed by them."""
    found = None
    if x.dtype == torch.float32 and x.device.type == "cpu" and not tape.stacked and loops() is not None:
        seen = (x.shape[2], x.shape[3]), tape.copies
        found = layer.with_pool
        if not (isinstance(found, Compiled) and found.seen == seen):
            found = Compiled(layer.geometry, seen) if _fits(layer, x, tape, pool) else None
    layer.with_pool = found
    return found is not None


def _fits(layer: ConvLayer, x: Tensor, tape: Tape, pool: Geometry) -> bool:
    side = pool.kernel[0]
    plain = type(layer) is ConvLayer and layer.groups == 1 and layer.geometry.dilation == (1, 1) and not layer.one_axis
    square = pool == Geometry((side, side), (side, side), (0, 0), (1, 1)) and side**2 < DEAD
    if not (plain and square and "weight" in layer.slots) or min(layer.geometry.output(*x.shape[2:])) < side:
        return False
    numbers = tape.copies * x[0].numel() * 4 + layer.outputs * layer.inputs * layer.geometry.taps * 16
    if numbers >= 2**31:  # places are told in 32 bits; with generous room for padding
        return False
    positions = tape.copies * math.prod(layer.geometry.output(*x.shape[2:]))
    return not mostly_weights(positions, layer.inputs * layer.geometry.taps, layer.outputs)


def forward(layer: ConvLayer, x: Tensor, tape: Tape, side: int) -> tuple[Tensor, Saved]:
    """The convolution, the largest of each window of ``side``, rectified; and which it was."""
    sizes = _sizes(layer, x, tape.copies, side)
    last = x.permute(0, 2, 3, 1).contiguous()
    shape = (len(x), *sizes.pooled, layer.outputs)
    out = tape.scratch.take(f"{layer.name}/pooled", shape, last)
    taken = tape.scratch.take(f"{layer.name}/taken", shape, last, torch.uint8)
    run_forward(_needed(), sizes, last, layer.weight(tape), layer.bias(tape), out, taken, tape.scratch)
    return out.permute(0, 3, 1, 2), (last, taken)


def backward(layer: ConvLayer, dy: Tensor, saved: Saved, tape: Tape, side: int, further: bool) -> Tensor:
    """Record the layer from the gradient of its pooled output; differentiate its input where asked."""
    last, taken = saved
    x = last.permute(0, 3, 1, 2)
    sizes = _sizes(layer, x, tape.copies, side)
    slopes = dy.permute(0, 2, 3, 1).contiguous()
    grads = tape.room(layer.name, "grads", (layer.outputs, layer.inputs * layer.geometry.taps), slopes)
    shifts = tape.room(layer.name, "bias", (layer.outputs,), slopes) if "bias" in layer.slots else None
    dx = tape.scratch.take(f"{layer.name}/dx", tuple(last.shape), last) if further else None
    weight, scratch = layer.weight(tape), tape.scratch
    tape.note(Length(run_backward(_needed(), sizes, last, slopes, taken, weight, grads, shifts, dx, scratch)))
    return dy if dx is None else dx.permute(0, 3, 1, 2)


def _sizes(layer: ConvLayer, x: Tensor, copies: int, side: int) -> Sizes:
    n, channels, height, width = x.shape
    kernel, stride, padding, _ = layer.geometry
    high, wide = layer.geometry.output(height, width)
    pooled = high // side, wide // side
    return Sizes(n, copies, channels, height, width, layer.outputs, kernel, stride, padding, side, pooled)


def run_forward(
    library: ctypes.CDLL,
    sizes: Sizes,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    taken: Tensor,
    scratch: Workspace,
) -> None:
    """From ``x[n, h, w, c]`` to the pooled output ``[n, h', w', o]``, and where in its window each came from."""
    whole = sizes.whole()
    kernels = scratch.take("kernels", (library.room_forward(whole),), x)
    weight = weight.contiguous()
    library.pack_forward(whole, weight.data_ptr(), _at(bias), kernels.data_ptr())
    library.forward(whole, *(_at(one) for one in (x, kernels, out, taken)), torch.get_num_threads())


def run_backward(
    library: ctypes.CDLL,
    sizes: Sizes,
    x: Tensor,
    dy: Tensor,
    taken: Tensor,
    weight: Tensor,
    grads: Tensor,
    shifts: Tensor | None,
    dx: Tensor | None,
    scratch: Workspace,
) -> Tensor:
    """Every record's ‖g‖², float64; gradients are written into ``grads[records, o, taps·c]``, ``shifts`` and ``dx``."""
    whole = sizes.whole()
    kernels = None
    if dx is not None:
        kernels = scratch.take("kernels", (library.room_backward(whole),), x)
        weight = weight.contiguous()
        library.pack_backward(whole, weight.data_ptr(), kernels.data_ptr())
    squares = torch.empty(sizes.inputs // sizes.copies, dtype=torch.float64)
    given = (_at(one) for one in (x, dy, taken, kernels, grads, shifts, squares, dx))
    library.backward(whole, *given, torch.get_num_threads())
    return squares


def _at(values: Tensor | None) -> int | None:
    return None if values is None else values.data_ptr()


def loops() -> ctypes.CDLL | None:
    """The compiled loops, or None where there are none (:mod:`sordino.native`)."""
    return native.load("pooled", wrong).library


def _needed() -> ctypes.CDLL:
    library = loops()
    if library is None:
        raise RuntimeError("compiled loops were asked for where there are none")
    return library


def wrong(library: ctypes.CDLL) -> str | None:
    """What the loops get wrong on a few random records, against plain float64; None where they are right."""
    declare(library)
    with torch.inference_mode(False), torch.enable_grad():  # it may be in a pass that needs no gradients
        return _first_gap(library)


def _first_gap(library: ctypes.CDLL) -> str | None:
    generator = torch.Generator().manual_seed(0)
    for channels, outputs, kernel, stride, side in ((1, 16, 5, 1, 2), (16, 32, 5, 1, 2), (3, 5, 3, 2, 3)):
        geometry = Geometry((kernel, kernel), (stride, stride), (2, 2), (1, 1))
        shapes = (3, channels, 13, 14), (outputs, channels, kernel, kernel), (outputs,)
        x, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
        pooled = tuple(size // side for size in geometry.output(13, 14))
        sizes = Sizes(*(3, 1, channels, 13, 14, outputs), *geometry[:3], side, (pooled[0], pooled[1]))
        dy = torch.randn((3, outputs, *pooled), generator=generator)
        for name, gap in gaps(library, sizes, x, weight, bias, dy).items():
            if not gap <= AGREEMENT:
                return f"{name} of a {kernel}×{kernel} convolution is off by {gap:.1e}"
    return None


def gaps(library: ctypes.CDLL, sizes: Sizes, x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> dict[str, float]:
    """How far each result is from plain float64, over its largest number."""
    last, slopes = (one.permute(0, 2, 3, 1).contiguous() for one in (x, dy))
    out, taken, dx = torch.empty_like(slopes), torch.empty_like(slopes, dtype=torch.uint8), torch.empty_like(last)
    units = sizes.inputs // sizes.copies
    grads, shifts = x.new_empty(units, *weight.permute(0, 2, 3, 1).shape), x.new_empty(units, len(bias))
    scratch = Workspace()
    run_forward(library, sizes, last, weight, bias, out, taken, scratch)
    squares = run_backward(library, sizes, last, slopes, taken, weight, grads, shifts, dx, scratch)
    wide, kernels, shift = (one.double().requires_grad_() for one in (x, weight, bias))
    seen = functional.conv2d(wide, kernels, shift, sizes.stride, sizes.padding)
    want = functional.max_pool2d(seen, sizes.pool).relu()
    taught = (want * dy).sum((1, 2, 3)).view(units, -1).sum(1)
    each = [torch.autograd.grad(one, (wide, kernels, shift), retain_graph=True) for one in taught]
    of_x, of_kernels, of_shift = (torch.stack(some) for some in zip(*each))
    found = {
        "the output": (out.permute(0, 3, 1, 2), want.detach()),
        "the gradient of the input": (dx.permute(0, 3, 1, 2), of_x.sum(0)),
        "the gradient of the weights": (grads.permute(0, 1, 4, 2, 3), of_kernels),
        "the gradient of the bias": (shifts, of_shift),
        "the squared norm": (squares, of_kernels.square().sum((1, 2, 3, 4)) + of_shift.square().sum(1)),
    }
    return {name: float((got - wanted).abs().max() / wanted.abs().max()) for name, (got, wanted) in found.items()}


def declare(library: ctypes.CDLL) -> None:
    """Say what the library's functions take and give."""
    for name in ("room_forward", "room_backward"):
        getattr(library, name).argtypes, getattr(library, name).restype = [_POINTER], ctypes.c_int64
    library.pack_forward.argtypes, library.pack_forward.restype = [_POINTER] * 4, None
    library.pack_backward.argtypes, library.pack_backward.restype = [_POINTER] * 3, None
    library.forward.argtypes, library.forward.restype = [*[_POINTER] * 5, _INTEGER], None
    library.backward.argtypes, library.backward.restype = [*[_POINTER] * 9, _INTEGER], None
