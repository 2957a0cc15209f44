"""What held-out records say of a model, for a person: a line, or a table. Never a number without its interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sordino.study.show import Sheet

MAIN = ("accuracy", "mean_absolute_error")
"""The metric that stands for a model in one line."""

SHARES = ("accuracy", "mean_accuracy", "recall", "balanced_accuracy")
"""Metrics that are written in percent, with whatever stands behind a stroke."""

Row = dict[str, Any]
"""One metric of one evaluation, as ``engine.scored.told`` makes it."""


def judged_line(rows: Sequence[Row]) -> str:
    """How good the model is by its main metric."""
    one = next((row for row in rows if row["metric"] in MAIN), rows[0])
    value, low, high = figures(one)
    unit = unit_of(one)
    named = one["metric"].replace("_", " ")
    return f"{named} {value}{unit} (95 % interval {low} to {high}{unit}) on held-out records"


def judged_lines(rows: Sequence[Row]) -> list[str]:
    """The same with the round, as a list of one line; an empty one where nothing was judged."""
    return [f"after round {rows[0]['round']}: {judged_line(rows)}"] if rows else []


def unit_of(row: Row) -> str:
    """What is written behind a metric's figures."""
    return " %" if row["metric"].partition("/")[0] in SHARES else ""


def figures(row: Row) -> tuple[str, str, str]:
    """Value and both ends of its interval in writing; shares in percent."""
    form, times = ("{:.1f}", 100.0) if unit_of(row) else ("{:.3g}", 1.0)
    value, low, high = (form.format(row[key] * times) for key in ("value", "low", "high"))
    return value, low, high


def judged_table(rows: Sequence[Row]) -> Sheet:
    """All metrics with their intervals."""
    found = Sheet(("metric", "value", "low", "high"), prose=("metric",))
    for row in rows:
        found.add_row(row["metric"].replace("_", " "), *(one + unit_of(row) for one in figures(row)))
    return found
