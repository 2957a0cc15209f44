"""Networks that read token ids, ``[records, length]`` of whole numbers, where 0 is padding.

What stands on padding contributes exactly nothing: a record's output is the same however far it is padded and whatever
is learnt for padding, and a record of padding alone has an output, and gradients, that are finite.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from sordino.errors import BadInput
from sordino.models.isolation import isolated
from sordino.models.scatter import Intercept

Shape = tuple[int, ...]
PADDING = 0


@isolated
class Bag(nn.Module):
    """Which tokens a record has, whatever their order and number: Σ_t u_t E[t], with ‖u‖ = 1.

    u has √(1 − c²)/√(number of different tokens) for each of them, and c = 0.25 for a constant that every record has
    (:class:`Intercept`), the last row of the table E. With one column of E a class this is a linear head on features of
    length 1, of which a record touches only the rows of its own tokens.
    """

    def __init__(self, vocabulary: int, wide: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.table = nn.Embedding(vocabulary + 1, wide)

    def forward(self, x: Tensor) -> Tensor:
        """``[records, length]`` to ``[records, wide]``."""
        ids = x.sort(1).values  # equal ones stand together, so that each is counted once
        start = torch.ones_like(ids[:, :1], dtype=torch.bool)
        first = torch.cat([start, ids[:, 1:] != ids[:, :-1]], 1) & (ids != PADDING)
        weight = first.to(self.table.weight.dtype)
        share = math.sqrt(1 - Intercept.SHARE**2) / weight.sum(1, keepdim=True).clamp(min=1).sqrt()
        constant = torch.full_like(ids[:, :1], self.vocabulary)
        weight = torch.cat([weight * share, torch.full_like(weight[:, :1], Intercept.SHARE)], 1).unsqueeze(2)
        found = self.table(torch.cat([ids, constant], 1))
        bag: Tensor = (found * weight).masked_fill(weight == 0, 0).sum(1)
        return bag


@isolated
class Attention(nn.Module):
    """Attention of every position to all that are no padding: softmax(q·kᵀ/√d + mask)·v in each of ``heads`` heads."""

    def __init__(self, wide: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(wide, wide) for _ in range(3))
        self.out = nn.Linear(wide, wide)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """``x[records, length, wide]``, and which positions are ``seen[records, length]``: at least one of each."""
        q, k, v = (one(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for one in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None, :])
        found: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return found


@isolated
class Block(nn.Module):
    """x' = x + attention(norm(x)), then x' + W₂ gelu(W₁ norm(x')), the inner layer twice as wide."""

    def __init__(self, wide: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(wide), Attention(wide, heads)
        self.norm2 = nn.LayerNorm(wide)
        self.inner = nn.Sequential(nn.Linear(wide, 2 * wide), nn.GELU(), nn.Linear(2 * wide, wide))

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """The block's output for every position."""
        x = x + self.attention(self.norm1(x), seen)
        found: Tensor = x + self.inner(self.norm2(x))
        return found


@isolated
class Encoder(nn.Module):
    """Tokens and places, added; blocks of attention; the mean over what is no padding; a linear head."""

    def __init__(self, vocabulary: int, length: int, outputs: int, wide: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, wide), nn.Embedding(length, wide)
        for table in (self.tokens, self.places):  # as small as other weights: noise is as large on all of them
            nn.init.normal_(table.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(wide, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(wide), nn.Linear(wide, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """``[records, length]`` to ``[records, outputs]``."""
        real = x != PADDING
        # Softmax over nothing is no number: a record of padding alone looks at its first place, and counts as zeros.
        start = torch.arange(x.shape[1], device=x.device) == 0
        seen = real | (start & ~real.any(1, keepdim=True))
        places = torch.arange(x.shape[1], device=x.device).expand_as(x)
        found = self.tokens(x) + self.places(places)
        for block in self.blocks:
            found = block(found, seen)
        count = real.sum(1, keepdim=True).clamp(min=1).to(found.dtype)
        mean = self.norm(found).masked_fill(~real.unsqueeze(2), 0).sum(1) / count
        out: Tensor = self.head(mean)
        return out


def text_bag(shape: Shape, classes: int | None, vocabulary: int | None = None, width: int | None = None) -> nn.Module:
    """Which words a text has: a linear model of them, or with ``width`` tanh units of them and a linear head on these.

    4,097 × classes parameters of a vocabulary of 4,096 ids; ``width`` is the number of units.
    """
    _length("text-bag", shape)
    ids = _whole("text-bag", "vocabulary", vocabulary, 2)
    if width is None:
        bag = Bag(ids, classes or 1)
        nn.init.zeros_(bag.table.weight)  # convex: nothing is gained by another start
        return nn.Sequential(bag)
    bag = Bag(ids, _whole("text-bag", "width", width, 1))
    return nn.Sequential(bag, nn.Tanh(), nn.Linear(bag.table.embedding_dim, classes or 1))


def text_encoder(
    shape: Shape, classes: int | None, vocabulary: int | None = None, width: int = 32, layers: int = 1, heads: int = 4
) -> nn.Module:
    """A small transformer: learnt places, ``layers`` blocks of attention in ``heads`` heads, a mean, a linear head."""
    length, ids = _length("text-encoder", shape), _whole("text-encoder", "vocabulary", vocabulary, 2)
    if width % heads:
        raise BadInput(f"model 'text-encoder': width = {width} does not part into {heads} heads: use a multiple of it")
    return Encoder(ids, length, classes or 1, width, layers, heads)


def _length(name: str, shape: Shape) -> int:
    if len(shape) != 1:
        raise BadInput(f"model '{name}' reads rows of token ids, not records of shape {shape}: use a model for these")
    return shape[0]


def _whole(name: str, option: str, value: int | None, least: int) -> int:
    if type(value) is not int or value < least:
        raise BadInput(f"model '{name}': {option} = {value!r}: it is one whole number ≥ {least}")
    return value
