"""Plotly traces of one method: a line, a band, a cloud of clients. One colour and one marker per method, everywhere.

Colours are tokens: ``@m0`` is the first method's, ``@m0~0.16`` the same, nearly transparent; page.js reads their
values from page.css for the theme in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sordino.study.report.gather import Client, Curve, Group, Run
from sordino.study.report.numbers import short

Trace = dict[str, Any]

COLOURS = 8
"""Colours of the palette in page.css; a ninth method takes the first colour again with a dashed line."""

SYMBOLS = ("circle", "diamond", "square", "triangle-up", "cross", "x", "triangle-down", "star")
DASHES = ("solid", "dash", "dot", "dashdot")


def colour(group: Group) -> str:
    """The colour token of a method."""
    return f"@m{group.index % COLOURS}"


def line(group: Group, found: Curve, share: bool) -> Trace:
    """The mean over seeds by round (a dot when there is one round only)."""
    return {
        "type": "scatter",
        "mode": "lines" if len(found.rounds) > 1 else "markers",
        "name": safe(group.label),
        "legendgroup": f"m{group.index}",
        "x": found.rounds,
        "y": [short(value) for value in found.mean],
        "line": {"color": colour(group), "width": 2.25, "dash": _dash(group)},
        "marker": {"color": colour(group), "symbol": _symbol(group), "size": 8},
        "hovertemplate": "%{y:.1%}" if share else "%{y:.4g}",
    }


def band(group: Group, found: Curve, floor: float | None) -> Trace:
    """One closed outline: forward along mean + deviation, back along mean − deviation.

    ``floor`` cuts the lower edge where a logarithmic axis has no room for it.
    """
    pairs = [(mean, deviation or 0.0) for mean, deviation in zip(found.mean, found.deviation, strict=True)]
    low = [mean - deviation for mean, deviation in pairs]
    if floor is not None:
        low = [max(value, floor) for value in low]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": safe(f"{group.label} ± deviation"),
        "legendgroup": f"m{group.index}",
        "x": [*found.rounds, *reversed(found.rounds)],
        "y": [
            *(short(mean + deviation, 4) for mean, deviation in pairs),
            *(short(value, 4) for value in reversed(low)),
        ],
        "fill": "toself",
        "fillcolor": f"{colour(group)}~0.16",
        "line": {"width": 0, "color": colour(group)},
        "hoverinfo": "skip",
        "meta": "band",
    }


def cloud(
    group: Group, xs: Sequence[float], ys: Sequence[float], points: Sequence[tuple[Client, Run]], hover: str
) -> Trace:
    """A point per client and seed; hovering names the client."""
    several = len(group.runs) > 1
    return {
        "type": "scatter",
        "mode": "markers",
        "name": safe(group.label),
        "legendgroup": f"m{group.index}",
        "x": [short(x, 4) for x in xs],
        "y": [short(y, 4) for y in ys],
        "text": [safe(f"{c.name}, seed {run.seed}" if several else c.name) for c, run in points],
        "marker": marker(group, len(xs)),
        "hovertemplate": "%{text}<br>" + hover,
    }


def marker(group: Group, count: int) -> dict[str, Any]:
    """Smaller and clearer when there are many; the outline keeps overlapping points apart."""
    size, opacity = (9, 0.9) if count <= 60 else (6, 0.65)
    return {
        "color": colour(group),
        "symbol": _symbol(group),
        "size": size,
        "opacity": opacity,
        "line": {"width": 0.75, "color": "@card"},
    }


def safe(text: str) -> str:
    """Text for plotly, which reads a little HTML: names are shown as they are."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _symbol(group: Group) -> str:
    return SYMBOLS[group.index % len(SYMBOLS)]


def _dash(group: Group) -> str:
    return DASHES[(group.index // COLOURS) % len(DASHES)]
