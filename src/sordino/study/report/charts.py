"""The charts of the report, as plain dicts of plotly traces. A chart appears when some run has its data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from sordino.study.report.combining import optimum_chart, spectrum_chart
from sordino.study.report.fairness import client_curves
from sordino.study.report.figure import TURNS, Chart, by_client, line_chart, wide
from sordino.study.report.gather import Client, Group, diagnostics
from sordino.study.report.numbers import plain, short, span
from sordino.study.report.promises import Standing, standing
from sordino.study.report.traces import Trace, cloud

MAX_DIAGNOSTICS = 4

WORDS = {
    "rank": "Rank of what updates share",
    "spread": "Spread τ² between clients",
    "iterations": "Iterations of the pursuit",
    "residual": "Residual of the pursuit",
    "unsettled": "How far variances may still move",
    "rounds": "Rounds pooled",
    "spread_error": "Standard error of τ²",
}
"""Titles of the charts of known diagnostics."""


def drawn(groups: Sequence[Group]) -> list[Chart]:
    """All charts that these results have data for, in the order of the page."""
    found = [
        _budgets(groups),
        line_chart(groups, ("spent_epsilon", "max"), "private", "Spent ε by round", "largest spent ε of any client"),
        line_chart(groups, ("accuracy",), "good", "Accuracy by round", "accuracy, mean over clients' test sets"),
        line_chart(groups, ("central_accuracy",), "good", "Accuracy on the central test set", "central accuracy"),
        line_chart(groups, ("loss",), "good", "Loss by round", "loss of the global model"),
        by_client(groups, "fair", "Accuracy by client", "accuracy", lambda client: client.accuracy),
        _scatter(groups, "accuracy-budget", "Accuracy against budget", "budget ε", lambda c: c.declared),
        _scatter(groups, "accuracy-size", "Accuracy against size", "records", lambda c: c.size),
        client_curves(groups),
        line_chart(groups, ("psi",), "fair", "Unfairness Ψ by round", "Ψ, spread of the clients' losses"),
        line_chart(groups, ("worst_decile",), "fair", "The worst tenth by round", "accuracy of the worst tenth"),
        by_client(groups, "contributed", "Participation", TURNS, lambda client: client.participation),
        by_client(groups, "contributed", "Aggregation weight", "mean weight", lambda client: client.weight),
        optimum_chart(groups),
        line_chart(
            groups,
            ("observer", "noise_power"),
            "contributed",
            "Noise power after aggregation",
            "noise power Σ w²σ²/η²",
            ("diagnostics", "noise_power"),
        ),
        spectrum_chart(groups),
        line_chart(groups, ("clip",), "contributed", "Clipping bound", "clip"),
    ]
    found += [
        line_chart(groups, ("diagnostics", name), "contributed", WORDS.get(name, name.replace("_", " ")), name)
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
    axis_type = "log" if wide(positive) and len(positive) == len(numbers) else "linear"
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
        x={"title": quantity, "type": "log" if wide(across) else "linear"},
        y={"title": "accuracy", "tickformat": ".0%"},
        layout={"hovermode": "closest"},
    )


def _leaning(label: str, xs: Sequence[float], ys: Sequence[float]) -> list[str]:
    """Spearman's rank correlation, where it is defined."""
    from scipy.stats import spearmanr  # scipy.stats is slow to import, and only a report needs it

    if len(set(xs)) < 2 or len(set(ys)) < 2:
        return []
    return [f"{label} {plain(float(spearmanr(xs, ys).statistic), 2)}"]
