"""The kinds of charts: a metric by round, a quantity by client, a cloud of clients.

Here are the numbers of plotly's traces; how they look (colours, markers, lines) is in page.js and page.css.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sordino.study.report.gather import Client, Curve, Group, SeedRun, curve
from sordino.study.report.numbers import finites, percent, plain, short

Trace = dict[str, Any]

WIDE = 20.0
"""Axes turn logarithmic when the largest value is more than this many times the smallest."""

MAX_NAMES = 24
"""Up to this many clients are named along an axis."""


@dataclass(frozen=True)
class Chart:
    """One figure: its traces and axes, and a summary for those who cannot see it; its title is in the template."""

    id: str
    summary: str
    traces: list[Trace]
    x: dict[str, Any]
    y: dict[str, Any]
    layout: dict[str, Any] = field(default_factory=lambda: {"hovermode": "closest"})

    @property
    def data(self) -> dict[str, Any]:
        """What the page's script needs to draw it."""
        return {"id": self.id, "traces": self.traces, "x": self.x, "y": self.y, **self.layout}


def safe(text: str) -> str:
    """Text for plotly, which reads a little HTML: names are shown as they are."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def slug(*names: str) -> str:
    """Names as an identifier of the page."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(names).lower()).strip("-")


def axis_type(values: Sequence[float]) -> str:
    """Logarithmic for positive values that differ much, else linear."""
    return "log" if values and min(values) > 0 and max(values) > WIDE * min(values) else "linear"


def trace(group: Group, look: str, x: Sequence[Any], y: Sequence[Any], **more: Any) -> Trace:
    """A series of one method: its numbers, and by which of page.js's looks they are drawn."""
    named = {"name": safe(group.label), "legendgroup": f"m{group.index}", "look": look}
    return {**named, "x": list(x), "y": list(y), **more}


# ---- a metric by round ----


def line_chart(groups: Sequence[Group], path: Sequence[str], quantity: str, *others: Sequence[str]) -> Chart | None:
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
            traces.append(_band(group, found, min(values) / 2 if logarithmic else None))
        means = [short(value) for value in found.mean]
        traces.append(trace(group, "line", found.rounds, means, hovertemplate="%{y:.1%}" if share else "%{y:.4g}"))
    rounds = [number for _, found in curves for number in found.rounds]
    shown: dict[str, Any] = {"tickformat": ".0%"} if share else {}
    if share and max(values) == min(values):  # nothing to zoom in on
        shown["range"] = [0, 1]
    form = percent if share else plain
    ends = [f"{group.label} {form(found.mean[-1])}" for group, found in curves]
    return Chart(
        id=slug(*path),
        summary=f"{quantity} by round. In the last round: {'; '.join(ends)}.",
        traces=traces,
        x={"title": "round", **({"dtick": 1} if max(rounds) - min(rounds) <= 10 else {})},
        y={"title": quantity, "type": "log" if logarithmic else "linear", **shown},
        layout={"hovermode": "x unified"},
    )


def _band(group: Group, found: Curve, floor: float | None) -> Trace:
    """One closed outline: forward along mean + deviation, back along mean − deviation.

    ``floor`` cuts the lower edge where a logarithmic axis has no room for it.
    """
    pairs = [(mean, deviation or 0.0) for mean, deviation in zip(found.mean, found.deviation, strict=True)]
    low = [mean - deviation if floor is None else max(mean - deviation, floor) for mean, deviation in pairs]
    edge = [*(mean + deviation for mean, deviation in pairs), *reversed(low)]
    rounds = [*found.rounds, *reversed(found.rounds)]
    name = safe(f"{group.label} ± deviation")
    return trace(group, "band", rounds, [short(value, 4) for value in edge], name=name, meta="band")


# ---- clients ----


class Cloud(NamedTuple):
    """The points of one method, and the figures that they stand for."""

    label: str
    trace: Trace
    xs: list[float]
    ys: list[float]


