"""Rules that learn the weights from the updates themselves: Robust-HDP, factor analysis, random effects, column norms.

What they remember indexes clients by number, so that a round may have any participants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sordino.errors import BadInput
from sordino.made import part
from sordino.server import factor, pursuit, pursuits
from sordino.server.columns import gram, inverse_weights
from sordino.server.defend import believable, plausible, step_length
from sordino.server.facts import Array, Facts, Memory, Outcome
from sordino.server.rule import Aggregate, AtOnce, Call, weighted


@part
def robust_hdp(*, every: int = 1, rows: int | None = pursuit.SAMPLE) -> Aggregate:
    """Robust-HDP: w_i ∝ 1/σ̂_i², σ̂_i² = ‖S_:,i‖²/d from principal component pursuit of the participants' updates.

    Parameters
    ----------
    every : estimate in every m-th round, and whenever a client takes part whose variance is not known yet.
    rows : coordinates looked at, drawn anew each round; None for all.
    """
    if every < 1:
        raise BadInput(f"every = {every} must be at least 1: it is the number of rounds between two estimates")

    def combine(calls: Sequence[Call]) -> list[Outcome]:
        found: dict[int, pursuit.Pursuit] = {}
        due = [i for i, one in enumerate(calls) if (one.facts.round - 1) % every == 0 or _is_new(one)]
        for number in dict.fromkeys(calls[i].facts.round for i in due):  # in a stack it is the same for all
            now = [i for i in due if calls[i].facts.round == number]
            found |= dict(zip(now, _pursued([calls[i] for i in now], rows, number)))
        return [_outcome(one, found.get(i)) for i, one in enumerate(calls)]

    return Aggregate("robust-hdp", AtOnce(combine), refuse_small=True, aims="least")


def _is_new(call: Call) -> bool:
    """Whether somebody takes part whose variance is not known yet."""
    return bool(np.isnan(_recall(call.memory, call.facts)).any())


def _pursued(calls: Sequence[Call], rows: int | None, number: int) -> list[pursuit.Pursuit]:
    """Principal component pursuit of every call's updates, warm where the same clients took part the last time."""
    updates, facts, memories = zip(*calls)
    warm = [
        memory.get("start") if memory.get("clients") == about.clients.tolist() else None
        for about, memory in zip(facts, memories)
    ]
    columns, near = [one.T for one in updates], pursuit.FOR_WEIGHTS
    return pursuits.solve_all(columns, residual=near, rows=rows, seed=number, starts=warm, parts=False)


def _outcome(call: Call, found: pursuit.Pursuit | None) -> Outcome:
    """The weighted update, by the variances that were found now or, where nothing was looked for, remembered."""
    updates, facts, memory = call
    shown: dict[str, Any] = {}
    lines: list[str] = []
    if found is None:
        known = _recall(memory, facts) * step_scale(facts)
    else:
        known, lines = plausible(found.variances, facts)
        shown = _show_pursuit(found)
        if not found.converged:
            lines.append(
                f"round {facts.round}: principal component pursuit not settled after {found.iterations} "
                f"iterations; variances may move by {found.unsettled:.1%}"
            )
        seen = {"start": found.projection, "clients": facts.clients.tolist()}
        memory = {**memory, **seen, "variances": _remembered(memory, facts, known / step_scale(facts))}
    weights = inverse_weights(known)
    shown |= {"estimated_variances": known.tolist(), "log": lines}
    return Outcome(weighted(updates, weights), weights, memory, shown)


def _show_pursuit(found: pursuit.Pursuit) -> dict[str, Any]:
    """How the pursuit went, and the spectrum of L (the paper's Figure 8)."""
    return {
        "rank": found.rank,
        "iterations": found.iterations,
        "residual": found.residual,
        "unsettled": finite_or_none(found.unsettled),
        "converged": found.converged,
        "low_rank_singular_values": found.singular_values.tolist(),
        "update_singular_values": found.matrix_singular_values.tolist(),
    }


