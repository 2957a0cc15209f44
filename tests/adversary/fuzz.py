"""Weights, records and factors that a hostile server, or a hostile record, would choose."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from sordino import models
from sordino.models import isolated
from sordino.models.standardised import StandardisedConv2d


@isolated
class Tokens(nn.Module):
    """An embedding of repeated indices, two linear layers over positions, then a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.wide, self.out = nn.Embedding(5, 6), nn.Linear(6, 40), nn.Linear(40, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(torch.relu(self.wide(self.table(x)))).mean(1)
        return out


@isolated
class Encoded(nn.Module):
    """A transformer's layer over words with padding, and a head."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 6, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(6, 2, 9, dropout=0.0, batch_first=True, **options)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.layer(self.table(x), src_key_padding_mask=x == 0).mean(1))
        return out


@isolated
class Recurring(nn.Module):
    """A recurrent layer over words, and a head on its last output."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.table, self.cells, self.out = nn.Embedding(5, 6), kind(6, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.cells(self.table(x))[0][:, -1])
        return out


@isolated
class Shared(nn.Module):
    """A table that is the head as well, for all positions, with a layer between that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner, self.out = nn.Embedding(5, 6), nn.Linear(6, 6), nn.Linear(6, 5)
        self.out.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(torch.relu(self.inner(self.table(x))))
        out: Tensor = self.out(inner).mean(1)
        return out


def _chain(*layers: nn.Module, width: int) -> nn.Sequential:
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width, 3))


MODELS = {
    "logistic": (lambda: models.build("logistic", (6,), 3), (6,)),
    "mlp": (lambda: models.build("mlp", (6,), 3, hidden=10), (6,)),
    "cnn-small": (lambda: models.build("cnn-small", (1, 8, 8), 3), (1, 8, 8)),
    "robust-hdp-cnn": (lambda: models.build("robust-hdp-cnn", (1, 8, 8), 3), (1, 8, 8)),
    "tramer-mnist": (lambda: models.build("tramer-mnist", (1, 20, 20), 3), (1, 20, 20)),
    "tanh": (lambda: _chain(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.MaxPool2d(2), width=36), (3, 8, 8)),
    "pooled": (
        lambda: _chain(
            *(nn.Conv2d(2, 17, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(17, 3, 3), nn.ReLU(), nn.MaxPool2d(2)),
            width=27,
        ),
        (2, 16, 16),
    ),
    "patches": (lambda: _chain(nn.Conv2d(4, 8, 3, stride=2, groups=2), nn.ReLU(), width=72), (4, 7, 7)),
    "rows": (lambda: _chain(nn.Conv2d(5, 3, 3), nn.ReLU(), width=108), (5, 8, 8)),
    "ghost": (lambda: _chain(nn.Conv2d(8, 16, 3), nn.ReLU(), width=64), (8, 4, 4)),
    "compiled": (lambda: _chain(nn.Conv2d(24, 3, 3), nn.ReLU(), width=108), (24, 8, 8)),
    "strided": (lambda: _chain(nn.Conv2d(6, 40, 3, stride=2, padding=1), nn.ReLU(), width=160), (6, 4, 4)),
    "dilated": (lambda: _chain(nn.Conv2d(2, 3, 2, dilation=2, padding=1), nn.ReLU(), width=147), (2, 7, 7)),
    "conv1d": (lambda: _chain(nn.Conv1d(3, 6, 3, padding=1), nn.ReLU(), width=54), (3, 9)),
    "norms": (
        lambda: _chain(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.LayerNorm(64), width=64),
        (2, 6, 6),
    ),
    "instance": (lambda: _chain(nn.InstanceNorm2d(2, affine=True), nn.Conv2d(2, 3, 3), width=48), (2, 6, 6)),
    "positions": (lambda: _chain(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 2), width=8), (4, 20)),
    "few positions": (lambda: _chain(nn.Linear(3, 4), nn.ReLU(), width=48), (12, 3)),
    "standardised": (
        lambda: _chain(StandardisedConv2d(2, 4, 3), nn.Tanh(), StandardisedConv2d(4, 3, 2, stride=2), width=12),
        (2, 6, 6),
    ),
    "wide positions": (
        lambda: nn.Sequential(nn.Linear(96, 96), nn.ReLU(), nn.Flatten(), nn.Linear(40 * 96, 3)),
        (40, 96),  # enough for products as convolutions and compiled gradients
    ),
    "tokens": (Tokens, (7,)),
    "text-bag": (lambda: models.build("text-bag", (7,), 3, tokens=5), (7,)),
    "text-encoder": (lambda: models.build("text-encoder", (7,), 3, tokens=5, width=6, heads=2), (7,)),
    "encoder": (Encoded, (7,)),
    "encoder, norm first": (lambda: Encoded(norm_first=True), (7,)),
    "lstm": (lambda: Recurring(nn.LSTM), (7,)),
    "gru": (lambda: Recurring(nn.GRU), (7,)),
    "shared": (Shared, (7,)),
    "adapters": (lambda: models.lora(Encoded(), rank=2, alpha=3.0, train=["out"]), (7,)),
}
"""Every layer rule and every way of a convolution."""

OF_WORDS = {
    *("tokens", "text-bag", "text-encoder", "encoder", "encoder, norm first", "lstm", "gru", "shared", "adapters"),
}
"""Those of them that read token ids."""


@dataclass(frozen=True)
class Case:
    """A model with chosen weights, a few records, and the factor a clipping rule would give each.

    With ``copies`` above 1 a record is so many inputs, ``x[n, copies, …]``.
    """

    name: str
    model: nn.Module
    x: Tensor
    y: Tensor
    factors: Tensor
    clip: float
    copies: int = 1


def case(name: str, seed: int, copies: int = 1) -> Case:
    """One case: any scale from 1e-38 to 1e38, cancelling pairs, dead units, constant records, copies that cancel."""
    random = np.random.default_rng([seed, *name.encode()])
    torch.manual_seed(seed)
    make, shape = MODELS[name]
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            _spoil(parameter, random)
    n = 5
    if name in OF_WORDS:
        x = torch.from_numpy(random.integers(0, 5 if random.random() < 0.5 else 2, (n, *shape)))
    else:
        x = torch.randn(n, *shape) * float(10.0 ** random.choice([0, 0, 0, random.uniform(-38, 38)]))
        if random.random() < 0.4:  # constant images
            x = x.flatten(1)[:, :1].view(n, *[1] * len(shape)).expand_as(x).clone()
        if random.random() < 0.2:
            x[0] = float(random.choice([np.inf, np.nan, 3e38, 1e-45]))
    chosen = random.choice([1.0, 1.0, 0.3, -1.0, 1e30, 1e-30, 3e38, np.inf, np.nan], n)
    factors, labels = torch.from_numpy(chosen.astype(np.float32)), torch.from_numpy(random.integers(0, 3, n))
    clip = float(10.0 ** random.uniform(-4, 3))
    if copies > 1:
        others = [x.flip(1) if name in OF_WORDS else x * random.choice([-1, 1, 1e6, 0]) for _ in range(copies - 1)]
        x = torch.stack([x, *others], 1)
    return Case(name, model, x, labels, factors, clip, copies)


def _spoil(parameter: Tensor, random: np.random.Generator) -> None:
    kind = random.integers(0, 7)
    if kind == 1:
        parameter *= float(10.0 ** random.uniform(-38, 38))
    elif kind == 2:  # half of the units against the other half
        half = len(parameter) // 2
        parameter[half : 2 * half] = -parameter[:half] * float(1 + random.choice([0, 1e-7]))
        parameter *= float(10.0 ** random.uniform(0, 12))
    elif kind == 3:
        parameter.fill_(float(random.choice([0.0, -1e10, 1e10, 1e-20, -3e38])))
    elif kind == 4:
        parameter *= float(10.0 ** random.uniform(-12, 12))
    elif kind == 6:  # neighbours against each other: gradients that cancel over positions
        signs = torch.tensor([1.0, -1.0]).repeat(parameter[0].numel() // 2 + 1)[: parameter[0].numel()]
        parameter.copy_((parameter * 1e-6 + signs.view_as(parameter[0])) * float(10.0 ** random.uniform(0, 12)))
    elif kind == 5 and random.random() < 0.1:
        parameter.view(-1)[0] = float(random.choice([np.inf, np.nan]))
