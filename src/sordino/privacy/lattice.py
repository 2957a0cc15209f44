"""The lattice that a site's releases lie on: exact sums, and noise on the integers that is sampled exactly.

Every record's term is clipped, rounded to the lattice, and added as integers, which add up without rounding, in any
order and on any number of threads. So two sums that differ in one record differ by that record's rounded term and by
nothing else, whatever the weights, the other records or the machine.

The noise is ⌊s·X⌉ with X standard normal, tails included. A sum on a lattice plus this noise is the rounding of
(sum + s·X), so it is post-processing of the Gaussian mechanism and every figure of the continuous accountant holds.
Floating-point normals do not have this property: they lie on a grid of their own, which shows through any sum that an
attacker can guess.

How it is drawn
---------------
|X| has density proportional to f(x) = exp(−x²/2). The half line is cut into cells [i·h, (i+1)·h); cell i gets the
integer weight w_i ≥ S·f(i·h), the largest value in it. A number r, uniform below the sum of all weights, picks the
cell, and what is left of it, r − Σ_{k<i} w_k, is uniform below w_i: the point x = (i + v)·h with v uniform is kept
where that is below S·f(x). Both decisions, and the rounding of s·x, are made in float64 with a margin a thousand
times its error; whatever falls inside the margin (about one in a million) is decided with as many binary digits as it
takes, in exact arithmetic. No approximation is left: the result has the distribution above, whatever the machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino.errors import BadInput
from sordino.privacy.envelope import CELLS, CELLS_PER_UNIT, Words, cells, exp_bounds, find, grown, log_bounds
from sordino.privacy.threads import unlocked

FINENESS = 16  # a step is at most C·2⁻¹⁶/√d: rounding adds less than a hundred-thousandth to the sensitivity
SLACK = 1e-6  # how much longer than C a clipped term may come out in float64; what it really is, is below 1e-9
MOST_UNITS = 2.0**52  # sums stay where float64 knows every integer
ROUND_MARGIN = 2.0**-48
ACCEPT_MARGIN = 2.0**-44
LARGEST = 2.0**51  # noise must stay where float64 knows every integer

_DERIVED: Any = None  # a step that follows from bound and width


@dataclass(frozen=True)
class Lattice:
    """Multiples of a step γ in ``width`` (d) coordinates, for terms clipped to ``bound`` (C). Public constants only.

    ``step``: any γ > 0 that a federation agreed on; without one the largest power of two that is at most C·2⁻¹⁶/√d.

    Guarantees: what :meth:`add` adds of a record has norm at most ``sensitivity``/γ, for every vector and factor,
    finite or not.
    """

    bound: float
    width: int
    step: float = _DERIVED

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bound) and self.bound > 0):
            raise BadInput(f"a bound of {self.bound!r} cannot be kept: it is a positive number")
        if self.step is None:
            _, exponent = math.frexp(self.bound * 2.0**-FINENESS / math.sqrt(self.width))
            object.__setattr__(self, "step", math.ldexp(1.0, exponent - 1))
        elif not (math.isfinite(self.step) and self.step > 0):
            raise BadInput(f"a lattice of step {self.step!r} has no points to round to: it is a positive number")

    @property
    def sensitivity(self) -> float:
        """Δ = C(1 + 10⁻⁶) + γ√d/2: the most that one record moves a sum, which is what noise is scaled by."""
        return self.bound * (1 + SLACK) + self.step * math.sqrt(self.width) / 2

    def check_room(self, records: int, deviation: float) -> None:
        """Refuse sums so long, or noise so large, that float64 would not know every integer."""
        if (records + 1) * self.bound / self.step + 40 * deviation >= MOST_UNITS:
            raise BadInput(
                f"{records} records of {self.width} numbers with noise of {deviation:.3g} steps do not fit exact sums: "
                "use smaller batches, or less noise"
            )

    def add(self, total: Tensor, vectors: Tensor, norms: Sequence[float], factors: Sequence[float]) -> None:
        """Add a·vector/γ, rounded to integers, of every row: a = factor·min(1, C/|factor|‖vector‖).

        ``norms`` are the vectors', taken in float64, in which no float32 vector over- or underflows. The bound does not
        rest on them: what is really added is measured first, and left out where it is too long.
        """
        scales = [self._scale(norm, factor) for norm, factor in zip(norms, factors, strict=True)]
        _add_rounded(total, vectors, scales, self.sensitivity / self.step)

    def _scale(self, norm: float, factor: float) -> float:
        """a/γ; 0 where a record adds nothing: its norm or factor is zero, not finite or not a number."""
        size = abs(factor) * norm
        if not 0.0 < size < math.inf:
            return 0.0
        scale = (factor if size <= self.bound else factor * (self.bound / size)) / self.step
        return scale if math.isfinite(scale) else 0.0


def _rounded(total: Tensor, vectors: Tensor, scales: list[float], longest: float) -> None:
    for j in range(vectors.size(0)):
        if scales[j] != 0.0:
            units = vectors[j].to(torch.float64).mul_(scales[j]).round_()
            if float(torch.linalg.vector_norm(units)) <= longest:
                total.add_(units)


_add_rounded = unlocked(_rounded)


def rounded_normals(words: Words, deviation: float, count: int) -> NDArray[np.float64]:
    """``count`` independent draws of ⌊deviation·N(0, 1)⌉, as float64 that holds integers.

    Guarantees: exactly that distribution, if the words are independent and uniform. No value is cut off.
    """
    if not 0.0 <= deviation * 40 < LARGEST:
        raise ValueError(f"a deviation of {deviation!r} steps is not possible: float64 counts to 2^53")
    out = np.zeros(count)
    if deviation == 0.0:
        return out
    missing = np.arange(count)
    while len(missing):
        values, kept = _attempt(words, deviation, len(missing))
        out[missing[kept]] = values[kept]
        missing = missing[~kept]
    return out


def _attempt(words: Words, deviation: float, count: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """One try for each: the values, and which of them were kept."""
    table = cells()
    drawn = words(2 * count)
    first, offset = drawn[:count], drawn[count:]
    negative, mark = (first & np.uint64(1)).astype(bool), first >> np.uint64(1)
    cell = find(table, mark)
    kept = cell < CELLS  # the tail is looked at below; a number beyond the last weight is drawn again
    height = (mark - table.starts[cell]).astype(np.float64)
    x = offset.astype(np.float64)
    x *= 2.0**-64
    x += cell
    x *= 1.0 / CELLS_PER_UNIT
    scaled = x * deviation
    np.square(x, out=x)
    x *= -0.5
    np.exp(x, out=x)
    x *= table.scale
    gap = np.subtract(x, height, out=x)
    whole = np.rint(scaled)
    margin = (scaled + 1) * ROUND_MARGIN
    doubtful = np.abs(scaled - whole) > 0.5 - margin
    doubtful |= np.abs(gap) < table.scale * ACCEPT_MARGIN
    doubtful &= kept
    kept &= gap > 0
    for i in np.flatnonzero(doubtful | (cell == CELLS)):
        left = int(mark[i]) - int(table.starts[cell[i]])
        if cell[i] == CELLS:
            found = _beyond(words, left, deviation)
        else:
            found = _decide(words, int(cell[i]), int(offset[i]), left, deviation)
        kept[i] = found is not None
        whole[i] = 0.0 if found is None else float(found)
    return np.where(negative, -whole, whole), kept


def _decide(words: Words, cell: int, offset: int, left: int, deviation: float) -> int | None:
    """What float64 could not decide, with as many digits as it takes: ⌊deviation·x⌉, or None where x is not kept.

    x = (cell + v)·h with v = offset/2⁶⁴ + digits to come; kept iff left + u < S·f(x) with u uniform digits to come.
    """
    scale, (v, bits), (u, more) = Fraction(cells().scale), (offset, 64), (0, 0)
    while True:
        low, high = (Fraction((cell << bits) + v + k, CELLS_PER_UNIT << bits) for k in (0, 1))
        least = scale * exp_bounds(-high * high / 2, bits + 40)[0]
        most = scale * exp_bounds(-low * low / 2, bits + 40)[1]
        under, over = left + Fraction(u, 1 << more), left + Fraction(u + 1, 1 << more)
        if under >= most:
            return None
        rounded = _nearest(Fraction(deviation) * low), _nearest(Fraction(deviation) * high)
        if over <= least and rounded[0] == rounded[1]:
            return rounded[0]
        (v, bits), (u, more) = grown(words, v, bits), grown(words, u, more)


def _beyond(words: Words, left: int, deviation: float) -> int | None:
    """A point of the tail x ≥ R, or None where it is not kept.

    x = R + E/R with E exponential has the density R·exp(−E), and f(x) = f(R)·exp(−E)·exp(−E²/(2R²)): kept iff
    left + u is below S·f(R)/(R·h), the envelope's mass, times that last factor. E = −ln(a uniform number), by intervals
    that shrink until the decision is clear.
    """
    edge = Fraction(CELLS, CELLS_PER_UNIT)
    mass = Fraction(cells().scale) * CELLS_PER_UNIT / edge
    (e, bits), (u, more) = grown(words, 0, 0), grown(words, 0, 0)
    while True:
        if e == 0:  # not bounded yet
            e, bits = grown(words, e, bits)
            continue
        low = log_bounds(Fraction(1 << bits, e + 1), bits + 40)[0]
        high = log_bounds(Fraction(1 << bits, e), bits + 40)[1]
        least = mass * exp_bounds(-(edge * edge + (high / edge) ** 2) / 2, bits + 40)[0]
        most = mass * exp_bounds(-(edge * edge + (low / edge) ** 2) / 2, bits + 40)[1]
        if left + Fraction(u, 1 << more) >= most:
            return None
        ends = [_nearest(Fraction(deviation) * (edge + one / edge)) for one in (low, high)]
        if left + Fraction(u + 1, 1 << more) <= least and ends[0] == ends[1]:
            return ends[0]
        (e, bits), (u, more) = grown(words, e, bits), grown(words, u, more)


def _nearest(value: Fraction) -> int:
    return math.floor(value + Fraction(1, 2))
