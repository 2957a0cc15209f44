"""The plan as a page: what a study would promise every client, and what another budget would do. Nothing is trained."""

from __future__ import annotations

import math
import os
import statistics
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from sordino._version import __version__
from sordino.study.choice import describe_choice
from sordino.study.explore import EXPLORED, POINTS, explore
from sordino.study.report.figure import Chart, places, wide
from sordino.study.report.numbers import as_epsilon, plain, short, span
from sordino.study.report.page import as_json, asset, filled, plotly, script, write_page
from sordino.study.report.pieces import Cell, figures, number, table, text, tile, verdict_panel
from sordino.study.report.promises import Verdict
from sordino.study.report.traces import safe
from sordino.study.view import PlanView

WARNINGS = 4
"""Warnings that are listed; of more, the rest is folded away."""


def write_plan(view: PlanView, path: str | os.PathLike[str], name: str | None = None) -> Path:
    """Write the plan's page to ``path``: one file that works offline."""
    return write_page(render_plan(view, name), path)


def render_plan(view: PlanView, name: str | None = None) -> str:
    """The plan as one HTML document.

    Guarantees
    ----------
    A method that is not private, and a client whose planned ε is above its budget, are named as such on the first
    screen. Everything comes from public facts: sizes, budgets and settings.
    """
    method = view.plan.method
    found = explore(view.plan, view.dimension, view.seed) if method.private else None
    explored = found is not None and any(c["noises"] for c in found["clients"])
    drawn = describe_choice(view.plan, view.dimension, view.seed)
    charts = (_charts(found) if explored and found else []) + ([_who(view, drawn)] if drawn else [])
    data = {
        "charts": [{"id": c.id, "traces": c.traces, "x": c.x, "y": c.y, **c.layout} for c in charts],
        "explore": found if explored else None,
        "names": [safe(c.name) for c in view.plan.clients],
    }
    parts = {
        "title": escape(f"{name}: {method.name}" if name else method.name),
        "verdict": _verdict(view),
        "summary": escape(method.summary or "A method of your own."),
        "tiles": _tiles(view),
        "warnings": _warnings(view),
        "explorer": _explorer(found, charts, view.plan.schedule.caps is not None) if explored and found else "",
        "explorer-link": '<li><a href="#explorer">Another budget?</a></li>' if explored else "",
        "client-table": _client_table(view, found),
        "selection": _selection(drawn, charts),
        "method-table": _method_table(view),
        "version": escape(__version__),
        "style": asset("page.css"),
        "data": as_json(_finite(data)),
        "plotly": plotly() if charts else "const Plotly = null;",
        "script": script("plan.js"),
    }
    return filled("plan.html", parts)


def _verdict(view: PlanView) -> str:
    method = view.plan.method
    if not method.private:
        told = "This method adds no noise and spends no budget: whatever clients declare, nothing would protect them."
        return verdict_panel(Verdict(False, "NOT PRIVATE", (method.name,), told), "")
    bounded = [c for c in view.plan.clients if not c.budget.is_public]
    if not bounded:
        told = "Every client declares its data public (ε = ∞), so nothing would be protected."
        return verdict_panel(Verdict(False, "NOT PRIVATE", (method.name,), told), "")
    over = [c for c in bounded if c.epsilon > c.budget.epsilon * (1 + 1e-9)]
    named = f"{bounded[0].budget.adjacency} adjacency, {bounded[0].terms.sampling.scheme} sampling"
    spent = span([min(c.epsilon, c.budget.epsilon) for c in bounded], as_epsilon)
    told = f"Noise is set so that no client would spend more than it allows: ε\u00a0=\u00a0{spent}."
    if over:
        told += (
            f" For {len(over)} of {len(bounded)} the noise of {method.calibration.by!r} pays for a part of the rounds "
            "only: their ledgers would refuse the rest."
        )
    return verdict_panel(Verdict(True, "Private, if run as planned", (method.name,), told), named)


def _tiles(view: PlanView) -> str:
    plan = view.plan
    tiles = [
        tile("Clients", str(len(plan.clients)), f"{plan.training.rounds} rounds"),
        tile("Model", f"{view.dimension:,}", "parameters"),
        tile("Cost", plain(view.gradients), "per-record gradients"),
    ]
    budgets = [c.budget.epsilon for c in plan.clients if not c.budget.is_public]
    if plan.method.private and budgets:
        middle = statistics.median(budgets)
        tiles.insert(1, tile("Budgets", f"ε {span(budgets, as_epsilon)}", f"median {as_epsilon(middle)}"))
        tiles.append(tile("Noise on the aggregate", plain(view.noise_on_aggregate), "a coordinate, weighted by size"))
        turns = [c.turns for c in plan.clients]
        tiles.append(tile("Turns", span([float(t) for t in turns]), "of each client"))
    return "".join(tiles)


