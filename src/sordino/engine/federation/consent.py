"""Levels of consent at a site: what its records allow by level, which of them are drawn at which rate, what is told.

Both sides use it: a site declares its levels, and a coordinator plans by them. No record's level leaves the site.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sordino.errors import BadInput
from sordino.privacy.ledger import Commit, Ledger
from sordino.privacy.levels import LEVELLED, Consent, Level, Levels
from sordino.privacy.types import Budget


def commitment_of(ledger: Ledger, consent: Consent | None, commit: Commit) -> Commit:
    """What a ledger is tied to: the records and, where they have some, their levels.

    Guarantees: a ledger that was kept for records without levels is not used for records with some, nor the other way
    round: what was spent from one account would not count in the other.
    """
    known = ledger.bindings()
    if known and (LEVELLED in known[-1].commitment) is not (consent is not None):
        told = "without levels of consent" if consent is not None else "with levels of consent"
        raise BadInput(
            f"{ledger.path} was kept for records {told}: what they spent would not count; say [budget] as it was, or "
            "keep a new ledger for records of other people"
        )
    return commit if consent is None else consent.committed(commit)


def trained_levels(
    consent: Consent | None, budget: Budget, held: NDArray[np.bool_] | None
) -> tuple[Levels, dict[str, NDArray[np.int64]] | None]:
    """The levels of the training records, and which of them have which; none and None where there are none."""
    if consent is None:
        return (), None
    trained = consent if held is None else consent.of(~held)
    return trained.levels(budget), trained.members


def offered_levels(levels: Levels, most: float | None) -> Levels:
    """What a run may spend of every level: all of it, or ``most`` where a run is limited."""
    if most is None:
        return levels
    return tuple(replace(one, budget=replace(one.budget, epsilon=min(most, one.budget.epsilon))) for one in levels)


def levels_to_plain(levels: Levels) -> list[list[Any]]:
    """Levels as JSON holds them: name, ε and number of training records of each."""
    return [[one.name, one.budget.epsilon, one.records] for one in levels]


def levels_from_plain(plain: Iterable[Iterable[Any]], budget: Budget) -> Levels:
    """Levels that a site declared, checked before (``declaration``); ``budget`` has δ and adjacency."""
    return tuple(
        Level(str(name), replace(budget, epsilon=float(epsilon)), int(records)) for name, epsilon, records in plain
    )
