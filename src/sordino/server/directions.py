"""Principal directions of updates, tensor by tensor, and what is left of an update along them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sordino.server.facts import Layout


def tensors(layout: Layout, dimension: int) -> list[slice]:
    """Where each parameter tensor lies in the flat update; all of it is one tensor without a layout."""
    if not layout:
        return [slice(0, dimension)]
    return [slice(offset, offset + math.prod(shape)) for _, shape, offset in layout]


def principal_directions(public: Tensor, layout: Layout, directions: int) -> Tensor:
    """V, d×k: per tensor, the top k left singular vectors of the centred public updates, by their small Gram matrix.

    One public update is its own direction (not centred). Directions that the updates do not have are zero columns.
    """
    dimension = public.shape[1]
    basis = public.new_zeros(dimension, directions)
    if len(public) == 0:
        return basis
    centred = public - public.mean(0) if len(public) > 1 else public
    for piece in tensors(layout, dimension):
        block = centred[:, piece]
        # In float64: a Gram matrix has half the digits of its rows.
        small = (block.double() @ block.double().T).cpu()
        values, vectors = torch.linalg.eigh(small)
        count = min(directions, len(block))
        for column in range(count):
            value = float(values[-1 - column])
            if value > 1e-12 * float(values[-1]) and value > 0.0:
                along = (vectors[:, -1 - column].to(block.device) @ block.double()) / math.sqrt(value)
                basis[piece, column] = along.to(basis.dtype)
    return basis


def coefficients(update: Tensor, basis: Tensor, layout: Layout) -> Tensor:
    """What a private client uploads in PFA+: Vᵀ·update per tensor, [tensors·k] numbers (or a row of them per update).

    Guarantees: a linear map of released updates and a broadcast basis, hence post-processing.
    """
    parts = tensors(layout, basis.shape[0])
    return torch.cat([update[..., part] @ basis[part] for part in parts], dim=-1)


def expand(sent: Tensor, basis: Tensor, layout: Layout) -> Tensor:
    """V·c, back in d dimensions: what the server puts in a private client's row."""
    count = basis.shape[1]
    full = sent.new_zeros(*sent.shape[:-1], basis.shape[0])
    for number, piece in enumerate(tensors(layout, basis.shape[0])):
        full[..., piece] = sent[..., number * count : (number + 1) * count] @ basis[piece].T
    return full
