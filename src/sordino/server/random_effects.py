"""Random effects as an aggregation rule: votes that balance noise against how much clients differ (ours)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from sordino.errors import BadInput
from sordino.made import part
from sordino.server import factor, spread
from sordino.server.columns import gram
from sordino.server.defend import believable, plausible
from sordino.server.estimated import finite_or_none, singular_values_of, step_scale
from sordino.server.facts import Array, Facts, Layout, Memory, Outcome
from sordino.server.rule import Aggregate, weighted

REMEMBERED = 4096


"""Client numbers up to which clients are remembered from round to round."""


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
        variances, scale, shares = variances / steps**2, step_scale(facts), facts.data_shares
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
            found = {"votes": votes.tolist(), "spread": between.estimate, "spread_error": finite_or_none(between.error)}
            shown |= {"layers": {**shown.get("layers", {}), name: found}} if per_layer else found
        shown["update_singular_values"] = singular_values_of(gram(updates.T), dimension)
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
