"""A chart of the report, and the kinds that several sections draw: a metric by round, a quantity by client."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sordino.study.report.gather import Client, Curve, Group, curve
from sordino.study.report.numbers import finites, percent, plain, short
from sordino.study.report.traces import Trace, band, line, marker, safe

WIDE = 20.0
"""Axes turn logarithmic when the largest value is more than this many times the smallest."""

MAX_NAMES = 24
"""Up to this many clients are named along an axis."""

TURNS = "turns per round"


@dataclass(frozen=True)
class Chart:
    """One figure: its traces and axes, a heading, a sentence under it, and a summary for those who cannot see it."""

    id: str
    section: str
    title: str
    note: str
    summary: str
    traces: list[Trace]
    x: dict[str, Any]
    y: dict[str, Any]
    layout: dict[str, Any] = field(default_factory=dict)


def line_chart(
    groups: Sequence[Group], path: tuple[str, ...], section: str, title: str, quantity: str, *others: tuple[str, ...]
) -> Chart | None:
    """A metric by round: a line per method and, with several seeds, a band of one standard deviation each way.

    ``others`` are paths to look at, in this order, for a method that has nothing under ``path``.
    """
    told = [(group, next((c for p in (path, *others) if (c := curve(group, *p))), None)) for group in groups]
    curves: list[tuple[Group, Curve]] = [(group, found) for group, found in told if found is not None]
    if not curves:
        return None
    share = path[-1].endswith(("accuracy", "decile"))
    values = [value for _, found in curves for value in found.mean]
    logarithmic = not share and min(values) > 0 and max(values) > 100 * min(values)
    traces: list[Trace] = []
    for group, found in curves:
        if any(found.deviation):
            traces.append(band(group, found, min(values) / 2 if logarithmic else None))
        traces.append(line(group, found, share))
    rounds = [number for _, found in curves for number in found.rounds]
    shown: dict[str, Any] = {"tickformat": ".0%"} if share else {}
    if share and max(values) == min(values):  # nothing to zoom in on
        shown["range"] = [0, 1]
    form = percent if share else plain
    ends = [f"{group.label} {form(found.mean[-1])}" for group, found in curves]
    seeds = max(len(group.runs) for group, _ in curves)
    note = "Line: mean over seeds; band: one standard deviation each way." if seeds > 1 else "One seed per method."
    return Chart(
        id=slug("-".join(path)),
        section=section,
        title=title,
        note=note,
        summary=f"{quantity} by round. In the last round: {'; '.join(ends)}.",
        traces=traces,
        x={"title": "round", **({"dtick": 1} if max(rounds) - min(rounds) <= 10 else {})},
        y={"title": quantity, "type": "log" if logarithmic else "linear", **shown},
        layout={"hovermode": "x unified"},
    )


def by_client(
    groups: Sequence[Group], section: str, title: str, quantity: str, value: Callable[[Client], float | None]
) -> Chart | None:
    """A quantity per client, mean over seeds, clients ordered from the strictest budget to the loosest.

    Methods stand side by side within a client's place, so that equal values do not hide each other.
    """
    order = client_order(groups)
    seats = {name: place for place, name in enumerate(order)}
    columns = [(group, means) for group in groups if (means := client_means(group, value))]
    everything = [mean for _, means in columns for mean in means.values()]
    if not columns or (quantity == TURNS and set(everything) == {1.0}):
        return None
    share = quantity == "accuracy"
    traces: list[Trace] = []
    for column, (group, means) in enumerate(columns):
        names = sorted(means, key=lambda name: seats[name])
        shift = 0.6 * ((column + 0.5) / len(columns) - 0.5)
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": safe(group.label),
                "legendgroup": f"m{group.index}",
                "x": [short(seats[name] + shift, 4) for name in names],
                "y": [short(means[name], 4) for name in names],
                "text": [safe(name) for name in names],
                "marker": marker(group, len(names)),
                "hovertemplate": "%{text}<br>" + quantity + (" %{y:.1%}" if share else " %{y:.3g}"),
            }
        )
    form = percent if share else plain
    return Chart(
        id=slug(title),
        section=section,
        title=title,
        note="Clients from the strictest budget (left) to the loosest (right); mean over seeds.",
        summary=f"{quantity} for {len(order)} clients, ordered by budget: "
        f"from {form(min(everything))} to {form(max(everything))}.",
        traces=traces,
        x=places(order),
        y={"title": quantity, **({"tickformat": ".0%"} if share else {"rangemode": "tozero"})},
        layout={"hovermode": "closest", "placed": True},
    )


def client_means(group: Group, value: Callable[[Client], float | None]) -> dict[str, float]:
    """By client: the mean over seeds of a quantity, where any seed has it."""
    by_name: dict[str, list[float]] = {}
    for run in group.runs:
        for client in run.clients:
            by_name.setdefault(client.name, []).extend(finites([value(client)]))
    return {name: sum(found) / len(found) for name, found in by_name.items() if found}


def places(order: Sequence[str]) -> dict[str, Any]:
    """An axis with a place per client; too many names to read are left to hovering and to the data table."""
    axis: dict[str, Any] = {"title": "client", "range": [-0.7, len(order) - 0.3], "showgrid": len(order) <= MAX_NAMES}
    if len(order) > MAX_NAMES:
        return {**axis, "title": f"{len(order)} clients", "showticklabels": False}
    names = [name if len(name) <= 12 else f"{name[:11]}…" for name in order]
    return {**axis, "tickvals": list(range(len(order))), "ticktext": [safe(name) for name in names], "tickangle": -40}


def client_order(groups: Sequence[Group]) -> list[str]:
    """Client names by budget, as the first run that knows it declares it; public and unknown ones go last."""
    budgets: dict[str, float] = {}
    for group in groups:
        for run in group.runs:
            for client in run.clients:
                known = budgets.setdefault(client.name, math.inf)
                if math.isinf(known) and client.declared is not None:
                    budgets[client.name] = client.declared
    return sorted(budgets, key=lambda name: budgets[name])


def wide(values: Sequence[float]) -> bool:
    """Whether positive values differ so much that an axis should be logarithmic."""
    return bool(values) and min(values) > 0 and max(values) > WIDE * min(values)


def slug(text: str) -> str:
    """A name as an identifier of the page."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
