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
COLOURS = 3
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

    def __init__(self, shape: tuple[int, ...], angles: int = 6) -> None:
        super().__init__()
        if len(shape) != 3 or min(shape[1:]) < SMALLEST:
            raise BadInput(
                f"scattering needs images of shape (channels, height, width) of at least {SMALLEST}×{SMALLEST}, not "
                f"{tuple(shape)}: use features = 'random', 'polynomial' or 'binned' for other records"
            )
        if type(angles) is not int or not 1 <= angles <= MOST_ANGLES:
            raise BadInput(f"scattering: angles = {angles!r}: a whole number from 1 to {MOST_ANGLES}, usually 6 or 8")
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
        # An exported program is for any number of records, so it cannot have as many pieces as these need.
        pieces = [images] if torch.compiler.is_compiling() else images.split(most)
        return torch.cat([self._scattered(some) for some in pieces]).reshape(x.shape[0], self.channels, *self.sides)

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
class UnitLength(nn.Module):
    """x/‖x‖: every record's numbers divided by their length; zeros stay zeros."""

    def forward(self, x: Tensor) -> Tensor:
        """Flat records of length 1."""
        lengths: Tensor = x.norm(dim=1, keepdim=True)
        return x / lengths.clamp(min=1e-6)


@isolated
class Intercept(nn.Module):
    """(√(1 − c²) x, c) with c = 0.25: a constant beside a record's numbers, in place of a head's own intercept.

    An intercept of its own is a feature 1 beside features of length 1: half of a clipped gradient's square, where c
    takes a sixteenth. The noise that a budget asks for does not grow with what is left for the features.
    """

    SHARE = 0.25

    def forward(self, x: Tensor) -> Tensor:
        """Flat records with a constant at their end; of length 1 where they were."""
        constant = x.new_full((x.shape[0], 1), self.SHARE)
        return torch.cat([math.sqrt(1 - self.SHARE**2) * x, constant], 1)


@isolated
class Colours(nn.Module):
    """Red, green and blue as brightness (r + g + b)/√3 and two differences, (r − g)/√2 and (r + g − 2b)/√6."""

    def forward(self, x: Tensor) -> Tensor:
        """Images of three channels, each pixel turned to other axes."""
        red, green, blue = x.unbind(1)
        bright, warm, cold = red + green + blue, red - green, red + green - 2 * blue
        return torch.stack([bright / math.sqrt(3), warm / math.sqrt(2), cold / math.sqrt(6)], 1)


@isolated
class Bands(nn.Module):
    """Scattering coefficients brought to one size, of this record alone: nothing is learnt.

    For every channel of the image there are four bands of m coefficients a place: order 0 (m = 1), order 1 of either
    scale (m = L) and order 2 (m = L²). A band becomes (x − mean)/deviation over all its coefficients and places, times
    m^(−1/4), so that the many of order 2 do not drown the few; differences of colours count half.
    """

    def __init__(self, channels: int, angles: int) -> None:
        super().__init__()
        self.channels, self.sizes = channels, (1, angles, angles, angles**2)

    def extra_repr(self) -> str:
        """What the map is made by."""
        return f"channels={self.channels}, sizes={self.sizes}"

    def forward(self, x: Tensor) -> Tensor:
        """The records, each normed by itself."""
        bands = x.unflatten(1, (self.channels, sum(self.sizes))).split(self.sizes, 2)
        normed = [self._normed(band) * size**-0.25 for band, size in zip(bands, self.sizes)]
        found = torch.cat(normed, 2)
        if self.channels == COLOURS:
            found = torch.cat([found[:, :1], 0.5 * found[:, 1:]], 1)
        return found.flatten(1, 2)

    def _normed(self, band: Tensor) -> Tensor:
        centred = band - band.mean((2, 3, 4), keepdim=True)
        # A flat image has bands without any deviation: they stay zero.
        return centred / (centred.square().mean((2, 3, 4), keepdim=True).sqrt() + 1e-6)


def scattered(shape: tuple[int, ...], angles: int = 6) -> list[nn.Module]:
    """Scattering and the norm that follows it, for records of a shape; images of three channels by their colours."""
    before: list[nn.Module] = [Colours()] if len(shape) == 3 and shape[0] == COLOURS else []
    scatter = Scatter(shape, angles)
    return [*before, scatter, Bands(shape[0], angles)]


def features_of(shape: tuple[int, ...], angles: int) -> tuple[int, int, int]:
    """Channels, height and width of the features of images of a shape."""
    return shape[0] * (1 + 2 * angles + angles**2), -(-shape[1] // STEP), -(-shape[2] // STEP)


def scatter_linear(shape: tuple[int, ...], classes: int | None, angles: int = 6) -> nn.Module:
    """A linear head on normed scattering features (Tramèr and Boneh, 2021); 24,020 parameters on 1×28×28.

    Every record's features have length 1, so that the gradient of the head has the same length whatever the image's
    size; one of them is a constant, in place of an intercept.
    """
    maps, count = scattered(shape, angles), math.prod(features_of(shape, angles))
    head = nn.Linear(count + 1, classes or 1, bias=False)
    return nn.Sequential(*maps, nn.Flatten(), UnitLength(), Intercept(), head)


def scatter_cnn(shape: tuple[int, ...], classes: int | None, angles: int = 6) -> nn.Module:
    """Two 3×3 convolutions with tanh on normed scattering features, then a linear layer.

    The networks on scattering features of Tramèr and Boneh (2021) in a plain form: 16 and 32 channels on images of one
    channel, 64 and 64 on others, halved by max-pooling after the first. Features do not have length 1 here: the first
    convolution sees few of them at a time.
    """
    maps = scattered(shape, angles)
    channels, height, width = features_of(shape, angles)
    first, second = (16, 32) if shape[0] == 1 else (64, 64)
    return nn.Sequential(
        *maps,
        nn.Conv2d(channels, first, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2),
        nn.Conv2d(first, second, 3, padding=1), nn.Tanh(),
        nn.Flatten(), nn.Linear(second * (height // 2) * (width // 2), classes or 1),
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
