"""Aggregation rules whose weights follow from public facts, and the catalogue of all rules that combine updates.

Every function makes an ``Aggregate``; its options are keyword arguments, also in a study: ``aggregate = {name =
"robust-hdp", every = 5}``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sordino.errors import BadInput
from sordino.made import part
from sordino.server.columns import inverse_weights
from sordino.server.defend import believable
from sordino.server.estimated import column_norm, factor_hdp, robust_hdp
from sordino.server.facts import Array, Facts, Memory, Outcome
from sordino.server.projected import budget_shares, pfa, pfa_plus
from sordino.server.random_effects import random_effects
from sordino.server.rule import Aggregate, weighted
from sordino.server.spread import exchangeable


def _sum(name: str, weigh: Callable[[Facts], Array], aims: str) -> Aggregate:
    """The rule Σ w_i Δ_i with these weights."""

    def combine(updates: Any, facts: Facts, memory: Memory) -> Outcome:
        weights = weigh(facts)
        return Outcome(weighted(updates, weights), weights, memory, own=True)

    return Aggregate(name, combine, weights=weigh, aims=aims, foreseen=True)


@part
def data_weighted() -> Aggregate:
    """DP-FedAvg: w_i = n_i/Σn over those who answered, times the row's importance where selection compensates."""
    return _sum("data-weighted", lambda facts: facts.data_shares * facts.selection, "size")


@part
def uniform() -> Aggregate:
    """w_i = 1/rows, times the row's importance where selection compensates."""
    return _sum("uniform", lambda facts: facts.selection / len(facts.clients), "equal")


@part
def weiavg() -> Aggregate:
    """WeiAvg: w_i = ε_i/Σε. Clients with ε = ∞ (public data) share everything, which is the formula's limit."""
    return _sum("weiavg", lambda facts: budget_shares(facts.epsilons), "budget")


@part
def declared_variance() -> Aggregate:
    """w_i ∝ 1/σ_i², σ_i² = K_i(ηCz_i/b_i)² as declared, or as the update's norm proves where that is more."""

    def combine(updates: Any, facts: Facts, memory: Memory) -> Outcome:
        variances, lines = believable(facts, updates.shape[1])
        weights = inverse_weights(variances)
        return Outcome(weighted(updates, weights), weights, memory, {"log": lines})

    return Aggregate("declared-variance", combine, aims="least", foreseen=True)


SPREAD = 0.5
"""How far apart clients' mean gradients lie, in clips, where nobody says otherwise. In trials on Robust-HDP's budgets a
factor of two either way moved mean accuracy by less than a point."""

SHARED_SPREAD = 0.1
"""The same where noise is shared. In trials on those budgets (MNIST, Fashion-MNIST, one seed) 0.1 was better than 0.25
by 0 to 1 points of accuracy, and that better than 0.5; on digits the choice did not show."""


@part
def balanced(*, spread: float | None = None) -> Aggregate:
    """w = argmin spread²‖w − p‖²/d + Σ w_i² σ_i², Σ w = 1: noise against hearing everybody by size, p_i = n_i/Σn.

    w_i = (τ²p_i + λ)/(τ² + σ_i²) with τ² = spread²/d, λ so that they sum to 1 (``spread.exchangeable``).
    σ_i = √(K_i ν_i² T)/(K_i T) is the noise that client i alone would leave on one coordinate, per unit of the way
    that the weights go in T rounds of K_i steps; ν_i is that of one step's mean gradient per unit of the clip.
    ``spread`` is how far apart clients' mean gradients lie, in clips, so spread/√d on one of d coordinates; by default
    SPREAD, or SHARED_SPREAD where noise is shared (``methods.sharing``). All of it is public.
    """
    if spread is not None and not (isinstance(spread, (int, float)) and 0 < spread < float("inf")):
        raise BadInput(f"aggregate.spread = {spread!r}: how far apart clients' gradients lie is a positive number")

    def weigh(facts: Facts) -> Array:
        dimension = sum(int(np.prod(shape)) for _, shape, _ in facts.layout)
        way = facts.lr * facts.clip * facts.steps * np.sqrt(facts.rounds)
        noise = np.sqrt(facts.variances) / way if np.isfinite(facts.clip) else np.zeros(len(facts.sizes))
        apart = SPREAD if spread is None else spread
        return exchangeable(noise**2, apart**2 / max(1, dimension), facts.data_shares) * facts.selection

    return _sum("balanced", weigh, "balance")


@part
def optimum() -> Aggregate:
    """The oracle, for simulations: w_i ∝ 1/σ_i² with the variances that the noise really had."""

    def combine(updates: Any, facts: Facts, memory: Memory) -> Outcome:
        if facts.true_variances is None:
            raise BadInput(
                "optimum needs the noise that was really used, which only a simulation knows: use factor-hdp"
            )
        weights = inverse_weights(np.asarray(facts.true_variances, dtype=np.float64))
        return Outcome(weighted(updates, weights), weights, memory)

    return Aggregate(
        "optimum",
        combine,
        simulation_only="optimum is an oracle: it weighs by the noise a simulation really drew, which no server can "
        "know; use robust-hdp, factor-hdp or declared-variance",
        aims="least",
    )


RULES: dict[str, Callable[..., Aggregate]] = {
    "data-weighted": data_weighted,
    "uniform": uniform,
    "weiavg": weiavg,
    "pfa": pfa,
    "pfa-plus": pfa_plus,
    "robust-hdp": robust_hdp,
    "factor-hdp": factor_hdp,
    "random-effects": random_effects,
    "declared-variance": declared_variance,
    "balanced": balanced,
    "column-norm": column_norm,
    "optimum": optimum,
}


def inner_rule(combine: str | Aggregate) -> Aggregate:
    """The rule that weighs the updates inside one that adds something to a combination, by name or as a value."""
    if isinstance(combine, Aggregate):
        return combine
    if combine not in RULES:
        raise BadInput(f"aggregate.combine = {combine!r} is unknown: use one of {', '.join(RULES)}")
    return RULES[combine]()
