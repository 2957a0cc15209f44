"""Discrete Gaussians, drawn exactly: P(k) ∝ exp(−k²/(2s²)) on all integers k. Noise that sites share.

A sum of rounded Gaussians is not a rounded Gaussian, so noise per site (``lattice``) cannot be shared. A sum of
discrete Gaussians is a discrete Gaussian up to a factor that is far nearer to 1 than float64 can tell
(``accounting.discrete`` says how near, and what a discrete Gaussian costs in place of a continuous one).

How it is drawn
---------------
With f(x) = exp(−x²/2), a point y = s·x > 0 under the envelope of ``envelope`` stands for k = ⌊y⌋ + 1, so that every
k ≥ 1 has a stretch of length one, on which the envelope is nowhere below S·f(k/s), f falling. The point is kept where
it is below S·f(k/s): the mass of k is then S·f(k/s)/(h·s), and a fair sign gives each of ±k one half of it. So 0 has to
have the mass S/(2·h·s), and that is one more cell of the envelope. k is found in float64 where that is clear and in
integers where it is not; whether the point is kept is decided in float64 with a margin thirty times its error, and
inside the margin with as many binary digits as it takes. No approximation is left, tails included.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from sordino.privacy.envelope import CELLS, CELLS_PER_UNIT, Cells, Words, cells, exp_bounds, find, grown, log_bounds

SMALLEST, LARGEST = 1.0, 2.0**45  # below, most points would be thrown away; above, float64 would not know every integer
WHOLE_MARGIN = 2.0**-49  # relative; three roundings of 2⁻⁵³ each lie before it
ACCEPT_MARGIN = 2.0**-44
TAIL, ZERO, OUTSIDE = CELLS, CELLS + 1, CELLS + 2  # cells that are not of the ordinary kind


def discrete_normals(words: Words, deviation: float, count: int) -> NDArray[np.int64]:
    """``count`` independent draws of the integer k with P(k) ∝ exp(−k²/(2s²)), s = ``deviation`` from 1 to 2⁴⁵.

    Guarantees: exactly that distribution, if the words are independent and uniform. No value is cut off.
    """
    if not SMALLEST <= deviation <= LARGEST:
        raise ValueError(f"a deviation of {deviation!r} steps is not possible: it lies between 1 and 2^45")
    table = cells(Fraction(CELLS_PER_UNIT, 2) / Fraction(deviation))
    out = np.zeros(count, dtype=np.int64)
    missing = np.arange(count)
    while len(missing):
        values, kept = _attempt(words, table, deviation, len(missing))
        out[missing[kept]] = values[kept]
        missing = missing[~kept]
    return out


def _attempt(words: Words, table: Cells, deviation: float, count: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """One try for each: the values, and which of them were kept."""
    drawn = words(2 * count)
    first, offset = drawn[:count], drawn[count:]
    mark = first >> np.uint64(1)
    cell = find(table, mark)
    left = mark - table.starts[cell]
    whole = _wholes(cell, offset, deviation)
    gap = whole * (1.0 / deviation)
    np.square(gap, out=gap)
    gap *= -0.5
    np.exp(gap, out=gap)
    gap *= table.scale
    gap -= left
    kept = gap > 0
    np.abs(gap, out=gap)
    doubtful = gap < table.scale * ACCEPT_MARGIN
    doubtful |= whole == 0.0
    doubtful |= cell >= TAIL
    zero = (cell == ZERO) & (left < np.uint64(math.floor(table.atom)))
    doubtful &= ~zero
    kept |= zero
    whole[zero] = 0.0
    for i in np.flatnonzero(doubtful):
        found = _exactly(words, table, int(cell[i]), int(offset[i]), int(left[i]), deviation)
        kept[i], whole[i] = found is not None, found or 0
    values = whole.astype(np.int64)
    sign = (first & np.uint64(1)).astype(np.int64)
    values ^= -sign  # −v = ~v + 1
    values += sign
    return values, kept


def _wholes(cell: NDArray[np.int64], offset: NDArray[np.uint64], deviation: float) -> NDArray[np.float64]:
    """k = ⌊y⌋ + 1, y = s·h·(cell + v), v = offset/2⁶⁴ + digits to come; 0 where those digits matter."""
    y = offset.astype(np.float64)
    y *= 2.0**-64
    y += cell
    y *= deviation / CELLS_PER_UNIT
    whole = np.floor(y)
    y -= whole
    whole += 1.0
    margin = whole * WHOLE_MARGIN
    unclear = y < margin
    unclear |= y > 1.0 - margin
    at = np.flatnonzero(unclear)
    if len(at):
        top, bottom = deviation.as_integer_ratio()
        bottom *= CELLS_PER_UNIT << 64
        for i in at:
            point = (int(cell[i]) << 64) + int(offset[i])
            low, high = point * top // bottom, ((point + 1) * top - 1) // bottom  # y is below its upper end
            whole[i] = low + 1 if low == high else 0
    return whole


def _exactly(words: Words, table: Cells, cell: int, offset: int, left: int, deviation: float) -> int | None:
    """What float64 could not decide; ``offset`` and ``left`` are as in :func:`_attempt`. None: not kept."""
    if cell == TAIL:
        return _beyond(words, table, left, deviation)
    if cell == ZERO:
        return 0 if _below(words, left, table.atom) else None
    if cell == OUTSIDE:
        return None  # no cell: a number that is not below the sum of all weights is drawn again
    k = _stretch(words, cell, offset, deviation)
    power = -((k / Fraction(deviation)) ** 2) / 2
    return k if _below(words, left, Fraction(table.scale), power) else None


def _stretch(words: Words, cell: int, offset: int, deviation: float) -> int:
    """k = ⌊y⌋ + 1 as in :func:`_wholes`, with as many digits of v as it takes."""
    v, bits = offset, 64
    while True:
        low, high = (Fraction((cell << bits) + v + i, CELLS_PER_UNIT << bits) * Fraction(deviation) for i in (0, 1))
        if math.floor(low) + 1 == math.ceil(high):
            return math.ceil(high)
        v, bits = grown(words, v, bits)


def _below(words: Words, left: int, mass: Fraction, power: Fraction = Fraction(0)) -> bool:
    """Whether left + u < mass·exp(power), u a uniform number of [0, 1) with as many digits as it takes."""
    u, bits = 0, 0
    while True:
        least, most = (mass * bound for bound in exp_bounds(power, bits + 80))
        if left + Fraction(u + 1, 1 << bits) <= least:
            return True
        if left + Fraction(u, 1 << bits) >= most:
            return False
        u, bits = grown(words, u, bits)


def _beyond(words: Words, table: Cells, left: int, deviation: float) -> int | None:
    """The k of a point of the tail y ≥ s·R, or None where it is not kept.

    y = s·(R + E/R) with E exponential: the envelope there is W·R·exp(−E) where W is the cell's weight, so the point is
    kept iff left + u < S·f(k/s)/(h·R·exp(−E)). That is at most W: k/s ≥ R + E/R, hence (k/s)²/2 − E ≥ R²/2. E is
    −ln(a uniform number), by intervals that shrink until the decision is clear.
    """
    edge, s = Fraction(CELLS, CELLS_PER_UNIT), Fraction(deviation)
    mass = Fraction(table.scale) * CELLS_PER_UNIT / edge
    (e, bits), (u, more) = grown(words, 0, 0), grown(words, 0, 0)
    while True:
        if e == 0:  # not bounded yet
            e, bits = grown(words, e, bits)
            continue
        low = log_bounds(Fraction(1 << bits, e + 1), bits + 40)[0]
        high = log_bounds(Fraction(1 << bits, e), bits + 40)[1]
        k = math.ceil(s * (edge + high / edge))
        if math.floor(s * (edge + low / edge)) + 1 == k:
            power = (k / s) ** 2 / 2
            if left + Fraction(u, 1 << more) >= mass * exp_bounds(high - power, bits + 40)[1]:
                return None
            if left + Fraction(u + 1, 1 << more) <= mass * exp_bounds(low - power, bits + 40)[0]:
                return k
        (e, bits), (u, more) = grown(words, e, bits), grown(words, u, more)
