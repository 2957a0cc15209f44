"""What held-out records say of a model, for a person: a line, or a table. Never a number without its interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

MAIN = ("accuracy", "mean_absolute_error")
ERRORS = ("mean_absolute_error", "root_mean_squared_error", "median_absolute_error")
"""The metric that stands for a model in one line; those that are no shares."""

Row = dict[str, Any]
"""One metric of one evaluation, as ``engine.scored.told`` makes it."""


def judged_line(rows: Sequence[Row]) -> str:
    """How good the model is by its main metric."""
    one = next((row for row in rows if row["metric"] in MAIN), rows[0])
    value, low, high = figures(one)
    unit = "" if one["metric"] in ERRORS else " %"
    named = one["metric"].replace("_", " ")
    return f"{named} {value}{unit} (95 % interval {low} to {high}{unit}) on held-out records"


def judged_lines(rows: Sequence[Row]) -> list[str]:
    """The same with the round, as a list of one line; an empty one where nothing was judged."""
    return [f"after round {rows[0]['round']}: {judged_line(rows)}"] if rows else []


def figures(row: Row) -> tuple[str, str, str]:
    """Value and both ends of its interval in writing; shares in percent."""
    digits = ("{:.3g}", 1.0) if row["metric"] in ERRORS else ("{:.1f}", 100.0)
    value, low, high = (digits[0].format(row[key] * digits[1]) for key in ("value", "low", "high"))
    return value, low, high


def judged_table(rows: Sequence[Row]) -> Table:
    """All metrics with their intervals, within 80 columns."""
    found = Table(header_style="bold")
    found.add_column("metric", overflow="fold")
    for word in ("value", "low", "high"):
        found.add_column(word, justify="right", no_wrap=True)
    for row in rows:
        unit = "" if row["metric"] in ERRORS else " %"
        found.add_row(row["metric"].replace("_", " "), *(one + unit for one in figures(row)))
    return found
