"""The attacker's view of a ledger's accounts: what it can do at best with all that was released, told and in words."""

from __future__ import annotations

import math
from typing import Any

from sordino.privacy.accounting.attack import NOTHING, Attack
from sordino.privacy.held import HELD
from sordino.privacy.ledger import Ledger


def attack_on_either(ledger: Ledger, clients: list[str]) -> dict[str, dict[str, Any] | None]:
    """By client, the best that an attacker can do; of the worse of its two accounts where records are held out.

    None where nothing is promised to anybody.
    """
    known = {account.client for account in ledger.accounts()}
    both = [*clients, *(name + HELD for name in clients if name + HELD in known)]
    found, told = attacks(ledger, both), {}
    for name in clients:
        own, other = found[name], found.get(name + HELD, NOTHING)
        told[name] = None if own is None or other is None else own.or_worse(other).told()
    return told


def attacks(ledger: Ledger, names: list[str]) -> dict[str, Attack | None]:
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
