"""The server's step with the combined update, as a value: (weights, outcome, memory) → (weights, shown, memory).

All of it is post-processing of releases, so it is free. ``beta`` adds momentum to any of them; the weights to show are
what is evaluated and handed out, and never what clients start from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sordino.errors import BadInput
from sordino.made import Made, part
from sordino.server.facts import Memory, Outcome

Stepped = tuple[Tensor, Tensor, Memory]
"""The new weights, the weights to show, and what the step remembers."""


@dataclass(frozen=True)
class ServerStep:
    """What the server does with a combined update.

    ``take``: (weights, outcome, memory) → (weights, weights to show, memory); ``outcome.delta`` is the combined update.
    ``made``: the factory and options that made it, set by ``sordino.made.Factory``.
    """

    shows_options: ClassVar[bool] = True

    name: str
    take: Callable[[Tensor, Outcome, Memory], Stepped]
    made: Made | None = None


Average = Callable[[Tensor, Any, int], Tensor]
"""(new iterate, average so far, round from 1) → the average with the new iterate; in round 1 there is none so far."""


def _stepping(name: str, beta: float, lr: float, average: Average | None = None) -> ServerStep:
    """w ← w + η_s Δ; with momentum v ← βv + Δ from v = 0, and w ← w + η_s v. Shows w, or its ``average``."""
    if not 0.0 <= beta < 1.0:
        raise BadInput(f"beta = {beta} must lie in [0, 1)")

    def take(weights: Tensor, outcome: Outcome, memory: Memory) -> Stepped:
        delta = outcome.delta
        if beta != 0.0:
            delta = beta * memory["velocity"] + delta if "velocity" in memory else delta
            memory = {**memory, "velocity": delta}
        # A fresh vector of a large model takes longer to be paged in than to be computed.
        over = outcome.own and beta == 0.0 and delta.dtype == weights.dtype
        stepped = torch.add(weights, delta, alpha=lr, out=delta if over else None)
        if average is None:
            return stepped, stepped, memory
        count = int(memory.get("count", 0)) + 1
        shown = average(stepped, memory.get("average"), count)
        return stepped, shown, {**memory, "average": shown, "count": count}

    return ServerStep(name, take)


@part
def plain(*, lr: float = 1.0) -> ServerStep:
    """w ← w + η_s Δ."""
    return _stepping("plain", 0.0, lr)


@part
def momentum(*, beta: float = 0.9, lr: float = 1.0) -> ServerStep:
    """v ← βv + Δ, w ← w + η_s v, from v = 0."""
    return _stepping("momentum", beta, lr)


@part
def ema(*, decay: float = 0.9, beta: float = 0.0, lr: float = 1.0) -> ServerStep:
    """Step, and show the exponential average e ← a_t e + (1 − a_t) w with a_t = min(decay, (t − 1)/t).

    Until the memory 1/(1 − decay) is full, that is the plain average of all iterates: the start has no extra weight.
    """
    if not 0.0 <= decay < 1.0:
        raise BadInput(f"decay = {decay} must lie in [0, 1)")

    def average(new: Tensor, old: Any, count: int) -> Tensor:
        return torch.lerp(new, old, min(decay, (count - 1) / count)) if count > 1 else new

    return _stepping("ema", beta, lr, average)


@part
def recent(*, share: float = 0.1, beta: float = 0.0, lr: float = 1.0) -> ServerStep:
    """Step, and show an average over the last ``share`` of all rounds so far: e ← a_t e + (1 − a_t) w.

    a_t = max(0, 1 − 1/(share·t)): an exponential average whose memory, share·t rounds, grows with the run (Shamir and
    Zhang, 2013), so that it fits any number of rounds.
    """
    if not 0.0 < share <= 1.0:
        raise BadInput(f"share = {share} must lie in (0, 1]")

    def average(new: Tensor, old: Any, count: int) -> Tensor:
        kept = 1.0 - 1.0 / (share * count)
        return torch.lerp(new, old, kept) if count > 1 and kept > 0 else new

    return _stepping("recent", beta, lr, average)


@part
def polyak(*, skip: int = 0, beta: float = 0.0, lr: float = 1.0) -> ServerStep:
    """Step, and show the mean of all iterates after the first ``skip`` rounds; before that, the iterate itself."""
    if skip < 0:
        raise BadInput(f"skip = {skip} must be ≥ 0: it is how many rounds are left out of the average")

    def average(new: Tensor, old: Any, count: int) -> Tensor:
        return torch.lerp(old, new, 1.0 / (count - skip)) if count - skip > 1 else new

    return _stepping("polyak", beta, lr, average)


@part
def ball(*, bound: float | None = None, lr: float = 1.0) -> ServerStep:
    """w ← Clip(w + η_s Δ, B), with ``bound`` = B (none: no projection).

    Shows w itself; where the combination carries clients' mean iterates (aggregate ``averaged``), shows
    x^(out) = (1/R) Σ_r x_r^(out) with x_r^(out) = w_{r−1} + Σ w_p (x̄_p − w_{r−1}).
    """
    if bound is not None and not 0.0 < bound < float("inf"):
        raise BadInput(f"bound = {bound!r} must be a positive number")

    def take(weights: Tensor, outcome: Outcome, memory: Memory) -> Stepped:
        stepped = weights + lr * outcome.delta
        if bound is not None:
            stepped = stepped * min(1.0, bound / max(float(torch.linalg.vector_norm(stepped)), 1e-30))
        if outcome.iterate is None:
            return stepped, stepped, memory
        seen = weights + outcome.iterate
        count = int(memory.get("count", 0)) + 1
        shown = torch.lerp(memory["average"], seen, 1.0 / count) if count > 1 else seen
        return stepped, shown, {**memory, "average": shown, "count": count}

    return ServerStep("ball", take)


STEPS: dict[str, Callable[..., ServerStep]] = {
    "plain": plain,
    "momentum": momentum,
    "ema": ema,
    "recent": recent,
    "polyak": polyak,
    "ball": ball,
}
