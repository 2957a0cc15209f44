"""Units of privacy: whose a record is. A patient with five visits is sampled, clipped, counted and held out as one.

Of a unit with more than the public cap m of records, m are kept by a hash of the unit's id and the record's place among
the unit's own: not by their order, and not by what they say. Which are kept concerns that unit alone, so the hash needs
no secret.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sordino.data.partitions import Index
from sordino.errors import BadInput

UNIT_RECORDS = 8
"""How many records of a unit are kept where nobody says."""

MOST_RECORDS = 256
"""The largest cap: a site computes so many gradients for each unit at most."""

UNIT_NAME = "person"
"""What a unit is called where nobody says."""

Bools = npt.NDArray[np.bool_]


def check_unit_records(value: object, key: str) -> int:
    """The public cap m on a unit's records."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_RECORDS:
        raise BadInput(f"{key} is {value!r}: the most records of a unit that count, a whole number 1 … {MOST_RECORDS}")
    return value


def check_unit_name(value: object, key: str) -> str:
    """The word for a unit in plans, statements and reports, in the singular."""
    if not isinstance(value, str) or not value.isprintable() or not 1 <= len(value.strip()) <= 40:
        raise BadInput(f"{key} is {value!r}: it is the word for one unit, such as 'patient'")
    return value.strip()


def kept(units: Index, ids: Sequence[str], most: int) -> Bools:
    """Of every record whether it is among the at most ``most`` of its unit that count.

    Those with the smallest BLAKE2b(id, place), where place counts the unit's own records in the order of the file.
    ``units`` are the numbers of units, ``ids`` their names.
    """
    keep = np.ones(len(ids), dtype=bool)
    table = members(units)
    for own in table[(table >= 0).sum(1) > most]:
        own = own[own >= 0]
        ranked = sorted(range(len(own)), key=lambda place: _digest(ids[own[0]], place))
        keep[own[ranked[most:]]] = False
    return keep


def _digest(unit: str, place: int) -> bytes:
    return hashlib.blake2b(f"{place} {unit}".encode(), key=b"sordino: records of a unit", digest_size=16).digest()


def numbered(ids: Sequence[object] | Index) -> Index:
    """A number for every record: equal for equal ids, counted from 0 in the order in which ids first come."""
    _, first, back = np.unique(np.asarray(ids), return_index=True, return_inverse=True)
    order = np.empty(len(first), dtype=np.int64)
    order[np.argsort(first, kind="stable")] = np.arange(len(first))
    return order[back.reshape(-1)]


def of_clients(units: Index, owners: Index) -> Index:
    """Numbers of (client, unit) pairs: a person with records at two clients is a unit of each."""
    return numbered(owners * (int(units.max(initial=0)) + 1) + units)


def members(units: Index, most: int | None = None) -> Index:
    """The records of every unit, ``[units, m]`` with m the most that any has (or ``most``); −1 behind the last."""
    counts = np.bincount(units, minlength=1) if len(units) else np.zeros(0, dtype=np.int64)
    table = np.full((len(counts), int(counts.max(initial=1)) if most is None else most), -1, dtype=np.int64)
    order = np.argsort(units, kind="stable")
    place = np.arange(len(units)) - np.repeat(np.cumsum(counts) - counts, counts)
    table[units[order], place] = order
    return table


def spoken(words: Sequence[object], units: Index) -> tuple[object, ...]:
    """For every record what its unit said: its word, or all of them where its records differ."""
    said: dict[int, set[object]] = {}
    for unit, one in zip(units.tolist(), words):
        said.setdefault(unit, set()).update(one if isinstance(one, tuple) else (one,))
    every = {unit: own.pop() if len(own) == 1 else tuple(sorted(own, key=str)) for unit, own in said.items()}
    return tuple(every[unit] for unit in units.tolist())


def flat(table: Index) -> Index:
    """The records of these units, unit after unit."""
    return table[table >= 0]
