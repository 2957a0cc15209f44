"""Private questions: a bounded scalar of every record, summed over a batch, noised and charged by the gate.

Before the step (a clip radius, a loss to choose participants by), or from the very batch of a step (a loss beside the
gradient). The client computes values; the gate does everything that privacy rests on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sordino.client.clip import Public, radius
from sordino.errors import BadInput
from sordino.made import Made, part
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
    made: the factory and options that made it, set by ``sordino.made.Factory``.
    """

    what: str
    values: Callable[[Tensor, Tensor, Public], Tensor]
    bound: Callable[[Public], Tensor | float]
    of_losses: bool = False
    made: Made | None = None


def scalar_piece(values: Tensor, owner: Tensor | None, rows: int, spread: Callable[[Tensor], Tensor]) -> Piece:
    """Per-record scalars as contributions: their size is their norm. ``owner`` says whose each is in a flat batch."""

    counted = values.nan_to_num(0.0, 0.0, 0.0)  # zero times a value that is not finite would not be zero

    def pull(factors: Tensor) -> Tensor:
        if owner is None:
            return (counted * factors).sum(1, keepdim=True)
        return values.new_zeros(rows, 1).index_add_(0, owner, (counted * factors)[:, None])

    return Piece(values.abs(), torch.ones_like(values), pull, spread)


@part
def bounded_loss(start: float = 2.5) -> Question:
    """Σ min(max(0, F_j), C_l): C_l is ``start`` until the server broadcasts a ``loss_bound`` of its own."""
    if not 0 < start < math.inf:
        raise BadInput(f"the loss bound is {start!r}: it must be a positive number, for it is what noise is scaled by")
    return _loss(start)


@part
def exact_loss() -> Question:
    """Σ max(0, F_j) without a bound: no noise can cover it, so it is for methods that are NOT PRIVATE."""
    return _loss(math.inf)


def _loss(start: float) -> Question:
    def limit(public: Public) -> Tensor | float:
        found: Tensor | float = public.get("loss_bound", start)
        return found

    def values(losses: Tensor, norms: Tensor, public: Public) -> Tensor:
        return torch.clamp(losses, min=0.0)  # the gate cuts it to the bound

    return Question("loss", values, limit, of_losses=True)


@part
def squared_norms(reach: float | None = None) -> Question:
    """Σ min(‖g_j‖², Ĝ²): how large gradients are at the weights the server sent. Ĝ is ``clip``.

    With ``reach`` κ the bound follows the radius, Ĝ_r = min(Ĝ, κ·C_{r−1}), and the noise on the answer with it.
    """
    if reach is not None and not 1 < reach < math.inf:
        raise BadInput(f"ask.reach = {reach!r} must be above 1: it is how far gradients may exceed the last radius")

    def ceiling(public: Public) -> Tensor | float:
        largest: Tensor | float = public["clip"]
        if reach is None:
            return largest
        wanted = reach * radius(public)
        if isinstance(wanted, Tensor) or isinstance(largest, Tensor):
            return torch.minimum(*torch.broadcast_tensors(*map(torch.as_tensor, (wanted, largest))))
        return min(wanted, largest)

    def values(losses: Tensor, norms: Tensor, public: Public) -> Tensor:
        # Cut before squaring: the square of a large norm overflows, and an infinite value would count as zero.
        return torch.clamp(norms, max=ceiling(public)).square()

    return Question("squared-norm", values, lambda public: ceiling(public) ** 2)


@part
def under_radius() -> Question:
    """Σ (1{‖g_j‖ ≤ C_r} − ½): how many records lie under the radius, centred, so that its sensitivity is ½, not 1."""

    def values(losses: Tensor, norms: Tensor, public: Public) -> Tensor:
        return (norms <= radius(public)).to(norms.dtype) - 0.5

    return Question("under-radius", values, lambda public: 0.5)
