"""What exact samplers of normal noise share: cells under the normal density, and arithmetic without rounding.

The half line is cut into cells [i·h, (i+1)·h). Cell i has an integer weight w_i ≥ S·f(i·h), f(x) = exp(−x²/2), which is
the largest value of S·f in it; everything beyond the last cell is one more cell. A number that is uniform below the sum
of all weights picks a cell, and what is left of it is uniform below the cell's weight: a point under the envelope, to
be kept where it lies under what is wanted (``lattice``: rounded normals; ``discrete``: discrete ones).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

CELLS_PER_UNIT = 32  # 1/h: cells of this width keep 99 of 100 points
CELLS = CELLS_PER_UNIT * 9  # up to 9 deviations; what lies beyond (one point in 10¹⁸) is one more cell
GUIDE_BITS = 12

Words = Callable[[int], NDArray[np.uint64]]
"""So many independent uniform words of 64 bits."""


@dataclass(frozen=True)
class Cells:
    """Weights of the cells, the last one being everything beyond; ``ends`` are their running sums (below 2⁶³).

    ``guide``: the first cell that a number with these leading bits may lie in. ``atom``: the exact mass, in the
    weights' units, of one cell after the last, which has no width (0: there is none).
    """

    scale: float
    ends: NDArray[np.uint64]
    starts: NDArray[np.uint64]
    guide: NDArray[np.int64]
    atom: Fraction


@cache
def _heights() -> tuple[Fraction, ...]:
    """f(i·h) of every cell, rounded up, and what lies beyond: ∫ f ≤ f(R)/R, in units of one cell's width."""
    exact = [exp_bounds(Fraction(-(i**2), 2 * CELLS_PER_UNIT**2), 80)[1] for i in range(CELLS)]
    tail = exp_bounds(Fraction(-(CELLS**2), 2 * CELLS_PER_UNIT**2), 80)[1] * CELLS_PER_UNIT**2 / CELLS
    return (*exact, tail)


@lru_cache(maxsize=256)
def cells(atom: Fraction = Fraction(0)) -> Cells:
    """Integer weights w_i ≥ S·f(i·h), with S such that the running sum stays just below 2⁶³; S·``atom`` in the last."""
    wanted = 2**63 - 2**20  # rounding up adds less than one a cell
    masses = (*_heights(), atom) if atom else _heights()
    scale = math.floor(wanted / float(sum(masses)) * (1 - 2.0**-50))
    ends = np.cumsum(np.array([math.ceil(scale * one) for one in masses], dtype=np.uint64))
    starts = np.concatenate([np.zeros(1, dtype=np.uint64), ends])
    leading = np.arange(1 << GUIDE_BITS, dtype=np.uint64) << np.uint64(63 - GUIDE_BITS)
    guide = np.searchsorted(ends, leading, side="right")
    return Cells(float(scale), ends, starts, guide, scale * atom)


def find(table: Cells, mark: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The cell of every number below 2⁶³: how many running sums are at most as large."""
    ends = np.append(table.ends, np.uint64(2**64 - 1))
    cell: NDArray[np.int64] = table.guide[mark >> np.uint64(63 - GUIDE_BITS)]
    cell += mark >= ends[cell]
    late = np.flatnonzero(mark >= ends[cell])
    if len(late):
        cell[late] = np.searchsorted(table.ends, mark[late], side="right")
    return cell


def grown(words: Words, value: int, bits: int) -> tuple[int, int]:
    """A uniform number of [0, 1), value/2ᵇⁱᵗˢ so far, with 64 more of its bits."""
    return (value << 64) | int(words(1)[0]), bits + 64


def exp_bounds(power: Fraction, bits: int) -> tuple[Fraction, Fraction]:
    """Rational bounds of exp(power) for power ≤ 0, at most 2⁻ᵇⁱᵗˢ of it apart."""
    if power == 0:
        return Fraction(1), Fraction(1)
    # exp(p) = exp(p/2ᵏ)^(2ᵏ) with |p/2ᵏ| < 1, in fixed point with digits to spare.
    halvings = max(0, math.floor(-power).bit_length())
    digits = bits + 2 * halvings + 20 + math.ceil(-power * 3 / 2)
    small, one = power / (1 << halvings), 1 << digits
    argument = math.floor(small * one)  # at most one unit below
    term, total, k = one, one, 0
    while term:
        k += 1
        term = term * argument // one // k
        if term == -1:
            break
        total += term
    error = 2 * k + 4  # every term is at most two units off, and so is what was left out and the argument
    low, high = total - error, total + error
    for _ in range(halvings):
        low, high = low * low // one, -(-high * high // one)
    return Fraction(max(low, 0), one), Fraction(high, one)


def log_bounds(value: Fraction, bits: int) -> tuple[Fraction, Fraction]:
    """Rational bounds of ln(value) for value ≥ 1, found by halving an interval with :func:`exp_bounds`."""
    low, high = Fraction(0), Fraction(value.numerator.bit_length() - value.denominator.bit_length() + 1)
    for _ in range(bits + high.numerator.bit_length()):
        middle = (low + high) / 2
        least, most = exp_bounds(-middle, bits + 20)
        if 1 / most > value:
            high = middle
        elif 1 / least < value:
            low = middle
        else:
            break
    return low, high
