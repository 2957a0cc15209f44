"""What the server does with the combined update: (weights, delta, state) → (weights, weights to show, state)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from sordino.server.facts import State

After = Callable[[Tensor, Tensor, State], tuple[Tensor, Tensor, State]]


def plain(weights: Tensor, delta: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
    """w ← w + Δ."""
    stepped = weights + delta
    return stepped, stepped, state


STEPS: dict[str, After] = {"plain": plain}
