"""What a survey costs, and how precise its figures will be: from budgets and sizes alone, before anybody is asked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sordino.data.survey import Numbers, Survey
from sordino.engine.federation.wire import SURVEY
from sordino.errors import BadInput
from sordino.privacy.accounting import calibrate_events
from sordino.privacy.gate import Terms
from sordino.privacy.types import Budget, Event, Sampling
from sordino.server.counts import SURE, worth_pooling

PART = SURVEY
"""What a survey's tables are called in the ledger."""


@dataclass(frozen=True)
class SurveyedSite:
    """One site of a survey: its public facts, and the noise that it is asked to add."""

    name: str
    held: int
    budget: Budget
    noise: float
    epsilon: float
    """What the survey costs: ``spend`` times the budget's ε."""

    @property
    def terms(self) -> Terms:
        """What it releases: all tables, once, from all its held-out records."""
        return Terms(Sampling.full(), ((PART, self.noise),), 1, 1.0, self.budget.adjacency)


@dataclass(frozen=True)
class SurveyPlan:
    """A survey of these sites: who is asked with how much noise, and what to expect.

    The tables of f columns are one release with sensitivity √f (charged as 2√f where a record is exchanged), so every
    cell of site i has the deviation σ_i = z_i·√f (or twice that).
    """

    survey: Survey
    sites: tuple[SurveyedSite, ...]

    def deviation(self, site: SurveyedSite) -> float:
        """σ_i: the deviation of every cell."""
        return site.noise * site.budget.adjacency.sensitivity * self.survey.norm

    @cached_property
    def asked(self) -> tuple[SurveyedSite, ...]:
        """The sites that are asked, whose tables are added up: the noise of the others would drown them.

        Public facts alone decide, before anybody pays for a table that is of no use.
        """
        chosen = worth_pooling([one.held for one in self.sites], [self.deviation(one) for one in self.sites])
        return tuple(self.sites[i] for i in chosen)

    def total(self, among: Sequence[str] | None = None) -> tuple[int, float]:
        """Records and deviation of a cell in the sum of the sites that are asked, or of these among them."""
        some = [one for one in self.asked if among is None or one.name in among]
        return sum(one.held for one in some), math.sqrt(sum(self.deviation(one) ** 2 for one in some))

    def expected(self) -> list[dict[str, Any]]:
        """For every kind of figure how far it will be off: half the width of its 95 % interval.

        Missing rates: at 5 % missing, 1.96·√(p(1 − p)/N + σ²/N²). Shares of categories: at 1 in k. Quantiles, in points
        of percent: a cumulative count up to the median has the noise variance σ²·m/4 of m cells. Smallest category: the
        share that is told from 0, 1.96·σ/N and what sampling adds.
        """
        records, deviation = self.total()
        found = []
        for column in self.survey.columns:
            cells = len(column.cells)
            one = {"column": column.name, "missing": _half(0.05, records, deviation**2)}
            if isinstance(column, Numbers):
                median = _half(0.5, records, deviation**2 * cells / 4)
                found.append(one | {"quantile": median, "bin": (column.high - column.low) / column.bins})
            else:
                share = _half(1 / len(column.categories), records, deviation**2)
                found.append(one | {"share": share, "smallest": SURE * deviation / records})
        return found

    def plain(self, least: int) -> dict[str, Any]:
        """As survey.json holds it; a site with less than ``least`` held-out records is told as having fewer."""
        sites = [
            {
                "site": one.name,
                "held": {"fewer_than": least} if one.held < least else one.held,
                "epsilon": _finite(one.budget.epsilon),
                "delta": one.budget.delta,
                "adjacency": str(one.budget.adjacency),
                "survey_epsilon": _finite(one.epsilon),
                "noise": one.noise,
                "deviation": self.deviation(one),
                "asked": one in self.asked,
            }
            for one in self.sites
        ]
        return {"columns": len(self.survey.columns), "cells": self.survey.width, "sites": sites}


def plan_survey(survey: Survey, spend: float, held: Mapping[str, int], budgets: Mapping[str, Budget]) -> SurveyPlan:
    """Calibrate every site's noise to ``spend`` of its ε: one Gaussian release from a full batch."""
    empty = [name for name, count in held.items() if count < 1]
    if empty:
        raise BadInput(f"{empty[0]} has no held-out records to ask: hold a larger share out")
    names = list(held)
    events = [[Event(PART, Sampling.full(), 1.0, 1, budgets[name].adjacency)] for name in names]
    parts = [Budget(budgets[n].epsilon * spend, budgets[n].delta, budgets[n].adjacency) for n in names]
    noises = calibrate_events(events, parts)
    sites = [
        SurveyedSite(name, int(held[name]), budgets[name], float(noise), part.epsilon)
        for name, noise, part in zip(names, noises, parts)
    ]
    return SurveyPlan(survey, tuple(sites))


def _half(share: float, records: int, variance: float) -> float:
    return SURE * math.sqrt(share * (1 - share) / records + variance / records**2)


def _finite(epsilon: float) -> float | None:
    return None if math.isinf(epsilon) else epsilon
