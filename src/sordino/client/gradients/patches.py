"""Where a convolution's kernel lies over its input, and copies of what it sees there."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional

Pair = tuple[int, int]


class Geometry(NamedTuple):
    """Kernel, stride, zero padding and dilation over height and width."""

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair

    @staticmethod
    def of(module: nn.Conv1d | nn.Conv2d | nn.MaxPool2d) -> Geometry:
        """The geometry of a module; one axis is a width at a height of 1, padding that is not of zeros is left out."""
        padding = module.padding if isinstance(module, nn.MaxPool2d) or pads_with_zeros(module) else 0
        sides = (module.kernel_size, 1), (module.stride, 1), (padding, 0), (module.dilation, 1)
        return Geometry(*(_pair(value, filler) for value, filler in sides))  # type: ignore[arg-type]

    @property
    def taps(self) -> int:
        """Weights of the kernel per channel."""
        return self.kernel[0] * self.kernel[1]

    @property
    def dense(self) -> bool:
        """Whether the kernel moves by one and has no holes."""
        return self.stride == (1, 1) and self.dilation == (1, 1)

    def output(self, height: int, width: int) -> Pair:
        """Height and width of the output."""
        sizes = [
            (size + 2 * pad - hole * (kernel - 1) - 1) // step + 1
            for size, kernel, step, pad, hole in zip((height, width), *self)
        ]
        return sizes[0], sizes[1]


def _pair(value: int | tuple[int, ...], filler: int) -> Pair:
    if isinstance(value, int):
        return value, value
    return (filler, value[0]) if len(value) == 1 else (value[0], value[1])


def pads_with_zeros(module: nn.Conv1d | nn.Conv2d) -> bool:
    """Whether a convolution's padding is of zeros and given in numbers (not reflected, circular or "same")."""
    return module.padding_mode == "zeros" and not isinstance(module.padding, str)


def last_padded(x: Tensor, geometry: Geometry) -> Tensor:
    """``[n, c, h, w]`` as contiguous ``[n, h + 2p, w + 2p, c]``."""
    high, wide = geometry.padding
    last = x.permute(0, 2, 3, 1)
    if high or wide:
        last = functional.pad(last, (0, 0, wide, wide, high, high))
    return last.contiguous()


def patches_view(padded: Tensor, geometry: Geometry) -> Tensor:
    """View ``[n, ho, wo, kh, kw, c]`` of a padded channels-last input; no copy."""
    n, height, width, channels = padded.shape
    at_n, at_h, at_w, at_c = padded.stride()
    high, wide = geometry._replace(padding=(0, 0)).output(height, width)
    (sh, sw), (dh, dw) = geometry.stride, geometry.dilation
    strides = (at_n, sh * at_h, sw * at_w, dh * at_h, dw * at_w, at_c)
    return padded.as_strided((n, high, wide, *geometry.kernel, channels), strides, padded.storage_offset())


def scattered(patches: Tensor, size: Pair, geometry: Geometry) -> Tensor:
    """Adjoint of the patches: ``[n, ho, wo, kh, kw, c]`` added back to an input ``[n, c, *size]``, channels last."""
    n, high, wide, kh, kw, channels = patches.shape
    (ph, pw), (sh, sw), (dh, dw) = geometry.padding, geometry.stride, geometry.dilation
    padded = patches.new_zeros(n, size[0] + 2 * ph, size[1] + 2 * pw, channels)
    for row in range(kh):
        for column in range(kw):
            top, left = row * dh, column * dw
            seen = padded[:, top : top + sh * (high - 1) + 1 : sh, left : left + sw * (wide - 1) + 1 : sw]
            seen += patches[:, :, :, row, column]
    return padded[:, ph : ph + size[0], pw : pw + size[1]].permute(0, 3, 1, 2)


def planes_view(x: Tensor, geometry: Geometry) -> Tensor:
    """Shifted images, a view ``[n, c, kh, kw, ho, wo]``: long contiguous runs to copy where channels are few."""
    (ph, pw), (sh, sw), (dh, dw) = geometry.padding, geometry.stride, geometry.dilation
    padded = functional.pad(x.contiguous(), (pw, pw, ph, ph)) if ph or pw else x.contiguous()
    at_n, at_c, at_h, at_w = padded.stride()
    shape = (*x.shape[:2], *geometry.kernel, *geometry.output(*x.shape[2:]))
    strides = (at_n, at_c, dh * at_h, dw * at_w, sh * at_h, sw * at_w)
    return padded.as_strided(shape, strides, padded.storage_offset())
