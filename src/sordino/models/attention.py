"""Attention with its projections as layers of their own: ``nn.MultiheadAttention`` taken apart.

torch packs the projections of queries, keys and values into one tensor and reads it past any layer. The gradient engine
and adapters work on layers, so they take a model's attention apart: the same function of the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from sordino.errors import BadInput
from sordino.models.isolation import isolated

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""softmax(q kᵀ/√d + mask) v of ``[n, heads, t, d]``; the mask is added to the scores."""

LINEAR = (nn.Linear, NonDynamicallyQuantizableLinear)
PROJECTIONS = ("query", "key", "value")


@isolated
class Attention(nn.Module):
    """softmax(q kᵀ/√d + mask) v over heads, then a projection; called and answering as ``nn.MultiheadAttention`` does.

    The first axis is that of the records (``batch_first=True``), and a record attends to itself alone.
    """

    batch_first = True
    in_proj_bias = None
    """None keeps torch's shortcut for inference, which reads packed weights, from being taken."""
    _qkv_same_embed_dim = False

    attend: Attend | None = None
    """Another way to the same numbers, where nothing is dropped; None is torch's own."""

    packed = False
    """Whether it was made from torch's with packed projections, and can be put together again."""

    def __init__(
        self, query: nn.Linear, key: nn.Linear, value: nn.Linear, out: nn.Linear, heads: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out_proj = query, key, value, out
        self.num_heads, self.dropout = heads, dropout

    @staticmethod
    def of(module: nn.MultiheadAttention) -> Attention:
        """The same attention, taken apart; its weights are cut from the packed ones and share their memory."""
        packed = module.in_proj_weight
        weights = _own_projections(module) if packed is None else packed.detach().chunk(3)
        biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.detach().chunk(3)
        trained = any(one.requires_grad for one in module.parameters(recurse=False))
        q, k, v = (linear_of(weight, bias, trained) for weight, bias in zip(weights, biases))
        made = Attention(q, k, v, module.out_proj, module.num_heads, module.dropout)
        made.packed = packed is not None
        return made.train(module.training)

    def whole(self) -> nn.MultiheadAttention:
        """Torch's module with the same weights, packed."""
        parts, out = (self.query, self.key, self.value), self.out_proj
        weight = torch.cat([one.weight.detach() for one in parts])
        made = nn.MultiheadAttention(
            out.in_features, self.num_heads, self.dropout, bias=self.query.bias is not None, batch_first=True
        ).to(weight.device, weight.dtype)
        made.in_proj_weight = nn.Parameter(weight, requires_grad=self.query.weight.requires_grad)
        if self.query.bias is not None:
            biases = torch.cat([one.bias.detach() for one in parts])
            made.in_proj_bias = nn.Parameter(biases, requires_grad=self.query.bias.requires_grad)
        made._modules["out_proj"] = out
        return made.train(self.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs ``[n, t, out]`` of ``query[n, t, …]``, ``key[n, s, …]``, ``value[n, s, …]``, and weights if asked."""
        if query.dim() != 3:
            raise BadInput(f"attention needs records of sequences, [records, length, width], not {tuple(query.shape)}")
        if is_causal and attn_mask is None:
            raise BadInput("is_causal is a hint about attn_mask, which is missing")
        q, k, v = self._heads(self.query(query)), self._heads(self.key(key)), self._heads(self.value(value))
        mask = _mask(key_padding_mask, attn_mask, q)
        drop = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
            weights = torch.softmax(scores if mask is None else scores + mask, -1)
            weights = functional.dropout(weights, drop)
            out = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        elif self.attend is not None and not drop:
            out = self.attend(q, k, v, mask)
        else:
            out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=drop)
        return self.out_proj(out.transpose(1, 2).flatten(2)), weights

    def _heads(self, x: Tensor) -> Tensor:
        out: Tensor = x.unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        return out


def _own_projections(module: nn.MultiheadAttention) -> tuple[Tensor, ...]:
    found = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    return tuple(one.detach() for one in found if one is not None)


def linear_of(weight: Tensor, bias: Tensor | None, trained: bool = False) -> nn.Linear:
    """A linear layer around given tensors, neither copied nor drawn."""
    made = nn.Linear(1, 1, bias=False, device="meta")
    made.out_features, made.in_features = weight.shape
    made.weight = nn.Parameter(weight, requires_grad=trained)
    made.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=trained))
    return made


def _mask(padding: Tensor | None, among: Tensor | None, q: Tensor) -> Tensor | None:
    """What is added to scores ``[n, heads, t, s]``: −∞ where a boolean mask is True, numbers as they are."""
    masks = []
    if among is not None:
        masks.append(_added(among, q).unflatten(0, q.shape[:2]) if among.dim() == 3 else _added(among, q))
    if padding is not None:
        masks.append(_added(padding, q)[:, None, None])
    return masks[0] if len(masks) == 1 else masks[0] + masks[1] if masks else None


def _added(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(mask, -torch.inf)


def why_whole(module: nn.MultiheadAttention) -> str | None:
    """Why an attention cannot be taken apart, in words; None where it can."""
    if not module.batch_first:
        return "has the records on its second axis; make it with batch_first=True"
    if module.bias_k is not None or module.add_zero_attn:
        return "adds positions of its own to the keys (add_bias_kv, add_zero_attn)"
    return None


def take_apart(model: nn.Module) -> Iterator[tuple[str, nn.MultiheadAttention]]:
    """Put :class:`Attention` in the place of torch's wherever that can be; the names and modules that were replaced.

    ``nn.TransformerEncoder`` is kept from making nested tensors, whose shapes are the records' lengths.
    """
    for name, module in list(model.named_modules()):
        if type(module) is nn.MultiheadAttention and why_whole(module) is None and name:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, Attention.of(module))
            yield name, module
        elif type(module) is nn.TransformerEncoder:
            module.use_nested_tensor = False
