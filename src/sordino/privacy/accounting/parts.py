"""What all accountants share: the normal form of a composition, and searches over many clients at once.

Events of one kind, rate and noise add their counts; full-batch Gaussians merge exactly into one, with
z = (Σ count/z²)^(-1/2); releases under infinite noise vanish. Two clients with the same normal form and the same δ
spend the same ε, so it is computed once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sordino.errors import BadInput
from sordino.privacy.types import Adjacency, Event, Scheme

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Cost = Callable[[Indices, Floats], Floats]

LARGEST_COUNT = 10**12
# Costs are compared with a hair less than the target, so that float noise in a later recomputation cannot overdraw.
SAFETY = 1e-6
_ROUNDS = 60
_WIDEST = 30.0


class Kind(StrEnum):
    """A pair of output distributions (P with the record, Q without it) that dominates every neighbouring pair."""

    GAUSSIAN = "gaussian"
    POISSON = "poisson"
    EXCHANGE = "poisson-exchange"
    FIXED = "fixed"


class Part(NamedTuple):
    """One kind of release: ``times`` draws at ``rate`` (q) under noise of ``noise`` (z) times the sensitivity."""

    kind: Kind
    rate: float
    noise: float
    times: int


Composition = tuple[Part, ...]


def _kind(event: Event) -> Kind:
    if event.sampling.rate == 1.0 or event.sampling.scheme is Scheme.FULL:
        return Kind.GAUSSIAN
    if event.sampling.scheme is Scheme.FIXED:
        return Kind.FIXED
    return Kind.EXCHANGE if event.adjacency is Adjacency.REPLACE_ONE else Kind.POISSON


def normal_form(events: Sequence[Event]) -> Composition:
    """The sorted parts of a composition; a part of noise 0 means that the composition is not private."""
    adjacencies = sorted({event.adjacency.value for event in events})
    if len(adjacencies) > 1:
        raise BadInput(
            f"events of adjacencies {' and '.join(adjacencies)} do not compose into one guarantee: "
            "state all of them under one adjacency"
        )
    counts: dict[tuple[Kind, float, float], int] = {}
    precision = 0.0
    for event in events:
        count = int(event.count)
        if count > LARGEST_COUNT:
            raise BadInput(f"{count} releases of {event.what!r} are more than {LARGEST_COUNT}: lower the count")
        if count == 0 or math.isinf(event.noise):
            continue
        kind = _kind(event)
        if kind is Kind.GAUSSIAN:
            precision += count / event.noise**2 if event.noise > 1e-150 else math.inf
        else:
            key = (kind, event.sampling.rate, event.noise)
            counts[key] = counts.get(key, 0) + count
    parts = [Part(kind, rate, noise, count) for (kind, rate, noise), count in counts.items()]
    if precision > 0.0:
        parts.append(Part(Kind.GAUSSIAN, 1.0, precision**-0.5, 1))
    return tuple(sorted(parts))


def scaled(composition: Composition, scale: float) -> Composition:
    """The composition with every noise multiplied by ``scale``."""
    return tuple(part._replace(noise=part.noise * scale) for part in composition)


@dataclass(frozen=True)
class PartTable:
    """Many compositions as columns, one row per part, so that formulas run over all clients at once."""

    owner: NDArray[np.int64]
    kind: NDArray[np.str_]
    rate: Floats
    noise: Floats
    times: Floats
    clients: int

    def total(self, values: Floats) -> Floats:
        """Σ over each client's parts of ``values`` (one per part)."""
        return np.asarray(np.bincount(self.owner, weights=values, minlength=self.clients), dtype=float)


def table(compositions: Sequence[Composition]) -> PartTable:
    """The compositions as one table; every composition has at least one part."""
    rows = [(i, part) for i, composition in enumerate(compositions) for part in composition]
    return PartTable(
        owner=np.array([i for i, _ in rows], dtype=np.int64),
        kind=np.array([part.kind.value for _, part in rows]),
        rate=np.array([part.rate for _, part in rows], dtype=float),
        noise=np.array([part.noise for _, part in rows], dtype=float),
        times=np.array([part.times for _, part in rows], dtype=float),
        clients=len(compositions),
    )


