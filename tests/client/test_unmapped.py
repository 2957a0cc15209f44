"""Models that ``torch.func.vmap`` cannot take: recurrent ones, and forward code that branches on values."""

import pytest
import torch
from gradient_reference import assert_graded_like_plain
from torch import nn

from sordino.client import gradients


class Recurrent(nn.Module):
    """A record's rows as a sequence, read by a recurrent layer."""

    def __init__(self, kind):
        super().__init__()
        self.cells = kind(8, 6, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.cells(x)[0][:, -1])


class Branching(nn.Module):
    """Another sign where the sum of a record is negative."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = x.mean(1)
        return self.head(x if x.sum() > 0 else -x)


@pytest.mark.parametrize(
    "model", [Recurrent(nn.GRU), Recurrent(nn.LSTM), Branching()], ids=["gru", "lstm", "branching"]
)
def test_they_are_graded_like_a_loop_over_records(model):
    engine = gradients.build(model, "cross-entropy")
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(2, 3, 5, 8, generator=generator), torch.randint(0, 4, (2, 3), generator=generator)
    assert_graded_like_plain(engine, model, x, y)


def test_the_engine_says_so_and_dropout_still_drops_the_same():
    torch.manual_seed(0)
    model = nn.Sequential(Recurrent(nn.GRU), nn.Dropout(0.5))
    engine = gradients.build(model, "cross-entropy")
    engine._kept_bytes = 0  # computed twice: for norms, and for sums
    x, y = torch.randn(1, 4, 5, 8), torch.zeros(1, 4, dtype=torch.long)
    graded = engine(engine.flatten(model)[None], x, y)
    for record in range(4):
        alone = torch.zeros(1, 4)
        alone[0, record] = 1.0
        torch.testing.assert_close(graded.pull(alone).norm(), graded.norms[0, record].float())
    assert "one record after the other" in engine.describe()[0].reason


def test_a_model_that_is_wrong_either_way_raises_its_own_error():
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(7, 4)

        def forward(self, x):
            return self.head(x)

    engine = gradients.build(Wrong(), "cross-entropy", "exact")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        engine(engine.flatten(engine.module)[None], torch.randn(1, 2, 8), torch.zeros(1, 2, dtype=torch.long))
