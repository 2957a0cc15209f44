"""Scattering features against a slow implementation in loops, and what a fixed map of single records must keep to."""

from __future__ import annotations

import cmath
import importlib
import math

import numpy as np
import pytest
import torch

import sordino as sd
from sordino import models
from sordino.client import gradients
from sordino.client.gradients.losses import loss_by_name
from sordino.errors import BadInput
from sordino.models.scatter import Bands, Colours, Intercept, Scatter, UnitLength, wavelet


def slow_wave(size, sigma, theta, xi, slant):
    """The Gabor wave, pixel by pixel; beyond one period it is below 1e-12 on these grids but for a translate."""
    found = np.zeros(size, complex)
    for row in range(-2 * size[0], 3 * size[0]):
        for column in range(-2 * size[1], 3 * size[1]):
            along = row * math.cos(theta) + column * math.sin(theta)
            across = -row * math.sin(theta) + column * math.cos(theta)
            bell = math.exp(-(along**2 + slant**2 * across**2) / (2 * sigma**2))
            found[row % size[0], column % size[1]] += bell * cmath.exp(1j * xi * along)
    return found * slant / (2 * math.pi * sigma**2)


def slow_morlet(size, scale, theta, slant):
    sigma, xi = 0.8 * 2**scale, 0.75 * math.pi / 2**scale
    wave, bell = slow_wave(size, sigma, theta, xi, slant), slow_wave(size, sigma, theta, 0.0, slant)
    return wave - wave.sum() / bell.sum() * bell


def convolved(image, kernel):
    return np.fft.ifft2(np.fft.fft2(image) * np.fft.fft2(kernel))


