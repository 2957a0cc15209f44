"""Loops over the records of a block, each record in calls of its own; compiled, so that threads need not take turns.

What every loop does to a record is one call of a matrix product or a convolution on that record alone, always with the
same shapes: its result cannot depend on the others. ``torch.jit`` runs a loop without the interpreter's lock; where it
is not to be had, the same functions run as they are written.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor


def _compiled(function: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and without a successor that runs eagerly
        try:
            return torch.jit.script(function)
        except Exception:  # slower, and the same numbers
            return function


def _seen_products(view: Tensor, room: Tensor, seen: Tensor, kernels: Tensor, out: Tensor) -> None:
    for j in range(view.size(0)):
        room[j].copy_(view[j])
        torch.mm(seen[j], kernels, out=out[j])


def _slope_products(slopes: Tensor, seen: Tensor, out: Tensor) -> None:
    for j in range(slopes.size(0)):
        torch.mm(slopes[j].t(), seen[j], out=out[j])


def _vector_products(matrix: Tensor, vectors: Tensor, out: Tensor) -> None:
    for j in range(vectors.size(0)):
        torch.mv(matrix, vectors[j], out=out[j])


def _column_sums(slopes: Tensor, ones: Tensor, out: Tensor) -> None:
    for j in range(slopes.size(0)):
        torch.mv(slopes[j].t(), ones, out=out[j])


def _input_gradients(
    slopes: Tensor, like: Tensor, kernels: Tensor, stride: list[int], padding: list[int], holes: list[int], out: Tensor
) -> None:
    for j in range(slopes.size(0)):
        found = torch.ops.aten.convolution_backward(
            slopes[j : j + 1], like, kernels, None, stride, padding, holes, False, [0, 0], 1, [True, False, False]
        )
        out[j].copy_(found[0][0])


def _tangents(x: Tensor, out: Tensor) -> None:
    for j in range(x.size(0)):
        torch.tanh(x[j], out=out[j])


seen_products = _compiled(_seen_products)
"""Copy what each record's kernel sees (``view`` into ``room``, whose matrices are ``seen``), and multiply it."""

slope_products = _compiled(_slope_products)
"""dyᵀ·seen of every record."""

vector_products = _compiled(_vector_products)
"""matrix·vector of every record."""

column_sums = _compiled(_column_sums)
"""Sums over positions, as products with ones."""

input_gradients = _compiled(_input_gradients)
"""The gradient of a convolution's input, by the native kernel for a single image."""

tangents = _compiled(_tangents)
"""tanh of every record."""