def _warnings(view: PlanView) -> str:
    found = view.warnings
    if not found:
        return ""
    lines = [f"<li>{escape(one)}</li>" for one in found]
    rest = "".join(lines[WARNINGS:])
    more = f'<details class="printed"><summary>{len(found) - WARNINGS} more</summary><ul>{rest}</ul></details>'
    return (
        f'<div class="note warnings"><h3>Look at these first</h3><ul>{"".join(lines[:WARNINGS])}</ul>'
        f"{more if rest else ''}</div>"
    )


def _explorer(found: dict[str, Any], charts: list[Chart], adaptive: bool) -> str:
    drawn = found["drawn"]
    note = "Who trains is known only while training: the aggregate is shown as if everyone did. " if adaptive else ""
    if drawn and drawn["solved"]:
        note = "The chance of being drawn is solved anew (Problem 1) at each of these budgets. "
    elif drawn:
        note = "The chance of being drawn does not follow ε here, and stays as planned. "
    listed = sum(c["noises"] is not None for c in found["clients"])
    if listed == EXPLORED < len(found["clients"]):
        note += f"{listed} of {len(found['clients'])} clients can be chosen, evenly by budget. "
    return filled(
        "explorer.html",
        {
            "figures": figures(charts, "explorer"),
            "accountant": escape(found["accountant"]),
            "points": str(POINTS),
            "drawn-note": escape(note),
        },
    )


def _charts(found: dict[str, Any]) -> list[Chart]:
    """Frames of the explorer's charts; the page draws what is in them."""
    budget = {"title": "the client's ε", "type": "log"}
    layout = {"hovermode": "closest", "lead": "Series"}
    what = "step" if found["drawn"] else "round's combined update"
    charts = [
        Chart(
            "noise",
            "explorer",
            "Its noise",
            "The noise multiplier z that a budget needs. Diamond: the chosen ε; circle: as planned.",
            "Noise multiplier of the chosen client against its budget, falling from strict to loose budgets.",
            [],
            budget,
            {"title": "noise multiplier z", "type": "log"},
            layout,
        ),
        Chart(
            "aggregate",
            "explorer",
            "The aggregate's noise",
            f"Deviation of the noise on one coordinate of a {what}, when only this client's ε changes.",
            "Noise on the aggregate against the chosen client's budget, for each way to weigh updates.",
            [],
            budget,
            {"title": "deviation of a coordinate", "type": "log"},
            layout,
        ),
        Chart(
            "bound",
            "explorer",
            "The expected bound",
            "What noise and bias leave of the convergence bound; lower is better. Compare, do not read as accuracy.",
            "Convergence bound against the chosen client's budget.",
            [],
            budget,
            {"title": "bound (Theorem 2)"},
            layout,
        ),
    ]
    if found["drawn"]:
        return [
            *charts,
            Chart(
                "chance",
                "explorer",
                "Its participation",
                "How likely each draw of a round is to fall on this client.",
                "Probability of drawing the chosen client against its budget.",
                [],
                budget,
                {"title": "chance per draw"},
                layout,
            ),
        ]
    order = sorted(range(len(found["clients"])), key=lambda place: found["clients"][place]["epsilon"] or math.inf)
    follows = {"size": "weights by size", "budget": "weights by ε", "least": "least-noise weights"}
    return [
        *charts,
        Chart(
            "shares",
            "explorer",
            "Whose noise is it?",
            f"Each client's part of the aggregate's noise ({follows[found['follows'] or 'size']}), strictest first.",
            "Share of the aggregate's noise variance that each client brings, at the chosen budget.",
            [],
            places([found["clients"][place]["name"] for place in order]),
            {"title": "share of the noise", "tickformat": ".0%"},
            {**layout, "placed": True, "order": order},
        ),
    ]


