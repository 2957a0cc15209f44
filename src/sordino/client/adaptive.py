"""Adaptive clipping at the client: questions about gradient norms, rules with a moving radius, averaged iterates.

The radius C_r is computed by the server from released answers and broadcast as ``radius``; until there is one, it is
``clip``. The gate bounds every record by it, so a radius can be wrong about utility but not about privacy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sordino.client.ask import Question
from sordino.client.clip import Clip, Public
from sordino.client.local import Local, State
from sordino.errors import BadInput


def radius(public: Public) -> Tensor | float:
    """C_r: the broadcast radius, or ``clip`` before the first one."""
    found: Tensor | float = public.get("radius", public["clip"])
    return found


def squared_norms(reach: float | None = None) -> Question:
    """Σ min(‖g_j‖², Ĝ²): how large gradients are at the weights the server sent. Ĝ is ``clip``.

    With ``reach`` κ the bound follows the radius, Ĝ_r = min(Ĝ, κ·C_{r−1}), and the noise on the answer with it.
    """
    if reach is not None and not reach > 1:
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


def under_radius() -> Question:
    """Σ (1{‖g_j‖ ≤ C_r} − ½): how many records lie under the radius, centred, so that its sensitivity is ½, not 1."""

    def values(losses: Tensor, norms: Tensor, public: Public) -> Tensor:
        return (norms <= radius(public)).to(norms.dtype) - 0.5

    return Question("under-radius", values, lambda public: 0.5)


def moving() -> Clip:
    """Flat clipping at the broadcast radius: a_j = min(1, C_r/‖g_j‖)."""
    return Clip("moving", lambda losses, norms, public: torch.ones_like(norms), radius, moves=True)


def automatic(gamma: float = 0.01) -> Clip:
    """AUTO-S (Bu et al. 2023): a_j = C/(‖g_j‖ + γ). Every record counts about equally; γ = 0 is plain normalisation.

    C only scales the step, so it is absorbed into the learning rate: leave ``clip`` at 1 and tune ``lr``.
    """
    if not gamma >= 0:
        raise BadInput(f"clip.gamma = {gamma!r}: the stabiliser of automatic clipping is ≥ 0 (usually 0.01)")

    def factors(losses: Tensor, norms: Tensor, public: Public) -> Tensor:
        limit = torch.as_tensor(public["clip"], dtype=norms.dtype, device=norms.device)
        return torch.where(torch.isinf(limit), torch.ones_like(norms), limit / (norms + gamma))

    return Clip(f"automatic(gamma={gamma:g})", factors, lambda public: public["clip"])


def _walk(params: Tensor, state: State, gradient: Tensor, public: Public) -> tuple[Tensor, State]:
    so_far = params.clone() if "walked" not in state else state["walked"].add_(params)
    taken = state.get("taken", params.new_zeros(())) + 1
    return params.sub_(gradient.mul_(public["lr"])), {**state, "walked": so_far, "taken": taken}


def _both(params: Tensor, start: Tensor, state: State, public: Public) -> tuple[dict[str, Tensor], State]:
    mean = state["walked"].div_(state["taken"]).sub_(start)
    kept = {name: value for name, value in state.items() if name not in ("walked", "taken")}
    return {"update": params.sub_(start), "iterate": mean}, kept


def averaged() -> Local:
    """Plain descent; uploads x_K − x_0 and, as ``iterate``, x̄ − x_0 with x̄ = (1/K) Σ_{k=0}^{K−1} x_k.

    Both are functions of releases alone, so the second upload costs traffic and no privacy.
    """
    return Local("averaged", _walk, _both, partner="averaged")
