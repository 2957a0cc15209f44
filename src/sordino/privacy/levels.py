"""Levels of consent: people at one site who agree to different ε.

A level is public and fixed for life: what it is called, its ε, and how many of a site's records have it; which records
they are is known to the site alone. A record whose level is missing, or is none of the declared ones, has the
strictest. All levels share one noise and one clipping radius; each is sampled at a rate of its own
(``accounting.rates``) and has an account of its own (``groups``). Neighbouring data sets differ in one record, whose
level stays what it was.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sordino.errors import BadInput
from sordino.privacy.groups import check_group_name, suffix_of
from sordino.privacy.types import Budget


@dataclass(frozen=True)
class Level:
    """What some of a client's records allow: (ε, δ), and how many they are. All of it is public."""

    name: str
    budget: Budget
    records: int

    @property
    def suffix(self) -> str:
        """What the level's account is called, after the client's own."""
        return suffix_of(self.name)


Levels = tuple[Level, ...]
"""The levels of one client, the strictest first; empty where all of its records have one budget."""


def check_levels(given: Mapping[str, float], where: str) -> dict[str, float]:
    """ε by level, the strictest first; refuses names that no account can bear, and an ε that is no promise."""
    if not given:
        raise BadInput(f"{where} is empty: name at least one level and its ε, such as {{strict = 0.5, generous = 4.0}}")
    for name, epsilon in given.items():
        if not isinstance(name, str) or not name:
            raise BadInput(f"{where} has a level called {name!r}: a level has a name, a word of its column")
        check_group_name(name)
        number = isinstance(epsilon, (int, float)) and not isinstance(epsilon, bool)
        if not number or not (math.isfinite(epsilon) and epsilon > 0):
            raise BadInput(f"{where}.{name} = {epsilon!r}: a level promises a positive, finite ε")
    return {name: float(given[name]) for name in sorted(given, key=lambda one: (given[one], one))}


def level_places(words: Iterable[object], levels: Mapping[str, float]) -> NDArray[np.int64]:
    """For every record the place of its level among ``levels``, which are the strictest first.

    Guarantees: a record is of the strictest level unless its word is exactly the name of another one, spaces around it
    aside; of several words (a tuple) the strictest counts.
    """
    places = {name: place for place, name in enumerate(levels)}

    def place(one: object) -> int:
        if isinstance(one, tuple):
            return min(map(place, one), default=0)
        return 0 if one is None else places.get(str(one).strip(), 0)

    return np.array([place(one) for one in words], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Consent:
    """Which level every record has: ε by level, the strictest first, and the place of each record's among them.

    Who has which level stays with whoever has the records; how many have each is public.
    """

    epsilons: Mapping[str, float]
    places: NDArray[np.int64]

    @classmethod
    def of_words(cls, words: Iterable[object], levels: Mapping[str, float], where: str) -> Consent:
        """From a word a record: whatever is no declared level is the strictest."""
        epsilons = check_levels(levels, where)
        return cls(epsilons, level_places(words, epsilons))

    def of(self, some: NDArray[Any]) -> Consent:
        """The same for some of the records."""
        return Consent(self.epsilons, self.places[some])

    def of_units(self, table: NDArray[np.int64]) -> Consent:
        """The levels of units of several records, whose places are the rows of ``table``, −1 behind the last.

        A person whose records differ is of the strictest of their levels.
        """
        return Consent(self.epsilons, np.where(table < 0, len(self.epsilons), self.places[table]).min(axis=1))

    def levels(self, budget: Budget) -> Levels:
        """What the records allow, and how many each; δ and adjacency are the budget's."""
        counts = np.bincount(self.places, minlength=len(self.epsilons)).tolist()
        return tuple(
            Level(name, replace(budget, epsilon=epsilon), count)
            for (name, epsilon), count in zip(self.epsilons.items(), counts)
        )

    @property
    def members(self) -> dict[str, NDArray[np.int64]]:
        """By level which records have it."""
        return {name: np.flatnonzero(self.places == place) for place, name in enumerate(self.epsilons)}

    def committed(self, commit: Callable[[bytes], str]) -> Callable[[bytes], str]:
        """A commitment to records and to who has which level: a record that changed its level is another record."""
        body = json.dumps(list(self.epsilons)).encode() + self.places.astype("<i8").tobytes()
        return lambda salt: commit(salt) + LEVELLED + hashlib.sha256(salt + body).hexdigest()


LEVELLED = " levels "
"""What stands in a commitment to records with levels before the hash of their levels."""


def strictest(levels: Sequence[Level]) -> Budget:
    """What every record allows, whatever its level: the smallest ε of all that are declared."""
    return min((one.budget for one in levels), key=lambda budget: budget.epsilon)


def present(levels: Sequence[Level]) -> Levels:
    """The levels that some record has."""
    return tuple(one for one in levels if one.records)
