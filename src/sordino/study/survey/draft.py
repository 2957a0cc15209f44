"""A study drafted from a survey: its schema made of released figures, everything else as the survey's study has it.

Every line of the schema says in a comment what it rests on. All of it is post-processing, so the constants are public.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sordino.data.schema import MISSING
from sordino.data.survey import Categories, Numbers
from sordino.data.toml import toml_key, toml_value
from sordino.errors import BadInput
from sordino.server.counts import Estimate
from sordino.study.file import Study
from sordino.study.survey.figures import LEVELS, ColumnFigures, Figures, told_from_zero

FIRST, MIDDLE, LAST = LEVELS.index(0.01), LEVELS.index(0.5), LEVELS.index(0.99)

VAGUE = 0.5
"""Where the interval of the median is wider than this share of the declared range, the declared range is kept."""

_HEADER = """\
# Drafted from a survey of {records} held-out records of {sites}.
# Every constant of [data.schema] is public: declared in the survey's study, or computed from what sites released under
# their budgets. Intervals hold with 95 %. Read it, change what you know better, then: sordino plan, run, serve.
"""


def draft(study: Study, figures: Figures) -> str:
    """A whole study file: ``[data.schema]`` from the figures; budgets, deployment and seed as the study has them."""
    table = study.table()
    own = {key: value for key, value in table.get("data", {}).items() if key not in ("schema", "name")}
    folder = own.pop("folder", None) or table.get("data", {}).get("name")
    said = {"study": table.get("study", {}), "data": {**({"folder": folder} if folder else {}), **own}}
    said["data"].setdefault("invalid", "null")
    for name in ("budgets", "model", "method", "training", "evaluation", "trust", "deployment"):
        if table.get(name):
            said[name] = table[name]
    where = ", ".join(map(toml_value, figures.sites))
    lines = [_HEADER.format(records=_number(figures.records, study.survey.least), sites=where)]
    for name, section in said.items():
        lines += [*_section(name, section), ""]
        if name == "data":
            lines += [*_schema(study, figures), ""]
    return "\n".join(lines).rstrip() + "\n"


def _section(name: str, section: Mapping[str, Any]) -> list[str]:
    return [f"[{name}]", *(f"{toml_key(key)} = {toml_value(value)}" for key, value in section.items())]


def _schema(study: Study, figures: Figures) -> list[str]:
    """The lines of ``[data.schema]`` and its tables."""
    survey, least = figures.plan.survey, study.survey.least
    target = figures.of(survey.target)
    lines = ["[data.schema]", f"target = {toml_value(survey.target)}", *_target(target)]
    if study.survey.unit is not None:
        lines.append(f"unit = {toml_value(study.survey.unit)}  # who is protected, with all of their records at a site")
    if survey.missing != MISSING:
        lines.append(f"missing = {toml_value(list(survey.missing))}")
    numeric, categorical, fill = [], [], []
    for one in figures.columns:
        key = toml_key(one.column.name)
        if one is target:
            continue
        if one.known.value < least:
            numeric.append(f"# {key} is left out: fewer than {least} of the surveyed records have a value")
        elif isinstance(one.column, Numbers):
            (low, high), why = range_of(one)
            bounds = [low, high, "log"] if one.column.log else [low, high]
            numeric.append(f"{key} = {toml_value(bounds)}  # {why}; {_odd(one)}")
            middle = min(high, max(low, _short(one.values[MIDDLE].value, high - low)))
            fill.append(f"{key} = {toml_value(middle)}  # the median; missing: {percent(one.missing)}")
        else:
            kept, why = categories_of(one)
            line = f"{key} = {toml_value(kept)}  # {why}; missing: {percent(one.missing)}, as other"
            categorical.append(line if kept else f"# {key} is left out: no declared value can be told from 0")
    if not any(line[0] != "#" for line in (*numeric, *categorical)):
        raise BadInput(
            "no column has enough to draft a schema from: hold out more records, raise survey.spend, or declare fewer "
            "columns"
        )
    for title, body in (("numeric", numeric), ("categorical", categorical), ("fill", fill)):
        lines += ["", f"[data.schema.{title}]", *body] if body else []
    return lines


def _target(target: ColumnFigures) -> list[str]:
    if isinstance(target.column, Categories):
        balance = ", ".join(f"{toml_value(name)} {percent(one)}" for name, one in target.shares)
        classes = toml_value(list(target.column.categories))
        told = f"# balance: {balance}; missing {percent(target.missing)}"
        return ['task = "classification"', told, f"classes = {classes}"]
    (low, high), why = range_of(target)
    return ['task = "regression"', f"range = {toml_value([low, high])}  # {why}; {_odd(target)}"]


def range_of(one: ColumnFigures) -> tuple[tuple[float, float], str]:
    """The drafted range of a number column and why: 1st to 99th percentile, rounded outwards, within the declared one.

    Where the survey says too little (its median's interval is open, or wider than half the declared range) the declared
    range stays.
    """
    column = one.column
    assert isinstance(column, Numbers)
    first, middle, last = one.values[FIRST], one.values[MIDDLE], one.values[LAST]
    wide = math.inf if middle.low is None or middle.high is None else middle.high - middle.low
    if wide > VAGUE * (column.high - column.low):
        return (column.low, column.high), "as declared: the survey says too little"
    low, high = outwards(first.value, last.value)
    low, high = max(low, column.low), min(high, column.high)
    if not low < high:
        return (column.low, column.high), "as declared: nearly all values are alike"
    return (low, high), f"1 % {within(first)} to 99 % {within(last)}"


def categories_of(one: ColumnFigures) -> tuple[list[str], str]:
    """The declared values that can be told from 0, and what is said about all of them."""
    kept = [name for name, share in one.shares[:-1] if told_from_zero(share)]
    gone = [name for name, share in one.shares[:-1] if not told_from_zero(share)]
    told = ", ".join(percent(share) for name, share in one.shares[:-1] if name in kept)
    rest = f"; not told from 0: {', '.join(map(toml_value, gone))}" if gone else ""
    return kept, f"{told}; other {percent(one.shares[-1][1])}{rest}"


def outwards(low: float, high: float) -> tuple[float, float]:
    """Both ends moved outwards to multiples of a power of ten between a hundredth and a tenth of the width."""
    if not low < high:
        return low, high
    digits = 1 - math.floor(math.log10(high - low))
    step = 10.0**-digits
    return _clean(math.floor(low / step + 1e-9) * step, digits), _clean(math.ceil(high / step - 1e-9) * step, digits)


def _short(value: float, width: float) -> float:
    """A value with as many digits as matter in a range of this width."""
    return _clean(value, 2 - math.floor(math.log10(width)))


def _clean(value: float, digits: int) -> float:
    return float(round(value, digits)) + 0.0


def percent(share: Estimate) -> str:
    """A share with its interval, in percent."""
    low, high = (100 * (0.0 if end is None else end) for end in (share.low, share.high))
    return f"{100 * share.value:.3g} % ({low:.3g} … {high:.3g})"


def within(one: Estimate) -> str:
    """A value with its interval; an open end is outside the declared range."""
    low, high = ("outside" if end is None else f"{end:.4g}" for end in (one.low, one.high))
    return f"{one.value:.4g} ({low} … {high})"


def _odd(one: ColumnFigures) -> str:
    return f"no number: {percent(one.odd)}" if one.odd is not None else ""


def _number(records: int, least: int) -> str:
    return f"fewer than {least}" if records < least else str(records)
