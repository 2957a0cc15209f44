"""Rules that learn the weights from the updates themselves: Robust-HDP, factor analysis, random effects, column norms.

What they remember indexes clients by number, so that a round may have any participants.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sordino.errors import BadInput
from sordino.made import part
from sordino.server import factor, pursuit, spread
from sordino.server.columns import gram, inverse_weights
from sordino.server.defend import believable, plausible, step_length
from sordino.server.facts import Array, Facts, Layout, Memory, Outcome
from sordino.server.rule import Aggregate, weighted

REMEMBERED = 4096
"""Client numbers up to which clients are remembered from round to round."""


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

    def combine(updates: Any, facts: Facts, memory: Memory) -> Outcome:
        known = _recall(memory, facts)
        shown: dict[str, Any] = {}
        lines: list[str] = []
        if (facts.round - 1) % every == 0 or np.isnan(known).any():
            warm = memory.get("start") if memory.get("clients") == facts.clients.tolist() else None
            found = pursuit.solve(
                updates.T, residual=pursuit.FOR_WEIGHTS, rows=rows, seed=facts.round, start=warm, parts=False
            )
            known, lines = plausible(found.variances, facts)
            shown = _show_pursuit(found)
            if not found.converged:
                lines.append(
                    f"round {facts.round}: principal component pursuit not settled after {found.iterations} "
                    f"iterations; variances may move by {found.unsettled:.1%}"
                )
            seen = {"start": found.projection, "clients": facts.clients.tolist()}
            memory = {**memory, **seen, "variances": _remembered(memory, facts, known / _scale(facts))}
        else:
            known = known * _scale(facts)
        weights = inverse_weights(known)
        shown |= {"estimated_variances": known.tolist(), "log": lines}
        return Outcome(weighted(updates, weights), weights, memory, shown)

    return Aggregate("robust-hdp", combine, refuse_small=True, aims="least")


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
            scale = _scale(facts)
            inner = gram(updates.T) / scale
            found = factor.fit(inner, dimension, rank)
            memory, past = _window(memory, factor.GramOfRound(facts.clients, inner, dimension, found.rank), rounds)
            pooled = found.variances
            if len(past) > 1 and len(np.unique(facts.clients)) == count:
                pooled = _pooled(past, facts.clients)
            estimates, lines = plausible(pooled * scale, facts)
            shown = {"rank": found.rank, "converged": found.converged, "rounds": len(past)}
            shown["update_singular_values"] = _singular_values(inner * scale, dimension)
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
def random_effects(
    *,
    noise: str = "declared",
    spread_by: str = "reml",
    horizon: float = 100.0,
    memory: float = 0.95,
    per_step: bool = True,
    per_layer: bool = False,
) -> Aggregate:
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

    def combine(updates: Any, facts: Facts, past: Memory) -> Outcome:
        count, dimension = updates.shape
        variances, lines = believable(facts, dimension)
        if noise == "factor" and count >= 4 and dimension > count:
            variances, lines = plausible(factor.fit(gram(updates.T), dimension).variances, facts)
        steps = np.maximum(facts.steps, 1.0) if per_step else np.ones(count)
        variances, scale, shares = variances / steps**2, _scale(facts), facts.data_shares
        parts = layers(facts.layout, dimension) if per_layer else {"": [slice(0, dimension)]}
        delta, squares = torch.empty_like(updates[0]), np.zeros(count)
        shown: dict[str, Any] = {}
        for name, where in parts.items():
            rows = torch.cat([updates[:, part] for part in where], 1) if per_layer else updates
            clean = (gram(rows.T) / np.outer(steps, steps) - np.diag(variances)) / scale
            past, clean, rounds = _average(past, facts, clean, memory, name)
            full, size = clean * scale + np.diag(variances), rows.shape[1]
            votes, between = spread.weigh(full, variances, shares, rounds * size, spread_by=spread_by, horizon=horizon)
            weights = votes * float(shares @ steps) / steps
            _put(delta, where, weighted(rows, weights))
            squares += weights**2 * (size / dimension)
            found = {"votes": votes.tolist(), "spread": between.estimate, "spread_error": _finite(between.error)}
            shown |= {"layers": {**shown.get("layers", {}), name: found}} if per_layer else found
        shown["update_singular_values"] = _singular_values(gram(updates.T), dimension)
        return Outcome(delta, np.sqrt(squares) if per_layer else weights, past, {**shown, "log": lines})

    return Aggregate("random-effects", combine, refuse_small=True)


def layers(layout: Layout, dimension: int) -> dict[str, list[slice]]:
    """Where the tensors of every layer lie (its weight and its bias belong together); one layer without a layout."""
    found: dict[str, list[slice]] = {}
    for name, shape, offset in layout or (("all", (dimension,), 0),):
        found.setdefault(name.rpartition(".")[0] or name, []).append(slice(offset, offset + math.prod(shape)))
    return found


def _put(whole: torch.Tensor, where: list[slice], values: torch.Tensor) -> None:
    """Write the tensors of a layer, end to end in ``values``, to where they belong."""
    begin = 0
    for piece in where:
        length = piece.stop - piece.start
        whole[piece] = values[begin : begin + length]
        begin += length


def _average(past: Memory, facts: Facts, clean: Array, memory: float, layer: str) -> tuple[Memory, Array, float]:
    """Exponential average over rounds of the noise-free Gram matrix, per pair of clients, for this round's rows.

    Also the number of rounds it is worth: (Σ memory^t)²/Σ memory^2t.
    """
    if facts.clients.max() >= REMEMBERED or memory == 0.0:
        return past, clean, 1.0
    key = f"{layer}_" if layer else ""
    size = int(facts.clients.max()) + 1
    total, count = (_grown(past.get(f"{key}{name}"), size) * memory for name in ("sum", "count"))
    pairs = np.ix_(facts.clients, facts.clients)
    rows, columns = (np.broadcast_to(index, clean.shape) for index in pairs)
    np.add.at(total, (rows, columns), clean)
    np.add.at(count, (rows, columns), 1.0)
    rounds = int(past.get(f"{key}rounds", 0)) + 1
    kept = {f"{key}sum": torch.from_numpy(total), f"{key}count": torch.from_numpy(count), f"{key}rounds": rounds}
    left = memory**rounds
    worth = (1.0 - left) * (1.0 + memory) / ((1.0 + left) * (1.0 - memory))
    return {**past, **kept}, np.asarray(total[pairs] / count[pairs]), worth


def _grown(kept: torch.Tensor | None, size: int) -> Array:
    """The remembered matrix, with room for clients up to ``size``."""
    old = np.zeros((0, 0)) if kept is None else kept.cpu().numpy()
    size = max(size, len(old))
    grown = np.zeros((size, size))
    grown[: len(old), : len(old)] = old
    return grown


@part
def column_norm() -> Aggregate:
    """w_i ∝ 1/‖Δ_i‖²: the whole update counts as noise."""

    def combine(updates: Any, facts: Facts, memory: Memory) -> Outcome:
        estimates, lines = plausible(np.asarray(facts.norms) ** 2 / updates.shape[1], facts)
        weights = inverse_weights(estimates)
        shown = {"estimated_variances": estimates.tolist(), "log": lines}
        return Outcome(weighted(updates, weights), weights, memory, shown)

    return Aggregate("column-norm", combine, refuse_small=True, aims="least")


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
