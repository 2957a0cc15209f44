"""Convolutions and pooling of stacked rows as single kernels: how :mod:`kernels` is called, and where it serves."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from sordino.client.gradients.patches import Geometry, Pair

FULL, MIXED = "tf32x3", "tf32"
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
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = geometry
    return {"KH": kh, "KW": kw, "SH": sh, "SW": sw, "PH": ph, "PW": pw, "DH": dh, "DW": dw}


def _triton() -> Any:
    """The kernels, loaded where they are first needed: Triton may not be installed."""
    from sordino.client.gradients import kernels

    return kernels


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    lengths: Tensor,
    mixed: bool,
    pool: int = 1,
    first: bool = False,
) -> tuple[Tensor, Tensor]:
    """The convolution of ``x[n, c, h, w]`` with every row's ``weight[rows, o, c, kh, kw]``, channels last.

    With ``pool``: the largest of its windows, rectified, and which it was; else the second tensor means nothing.
    ``first``: what was pooled has its channels first.
    """
    kernels, size = weight.permute(0, 1, 3, 4, 2).contiguous(), geometry.output(*x.shape[2:])
    how = {"BACK": False, "POOL": pool, "FIRST": first, "PRECISION": MIXED if mixed else FULL}
    return _convolve(_last(x), kernels, bias, size, geometry, lengths, **how)


def input_gradient(dy: Tensor, weight: Tensor, size: Pair, geometry: Geometry, lengths: Tensor, mixed: bool) -> Tensor:
    """Gradient of the input, ``[n, c, *size]``, from the output's."""
    kernels = weight.permute(0, 2, 3, 4, 1).contiguous()
    how = {"BACK": True, "POOL": 1, "FIRST": False, "PRECISION": MIXED if mixed else FULL}
    return _convolve(_last(dy), kernels, None, size, geometry, lengths, **how)[0]


def _convolve(
    x: Tensor, kernels: Tensor, bias: Tensor | None, size: Pair, geometry: Geometry, lengths: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """``x[n, h, w, c]`` with ``kernels[rows, outputs, kh, kw, c]``; options are the kernel's own."""
    (rows, outputs), (n, channels), pool = kernels.shape[:2], (x.shape[0], x.shape[3]), options["POOL"]
    out = _images(n, outputs, (size[0] // pool, size[1] // pool), x)
    taken = torch.empty(out.shape, dtype=torch.uint8, device=x.device) if pool > 1 else out
    width = n // rows
    depth = channels if channels >= 16 else channels * geometry.taps
    block_o, block_c = _power(outputs, 16, 64), _power(depth, 16, 32)
    plain = channels < 16 and depth <= block_c and not options["BACK"]
    block, warps, stages = (1024 // block_o, 1, 3) if plain else (64, 2, 2) if block_o == 16 else (128, 4, 3)
    grid = (rows, -(-width * size[0] * size[1] // block), -(-outputs // block_o))
    _triton().convolve[grid](
        x, kernels, kernels if bias is None else bias, out, taken, lengths, width,
        kernels.stride(0), 0 if bias is None else bias.stride(0),
        HIGH=x.shape[1], WIDE=x.shape[2], CHANNELS=channels, OUT_HIGH=size[0], OUT_WIDE=size[1], OUTPUTS=outputs,
        **_folded(geometry), BIAS=bias is not None, **options,
        BLOCK=block, BLOCK_O=block_o, BLOCK_C=block_c, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return (out.view(n, outputs, *out.shape[1:3]) if options["FIRST"] else out.permute(0, 3, 1, 2)), taken


def _padded(x: Tensor, geometry: Geometry) -> Tensor:
    """``[n, c, h, w]`` as contiguous ``[n, h + 2p, w + 2p, c]``, in one kernel."""
    x, (high, wide) = _last(x), geometry.padding
    if not (high or wide):
        return x
    out = x.new_empty(len(x), x.shape[1] + 2 * high, x.shape[2] + 2 * wide, x.shape[3])
    _triton().pad[(-(-out.numel() // 1024),)](
        x, out, out.numel(), HIGH=x.shape[1], WIDE=x.shape[2], CHANNELS=x.shape[3], PH=high, PW=wide, BLOCK=1024
    )
    return out


def record_gradients(
    x: Tensor, dy: Tensor, taken: Tensor, pool: int, geometry: Geometry, lengths: Tensor,
    grads: Tensor, shifts: Tensor | None,
) -> Tensor:  # fmt: skip
    """Every record's gradient into ``grads[n, o, taps·c]`` and that of a bias into ``shifts[n, o]``.

    Returns their squared norms in parts, ``[n, parts]``.

    ``dy[n, positions, outputs]`` belongs to the largest of each pool × pool window of the output, ``taken`` says which
    that was; with a pool of 1 it belongs to the output itself, and ``taken`` means nothing.
    """
    n, channels = x.shape[:2]
    size = geometry.output(*x.shape[2:])
    padded, dy = _padded(x, geometry), dy.contiguous()
    outputs, seen = dy.shape[2], channels * geometry.taps
    block_o, block_k = _power(outputs, 16, 64), _power(seen, 16, 64)
    blocks = (-(-seen // block_k), -(-outputs // block_o))
    squares = dy.new_empty(n, blocks[0] * blocks[1])
    folded = _folded(geometry)
    del folded["PH"], folded["PW"]
    _triton().record_gradients[(n, *blocks)](
        padded, dy, taken, grads, grads if shifts is None else shifts, squares, lengths, n // len(lengths),
        HIGH=padded.shape[1], WIDE=padded.shape[2], CHANNELS=channels,
        OUT_HIGH=size[0], OUT_WIDE=size[1], OUTPUTS=outputs, **folded,
        POOL=pool, BIAS=shifts is not None, PRECISION=FULL, BLOCK=16, BLOCK_O=block_o, BLOCK_K=block_k,
        num_warps=1 if block_o * block_k <= 2048 else 2, num_stages=3,
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


def pooled(x: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """max(0, ·) and then the largest of each window; ``[n, c, h, w]`` channels last, and the taps that were taken."""
    size = geometry.output(*x.shape[2:])
    out = _images(x.shape[0], x.shape[1], size, x)
    taken = torch.empty(out.shape, dtype=torch.uint8, device=x.device)
    _triton().pool_rectified[(-(-out.numel() // 1024),)](
        _last(x), out, taken, out.numel(), HIGH=x.shape[2], WIDE=x.shape[3], CHANNELS=x.shape[1],
        OUT_HIGH=size[0], OUT_WIDE=size[1], **_folded(geometry), BLOCK=1024,
    )  # fmt: skip
    return out.permute(0, 3, 1, 2), taken


def pooled_back(dy: Tensor, taken: Tensor, size: Pair, geometry: Geometry) -> Tensor:
    """Gradient of what was pooled, ``[n, c, *size]``, channels last."""
    dx, first = _images(dy.shape[0], dy.shape[1], size, dy), dy.is_contiguous()
    _triton().pool_rectified_back[(-(-dx.numel() // 1024),)](
        dy if first else _last(dy), taken, dx, dx.numel(), HIGH=size[0], WIDE=size[1], CHANNELS=dy.shape[1],
        OUT_HIGH=dy.shape[2], OUT_WIDE=dy.shape[3], **_folded(geometry), FIRST=first, BLOCK=1024,
    )  # fmt: skip
    return dx.permute(0, 3, 1, 2)
