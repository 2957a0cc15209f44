"""How tensors are handed to compiled loops (``sordino.native``): addresses, steps and sizes."""

from __future__ import annotations

import ctypes

from torch import Tensor

from sordino.client.gradients.patches import Geometry

SIZES = ctypes.POINTER(ctypes.c_long)


def address(values: Tensor) -> ctypes.c_void_p:
    """Where a tensor's first number lies; the tensor must outlive the call."""
    return ctypes.c_void_p(values.data_ptr())


def longs(*values: int) -> ctypes.Array[ctypes.c_long]:
    """Whole numbers as an array."""
    return (ctypes.c_long * len(values))(*values)


def steps_of(images: Tensor) -> ctypes.Array[ctypes.c_long]:
    """Steps from one image, channel, row and column to the next."""
    return longs(*images.stride())


def sizes_of(geometry: Geometry, x: Tensor, dy: Tensor) -> ctypes.Array[ctypes.c_long]:
    """The ``Shape`` of the compiled loops: channels, sizes and the kernel of x ``[n, c, h, w]`` to dy's four axes."""
    kernel = [side for pair in geometry for side in pair]
    return longs(x.shape[1], dy.shape[1], *x.shape[2:], *dy.shape[2:], *kernel)
