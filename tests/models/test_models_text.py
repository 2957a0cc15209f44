"""Networks that read text: padding counts for nothing, outputs are those of plain loops, wrong uses are refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from sordino import models
from sordino.errors import BadInput

TOKENS, LENGTH = 30, 9
KINDS = {
    "bag": ("text-bag", {}),
    "bag with units": ("text-bag", {"width": 5}),
    "encoder": ("text-encoder", {"width": 8, "heads": 2, "layers": 2}),
}


def built(kind: str, length: int = LENGTH) -> nn.Module:
    name, options = KINDS[kind]
    model = models.build(name, (length,), 3, seed=1, tokens=TOKENS, **options)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def texts(count: int = 6, length: int = LENGTH) -> Tensor:
    """Token ids of several lengths, one with a hole, one full, one of padding alone, words twice."""
    x = torch.randint(1, TOKENS, (count, length), generator=torch.Generator().manual_seed(2))
    for row in range(count):
        x[row, (3 * row) % (length + 1) :] = 0
    x[1, 1] = 0
    x[2, :3] = x[2, 0]
    return x


def plain_bag(table: Tensor, record: list[int], sizes: int) -> Tensor:
    """The bag of one record, word by word."""
    words = sorted(set(record) - {0})
    out = 0.25 * table[sizes]
    for word in words:
        out = out + math.sqrt(1 - 0.25**2) / math.sqrt(len(words)) * table[word]
    return out


def plain_encoder(model: nn.Module, record: list[int]) -> Tensor:
    """The encoder's output for one record, position by position; padding is not there at all."""
    real = [place for place, one in enumerate(record) if one]
    state = {name: one.double() for name, one in model.state_dict().items()}

    def linear(name: str, x: Tensor) -> Tensor:
        return state[f"{name}.weight"] @ x + state[f"{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        centred = x - x.mean()
        return centred / (centred.square().mean() + 1e-5).sqrt() * state[f"{name}.weight"] + state[f"{name}.bias"]

    seen = {place: state["tokens.weight"][record[place]] + state["places.weight"][place] for place in real}
    for number, block in enumerate(model.blocks):
        heads, at = block.attention.heads, f"blocks.{number}"
        normed = {place: norm(f"{at}.norm1", one) for place, one in seen.items()}
        parts = {
            key: {place: linear(f"{at}.attention.{key}", one).chunk(heads) for place, one in normed.items()}
            for key in ("query", "key", "value")
        }
        after = {}
        for place in real:
            mixed = []
            for head in range(heads):
                query = parts["query"][place][head]
                scores = torch.stack([query @ parts["key"][o][head] / math.sqrt(len(query)) for o in real])
                shares = scores.softmax(0)
                mixed.append(sum(share * parts["value"][o][head] for share, o in zip(shares, real)))
            x = seen[place] + linear(f"{at}.attention.out", torch.cat(mixed))
            inner = nn.functional.gelu(linear(f"{at}.inner.0", norm(f"{at}.norm2", x)))
            after[place] = x + linear(f"{at}.inner.2", inner)
        seen = after
    if not real:
        return state["head.bias"]
    return linear("head", sum(norm("norm", one) for one in seen.values()) / len(real))


def test_outputs_are_those_of_plain_loops():
    x = texts()
    bag, units, encoder = (built(kind) for kind in KINDS)
    wanted = torch.stack([plain_bag(bag[0].table.weight.double(), row, TOKENS) for row in x.tolist()])
    torch.testing.assert_close(bag(x).double(), wanted, atol=1e-6, rtol=0)
    inner = torch.stack([plain_bag(units[0].table.weight.double(), row, TOKENS) for row in x.tolist()]).tanh()
    wanted = inner @ units[2].weight.double().T + units[2].bias.double()
    torch.testing.assert_close(units(x).double(), wanted, atol=1e-6, rtol=0)
    wanted = torch.stack([plain_encoder(encoder, row) for row in x.tolist()])
    torch.testing.assert_close(encoder(x).double(), wanted, atol=1e-5, rtol=0)


def test_a_bag_has_features_of_length_one():
    model = models.build("text-bag", (LENGTH,), 3, tokens=TOKENS)
    assert models.reach(model, (LENGTH,), TOKENS) == pytest.approx(1.0, abs=1e-6)
    assert models.weight_size(model) == math.inf, "one trained layer, which noise cannot drown"


@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_on_padding_changes_nothing(kind):
    model, x = built(kind), texts()
    before = model(x)
    with torch.no_grad():
        table = model[0].table if kind != "encoder" else model.tokens
        table.weight[0] = 1e6  # whatever is learnt, or drawn, for padding
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("kind", KINDS)
def test_more_padding_changes_nothing(kind):
    short, long = built(kind), built(kind, LENGTH + 4)
    with torch.no_grad():
        for (name, one), other in zip(short.named_parameters(), long.parameters()):
            if name == "places.weight":
                other.fill_(1e3)
                other[:LENGTH] = one
            else:
                other.copy_(one)
    x = texts()
    further = torch.cat([x, torch.zeros(len(x), 4, dtype=torch.long)], 1)
    torch.testing.assert_close(long(further), short(x), atol=2e-6, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_of_padding_alone_has_finite_outputs_and_gradients(kind):
    model = built(kind)
    nothing = torch.zeros(2, LENGTH, dtype=torch.long)
    out = model(nothing)
    nn.functional.cross_entropy(out, torch.tensor([0, 1])).backward()
    assert torch.isfinite(out).all()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.isfinite(parameter.grad).all(), name
        if name == "tokens.weight":
            assert not parameter.grad.any(), "there is nothing to learn about words"


def test_wrong_uses_are_refused_with_a_remedy():
    for kind in ("text-bag", "text-encoder"):
        with pytest.raises(BadInput, match=r"reads text, and these records are numbers: declare a text column"):
            models.build(kind, (9,), 3)
        with pytest.raises(BadInput, match=r"vocabulary = 7, and the records have 30 token ids: leave it out"):
            models.build(kind, (9,), 3, tokens=30, vocabulary=7)
        with pytest.raises(BadInput, match="reads rows of token ids, not records of shape"):
            models.build(kind, (1, 8, 8), 3, tokens=30)
    for kind in ("logistic", "mlp", "linear"):
        with pytest.raises(BadInput, match="takes numbers, and these records are texts: use 'text-bag'"):
            models.build(kind, (9,), 3, tokens=30)
    with pytest.raises(BadInput, match="width = 30 does not part into 4 heads"):
        models.build("text-encoder", (9,), 3, tokens=30, width=30)
    with pytest.raises(BadInput, match="width = 0: it is one whole number ≥ 1"):
        models.build("text-bag", (9,), 3, tokens=30, width=0)
    with pytest.raises(BadInput, match=r"features 'unit' are made of numbers, .*such as word vectors"):
        models.build("logistic", (9,), 3, tokens=30, features="unit")
    assert models.usual((9,), None, {}, 30) == ("text-bag", {})


def public_vectors(shape: tuple[int, ...], wide: int = 4) -> nn.Module:
    """An extractor of one's own: the mean of public word vectors."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(TOKENS, wide)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x).mean(1)

    return Mean()


def test_public_word_vectors_go_before_a_model_for_numbers():
    model = models.build("logistic", (9,), 3, tokens=TOKENS, features=f"{__name__}:public_vectors")
    models.check(model, (9,), 3, models.dtype_of(TOKENS))
    fixed, trained = models.split_fixed(model)
    x = texts()
    torch.testing.assert_close(trained(models.apply_fixed(fixed, x)), model(x))
