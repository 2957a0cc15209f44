"""The charts of the report. A chart appears when some run has its data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from sordino.study.report import paid
from sordino.study.report.figures import Chart, Trace, axis_type, by_client, clouds, diagonal, line_chart, safe, trace
from sordino.study.report.gather import Client, Group, SeedRun, budgets_inside, diagnostics, dig, everyone_always
from sordino.study.report.numbers import finite, finites, percent, plain, short, span, thin
from sordino.study.report.promises import ROUNDING, Promise, promise_to

MAX_DIAGNOSTICS = 4

CURVE_POINTS = 40
"""Points of one client's curve: there may be hundreds of curves."""

CURVE_CLIENTS = 150
"""Most clients with a curve; of more, every k-th by budget is drawn."""

SCALE = 1000
"""Accuracies of curves are stored in thousandths, as whole numbers: a third of the file."""


def drawn(groups: Sequence[Group]) -> list[Chart]:
    """All charts that these results have data for."""

    def line(path: str, quantity: str, *others: str) -> Chart | None:
        return line_chart(groups, path.split("/"), quantity, *(other.split("/") for other in others))

    alike = everyone_always(groups)
    found = [
        _budgets(groups),
        paid.chart(groups),
        line("spent_epsilon/max", "largest spent ε of any client"),
        line("accuracy", "accuracy, mean over clients' test sets"),
        line("central_accuracy", "central accuracy"),
        line("loss", "loss of the global model"),
        by_client(groups, "accuracy-by-client", "accuracy", lambda client: client.accuracy),
        _accuracy_against(groups, "accuracy-budget", "budget ε", lambda client: client.declared),
        _accuracy_against(groups, "accuracy-size", "records", lambda client: client.size),
        _client_curves(groups),
        line("psi", "Ψ, spread of the clients' losses"),
        line("worst_decile", "accuracy of the worst tenth"),
        None if alike else by_client(groups, "participation", "turns per round", lambda client: client.participation),
        by_client(groups, "aggregation-weight", "mean weight", lambda client: client.weight),
        _optimum(groups),
        line("observer/noise_power", "noise power Σ w²σ²/η²", "diagnostics/noise_power"),
        _spectrum(groups),
        line("clip", "clip"),
        *(line_chart(groups, ("diagnostics", name), name) for name in diagnostics(groups)[:MAX_DIAGNOSTICS]),
    ]
    return [chart for chart in found if chart is not None]


# ---- clouds of clients ----


def _budgets(groups: Sequence[Group]) -> Chart | None:
    """Spent against budget, a point per client and seed, under the diagonal that no point may cross."""

    def pair(client: Client, run: SeedRun) -> tuple[float | None, float | None]:
        held = promise_to(client, run.private) in (Promise.KEPT, Promise.EXCEEDED) and client.spent != math.inf
        return (client.epsilon, client.spent) if held else (None, None)

    found = clouds(groups, pair, "allowed ε = %{x:.4g}<br>spent ε = %{y:.4g}")
    if not found:
        return None
    points = [point for cloud in found for point in zip(cloud.xs, cloud.ys, strict=True)]
    above = sum(spent > allowed * (1 + ROUNDING) for allowed, spent in points)
    outcome = "none lies above its limit" if above == 0 else f"{above} lie above their limit"
    numbers = [number for point in points for number in point]
    limit, kind = diagonal("the client's own limit", numbers)
    span_ = span([number for number in numbers if number > 0])
    return Chart(
        id="budgets",
        summary=f"Spent ε against allowed ε for {len(points)} client records: {outcome}. Values from {span_}.",
        traces=[limit, *(cloud.trace for cloud in found)],
        x={"title": "allowed ε", "type": kind},
        y={"title": "spent ε", "type": kind},
    )


def _accuracy_against(
    groups: Sequence[Group], identity: str, quantity: str, value: Callable[[Client], float | None]
) -> Chart | None:
    """Accuracy of each client and seed against something the client declared."""
    hover = quantity + " %{x:.4g}<br>accuracy %{y:.1%}"
    found = clouds(groups, lambda client, _: (value(client), client.accuracy), hover)
    across = [x for cloud in found for x in cloud.xs]
    if len(set(across)) < 2:
        return None
    leanings = [f"{one.label} {told}" for one in found if (told := _rank_correlation(one.xs, one.ys))]
    correlation = f" Rank correlation: {'; '.join(leanings)}." if leanings else ""
    return Chart(
        id=identity,
        summary=f"Accuracy against {quantity}, {span(across)}.{correlation}",
        traces=[cloud.trace for cloud in found],
        x={"title": quantity, "type": axis_type(across)},
        y={"title": "accuracy", "tickformat": ".0%"},
    )


def _rank_correlation(xs: Sequence[float], ys: Sequence[float]) -> str:
    """Spearman's, in two digits; empty where it is not defined."""
    from scipy.stats import spearmanr  # scipy.stats is slow to import, and only a report needs it

    defined = len(set(xs)) > 1 and len(set(ys)) > 1
    return plain(float(spearmanr(xs, ys).statistic), 2) if defined else ""


