"""A survey's plan and figures as tables for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from sordino.study.show import Sheet
from sordino.study.survey.plan import SurveyPlan

SHOWN = 8
"""Categories of a column that a terminal shows; survey.json has all."""


def show_plan(plan: SurveyPlan, least: int, assumed: bool = False) -> Iterator[RenderableType]:
    """What it costs every site, and how precise the figures will be."""
    about = plan.plain(least)
    sites = _table("the survey's cost", "site", "held out", "ε", "for it", "noise z", "± a cell", "asked")
    for one in about["sites"]:
        epsilons = ["∞" if one[key] is None else f"{one[key]:.3g}" for key in ("epsilon", "survey_epsilon")]
        numbers = [f"{one['noise']:.3g}", f"{one['deviation']:.3g}"]
        sites.add_row(one["site"], _held(one["held"]), *epsilons, *numbers, "yes" if one["asked"] else "no")
    yield sites
    if not all(one["asked"] for one in about["sites"]):
        yield Text("not asked: its noise is so large for its records that the figures are better without it")
    expected = _table("how far figures will be off (95 %)", "column", "missing", "share", "told from 0", "quantile")
    for one in plan.expected():
        shares = [f"± {100 * one[key]:.2g} %" if key in one else "" for key in ("missing", "share")]
        least_share = f"from {100 * one['smallest']:.2g} %" if "smallest" in one else ""
        quantile = f"± {100 * one['quantile']:.2g} points" if "quantile" in one else ""
        expected.add_row(one["column"], *shares, least_share, quantile)
    yield expected
    size = f"{about['columns']} columns, {about['cells']} cells: one release a site, from held-out records only"
    yield Text(f"{size}; training budgets stay untouched" + ("; held-out sizes are assumed" if assumed else ""))


def show_result(result: Mapping[str, Any]) -> Iterator[RenderableType]:
    """What was found, and what every site paid."""
    table = _table(f"{_held(result['records'])} records of {len(result['sites'])} sites", "column", "missing", "what")
    for one in result["columns"]:
        table.add_row(one["column"], _percent(one["missing"]), "\n".join(_lines(one)))
    yield table
    paid = _table("ε of held-out records", "site", "this survey", "so far")
    for name, one in result["spent"].items():
        paid.add_row(name, *(_epsilon(one.get(key)) for key in ("survey_epsilon", "held_epsilon")))
    yield paid
    for name, why in result["refused"].items():
        yield Text(f"{name} did not take part: {why}", style="yellow")


def figure_rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All figures of a survey with their intervals, a row each: what programs read."""
    rows = []
    for one in result["columns"]:
        found = {"missing": one["missing"]}
        if one["kind"] == "number":
            found |= {"outside": one["outside"], "odd": one["odd"]}
            found |= {f"quantile {quantile['level']:g}": quantile for quantile in one["quantiles"]}
        else:
            found |= {f"share of {share['value']}": share["share"] for share in one["shares"]}
        ends = ("value", "low", "high")
        rows += [{"column": one["column"], "figure": name, **{e: at[e] for e in ends}} for name, at in found.items()]
    return rows


def _lines(one: Mapping[str, Any]) -> Iterator[str]:
    if one["kind"] == "number":
        named = {round(100 * q["level"]): q for q in one["quantiles"]}
        for level in (1, 50, 99):
            yield f"{level:>2} %: {_within(named[level])}"
        if one["outside"]["low"] > 0.0:
            yield f"outside {one['low']:g} … {one['high']:g}: {_percent(one['outside'])}"
        if one["odd"]["low"] > 0.0:
            yield f"no number: {_percent(one['odd'])}"
        return
    shares = one["shares"]
    told = [share for share in shares if share["told_from_zero"]]
    for share in told[:SHOWN]:
        yield f"{share['value']}: {_percent(share['share'])}"
    if len(told) > SHOWN:
        yield f"… and {len(told) - SHOWN} more (survey.json)"
    if len(told) < len(shares):
        yield f"not told from 0: {', '.join(share['value'] for share in shares if not share['told_from_zero'])}"


def _table(title: str, *columns: str) -> Sheet:
    return Sheet(columns, prose=("what",), title=title)


def _held(held: Any) -> str:
    return f"< {held['fewer_than']}" if isinstance(held, Mapping) else str(held)


def _percent(share: Mapping[str, Any]) -> str:
    return f"{100 * share['value']:.3g} % ({100 * share['low']:.2g} … {100 * share['high']:.2g})"


def _within(one: Mapping[str, Any]) -> str:
    low, high = ("outside" if end is None else f"{end:.4g}" for end in (one["low"], one["high"]))
    return f"{one['value']:.4g} ({low} … {high})"


def _epsilon(value: float | None) -> str:
    return "∞" if value is None or math.isinf(value) else f"{value:.4g}"
