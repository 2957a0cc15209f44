"""The attacker's view of a ledger's accounts: what it can do at best with all that was released, told and in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

from sordino.privacy.accounting.attack import NOTHING, Attack
from sordino.privacy.ledger import Ledger


def worst_attack(ledger: Ledger, accounts: Sequence[str]) -> dict[str, Any] | None:
    """The best that an attacker can do to any record of these accounts, each of which is in one; the worst of them.

    None where nothing is promised to some of them.
    """
    return worst_of(list(attacks(ledger, accounts).values()))


def worst_of(found: Sequence[Attack | None]) -> dict[str, Any] | None:
    """The worst of these attacks, as a result tells it; None where nothing is promised to some."""
    known = [one for one in found if one is not None]
    return reduce(Attack.or_worse, known, NOTHING).told() if len(known) == len(found) else None


def attacks(ledger: Ledger, names: Sequence[str]) -> dict[str, Attack | None]:
    """By account, the best that an attacker can do; None where nothing is promised."""
    whose = {name: ledger.account(name) for name in names}
    asked = [name for name, one in whose.items() if not (one.budget.is_public or one.not_private)]
    found = ledger.attack(asked)
    return {name: found.get(name) for name in names}


def attack_in_words(attack: dict[str, Any] | None, unit: str) -> list[str]:
    """The attacker's view, in two lines; rounded so that it never looks better than it is."""
    if attack is None:
        return []
    basis = "" if attack["from"] == "releases" else " (from epsilon and delta alone)"
    wrong = f"{100 * attack['false_positives']:g} %"
    return [
        f"Attacker's view: guesses whether a {unit} was used: right at most {at_most(attack['success'])} of the time, "
        f"where chance is 50 %{basis}",
        f"  if it may be wrong about {wrong} of the {unit}s that were not used, it finds at most "
        f"{at_most(attack['true_positives'])} of those that were",
    ]


def at_most(share: float) -> str:
    """A share in percent that never looks smaller than it is: rounded up to a tenth."""
    return f"{math.ceil(1000 * min(share, 1.0) - 1e-9) / 10:g} %"