def halved(
    enough: Callable[[Floats], ArrayLike],
    low: ArrayLike,
    high: ArrayLike,
    rounds: int,
    geometric: bool = False,
    precision: float = 0.0,
) -> tuple[Floats, Floats]:
    """(low, high) after so many halvings, or when they agree to ``precision``: high is enough, low is not (or unseen).

    ``geometric``: the middle is √(low·high) in place of (low + high)/2.
    """
    low, high = np.asarray(low, dtype=float), np.asarray(high, dtype=float)
    for _ in range(rounds):
        middle = np.sqrt(low * high) if geometric else (low + high) / 2
        fits = enough(middle)
        low, high = np.where(fits, low, middle), np.where(fits, middle, high)
        if np.all(high - low <= precision * high):
            break
    return low, high


def smallest_scale(cost: Cost, target: Floats, start: Floats, slope: Floats, tolerance: float) -> Floats:
    """For each client the smallest scale s with cost(s) ≤ target, to ``tolerance`` of the target.

    Parameters
    ----------
    cost: (indices of clients, their scales) → ε. Falls as the scale grows.
    start, slope: where to look first, and d ln ε/d ln s there; a bad guess costs evaluations, not correctness.
    tolerance: stop when (1 − tolerance)·target ≤ ε ≤ target.

    Guarantees: every returned scale was evaluated and costs at most (1 − 1e-6)·target.
    """
    goal = target * (1 - SAFETY)
    slope = slope.copy()
    aim = np.log(target) + np.log1p(-0.4 * tolerance)
    x = np.log(start)
    low, high = np.full(x.shape, -np.inf), np.full(x.shape, np.inf)
    before_x, before_off = np.full(x.shape, np.nan), np.full(x.shape, np.nan)
    active = np.arange(x.size, dtype=np.int64)
    for _ in range(_ROUNDS):
        at = x[active]
        spent = cost(active, np.exp(at))
        off = np.log(np.maximum(spent, 1e-3 * target[active])) - aim[active]
        fits = spent <= goal[active]
        high[active] = np.where(fits, at, high[active])
        low[active] = np.where(fits, low[active], at)
        moved = at - before_x[active]
        secant = (off - before_off[active]) / np.where(np.abs(moved) > 1e-9, moved, np.nan)
        slope[active] = np.where(np.isfinite(secant), np.clip(secant, -12.0, -0.2), slope[active])
        before_x[active], before_off[active] = at, off
        done = fits & (spent >= (1 - tolerance) * target[active])
        done |= (high[active] - low[active] < 0.02 * tolerance) | (fits & (at < -_WIDEST))
        step = np.clip(-off / slope[active], -0.7, 0.7)
        x[active] = _inside(at + step, low[active], high[active])
        active = active[~done]
        if not active.size:
            return np.asarray(np.exp(high))
        if np.any(x[active] > _WIDEST):
            break
    raise BadInput("no amount of noise meets this ε with this accountant: raise epsilon or use accountant='pld'")


def _inside(x: Floats, low: Floats, high: Floats) -> Floats:
    """``x`` where it falls well inside the bracket, else the middle; on an open side, a step that still moves."""
    closed = np.isfinite(low) & np.isfinite(high)
    room = np.where(closed, 0.02 * (np.where(closed, high, 1.0) - np.where(closed, low, 0.0)), 1e-5)
    good = (x > low + room) & (x < high - room)
    middle = np.where(closed, (np.where(closed, low, 0.0) + np.where(closed, high, 0.0)) / 2, x)
    middle = np.where(np.isfinite(low) & ~closed, low + 1e-4, middle)
    middle = np.where(np.isfinite(high) & ~closed, high - 1e-4, middle)
    return np.where(good, x, middle)


def most_that_fit(most: int, fits: Callable[[int], bool]) -> int:
    """The largest m ≤ ``most`` that fits, where everything below one that fits does too; 0 where not even 1 does."""
    if most == 0 or fits(most):
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
