"""What released score tables say, as a round's record and a result hold it; the same in simulation and deployed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sordino.methods import Plan
from sordino.methods.evaluation import Judging
from sordino.privacy.accounting import composed_epsilon
from sordino.server.scores import Scores, estimates


def told(
    plan: Plan, judging: Judging, values: Mapping[int, Mapping[str, Tensor]], number: int, times: int
) -> list[dict[str, Any]]:
    """Every metric with its interval, and the ε that the strictest and loosest held-out accounts have spent on it.

    ``values``: by client, what it released; ``times``: how many evaluations there were, this one included.
    """
    scores = [
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
    if not scores:
        return []
    spent = _spent(plan, judging, list(values), times)
    found = estimates(scores, judging.cells)
    return [
        {"round": number, "metric": one.metric, "value": one.value, "low": one.low, "high": one.high, "epsilon": spent}
        for one in found
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
