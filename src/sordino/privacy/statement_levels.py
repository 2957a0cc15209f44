"""Levels of consent in statements: what every group of a client's records allows and has spent."""

from __future__ import annotations

import math
from typing import Any

from sordino.privacy.book import Account, number
from sordino.privacy.ledger import Ledger
from sordino.privacy.words import epsilon_in_words


def levels_of(ledger: Ledger, names: list[str]) -> dict[str, dict[str, Any]]:
    """By account of a group of records: which group of whose, and what all of that client's groups have spent."""
    accounts = {account.client: account for account in ledger.accounts()}
    owners = {accounts[name].owner for name in names} - {""}
    every = [account for account in accounts.values() if account.owner in owners]
    costs = ledger.epsilon([account.client for account in every])
    rows: dict[str, list[dict[str, Any]]] = {owner: [] for owner in owners}
    for account in sorted(every, key=lambda one: one.budget.epsilon):
        spent = math.inf if account.not_private else costs[account.client]
        figures = {"epsilon": number(account.budget.epsilon), "spent_epsilon": number(spent)}
        rows[account.owner].append({"level": _level_of(account), **figures})
    return {
        name: {"of": owner, "level": _level_of(accounts[name]), "levels": rows[owner]}
        for name in names
        if (owner := accounts[name].owner)
    }


def _level_of(account: Account) -> str:
    """The name of the group that an account is for."""
    return account.client.removeprefix(account.owner).removeprefix(" (").removesuffix(")")


def levels_in_words(levels: dict[str, Any] | None, unit: str, units: str) -> list[str]:
    """What the records of every level allow and have spent, and which of it holds for whom."""
    if levels is None:
        return []
    rows = levels["levels"]
    width = max(len(one["level"]) for one in rows) + 1
    spent = [math.inf if one["spent_epsilon"] is None else one["spent_epsilon"] for one in rows]
    return [
        "",
        "Levels of consent, each with an account of its own:",
        *(
            f"  {one['level'] + ':':<{width}}  epsilon {epsilon_in_words(one['spent_epsilon'])} of {one['epsilon']:.6g}"
            for one in rows
        ),
        f"  A {unit} has one level for life and spends nothing of the others' accounts, so its epsilon is that of its",
        f"  own level; for any {unit}, not knowing its level, the largest holds: epsilon "
        f"{epsilon_in_words(number(max(spent)))}.",
        f"  How many {units} have each level is public; which ones have which is not.",
    ]
