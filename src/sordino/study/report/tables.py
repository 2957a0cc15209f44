"""What the tables of the report show: rows of plain values, which the templates write down."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from sordino.study.report.gather import GROUPS, Group, SeedRun, budgets_inside, every_run
from sordino.study.report.numbers import finites, listed, span, spread
from sordino.study.report.promises import Promise, promise_to, share, trust_of


def key_figures(groups: Sequence[Group]) -> dict[str, Any]:
    """Clients, budgets, what was spent of them, and the replace-one figure."""
    clients = [pair for group in groups for pair in group.clients]
    guarded = [c for c, run in clients if promise_to(c, run.private) in (Promise.KEPT, Promise.EXCEEDED)]
    budgets = finites(client.epsilon for client in guarded)
    ends = [client.ends for client in guarded if client.ends is not None]
    return {
        "clients": len({client.name for client, _ in clients}),
        "methods": len(groups),
        "runs": len(every_run(groups)),
        "budgets": budgets,
        "median": statistics.median(budgets) if budgets else None,
        "most": max(guarded, key=lambda client: client.spent or 0.0, default=None),
        "tightest": max((share(client) or 0.0 for client in guarded), default=None),
        "ends": len(ends),
        "ended": sum(map(math.isfinite, ends)),
        "replaced": max(finites(client.replace_one for client in guarded), default=None),
    }


def privacy_rows(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Method by method: private or not, and what the clients spent."""
    rows = []
    for group in groups:
        promises = [promise_to(client, run.private) for client, run in group.clients]
        kept, asked = promises.count(Promise.KEPT), len(promises) - promises.count(Promise.PUBLIC)
        bound = [client for client, run in group.clients if run.private]
        spent = finites(client.spent for client in bound)
        shown = "private" if kept == asked > 0 else "not shown"
        rows.append(
            {
                "group": group,
                "word": shown if group.private else "NOT PRIVATE",
                "trust": trust_of(group),
                "kept": kept,
                "asked": asked,
                "spent": [min(spent), statistics.median(spent), max(spent)] if spent else [],
                "replaced": max(finites(client.replace_one for client in bound), default=None),
                "releases": max((sum(r.get("count") or 0 for r in c.releases) for c in bound), default=None),
            }
        )
    return rows


def at_the_end(groups: Sequence[Group]) -> set[str]:
    """Names of the metrics that any final model has."""
    named = {key for run in every_run(groups) for row in (run.final, *run.rounds) for key in row}
    return {key for key in named if any(group.over_seeds(key) for group in groups)}


def diverged(groups: Sequence[Group]) -> str:
    """Whose final model is none: a simulation always has a loss, if it is a number."""
    told = []
    for group in groups:
        lost = sum(run.simulated and "loss" in run.final and run.at_end("loss") is None for run in group.runs)
        told += [f"{group.label} ({lost} of {len(group.runs)})"] if lost else []
    return listed(told)


def budget_rows(groups: Sequence[Group]) -> dict[str, Any]:
    """Do strict clients get a worse model? Accuracy of each group of budgets by method, and loosest minus strictest."""
    inside = budgets_inside(every_run(groups))
    budgets = {name: inside[name] for name in GROUPS if inside.get(name)}
    rows = []
    for group in groups:
        means = [run.budget_means([client.accuracy for client in run.clients]) for run in group.runs]
        cells = [spread(one.get(name) for one in means) for name in budgets]
        ends = [(one[GROUPS[0]], one[GROUPS[-1]]) for one in means if {GROUPS[0], GROUPS[-1]} <= set(one)]
        gap = spread(loose - strict for strict, loose in ends)
        if any(cells):
            rows.append({"group": group, "cells": cells, "gap": gap})
    return {"heads": [f"#{name}: ε {span(found)}" for name, found in budgets.items()], "rows": rows}


def combining_rows(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Method by method: noise power of the last round that tells it, the least possible, and who counted most.

    ``off`` is how far weights by declared noise are from those by the noise that was drawn, relatively.
    """
    rows = []
    for group in groups:
        power = spread(_observed(run, "noise_power") for run in group.runs)
        least = spread(_observed(run, "least_noise_power") for run in group.runs)
        if power is None or least is None:
            continue
        clients = [client for client, _ in group.clients]
        off = [abs(c.declared_weight / c.optimum - 1) for c in clients if c.declared_weight is not None and c.optimum]
        rows.append(
            {
                "group": group,
                "power": power.mean,
                "least": least.mean,
                "ratio": power.mean / least.mean if least.mean > 0 else None,
                "heaviest": max(finites(client.weight for client in clients), default=None),
                "off": max(off, default=None),
            }
        )
    return rows


def _observed(run: SeedRun, key: str) -> float | None:
    """The observer's figure of the last round that has one; by declared variances where no observer was."""
    seen = run.last("observer", key)
    return run.last("diagnostics", key) if seen is None else seen


def told_once(tables: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The settings (or versions) of several runs as one table: what they share once, what differs with each value."""
    found = {}
    for key in dict.fromkeys(key for table in tables for key in table):
        values = list(dict.fromkeys(table.get(key, "unset") for table in tables))
        told = " | ".join(values[:8]) + (" | …" if len(values) > 8 else "")
        found[key] = told if len(told) <= 240 else f"{told[:240]}…"
    return found
