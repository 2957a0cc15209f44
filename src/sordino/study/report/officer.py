"""The officer's page: one file about a ledger, for whoever answers for it. Studies and days, no hashes to decipher."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sordino.privacy.attacker import at_most
from sordino.privacy.ledger import Ledger
from sordino.privacy.statement import OVERDRAWN, SIMULATION, export, plan_in_words, release_in_words, statement_text
from sordino.privacy.titles import titles
from sordino.study.report.numbers import MISSING, as_epsilon, plain
from sordino.study.report.page import filled, write_page

Told = dict[str, Any]
"""One account's statement, as ``privacy.statement`` tells it."""


def write_officer(ledger: Ledger, path: str | os.PathLike[str], clients: list[str] | None = None) -> Path:
    """Write the page of a ledger, or of some of its accounts, to ``path``: one file that works offline."""
    return write_page(render_officer(ledger, clients), path)


def render_officer(ledger: Ledger, clients: list[str] | None = None) -> str:
    """The page as one HTML document.

    Guarantees
    ----------
    An account that is NOT PRIVATE, simulated, or overdrew its filter is named as such on the first screen.
    """
    every = export(ledger, clients)
    told: list[Told] = every["statements"]
    units = {one["unit_name"] for one in told}
    names = [one["client"] for one in told]
    return filled(
        "officer.html",
        title=names[0] if len(names) == 1 else f"{every['ledger']['file']}: {len(names)} accounts",
        verdicts=_verdicts(told),
        several=any(one["held_out"] for one in told),
        units=f"{units.pop()}s" if len(units) == 1 else "units",
        accounts=[_account(one) for one in told],
        filtered=any(one["composition"].startswith("filter") for one in told),
        days=[row for one in told for row in _days(ledger, one)],
        releases=[_line(one, r["run"], release_in_words(r, one["unit_name"])) for one in told for r in one["releases"]],
        plans=[_line(one, p["run"], plan_in_words(p)) for one in told for p in one["open_plans"]],
        decisions=_decisions(told),
        not_covered=list(dict.fromkeys(line for one in told for line in one["not_covered"])),
        statements=[{"client": one["client"], "text": statement_text(one)} for one in told],
        file=every["ledger"]["file"],
        entries=every["ledger"]["entries"],
        head=every["ledger"]["head"],
        drawing=False,
        data={"charts": []},
    )


def _verdicts(told: Sequence[Told]) -> list[dict[str, Any]]:
    """What became of the promises, bad news first."""
    kinds: dict[tuple[bool, str, str], list[str]] = {}
    for one in told:
        kinds.setdefault(_verdict(one), []).append(one["client"])
    shown = sorted(kinds.items(), key=lambda item: item[0][0])
    return [
        {"good": good, "headline": headline, "words": words, "names": _few(names)}
        for (good, headline, words), names in shown
    ]


def _verdict(one: Told) -> tuple[bool, str, str]:
    if not one["private"]:
        return False, "NOT PRIVATE", f"Nothing is guaranteed: {'; '.join(one['not_private'])}."
    if one["public"]:
        return False, "PUBLIC DATA", "Declared public (ε = ∞): no protection was asked for, and there is none."
    if one["composition_in_words"] == OVERDRAWN:
        return False, "NOT GUARANTEED", OVERDRAWN[0].upper() + OVERDRAWN[1:] + "."
    if one["simulated"]:
        return False, "SIMULATION", f"A {SIMULATION}: it protects nobody, and shows what a deployment would spend."
    return True, "Within budget", f"Nothing was released beyond what was allowed. That holds {one['trust']}."


def _few(names: list[str], most: int = 8) -> list[str]:
    return names if len(names) <= most else [*names[:most], f"{len(names) - most} more"]


def _account(one: Told) -> dict[str, Any]:
    view, left = one["attack"], one["left_epsilon"]
    spent = math.inf if one["spent_epsilon"] is None else one["spent_epsilon"]
    budget = math.inf if one["epsilon"] is None else one["epsilon"]
    return {
        "client": one["client"],
        "budget": plain(budget, 6),
        "budget_sort": min(budget, 1e300),
        "delta": one["delta"],
        "spent": as_epsilon(spent) if one["private"] else "no promise",
        "spent_sort": min(spent, 1e300),
        "left": "no limit" if left is None else plain(math.floor(left * 1e4) / 1e4, 5),
        "exchanged": MISSING if one["replace_one_epsilon"] is None else as_epsilon(one["replace_one_epsilon"]),
        "success": MISSING if view is None else f"at most {at_most(view['success'])}",
        "found": MISSING if view is None else f"at most {at_most(view['true_positives'])}",
        "since": one["since"][:10],
    }


def _days(ledger: Ledger, one: Told) -> list[dict[str, Any]]:
    known, rows = titles(one, dated=False), []
    for day in ledger.days(one["client"]):
        for run, what, count in day.releases:
            about = {"date": day.date, "client": one["client"], "study": known[run], "what": what, "count": count}
            rows.append({**about, "epsilon": as_epsilon(day.epsilon), "sort": min(day.epsilon, 1e300)})
    return rows


def _line(one: Told, run: str, words: str) -> dict[str, str]:
    return {"client": one["client"], "study": titles(one)[run], "words": words}


def _decisions(told: Sequence[Told]) -> list[dict[str, str]]:
    """Top-ups, and what the ledger was tied to; a site's two accounts share the latter, which is told once."""
    found = [
        {"client": "the ledger", "what": f"tied to site {tied['site']} and its records", **_said(tied)}
        for tied in next((one["bindings"] for one in told if one["bindings"]), [])
    ]
    for one in told:
        for raised in one["top_ups"]:
            what = f"budget raised by ε = {raised['epsilon']:g}"
            found.append({"client": one["client"], "what": what, **_said(raised)})
    return sorted(found, key=lambda row: row["time"])


def _said(event: dict[str, Any]) -> dict[str, str]:
    time = str(event["time"])[:16].replace("T", " ")
    return {"time": time, "officer": event["officer"] or MISSING, "reason": event["reason"] or MISSING}
