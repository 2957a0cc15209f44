"""What people call the runs of a statement: names of studies and their days, in place of hashes."""

from __future__ import annotations

from typing import Any

from sordino.privacy.book import Standing


def named(standing: Standing) -> dict[str, Any]:
    """What people call a run, and from which day to which it released anything; nothing where nobody says."""
    dates = sorted(standing.days)
    when = {"first": dates[0] if dates else None, "last": dates[-1] if dates else None}
    return {"run": standing.plan.run, "study": standing.plan.study or None, **when}


def titles(told: dict[str, Any], dated: bool = True) -> dict[str, str]:
    """By run, what a statement calls it: its study and (``dated``) its days; ``run …`` where the ledger knows no name.

    Runs of one study are numbered in the order they were declared.
    """
    found: dict[str, str] = {}
    names = [one["study"] for one in told["studies"]]
    for place, one in enumerate(told["studies"]):
        if one["study"] is None:
            found[one["run"]] = f"run {one['run']}"
            continue
        which = f", run {names[: place + 1].count(one['study'])}" if names.count(one["study"]) > 1 else ""
        first, last = one["first"], one["last"]
        when = f" ({first})" if first == last else f" ({first} to {last})"
        when = when if dated and first is not None else ""
        found[one["run"]] = f"study {one['study']}{which}{when}"
    return found