@part
def factor_hdp(*, rounds: int = 5, rank: int | None = None) -> Aggregate:
    """w_i ∝ 1/ψ_i, ψ the noise variances of factor analysis, pooled over the last few rounds.

    With fewer than four clients noise cannot be told from shared directions: declared variances stand in.

    Parameters
    ----------
    rounds : how many rounds are pooled.
    rank : shared directions; None chooses by likelihood-ratio tests, each round anew.
    """
    if rounds < 1:
        raise BadInput(f"rounds = {rounds} must be at least 1: it is how many rounds are pooled")

    def combine(updates: Any, facts: Facts, memory: Memory) -> Outcome:
        count, dimension = updates.shape
        if count < 4 or dimension <= count:
            estimates, lines = believable(facts, dimension)
            shown: dict[str, Any] = {"fallback": "declared variances: too few clients for factor analysis"}
        else:
            scale = step_scale(facts)
            inner = gram(updates.T) / scale
            found = factor.fit(inner, dimension, rank)
            memory, past = _window(memory, factor.GramOfRound(facts.clients, inner, dimension, found.rank), rounds)
            pooled = found.variances
            if len(past) > 1 and len(np.unique(facts.clients)) == count:
                pooled = _pooled(past, facts.clients)
            estimates, lines = plausible(pooled * scale, facts)
            shown = {"rank": found.rank, "converged": found.converged, "rounds": len(past)}
            shown["update_singular_values"] = singular_values_of(inner * scale, dimension)
        weights = inverse_weights(estimates)
        shown |= {"estimated_variances": estimates.tolist(), "log": lines}
        return Outcome(weighted(updates, weights), weights, memory, shown)

    return Aggregate("factor-hdp", combine, refuse_small=True, aims="least")


def _pooled(past: list[factor.GramOfRound], clients: NDArray[np.int64]) -> Array:
    """σ̂² of ``clients`` from all rounds; clients are renumbered, so that unseen numbers cost nothing."""
    numbers = np.unique(np.concatenate([one.clients for one in past]))
    renumbered = [
        factor.GramOfRound(np.searchsorted(numbers, one.clients), one.gram, one.rows, one.rank) for one in past
    ]
    variances, _ = factor.pool(renumbered, len(numbers))
    return np.asarray(variances[np.searchsorted(numbers, clients)])


def _window(memory: Memory, latest: factor.GramOfRound, rounds: int) -> tuple[Memory, list[factor.GramOfRound]]:
    """The last ``rounds`` Gram matrices, with distinct clients each, as rounds and as tensors to remember."""
    past = []
    for number in range(int(memory.get("count", 0))):
        about = memory[f"about_{number}"]
        clients = np.array(about["clients"], dtype=np.int64)
        past.append(factor.GramOfRound(clients, memory[f"gram_{number}"].cpu().numpy(), about["rows"], about["rank"]))
    if len(np.unique(latest.clients)) == len(latest.clients):
        past = [*past, latest][-rounds:]
    kept: Memory = {"count": len(past)}
    for number, one in enumerate(past):
        kept[f"gram_{number}"] = torch.from_numpy(one.gram.copy())
        kept[f"about_{number}"] = {"clients": one.clients.tolist(), "rows": one.rows, "rank": one.rank}
    return kept, past


@part
def column_norm() -> Aggregate:
    """w_i ∝ 1/‖Δ_i‖²: the whole update counts as noise."""

    def combine(updates: Any, facts: Facts, memory: Memory) -> Outcome:
        estimates, lines = plausible(np.asarray(facts.norms) ** 2 / updates.shape[1], facts)
        weights = inverse_weights(estimates)
        shown = {"estimated_variances": estimates.tolist(), "log": lines}
        return Outcome(weighted(updates, weights), weights, memory, shown)

    return Aggregate("column-norm", combine, refuse_small=True, aims="least")


def singular_values_of(inner: Array, dimension: int) -> list[float]:
    """Singular values of M, largest first, from its Gram matrix MᵀM/d."""
    squares = np.linalg.eigvalsh(inner)[::-1] * dimension
    return [float(one) for one in np.sqrt(np.maximum(squares, 0.0))]


def finite_or_none(value: float) -> float | None:
    """The number, or None where JSON has no word for it."""
    return value if math.isfinite(value) else None


def step_scale(facts: Facts) -> float:
    """(η·C)², what learning rate and clip do to all variances alike, so that rounds can be compared."""
    length = step_length(facts)
    return length**2 if math.isfinite(length) else 1.0


def _recall(memory: Memory, facts: Facts) -> Array:
    """The variance remembered for each row's client; NaN where there is none."""
    kept = memory.get("variances")
    found = np.full(len(facts.clients), np.nan)
    if kept is not None:
        inside = facts.clients < len(kept)
        found[inside] = kept.cpu().numpy()[facts.clients[inside]]
    return found


def _remembered(memory: Memory, facts: Facts, values: Array) -> torch.Tensor:
    """The remembered variances by client, with these values noted under the rows' clients."""
    kept = memory.get("variances")
    old = np.zeros(0) if kept is None else kept.cpu().numpy()
    by_client = np.full(max(int(facts.clients.max()) + 1, len(old)), np.nan)
    by_client[: len(old)] = old
    by_client[facts.clients] = values
    return torch.from_numpy(by_client)
