"""What released score tables say, as a round's record and a result hold it; the same in simulation and deployed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sordino.methods import Plan
from sordino.methods.evaluation import Judging
from sordino.privacy.accounting import composed_epsilon
from sordino.server.scores import Estimate, Scores, estimates, threshold


def told(
    plan: Plan, judging: Judging, values: Mapping[int, Mapping[str, Tensor]], number: int, times: int
) -> list[dict[str, Any]]:
    """Every metric with its interval, and the ε that the strictest and loosest held-out accounts have spent on it.

    ``values``: by client, what it released; ``times``: how many evaluations there were, this one included.
    """
    scores = _scores(plan, judging, values)
    if not scores:
        return []
    spent = _spent(plan, judging, list(values), times)
    found = estimates(scores, judging.cells, judging.level)
    return [{"round": number, **_figures(one), "epsilon": spent} for one in found]


def edge(
    plan: Plan, judging: Judging, values: Mapping[int, Mapping[str, Tensor]], number: int
) -> dict[str, Any] | None:
    """For two classes: from which P(class 1) on to answer class 1, for the best balanced accuracy, and what it gives.

    Chosen from the released tables, so it costs nothing; its intervals hold whichever edge was chosen.
    """
    if judging.cells.kind != "binary" or not values:
        return None
    found = threshold(_scores(plan, judging, values), judging.cells, level=judging.level)
    told = {one.metric: _figures(one) for one in (found.recall, found.false_positive_rate)}
    return {"round": number, "edge": found.edge, **told}


def _figures(one: Estimate) -> dict[str, Any]:
    return {"metric": one.metric, "value": one.value, "low": one.low, "high": one.high}


def _scores(plan: Plan, judging: Judging, values: Mapping[int, Mapping[str, Tensor]]) -> list[Scores]:
    return [
        Scores(
            plan.clients[i].name,
            parts["scores"].double().numpy(),
            float(parts["correct"]) if "correct" in parts else 0.0,
            judging.held[i],
            _deviation(judging, i, "scores"),
            _deviation(judging, i, "correct") if "correct" in parts else 0.0,
        )
        for i, parts in sorted(values.items())
    ]


def _deviation(judging: Judging, client: int, part: str) -> float:
    """Deviation of the noise on one count."""
    terms = judging.terms[client]
    return terms.noise(part) * terms.adjacency.sensitivity


def _spent(plan: Plan, judging: Judging, clients: list[int], times: int) -> float | None:
    """The largest ε that so many evaluations have cost anybody with a finite budget."""
    bounded = [i for i in clients if not plan.clients[i].budget.is_public]
    if not plan.method.private or not bounded:
        return None
    events = [[judging.terms[i].event.times(times)] for i in bounded]
    return float(composed_epsilon(events, [plan.clients[i].budget.delta for i in bounded]).max())
