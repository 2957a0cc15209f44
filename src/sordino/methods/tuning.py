"""Several runs under one budget: how much more noise each needs, so that all of them together cost no more than one.

Every run that serves to choose is charged in full, because the server sees it. All runs are declared before the first
release, so rates and noises are fixed in advance and the accountant composes them as one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sordino.errors import BadInput
from sordino.methods.evaluation import Judging
from sordino.methods.plan import Plan, noises_of
from sordino.privacy.accounting import calibrate_events, composed_epsilon
from sordino.privacy.types import Budget, Event

Factors = NDArray[np.float64]
Noises = list[list[list[float]]]


def training_factors(plans: Sequence[Plan]) -> Factors:
    """By client the smallest s ≥ 1 with ε(∪_j events of run j, each noise times s) ≤ ε_i; 1 for public data.

    Every run keeps its noise relative to the others. Where all have one rate and one number of steps T, s z is the
    noise of a single run of k T steps.
    """
    if any(client.levels for client in plans[0].clients):
        raise BadInput(
            "[tune] does not go with levels of consent yet: all candidates would need rates by level that pay for them "
            "together; choose the settings by a public data set, or give every client one budget"
        )
    budgets = [client.budget for client in plans[0].clients]
    if any(plan.method.calibrate.strictest for plan in plans):  # everybody is promised what the strictest is
        least = min(budget.epsilon for budget in budgets)
        budgets = [replace(budget, epsilon=least) for budget in budgets]
    each = zip(*(plan.clients for plan in plans), strict=True)
    return _factors([[event for client in own for event in client.total() if event.count] for own in each], budgets)


def evaluation_factors(judged: Sequence[Judging], budgets: Sequence[Budget]) -> Factors:
    """The same for the evaluations of all runs, which together may use ``evaluation.spend`` of ε_i.

    For k runs that are evaluated equally often this is √k.
    """
    targets = [replace(budget, epsilon=budget.epsilon * judged[0].settings.spend) for budget in budgets]
    each = zip(*(one.terms for one in judged), strict=True)
    events = [[terms.event.times(one.times) for terms, one in zip(own, judged)] for own in each]
    return _factors(events, targets)


def _factors(events: Sequence[Sequence[Event]], budgets: Sequence[Budget]) -> Factors:
    """1 where events fit their budget as they are, else the factor on their noises with which they do."""
    found = np.ones(len(events))
    bounded = [i for i, budget in enumerate(budgets) if not budget.is_public and events[i]]
    if not bounded:
        return found
    costs = composed_epsilon([events[i] for i in bounded], [budgets[i].delta for i in bounded])
    over = [i for i, cost in zip(bounded, costs) if cost > budgets[i].epsilon]
    if over:
        found[over] = calibrate_events([events[i] for i in over], [budgets[i] for i in over])
    return np.maximum(found, 1.0)


def louder(plan: Plan, factors: Factors) -> Noises:
    """A plan's noise multipliers, every client's times its factor, as ``make_plan`` takes them."""
    pairs = zip(noises_of(plan), factors.tolist(), strict=True)
    return [[[z * factor for z in kind] for kind in own] for own, factor in pairs]


def judged_louder(judging: Judging, factors: Factors, runs: int) -> Judging:
    """The evaluations with every client's noise times its factor; intervals of all so many runs hold at once."""
    terms = tuple(
        replace(one, parts=tuple((part, z * float(factor)) for part, z in one.parts))
        for one, factor in zip(judging.terms, factors, strict=True)
    )
    return replace(judging, terms=terms, level=1.0 - (1.0 - judging.level) / runs)
