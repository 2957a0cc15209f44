"""Private questions: a bounded scalar of every record, summed over a batch, noised and charged by the gate.

Before the step (a clip radius, a loss to choose participants by), or from the very batch of a step (a loss beside the
gradient). The client computes values; the gate does everything that privacy rests on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sordino.client.clip import Public
from sordino.privacy.gate import Piece


@dataclass(frozen=True)
class Question:
    """What is asked of a batch.

    Attributes
    ----------
    what: the release's name in the ledger.
    values: (losses, norms, public) → one value a record, same shape; the gate cuts it to ``bound``.
    bound: the largest value that counts, and so the sum's sensitivity.
    of_losses: whether values depend on losses alone, so that asking takes a forward pass and no gradients.
    """

    what: str
    values: Callable[[Tensor, Tensor, Public], Tensor]
    bound: Callable[[Public], Tensor | float]
    of_losses: bool = False


def scalar_piece(values: Tensor, owner: Tensor | None, rows: int, spread: Callable[[Tensor], Tensor]) -> Piece:
    """Per-record scalars as contributions: their size is their norm. ``owner`` says whose each is in a flat batch."""

    counted = values.nan_to_num(0.0, 0.0, 0.0)  # zero times a value that is not finite would not be zero

    def pull(factors: Tensor) -> Tensor:
        if owner is None:
            return (counted * factors).sum(1, keepdim=True)
        return values.new_zeros(rows, 1).index_add_(0, owner, (counted * factors)[:, None])

    return Piece(values.abs(), torch.ones_like(values), pull, spread)


def capped_loss(bound: float | None = None) -> Question:
    """Σ min(max(0, F_j), C_l), how badly the model does on a batch; C_l is ``bound``, or broadcast ``loss_bound``."""

    def limit(public: Public) -> float:
        return float(public["loss_bound"]) if bound is None else bound

    return Question("loss", lambda losses, norms, public: losses.clamp(min=0, max=limit(public)), limit, of_losses=True)
