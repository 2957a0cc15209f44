"""How long a convolution's gradient is, from its positions: neither patches nor gradients are made.

‖g‖² = ⟨P Pᵀ, dy dyᵀ⟩, and the inner products of patches are sums of inner products of the positions they see,
(P Pᵀ)[s, t] = Σ_taps x_{s+tap}·x_{t+tap}: as many products fewer as the kernel has taps.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from sordino import native
from sordino.client.gradients.compiled import SIZES, address, sizes_of, steps_of
from sordino.client.gradients.lengths import Length, inner_products, squared_by_gram, squared_from_products, widened
from sordino.client.gradients.patches import Geometry, Pair, last_padded, patches_view

Phases = dict[Pair, list[Pair]]


def phases(geometry: Geometry) -> Phases:
    """The shifts of the kernel's taps by the residue of what they see; taps of two residues never see the same.

    At output i, tap k sees the input at stride·i + k·hole − pad = stride·(i + shift) + residue.
    """
    found: Phases = {}
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = geometry
    for row in range(kh):
        for column in range(kw):
            (down, top), (right, left) = divmod(row * dh - ph, sh), divmod(column * dw - pw, sw)
            found.setdefault((top, left), []).append((down, right))
    return found


def products_of(geometry: Geometry, size: Pair, copies: int = 1) -> tuple[int, int]:
    """Products a channel that P Pᵀ takes for an input of that size: from positions, and from patches."""
    (high, wide), (sh, sw) = size, geometry.stride
    seen = [-(-max(0, high - top) // sh) * -(-max(0, wide - left) // sw) for top, left in phases(geometry)]
    out = geometry.output(high, wide)
    return copies**2 * sum(one**2 for one in seen), copies**2 * (out[0] * out[1]) ** 2 * geometry.taps


def patch_products(x: Tensor, geometry: Geometry, copies: int) -> Tensor:
    """P Pᵀ of every record in float64, ``[n, copies·positions, copies·positions]``, from x ``[n·copies, c, h, w]``."""
    high, wide = geometry.output(*x.shape[2:])
    (sh, sw), n = geometry.stride, len(x) // copies
    found = x.new_zeros((n, copies, high, wide, copies, high, wide), dtype=torch.float64)
    for (top, left), shifts in phases(geometry).items():
        part = x[:, :, top::sh, left::sw].permute(0, 2, 3, 1)
        rows, columns = part.shape[1:3]
        gram = inner_products(part.reshape(n, copies * rows * columns, x.shape[1]))
        gram = gram.view(n, copies, rows, columns, copies, rows, columns)
        for down, right in shifts:
            # Outputs whose tap does not lie on the padding.
            i, j = slice(max(0, -down), min(high, rows - down)), slice(max(0, -right), min(wide, columns - right))
            if i.start < i.stop and j.start < j.stop:
                k, m = slice(i.start + down, i.stop + down), slice(j.start + right, j.stop + right)
                found[:, :, i, j, :, i, j] += gram[:, :, k, m, :, k, m]
    return found.flatten(4).flatten(1, 3)


def squared_convolution(x: Tensor, dy: Tensor, geometry: Geometry, copies: int) -> Length:
    """‖dyᵀP‖² per record of ``x[n·copies, c, h, w]`` and ``dy[n·copies, outputs, ho, wo]``, by the fewest products."""
    from_positions, from_patches = products_of(geometry, (x.shape[2], x.shape[3]), copies)
    n, positions = len(x) // copies, copies * dy.shape[2] * dy.shape[3]
    additions = x.shape[1] * geometry.taps + dy.shape[1]
    if from_positions <= from_patches and x.dtype == dy.dtype == torch.float32:
        library = native.load("positions", _wrong).library
        if library is not None:
            square, reach = (torch.empty(n, dtype=torch.float64) for _ in range(2))
            _call(library, x, dy, geometry, copies, square, reach)
            return widened(square, reach, positions, additions)
    slopes = dy.permute(0, 2, 3, 1).reshape(n, positions, -1)
    if from_positions <= from_patches:
        return squared_from_products(patch_products(x, geometry, copies), inner_products(slopes), additions)
    return squared_by_gram(patches_view(last_padded(x, geometry), geometry).reshape(n, positions, -1), slopes)


def _call(
    library: ctypes.CDLL, x: Tensor, dy: Tensor, geometry: Geometry, copies: int, square: Tensor, reach: Tensor
) -> None:
    function = library.squared_norms
    function.argtypes = [ctypes.c_void_p, SIZES, ctypes.c_void_p, SIZES, ctypes.c_long, ctypes.c_long, SIZES]
    function.argtypes += [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long]
    places = address(x), steps_of(x), address(dy), steps_of(dy)
    sizes = len(square), copies, sizes_of(geometry, x, dy)
    if function(*places, *sizes, address(square), address(reach), torch.get_num_threads()):
        raise MemoryError("no memory for the inner products of a convolution's positions")


def _wrong(library: ctypes.CDLL) -> str | None:
    """What the compiled loop gets wrong in a small case with every kind of edge, or None."""
    generator = torch.Generator().manual_seed(0)
    for geometry in (Geometry((3, 2), (1, 2), (1, 1), (1, 1)), Geometry((3, 3), (2, 1), (2, 0), (2, 1))):
        x = torch.randn(6, 5, 6, 7, generator=generator)
        dy = torch.randn(6, 9, *geometry.output(6, 7), generator=generator)
        wanted = squared_by_gram(
            patches_view(last_padded(x, geometry), geometry).reshape(3, 2 * dy[0, 0].numel(), -1),
            dy.permute(0, 2, 3, 1).reshape(3, 2 * dy[0, 0].numel(), -1),
        ).square
        square, reach = (torch.empty(3, dtype=torch.float64) for _ in range(2))
        _call(library, x, dy, geometry, 2, square, reach)
        if not torch.allclose(square, wanted, rtol=1e-9):
            return f"squared norms of convolutions differ by {float((square / wanted - 1).abs().max()):.1e}"
    return None
