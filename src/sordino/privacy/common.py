"""The lattice that all sites of a sum share, as one of them uses it; with it, what its noise is worth.

Sites send integers that are added up, so all of them count in the same step γ: site i's weighted mean w_i ḡ_i is
rounded to multiples of γ record by record, which is its own sum Σ a_j g_j on the lattice of step γ b_i/w_i. Its noise
is a discrete Gaussian of deviation s steps, the same for every site (``discrete``). Where h sites' noise is left, a
record of site i is hidden by z_i = √h · s · u/(S Δ), with u the step in units of the bound C and
Δ = 1 + 10⁻⁶ + u√d/2 the most that a record moves the sum, rounding included; S is 2 under replace-one.

What one site can spoil
-----------------------
A site's part is at most w_i C·m/b_i long for a batch of m records, each clipped to C, and m is b_i on average.
``within`` holds it to a public ceiling of 2b + 100 records' worth, whatever happens before the gate. A batch of
independent coins is larger with a probability below 10⁻⁵⁴, for every b (Chernoff: exp(−b·((1+t)ln(1+t) − t)) with
t = 1 + 100/b, largest near b = 70), so honest batches are not cut and the sensitivity above is what holds. Were one:
projecting to a ball is 1-Lipschitz, rounding the result moves each of two sums by at most √d/2 steps, and the
sensitivity would be Δ + u√d, a millionth more; all of that costs less than (1 + e^ε)·10⁻⁵⁴ in δ. To leave records out
instead would cost the same, and lose them. Whoever does not run this code is not held by it: a site that lies can send
any integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sordino.privacy.lattice import Lattice


@dataclass(frozen=True)
class Common:
    """The common lattice in one client's own sum of one part.

    Attributes
    ----------
    step: u = γ b/(w C), its step in units of the part's bound. deviation: s, own noise in steps; 0 at a public site.
    """

    step: float
    deviation: float

    def lattice(self, bound: float, width: int) -> Lattice:
        """The lattice for terms clipped to ``bound`` in ``width`` coordinates."""
        return Lattice(bound, width, bound * self.step)

    def multiplier(self, width: int, shares: int, sensitivity: float) -> float:
        """z = √h · s · u/(S Δ): what ``shares`` (h) sites' noise is worth to this client; ``sensitivity`` is S."""
        moved = sensitivity * self.lattice(1.0, width).sensitivity
        return math.sqrt(shares) * self.deviation * self.step / moved


def largest(batch: float) -> float:
    """More records than a batch ever has whose expected size is b: 2b + 100."""
    return 2.0 * batch + 100.0


def ceiling(lattice: Lattice, batch: float) -> float:
    """The longest that a site's sum may be, in steps: what 2b + 100 records may add; b is the expected ``batch``."""
    return largest(batch) * lattice.sensitivity / lattice.step


def within(units: Tensor, longest: float) -> Tensor:
    """Integers, projected to a ball and rounded again where they lie outside."""
    length = float(torch.linalg.vector_norm(units))
    return units if length <= longest else (units * (longest / length)).round()
