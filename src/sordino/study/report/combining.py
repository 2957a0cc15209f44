"""How updates were combined: weights against the best ones, noise power, spectra of the update matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sordino.study.report.figure import Chart, wide
from sordino.study.report.gather import Group, Run, dig
from sordino.study.report.numbers import MISSING, finite, finites, plain, short, span, spread
from sordino.study.report.pieces import Cell, method_cell, number, table, text
from sordino.study.report.traces import Trace, cloud, colour, safe

AGREE = 0.01
"""Declared and true weights that are this close (relatively) are called the same."""


def combining_table(groups: Sequence[Group]) -> str:
    """Method by method: noise power of the last round that tells it, the least possible, and who counted most."""
    rows = []
    for group in groups:
        power = spread(_last(run, "noise_power") for run in group.runs)
        least = spread(_last(run, "least_noise_power") for run in group.runs)
        if power is None or least is None:
            continue
        ratio = power.mean / least.mean if least.mean > 0 else None
        heavy = max(finites(client.weight for run in group.runs for client in run.clients), default=None)
        rows.append(
            [
                method_cell(group),
                number(plain(power.mean), power.mean),
                number(plain(least.mean), least.mean),
                number(MISSING if ratio is None else f"{plain(ratio)} ×", ratio),
                number(plain(heavy), heavy),
                _declared_cell(group),
            ]
        )
    if not rows:
        return ""
    heads = ("Method", "Noise power", "Least possible", "Over the least", "Largest mean weight", "Declared noise")
    caption = (
        "Noise of one coordinate of the combined update, Σ w²σ²/η², in the last evaluated round; the least possible "
        "has weights 1/σ². "
    )
    watched = any(row.get("observer") for group in groups for run in group.runs for row in run.rounds)
    told = (
        "From the noise this simulation drew, which only an observer of a simulation sees."
        if watched
        else "From the noise that clients declared."
    )
    return table("t-combined", caption + told, heads, rows)


def _declared_cell(group: Group) -> Cell:
    """Whether weights by declared noise are those by the noise that was drawn."""
    off = [
        abs(client.declared_weight / client.optimum - 1)
        for run in group.runs
        for client in run.clients
        if client.declared_weight is not None and client.optimum
    ]
    if not off:
        return text(MISSING)
    return text("as drawn" if max(off) <= AGREE else f"off by up to {plain(100 * max(off), 2)} %")


def _last(run: Run, key: str) -> float | None:
    """The observer's figure of the last round that has one; by declared variances where no observer was."""
    for path in (("observer", key), ("diagnostics", key)):
        for row in reversed(run.rounds):
            value = finite(dig(row, path))
            if value is not None:
                return value
    return None


def optimum_chart(groups: Sequence[Group]) -> Chart | None:
    """The weight each client got against the one that makes the least noise; on the diagonal they agree."""
    traces: list[Trace] = []
    numbers: list[float] = []
    for group in groups:
        points = [(c, run) for run in group.runs for c in run.clients if c.weight and c.optimum]
        if points:
            xs, ys = [c.optimum or 0.0 for c, _ in points], [c.weight or 0.0 for c, _ in points]
            numbers += [*xs, *ys]
            traces.append(cloud(group, xs, ys, points, "least noise %{x:.3g}<br>counted %{y:.3g}"))
    if not traces:
        return None
    low, high = 0.85 * min(numbers), 1.15 * max(numbers)
    kind = "log" if wide(numbers) else "linear"
    low = low if kind == "log" else 0.0
    diagonal: Trace = {
        "type": "scatter",
        "mode": "lines",
        "name": "least noise",
        "x": [short(low), short(high)],
        "y": [short(low), short(high)],
        "line": {"color": "@muted", "width": 1.5, "dash": "dash"},
        "hoverinfo": "skip",
    }
    return Chart(
        id="weight-optimum",
        section="contributed",
        title="Weight against the least-noise weight",
        note="A point per client and seed, mean over rounds. On the dashed line: as much as its noise deserves (1/σ²). "
        "Least noise is not the only aim: who is left out biases the model.",
        summary=f"Aggregation weight against the weight of least noise, {span(numbers)}; the latter is computed from "
        "the noise that the simulation drew.",
        traces=[diagonal, *traces],
        x={"title": "least-noise weight (observer's)", "type": kind},
        y={"title": "mean weight", "type": kind},
        layout={"hovermode": "closest"},
    )


def spectrum_chart(groups: Sequence[Group]) -> Chart | None:
    """Singular values of the last update matrix that a rule looked at and, for the pursuit, of its low-rank part."""
    traces: list[Trace] = []
    told = []
    for group in groups:
        updates, low = _spectra(group.runs[0])
        if updates:
            traces.append(_spectrum(group, f"{group.label}: updates", updates, "solid", "circle"))
            kept = [value for value in low if value > 0]
            if kept:
                traces.append(_spectrum(group, f"{group.label}: low-rank part", kept, "dot", "circle-open"))
            rank = f", low-rank part of rank {len(kept)}" if low else ""
            told.append(f"{group.label} {plain(updates[0])} to {plain(updates[-1])}{rank}")
    if not traces:
        return None
    values = [value for trace in traces for value in trace["y"]]
    return Chart(
        id="spectrum",
        section="contributed",
        title="Spectrum of the updates",
        note="Singular values of the matrix of updates in the last round that was looked at (first seed); dotted: "
        "of the part that the pursuit calls signal.",
        summary=f"Singular values of the update matrix, largest first: {'; '.join(told)}.",
        traces=traces,
        x={"title": "place"},
        y={"title": "singular value", "type": "log" if wide(values) else "linear"},
        layout={"hovermode": "closest"},
    )


def _spectra(run: Run) -> tuple[list[float], list[float]]:
    for row in reversed(run.rounds):
        found = finites(dig(row, ("diagnostics", "update_singular_values")) or ())
        if found:
            return found, finites(dig(row, ("diagnostics", "low_rank_singular_values")) or ())
    return [], []


def _spectrum(group: Group, name: str, values: Sequence[float], dash: str, symbol: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": safe(name),
        "legendgroup": f"m{group.index}",
        "x": list(range(1, len(values) + 1)),
        "y": [short(value, 4) for value in values],
        "line": {"color": colour(group), "width": 1.75, "dash": dash},
        "marker": {"color": colour(group), "symbol": symbol, "size": 6},
        "hovertemplate": "%{y:.3g}",
    }
