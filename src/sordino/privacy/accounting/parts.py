"""The normal form of a composition: what the accountants compute with, and what equal clients share.

Events of one kind, rate and noise add their counts; full-batch Gaussians merge exactly into one, with
z = (Σ count/z²)^(-1/2); releases under infinite noise vanish. Two clients with the same normal form and the same δ
spend the same ε, so it is computed once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sordino.errors import BadInput
from sordino.privacy.types import Adjacency, Event, Scheme

Floats = NDArray[np.float64]

LARGEST_COUNT = 10**12


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
class Table:
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


def table(compositions: Sequence[Composition]) -> Table:
    """The compositions as one table; every composition has at least one part."""
    rows = [(i, part) for i, composition in enumerate(compositions) for part in composition]
    return Table(
        owner=np.array([i for i, _ in rows], dtype=np.int64),
        kind=np.array([part.kind.value for _, part in rows]),
        rate=np.array([part.rate for _, part in rows], dtype=float),
        noise=np.array([part.noise for _, part in rows], dtype=float),
        times=np.array([part.times for _, part in rows], dtype=float),
        clients=len(compositions),
    )
