"""Levels of consent in plans and results: what each level of a client may spend, will spend and has spent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from sordino.methods.plan import ClientPlan, Plan


def planned_levels(client: ClientPlan) -> list[dict[str, Any]]:
    """Per level with records, the strictest first: its ε, how many records, the rate, what the plan costs it."""
    return [
        {
            "level": one.level.name,
            "records": one.level.records,
            "epsilon": one.budget.epsilon,
            "rate": group.rate,
            "planned_epsilon": one.epsilon,
        }
        for one, group in zip(client.levels, client.terms.groups, strict=True)
    ]


def spent_levels(client: ClientPlan, spent: Mapping[str, float], here: Mapping[str, float]) -> list[dict[str, Any]]:
    """The same after a run, by what the ledger says that every account has spent, in all and in this run."""
    return [
        {
            **{key: one[key] for key in ("level", "records", "epsilon", "rate")},
            "spent_epsilon": spent[account],
            "run_epsilon": here[account],
        }
        for one, account in zip(planned_levels(client), client.accounts, strict=True)
    ]


def levels_table(clients: Sequence[Mapping[str, Any]], shown: int) -> Table | None:
    """The levels of the first clients that have some, for a terminal; None where nobody has any."""
    rows = [(one["client"], level) for one in clients for level in one.get("levels", ())]
    if not rows:
        return None
    table = Table(title="levels of consent: one noise, rates of their own", box=SIMPLE_HEAD, header_style="bold")
    for column in ("client", "level", "n", "ε", "rate", "planned ε"):
        table.add_column(column, justify="left" if column in ("client", "level") else "right")
    for client, level in rows[:shown]:
        figures = (f"{level['epsilon']:.3g}", f"{level['rate']:.4g}", _number(level["planned_epsilon"]))
        table.add_row(client, level["level"], str(level["records"]), *figures)
    if len(rows) > shown:
        table.caption = f"…and {len(rows) - shown} more (--json lists all)"
    return table


def levels_warnings(plan: Plan) -> list[str]:
    """Levels that cannot use what they allow: already every batch has all of their records."""
    found = [
        f"client {c.name}: records of level {one['level']!r} are in every batch and spend ε = "
        f"{one['planned_epsilon']:.3g} of {one['epsilon']:.3g}; a smaller training.rate would use more of it"
        for c in plan.clients
        for one in planned_levels(c)
        if one["rate"] == 1.0 and one["planned_epsilon"] < 0.9 * one["epsilon"]
    ]
    return found[:3] + ([f"…and {len(found) - 3} more levels like these"] if len(found) > 3 else [])


def _number(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:.4g}"
