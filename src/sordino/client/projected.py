"""PFA+ at the client: after a warm-up round, private clients upload a few coefficients instead of their update."""

from __future__ import annotations

import torch
from torch import Tensor

from sordino.client.clip import Public
from sordino.client.local import Local, State, sgd


def projected() -> Local:
    """Plain descent; uploads Vᵀ(w − w_start) per tensor, k numbers each, where the server broadcasts a basis V.

    ``basis`` is V, d×k, ``basis_sizes`` the length of every tensor, ``private`` [rows, 1] who is to send coefficients.
    Everyone else, and everyone before the first basis, uploads w − w_start. What a row does not upload is zero where
    rows of both kinds are in one matrix; a site has one row and sends one of the two.

    Guarantees: a linear map of releases and a broadcast basis, hence post-processing.
    """
    plain = sgd()

    def finish(params: Tensor, start: Tensor, state: State, public: Public) -> tuple[dict[str, Tensor], State]:
        update = params.sub_(start)
        private = public.get("private")
        if "basis" not in public or private is None or not bool(private.any()):
            return {"update": update}, state
        sent = _coefficients(update, public["basis"], public["basis_sizes"]).mul_(private)
        if bool(private.all()):
            return {"coefficients": sent}, state
        return {"update": update.mul_(1.0 - private), "coefficients": sent}, state

    return Local("projected", plain.update, finish)


def _coefficients(update: Tensor, basis: Tensor, sizes: list[int]) -> Tensor:
    """Vᵀu tensor by tensor, [rows, tensors·k]; a basis for all rows, [d, k], or one for each, [rows, d, k]."""
    pieces = zip(update.split(sizes, 1), basis.split(sizes, -2))
    return torch.cat([torch.matmul(part[:, None], along)[:, 0] for part, along in pieces], 1)