def _optimum(groups: Sequence[Group]) -> Chart | None:
    """The weight each client got against the one that makes the least noise; on the diagonal they agree."""
    hover = "least noise %{x:.3g}<br>counted %{y:.3g}"
    found = clouds(groups, lambda client, _: (client.optimum or None, client.weight or None), hover)
    if not found:
        return None
    numbers = [number for cloud in found for number in (*cloud.xs, *cloud.ys)]
    agreed, kind = diagonal("least noise", numbers)
    return Chart(
        id="weight-optimum",
        summary=f"Aggregation weight against the weight of least noise, {span(numbers)}; the latter is computed from "
        "the noise that the simulation drew.",
        traces=[agreed, *(cloud.trace for cloud in found)],
        x={"title": "least-noise weight (observer's)", "type": kind},
        y={"title": "mean weight", "type": kind},
    )


# ---- singular values of the updates ----


def _spectrum(groups: Sequence[Group]) -> Chart | None:
    """Singular values of the last update matrix that a rule looked at and, for the pursuit, of its low-rank part."""
    traces: list[Trace] = []
    told = []
    for group in groups:
        updates, low = _spectra(group.runs[0])
        kept = [value for value in low if value > 0]
        for name, look, values in (("updates", "spectrum", updates), ("low-rank part", "low-rank", kept)):
            xs, ys = range(1, len(values) + 1), [short(value, 4) for value in values]
            words = {"name": safe(f"{group.label}: {name}"), "hovertemplate": "%{y:.3g}"}
            traces += [trace(group, look, xs, ys, **words)] if values else []
        if updates:
            rank = f", low-rank part of rank {len(kept)}" if low else ""
            told.append(f"{group.label} {plain(updates[0])} to {plain(updates[-1])}{rank}")
    if not traces:
        return None
    return Chart(
        id="spectrum",
        summary=f"Singular values of the update matrix, largest first: {'; '.join(told)}.",
        traces=traces,
        x={"title": "place"},
        y={"title": "singular value", "type": axis_type([value for one in traces for value in one["y"]])},
    )


def _spectra(run: SeedRun) -> tuple[list[float], list[float]]:
    for row in reversed(run.rounds):
        found = finites(dig(row, ("diagnostics", "update_singular_values")) or ())
        if found:
            return found, finites(dig(row, ("diagnostics", "low_rank_singular_values")) or ())
    return [], []


# ---- every client's curve ----


def _client_curves(groups: Sequence[Group]) -> Chart | None:
    """Accuracy by round of each group of budgets and, on request, of every client; one method at a time."""
    curves = [found for group in groups if (found := _curves(group)) is not None]
    if not curves:
        return None
    private = {group.index for group in groups if group.private}
    first = next((place for place, one in enumerate(curves) if one["index"] in private), 0)
    ends = [f"{one['label']}: {', '.join(_at_end(*told) for told in one['groups'])}" for one in curves]
    return Chart(
        id="client-curves",
        summary=f"Accuracy by round of clients grouped by budget. At the end: {'; '.join(ends)}.",
        traces=[],
        x={"title": "round"},
        y={"title": "accuracy", "tickformat": ".0%"},
        layout={"hovermode": "closest", "curves": curves, "scale": SCALE, "method": first, "lead": "Series"},
    )


def _at_end(name: str, values: Sequence[int | None]) -> str:
    return f"{name} {percent(None if values[-1] is None else values[-1] / SCALE)}"


def _curves(group: Group) -> dict[str, Any] | None:
    lead = group.runs[0]
    told = _evaluated(lead)
    if not told or not lead.clients:
        return None
    rounds = [list(told)[place] for place in thin(len(told), CURVE_POINTS)]
    order = sorted(range(len(lead.clients)), key=lambda place: lead.clients[place].declared or math.inf)
    inside = {place: name for name, places in lead.by_budget.items() for place in places}
    clients = []
    for place in order[:: 1 + (len(order) - 1) // CURVE_CLIENTS]:
        client = lead.clients[place]
        budget = "∞" if client.declared is None else plain(client.declared)
        values = [_thousandths(told[number][place]) for number in rounds]
        clients.append([safe(client.name), inside.get(place, "all"), budget, values])
    return {
        "label": group.label,
        "index": group.index,
        "rounds": rounds,
        "groups": _group_curves(group, rounds),
        "clients": clients,
    }


def _group_curves(group: Group, rounds: Sequence[int]) -> list[tuple[str, list[int | None]]]:
    """Mean accuracy of each group of budgets, mean over seeds, at these rounds."""
    budgets = budgets_inside(group.runs)
    means: dict[str, list[list[float]]] = {name: [[] for _ in rounds] for name in budgets}
    for run in group.runs:
        told = _evaluated(run)
        for at, number in enumerate(rounds):
            for name, mean in run.budget_means(told[number]).items() if number in told else ():
                means[name][at].append(mean)
    label = {name: f"{name}, ε {span(found)}" if found else "all clients" for name, found in budgets.items()}
    return [
        (label[name], [_thousandths(sum(found) / len(found)) if found else None for found in column])
        for name, column in means.items()
    ]


def _evaluated(run: SeedRun) -> dict[int, Sequence[Any]]:
    """The clients' accuracies by round, of every round that tells them for every client."""
    return {
        int(row.get("round", place)): row["client_accuracy"]
        for place, row in enumerate(run.rounds, start=1)
        if isinstance(row.get("client_accuracy"), list | tuple) and len(row["client_accuracy"]) == len(run.clients)
    }


def _thousandths(value: Any) -> int | None:
    known = finite(value)
    return None if known is None else round(SCALE * known)
