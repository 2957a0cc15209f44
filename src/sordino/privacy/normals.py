"""Keyed standard normals on a CPU, for simulation: one definition, here in NumPy; a compiled loop gives the same bits.

Box and Muller: √(−2 ln u)·(cos 2πv, sin 2πv), with u and v of 32 bits each from a word of Philox4x64-10. Logarithm,
sine and cosine are polynomials in float32 whose every product and sum is rounded by itself, so that a draw is the same
bits with a compiler or without: IEEE's, which no processor is free to round otherwise.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray

from sordino import native
from sordino.privacy.threads import side_by_side

Keys = NDArray[np.uint64]
Row = NDArray[np.float32]

BLOCK = 1 << 18  # normals that one stream gives: a longer row is several streams, which threads draw side by side
PIECE = 1 << 16  # normals that are made at once: small enough for the cache
BIT_BY_BIT = ("-ffp-contract=off", "-fno-math-errno")  # how the loop is compiled: no product joins a sum

LOGARITHM = (  # of 1 + f, behind f − f²/2, over f³: highest power first
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
    -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
SINE = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)  # behind x, over x³
COSINE = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)  # behind 1 − x²/2, over x⁴


def fill(out: Row, keys: Keys, scales: Row | None = None) -> None:
    """Fill ``out[rows, width]`` with normals, or add ``scales[rows]`` times them to what it holds; on all threads.

    Guarantees: block k of a row is Philox with the row's key ``keys[rows, 2]`` and a counter from k·2¹²⁸: a draw
    depends on its row's key and its column alone, and no two blocks overlap. None is beyond 6.8.
    """
    library = native.load("normals", _wrong, BIT_BY_BIT).library
    if library is None:
        _fill_plainly(out, keys, scales)
    else:
        _fill_compiled(library, out, keys, scales)


def pairs(words: NDArray[np.uint64]) -> tuple[Row, Row]:
    """The two normals of every word: its low half says how far, its high half in which direction."""
    halves = words.view("<u4")
    low, high = halves[0::2], halves[1::2]
    radius = np.sqrt(_logarithm(low.astype(np.float32) * np.float32(2**-32) + np.float32(2**-33)) * np.float32(-2))
    quarter = (high + np.uint32(1 << 29)) >> np.uint32(30)
    x = (high - (quarter << np.uint32(30))).view(np.int32).astype(np.float32) * np.float32(1.4629180793e-9)  # 2π/2³²
    xx = x * x
    sine = _polynomial(SINE, xx) * xx * x + x
    cosine = _polynomial(COSINE, xx) * xx * xx - xx * np.float32(0.5) + np.float32(1)
    turned = (quarter & np.uint32(1)).astype(bool)
    across, along = np.where(turned, sine, cosine), np.where(turned, cosine, sine)
    across.view(np.uint32)[:] ^= (quarter + np.uint32(1) & np.uint32(2)) << np.uint32(30)  # a sign's bit
    along.view(np.uint32)[:] ^= (quarter & np.uint32(2)) << np.uint32(30)
    return radius * across, radius * along


def _logarithm(u: Row) -> Row:
    """ln u of u in (0, 1]: u = (1 + f)·2ᵉ with 1 + f from √½ to √2."""
    bits = u.view(np.int32)
    power = (bits - np.int32(0x3F3504F3)) >> np.int32(23)
    f: Row = (bits - (power << np.int32(23))).view(np.float32) - np.float32(1)
    e, ff = power.astype(np.float32), f * f
    rest: Row = _polynomial(LOGARITHM, f) * f * ff + e * np.float32(-2.12194440e-4) - ff * np.float32(0.5)
    found: Row = f + rest + e * np.float32(0.693359375)  # ln 2 in two parts
    return found


def _polynomial(factors: tuple[float, ...], x: Row) -> Row:
    total = x * np.float32(factors[0])
    for factor in factors[1:-1]:
        total += np.float32(factor)
        total *= x
    total += np.float32(factors[-1])
    return total


def _fill_plainly(out: Row, keys: Keys, scales: Row | None, block: int = BLOCK) -> None:
    def one(job: tuple[int, int]) -> None:
        row, start = job
        place = out[row, start : start + block]
        stream = np.random.Generator(np.random.Philox(key=keys[row], counter=start // block << 128))
        for first in range(0, len(place), PIECE):
            piece = place[first : first + PIECE]
            even, odd = pairs(stream.integers(0, 1 << 64, (len(piece) + 1) // 2, dtype=np.uint64))
            for to, found in ((piece[0::2], even), (piece[1::2], odd[: len(piece) // 2])):
                if scales is None:
                    to[:] = found
                else:
                    to += found * scales[row]

    jobs = [(row, start) for row in range(len(out)) for start in range(0, out.shape[1], block)]
    if out.shape[1] > block:
        side_by_side(one, jobs)
    else:  # short rows: handing them out costs more than drawing them
        for job in jobs:
            one(job)


def _fill_compiled(library: ctypes.CDLL, out: Row, keys: Keys, scales: Row | None, block: int = BLOCK) -> None:
    library.fill.restype = None
    library.fill.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_long] * 4
    where = None if scales is None else scales.ctypes.data
    library.fill(out.ctypes.data, keys.ctypes.data, where, *out.shape, block, torch.get_num_threads())


def _wrong(library: ctypes.CDLL) -> str | None:
    """Whether the compiled loop gives other bits than the definition, or None."""
    keys = np.array([[1, 2], [3, 1 << 63]], dtype=np.uint64)
    for width in (1, 40_961):
        for scales in (None, np.array([0.3, 7.0], dtype=np.float32)):
            got, wanted = (np.full((2, width), 0.7, dtype=np.float32) for _ in range(2))
            _fill_compiled(library, got, keys, scales, block=9_000)
            _fill_plainly(wanted, keys, scales, block=9_000)
            if not np.array_equal(got.view(np.int32), wanted.view(np.int32)):
                return f"{np.mean(got != wanted):.1%} of normals differ from NumPy's"
    return None
