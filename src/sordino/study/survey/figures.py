"""What a survey found: missing rates, shares of categories, quantiles, class balance, each with its interval.

Post-processing of what sites released, and of public facts: free, and covered by the sites' budgets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sordino.data.survey import Categories, Numbers
from sordino.server.counts import SURE, Counts, Estimate, quantiles
from sordino.study.survey.plan import SurveyPlan

LEVELS = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


@dataclass(frozen=True)
class ColumnFigures:
    """What is known of one column; shares are of all surveyed records.

    ``values``: the quantiles at ``LEVELS`` of a number column; ``shares``: of each declared category, and "other";
    ``outside``: below and above the declared range together; ``odd``: text where a number belongs. ``known``: how many
    of the surveyed records have a value here.
    """

    column: Numbers | Categories
    missing: Estimate
    known: Estimate
    values: tuple[Estimate, ...] = ()
    shares: tuple[tuple[str, Estimate], ...] = ()
    outside: Estimate | None = None
    odd: Estimate | None = None

    def plain(self, least: int) -> dict[str, Any]:
        """As survey.json holds it; a count below ``least`` is told as fewer than that."""
        found: dict[str, Any] = {"column": self.column.name, "missing": self.missing.plain()}
        known = self.known
        found["known"] = {"fewer_than": least} if known.value < least else known.plain()
        if isinstance(self.column, Numbers):
            found |= {"kind": "number", "low": self.column.low, "high": self.column.high, "log": self.column.log}
            found["quantiles"] = [{"level": at, **one.plain()} for at, one in zip(LEVELS, self.values)]
            found |= {name: one.plain() for name, one in (("outside", self.outside), ("odd", self.odd)) if one}
        else:
            found |= {"kind": "categories"}
            found["shares"] = [
                {"value": name, "told_from_zero": told_from_zero(one), "share": one.plain()}
                for name, one in self.shares
            ]
        return found


@dataclass(frozen=True)
class Figures:
    """All that a survey found: of how many records of which sites, and column by column."""

    plan: SurveyPlan
    sites: tuple[str, ...]
    records: int
    deviation: float
    columns: tuple[ColumnFigures, ...]

    def of(self, name: str) -> ColumnFigures:
        """The figures of one column."""
        return next(one for one in self.columns if one.column.name == name)


def told_from_zero(share: Estimate) -> bool:
    """Whether a share is larger than 0 for all that noise can do: its interval does not begin at 0."""
    return share.low is not None and share.low > 0.0


def find(plan: SurveyPlan, tables: Mapping[str, NDArray[np.float64]]) -> Figures:
    """The figures of the tables that sites gave, which are added up."""
    sites = tuple(one.name for one in plan.asked if one.name in tables)
    records, deviation = plan.total(sites)
    whole = np.sum([tables[name] for name in sites], axis=0)
    columns = []
    for column, part in zip(plan.survey.columns, plan.survey.parts(whole)):
        columns.append(_figures(column, Counts.settled(part, records, deviation)))
    return Figures(plan, sites, records, deviation, tuple(columns))


def _figures(column: Numbers | Categories, table: Counts) -> ColumnFigures:
    missing = table.share([column.unknown])
    if isinstance(column, Numbers):
        known = _count(table, range(column.bins + 2))
        values = tuple(quantiles(table, column.edges, LEVELS))
        outside, odd = table.share([0, column.bins + 1]), table.share([column.odd])
        return ColumnFigures(column, missing, known, values, outside=outside, odd=odd)
    shares = tuple((name, table.share([k])) for k, name in enumerate(column.cells[:-1]))
    return ColumnFigures(column, missing, _count(table, range(len(column.cells) - 1)), shares=shares)


def _count(table: Counts, chosen: range) -> Estimate:
    """How many surveyed records are in these cells: noise alone, for these very records are meant."""
    weights = np.zeros(len(table.cells))
    weights[list(chosen)] = 1.0
    far = SURE * math.sqrt(table.variance(weights))
    value = float(weights @ table.cells)
    return Estimate(*(min(float(table.records), max(0.0, one)) for one in (value, value - far, value + far)))
