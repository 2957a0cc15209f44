"""Fairness at the clients: records, or whole steps, count more where the loss is above the federation's.

F(w_t) = Σ p_i F_i is what the server concluded from released losses and broadcasts as ``mean_loss``. Before the first
release there is none, and every factor is 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sordino.client.ask import Question
from sordino.client.clip import Clip, Public, flat
from sordino.client.local import Local, State, sgd
from sordino.errors import BadInput


def fair(weight: float = 0.1) -> Clip:
    """Fair clipping (FedFDP): f_j = max(0, 1 + λ(F_j − F(w_t))), a_j = f_j · min(1, C/(f_j ‖g_j‖)); λ is ``weight``.

    λ = 0 is flat clipping, and needs no released loss.

    Guarantees
    ----------
    ‖a_j g_j‖ ≤ C for every record, whatever its loss: the gate cuts f_j ‖g_j‖ to C, and a record whose loss is not
    finite counts zero. (The paper's min(1 + λ(F_j − F), C/‖g_j‖) can be negative without bound.)
    """
    chosen = _checked("clip.weight", weight)
    if chosen == 0.0:
        return flat()

    def factors(losses: Tensor, norms: Tensor, public: Public) -> Tensor:
        return _factor(losses, public, chosen).clamp_(min=0.0)

    return Clip(f"fair(weight={chosen:g})", factors, lambda public: public["clip"], needs=("loss",))


def fair_step(weight: float = 0.1) -> Local:
    """The step of FedFair: η (1 + λ(F_i(w_i, batch) − F(w_t))); λ is ``weight``, and λ = 0 is plain descent.

    F_i(w_i, batch) is what was *released* of the loss from the very batch of the step.
    """
    chosen = _checked("local.weight", weight)
    plain = sgd()
    if chosen == 0.0:
        return plain

    def update(params: Tensor, state: State, gradient: Tensor, public: Public) -> tuple[Tensor, State]:
        return params.sub_(gradient.mul_(_factor(public["loss"], public, chosen).mul_(public["lr"]))), state

    return Local(f"fair(weight={chosen:g})", update, plain.finish, needs=("loss",))


def bounded_loss(start: float = 2.5) -> Question:
    """Σ min(max(0, F_j), C_l): C_l is ``start`` until the server broadcasts a ``loss_bound`` of its own."""
    if not (math.isfinite(start) and start > 0):
        raise BadInput(f"the loss bound is {start!r}: it must be a positive number, for it is what noise is scaled by")
    return _loss(start)


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


def _factor(losses: Tensor, public: Public, weight: float) -> Tensor:
    """1 + λ(F − F(w_t)); 1 before the first release."""
    if "mean_loss" not in public:
        return torch.ones_like(losses)
    found: Tensor = (losses - public["mean_loss"]) * weight + 1.0
    return found


def _checked(key: str, weight: float) -> float:
    if not (math.isfinite(weight) and weight >= 0):
        raise BadInput(f"{key} is {weight!r}: λ, how much fairness counts, is a number ≥ 0")
    return float(weight)
