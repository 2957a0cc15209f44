"""Convolutions and pooling of stacked rows as single kernels: how :mod:`kernels` is called, and where it serves."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from sordino.client.gradients.patches import Geometry, Pair

POOL_TAPS = 64
MOST_CLASSES = 1024
INTERPRETED = False  # tests set it: Triton's interpreter runs the kernels on a CPU
_refused = False


def refuse(reason: str) -> None:
    """Do without the kernels from now on: they do not compile here, or do not give what they should."""
    global _refused
    _refused = True
    warnings.warn(f"the GPU's kernels are not used, which is slower: {reason}", stacklevel=2)


@contextmanager
def set_aside() -> Iterator[None]:
    """Do without the kernels inside this context."""
    global _refused
    before, _refused = _refused, True
    try:
        yield
    finally:
        _refused = before


def serves(x: Tensor) -> bool:
    """Whether the kernels run where x lies; interpreted ones (for tests) run on a CPU."""
    able = (x.is_cuda or INTERPRETED) and find_spec("triton") is not None
    return able and x.dtype == torch.float32 and not _refused


def _power(number: int, least: int, most: int) -> int:
    return max(least, min(most, 1 << (number - 1).bit_length()))


def _last(x: Tensor) -> Tensor:
    """``[n, c, h, w]`` as contiguous ``[n, h, w, c]``; no copy where it lies so already."""
    return x.permute(0, 2, 3, 1).contiguous()


def _images(n: int, channels: int, size: Pair, like: Tensor) -> Tensor:
    return torch.empty((n, *size, channels), dtype=like.dtype, device=like.device)


def _folded(geometry: Geometry) -> dict[str, int]:
    (kh, kw), (sh, sw), _, (dh, dw) = geometry
    return {"KH": kh, "KW": kw, "SH": sh, "SW": sw, "DH": dh, "DW": dw}


def _triton() -> Any:
    """The kernels, loaded where they are first needed: Triton may not be installed."""
    from sordino.client.gradients import kernels

    return kernels


def _convolving() -> Any:
    from sordino.client.gradients import convolving

    return convolving


@dataclass(frozen=True)
class Frame:
    """Images in a frame of zeros, ``images[n, tall, broad, channels]``, in which no window of a kernel is cut off.

    An image's (i, j) stands at (top + rows·i, left + columns·j): ``corner`` is (top, left), ``steps`` (rows, columns).
    """

    images: Tensor
    corner: Pair = (0, 0)
    steps: Pair = (1, 1)

    @property
    def size(self) -> Pair:
        """Height and width, zeros included."""
        return self.images.shape[1], self.images.shape[2]


def framed(x: Tensor, geometry: Geometry, lengths: Tensor) -> Frame:
    """The input ``[n, c, h, w]`` of a convolution in as many zeros as it is padded with."""
    (high, wide), size = geometry.padding, (x.shape[2], x.shape[3])
    if not (high or wide):
        return Frame(_last(x))
    return _frame(x, x, size, 1, (size[0] + 2 * high, size[1] + 2 * wide), geometry.padding, (1, 1), lengths)


def framed_slopes(
    dy: Tensor, taken: Tensor, pool: int, size: Pair, geometry: Geometry, lengths: Tensor
) -> Frame:  # fmt: skip
    """The gradient of a convolution's output, so that its input's is a convolution too; its input has this size.

    Strides leave zeros between. With ``pool`` > 1, ``dy[n, c, h, w]`` belongs to the largest of each pool × pool window
    of the output, and ``taken`` says which that was; with a pool of 1 ``taken`` means nothing.
    """
    reach = [hole * (taps - 1) for taps, hole in zip(geometry.kernel, geometry.dilation)]
    tall, broad = (one + more for one, more in zip(size, reach))
    top, left = (more - pad for more, pad in zip(reach, geometry.padding))
    return _frame(dy, taken, geometry.output(*size), pool, (tall, broad), (top, left), geometry.stride, lengths)


def frames(geometry: Geometry) -> bool:
    """Whether the way back of such a convolution is one: it is not padded further than its kernel reaches."""
    return all(p <= d * (k - 1) for k, p, d in zip(geometry.kernel, geometry.padding, geometry.dilation))


def _frame(
    x: Tensor, taken: Tensor, size: Pair, pool: int, outer: Pair, corner: Pair, steps: Pair, lengths: Tensor
) -> Frame:
    n, channels = x.shape[:2]
    out = _images(n, channels, outer, x)
    _convolving().frame[(n,)](
        x, taken, out, lengths, n // len(lengths), *x.stride(),
        HIGH=size[0], WIDE=size[1], CHANNELS=channels, POOL=pool, TALL=outer[0], BROAD=outer[1],
        TOP=corner[0], LEFT=corner[1], SH=steps[0], SW=steps[1],
        BLOCK=_power(outer[0] * outer[1] * channels, 128, 2048), num_warps=4,
    )  # fmt: skip
    return Frame(out, corner, steps)


def forward(
    x: Frame, weight: Tensor, bias: Tensor | None, geometry: Geometry, lengths: Tensor,
    mixed: bool, pool: int = 1, first: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The convolution with every row's ``weight[rows, o, c, kh, kw]``: ``[n, o, h, w]``, channels last.

    With ``pool``: the largest of its windows, rectified, and which it was; else the second tensor means nothing.
    ``first``: what was pooled has its channels first.
    """
    size = geometry._replace(padding=(0, 0)).output(*x.size)
    return _convolve(x.images, weight, False, bias, size, geometry, lengths, mixed, pool, first)


