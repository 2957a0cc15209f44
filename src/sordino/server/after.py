"""The server's step with the combined update, as a value: (weights, outcome, memory) → (weights, shown, memory).

All of it is post-processing of releases, so it is free. ``beta`` adds momentum to any of them; the weights to show are
what is evaluated and handed out, and never what clients start from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
    ``made``: the factory and options that made it, set by ``sordino.made.part``.
    """

    name: str
    take: Callable[[Tensor, Outcome, Memory], Stepped]
    made: Made | None = None


def _step(weights: Tensor, delta: Tensor, memory: Memory, beta: float, lr: float) -> tuple[Tensor, Memory]:
    """w + η_s Δ; with momentum v ← βv + Δ from v = 0, and w + η_s v."""
    if beta == 0.0:
        return torch.add(weights, delta, alpha=lr), memory
    velocity = beta * memory["velocity"] + delta if "velocity" in memory else delta
    return torch.add(weights, velocity, alpha=lr), {**memory, "velocity": velocity}


@part(named=True)
def plain(*, lr: float = 1.0) -> ServerStep:
    """w ← w + η_s Δ."""

    def take(weights: Tensor, outcome: Outcome, memory: Memory) -> Stepped:
        stepped, memory = _step(weights, outcome.delta, memory, 0.0, lr)
        return stepped, stepped, memory

    return ServerStep("plain", take)


@part(named=True)
def momentum(*, beta: float = 0.9, lr: float = 1.0) -> ServerStep:
    """v ← βv + Δ, w ← w + η_s v, from v = 0."""
    _check("beta", beta)

    def take(weights: Tensor, outcome: Outcome, memory: Memory) -> Stepped:
        stepped, memory = _step(weights, outcome.delta, memory, beta, lr)
        return stepped, stepped, memory

    return ServerStep("momentum", take)


@part(named=True)
def ema(*, decay: float = 0.9, beta: float = 0.0, lr: float = 1.0) -> ServerStep:
    """Step, and show the exponential average e ← a_t e + (1 − a_t) w with a_t = min(decay, (t − 1)/t).

    Until the memory 1/(1 − decay) is full, that is the plain average of all iterates: the start has no extra weight.
    """
    _check("decay", decay)
    _check("beta", beta)

    def take(weights: Tensor, outcome: Outcome, memory: Memory) -> Stepped:
        stepped, memory = _step(weights, outcome.delta, memory, beta, lr)
        count = int(memory.get("count", 0)) + 1
        keep = min(decay, (count - 1) / count)
        shown = torch.lerp(stepped, memory["average"], keep) if count > 1 else stepped
        return stepped, shown, {**memory, "average": shown, "count": count}

    return ServerStep("ema", take)


@part(named=True)
def polyak(*, skip: int = 0, beta: float = 0.0, lr: float = 1.0) -> ServerStep:
    """Step, and show the mean of all iterates after the first ``skip`` rounds; before that, the iterate itself."""
    if skip < 0:
        raise BadInput(f"skip = {skip} must be ≥ 0: it is how many rounds are left out of the average")
    _check("beta", beta)

    def take(weights: Tensor, outcome: Outcome, memory: Memory) -> Stepped:
        stepped, memory = _step(weights, outcome.delta, memory, beta, lr)
        count = int(memory.get("count", 0)) + 1
        averaged = count - skip
        shown = torch.lerp(memory["average"], stepped, 1.0 / averaged) if averaged > 1 else stepped
        return stepped, shown, {**memory, "average": shown, "count": count}

    return ServerStep("polyak", take)


@part(named=True)
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


def _check(name: str, value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise BadInput(f"{name} = {value} must lie in [0, 1)")


STEPS: dict[str, Callable[..., ServerStep]] = {
    "plain": plain,
    "momentum": momentum,
    "ema": ema,
    "polyak": polyak,
    "ball": ball,
}
