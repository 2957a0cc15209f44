"""The report: one self-contained HTML file for one run or for a comparison of several methods and seeds.

It answers, in this order: is it private, is it good, is it fair, who contributed, what was run. The file works from
disk without a network: style, script, charts' library and data are inside it.

The way of a result: ``gather`` sorts results into methods and seeds; ``promises``, ``tables`` and ``charts`` make plain
values of them, section by section; ``page`` puts the values into the templates that lie beside it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from sordino.privacy.statement import ADJACENCY, words_of
from sordino.privacy.types import RECORD
from sordino.study.report import compared, paid, promises, tables
from sordino.study.report.card import card_text
from sordino.study.report.charts import MAX_DIAGNOSTICS, drawn
from sordino.study.report.figures import slug
from sordino.study.report.gather import (
    Group,
    Result,
    diagnostics,
    every_run,
    everyone_always,
    flat,
    grouped,
    study_name,
)
from sordino.study.report.numbers import listed
from sordino.study.report.page import filled, write_page

__all__ = ["render", "write"]


def render(results: Sequence[Result], title: str | None = None) -> str:
    """The report on ``results`` (dicts of ``result.json``, schema 1 or 2) as one HTML document.

    Results of the same method and study that differ in their seed are drawn as one line, mean ± standard deviation.

    Guarantees
    ----------
    A run whose result does not say ``"private": true``, a client that spent more than it allowed, and a client whose
    spending is not recorded are each named as such on the first screen. Estimates that were paid for stand in a section
    of their own, with their intervals; all other metrics are the observer's, and the page says that the privacy
    guarantee does not cover them.
    """
    groups = grouped(results)
    runs = every_run(groups)
    charts = drawn(groups)
    recorded = diagnostics(groups)
    named = {client.unit for run in runs for client in run.clients}
    unit = words_of(named.pop() if len(named) == 1 else "unit" if named else RECORD)
    return filled(
        "page.html",
        title=title or _title(groups),
        groups=groups,
        several=any(len(group.runs) > 1 for group in groups),
        simulated=sorted({run.simulated for run in runs}),
        verdicts=promises.verdicts(groups),
        terms=promises.terms(groups),
        trusts=promises.trusts(groups),
        weak=promises.WEAK,
        key=tables.key_figures(groups),
        privacy=tables.privacy_rows(groups),
        unit=unit,
        adjacency={kind: words.format(**unit) for kind, words in ADJACENCY.items()},
        paid=paid.section(groups),
        compared=compared.section(groups),
        confusions=compared.confusions(groups),
        diverged=tables.diverged(groups),
        known=tables.at_the_end(groups),
        by_budget=tables.budget_rows(groups),
        everyone=everyone_always(groups),
        undrawn=listed(recorded[MAX_DIAGNOSTICS:]),
        combining=tables.combining_rows(groups),
        observed=any(row.get("observer") for run in runs for row in run.rounds),
        versions=tables.told_once([{str(k): str(v) for k, v in run.versions.items()} for run in runs if run.versions]),
        settings=tables.told_once([flat(run.study) for run in runs]),
        card=card_text(results[0]) if len(results) == 1 else None,
        charts={chart.id: chart for chart in charts},
        diagnosed={slug("diagnostics", name): name for name in recorded[:MAX_DIAGNOSTICS]},
        drawing=bool(charts),
        data={
            "methods": [
                {key: getattr(group, key) for key in ("label", "index", "colour", "symbol")} for group in groups
            ],
            "charts": [chart.data for chart in charts],
            "clients": promises.sheets(groups),
        },
    )


def write(results: Sequence[Result], path: str | os.PathLike[str], title: str | None = None) -> Path:
    """Write the report to ``path``: whole or not at all, an earlier file stays until the new one is complete."""
    return write_page(render(results, title), path)


def _title(groups: Sequence[Group]) -> str:
    """What was studied, and the method where there is only one."""
    what = groups[0].label if len(groups) == 1 else f"{len(groups)} methods compared"
    name = study_name(groups[0].runs[0].study)
    return f"{name}: {what}" if name else what
