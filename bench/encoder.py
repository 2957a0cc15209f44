"""A transformer encoder over words, as one writes it with torch's own layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sordino.models import isolated


@isolated
class Encoder(nn.Module):
    """Words and places as vectors, layers of attention, the mean over places, a linear head."""

    def __init__(self, length: int, classes: int, words: int, width: int, heads: int, wide: int, layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width, padding_idx=0), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, heads, wide, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of every class for records ``[n, length]`` of words' numbers."""
        places = torch.arange(x.shape[1], device=x.device).repeat(len(x), 1)
        out: Tensor = self.head(self.encoder(self.words(x) + self.places(places)).mean(1))
        return out


def encoder(
    shape: tuple[int, ...],
    classes: int,
    words: int = 1000,
    width: int = 128,
    heads: int = 4,
    wide: int = 256,
    layers: int = 2,
) -> nn.Module:
    """The encoder for records of one length."""
    return Encoder(shape[0], classes, words, width, heads, wide, layers)
