"""Is it fair? Clients grouped by budget, and every client's curve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sordino.engine.evaluate import budget_groups
from sordino.study.report.figure import Chart
from sordino.study.report.gather import Group, Run
from sordino.study.report.numbers import MISSING, finite, finites, percent, plain, plus_minus, span, spread, thin
from sordino.study.report.pieces import Cell, method_cell, number, table
from sordino.study.report.traces import safe

GROUPS = ("strictest", "middle", "loosest")
CURVE_POINTS = 40
"""Points of one client's curve: there may be hundreds of curves."""

CURVE_CLIENTS = 150
"""Most clients with a curve; of more, every k-th by budget is drawn."""

SCALE = 1000
"""Accuracies of curves are stored in thousandths, as whole numbers: a third of the file."""


def members(run: Run) -> dict[str, list[int]]:
    """Places of the clients in each group of budgets, strictest first; empty when all clients have the same budget."""
    places = [place for place, client in enumerate(run.clients) if client.declared is not None]
    found = budget_groups([run.clients[place].declared or 0.0 for place in places], len(GROUPS))
    names = GROUPS if len(found) == 3 else (GROUPS[0], GROUPS[-1])
    return {name: [places[one] for one in inside] for name, inside in zip(names, found)}


def budget_table(groups: Sequence[Group]) -> str:
    """Do strict clients get a worse model? Accuracy of each group of budgets by method, and the gap."""
    rows = []
    told: dict[str, list[float]] = {}
    for group in groups:
        means: dict[str, list[float]] = {}
        for run in group.runs:
            for name, places in members(run).items():
                inside = [run.clients[place] for place in places]
                told.setdefault(name, []).extend(finites(client.declared for client in inside))
                mean = spread(client.accuracy for client in inside)
                means.setdefault(name, []).extend([mean.mean] if mean else [])
        if not any(means.values()):
            continue
        cells = [method_cell(group)]
        for name in GROUPS:
            value = spread(means.get(name, ()))
            cells.append(number(plus_minus(value, as_percent=True), value.mean if value else None))
        cells.append(_gap(means))
        rows.append(cells)
    if not rows:
        return ""
    shown = [name for name in GROUPS if told.get(name)]
    kept = [0, *(1 + place for place, name in enumerate(GROUPS) if name in shown), len(GROUPS) + 1]
    heads = ["Method", *(f"{name}: ε {span(told[name])}" for name in shown), "Gap"]
    caption = "Do strict clients get a worse model? Accuracy by budget, clients in groups of about equal number"
    return table("t-budgets", caption, heads, [[row[place] for place in kept] for row in rows])


def _gap(means: Mapping[str, Sequence[float]]) -> Cell:
    """Loosest minus strictest, in points, over the seeds."""
    pairs = zip(means.get(GROUPS[-1], ()), means.get(GROUPS[0], ()))
    value = spread(loose - strict for loose, strict in pairs)
    if value is None:
        return number(MISSING, None)
    return number(f"{100 * value.mean:+.1f} points".replace("-", "−"), value.mean)


def client_curves(groups: Sequence[Group]) -> Chart | None:
    """Accuracy by round of each group of budgets and, on request, of every client; one method at a time."""
    curves = [found for group in groups if (found := _curves(group)) is not None]
    if not curves:
        return None
    private = {group.index for group in groups if group.private}
    first = next((place for place, one in enumerate(curves) if one["index"] in private), 0)
    ends = [
        f"{one['label']}: " + ", ".join(f"{name} {_at_end(values)}" for name, values in one["groups"]) for one in curves
    ]
    return Chart(
        id="client-curves",
        section="fair",
        title="Accuracy by round, by budget and by client",
        note="One method at a time: means over clients and seeds. Every client's own curve is from the first seed.",
        summary=f"Accuracy by round of clients grouped by budget. At the end: {'; '.join(ends)}.",
        traces=[],
        x={"title": "round"},
        y={"title": "accuracy", "tickformat": ".0%"},
        layout={"hovermode": "closest", "curves": curves, "scale": SCALE, "method": first, "lead": "Series"},
    )


def _at_end(values: Sequence[int | None]) -> str:
    return percent(None if values[-1] is None else values[-1] / SCALE)


def _curves(group: Group) -> dict[str, Any] | None:
    lead = group.runs[0]
    rounds = _evaluated(lead)
    if not rounds or not lead.clients:
        return None
    kept = [rounds[place] for place in thin(len(rounds), CURVE_POINTS)]
    order = sorted(range(len(lead.clients)), key=lambda place: lead.clients[place].declared or math.inf)
    drawn = order[:: 1 + (len(order) - 1) // CURVE_CLIENTS]
    inside = {place: name for name, places in members(lead).items() for place in places}
    return {
        "label": group.label,
        "index": group.index,
        "seed": str(lead.seed),
        "rounds": [number for number, _ in kept],
        "groups": _group_curves(group, [number for number, _ in kept]),
        "clients": [
            [
                safe(lead.clients[place].name),
                inside.get(place, "all"),
                plain(lead.clients[place].declared) if lead.clients[place].declared is not None else "∞",
                [_thousandths(values[place]) for _, values in kept],
            ]
            for place in drawn
        ],
    }


def _group_curves(group: Group, rounds: Sequence[int]) -> list[tuple[str, list[int | None]]]:
    """Mean accuracy of each group of budgets, mean over seeds, at these rounds."""
    sums: dict[str, list[list[float]]] = {}
    spans: dict[str, list[float]] = {}
    for run in group.runs:
        told = dict(_evaluated(run))
        places = members(run) or {"all": list(range(len(run.clients)))}
        for name, inside in places.items():
            spans.setdefault(name, []).extend(finites(run.clients[place].declared for place in inside))
            column = sums.setdefault(name, [[] for _ in rounds])
            for at, number_ in enumerate(rounds):
                values = finites(told[number_][place] for place in inside) if number_ in told else []
                column[at] += [sum(values) / len(values)] if values else []
    label = {name: f"{name}, ε {span(found)}" if found else "all clients" for name, found in spans.items()}
    return [
        (label[name], [_thousandths(sum(found) / len(found)) if found else None for found in column])
        for name, column in sums.items()
    ]


def _evaluated(run: Run) -> list[tuple[int, Sequence[Any]]]:
    """(round, the clients' accuracies) of every round that tells them for every client."""
    return [
        (int(row.get("round", place)), row["client_accuracy"])
        for place, row in enumerate(run.rounds, start=1)
        if isinstance(row.get("client_accuracy"), list | tuple) and len(row["client_accuracy"]) == len(run.clients)
    ]


def _thousandths(value: Any) -> int | None:
    known = finite(value)
    return None if known is None else round(SCALE * known)
