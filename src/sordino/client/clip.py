"""Clipping rules: how much each record counts, before the gate bounds it.

A rule is two small pure functions. ``factors(losses, norms, public)`` gives a_j for every record of a batch;
``bound(public)`` gives the radius C. The gate then enforces |a_j|·‖g_j‖ ≤ C, so a rule can be wrong about utility
but not about privacy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sordino.errors import BadInput
from sordino.made import Made, part

Public = Mapping[str, Any]
"""What the server broadcast for this turn: learning rate, clip radius, and whatever the method adds.

A number stands for all rows; where rows of several runs share a stack, or the server tells every client something
else, it may be a column [rows, 1] instead.
"""


@dataclass(frozen=True)
class Clip:
    """A clipping rule.

    Attributes
    ----------
    name: what plans and reports call it.
    factors: (losses, norms, public) → a_j for every record of a batch, in the shape of the losses.
    bound: public → the radius C, for all rows or a column [rows, 1].
    needs: the questions whose released answers it uses.
    moves: whether its radius changes from round to round, so that a run should show it.
    made: the factory and options that made it, set by ``sordino.made.Factory``.
    """

    name: str
    factors: Callable[[Tensor, Tensor, Public], Tensor]
    bound: Callable[[Public], Tensor | float]
    needs: tuple[str, ...] = ()
    moves: bool = False
    made: Made | None = None


def _ones(losses: Tensor, norms: Tensor, public: Public) -> Tensor:
    return torch.ones_like(norms)


def _clip(public: Public) -> Tensor | float:
    found: Tensor | float = public["clip"]
    return found


def radius(public: Public) -> Tensor | float:
    """C_r, a radius that the server computes from released answers: the broadcast one, or ``clip`` before the first."""
    found: Tensor | float = public.get("radius", public["clip"])
    return found


@part
def flat() -> Clip:
    """Every record counts once, up to norm C: a_j = min(1, C/‖g_j‖) (Abadi et al. 2016)."""
    return Clip("flat", _ones, _clip)


@part
def moving() -> Clip:
    """Flat clipping at the broadcast radius: a_j = min(1, C_r/‖g_j‖)."""
    return Clip("moving", _ones, radius, moves=True)


@part
def automatic(gamma: float = 0.01) -> Clip:
    """AUTO-S (Bu et al. 2023): a_j = C/(‖g_j‖ + γ). Every record counts about equally; γ = 0 is plain normalisation.

    C only scales the step, so it is absorbed into the learning rate: leave ``clip`` at 1 and tune ``lr``.
    """
    if not gamma >= 0:
        raise BadInput(f"clip.gamma = {gamma!r}: the stabiliser of automatic clipping is ≥ 0 (usually 0.01)")

    def factors(losses: Tensor, norms: Tensor, public: Public) -> Tensor:
        limit = torch.as_tensor(public["clip"], dtype=norms.dtype, device=norms.device)
        return torch.where(torch.isinf(limit), torch.ones_like(norms), limit / (norms + gamma))

    return Clip(f"automatic(gamma={gamma:g})", factors, _clip)


@part
def fair(weight: float = 0.1) -> Clip:
    """Fair clipping (FedFDP): f_j = max(0, 1 + λ(F_j − F(w_t))), a_j = f_j · min(1, C/(f_j ‖g_j‖)); λ is ``weight``.

    F(w_t) = Σ p_i F_i is what the server concluded from released losses and broadcasts as ``mean_loss``. λ = 0 is flat
    clipping, and needs no released loss.

    Guarantees
    ----------
    ‖a_j g_j‖ ≤ C for every record, whatever its loss: the gate cuts f_j ‖g_j‖ to C, and a record whose loss is not
    finite counts zero. (The paper's min(1 + λ(F_j − F), C/‖g_j‖) can be negative without bound.)
    """
    chosen = fairness_weight("clip.weight", weight)
    if chosen == 0.0:
        return flat()

    def factors(losses: Tensor, norms: Tensor, public: Public) -> Tensor:
        return fairness_factor(losses, public, chosen).clamp_(min=0.0)

    return Clip(f"fair(weight={chosen:g})", factors, _clip, needs=("loss",))


def fairness_factor(losses: Tensor, public: Public, weight: float) -> Tensor:
    """1 + λ(F − F(w_t)); 1 before the first release of a loss."""
    if "mean_loss" not in public:
        return torch.ones_like(losses)
    found: Tensor = (losses - public["mean_loss"]) * weight + 1.0
    return found


def fairness_weight(key: str, weight: float) -> float:
    """λ, checked; ``key`` is what a study calls it."""
    if not (math.isfinite(weight) and weight >= 0):
        raise BadInput(f"{key} is {weight!r}: λ, how much fairness counts, is a number ≥ 0")
    return float(weight)


def per_record(public: Public, owner: Tensor, rows: int) -> Public:
    """A broadcast to ``rows`` rows as the records of a flat batch see it: columns [rows, 1] by each record's owner."""
    return {
        name: value[owner, 0] if isinstance(value, Tensor) and value.shape == (rows, 1) else value
        for name, value in public.items()
    }


def per_row(value: Tensor | float, rows: int, like: Tensor) -> Tensor:
    """A public number, or a column of them, as a vector with an entry for every row."""
    if isinstance(value, Tensor) and value.dim():
        return value.to(like).reshape(-1)
    return torch.full((rows,), float(value), dtype=like.dtype, device=like.device)
