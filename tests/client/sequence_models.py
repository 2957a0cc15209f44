"""Small networks over sequences of tokens: attention, recurrent layers, shared weights, adapters."""

import torch
from torch import nn

from sordino import models
from sordino.models import isolated

WORDS, LENGTH, WIDTH, CLASSES = 11, 5, 8, 3


@isolated
class Read(nn.Module):
    """An embedding with padding, one inner network over the sequence, a masked mean, a head."""

    def __init__(self, inner, call):
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.inner, self.call = inner, call
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        real = x != 0
        read = self.call(self.inner, self.table(x), ~real) * real.unsqueeze(2)
        return self.out(read.sum(1) / real.sum(1, keepdim=True).clamp_min(1))


@isolated
class Tied(nn.Module):
    """The table of words is also the head; the layer between runs twice."""

    def __init__(self, bias=True, padding=0):
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH, padding_idx=padding)
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WORDS, bias=bias)
        self.out.weight = self.table.weight

    def forward(self, x):
        inner = self.norm(torch.tanh(self.inner(self.norm(self.table(x)))))
        return self.out(torch.tanh(self.inner(inner[:, :2])).mean(1))


@isolated
class TwoTables(nn.Module):
    """Two embeddings with one table, of which one has padding, and two linear layers with one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Embedding(WORDS, WIDTH, padding_idx=0), nn.Embedding(WORDS, WIDTH)
        self.second.weight = self.first.weight
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.right.weight = self.left.weight
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        read = torch.tanh(self.left(self.first(x))) + torch.tanh(self.right(self.second(x.flip(1))))
        return self.out(read.mean(1))


def attention(**options):
    return nn.MultiheadAttention(WIDTH, 2, batch_first=True, **options)


def layer(**options):
    return nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True, **options)


def _to_itself(module, x, padding, **options):
    return module(x, x, x, **options)[0]


def _states(module, x, padding):
    out, last = module(x)
    return out + (last[0] if isinstance(last, tuple) else last).mean(0).repeat(1, 2)[:, None, :WIDTH]


CAUSAL = nn.Transformer.generate_square_subsequent_mask(LENGTH)


class OwnAttention(nn.Module):
    """As one writes it: linear layers around torch's function."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(out.transpose(1, 2).flatten(2))


isolated(OwnAttention)

INNER = {
    "attention": (attention, lambda m, x, p: _to_itself(m, x, p, need_weights=False)),
    "attention, weights asked for": (attention, _to_itself),
    "attention, padding, no bias": (
        lambda: attention(bias=False),
        lambda m, x, p: _to_itself(m, x, p, need_weights=False, key_padding_mask=p),
    ),
    "attention, mask of numbers a head": (
        attention,
        lambda m, x, p: _to_itself(
            m,
            x,
            p,
            need_weights=False,
            attn_mask=torch.linspace(-1, 1, 25).to(x).view(1, 5, 5).repeat(2 * len(x), 1, 1),
        ),
    ),
    "attention to another sequence": (
        attention,
        lambda m, x, p: m(x, x.flip(1)[:, :3], torch.relu(x[:, :3]), need_weights=False)[0],
    ),
    "attention, keys of their own widths": (
        lambda: attention(kdim=6, vdim=4),
        lambda m, x, p: m(x, x[:, :, :6], x[:, :, :4], need_weights=False)[0],
    ),
    "attention of one's own": (OwnAttention, lambda m, x, p: m(x)),
    "encoder layer": (layer, lambda m, x, p: m(x)),
    "encoder layer, norm first, gelu": (
        lambda: layer(norm_first=True, activation="gelu"),
        lambda m, x, p: m(x, src_key_padding_mask=p),
    ),
    "encoder": (lambda: nn.TransformerEncoder(layer(), 2), lambda m, x, p: m(x, src_key_padding_mask=p)),
    "encoder, causal": (
        lambda: nn.TransformerEncoder(layer(), 1, nn.LayerNorm(WIDTH)),
        lambda m, x, p: m(x, mask=CAUSAL.to(x), is_causal=True),
    ),
    "decoder layer": (
        lambda: nn.TransformerDecoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True),
        lambda m, x, p: m(x, torch.tanh(x[:, :3])),
    ),
    "lstm": (lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True), _states),
    "lstm, two layers, both ways": (
        lambda: nn.LSTM(WIDTH, WIDTH // 2, 2, bidirectional=True, batch_first=True),
        _states,
    ),
    "gru": (lambda: nn.GRU(WIDTH, WIDTH, batch_first=True), _states),
    "gru, two layers, both ways, no bias": (
        lambda: nn.GRU(WIDTH, WIDTH // 2, 2, bidirectional=True, bias=False, batch_first=True),
        _states,
    ),
    "rnn": (lambda: nn.RNN(WIDTH, WIDTH, nonlinearity="relu", batch_first=True), _states),
    "lstm from a state": (
        lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True),
        lambda m, x, p: m(x, (x[None, :, 0].tanh(), x[None, :, 1].tanh()))[0],
    ),
}


def read(name):
    torch.manual_seed(0)
    make, call = INNER[name]
    return Read(make(), call)


def adapted(name="encoder", **options):
    """With adapters that are not zero any more."""
    model = models.lora(read(name), **{"rank": 2, "alpha": 3.0, **options})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    return model


CASES = {
    **{name: lambda name=name: read(name) for name in INNER},
    "tied": Tied,
    "tied, no bias, no padding": lambda: Tied(bias=False, padding=None),
    "two tables in one": TwoTables,
    "adapters": adapted,
    "adapters of some, a head": lambda: adapted(targets=["query", "linear2"], train=["out"]),
}


def classes_of(model):
    return model.out.out_features if isinstance(model.out, nn.Linear) else CLASSES


def tokens(*lead, seed=1):
    """Records of all lengths; the first is padding alone."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(1, WORDS, (*lead, LENGTH), generator=generator)
    lengths = torch.randint(0, LENGTH + 1, lead, generator=generator)
    lengths.view(-1)[0] = 0
    return x * (torch.arange(LENGTH) < lengths.unsqueeze(-1))
