"""The plan as a page: what a study would promise every client, and what another budget would do. Nothing is trained."""

from __future__ import annotations

import math
import os
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from sordino.study.explore import EXPLORED, POINTS, describe_choice, explore
from sordino.study.report.figures import Chart, axis_type, places, safe
from sordino.study.report.numbers import as_epsilon, plain, short, span
from sordino.study.report.page import filled, write_page
from sordino.study.report.promises import Panel
from sordino.study.view import PlanView


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
    found = explore(view.plan, view.dimension, view.seed) if method.private else {"clients": []}
    movable = [one["noises"] is not None for one in found["clients"]] or [False] * len(view.clients)
    drawn = describe_choice(view.plan, view.dimension, view.seed)
    charts = (_explorer_charts(found) if any(movable) else []) + ([_chances(view, drawn)] if drawn else [])
    return filled(
        "plan.html",
        title=f"{name}: {method.name}" if name else method.name,
        panel=_verdict(view),
        summary=method.summary or "A method of your own.",
        key_figures=_key_figures(view),
        warnings=view.warnings,
        explorer={**found, "points": POINTS} if any(movable) else None,
        adaptive=view.plan.schedule.caps is not None,
        thinned=EXPLORED if sum(movable) == EXPLORED < len(movable) else None,
        clients=[{**one, "movable": able} for one, able in zip(view.clients, movable, strict=True)],
        private=method.private,
        drawn=drawn,
        made=_parts(view),
        charts=charts,
        data=_finite(
            {
                "charts": [chart.data for chart in charts],
                "explore": found if any(movable) else None,
                "names": [safe(client.name) for client in view.plan.clients],
            }
        ),
    )


def _verdict(view: PlanView) -> Panel:
    method = view.plan.method
    if not method.private:
        told = "This method adds no noise and spends no budget: whatever clients declare, nothing would protect them."
        return Panel(False, "NOT PRIVATE", [method.name], told)
    bounded = [c for c in view.plan.clients if not c.budget.is_public]
    if not bounded:
        told = "Every client declares its data public (ε = ∞), so nothing would be protected."
        return Panel(False, "NOT PRIVATE", [method.name], told)
    over = [c for c in bounded if c.epsilon > c.budget.epsilon * (1 + 1e-9)]
    terms = f"{bounded[0].budget.adjacency} adjacency, {bounded[0].terms.sampling.scheme} sampling"
    spent = span([min(c.epsilon, c.budget.epsilon) for c in bounded], as_epsilon)
    told = f"Noise is set so that no client would spend more than it allows: ε\u00a0=\u00a0{spent}."
    if over:
        told += (
            f" For {len(over)} of {len(bounded)} the noise of {method.calibration.by!r} pays for a part of the rounds "
            "only: their ledgers would refuse the rest."
        )
    return Panel(True, "Private, if run as planned", [method.name], told, terms)


def _key_figures(view: PlanView) -> list[tuple[str, str, str]]:
    plan = view.plan
    tiles = [
        ("Clients", str(len(plan.clients)), f"{plan.training.rounds} rounds"),
        ("Model", f"{view.dimension:,}", "parameters"),
        ("Cost", plain(view.gradients), "per-record gradients"),
    ]
    budgets = [c.budget.epsilon for c in plan.clients if not c.budget.is_public]
    if plan.method.private and budgets:
        middle = statistics.median(budgets)
        tiles.insert(1, ("Budgets", f"ε {span(budgets, as_epsilon)}", f"median {as_epsilon(middle)}"))
        tiles.append(("Noise on the aggregate", plain(view.noise_on_aggregate), "a coordinate, weighted by size"))
        tiles.append(("Turns", span([float(c.turns) for c in plan.clients]), "of each client"))
    return tiles


def _parts(view: PlanView) -> dict[str, Any]:
    """The method's parts, the settings, and the ways to per-record gradients."""
    settings = {f"training.{key}": value for key, value in vars(view.plan.training).items() if value is not None}
    ways = sorted({f"{layer.kind}: {layer.method}" for layer in view.layers})
    return {**view.plan.method.describe(), **settings, "gradient engine": ", ".join(ways)}


def _explorer_charts(found: dict[str, Any]) -> list[Chart]:
    """Frames of the explorer's charts: the page draws what is in them."""

    def frame(id_: str, title: str, note: str, summary: str, y: dict[str, Any]) -> Chart:
        layout = {"hovermode": "closest", "lead": "Series"}
        return Chart(id_, "explorer", title, note, summary, [], {"title": "the client's ε", "type": "log"}, y, layout)

    what = "step" if found["drawn"] else "round's combined update"
    charts = [
        frame(
            "noise",
            "Its noise",
            "The noise multiplier z that a budget needs. Diamond: the chosen ε; circle: as planned.",
            "Noise multiplier of the chosen client against its budget, falling from strict to loose budgets.",
            {"title": "noise multiplier z", "type": "log"},
        ),
        frame(
            "aggregate",
            "The aggregate's noise",
            f"Deviation of the noise on one coordinate of a {what}, when only this client's ε changes.",
            "Noise on the aggregate against the chosen client's budget, for each way to weigh updates.",
            {"title": "deviation of a coordinate", "type": "log"},
        ),
        frame(
            "bound",
            "The expected bound",
            "What noise and bias leave of the convergence bound; lower is better. Compare, do not read as accuracy.",
            "Convergence bound against the chosen client's budget.",
            {"title": "bound (Theorem 2)"},
        ),
    ]
    if found["drawn"]:
        told = "Probability of drawing the chosen client against its budget."
        note = "How likely each draw of a round is to fall on this client."
        return [*charts, frame("chance", "Its participation", note, told, {"title": "chance per draw"})]
    clients = found["clients"]
    order = sorted(range(len(clients)), key=lambda place: clients[place]["epsilon"] or math.inf)
    follows = {"size": "weights by size", "budget": "weights by ε", "least": "least-noise weights"}
    shares = Chart(
        "shares",
        "explorer",
        "Whose noise is it?",
        f"Each client's part of the aggregate's noise ({follows[found['follows'] or 'size']}), strictest first.",
        "Share of the aggregate's noise variance that each client brings, at the chosen budget.",
        [],
        places([clients[place]["name"] for place in order]),
        {"title": "share of the noise", "tickformat": ".0%"},
        {"hovermode": "closest", "lead": "Series", "placed": True, "order": order},
    )
    return [*charts, shares]


def _chances(view: PlanView, drawn: dict[str, Any]) -> Chart:
    """Chance of being drawn over the share of the data, against ε, a point per client (Figure 3 of the paper)."""
    ratios = (np.array(drawn["probabilities"]) / np.array(drawn["unbiased"])).tolist()
    points = [(c, ratio) for c, ratio in zip(view.plan.clients, ratios, strict=True) if not c.budget.is_public]
    epsilons, ratio = [c.budget.epsilon for c, _ in points], [one for _, one in points]
    sizes = np.array([c.records for c, _ in points], dtype=float)
    trace = {
        "type": "scatter",
        "mode": "markers",
        "name": drawn["rule"],
        "legendgroup": "curve",
        "x": [short(one, 4) for one in epsilons],
        "y": [short(one, 4) for one in ratio],
        "text": [safe(f"{c.name}, {c.records} records") for c, _ in points],
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
        {"title": "budget ε", "type": axis_type(epsilons)},
        {"title": "p over u", "rangemode": "tozero"},
        {"hovermode": "closest", "lead": "Rule", "fixed": True},
    )


def _finite(value: Any) -> Any:
    """Numbers that JSON has no word for become null; numbers are cut to six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, (list, tuple)) else value
