"""The charts of the report, as plain dicts of plotly traces. A chart appears when some run has its data."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sordino.study.report.gather import Client, Group, curve, diagnostics
from sordino.study.report.numbers import finites, percent, plain, short, span
from sordino.study.report.promises import Standing, standing
from sordino.study.report.traces import Trace, band, cloud, line, marker, safe

WIDE = 20.0
"""Axes turn logarithmic when the largest value is more than this many times the smallest."""

MAX_DIAGNOSTICS = 4

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


def drawn(groups: Sequence[Group]) -> list[Chart]:
    """All charts that these results have data for, in the order of the page."""
    found = [
        _budgets(groups),
        _line(groups, ("spent_epsilon", "max"), "private", "Spent ε by round", "largest spent ε of any client"),
        _line(groups, ("accuracy",), "good", "Accuracy by round", "accuracy, mean over clients' test sets"),
        _line(groups, ("central_accuracy",), "good", "Accuracy on the central test set", "central accuracy"),
        _line(groups, ("loss",), "good", "Loss by round", "loss of the global model"),
        _by_client(groups, "fair", "Accuracy by client", "accuracy", lambda client: client.accuracy),
        _scatter(groups, "accuracy-budget", "Accuracy against budget", "budget ε", lambda c: c.declared),
        _scatter(groups, "accuracy-size", "Accuracy against size", "records", lambda c: c.size),
        _line(groups, ("psi",), "fair", "Unfairness Ψ by round", "Ψ, spread of the clients' losses"),
        _by_client(groups, "contributed", "Participation", TURNS, lambda client: client.participation),
        _by_client(groups, "contributed", "Aggregation weight", "mean weight", lambda client: client.weight),
        _line(groups, ("noise_power",), "contributed", "Noise power after aggregation", "noise power"),
        _line(groups, ("clip",), "contributed", "Clipping bound", "clip"),
    ]
    found += [
        _line(groups, ("diagnostics", name), "contributed", name.replace("_", " "), name)
        for name in diagnostics(groups)[:MAX_DIAGNOSTICS]
    ]
    return [chart for chart in found if chart is not None]


def _budgets(groups: Sequence[Group]) -> Chart | None:
    """Spent against budget, a point per client and seed, under the diagonal that no point may cross."""
    traces: list[Trace] = []
    numbers: list[float] = []
    above = 0
    for group in groups:
        points = [
            (client, run)
            for run in group.runs
            for client in run.clients
            if standing(client, run.private) in (Standing.KEPT, Standing.EXCEEDED) and client.spent != math.inf
        ]
        if points:
            budgets = [client.epsilon or 0.0 for client, _ in points]
            spent = [client.spent or 0.0 for client, _ in points]
            above += sum(standing(client, True) is Standing.EXCEEDED for client, _ in points)
            numbers += [*budgets, *spent]
            traces.append(cloud(group, budgets, spent, points, "allowed ε = %{x:.4g}<br>spent ε = %{y:.4g}"))
    if not traces:
        return None
    positive = [number for number in numbers if number > 0]
    low, high = 0.85 * min(positive), 1.15 * max(positive)
    axis_type = "log" if _wide(positive) and len(positive) == len(numbers) else "linear"
    low = low if axis_type == "log" else 0.0
    limit: Trace = {
        "type": "scatter",
        "mode": "lines",
        "name": "the client's own limit",
        "x": [short(low), short(high)],
        "y": [short(low), short(high)],
        "line": {"color": "@muted", "width": 1.5, "dash": "dash"},
        "hoverinfo": "skip",
    }
    count = sum(len(trace["x"]) for trace in traces)
    outcome = "none lies above its limit" if above == 0 else f"{above} lie above their limit"
    return Chart(
        id="budgets",
        section="private",
        title="Spent against budget",
        note="A point per client and seed. On or under the dashed line: within the budget the client set.",
        summary=f"Spent ε against allowed ε for {count} client records: {outcome}. Values from {span(positive)}.",
        traces=[limit, *traces],
        x={"title": "allowed ε", "type": axis_type},
        y={"title": "spent ε", "type": axis_type},
        layout={"hovermode": "closest"},
    )


def _line(groups: Sequence[Group], path: tuple[str, ...], section: str, title: str, quantity: str) -> Chart | None:
    """A metric by round: a line per method and, with several seeds, a band of one standard deviation each way."""
    curves = [(group, found) for group in groups if (found := curve(group, *path)) is not None]
    if not curves:
        return None
    share = path[-1].endswith("accuracy")
    values = [value for _, found in curves for value in found.mean]
    logarithmic = not share and min(values) > 0 and max(values) > 100 * min(values)
    traces: list[Trace] = []
    for group, found in curves:
        if any(found.deviation):
            traces.append(band(group, found, min(values) / 2 if logarithmic else None))
        traces.append(line(group, found, share))
    form = percent if share else plain
    ends = [f"{group.label} {form(found.mean[-1])}" for group, found in curves]
    seeds = max(len(group.runs) for group, _ in curves)
    note = "Line: mean over seeds; band: one standard deviation each way." if seeds > 1 else "One seed per method."
    return Chart(
        id=_slug("-".join(path)),
        section=section,
        title=title,
        note=note,
        summary=f"{quantity} by round. In the last round: {'; '.join(ends)}.",
        traces=traces,
        x={"title": "round"},
        y={"title": quantity, "type": "log" if logarithmic else "linear", **({"tickformat": ".0%"} if share else {})},
        layout={"hovermode": "x unified"},
    )


def _by_client(
    groups: Sequence[Group], section: str, title: str, quantity: str, value: Callable[[Client], float | None]
) -> Chart | None:
    """A quantity per client, mean over seeds, clients ordered from the strictest budget to the loosest.

    Methods stand side by side within a client's place, so that equal values do not hide each other.
    """
    order = _order(groups)
    places = {name: place for place, name in enumerate(order)}
    columns = [(group, means) for group in groups if (means := _client_means(group, value))]
    everything = [mean for _, means in columns for mean in means.values()]
    if not columns or (quantity == TURNS and set(everything) == {1.0}):
        return None
    share = quantity == "accuracy"
    traces: list[Trace] = []
    for column, (group, means) in enumerate(columns):
        names = sorted(means, key=lambda name: places[name])
        shift = 0.6 * ((column + 0.5) / len(columns) - 0.5)
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": safe(group.label),
                "legendgroup": f"m{group.index}",
                "x": [short(places[name] + shift, 4) for name in names],
                "y": [short(means[name], 4) for name in names],
                "text": [safe(name) for name in names],
                "marker": marker(group, len(names)),
                "hovertemplate": "%{text}<br>" + quantity + (" %{y:.1%}" if share else " %{y:.3g}"),
            }
        )
    form = percent if share else plain
    return Chart(
        id=_slug(title),
        section=section,
        title=title,
        note="Clients from the strictest budget (left) to the loosest (right); mean over seeds.",
        summary=f"{quantity} for {len(order)} clients, ordered by budget: "
        f"from {form(min(everything))} to {form(max(everything))}.",
        traces=traces,
        x=_places(order),
        y={"title": quantity, **({"tickformat": ".0%"} if share else {"rangemode": "tozero"})},
        layout={"hovermode": "closest", "placed": True},
    )


def _client_means(group: Group, value: Callable[[Client], float | None]) -> dict[str, float]:
    by_name: dict[str, list[float]] = {}
    for run in group.runs:
        for client in run.clients:
            by_name.setdefault(client.name, []).extend(finites([value(client)]))
    return {name: sum(found) / len(found) for name, found in by_name.items() if found}


def _places(order: Sequence[str]) -> dict[str, Any]:
    """An axis with a place per client; too many names to read are left to hovering and to the data table."""
    axis: dict[str, Any] = {"title": "client", "range": [-0.7, len(order) - 0.3], "showgrid": len(order) <= MAX_NAMES}
    if len(order) > MAX_NAMES:
        return {**axis, "title": f"{len(order)} clients", "showticklabels": False}
    names = [name if len(name) <= 12 else f"{name[:11]}…" for name in order]
    return {**axis, "tickvals": list(range(len(order))), "ticktext": [safe(name) for name in names], "tickangle": -40}


def _scatter(
    groups: Sequence[Group], identity: str, title: str, quantity: str, value: Callable[[Client], float | None]
) -> Chart | None:
    """Accuracy of each client and seed against something the client declared."""
    traces: list[Trace] = []
    across: list[float] = []
    leanings: list[str] = []
    for group in groups:
        points = [
            (client, run)
            for run in group.runs
            for client in run.clients
            if client.accuracy is not None and value(client) is not None
        ]
        if points:
            xs = [value(client) or 0.0 for client, _ in points]
            ys = [client.accuracy or 0.0 for client, _ in points]
            across += xs
            leanings += _leaning(group.label, xs, ys)
            traces.append(cloud(group, xs, ys, points, quantity + " %{x:.4g}<br>accuracy %{y:.1%}"))
    if not traces or len(set(across)) < 2:
        return None
    correlation = f" Rank correlation: {'; '.join(leanings)}." if leanings else ""
    return Chart(
        id=identity,
        section="fair",
        title=title,
        note="A point per client and seed. Level clouds are fair: no one is served worse for what it declared.",
        summary=f"Accuracy against {quantity}, {span(across)}.{correlation}",
        traces=traces,
        x={"title": quantity, "type": "log" if _wide(across) else "linear"},
        y={"title": "accuracy", "tickformat": ".0%"},
        layout={"hovermode": "closest"},
    )


def _order(groups: Sequence[Group]) -> list[str]:
    """Client names by budget, as the first run that knows it declares it; public and unknown ones go last."""
    budgets: dict[str, float] = {}
    for group in groups:
        for run in group.runs:
            for client in run.clients:
                known = budgets.setdefault(client.name, math.inf)
                if math.isinf(known) and client.declared is not None:
                    budgets[client.name] = client.declared
    return sorted(budgets, key=lambda name: budgets[name])


def _leaning(label: str, xs: Sequence[float], ys: Sequence[float]) -> list[str]:
    """Spearman's rank correlation, where it is defined."""
    from scipy.stats import spearmanr  # scipy.stats is slow to import, and only a report needs it

    if len(set(xs)) < 2 or len(set(ys)) < 2:
        return []
    return [f"{label} {plain(float(spearmanr(xs, ys).statistic), 2)}"]


def _wide(values: Sequence[float]) -> bool:
    return bool(values) and min(values) > 0 and max(values) > WIDE * min(values)


def _slug(text: str) -> str:
    """A name as an identifier of the page."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