def _client_table(view: PlanView, found: dict[str, Any] | None) -> str:
    rows = []
    for place, c in enumerate(view.clients):
        name = escape(c["client"])
        able = found is not None and found["clients"][place]["noises"] is not None
        who = f'<button type="button" class="pick" data-client="{place}">{name}</button>' if able else name
        private = view.plan.method.private
        rows.append(
            [
                Cell(who),
                number(str(c["records"]), c["records"]),
                number(as_epsilon(c["epsilon"]), c["epsilon"] if math.isfinite(c["epsilon"]) else 1e300),
                number(plain(c["delta"]), c["delta"]),
                number(plain(c["rate"]), c["rate"]),
                number(f"{c['steps']} × {c['turns']}", c["steps"] * c["turns"]),
                number(str(c["last_round"] or "never"), c["last_round"]),
                number(plain(c["noise"]), c["noise"]),
                number(as_epsilon(c["planned_epsilon"]) if private else "–", _sortable(c["planned_epsilon"])),
                number(f"{plain(c['noise_to_signal'])} ×", c["noise_to_signal"]),
            ]
        )
    spent = ("Steps × turns", "Last round paid", "Noise z", "Planned ε", "Noise over signal")
    heads = ("Client", "Records", "Budget ε", "δ", "Rate", *spent)
    return table("t-clients", "What each client would do, add and spend. Choose one to move its budget.", heads, rows)


def _sortable(value: float) -> float:
    return value if math.isfinite(value) else 1e300


def _selection(drawn: dict[str, Any] | None, charts: list[Chart]) -> str:
    """Who is drawn, and the rules ranked by the bound."""
    if not drawn:
        return ""
    rows = [
        [
            text(one["rule"] + (" (this plan)" if one["rule"] == drawn["rule"] else "")),
            number(plain(one["bound"]), one["bound"]),
            number(plain(one["bias"]), one["bias"]),
            number(plain(one["noise"]), one["noise"]),
        ]
        for one in drawn["ranking"]
    ]
    caption = "Selection rules by the bound of Theorem 2, before training"
    ranked = table("t-rules", caption, ("Rule", "Bound", "Bias ‖q − u‖₁", "Noise variance"), rows)
    return f"<h3>Who is drawn</h3>{ranked}{figures(charts, 'everyone')}"


def _who(view: PlanView, drawn: dict[str, Any]) -> Chart:
    """Chance of being drawn over the share of the data, against ε, a point per client (Figure 3 of the paper)."""
    bounded = [i for i, c in enumerate(view.plan.clients) if not c.budget.is_public]
    shares = np.array(drawn["probabilities"]) / np.array(drawn["unbiased"])
    epsilons = [view.plan.clients[i].budget.epsilon for i in bounded]
    sizes = np.array([view.plan.clients[i].records for i in bounded], dtype=float)
    ratio = [float(shares[i]) for i in bounded]
    trace = {
        "type": "scatter",
        "mode": "markers",
        "name": drawn["rule"],
        "legendgroup": "curve",
        "x": [short(e, 4) for e in epsilons],
        "y": [short(one, 4) for one in ratio],
        "text": [safe(f"{view.plan.clients[i].name}, {view.plan.clients[i].records} records") for i in bounded],
        "marker": {"color": "@m0", "opacity": 0.75, "size": (6 + 10 * np.sqrt(sizes / sizes.max())).round(1).tolist()},
        "hovertemplate": "%{text}<br>ε %{x:.3g}: %{y:.3g} times its share<extra></extra>",
    }
    return Chart(
        "who",
        "everyone",
        "Chance of being drawn, over the share of the data",
        f"A point per client, larger with more records. ‖p − u‖₁ = {plain(drawn['distance'])}.",
        f"Chance of being drawn over the share of the data, from {plain(min(ratio))} to {plain(max(ratio))}.",
        [trace],
        {"title": "budget ε", "type": "log" if wide(epsilons) else "linear"},
        {"title": "p over u", "rangemode": "tozero"},
        {"hovermode": "closest", "lead": "Rule", "fixed": True},
    )


def _method_table(view: PlanView) -> str:
    settings = {key: value for key, value in vars(view.plan.training).items() if value is not None}
    ways = sorted({f"{layer.kind}: {layer.method}" for layer in view.layers})
    rows = [[text(key), text(value)] for key, value in view.plan.method.describe().items()]
    rows += [[text(f"training.{key}"), text(value)] for key, value in settings.items()]
    rows.append([text("gradient engine"), text(", ".join(ways))])
    return table("t-made", "The method's parts and the settings", ("Part", "Value"), rows)


def _finite(value: Any) -> Any:
    """Numbers that JSON has no word for become null; numbers are cut to six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, (list, tuple)) else value
