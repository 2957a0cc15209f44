"""The report: one self-contained HTML file for one run or for a comparison of several methods and seeds.

It answers, in this order: is it private, is it good, is it fair, who contributed, what was run. The file works from
disk without a network: style, script, charts' library and data are inside it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from sordino._version import __version__
from sordino.study.report import sections
from sordino.study.report.charts import drawn
from sordino.study.report.combining import combining_table
from sordino.study.report.fairness import budget_table
from sordino.study.report.figure import Chart
from sordino.study.report.gather import Group, Result, dig, grouped
from sordino.study.report.page import as_json, asset, filled, plotly, script, write_page
from sordino.study.report.pieces import figures, mark
from sordino.study.report.promises import sheets as sheets_of
from sordino.study.report.traces import COLOURS

__all__ = ["render", "write"]


def render(results: Sequence[Result], title: str | None = None) -> str:
    """The report on ``results`` (dicts of ``result.json``, schema 1) as one HTML document.

    Results of the same method and study that differ in their seed are drawn as one line, mean ± standard deviation.

    Guarantees
    ----------
    A run whose result does not say ``"private": true``, a client that spent more than it allowed, and a client whose
    spending is not recorded are each named as such on the first screen. Metrics shown are the observer's: the page
    says that the privacy guarantee does not cover them.
    """
    groups = grouped(results)
    heading = title or _title(groups)
    charts = drawn(groups)
    pages = sheets_of(groups)
    data = {
        "methods": [{"label": group.label, "index": group.index} for group in groups],
        "marks": [mark(index) for index in range(COLOURS)],
        "charts": [_spec(chart) for chart in charts],
        "clients": {**sections.sheet_data(pages), "shown": sections.first_sheet(pages)},
    }
    simulated = [run.simulated for group in groups for run in group.runs]
    parts = {
        "title": escape(heading),
        "kind": "Simulation" if all(simulated) else "Deployment" if not any(simulated) else "Simulation and deployment",
        "simulation": sections.simulation(groups) if any(simulated) else "",
        "verdict": sections.verdict(groups),
        "tiles": sections.key_figures(groups),
        "privacy-table": sections.privacy_table(groups),
        "quality-table": sections.quality_table(groups),
        "fairness-table": sections.fairness_table(groups),
        "budget-table": budget_table(groups),
        "combining-table": combining_table(groups),
        "contribution-note": escape(sections.contribution_note(groups)),
        "run-table": sections.run_table(groups),
        "study-table": sections.study_table(groups),
        "versions-table": sections.versions_table(groups),
        **{f"{name}-figures": figures(charts, name) for name in ("private", "good", "fair", "contributed")},
        "version": escape(__version__),
        "style": asset("page.css"),
        "data": as_json(data),
        "plotly": plotly(),
        "script": script("page.js"),
    }
    return filled("page.html", parts)


def write(results: Sequence[Result], path: str | os.PathLike[str], title: str | None = None) -> Path:
    """Write the report to ``path``: whole or not at all, an earlier file stays until the new one is complete."""
    return write_page(render(results, title), path)


def _title(groups: Sequence[Group]) -> str:
    """What was studied, and the method where there is only one."""
    what = groups[0].label if len(groups) == 1 else f"{len(groups)} methods compared"
    study = groups[0].runs[0].study
    named = (("name",), ("study", "name"), ("data", "source", "name"), ("data", "name"))
    name = next((name for path in named if isinstance(name := dig(study, path), str)), None)
    return f"{name}: {what}" if name else what


def _spec(chart: Chart) -> dict[str, Any]:
    return {"id": chart.id, "traces": chart.traces, "x": chart.x, "y": chart.y, **chart.layout}
