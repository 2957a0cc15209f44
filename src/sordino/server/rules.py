"""Aggregation rules: (updates[rows, d], facts, state, **options) → outcome. Pure functions, by name in ``RULES``.

Options are keyword arguments, bound with ``functools.partial`` or named in a study: ``aggregate = {name =
"robust-hdp", every = 5}``. Every rule screens its input first (``server.defend``), so the functions below see rows
that are finite, and may trust their facts to match.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sordino.errors import BadInput
from sordino.server.columns import inverse_weights
from sordino.server.defend import Screened, believable, defended
from sordino.server.estimated import column_norm, factor_hdp, random_effects, robust_hdp
from sordino.server.facts import Array, Facts, Outcome, Rule, State
from sordino.server.projected import pfa, pfa_plus
from sordino.server.shares import budget_shares, data_shares, weighted


def _by_data(facts: Facts) -> Array:
    return data_shares(facts) * facts.selection


def _alike(facts: Facts) -> Array:
    return facts.selection / len(facts.clients)


def _by_budget(facts: Facts) -> Array:
    return budget_shares(facts.epsilons)


def _sum(screened: Screened, state: State, weigh: Callable[[Facts], Array]) -> Outcome:
    weights = weigh(screened.facts)
    return Outcome(weighted(screened.updates, weights), weights, state)


@defended(weights=_by_data)
def data_weighted(screened: Screened, state: State) -> Outcome:
    """DP-FedAvg: w_i = n_i/Σn over those who answered, times the row's importance where selection compensates."""
    return _sum(screened, state, _by_data)


@defended(weights=_alike)
def uniform(screened: Screened, state: State) -> Outcome:
    """w_i = 1/rows, times the row's importance where selection compensates."""
    return _sum(screened, state, _alike)


@defended(weights=_by_budget)
def weiavg(screened: Screened, state: State) -> Outcome:
    """WeiAvg: w_i = ε_i/Σε. Clients with ε = ∞ (public data) share everything, which is the formula's limit."""
    return _sum(screened, state, _by_budget)


@defended()
def declared_variance(screened: Screened, state: State) -> Outcome:
    """w_i ∝ 1/σ_i², σ_i² = K_i(ηCz_i/b_i)² as declared, or as the update's norm proves where that is more."""
    variances, lines = believable(screened)
    weights = inverse_weights(variances)
    return Outcome(weighted(screened.updates, weights), weights, state, {"log": lines})


@defended()
def optimum(screened: Screened, state: State) -> Outcome:
    """The oracle, for simulations: w_i ∝ 1/σ_i² with the variances that the noise really had."""
    truth = screened.facts.extra.get("oracle_variances")
    if truth is None:
        raise BadInput("optimum needs the noise that was really used, which only a simulation knows: use factor-hdp")
    weights = inverse_weights(np.asarray(truth, dtype=np.float64))
    return Outcome(weighted(screened.updates, weights), weights, state)


RULES: dict[str, Rule] = {
    "data-weighted": data_weighted,
    "uniform": uniform,
    "weiavg": weiavg,
    "pfa": pfa,
    "pfa-plus": pfa_plus,
    "robust-hdp": robust_hdp,
    "factor-hdp": factor_hdp,
    "random-effects": random_effects,
    "declared-variance": declared_variance,
    "column-norm": column_norm,
    "optimum": optimum,
}
