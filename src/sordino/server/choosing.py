"""Choosing by what was released: the best round, whether to stop, the best of several runs.

Everything here is computed from estimates that were paid for, so it costs nothing and the guarantee covers it. Rows are
those of ``result["evaluation"]``: a metric of a round, with its interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

DECIDING = {"accuracy": 1.0, "mean_absolute_error": -1.0}
"""The metrics that decide, one for classes and one for numbers, each with the sign that makes more of it better."""

Row = Mapping[str, Any]


def deciding(rows: Sequence[Row]) -> list[Row]:
    """One row a round, in the rounds' order: that of the metric which decides."""
    return [row for row in rows if row["metric"] in DECIDING]


def merit(row: Row) -> float:
    """An estimate such that more is better."""
    return DECIDING[row["metric"]] * float(row["value"])


def best(rows: Sequence[Row]) -> Row | None:
    """The row of the round with the best estimate, of equal ones the first; None where nothing was evaluated."""
    return max(deciding(rows), key=merit, default=None)


def stalled(rows: Sequence[Row], patience: int) -> bool:
    """Whether the last ``patience`` evaluations are no better than the best one before them.

    m_t ≤ max_{s ≤ T − patience} m_s for all t > T − patience, of T evaluations.
    """
    merits = [merit(row) for row in deciding(rows)]
    return len(merits) > patience and max(merits[-patience:]) <= max(merits[:-patience])
