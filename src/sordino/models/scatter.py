"""Scattering features of images: a fixed map made of wavelets, the same for every record of every data set.

Morlet wavelets as in kymatio's ``Scattering2D`` (Andreux and others, 2020), of scale j and angle θ, on the grid u:

    ψ_{j,θ}(u) = g(u) (exp(i ξ_j ⟨u, e_θ⟩) − κ),  g(u) = slant/(2π σ_j²) exp(−(⟨u, e_θ⟩² + slant² ⟨u, e_θ⊥⟩²)/(2 σ_j²))

with σ_j = 0.8·2^j, ξ_j = (3π/4)/2^j, slant = 4/L for L angles, κ so that ψ sums to 0, and the low-pass φ, a Gaussian of
deviation 0.8·2^(J−1) that sums to 1, for J = 2. Of an image x, padded by its mirror image and periodic from there on:

    order 0: x ∗ φ      order 1: |x ∗ ψ_{j,θ}| ∗ φ      order 2: ||x ∗ ψ_{0,θ}| ∗ ψ_{1,θ'}| ∗ φ

each looked at on every fourth pixel: 1 + 2L + L² channels for every channel of the image. As in kymatio,
|x ∗ ψ_{1,θ}| and the moduli of order 2 live on every second pixel, and the low-pass there has the lower half of φ's
frequencies. φ is a product of two one-dimensional Gaussians, so that low-pass, subsampling and cutting off the padding
are one small matrix from each side, A u Bᵀ, instead of two Fourier transforms.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from sordino.errors import BadInput
from sordino.models.isolation import isolated

SCALE = 2
STEP = 2**SCALE
"""Every fourth pixel is looked at, and as many are padded on every side."""

SMALLEST = 8
MOST_ANGLES = 16
BYTES = 1 << 22
"""Memory of the largest array of a piece: what is larger falls out of the cache, what is smaller calls too often."""

Floats = npt.NDArray[np.float64]
Size = tuple[int, int]


def gabor(size: Size, deviation: float, angle: float, frequency: float, slant: float) -> npt.NDArray[np.complex128]:
    """g(u) exp(i ξ ⟨u, e_θ⟩) on a periodic grid: the sum over its translates by up to two periods."""
    rows, columns = (np.arange(-2 * side, 3 * side) for side in size)
    y, x = np.meshgrid(rows, columns, indexing="ij")
    along, across = y * math.cos(angle) + x * math.sin(angle), x * math.cos(angle) - y * math.sin(angle)
    wave = np.exp(-(along**2 + (slant * across) ** 2) / (2 * deviation**2) + 1j * frequency * along)
    folded = wave.reshape(5, size[0], 5, size[1]).sum((0, 2))
    return np.asarray(folded * slant / (2 * math.pi * deviation**2))


def wavelet(size: Size, scale: int, angle: float, slant: float) -> Floats:
    """The Fourier transform of ψ of that scale and angle, which is real."""
    deviation = 0.8 * 2**scale
    wave = gabor(size, deviation, angle, 0.75 * math.pi / 2**scale, slant)
    bell = gabor(size, deviation, angle, 0.0, slant)
    return np.asarray(np.fft.fft2(wave - wave.sum() / bell.sum() * bell).real)


def low_pass(side: int, every: int, kept: int) -> Floats:
    """A: the low-pass along an axis of ``side`` pixels of the padded image, of which one in ``every`` is there.

    Row i of the ``kept`` rows is φ around pixel ``STEP``·(i + 1), the first of them beyond the padding.
    """
    deviation, places = 0.8 * 2 ** (SCALE - 1), np.arange(-2 * side, 3 * side)
    bell = np.exp(-(places**2) / (2 * deviation**2)).reshape(5, side).sum(0) / (math.sqrt(2 * math.pi) * deviation)
    there = side // every
    frequencies = np.fft.fft(bell).real
    lower = np.concatenate([frequencies[: there // 2], frequencies[side - there // 2 :]])
    kernel = np.fft.ifft(lower).real
    centres = STEP // every * np.arange(1, kept + 1)
    return np.asarray(kernel[(centres[:, None] - np.arange(there)) % there])


@isolated
class Scatter(nn.Module):
    """Scattering of order 0, 1 and 2 at scale 2: ``[n, c, h, w]`` to ``[n, c·(1 + 2L + L²), ⌈h/4⌉, ⌈w/4⌉]``.

    Channels follow the image's channels, then the order, then θ (order 2: θ, then θ').
    """

    first: Tensor
    second: Tensor

    def __init__(self, shape: tuple[int, ...], angles: int = 8) -> None:
        super().__init__()
        if len(shape) != 3 or min(shape[1:]) < SMALLEST:
            raise BadInput(
                f"scattering needs images of shape (channels, height, width) of at least {SMALLEST}×{SMALLEST}, not "
                f"{tuple(shape)}: use features = 'random', 'polynomial' or 'binned' for other records"
            )
        if type(angles) is not int or not 1 <= angles <= MOST_ANGLES:
            raise BadInput(f"scattering: angles = {angles!r}: a whole number from 1 to {MOST_ANGLES}, usually 8 or 6")
        self.angles = angles
        self.sides: Size = (-(-shape[1] // STEP), -(-shape[2] // STEP))
        self.padded: Size = (STEP * (self.sides[0] + 2), STEP * (self.sides[1] + 2))
        self.channels = shape[0] * (1 + 2 * angles + angles**2)
        turns = [(int(angles / 2 - 1) - place) * math.pi / angles for place in range(angles)]
        fine, coarse = (
            np.stack([wavelet(self.padded, scale, turn, 4 / angles) for turn in turns]) for scale in range(SCALE)
        )
        # Real and imaginary parts of a spectrum lie side by side: so does what they are multiplied by.
        self._hold("first", np.repeat(fine.reshape(angles, -1), 2, axis=1))
        self._hold("second", np.repeat(_quarters(coarse), 2, axis=2) / 4)
        for every in (1, 2):
            for axis, side, kept in zip(("rows", "columns"), self.padded, self.sides):
                self._hold(f"{axis}{every}", low_pass(side, every, kept))

    def _hold(self, name: str, value: Floats) -> None:
        """Not saved with the weights: it follows from the shape. Rounded, so that it is the same on every machine."""
        held = torch.from_numpy(np.ascontiguousarray(np.round(value, 7) + 0.0, dtype=np.float32))
        self.register_buffer(name, held, persistent=False)

    def extra_repr(self) -> str:
        """What the map is made by, which is its identity in stacks and resumed runs."""
        return f"channels={self.channels}, sides={self.sides}, angles={self.angles}"

    def forward(self, x: Tensor) -> Tensor:
        """Features of a batch of images."""
        images = x.flatten(0, 1)
        most = max(1, BYTES // (2 * 4 * self.angles**2 * math.prod(self.padded) // 4))
        found = torch.cat([self._scattered(some) for some in images.split(most)])
        return found.reshape(len(x), self.channels, *self.sides)

    def _scattered(self, images: Tensor) -> Tensor:
        """Coefficients ``[m, 1 + 2L + L², …]`` of images of one channel, ``[m, h, w]``."""
        height, width = (size - side - STEP for size, side in zip(self.padded, images.shape[1:]))
        x = functional.pad(images[:, None], (STEP, width, STEP, height), mode="reflect")
        spectrum = torch.fft.fft2(x[:, 0])
        fine = torch.view_as_real(spectrum).flatten(1)[:, None] * self.first
        moduli = _modulus(fine, self.padded)
        coarse = self._coarse(spectrum)
        second = self._coarse(torch.fft.fft2(moduli).flatten(0, 1)).unflatten(0, moduli.shape[:2]).flatten(1, 2)
        pieces = [self._smooth(x, 1), self._smooth(moduli, 1), self._smooth(coarse, 2), self._smooth(second, 2)]
        return torch.cat(pieces, 1)

    def _coarse(self, spectra: Tensor) -> Tensor:
        """|u ∗ ψ_{1,θ}| on every second pixel, of the spectra ``[m, …]`` of u, for every θ.

        To keep every second pixel is to average the four quarters of a spectrum, which lie on top of each other then.
        """
        quarters = _quarters_of(torch.view_as_real(spectra))
        total = quarters[0][:, None] * self.second[0]
        for quarter, filters in zip(quarters[1:], self.second[1:]):
            total = torch.addcmul(total, quarter[:, None], filters)
        return _modulus(total, (self.padded[0] // 2, self.padded[1] // 2))

    def _smooth(self, u: Tensor, every: int) -> Tensor:
        """A u Bᵀ: low-pass, every fourth pixel of the image, without the padding."""
        rows, columns = self.get_buffer(f"rows{every}"), self.get_buffer(f"columns{every}")
        return rows @ (u @ columns.t())


@isolated
class RecordNorm(nn.Module):
    """(x − mean)/√(variance + 10⁻⁷) over groups of a record's channels: of this record alone, nothing is learnt.

    Second-order features of pixels in [0, 1] have variances about 10⁻⁵: the usual 10⁻⁵ below the root would halve them.
    With ``unit`` it is divided by √D for records of D numbers, so that a record's length is at most 1, and close to it:
    the gradient of a linear head then has the same length whatever the size of the image.
    """

    def __init__(self, channels: int, groups: int, unit: bool) -> None:
        super().__init__()
        if type(groups) is not int or groups < 1 or channels % groups:
            raise BadInput(f"groups = {groups!r} does not divide {channels} scattering channels: use a divisor of them")
        self.groups, self.unit = groups, unit

    def extra_repr(self) -> str:
        """What the map is made by."""
        return f"groups={self.groups}, unit={self.unit}"

    def forward(self, x: Tensor) -> Tensor:
        """The records, each normed by itself."""
        normed = functional.group_norm(x, self.groups, eps=1e-7)
        return normed / math.sqrt(x[0].numel()) if self.unit else normed


def usual_groups(channels: int) -> int:
    """The largest divisor of the channels up to 27, which Tramèr and Boneh (2021) use for 81 and 243 channels."""
    return max(count for count in range(1, 28) if channels % count == 0)


def scattered(
    shape: tuple[int, ...], angles: int = 8, groups: int | None = None, unit: bool = True
) -> tuple[Scatter, RecordNorm]:
    """Scattering and the norm that follows it, for records of a shape."""
    scatter = Scatter(shape, angles)
    return scatter, RecordNorm(scatter.channels, usual_groups(scatter.channels) if groups is None else groups, unit)


def scatter_linear(
    shape: tuple[int, ...], classes: int | None, angles: int = 8, groups: int | None = None
) -> nn.Module:
    """A linear head on normed scattering features (Tramèr and Boneh, 2021); 39,700 parameters on 1×28×28."""
    scatter, norm = scattered(shape, angles, groups)
    head = nn.Linear(scatter.channels * math.prod(scatter.sides), classes or 1)
    return nn.Sequential(scatter, norm, nn.Flatten(), head)


def scatter_cnn(shape: tuple[int, ...], classes: int | None, angles: int = 8, groups: int | None = None) -> nn.Module:
    """Two 3×3 convolutions with tanh on normed scattering features, then a linear layer.

    The networks on scattering features of Tramèr and Boneh (2021) in a plain form: 16 and 32 channels on images of one
    channel, 64 and 64 on others, halved by max-pooling after the first. Features have variance 1 here, not length 1:
    the first convolution sees few of them at a time.
    """
    scatter, norm = scattered(shape, angles, groups, unit=False)
    first, second = (16, 32) if shape[0] == 1 else (64, 64)
    return nn.Sequential(
        scatter, norm,
        nn.Conv2d(scatter.channels, first, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2),
        nn.Conv2d(first, second, 3, padding=1), nn.Tanh(),
        nn.Flatten(), nn.Linear(second * (scatter.sides[0] // 2) * (scatter.sides[1] // 2), classes or 1),
    )  # fmt: skip


def _quarters(filters: Floats) -> Floats:
    """The four quarters of spectra ``[L, h, w]``, as ``[4, L, h/2·w/2]``."""
    count, height, width = filters.shape
    parts = filters.reshape(count, 2, height // 2, 2, width // 2).transpose(1, 3, 0, 2, 4)
    return np.asarray(parts.reshape(4, count, -1))


def _quarters_of(spectra: Tensor) -> Tensor:
    """The four quarters of spectra ``[m, h, w, 2]``, as ``[4, m, h/2·w/2·2]``."""
    count, height, width, _ = spectra.shape
    parts = spectra.reshape(count, 2, height // 2, 2, width // 2, 2).permute(1, 3, 0, 2, 4, 5)
    return parts.reshape(4, count, -1)


def _modulus(spectra: Tensor, size: Size) -> Tensor:
    """|u| of the spectra of u, given as ``[…, h·w·2]``."""
    pixels: Tensor = torch.fft.ifft2(torch.view_as_complex(spectra.unflatten(-1, (*size, 2))))
    return pixels.abs()
