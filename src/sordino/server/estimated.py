"""Rules that learn the weights from the updates themselves: Robust-HDP, factor analysis, random effects, column norms.

State keys carry the rule's name, hold tensors and plain numbers only, and index clients by number, so that a round may
have any participants.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sordino.errors import BadInput
from sordino.server import factor, pursuit, spread
from sordino.server.columns import gram, inverse_weights
from sordino.server.defend import Screened, believable, defended, plausible, step_length
from sordino.server.facts import Array, Facts, Outcome, State
from sordino.server.shares import data_shares, weighted

Layout = tuple[tuple[str, tuple[int, ...], int], ...]

REMEMBERED = 4096
"""Client numbers up to which clients are remembered from round to round."""


@defended(refuse_small=True)
def robust_hdp(screened: Screened, state: State, *, every: int = 1, rows: int | None = pursuit.SAMPLE) -> Outcome:
    """Robust-HDP: w_i ∝ 1/σ̂_i², σ̂_i² = ‖S_:,i‖²/d from principal component pursuit of the participants' updates.

    Parameters
    ----------
    every : estimate in every m-th round, and whenever a client takes part whose variance is not known yet.
    rows : coordinates looked at, drawn anew each round; None for all.
    """
    if every < 1:
        raise BadInput(f"every = {every} must be at least 1: it is the number of rounds between two estimates")
    facts = screened.facts
    known = _recall(state, "robust_hdp_variances", facts)
    shown: dict[str, Any] = {}
    lines: list[str] = []
    if (facts.round - 1) % every == 0 or np.isnan(known).any():
        start = state.get("robust_hdp_start")
        same = start is not None and state.get("robust_hdp_clients") == facts.clients.tolist()
        warm = start if same else None
        found = pursuit.solve(
            screened.updates.T, residual=pursuit.FOR_WEIGHTS, rows=rows, seed=facts.round, start=warm, parts=False
        )
        known, lines = plausible(found.variances, facts)
        shown = _show_pursuit(found)
        if not found.converged:
            lines.append(
                f"round {facts.round}: principal component pursuit not settled after {found.iterations} iterations; "
                f"variances may move by {found.unsettled:.1%}"
            )
        scale = _scale(facts)
        state = {**state, "robust_hdp_start": found.projection, "robust_hdp_clients": facts.clients.tolist()}
        state = _remember(state, "robust_hdp_variances", facts, known / scale)
    else:
        known = known * _scale(facts)
    weights = inverse_weights(known)
    shown |= {"estimated_variances": known.tolist(), "log": lines}
    return Outcome(weighted(screened.updates, weights), weights, state, shown)


def _show_pursuit(found: pursuit.Pursuit) -> dict[str, Any]:
    """How the pursuit went, and the spectrum of L (the paper's Figure 8)."""
    return {
        "rank": found.rank,
        "iterations": found.iterations,
        "residual": found.residual,
        "unsettled": _finite(found.unsettled),
        "converged": found.converged,
        "low_rank_singular_values": found.singular_values.tolist(),
        "update_singular_values": found.matrix_singular_values.tolist(),
    }


@defended(refuse_small=True)
def factor_hdp(screened: Screened, state: State, *, rounds: int = 5, rank: int | None = None) -> Outcome:
    """w_i ∝ 1/ψ_i, ψ the noise variances of factor analysis, pooled over the last few rounds.

    With fewer than four clients noise cannot be told from shared directions: declared variances stand in.

    Parameters
    ----------
    rounds : how many rounds are pooled.
    rank : shared directions; None chooses by likelihood-ratio tests, each round anew.
    """
    if rounds < 1:
        raise BadInput(f"rounds = {rounds} must be at least 1: it is how many rounds are pooled")
    facts, dimension = screened.facts, screened.updates.shape[1]
    if len(screened.kept) < 4 or dimension <= len(screened.kept):
        estimates, lines = believable(screened)
        shown: dict[str, Any] = {"fallback": "declared variances: too few clients for factor analysis"}
    else:
        scale = _scale(facts)
        inner = gram(screened.updates.T) / scale
        found = factor.fit(inner, dimension, rank)
        state, past = _window(state, factor.GramOfRound(facts.clients, inner, dimension, found.rank), rounds)
        pooled = found.variances
        if len(past) > 1 and len(np.unique(facts.clients)) == len(facts.clients):
            pooled = _pooled(past, facts.clients)
        estimates, lines = plausible(pooled * scale, facts)
        shown = {"rank": found.rank, "converged": found.converged, "rounds": len(past)}
        shown["update_singular_values"] = _singular_values(inner * scale, dimension)
    weights = inverse_weights(estimates)
    shown |= {"estimated_variances": estimates.tolist(), "log": lines}
    return Outcome(weighted(screened.updates, weights), weights, state, shown)


def _pooled(past: list[factor.GramOfRound], clients: NDArray[np.int64]) -> Array:
    """σ̂² of ``clients`` from all rounds; clients are renumbered, so that unseen numbers cost nothing."""
    numbers = np.unique(np.concatenate([one.clients for one in past]))
    renumbered = [
        factor.GramOfRound(np.searchsorted(numbers, one.clients), one.gram, one.rows, one.rank) for one in past
    ]
    variances, _ = factor.pool(renumbered, len(numbers))
    return np.asarray(variances[np.searchsorted(numbers, clients)])


def _window(state: State, latest: factor.GramOfRound, rounds: int) -> tuple[State, list[factor.GramOfRound]]:
    """The last ``rounds`` Gram matrices, with distinct clients each, as rounds and as tensors in the state."""
    past = []
    for number in range(int(state.get("factor_hdp_count", 0))):
        about = state[f"factor_hdp_about_{number}"]
        past.append(
            factor.GramOfRound(
                np.array(about["clients"], dtype=np.int64),
                state[f"factor_hdp_gram_{number}"].cpu().numpy(),
                about["rows"],
                about["rank"],
            )
        )
    if len(np.unique(latest.clients)) == len(latest.clients):
        past = [*past, latest][-rounds:]
    kept: State = {name: value for name, value in state.items() if not name.startswith("factor_hdp_")}
    kept["factor_hdp_count"] = len(past)
    for number, one in enumerate(past):
        kept[f"factor_hdp_gram_{number}"] = torch.from_numpy(one.gram.copy())
        kept[f"factor_hdp_about_{number}"] = {"clients": one.clients.tolist(), "rows": one.rows, "rank": one.rank}
    return kept, past


@defended(refuse_small=True)
def random_effects(
    screened: Screened,
    state: State,
    *,
    noise: str = "declared",
    spread_by: str = "reml",
    horizon: float = 100.0,
    memory: float = 0.95,
    per_step: bool = True,
    per_layer: bool = False,
) -> Outcome:
    """Votes ω that minimise κ(ω − p)ᵀΓ(ω − p) + Σ ω_i²v_i with p_i = n_i/Σn: noise against bias (``server.spread``).

    The step is Σ p_iK_i · Σ ω_i u_i/K_i: as long as a plain average's would be, whoever is heard. ``weights`` are the
    factors of the u_i in it; the votes are in the diagnostics.

    Parameters
    ----------
    noise : ``declared`` variances (raised where a norm proves more), or ``factor`` analysis of this round.
    spread_by : ``reml`` (exchangeable clients) or ``structured`` (who resembles whom).
    horizon : κ, how much more bias counts than the noise of one round.
    memory : how much of the Gram matrix's average is kept from round to round, in [0, 1).
    per_step : compare updates per local step; False compares whole updates.
    per_layer : votes of its own for every layer: clients may agree about features and differ about classes. The error
        is a sum over coordinates, so that layers can be weighed apart. ``weights`` are then root mean squares over
        coordinates, which noise power is made of.
    """
    if noise not in ("declared", "factor"):
        raise BadInput(f"noise {noise!r} is unknown: use declared or factor")
    if not 0.0 <= memory < 1.0:
        raise BadInput(f"memory = {memory} must lie in [0, 1): 0 forgets every round")
    facts, dimension = screened.facts, screened.updates.shape[1]
    variances, lines = believable(screened)
    if noise == "factor" and len(screened.kept) >= 4 and dimension > len(screened.kept):
        variances, lines = plausible(factor.fit(gram(screened.updates.T), dimension).variances, facts)
    steps = np.maximum(facts.steps, 1.0) if per_step else np.ones(len(variances))
    variances, scale, shares = variances / steps**2, _scale(facts), data_shares(facts)
    parts = layers(facts.layout, dimension) if per_layer else {"": [slice(0, dimension)]}
    delta, squares = torch.empty_like(screened.updates[0]), np.zeros(len(variances))
    shown: dict[str, Any] = {}
    for name, where in parts.items():
        rows = torch.cat([screened.updates[:, part] for part in where], 1) if per_layer else screened.updates
        clean = (gram(rows.T) / np.outer(steps, steps) - np.diag(variances)) / scale
        state, clean, rounds = _average(state, facts, clean, memory, name)
        full, size = clean * scale + np.diag(variances), rows.shape[1]
        votes, between = spread.weigh(full, variances, shares, rounds * size, spread_by=spread_by, horizon=horizon)
        weights = votes * float(shares @ steps) / steps
        _put(delta, where, weighted(rows, weights))
        squares += weights**2 * (size / dimension)
        found = {"votes": votes.tolist(), "spread": between.estimate, "spread_error": _finite(between.error)}
        shown |= {"layers": {**shown.get("layers", {}), name: found}} if per_layer else found
    shown["update_singular_values"] = _singular_values(gram(screened.updates.T), dimension)
    return Outcome(delta, np.sqrt(squares) if per_layer else weights, state, {**shown, "log": lines})


def layers(layout: Layout, dimension: int) -> dict[str, list[slice]]:
    """Where the tensors of every layer lie (its weight and its bias belong together); one layer without a layout."""
    found: dict[str, list[slice]] = {}
    for name, shape, offset in layout or (("all", (dimension,), 0),):
        found.setdefault(name.rpartition(".")[0] or name, []).append(slice(offset, offset + math.prod(shape)))
    return found


def _put(whole: torch.Tensor, where: list[slice], values: torch.Tensor) -> None:
    """Write the tensors of a layer, end to end in ``values``, to where they belong."""
    begin = 0
    for part in where:
        length = part.stop - part.start
        whole[part] = values[begin : begin + length]
        begin += length


def _average(state: State, facts: Facts, clean: Array, memory: float, layer: str = "") -> tuple[State, Array, float]:
    """Exponential average over rounds of the noise-free Gram matrix, per pair of clients, for this round's rows.

    Also the number of rounds it is worth: (Σ memory^t)²/Σ memory^2t.
    """
    if facts.clients.max() >= REMEMBERED or memory == 0.0:
        return state, clean, 1.0
    key = f"random_effects_{layer}_" if layer else "random_effects_"
    size = int(facts.clients.max()) + 1
    total, count = (_grown(state.get(f"{key}{name}"), size) * memory for name in ("sum", "count"))
    pairs = np.ix_(facts.clients, facts.clients)
    rows, columns = (np.broadcast_to(index, clean.shape) for index in pairs)
    np.add.at(total, (rows, columns), clean)
    np.add.at(count, (rows, columns), 1.0)
    past = int(state.get(f"{key}rounds", 0)) + 1
    following = {
        **state,
        f"{key}sum": torch.from_numpy(total),
        f"{key}count": torch.from_numpy(count),
        f"{key}rounds": past,
    }
    left = memory**past
    worth = (1.0 - left) * (1.0 + memory) / ((1.0 + left) * (1.0 - memory))
    return following, np.asarray(total[pairs] / count[pairs]), worth


def _grown(kept: torch.Tensor | None, size: int) -> Array:
    """The remembered matrix, with room for clients up to ``size``."""
    old = np.zeros((0, 0)) if kept is None else kept.cpu().numpy()
    size = max(size, len(old))
    grown = np.zeros((size, size))
    grown[: len(old), : len(old)] = old
    return grown


@defended(refuse_small=True)
def column_norm(screened: Screened, state: State) -> Outcome:
    """w_i ∝ 1/‖Δ_i‖²: the whole update counts as noise."""
    estimates, lines = plausible(screened.norms**2 / screened.updates.shape[1], screened.facts)
    weights = inverse_weights(estimates)
    shown = {"estimated_variances": estimates.tolist(), "log": lines}
    return Outcome(weighted(screened.updates, weights), weights, state, shown)


def _singular_values(inner: Array, dimension: int) -> list[float]:
    """Singular values of M, largest first, from its Gram matrix MᵀM/d."""
    squares = np.linalg.eigvalsh(inner)[::-1] * dimension
    return [float(one) for one in np.sqrt(np.maximum(squares, 0.0))]


def _finite(value: float) -> float | None:
    """The number, or None where JSON has no word for it."""
    return value if math.isfinite(value) else None


def _scale(facts: Facts) -> float:
    """(η·C)², what learning rate and clip do to all variances alike, so that rounds can be compared."""
    length = step_length(facts)
    return length**2 if math.isfinite(length) else 1.0


def _recall(state: State, name: str, facts: Facts) -> Array:
    """What is remembered about each row's client; NaN where nothing is."""
    kept = state.get(name)
    found = np.full(len(facts.clients), np.nan)
    if kept is not None:
        inside = facts.clients < len(kept)
        found[inside] = kept.cpu().numpy()[facts.clients[inside]]
    return found


def _remember(state: State, name: str, facts: Facts, values: Array) -> State:
    """The state with these values noted under the rows' clients."""
    size = int(facts.clients.max()) + 1
    kept = state.get(name)
    old = np.zeros(0) if kept is None else kept.cpu().numpy()
    values_by_client = np.full(max(size, len(old)), np.nan)
    values_by_client[: len(old)] = old
    values_by_client[facts.clients] = values
    return {**state, name: torch.from_numpy(values_by_client)}
