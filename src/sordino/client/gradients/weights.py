"""Every record's gradient of a convolution's weights by a compiled loop that copies no patches."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from sordino import native
from sordino.client.gradients.compiled import SIZES, address, sizes_of
from sordino.client.gradients.patches import Geometry, last_padded, patches_view

FEWEST_CHANNELS = 24
"""With fewer, most of the loop's 32 channels at a time would be zeros."""


def serves(x: Tensor) -> bool:
    """Whether there is a compiled loop for inputs like x ``[n, c, h, w]``."""
    fits = x.device.type == "cpu" and x.dtype == torch.float32 and x.shape[1] >= FEWEST_CHANNELS
    return fits and native.load("weights", _wrong).library is not None


def gradients(x: Tensor, dy: Tensor, geometry: Geometry, copies: int, out: Tensor) -> Tensor:
    """Write g_j = dy_jᵀP_j into ``out[n, outputs, taps·channels]``, a record's copies added up; ‖g_j‖² in float64.

    ``x[n·copies, c, h, w]``, ``dy[n·copies, outputs, ho, wo]``. Squares are exact products of what was written.
    """
    library = native.load("weights", _wrong).library
    if library is None:
        raise RuntimeError("the compiled loop went away between two calls")
    squares = torch.empty(len(out), dtype=torch.float64)
    _call(library, x, dy, geometry, copies, out, squares)
    return squares


def _call(
    library: ctypes.CDLL, x: Tensor, dy: Tensor, geometry: Geometry, copies: int, out: Tensor, squares: Tensor
) -> None:
    function = library.weight_gradients
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_long, SIZES]
    function.argtypes += [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long]
    seen, slopes = (each.contiguous(memory_format=torch.channels_last) for each in (x, dy))
    given = address(seen), address(slopes), len(squares), copies, sizes_of(geometry, x, dy)
    if function(*given, address(out), address(squares), torch.get_num_threads()):
        raise MemoryError("no memory for the gradients of a convolution's weights")


def _wrong(library: ctypes.CDLL) -> str | None:
    """What the compiled loop gets wrong in a small case with every kind of edge, or None."""
    generator = torch.Generator().manual_seed(0)
    for geometry in (Geometry((3, 2), (1, 2), (1, 1), (1, 1)), Geometry((3, 3), (2, 1), (2, 0), (2, 1))):
        x = torch.randn(6, 35, 6, 7, generator=generator)
        dy = torch.randn(6, 9, *geometry.output(6, 7), generator=generator)
        seen = patches_view(last_padded(x, geometry), geometry).reshape(3, 2 * dy[0, 0].numel(), -1)
        slopes = dy.permute(0, 2, 3, 1).reshape(3, 2 * dy[0, 0].numel(), -1)
        wanted = slopes.double().transpose(1, 2) @ seen.double()
        got, squares = torch.empty(3, 9, seen.shape[2]), torch.empty(3, dtype=torch.float64)
        _call(library, x, dy, geometry, 2, got, squares)
        gap = max(
            float((got - wanted).norm() / wanted.norm()),
            float((squares.sqrt() / got.double().flatten(1).norm(dim=1) - 1).abs().max()),
        )
        if not gap <= 1e-5:
            return f"gradients of convolutions differ by {gap:.1e}"
    return None