def input_gradient(dy: Frame, weight: Tensor, size: Pair, geometry: Geometry, lengths: Tensor, mixed: bool) -> Tensor:
    """Gradient of the input, ``[n, c, *size]``, from the output's: a convolution with the kernels turned round."""
    around = geometry._replace(stride=(1, 1))
    return _convolve(dy.images, weight, True, None, size, around, lengths, mixed, 1, False)[0]


def _arranged(weight: Tensor, back: bool, split: bool) -> tuple[Tensor, Tensor]:
    """The kernels in the order in which they are multiplied, and what TF32 does not hold of them."""
    weight = weight if weight[0].is_contiguous() else weight.contiguous()
    (rows, outputs, channels), taps = weight.shape[:3], weight.shape[3] * weight.shape[4]
    first = weight.new_empty(rows, outputs * channels * taps)
    rest = torch.empty_like(first) if split else first
    _convolving().arrange[(rows, -(-first.shape[1] // 1024))](
        weight, first, rest, weight.stride(0),
        OUTPUTS=outputs, CHANNELS=channels, TAPS=taps, BACK=back, SPLIT=split, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return first, rest


MOST_COUNTED = (1 << 31) - 1
"""Of more numbers a place is counted with 64 bits, which takes longer."""

FEW = 32
"""So many numbers of a kernel are multiplied one by one; more of them as matrices."""


def _convolve(
    x: Tensor, weight: Tensor, back: bool, bias: Tensor | None, size: Pair, geometry: Geometry, lengths: Tensor,
    mixed: bool, pool: int, first: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``x[n, h, w, c]`` in its frame with every row's kernels; ``back``: with these turned round, from o to c."""
    rows, n, channels = len(weight), len(x), x.shape[3]
    outputs = weight.shape[2] if back else weight.shape[1]
    out = _images(n, outputs, (size[0] // pool, size[1] // pool), x)
    taken = torch.empty(out.shape, dtype=torch.uint8, device=x.device) if pool > 1 else out
    width, depth = n // rows, channels * geometry.taps
    shape = {
        "HIGH": x.shape[1], "WIDE": x.shape[2], "CHANNELS": channels,
        "OUT_HIGH": size[0], "OUT_WIDE": size[1], "OUTPUTS": outputs, **_folded(geometry),
        "BIAS": bias is not None, "POOL": pool, "FIRST": first, "LONG": width * x[0].numel() > MOST_COUNTED,
    }  # fmt: skip
    shift, bias_row = (x, 0) if bias is None else (bias, bias.stride(0))
    if depth <= FEW and channels < 16 and pool <= 2 and not back:
        kernels = weight.permute(0, 3, 4, 2, 1).contiguous()
        grid = (rows, -(-width * (size[0] // pool) * (size[1] // pool) // 32), -(-outputs // 16))
        _convolving().convolve_few[grid](
            x, kernels, shift, out, taken, lengths, width, bias_row, **shape, BLOCK=32, BLOCK_O=16, num_warps=2
        )
    else:
        kernels, rest = _arranged(weight, back, not mixed)
        block_o = _power(outputs, 16, 64)
        nvidia = x.is_cuda and torch.version.cuda is not None
        few_registers = {"maxnreg": 128} if nvidia and block_o == 32 else {}  # so that more programs run at a time
        _convolving().convolve[(rows, -(-width * size[0] * size[1] // 128), -(-outputs // block_o))](
            x, kernels, rest, shift, out, taken, lengths, width, bias_row, **shape, SPLIT=not mixed,
            BLOCK=128, BLOCK_O=block_o, BLOCK_C=_power(min(channels, depth), 16, 32), num_warps=4, num_stages=3,
            **few_registers,
        )  # fmt: skip
    return (out.view(n, outputs, *out.shape[1:3]) if first else out.permute(0, 3, 1, 2)), taken


def record_gradients(
    x: Frame, dy: Frame, size: Pair, geometry: Geometry, lengths: Tensor, grads: Tensor, shifts: Tensor | None
) -> Tensor:
    """Every record's gradient into ``grads[n, o, taps·c]`` and that of a bias into ``shifts[n, o]``.

    Returns their squared norms in parts, ``[n, parts]``. The convolution's output has this size.
    """
    outputs, seen = dy.images.shape[3], x.images.shape[3] * geometry.taps
    block_o, block_k = _power(outputs, 16, 64), _power(seen, 16, 64)
    squares = grads.new_empty(len(grads), -(-seen // block_k) * -(-outputs // block_o))
    _convolving().record_gradients[(squares.numel(),)](
        x.images, dy.images, grads, grads if shifts is None else shifts, squares, lengths, len(grads) // len(lengths),
        HIGH=x.size[0], WIDE=x.size[1], CHANNELS=x.images.shape[3],
        OUT_HIGH=size[0], OUT_WIDE=size[1], OUTPUTS=outputs, **_folded(geometry),
        TALL=dy.size[0], BROAD=dy.size[1], TOP=dy.corner[0], LEFT=dy.corner[1],
        ROW_STEP=dy.steps[0], COLUMN_STEP=dy.steps[1], BIAS=shifts is not None,
        BLOCK=32 if block_k <= 32 else 16, BLOCK_O=block_o, BLOCK_K=block_k,
        num_warps=1 if block_o * block_k <= 2048 else 2, num_stages=3,
    )  # fmt: skip
    return squares


FEW_SEEN = 96
"""Up to so many numbers of a kernel, products at each window's place alone take the way of all on tensor cores: a third
of the time at 25 on an H200; at 75, the next that is usual, somewhat more than half by estimate."""


def pooled_gradients(
    x: Frame, dy: Tensor, taken: Tensor, pool: int, size: Pair, geometry: Geometry, lengths: Tensor,
    grads: Tensor, shifts: Tensor | None,
) -> Tensor:  # fmt: skip
    """The same where ``dy[n, c, h, w]`` belongs to the largest of each pool × pool window, and ``taken`` says which."""
    outputs, seen = dy.shape[1], x.images.shape[3] * geometry.taps
    block_o, block_k = 8, _power(seen, 16, 32)
    squares = grads.new_empty(len(grads), -(-seen // block_k) * -(-outputs // block_o))
    _convolving().pooled_gradients[(squares.numel(),)](
        x.images, _last(dy), taken, grads, grads if shifts is None else shifts, squares,
        lengths, len(grads) // len(lengths), HIGH=x.size[0], WIDE=x.size[1], CHANNELS=x.images.shape[3],
        OUT_HIGH=size[0], OUT_WIDE=size[1], OUTPUTS=outputs, **_folded(geometry),
        POOL=pool, BIAS=shifts is not None, BLOCK=4, BLOCK_O=block_o, BLOCK_K=block_k, num_warps=1,
    )  # fmt: skip
    return squares


def weighted(factors: Tensor, values: Tensor, out: Tensor, taps: int = 1, channels: int = 1) -> None:
    """Σ_j factors_j·values_j of each row's records, ``values[n, p]`` into ``out[rows, p]``; a factor 0 skips.

    Kernels come as ``[outputs, taps, channels]`` and leave as ``[outputs, channels, taps]``.
    """
    rows, size = out.shape
    block = _power(size, 16, 128)
    _triton().weighted_sum[(rows, -(-size // block))](
        factors, values, out, len(factors) // rows, size, out.stride(0),
        TAPS=taps, CHANNELS=channels, RECORDS=16, BLOCK=block, num_warps=4,
    )  # fmt: skip


def weighted_outer(factors: Tensor, dy: Tensor, x: Tensor, out: Tensor) -> None:
    """Σ_j factors_j·dy_j ⊗ x_j of each row's records, ``dy[n, o]``, ``x[n, i]`` into ``out[rows, o·i]``; 0 skips."""
    rows, wide, outputs = len(out), x.shape[1], dy.shape[1]
    block, block_o = _power(wide, 16, 64), _power(outputs, 16, 64)
    _triton().weighted_outer[(rows, -(-wide // block), -(-outputs // block_o))](
        factors, dy.contiguous(), x.contiguous(), out, len(factors) // rows, out.stride(0),
        WIDE=wide, OUTPUTS=outputs, RECORDS=16, BLOCK=block, BLOCK_O=block_o, num_warps=2,
    )  # fmt: skip


GROUPS = 4
"""Of how many groups of parameters norms are added up in one kernel."""


def lengths_of(
    loss: Tensor,
    mask: Tensor | None,
    squares: list[Tensor],
    excess: Tensor | None,
    more: Tensor,
    floor: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses, norms, limits ``[n]``, and who is finite and real, from each group's squares ``[n]``, ``[n, parts]``.

    As ``types.Graded`` has them, of at most ``GROUPS`` groups: 0 where the mask is false, and ∞ where a record is not
    finite. ``more`` and ``floor`` are one number each, of float64: what rounding may add to a norm.
    """
    n = len(loss)
    given = [each.contiguous() for each in squares] + [loss] * (GROUPS - len(squares))
    parts = [each.numel() // max(1, n) for each in given[: len(squares)]] + [0] * (GROUPS - len(squares))
    losses, norms, limits = torch.empty_like(loss), torch.empty_like(loss), torch.empty_like(loss, dtype=torch.float64)
    usable = torch.empty_like(loss, dtype=torch.bool)
    _triton().lengths_of[(-(-n // 128),)](
        loss, loss if mask is None else mask.contiguous().view(torch.uint8), loss if excess is None else excess,
        *given, losses, norms, limits, usable.view(torch.uint8), n, more, floor,
        FIRST=parts[0], SECOND=parts[1], THIRD=parts[2], FOURTH=parts[3],
        MASKED=mask is not None, EXCEEDS=excess is not None, BLOCK=128, num_warps=4,
    )  # fmt: skip
    return losses, norms, limits, usable


def outer_squares(x: Tensor, dy: Tensor, bias: bool) -> Tensor:
    """‖dy_j ⊗ x_j‖² of ``x[n, i]``, ``dy[n, o]``, and ‖dy_j‖² more where there is a bias."""
    squares = x.new_empty(len(x), dtype=torch.float64)
    _triton().outer_squares[(len(x),)](
        x.contiguous(), dy.contiguous(), squares, WIDE=x.shape[1], OUTPUTS=dy.shape[1], BIAS=int(bias),
        BLOCK=_power(x.shape[1], 16, 512), BLOCK_O=_power(dy.shape[1], 16, 512), num_warps=4,
    )  # fmt: skip
    return squares


def cross_entropy(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """ℓ ``[n]`` of ``outputs[n, classes]``, and its slopes."""
    n, classes = outputs.shape
    losses, slopes = outputs.new_empty(n), torch.empty_like(outputs)
    _triton().cross_entropy[(-(-n // 16),)](
        outputs.contiguous(), y.contiguous(), losses, slopes, n,
        CLASSES=classes, BLOCK=16, BLOCK_C=_power(classes, 2, MOST_CLASSES),
    )  # fmt: skip
    return losses, slopes


def _pooling(geometry: Geometry) -> dict[str, int]:
    return {**_folded(geometry), "PH": geometry.padding[0], "PW": geometry.padding[1]}


def pooled(x: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """max(0, ·) and then the largest of each window; ``[n, c, h, w]`` channels last, and the taps that were taken."""
    size = geometry.output(*x.shape[2:])
    out = _images(x.shape[0], x.shape[1], size, x)
    taken = torch.empty(out.shape, dtype=torch.uint8, device=x.device)
    _triton().pool_rectified[(-(-out.numel() // 1024),)](
        _last(x), out, taken, out.numel(), HIGH=x.shape[2], WIDE=x.shape[3], CHANNELS=x.shape[1],
        OUT_HIGH=size[0], OUT_WIDE=size[1], **_pooling(geometry), BLOCK=1024,
    )  # fmt: skip
    return out.permute(0, 3, 1, 2), taken


def pooled_back(dy: Tensor, taken: Tensor, size: Pair, geometry: Geometry) -> Tensor:
    """Gradient of what was pooled, ``[n, c, *size]``, channels last."""
    dx, first = _images(dy.shape[0], dy.shape[1], size, dy), dy.is_contiguous()
    _triton().pool_rectified_back[(-(-dx.numel() // 1024),)](
        dy if first else _last(dy), taken, dx, dx.numel(), HIGH=size[0], WIDE=size[1], CHANNELS=dy.shape[1],
        OUT_HIGH=dy.shape[2], OUT_WIDE=dy.shape[3], **_pooling(geometry), FIRST=first, BLOCK=1024,
    )  # fmt: skip
    return dx.permute(0, 3, 1, 2)
