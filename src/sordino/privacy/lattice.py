"""The lattice that a site's releases lie on: every record's term is clipped, rounded to it, and added as integers.

Integers add up without rounding, in any order and on any number of threads. So two sums that differ in one record
differ by that record's rounded term and by nothing else, whatever the weights, the other records or the machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sordino.errors import BadInput
from sordino.privacy.threads import unlocked

FINENESS = 16  # a step is at most C·2⁻¹⁶/√d: rounding adds less than a hundred-thousandth to the sensitivity
SLACK = 1e-6  # how much longer than C a clipped term may come out in float64; what it really is, is below 1e-9
MOST_UNITS = 2.0**52  # sums stay where float64 knows every integer


@dataclass(frozen=True)
class Lattice:
    """Multiples of a step γ in ``width`` (d) coordinates, for terms clipped to ``bound`` (C). Public constants only.

    Guarantees: what :meth:`add` adds of a record has norm at most ``sensitivity``/γ, for every vector and factor,
    finite or not.
    """

    bound: float
    width: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bound) and self.bound > 0):
            raise BadInput(f"a bound of {self.bound!r} cannot be kept: it is a positive number")

    @property
    def step(self) -> float:
        """γ: the largest power of two that is at most C·2⁻¹⁶/√d. A power of two scales without rounding."""
        _, exponent = math.frexp(self.bound * 2.0**-FINENESS / math.sqrt(self.width))
        return math.ldexp(1.0, exponent - 1)

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
