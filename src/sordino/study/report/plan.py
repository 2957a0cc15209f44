"""The plan as a page: what a study would promise every client, and what another budget would do. Nothing is trained."""

from __future__ import annotations

import math
import os
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from sordino.study.explore import EXPLORED, POINTS, explore
from sordino.study.report.figures import Chart, axis_type, places, safe
from sordino.study.report.numbers import plain, short
from sordino.study.report.page import filled, write_page
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
    bounded = [client for client in view.plan.clients if not client.budget.is_public]
    found = _explorer(view) if method.private else None
    able = [one["noises"] is not None for one in found["clients"]] if found else [False] * len(view.clients)
    charts = [_chances(view, view.selection)] if view.selection else []
    return filled(
        "plan.html",
        title=f"{name}: {method.name}" if name else method.name,
        view=view,
        method=method,
        bounded=bounded,
        median=statistics.median([c.widest[0].epsilon for c in bounded]) if bounded else None,
        spent=[min(c.widest[1], c.widest[0].epsilon) for c in bounded],
        over=sum(c.widest[1] > c.widest[0].epsilon * (1 + 1e-9) for c in bounded),
        explorer=found,
        sharing=view.sharing,
        points=POINTS,
        thinned=EXPLORED if sum(able) == EXPLORED < len(able) else None,
        clients=[{**client, "movable": movable} for client, movable in zip(view.clients, able, strict=True)],
        drawn=view.selection,
        made=_parts(view),
        charts={chart.id: chart for chart in charts},
        drawing=bool(charts or found),
        data=_finite(
            {
                "charts": [chart.data for chart in charts],
                "explore": found,
                "names": [safe(client.name) for client in view.plan.clients],
            }
        ),
    )


def _explorer(view: PlanView) -> dict[str, Any] | None:
    """What another ε would do, and the clients' places along an axis, strictest first; None where nobody can move."""
    found = explore(view.plan, view.dimension, view.seed)
    clients = found["clients"]
    order = sorted(range(len(clients)), key=lambda place: clients[place]["epsilon"] or math.inf)
    axis = places([clients[place]["name"] for place in order])
    return {**found, "order": order, "axis": axis} if any(client["noises"] for client in clients) else None


def _parts(view: PlanView) -> dict[str, Any]:
    """The method's parts, the settings, and the ways to per-record gradients."""
    settings = {f"training.{key}": value for key, value in vars(view.plan.training).items() if value is not None}
    return {**view.plan.method.describe(), **settings, "gradient engine": view.engine}


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
        "text": [safe(f"{c.name}, {c.records} {c.budget.unit}s") for c, _ in points],
        "marker": {"color": "@m0", "opacity": 0.75, "size": (6 + 10 * np.sqrt(sizes / sizes.max())).round(1).tolist()},
        "hovertemplate": "%{text}<br>ε %{x:.3g}: %{y:.3g} times its share<extra></extra>",
    }
    return Chart(
        id="who",
        summary=f"Chance of being drawn over the share of the data, from {plain(min(ratio))} to {plain(max(ratio))}.",
        traces=[trace],
        x={"title": "budget ε", "type": axis_type(epsilons)},
        y={"title": "p over u", "rangemode": "tozero"},
        layout={"hovermode": "closest", "lead": "Rule", "fixed": True},
    )


def _finite(value: Any) -> Any:
    """Numbers that JSON has no word for become null; numbers are cut to six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, (list, tuple)) else value
