"""Group normalisation by compiled loops: the way back gives the input's gradient and every record's own at once."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from sordino import native
from sordino.client.gradients.compiled import address


class Normed(NamedTuple):
    """The output, and mean and inverse deviation of every record's groups, ``[n, groups]``."""

    out: Tensor
    mean: Tensor
    inverse: Tensor


class Back(NamedTuple):
    """Gradients of the input, where it was asked for, and of every record's scale and shift, ``[n, channels]``."""

    input: Tensor | None
    scale: Tensor
    shift: Tensor


def serves(x: Tensor) -> bool:
    """Whether there are compiled loops for inputs like x ``[n, c, …]``."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and native.load("groups", _wrong).library is not None


def forward(x: Tensor, scale: Tensor | None, shift: Tensor | None, groups: int, eps: float) -> Normed:
    """``scale·(x − mean)/√(variance + eps) + shift`` over groups of channels; x is dense, channels first or last."""
    return _forward(_library(), x, scale, shift, groups, eps)


def backward(dy: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, scale: Tensor | None, further: bool) -> Back:
    """From the gradient of the output, in the same order in memory as x; ``further``: that of the input too."""
    return _backward(_library(), dy, x, mean, inverse, scale, further)


def _library() -> ctypes.CDLL:
    library = native.load("groups", _wrong).library
    if library is None:
        raise RuntimeError("the compiled loop went away between two calls")
    return library


def _forward(
    library: ctypes.CDLL, x: Tensor, scale: Tensor | None, shift: Tensor | None, groups: int, eps: float
) -> Normed:
    function = library.normalise
    function.restype = None
    function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_long] * 5 + [ctypes.c_double] + [ctypes.c_void_p] * 3
    function.argtypes += [ctypes.c_long]
    out, (mean, inverse) = torch.empty_like(x), (x.new_empty(len(x), groups) for _ in range(2))
    sizes = *x.shape[:2], x[0, 0].numel(), groups, not x.is_contiguous()
    found = address(out), address(mean), address(inverse)
    function(address(x), _given(scale), _given(shift), *sizes, eps, *found, torch.get_num_threads())
    return Normed(out, mean, inverse)


def _backward(
    library: ctypes.CDLL, dy: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, scale: Tensor | None, further: bool
) -> Back:
    function = library.normalise_back
    function.restype = None
    function.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_long] * 5 + [ctypes.c_void_p] * 3 + [ctypes.c_long]
    dx, (dscale, dshift) = torch.empty_like(x) if further else None, (x.new_empty(x.shape[:2]) for _ in range(2))
    sizes = *x.shape[:2], x[0, 0].numel(), mean.shape[1], not x.is_contiguous()
    given = address(dy), address(x), address(mean), address(inverse), _given(scale)
    function(*given, *sizes, _given(dx), address(dscale), address(dshift), torch.get_num_threads())
    return Back(dx, dscale, dshift)


def _given(values: Tensor | None) -> ctypes.c_void_p | None:
    return None if values is None else address(values)


def _wrong(library: ctypes.CDLL) -> str | None:
    """What the compiled loops get wrong in a small case, or None."""
    generator = torch.Generator().manual_seed(0)
    for order in (torch.contiguous_format, torch.channels_last):
        x, dy = (torch.randn(3, 6, 7, 9, generator=generator).contiguous(memory_format=order) for _ in range(2))
        scale, shift = torch.randn(2, 6, generator=generator).unbind()
        normed = _forward(library, x, scale, shift, 3, 1e-5)
        back = _backward(library, dy, x, normed.mean, normed.inverse, scale, True)
        wide, slopes, own, level = (each.double() for each in (x, dy, scale, shift))
        out, mean, inverse = torch.native_group_norm(wide, own, level, 3, 6, 63, 3, 1e-5)
        each = [
            torch.ops.aten.native_group_norm_backward(
                slopes[k : k + 1], wide[k : k + 1], mean[k : k + 1], inverse[k : k + 1], own, 1, 6, 63, 3, [True] * 3
            )
            for k in range(3)
        ]
        wanted = out, *(torch.cat([one[place].view(1, *one[place].shape[-3:]) for one in each]) for place in range(3))
        for got, right in zip((normed.out, *back), wanted):
            gap = float("inf") if got is None else float((got - right).norm() / right.norm())
            if not gap <= 1e-5:
                return f"group normalisation differs by {gap:.1e}"
    return None
