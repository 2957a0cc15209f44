"""What a selection rule does, before training: who is drawn how often, what it biases, how much noise it spares."""

from __future__ import annotations

from typing import Any

import numpy as np

from sordino.methods import Plan
from sordino.methods.plan import ClientPlan
from sordino.methods.selection import Setting, aware_probabilities, noise_factors
from sordino.privacy.accounting import affordable
from sordino.server import bounds, select


def describe_choice(plan: Plan, dimension: int, seed: int = 0) -> dict[str, Any] | None:
    """Probabilities, ‖p−u‖₁, noise on the aggregate against p = u, and all rules ranked by Theorem 2's bound.

    None where everyone takes part. The ranking uses public facts only.
    """
    schedule = plan.schedule
    if schedule.probabilities is None or not plan.method.private:
        return None
    setting = Setting(plan.population, plan.training, plan.method.calibrate.accountant, dimension, seed)
    sizes, factors, clip = plan.population.sizes, noise_factors(setting), plan.training.clip
    iterations = plan.training.rounds * _steps(plan)
    shares = select.unbiased(sizes)
    aware = aware_probabilities(setting, None)
    rules: dict[str, Any] = {
        "uniform": select.uniform(len(sizes)),
        "unbiased": shares,
        "unbiased-compensated": (aware, select.compensation(aware, sizes)),
        "privacy-aware": aware,
    }
    ranked = bounds.rank(rules, sizes, factors, dimension, iterations, clip=clip)
    return {
        "rule": schedule.rule,
        "probabilities": np.asarray(schedule.probabilities).tolist(),
        "unbiased": shares.tolist(),
        "distance": float(np.abs(schedule.probabilities - shares).sum()),
        "noise": bounds.aggregate_noise(schedule.probabilities, factors, iterations, clip, schedule.importance),
        "noise_unbiased": bounds.aggregate_noise(shares, factors, iterations, clip),
        "last_rounds": select.last_rounds(schedule).tolist(),
        "ranking": [{"rule": r.rule, "bound": r.bound, "bias": r.bias, "noise": r.noise} for r in ranked],
    }


def _steps(plan: Plan) -> int:
    """The usual number of local steps of a turn: the median over the clients."""
    return int(np.median([c.terms.count for c in plan.clients]))


def last_turns(plan: Plan) -> list[int]:
    """By client: the last round whose turn its whole budget pays for under this schedule; 0: never asked, or none.

    Without privacy, and for public data, that is simply the last round in which the client is asked.
    """
    schedule = plan.schedule
    paid = np.array([_paid(c) if plan.method.private else c.turns for c in plan.clients])
    places = schedule.asked.ravel()
    order = np.argsort(places, kind="stable")  # by client, and by round within a client
    first, end = (np.searchsorted(places[order], np.arange(len(paid)), side) for side in ("left", "right"))
    at = np.minimum(first + paid, end) - 1
    found = order[np.maximum(at, 0)] // schedule.asked.shape[1] + 1
    return [int(one) for one in np.where(at >= first, found, 0)]


def _paid(client: ClientPlan) -> int:
    """How many of its planned turns a client's budget pays: all of them unless a published rule picked the noise."""
    if client.budget.is_public or client.fits:
        return client.turns
    pairs = zip(client.declaration().values(), client.budgets.values())
    paid = min(affordable(events, budget, times) for (events, times), budget in pairs)
    return client.turns * paid if client.whole else paid
