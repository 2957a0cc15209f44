"""The server's step with the combined update: (weights, delta, state, **options) → (weights, weights to show, state).

All of it is post-processing of releases, so it is free. ``beta`` adds momentum to any of them; the weights to show are
what is evaluated and handed out, and never what clients start from.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sordino.errors import BadInput
from sordino.server.facts import State

After = Callable[[Tensor, Tensor, State], tuple[Tensor, Tensor, State]]


def plain(weights: Tensor, delta: Tensor, state: State, *, lr: float = 1.0) -> tuple[Tensor, Tensor, State]:
    """w ← w + η_s Δ."""
    stepped = torch.add(weights, delta, alpha=lr)
    return stepped, stepped, state


def momentum(
    weights: Tensor, delta: Tensor, state: State, *, beta: float = 0.9, lr: float = 1.0
) -> tuple[Tensor, Tensor, State]:
    """v ← βv + Δ, w ← w + η_s v, from v = 0."""
    _check("beta", beta)
    velocity = beta * state["after_velocity"] + delta if "after_velocity" in state else delta
    stepped = torch.add(weights, velocity, alpha=lr)
    return stepped, stepped, {**state, "after_velocity": velocity}


def ema(
    weights: Tensor, delta: Tensor, state: State, *, decay: float = 0.9, beta: float = 0.0, lr: float = 1.0
) -> tuple[Tensor, Tensor, State]:
    """Step, and show the exponential average e ← a_t e + (1 − a_t) w with a_t = min(decay, (t − 1)/t).

    Until the memory 1/(1 − decay) is full, that is the plain average of all iterates: the start has no extra weight.
    """
    _check("decay", decay)
    stepped, state = _step(weights, delta, state, beta, lr)
    count = int(state.get("after_count", 0)) + 1
    keep = min(decay, (count - 1) / count)
    shown = torch.lerp(stepped, state["after_average"], keep) if count > 1 else stepped
    return stepped, shown, {**state, "after_average": shown, "after_count": count}


def polyak(
    weights: Tensor, delta: Tensor, state: State, *, skip: int = 0, beta: float = 0.0, lr: float = 1.0
) -> tuple[Tensor, Tensor, State]:
    """Step, and show the mean of all iterates after the first ``skip`` rounds; before that, the iterate itself."""
    if skip < 0:
        raise BadInput(f"skip = {skip} must be ≥ 0: it is how many rounds are left out of the average")
    stepped, state = _step(weights, delta, state, beta, lr)
    count = int(state.get("after_count", 0)) + 1
    averaged = count - skip
    shown = torch.lerp(state["after_average"], stepped, 1.0 / averaged) if averaged > 1 else stepped
    return stepped, shown, {**state, "after_average": shown, "after_count": count}


def _step(weights: Tensor, delta: Tensor, state: State, beta: float, lr: float) -> tuple[Tensor, State]:
    if beta == 0.0:
        stepped, _, state = plain(weights, delta, state, lr=lr)
    else:
        stepped, _, state = momentum(weights, delta, state, beta=beta, lr=lr)
    return stepped, state


def _check(name: str, value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise BadInput(f"{name} = {value} must lie in [0, 1)")


STEPS: dict[str, After] = {"plain": plain, "momentum": momentum, "ema": ema, "polyak": polyak}
