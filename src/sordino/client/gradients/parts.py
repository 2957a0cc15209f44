"""Torch's modules with several products in one, taken apart: which slots each of their layers has, and faster cores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sordino.client.gradients.types import Slot
from sordino.models.attention import PROJECTIONS, Attention, take_apart
from sordino.models.recurrent import suffixes, unroll

Owned = dict[str, dict[str, Slot]]
"""The slots of every layer, by its name and the parameter's own."""

SHORT = 128
"""Up to so many positions the weights of attention are kept for the way back; beyond, torch computes them twice."""


def parted(shadow: nn.Module, owned: Owned) -> None:
    """Take attention and recurrent networks in a model apart, and give their layers their parts of the slots."""
    for name, attention in take_apart(shadow):
        _hand_on(owned, name, _of_attention(attention, owned.pop(name, {})))
    for name, network in unroll(shadow):
        _hand_on(owned, name, _of_recurrent(network, owned.pop(name, {})))
    for module in shadow.modules():
        if type(module) is Attention:
            module.attend = attend
        elif isinstance(module, nn.TransformerEncoderLayer) and module.activation is functional.relu:
            module.activation = torch.relu_  # no layer keeps its own output: a pass over the widest numbers is spared


def _hand_on(owned: Owned, name: str, parts: Owned) -> None:
    owned.update({f"{name}.{part}": slots for part, slots in parts.items() if slots})


def _of_attention(module: nn.MultiheadAttention, own: dict[str, Slot]) -> Owned:
    found: Owned = {part: {} for part in PROJECTIONS}
    for place, part in enumerate(PROJECTIONS):
        for key, packed in (("weight", "in_proj_weight"), ("bias", "in_proj_bias")):
            if packed in own:
                found[part][key] = _third(own[packed], place)
        if f"{part[0]}_proj_weight" in own:
            found[part]["weight"] = own[f"{part[0]}_proj_weight"]
    return found


def _third(slot: Slot, place: int) -> Slot:
    rows = slot.shape[0] // 3
    return Slot(slot.name, (rows, *slot.shape[1:]), slot.offset + place * slot.size // 3)


def _of_recurrent(module: nn.RNNBase, own: dict[str, Slot]) -> Owned:
    found: Owned = {}
    for place, suffix in enumerate(suffixes(module)):
        for part, middle in (("inputs", "ih"), ("hidden", "hh")):
            keys = {key: f"{key}_{middle}_{suffix}" for key in ("weight", "bias")}
            found[f"cells.{place}.{part}"] = {key: own[name] for key, name in keys.items() if name in own}
    return found


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q kᵀ/√d + mask) v of ``[n, heads, t, d]``; a position that may attend to nothing gets 0."""
    if max(q.shape[2], k.shape[2]) > SHORT or q.device.type != "cpu":
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    out: Tensor = _Attended.apply(q, k, v, mask)  # type: ignore[no-untyped-call]
    return out


class _Attended(torch.autograd.Function):
    """Attention by batched products over records and heads, its weights kept for the way back.

    With P = softmax(S): dV = Pᵀ dO, dS = P ∘ (dO Vᵀ − rows' sums of dO Vᵀ ∘ P), dQ = dS K/√d, dK = dSᵀ Q/√d.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        ctx.scale, shape = q.shape[3] ** -0.5, q.shape
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        scores = _scaled(ctx.scale, q, k.transpose(1, 2))
        if mask is None:
            weights = torch.softmax(scores, -1, out=scores)
        else:
            weights = torch._safe_softmax(scores.unflatten(0, shape[:2]).add_(mask), -1).flatten(0, 1)
        ctx.saved = q, k, v, weights
        out: Tensor = torch.bmm(weights, v).unflatten(0, shape[:2])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        (q, k, v, weights), dy, lead = ctx.saved, grads[0].flatten(0, 1), grads[0].shape[:2]
        ctx.saved = None
        dv = torch.bmm(weights.transpose(1, 2), dy)
        slopes = torch.bmm(dy, v.transpose(1, 2))
        ds = torch._softmax_backward_data(slopes, weights, -1, weights.dtype)
        dq, dk = _scaled(ctx.scale, ds, k), _scaled(ctx.scale, ds.transpose(1, 2), q)
        return dq.unflatten(0, lead), dk.unflatten(0, lead), dv.unflatten(0, lead), None


def _scaled(scale: float, left: Tensor, right: Tensor) -> Tensor:
    """``scale · left @ right`` of every pair, in one pass."""
    out = left.new_empty(len(left), left.shape[1], right.shape[2])
    return torch.baddbmm(out, left, right, beta=0, alpha=scale, out=out)
