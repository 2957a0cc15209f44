"""What the tables of the report show: rows of plain values, which the templates write down."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from sordino.study.report.charts import GROUPS, members
from sordino.study.report.gather import Group, SeedRun, dig, every_run, flat
from sordino.study.report.numbers import (
    MISSING,
    SeedMean,
    finite,
    finites,
    listed,
    plus_minus,
    span,
    spread,
)
from sordino.study.report.promises import Promise, promise_to, share

QUALITY = {"accuracy": ("Accuracy", "%"), "central_accuracy": ("Central accuracy", "%"), "loss": ("Loss", "")}
FAIRNESS = {
    "psi": ("Ψ, test sets", ""),
    "train_psi": ("Ψ, training sets", ""),
    "worst_accuracy": ("Worst client", "%"),
    "worst_decile": ("Worst tenth", "%"),
    "best_decile": ("Best tenth", "%"),
    "accuracy_variance": ("Variance, points²", "points²"),
}
"""Final metrics by their key in a result: the column's head and unit."""

Cells = list[tuple[str, float | None]]
"""What a row of numbers shows, each with the value that it sorts by."""


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
                "kept": kept,
                "asked": asked,
                "spent": [min(spent), statistics.median(spent), max(spent)] if spent else [],
                "most_spent": max(spent, default=None),
                "replaced": max(finites(client.replace_one for client in bound), default=None),
                "releases": max((sum(r.get("count") or 0 for r in c.releases) for c in bound), default=None),
            }
        )
    return rows


def final_metrics(groups: Sequence[Group], metrics: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """A row per method, a column per final metric that any run has: mean ± deviation over seeds."""
    shown = [key for key in metrics if any(group.over_seeds(key) for group in groups)]

    def cell(group: Group, key: str) -> tuple[str, float | None]:
        value, unit = group.over_seeds(key), metrics[key][1]
        if value is not None and unit == "points²":
            value = SeedMean(1e4 * value.mean, value.deviation and 1e4 * value.deviation)
        return plus_minus(value, unit == "%"), value.mean if value else None

    rows = [(group, [cell(group, key) for key in shown]) for group in groups]
    return {"heads": [f"#{metrics[key][0]}" for key in shown], "rows": rows}


def diverged(groups: Sequence[Group]) -> str:
    """Whose final model is none: a simulation always has a loss, if it is a number."""
    told = []
    for group in groups:
        lost = sum(run.simulated and "loss" in run.final and run.at_end("loss") is None for run in group.runs)
        told += [f"{group.label} ({lost} of {len(group.runs)})"] if lost else []
    return listed(told)


def budget_rows(groups: Sequence[Group]) -> dict[str, Any]:
    """Do strict clients get a worse model? Accuracy of each group of budgets by method, and the gap."""
    found: list[tuple[Group, dict[str, list[float]]]] = []
    budgets: dict[str, list[float]] = {}
    for group in groups:
        means: dict[str, list[float]] = {name: [] for name in GROUPS}
        for run in group.runs:
            for name, places in members(run).items():
                inside = [run.clients[place] for place in places]
                budgets.setdefault(name, []).extend(finites(client.declared for client in inside))
                mean = spread(client.accuracy for client in inside)
                means[name] += [mean.mean] if mean else []
        if any(means.values()):
            found.append((group, means))
    shown = [name for name in GROUPS if budgets.get(name)]
    heads = [f"#{name}: ε {span(budgets[name])}" for name in shown] + ["#Gap"]
    return {"heads": heads, "rows": [(group, _by_budget(means, shown)) for group, means in found]}


def _by_budget(means: Mapping[str, Sequence[float]], shown: Sequence[str]) -> Cells:
    """The mean accuracy of each group, and loosest minus strictest in points, over the seeds."""
    values = [spread(means[name]) for name in shown]
    gap = spread(loose - strict for loose, strict in zip(means[GROUPS[-1]], means[GROUPS[0]]))
    told = MISSING if gap is None else f"{100 * gap.mean:+.1f} points".replace("-", "−")
    cells = [(plus_minus(value, as_percent=True), value.mean if value else None) for value in values]
    return [*cells, (told, gap.mean if gap else None)]


def combining_rows(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Method by method: noise power of the last round that tells it, the least possible, and who counted most.

    ``off`` is how far weights by declared noise are from those by the noise that was drawn, relatively.
    """
    rows = []
    for group in groups:
        power = spread(_last(run, "noise_power") for run in group.runs)
        least = spread(_last(run, "least_noise_power") for run in group.runs)
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


def _last(run: SeedRun, key: str) -> float | None:
    """The observer's figure of the last round that has one; by declared variances where no observer was."""
    paths = ((place, key) for place in ("observer", "diagnostics"))
    told = (finite(dig(row, path)) for path in paths for row in reversed(run.rounds))
    return next((value for value in told if value is not None), None)


def settings(groups: Sequence[Group]) -> dict[str, str]:
    """The study's settings: what all runs share once, what differs with each of its values."""
    runs = [flat(run.study) for run in every_run(groups)]
    found = {}
    for key in dict.fromkeys(key for one in runs for key in one):
        values = list(dict.fromkeys(one.get(key, "unset") for one in runs))
        told = " | ".join(values[:8]) + (" | …" if len(values) > 8 else "")
        found[key] = told if len(told) <= 240 else f"{told[:240]}…"
    return found


def versions(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Versions of what made the results."""
    found: dict[str, dict[str, None]] = {}
    for run in every_run(groups):
        for name, version in run.versions.items():
            found.setdefault(str(name), {})[str(version)] = None
    return {name: list(told) for name, told in found.items()}
