"""Local objectives and corrections against client drift: SCAFFOLD, FedProx, FedDyn, over rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sordino.client.clip import Public
from sordino.client.local import Local, State, Uploaded, _difference, sgd
from sordino.errors import BadInput
from sordino.made import part


@part
def scaffold() -> Local:
    """SCAFFOLD (Karimireddy et al. 2020), option II: w ← w − η(g − c_i + c), then c_i ← mean of the turn's g.

    c is broadcast as ``control``. The new c_i follows from the uploaded w_i − w, so the server works it out too and
    nothing else is uploaded. With noisy g this is DP-SCAFFOLD (Noble et al. 2022).

    Guarantees: c_i = c_i − c + (w − w_i)/(Kη) is a function of releases alone.
    """

    def update(params: Tensor, state: State, gradient: Tensor, public: Public) -> tuple[Tensor, State]:
        gradient.sub_(state["control"])
        if "control" in public:
            gradient.add_(public["control"])
        steps = state["steps"] + 1 if "steps" in state else params.new_ones(())
        return params.sub_(gradient.mul_(public["lr"])), {**state, "steps": steps}

    def finish(params: Tensor, start: Tensor, state: State, public: Public) -> Uploaded:
        moved = params.sub_(start)
        change = moved / (-state["steps"] * public["lr"])
        if "control" in public:
            change -= public["control"]
        return {"update": moved}, {"control": state["control"] + change}

    return Local("scaffold", update, finish, state=("control",), partner="scaffold")


@part
def fedprox(mu: float = 0.1) -> Local:
    """FedProx (Li et al. 2020): a pull towards the server's weights, w ← w − η(g + μ(w − w_start)).

    μ = 0 is plain descent, and so is a turn of one step.
    """
    pull = _checked("mu", mu)

    def update(params: Tensor, state: State, gradient: Tensor, public: Public) -> tuple[Tensor, State]:
        start = state["start"] if "start" in state else params.clone()
        gradient.add_(params - start, alpha=pull)
        return params.sub_(gradient.mul_(public["lr"])), {**state, "start": start}

    return sgd() if pull == 0.0 else Local(f"fedprox(mu={pull:g})", update, _difference, descends=True)


@part
def feddyn(alpha: float = 0.1) -> Local:
    """FedDyn (Acar et al. 2021): w ← w − η(g − h_i + α(w − w_start)), then h_i ← h_i − α(w_i − w_start).

    α must be positive: with α = 0 the clients' half is FedAvg but the server's is not.
    """
    pull = _checked("alpha", alpha)
    if pull == 0.0:
        raise BadInput("feddyn's alpha is 0: that is plain descent, use local 'sgd' and aggregate 'data-weighted'")

    def update(params: Tensor, state: State, gradient: Tensor, public: Public) -> tuple[Tensor, State]:
        start = state["start"] if "start" in state else params.clone()
        gradient.sub_(state["dual"]).add_(params - start, alpha=pull)
        return params.sub_(gradient.mul_(public["lr"])), {**state, "start": start}

    def finish(params: Tensor, start: Tensor, state: State, public: Public) -> Uploaded:
        moved = params.sub_(start)
        return {"update": moved}, {"dual": torch.sub(state["dual"], moved, alpha=pull)}

    return Local(f"feddyn(alpha={pull:g})", update, finish, state=("dual",), partner="feddyn")


def _checked(key: str, value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise BadInput(f"local.{key} is {value!r}: it must be a number ≥ 0")
    return float(value)
