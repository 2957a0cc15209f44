"""The plan: what a method will cost every client, before any record is touched.

Budgets become noise here. (q, z, count) of every release is fixed before training (R6); the ledger then checks counts
against the plan and never runs an accountant during training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sordino.errors import BadInput
from sordino.methods.method import Method
from sordino.methods.selection import Schedule
from sordino.methods.training import Population, Training
from sordino.privacy.accounting import calibrate_events, composed_epsilon
from sordino.privacy.gate import Terms
from sordino.privacy.types import Budget, Event


@dataclass(frozen=True)
class ClientPlan:
    """What one client will do: its turns, and the terms of every release in a turn."""

    name: str
    records: int
    budget: Budget
    turns: int
    terms: Terms
    epsilon: float
    """ε of the whole plan, by the accountant the ledger charges with; ∞ when nothing protects."""

    @property
    def noise(self) -> float:
        """z of the gradient release."""
        return self.terms.noise("gradient")


@dataclass(frozen=True)
class Plan:
    """A run before it starts."""

    method: Method
    training: Training
    population: Population
    schedule: Schedule
    clients: tuple[ClientPlan, ...]

    def variances(self) -> NDArray[np.float64]:
        """Declared variance of one coordinate of each client's update: σ_i² = K_i (η C z_i S / b_i)²."""
        return np.array(
            [
                c.terms.count
                * (self.training.lr * self.training.clip * c.noise * c.terms.adjacency.sensitivity / c.terms.divisor) ** 2
                for c in self.clients
            ]
        )

    def noise_to_signal(self, dimension: int) -> NDArray[np.float64]:
        """How much larger than the largest possible signal a client's noise is: z S √d / (b √K).

        K steps move the weights by at most K η C, and the noise moves them by about √K η z S C √d / b.
        """
        return np.array(
            [
                c.noise * c.terms.adjacency.sensitivity * math.sqrt(dimension / c.terms.count) / c.terms.divisor
                for c in self.clients
            ]
        )


def make_plan(
    method: Method, training: Training, population: Population, seed: int, noises: Sequence[float] | None = None
) -> Plan:
    """Schedule, noise and cost of ``method`` for these clients.

    ``noises`` are the multipliers of a run that goes on: they were fixed before it started (R6).

    Guarantees: every client's planned ε, counting every release of every scheduled turn, is at most its budget under
    the accountant that the ledger charges with, unless a published rule picked too little noise (the ledger then
    refuses the turns that are not paid for).
    """
    schedule = method.select.schedule(population, training, seed)
    turns = np.bincount(np.concatenate(schedule), minlength=len(population.names)) if schedule else np.zeros(0, int)
    batches = training.batches(population)
    steps = training.local_steps(population.sizes, batches)
    _check_adjacency(population, training)
    templates = [
        Event("gradient", training.sampling_of(b, int(n)), 1.0, int(k) * max(1, int(t)), budget.adjacency)
        for b, n, k, t, budget in zip(batches, population.sizes, steps, turns, population.budgets)
    ]
    chosen = _noises(method, templates, population.budgets) if noises is None else noises
    terms = [
        Terms(e.sampling, (("gradient", float(z)),), int(k), e.sampling.rate * int(n), e.adjacency)
        for e, z, k, n in zip(templates, chosen, steps, population.sizes)
    ]
    spends = _planned(method, terms, turns, population.budgets)
    clients = [
        ClientPlan(name, int(n), budget, int(t), one, float(eps))
        for name, n, budget, t, one, eps in zip(
            population.names, population.sizes, population.budgets, turns, terms, spends
        )
    ]
    return Plan(method, training, population, schedule, tuple(clients))


def _noises(method: Method, templates: list[Event], budgets: tuple[Budget, ...]) -> NDArray[np.float64]:
    if not method.private:
        return np.zeros(len(templates))
    targets = list(budgets)
    if method.calibration.strictest:
        epsilon = min(b.epsilon for b in budgets)
        targets = [Budget(epsilon, b.delta, b.adjacency) for b in budgets]
    return calibrate_events([[e] for e in templates], targets, accountant=method.calibration.accountant)


def _planned(
    method: Method, terms: list[Terms], turns: NDArray[np.int64], budgets: tuple[Budget, ...]
) -> NDArray[np.float64]:
    if not method.private:
        return np.full(len(terms), math.inf)
    events = [[t.event.times(t.count * int(n))] for t, n in zip(terms, turns)]
    return composed_epsilon(events, [b.delta for b in budgets])


def _check_adjacency(population: Population, training: Training) -> None:
    kinds = {b.adjacency for b in population.budgets}
    if len(kinds) > 1:
        raise BadInput(f"budgets mix adjacencies ({', '.join(sorted(kinds))}): one run has one adjacency")
