"""What noisy counts say: shares and quantiles with intervals, from tables whose total and noise are public.

A table has m cells; every record is in exactly one of them, so the true counts add up to the public number of records
n. The noisy counts y_i = x_i + N(0, σ²) are first moved to that total, x̂_i = y_i − (Σy − n)/m, which is least squares
under what is known. A sum of cells aᵀx̂ then has the noise variance σ²(‖a‖² − (Σa)²/m). Intervals hold with 95 % and
contain both the noise and the sampling of n records from those that the table speaks for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SURE = 1.96
"""How many deviations an interval of 95 % has on either side."""


@dataclass(frozen=True)
class Estimate:
    """A figure and the interval that holds the truth with 95 %; ``None`` ends are open."""

    value: float
    low: float | None
    high: float | None

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"value": self.value, "low": self.low, "high": self.high}


@dataclass(frozen=True)
class Counts:
    """The cells of one table, moved to the public total ``records`` (n); ``deviation`` (σ) is each noisy cell's."""

    cells: Floats
    records: int
    deviation: float

    @classmethod
    def settled(cls, noisy: Floats, records: int, deviation: float) -> Counts:
        """x̂ = y − (Σy − n)/m."""
        return cls(noisy - (noisy.sum() - records) / len(noisy), records, deviation)

    def variance(self, weights: Floats) -> float:
        """The noise variance of Σ a_i x̂_i: σ²(‖a‖² − (Σa)²/m)."""
        spread = float(weights @ weights) - float(weights.sum()) ** 2 / len(weights)
        return self.deviation**2 * max(0.0, spread)

    def share(self, chosen: Sequence[int]) -> Estimate:
        """The share of records in the chosen cells."""
        weights = np.zeros(len(self.cells))
        weights[list(chosen)] = 1.0
        return share_of(float(weights @ self.cells) / self.records, self.records, self.variance(weights))


def share_of(found: float, records: int, variance: float) -> Estimate:
    """The interval of a share p whose estimate p̂ has variance p(1 − p)/n + v/n², v the noise variance of its count.

    The p with |p̂ − p| ≤ 1.96·√(p(1 − p)/n + v/n²): Wilson's interval with noise, a quadratic in p,
    (1 + w)p² − (2p̂ + w)p + p̂² − 1.96²·v/n² ≤ 0 with w = 1.96²/n. Value and ends are cut to [0, 1].
    """
    w, noise = SURE**2 / records, SURE**2 * variance / records**2
    a, b, c = 1 + w, -(2 * found + w), found * found - noise
    root = math.sqrt(max(0.0, b * b - 4 * a * c))
    low, high = (-b - root) / (2 * a), (-b + root) / (2 * a)
    return Estimate(*(min(1.0, max(0.0, float(one))) for one in (found, low, high)))


def quantiles(table: Counts, edges: Floats, levels: Sequence[float]) -> list[Estimate]:
    """Quantiles of a table whose first cells are: below edges[0], the bins between edges, above the last edge.

    With c_j the cumulative count up to edge j and N the count of all these cells, the estimate at level p is where the
    isotonic fit of c, cut to [0, N], reaches p·N, linear within a bin. D_j = c_j − p·N has a mean ≥ 0 at every edge
    above the true quantile and ≤ 0 at every edge below it; its deviation s_j is that of its noise and of sampling,
    N·p(1 − p). The interval begins one edge before the first with D_j ≥ −1.96 s_j and ends one edge after the last
    with D_j ≤ 1.96 s_j: either end is wrong with 2.5 %. An end is open where the declared range does not reach it.
    """
    from sklearn.isotonic import isotonic_regression

    size, inner = len(edges) + 1, len(edges)
    present = np.zeros(len(table.cells))
    present[:size] = 1.0
    total = max(1.0, float(present @ table.cells))
    upto = np.zeros((inner, len(table.cells)))
    for j in range(inner):
        upto[j, : j + 1] = 1.0
    cumulative = upto @ table.cells
    fit = isotonic_regression(cumulative, y_min=0.0, y_max=total)
    found = []
    for level in levels:
        value = float(np.interp(level * total, fit, edges)) if fit[0] < fit[-1] else float(edges[0])
        value = float(edges[0]) if level * total <= fit[0] else float(edges[-1]) if level * total >= fit[-1] else value
        functionals = upto - level * present
        far = functionals @ table.cells
        sampling = total * level * (1 - level)
        allowed = SURE * np.sqrt([table.variance(one) + sampling for one in functionals])
        first = int(np.argmax(np.append(far >= -allowed, True))) - 1
        last = inner - int(np.argmax(np.append((far <= allowed)[::-1], True)))
        low = float(edges[first]) if first >= 0 else None
        high = float(edges[last]) if last < inner else None
        value = value if low is None else max(low, value)
        found.append(Estimate(value if high is None else min(high, value), low, high))
    return found


def worth_pooling(sizes: Sequence[int], deviations: Sequence[float]) -> list[int]:
    """The sites whose tables are added up: those that make a share's variance, (Σσ_i² + N/4)/N², smallest.

    N is the sum of their sizes, N/4 the most that sampling adds. Public facts alone decide. A site that adds much noise
    for few records would drown the others. The best set holds the sites with σ_i²/n_i below some value: with v the
    smallest value and N* its size, A(S) − v·N(S)² ≥ 0 has its zero there, and so has A(S) − v(2N*·N(S) − N*²), which
    is no smaller and is least where every site with a negative term is taken.
    """
    order = sorted(range(len(sizes)), key=lambda i: (deviations[i] ** 2 / sizes[i], i))
    records = np.cumsum([float(sizes[i]) for i in order])
    variance = (np.cumsum([deviations[i] ** 2 for i in order]) + records / 4) / records**2
    return sorted(order[: int(np.argmin(variance)) + 1])