def clouds(
    groups: Sequence[Group], pair: Callable[[Client, SeedRun], tuple[float | None, float | None]], hover: str
) -> list[Cloud]:
    """By method: a point per client and seed that has both figures of the pair."""
    found = []
    for group in groups:
        points = [(*pair(client, run), client, run) for client, run in group.clients]
        kept = [(x, y, client, run) for x, y, client, run in points if x is not None and y is not None]
        if kept:
            xs, ys = [x for x, *_ in kept], [y for _, y, *_ in kept]
            several = len(group.runs) > 1
            names = [f"{client.name}, seed {run.seed}" if several else client.name for _, _, client, run in kept]
            found.append(Cloud(group.label, _points(group, xs, ys, names, hover), xs, ys))
    return found


def _points(group: Group, xs: Sequence[float], ys: Sequence[float], names: Sequence[str], hover: str) -> Trace:
    """Points of one method; hovering names the client."""
    text, told = [safe(name) for name in names], f"%{{text}}<br>{hover}"
    return trace(group, "points", [short(x, 4) for x in xs], [short(y, 4) for y in ys], text=text, hovertemplate=told)


def diagonal(name: str, numbers: Sequence[float]) -> tuple[Trace, str]:
    """The line on which both axes agree, and the type of the axes."""
    positive = [number for number in numbers if number > 0]
    kind = axis_type(numbers)
    ends = [short(0.85 * min(positive) if kind == "log" else 0.0), short(1.15 * max(positive))]
    return {"name": name, "look": "diagonal", "x": ends, "y": ends}, kind


def by_client(
    groups: Sequence[Group], identity: str, quantity: str, value: Callable[[Client], float | None]
) -> Chart | None:
    """A quantity per client, mean over seeds, clients ordered from the strictest budget to the loosest.

    Methods stand side by side within a client's place, so that equal values do not hide each other.
    """
    order = _client_order(groups)
    seats = {name: place for place, name in enumerate(order)}
    columns = [(group, means) for group in groups if (means := _client_means(group, value))]
    everything = [mean for _, means in columns for mean in means.values()]
    if not columns:
        return None
    share = quantity == "accuracy"
    form, hover = (percent, " %{y:.1%}") if share else (plain, " %{y:.3g}")
    traces: list[Trace] = []
    for column, (group, means) in enumerate(columns):
        names = sorted(means, key=lambda name: seats[name])
        shift = 0.6 * ((column + 0.5) / len(columns) - 0.5)
        xs, ys = [seats[name] + shift for name in names], [means[name] for name in names]
        traces.append(_points(group, xs, ys, names, quantity + hover))
    return Chart(
        id=identity,
        summary=f"{quantity} for {len(order)} clients, ordered by budget: "
        f"from {form(min(everything))} to {form(max(everything))}.",
        traces=traces,
        x=places(order),
        y={"title": quantity, **({"tickformat": ".0%"} if share else {"rangemode": "tozero"})},
        layout={"hovermode": "closest", "placed": True},
    )


def _client_means(group: Group, value: Callable[[Client], float | None]) -> dict[str, float]:
    """By client: the mean over seeds of a quantity, where any seed has it."""
    by_name: dict[str, list[float]] = {}
    for client, _ in group.clients:
        by_name.setdefault(client.name, []).extend(finites([value(client)]))
    return {name: sum(found) / len(found) for name, found in by_name.items() if found}


def _client_order(groups: Sequence[Group]) -> list[str]:
    """Client names by budget, as the first run that knows it declares it; public and unknown ones go last."""
    budgets: dict[str, float] = {}
    for client in (client for group in groups for client, _ in group.clients):
        known = budgets.setdefault(client.name, math.inf)
        if math.isinf(known) and client.declared is not None:
            budgets[client.name] = client.declared
    return sorted(budgets, key=lambda name: budgets[name])


def places(order: Sequence[str]) -> dict[str, Any]:
    """An axis with a place per client; too many names to read are left to hovering and to the data table."""
    axis: dict[str, Any] = {"title": "client", "range": [-0.7, len(order) - 0.3], "showgrid": len(order) <= MAX_NAMES}
    if len(order) > MAX_NAMES:
        return {**axis, "title": f"{len(order)} clients", "showticklabels": False}
    names = [name if len(name) <= 12 else f"{name[:11]}…" for name in order]
    return {**axis, "tickvals": list(range(len(order))), "ticktext": [safe(name) for name in names], "tickangle": -40}
