"""The batches of a turn, from all of a client's records alike or from each group of them at its own rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from sordino.privacy.gate import Terms
from sordino.privacy.generators import Batches, Draw, Indices, Source, Turn
from sordino.privacy.types import Sampling

Members = Mapping[str, Indices]
"""By a group's name the positions of its records among the client's; known to the client alone."""


def draws_of(turn: Turn, terms: Terms, records: int) -> list[Draw]:
    """What the source is asked for: one draw, or one for every group, whose stream bears the group's name."""
    if not terms.groups:
        return [(turn, terms.what, terms.sampling, records, terms.count)]
    scheme = terms.sampling.scheme
    return [
        (turn, terms.what + one.suffix, Sampling(scheme, one.rate), one.records, terms.count) for one in terms.groups
    ]


def draw_batches(source: Source, turn: Turn, terms: Terms, records: int, members: Members | None = None) -> Batches:
    """``terms.count`` batches of positions among a client's ``records`` records.

    Guarantees: a record of a group is in a batch by a coin of its own with the group's rate; without groups this is
    exactly what the source draws. The members are as many as the terms say, or nothing is drawn.
    """
    drawn = [source.batches(*one) for one in draws_of(turn, terms, records)]
    if not terms.groups:
        return drawn[0]
    own = members or {}
    for one in terms.groups:
        if len(own.get(one.name, ())) != one.records:
            raise ValueError(f"group {one.name!r} has {len(own.get(one.name, ()))} records, not {one.records}")
    return joined_batches([part.of(own[one.name]) for part, one in zip(drawn, terms.groups)])


def joined_batches(parts: Sequence[Batches]) -> Batches:
    """Batch k of every part together, its records in order."""
    lengths = [np.diff(one.ends, prepend=0) for one in parts]
    steps = np.concatenate([np.repeat(np.arange(len(one)), size) for one, size in zip(parts, lengths)])
    positions = np.concatenate([one.positions for one in parts])
    return Batches(positions[np.lexsort((positions, steps))], np.cumsum(np.sum(lengths, axis=0)))
