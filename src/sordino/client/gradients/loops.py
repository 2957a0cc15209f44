"""Loops over the records of a block, each record in calls of its own; compiled, so that threads need not take turns.

What every loop does to a record is one call of a matrix product or a convolution on that record alone, always with the
same shapes: its result cannot depend on the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sordino.privacy.threads import unlocked


@unlocked
def seen_products(view: Tensor, room: Tensor, seen: Tensor, kernels: Tensor, out: Tensor) -> None:
    """Copy what each record's kernel sees (``view`` into ``room``, whose matrices are ``seen``), and multiply it."""
    for j in range(view.size(0)):
        room[j].copy_(view[j])
        torch.mm(seen[j], kernels, out=out[j])


@unlocked
def slope_products(slopes: Tensor, seen: Tensor, out: Tensor) -> None:
    """The product dyᵀ·seen of every record."""
    for j in range(slopes.size(0)):
        torch.mm(slopes[j].t(), seen[j], out=out[j])


@unlocked
def vector_products(matrix: Tensor, vectors: Tensor, out: Tensor) -> None:
    """The product matrix·vector of every record."""
    for j in range(vectors.size(0)):
        torch.mv(matrix, vectors[j], out=out[j])


@unlocked
def column_sums(slopes: Tensor, ones: Tensor, out: Tensor) -> None:
    """Every record's sums over positions, as products with ones."""
    for j in range(slopes.size(0)):
        torch.mv(slopes[j].t(), ones, out=out[j])


@unlocked
def input_gradients(
    slopes: Tensor, like: Tensor, kernels: Tensor, stride: list[int], padding: list[int], holes: list[int], out: Tensor
) -> None:
    """The gradient of a convolution's input, by the native kernel for a single image."""
    for j in range(slopes.size(0)):
        found = torch.ops.aten.convolution_backward(
            slopes[j : j + 1], like, kernels, None, stride, padding, holes, False, [0, 0], 1, [True, False, False]
        )
        out[j].copy_(found[0][0])


@unlocked
def tangents(x: Tensor, out: Tensor) -> None:
    """The hyperbolic tangent of every record."""
    for j in range(x.size(0)):
        torch.tanh(x[j], out=out[j])


@unlocked
def norms(vectors: Tensor) -> list[float]:
    """‖vector‖ of every record, in float64."""
    found: list[float] = []
    for j in range(vectors.size(0)):
        found.append(float(torch.linalg.vector_norm(vectors[j], dtype=torch.float64)))
    return found


@unlocked
def cross_entropies(outputs: Tensor, y: Tensor, slopes: Tensor) -> list[float]:
    """Every record's −log softmax(outputs)[y] (NaN where y is no label), and its slopes."""
    found: list[float] = []
    for j in range(outputs.size(0)):
        label = int(y[j])
        if label < 0 or label >= outputs.size(1):
            found.append(float("nan"))
        else:
            logs = torch.log_softmax(outputs[j].clone(), 0)
            slopes[j].copy_(logs.exp())
            slopes[j, label] -= 1
            found.append(-float(logs[label]))
    return found


@unlocked
def half_squared_errors(outputs: Tensor, y: Tensor, slopes: Tensor) -> list[float]:
    """Every record's ½‖outputs − y‖², and its slopes."""
    found: list[float] = []
    for j in range(outputs.size(0)):
        gap = outputs[j].flatten() - y[j].flatten()
        slopes[j].copy_(gap.view_as(slopes[j]))
        found.append(0.5 * float(gap.square().sum()))
    return found
