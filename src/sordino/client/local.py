"""What a client does with its released gradients: local objectives and corrections, over rows.

A rule sees the rows' weights, the client's own state, released gradients and public facts, and nothing else, so
whatever it computes is post-processing: neither clipped nor noised, and free. ``update`` may write into ``params``: the
turn owns that matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sordino.client.clip import Public, fairness_factor, fairness_weight
from sordino.errors import BadInput
from sordino.made import Made, part

State = dict[str, Tensor]
"""A client's own state between rounds, a row each: control variates, duals."""

Uploaded = tuple[dict[str, Tensor], State]


def _whole(public: Public, lengths: tuple[int, ...]) -> Mapping[str, int]:
    return {"update": sum(lengths)}


@dataclass(frozen=True)
class Local:
    """A local rule.

    Attributes
    ----------
    name: what plans and reports call it.
    update: (params[rows, d], state, gradient[rows, d], public) → (params, state), once a step. What was released
        from the step's batch beside the gradient is in ``public`` under its name, [rows, 1].
    finish: (params, start, state, public) → (upload, state), once a turn; ``upload`` maps names to [rows, …].
    state: the names of the per-client vectors of length d that survive between rounds; they start at zero.
    needs: the questions whose answers it uses; they must be asked of the step's own batch.
    partner: what it shares with the aggregation rule that is its other half at the server, if there is one.
    begin: (start[rows, d], state) → (params, state), where clients have models of their own: the model that a client
        with this state has, given the server's weights. None: every turn starts from the server's weights.
    trains: (model) → (module, loss), where gradients of another module are released in the model's place; the
        aggregation rule then makes the model of them (``Outcome.shown``).
    descends: whether a turn of one step is plain descent, w − η g, so that clients' gradients may be added up first.
    leaves: whether ``update`` never writes into one row of weights on a CPU, which may then be the server's own.
    sends: (a client's broadcast, lengths of the model's tensors) → how many numbers it uploads under which names.
    made: the factory and options that made it, set by ``sordino.made.Factory``.
    """

    name: str
    update: Callable[[Tensor, State, Tensor, Public], tuple[Tensor, State]]
    finish: Callable[[Tensor, Tensor, State, Public], Uploaded]
    state: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    partner: str = ""
    sends: Callable[[Public, tuple[int, ...]], Mapping[str, int]] = _whole
    begin: Callable[[Tensor, State], tuple[Tensor, State]] | None = None
    trains: Callable[[nn.Module], tuple[nn.Module, str]] | None = None
    descends: bool = False
    leaves: bool = False
    made: Made | None = None


def _descend(params: Tensor, state: State, gradient: Tensor, public: Public) -> tuple[Tensor, State]:
    where = gradient if one_on_cpu(params) else params
    return torch.sub(params, gradient.mul_(public["lr"]), out=where), state


def one_on_cpu(params: Tensor) -> bool:
    """Whether these are the weights of one row on a CPU, which rules that ``leaves`` never write into."""
    return len(params) == 1 and params.device.type == "cpu"


def _difference(params: Tensor, start: Tensor, state: State, public: Public) -> Uploaded:
    return {"update": params.sub_(start)}, state


@part
def sgd() -> Local:
    """Plain descent: w ← w − η g; upload w − w_start."""
    return Local("sgd", _descend, _difference, descends=True, leaves=True)


@part
def fair_step(weight: float = 0.1, most: float | None = None) -> Local:
    """The step of FedFair: η (1 + λ(F_i(w_i, batch) − F(w_t))); λ is ``weight``, and λ = 0 is plain descent.

    F_i(w_i, batch) is what was *released* of the loss from the very batch of the step. As published the factor has no
    bounds, and feeds on itself: a longer step makes a larger loss. ``most`` keeps it between 0 and so many.
    """
    chosen = fairness_weight("local.weight", weight)
    if most is not None and not (math.isfinite(most) and most >= 1):
        raise BadInput(f"local.most is {most!r}: the most that a step may be lengthened by, a number ≥ 1, usually 3")
    if chosen == 0.0:
        return sgd()

    def update(params: Tensor, state: State, gradient: Tensor, public: Public) -> tuple[Tensor, State]:
        factor = fairness_factor(public["loss"], public, chosen)
        if most is not None:
            factor.clamp_(min=0.0, max=most)
        return params.sub_(gradient.mul_(factor.mul_(public["lr"]))), state

    bounded = "" if most is None else f", most={most:g}"
    return Local(f"fair(weight={chosen:g}{bounded})", update, _difference, needs=("loss",))


@part
def averaged() -> Local:
    """Plain descent; uploads x_K − x_0 and, as ``iterate``, x̄ − x_0 with x̄ = (1/K) Σ_{k=0}^{K−1} x_k.

    Both are functions of releases alone, so the second upload costs traffic and no privacy.
    """

    def update(params: Tensor, state: State, gradient: Tensor, public: Public) -> tuple[Tensor, State]:
        so_far = params.clone() if "walked" not in state else state["walked"].add_(params)
        taken = state.get("taken", params.new_zeros(())) + 1
        return params.sub_(gradient.mul_(public["lr"])), {**state, "walked": so_far, "taken": taken}

    def finish(params: Tensor, start: Tensor, state: State, public: Public) -> Uploaded:
        mean = state["walked"].div_(state["taken"]).sub_(start)
        kept = {name: value for name, value in state.items() if name not in ("walked", "taken")}
        return {"update": params.sub_(start), "iterate": mean}, kept

    def sends(public: Public, lengths: tuple[int, ...]) -> Mapping[str, int]:
        return dict.fromkeys(("update", "iterate"), sum(lengths))

    return Local("averaged", update, finish, partner="averaged", sends=sends)


@part
def projected() -> Local:
    """PFA+: plain descent; uploads Vᵀ(w − w_start) per tensor, k numbers each, where the server broadcasts a basis V.

    ``basis`` is V, d×k, ``basis_sizes`` the length of every tensor, ``private`` [rows, 1] who is to send coefficients.
    Everyone else, and everyone before the first basis, uploads w − w_start. What a row does not upload is zero where
    rows of both kinds are in one matrix; a site has one row and sends one of the two.

    Guarantees: a linear map of releases and a broadcast basis, hence post-processing.
    """

    def finish(params: Tensor, start: Tensor, state: State, public: Public) -> Uploaded:
        update = params.sub_(start)
        private = public.get("private")
        if "basis" not in public or private is None or not bool(private.any()):
            return {"update": update}, state
        pieces = zip(update.split(public["basis_sizes"], 1), public["basis"].split(public["basis_sizes"], -2))
        # A basis for all rows is [d, k], one for each [rows, d, k].
        sent = torch.cat([torch.matmul(part[:, None], along)[:, 0] for part, along in pieces], 1).mul_(private)
        if bool(private.all()):
            return {"coefficients": sent}, state
        return {"update": update.mul_(1.0 - private), "coefficients": sent}, state

    def sends(public: Public, lengths: tuple[int, ...]) -> Mapping[str, int]:
        if "basis" not in public or not bool(torch.as_tensor(public.get("private", 0)).any()):
            return _whole(public, lengths)
        return {"coefficients": public["basis"].shape[-1] * len(lengths)}

    return Local("projected", _descend, finish, sends=sends)