def halved(kernel):
    """The kernel's lower frequencies, on a grid of half the size: from −quarter to quarter, as kymatio keeps them."""
    spectrum, (height, width) = np.fft.fft2(kernel), kernel.shape
    rows = [k % height for k in [*range(height // 4), *range(-(height // 4), 0)]]
    columns = [k % width for k in [*range(width // 4), *range(-(width // 4), 0)]]
    return np.fft.ifft2(spectrum[np.ix_(rows, columns)])


def slow_scattering(image, angles):
    """Order 0, 1 and 2 of one channel, in float64 and in loops."""
    kept = [-(-side // 4) for side in image.shape]
    ends = [4 * (count + 2) - side - 4 for count, side in zip(kept, image.shape)]
    x = np.pad(image.astype(float), [(4, ends[0]), (4, ends[1])], mode="reflect")
    phi = slow_wave(x.shape, 1.6, 0.0, 0.0, 1.0).real
    thetas = [(int(angles - angles / 2 - 1) - k) * math.pi / angles for k in range(angles)]
    psi = [[slow_morlet(x.shape, scale, theta, 4 / angles) for theta in thetas] for scale in (0, 1)]

    def smooth(u):
        fine = convolved(u, phi)[::4, ::4] if u.shape == x.shape else convolved(u, halved(phi))[::2, ::2]
        return fine.real[1 : 1 + kept[0], 1 : 1 + kept[1]]

    found = [smooth(x)]
    moduli = [np.abs(convolved(x, one)) for one in psi[0]]
    found += [smooth(one) for one in moduli]
    found += [smooth(np.abs(convolved(x, one)[::2, ::2])) for one in psi[1]]
    for one in moduli:
        found += [smooth(np.abs(convolved(one, other)[::2, ::2])) for other in psi[1]]
    return np.stack(found)


@pytest.mark.parametrize(("shape", "angles"), [((1, 8, 8), 8), ((2, 9, 14), 6), ((1, 28, 28), 3)])
def test_features_are_those_of_the_formula(shape, angles):
    x = np.random.default_rng(0).random((2, *shape), dtype=np.float32)
    found = Scatter(shape, angles)(torch.from_numpy(x))
    wanted = np.stack([np.concatenate([slow_scattering(channel, angles) for channel in image]) for image in x])
    assert found.shape == wanted.shape
    assert np.abs(found.numpy() - wanted).max() < 2e-6
    assert np.abs(wanted).max() > 0.1


@pytest.mark.parametrize("angles", [6, 8])
def test_the_wavelets_are_kymatios(angles):
    bank = pytest.importorskip("kymatio.scattering2d.filter_bank").filter_bank(16, 20, 2, angles)
    for place, one in enumerate(bank["psi"]):
        scale, turn = divmod(place, angles)
        theta = (int(angles - angles / 2 - 1) - turn) * math.pi / angles
        assert np.abs(one["levels"][0] - wavelet((16, 20), scale, theta, 4 / angles)).max() < 1e-5


def test_batches_and_pieces_change_nothing_but_rounding(monkeypatch):
    scatter, x = Scatter((3, 12, 12)), torch.rand(9, 3, 12, 12)
    whole = scatter(x)
    monkeypatch.setattr(importlib.import_module("sordino.models.scatter"), "BYTES", 1)
    assert torch.allclose(scatter(x), whole, atol=1e-6)
    assert torch.allclose(torch.cat([scatter(one[None]) for one in x]), whole, atol=1e-6)


@pytest.mark.parametrize("channels", [1, 3])
def test_bands_are_normed_by_themselves_and_weighed_by_their_number(channels):
    angles = 2
    sizes = [1, 2, 2, 4]
    x = torch.rand(4, channels * 9, 3, 2) * torch.tensor([1.0, 10.0, 1e3, 0.1]).view(4, 1, 1, 1) + 4
    found = Bands(channels, angles)(x)
    for record, normed in zip(x, found):
        for channel in range(channels):
            start = 9 * channel
            for size in sizes:
                band, after = record[start : start + size], normed[start : start + size]
                wanted = (band - band.mean()) / band.std(unbiased=False) / size**0.25
                assert torch.allclose(after, wanted * (0.5 if channel else 1.0), atol=2e-3)
                start += size
    flat = Bands(1, angles)(torch.ones(1, 9, 3, 2))
    assert flat.abs().max() == 0


def test_colours_are_brightness_and_two_differences():
    x = torch.rand(2, 3, 8, 8)
    found = Colours()(x)
    axes = torch.tensor([[1.0, 1, 1], [1, -1, 0], [1, 1, -2]])
    axes = axes / axes.norm(dim=1, keepdim=True)
    for image, turned in zip(x, found):
        for row in range(8):
            assert torch.allclose(turned[:, row], axes @ image[:, row], atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 12, 12)])
def test_every_record_has_features_of_length_one(shape):
    fixed, _ = models.split_fixed(models.build("scatter-linear", shape, 10))
    x = torch.rand(5, *shape)
    x[3] *= 1e-2
    assert torch.allclose(fixed(x).norm(dim=1), torch.ones(5), atol=1e-5)
    assert UnitLength()(torch.zeros(1, 4)).abs().max() == 0
    short = torch.tensor([[0.6, 0.8]])
    assert torch.allclose(Intercept()(short), torch.tensor([[0.6 * 0.9375**0.5, 0.8 * 0.9375**0.5, 0.25]]))


@pytest.mark.parametrize("name", ["scatter-linear", "scatter-cnn"])
def test_features_are_computed_once_and_the_rest_is_trained(name):
    model = models.build(name, (1, 8, 8), 10)
    fixed, rest = models.split_fixed(model)
    assert [type(one) for one in fixed][:2] == [Scatter, Bands]
    x = torch.rand(6, 1, 8, 8)
    assert torch.allclose(rest(models.apply_fixed(fixed, x)), model(x), atol=1e-6)
    assert all(one.requires_grad for one in model.parameters())
    assert models.why_not_isolated(model) is None


@pytest.mark.parametrize("name", ["scatter-linear", "scatter-cnn"])
def test_at_a_site_a_record_contributes_the_same_bits_whatever_lies_beside_it(name):
    model = models.build(name, (1, 8, 8), 10)
    x, y = torch.rand(7, 1, 8, 8), torch.arange(7)
    engine = gradients.Alone(model, loss_by_name("cross-entropy"))
    grade = engine.under(engine.flatten(model))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        together = grade(x, y)
        losses, gradient = list(together.losses), together.gradients.clone()
        turned = grade(x.flip(0), y.flip(0))
        assert turned.losses[::-1] == losses
        assert torch.equal(turned.gradients.flip(0), gradient)
        for k in range(7):
            alone = grade(x[k : k + 1], y[k : k + 1])
            assert alone.losses == losses[k : k + 1]
            assert torch.equal(alone.gradients[0], gradient[k])
    finally:
        torch.set_num_threads(before)


def test_exact_and_fast_gradients_agree_on_the_whole_model():
    model, x, y = models.build("scatter-linear", (1, 8, 8), 3), torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])
    found = []
    for kind in ("fast", "exact"):
        engine = gradients.build(model, "cross-entropy", kind=kind)
        graded = engine.shared(engine.flatten(model), x, y, torch.zeros(4, dtype=torch.long), 1)
        found.append(graded.pull(torch.ones(4)))
    assert torch.allclose(found[0], found[1], atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "options", "word"),
    [
        ((1, 7, 8), {}, "at least 8×8"),
        ((30,), {}, "at least 8×8"),
        ((1, 8, 8), {"angles": 0}, "angles = 0"),
        ((1, 8, 8), {"angles": 1000}, "angles = 1000"),
    ],
)
def test_what_cannot_be_scattered_is_refused_with_the_remedy(shape, options, word):
    with pytest.raises(BadInput, match=word):
        models.build("scatter-linear", shape, 10, **options)


def test_a_run_on_digits_learns_and_is_loaded_again(digits, tmp_path):
    options = {"batch": 32, "steps": 2, "lr": 8.0, "clip": 1.0}
    run = sd.train(digits, "scatter-linear", "fedavg", 12, out=tmp_path / "run", **options)
    assert run.result["final"]["accuracy"] > 0.8
    x = torch.from_numpy(digits.x[:5])
    assert torch.equal(sd.load(tmp_path / "run").model(x), run.model(x))
