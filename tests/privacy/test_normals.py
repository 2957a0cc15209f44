"""Simulated noise: the definition is Box and Muller's, compiled loops have its bits, places have their own words."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sordino import native
from sordino.privacy import normals
from sordino.privacy.generators import Keyed, Turn

KEYS = np.array([[1, 2], [0, 0], [2**64 - 1, 2**63]], dtype=np.uint64)
WIDTHS = [1, 2, 7, 511, 512, 513, normals.PIECE + 1, normals.BLOCK - 1, normals.BLOCK, 2 * normals.BLOCK + 771]


def textbook(word):
    """√(−2 ln u)·(cos 2πv, sin 2πv) of one word, in float64."""
    u = (word & 0xFFFFFFFF) / 2**32 + 2**-33
    angle = 2 * math.pi * (word >> 32) / 2**32
    radius = math.sqrt(max(0.0, -2 * math.log(u)))
    return radius * math.cos(angle), radius * math.sin(angle)


def filled(width, scales=None, plainly=False):
    out = np.full((len(KEYS), width), 0.25, dtype=np.float32)
    if plainly:
        with native.set_aside():
            normals.fill(out, KEYS, scales)
    else:
        normals.fill(out, KEYS, scales)
    return out


@pytest.mark.parametrize("scales", [None, np.array([1.0, 0.0, 3e-5], dtype=np.float32)], ids=["filled", "added"])
@pytest.mark.parametrize("width", WIDTHS)
def test_compiled_loops_have_the_bits_of_the_definition(width, scales):
    found = native.load("normals", normals._wrong, normals.BIT_BY_BIT)
    if found.library is None and ("no C++ compiler" in found.reason or found.reason.startswith("switched off")):
        pytest.skip(found.reason)
    assert found.reason == "compiled"
    assert np.array_equal(filled(width, scales).view(np.int32), filled(width, scales, plainly=True).view(np.int32))


@pytest.mark.parametrize("size", [1 << 10, 1 << 15])
def test_noise_does_not_depend_on_the_size_of_pieces_bit_for_bit(size, monkeypatch):
    usual = filled(150_001, plainly=True)
    monkeypatch.setattr(normals, "PIECE", size)
    assert np.array_equal(filled(150_001, plainly=True), usual)


def test_every_pair_is_box_and_mullers_of_its_own_word():
    some = np.random.default_rng(0).integers(0, 1 << 64, 20_000, dtype=np.uint64).tolist()
    octants = [(eighth * 2**29 + near) % 2**32 for eighth in range(8) for near in (-1, 0, 1)]
    corners = [high << 32 | low for high in octants for low in (0, 1, 2**31, 0x3FFFFFFF, 2**32 - 300)]
    words = some + corners
    even, odd = normals.pairs(np.array(words, dtype=np.uint64))
    wanted = np.array([textbook(word) for word in words])
    # u near 1 has 24 digits in float32: 2⁻²⁵ of u is 2⁻²⁵/radius of the radius.
    allowed = 4e-6 + 2**-24 / np.maximum(np.hypot(*wanted.T), 2**-12)
    assert (np.abs(even - wanted[:, 0]) <= allowed).all()
    assert (np.abs(odd - wanted[:, 1]) <= allowed).all()


def test_the_ends_of_the_range_are_finite_and_the_far_end_is_6_8():
    low = np.array([0, 2**32 - 1, 2**32 - 128, 2**32 - 129], dtype=np.uint64)
    found = np.hypot(*(one.astype(np.float64) for one in normals.pairs(low)))
    assert np.isfinite(found).all()
    assert 6.76 < found[0] < 6.8
    assert found[1] == 0


def test_a_value_comes_from_the_word_of_its_place_in_its_block():
    width = normals.BLOCK + 9
    out = filled(width)
    for row, block, place in [(0, 0, 0), (1, 0, 12345), (2, 0, normals.BLOCK - 1), (0, 1, 0), (2, 1, 8)]:
        stream = np.random.Philox(key=KEYS[row], counter=block << 128)
        word = int(stream.random_raw(place // 2 + 1)[-1])
        assert out[row, block * normals.BLOCK + place] == pytest.approx(textbook(word)[place % 2], abs=1e-5)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_nothing_is_drawn_where_nothing_is_asked_for(shape):
    turns = [Turn(f"client {row}", 1) for row in range(shape[0])]
    assert Keyed("run").normal(turns, "gradient", 0, torch.empty(shape), torch.ones(shape[0])).shape == shape


def test_a_loop_with_other_bits_is_found_and_not_used():
    idle = SimpleNamespace(fill=lambda *given: None)
    assert "differ" in normals._wrong(idle)
