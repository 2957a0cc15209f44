"""Personal models: local rules whose clients keep a model of their own, over rows.

A client's model is a function of its own releases and of the server's weights, so keeping it costs nothing; it is kept
as client state and given back by ``Local.begin``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sordino.client.clip import Public
from sordino.client.local import Local, State, Uploaded
from sordino.errors import BadInput
from sordino.made import part


@part
def mr_mtl(weight: float = 1.0) -> Local:
    """MR-MTL (Liu et al. 2022): each client minimises F_k(w_k) + λ/2 ‖w_k − w̄‖² by its own private steps.

    w_k ← w_k − η g(w_k) − min(1, ηλ)(w_k − w̄), from where its last turn left w_k (its first turn: from w̄), with w̄ the
    weights that the server sent and λ = ``weight``. It uploads what the turn moved w_k by; with w̄ ← w̄ + Σ p_k Δ_k and
    everybody in every round, w̄ = Σ p_k w_k. λ = 0 is training alone; the larger λ, the closer to FedAvg.

    Guarantees: the pull is a function of releases and of the server's weights, so it is neither clipped nor noised.
    """
    if not (math.isfinite(weight) and weight >= 0):
        raise BadInput(f"local.weight is {weight!r}: the pull to the mean is a number ≥ 0, and 0 is training alone")
    strength = float(weight)

    def begin(start: Tensor, state: State) -> tuple[Tensor, State]:
        first = torch.where(state["taken"] > 0, state["own"], start)
        return first.clone(), {**state, "first": first, "mean": start}

    def update(params: Tensor, state: State, gradient: Tensor, public: Public) -> tuple[Tensor, State]:
        share = torch.as_tensor(public["lr"] * strength).clamp(max=1.0).to(params)
        pulled = (params - state["mean"]).mul_(share)
        return params.sub_(gradient.mul_(public["lr"])).sub_(pulled), state

    def finish(params: Tensor, start: Tensor, state: State, public: Public) -> Uploaded:
        return {"update": params - state["first"]}, {"own": params, "taken": torch.ones_like(params)}

    return Local(f"mr-mtl(weight={strength:g})", update, finish, state=("own", "taken"), begin=begin)


@part
def fine_tuned() -> Local:
    """Descent from the server's weights; in the last rounds, when the server says ``alone``, each client goes on alone.

    w_k ← w_k − η g(w_k) from w_k = w + o_k, w the server's weights, which then stay; o_k, zero at first, is what the
    client's rounds alone have moved. ``alone`` is how many of the model's last parameters still move: the others'
    gradients are set to zero after their release. Other halves: the aggregation rule of the same name.

    Guarantees: o_k is a sum of released gradients.
    """

    def begin(start: Tensor, state: State) -> tuple[Tensor, State]:
        return start + state["own"], state

    def update(params: Tensor, state: State, gradient: Tensor, public: Public) -> tuple[Tensor, State]:
        if "alone" in public:
            moving = torch.as_tensor(public["alone"], device=params.device)
            place = torch.arange(params.shape[-1], 0, -1, device=params.device)  # counted from the end
            gradient.mul_((place <= moving).to(gradient))
        return params.sub_(gradient.mul_(public["lr"])), state

    def finish(params: Tensor, start: Tensor, state: State, public: Public) -> Uploaded:
        moved = params - start
        kept = moved if "alone" in public else torch.zeros_like(moved)
        return {"update": moved - state["own"]}, {"own": kept}

    return Local("fine-tuned", update, finish, state=("own",), partner="fine-tuned", begin=begin)
