"""Gradients of the networks that read text, against a float64 loop over records."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from gradient_reference import assert_graded_like_plain
from torch import Tensor, nn

from sordino import models
from sordino.client import gradients
from sordino.client.gradients import Alone
from sordino.client.gradients.choose import _two_like
from sordino.client.gradients.losses import loss_by_name

TOKENS, LENGTH = 30, 9
KINDS = {
    "bag": ("text-bag", {}),
    "bag with units": ("text-bag", {"width": 5}),
    "encoder": ("text-encoder", {"width": 8, "heads": 2, "layers": 2}),
}


def built(kind: str) -> nn.Module:
    name, options = KINDS[kind]
    model = models.build(name, (LENGTH,), 3, seed=1, tokens=TOKENS, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4)))
    return model.eval()


def texts() -> Tensor:
    """Six texts: of padding alone, short, with words twice, full."""
    x = torch.randint(1, TOKENS, (6, LENGTH), generator=torch.Generator().manual_seed(2))
    for row in range(6):
        x[row, 3 * row % (LENGTH + 1) :] = 0
    x[2, :3] = x[2, 0]
    return x


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_a_loop_over_records_in_double_precision(kind):
    model = built(kind)
    x = torch.stack([texts(), texts().flip(0)])
    y = torch.randint(0, 3, x.shape[:2], generator=torch.Generator().manual_seed(3))
    assert models.why_not_isolated(model) is None
    engine = gradients.build(model, "cross-entropy", kind="fast")
    assert_graded_like_plain(engine, model, x, y)
    kinds = Counter(one.kind for one in engine.describe())
    assert set(kinds) <= {"Embedding", "Linear", "LayerNorm"}, "every layer has a rule"


@pytest.mark.parametrize("kind", KINDS)
def test_a_site_computes_what_a_simulation_does(kind):
    model, x = built(kind), texts()
    y = torch.arange(len(x)) % 3
    engine = gradients.build(model, "cross-entropy")
    weights = engine.flatten(model)
    alone = Alone(model, loss_by_name("cross-entropy")).under(weights)(x, y)
    assert not alone.troubles
    both = engine.shared(weights, x, y, torch.zeros(len(x), dtype=torch.long), 1)
    torch.testing.assert_close(both.norms.flatten(), alone.gradients.norm(dim=1), atol=1e-4, rtol=1e-4)


def test_an_engine_is_compared_on_words_and_not_on_padding_alone():
    """On padding alone a wrong rule for the table would go unseen."""
    model = nn.Embedding(TOKENS, 2)
    x, _ = _two_like(model, torch.zeros(1, 50, dtype=torch.long), torch.zeros(1, dtype=torch.long), 0)
    assert x.dtype == torch.long
    assert 0 <= int(x.min()) < int(x.max()) < TOKENS
