"""Products of linear layers over many positions: what plain products give, in the layer and in whole engines."""

import contextlib

import pytest
import torch
from torch import nn

from sordino import native
from sordino.client import gradients
from sordino.client.gradients import products
from sordino.models.isolation import isolated

SHAPES = [((5, 64, 40), 72), ((3, 7, 9, 48), 130), ((2, 1, 33), 4096)]


@pytest.fixture(params=["compiled", "as without a compiler"])
def loops(request):
    with contextlib.nullcontext() if request.param == "compiled" else native.set_aside():
        yield


@pytest.mark.parametrize(("shape", "outputs"), SHAPES)
def test_forward_and_back_are_those_of_plain_products(shape, outputs):
    x, weight, bias = torch.randn(shape), torch.randn(outputs, shape[-1]), torch.randn(outputs)
    out, dy = products.product(x, weight, bias), torch.randn(*shape[:-1], outputs)
    torch.testing.assert_close(out.double(), x.double() @ weight.double().t() + bias.double(), rtol=1e-5, atol=1e-4)
    dx = products.product(dy, weight.t())
    assert dx.shape == x.shape
    torch.testing.assert_close(dx.double(), dy.double() @ weight.double(), rtol=1e-5, atol=1e-3)


def test_an_input_in_another_order_in_memory():
    x, weight = torch.randn(40, 6, 64).permute(1, 2, 0), torch.randn(72, 40)
    torch.testing.assert_close(products.product(x, weight), x @ weight.t(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("wide", "deep"), [(40, 72), (128, 24), (7, 5)])
def test_gradients_of_records_and_their_lengths(loops, wide, deep):
    x, dy = torch.randn(6, 33, wide), torch.randn(6, 33, deep)
    out = torch.empty(6, deep, wide)
    squares = products.gradients(x, dy, out)
    for record in range(6):
        wanted = sum(torch.outer(dy[record, t].double(), x[record, t].double()) for t in range(33))
        torch.testing.assert_close(out[record].double(), wanted, rtol=1e-5, atol=1e-4)
        assert float(squares[record]) == pytest.approx(float(out[record].double().square().sum()), rel=1e-6)


def test_a_record_that_is_not_finite_stays_by_itself():
    x, weight = torch.randn(5, 64, 40), torch.randn(72, 40)
    spoilt = x.clone()
    spoilt[2] = torch.nan
    kept = [0, 1, 3, 4]
    assert torch.equal(products.product(x, weight)[kept], products.product(spoilt, weight)[kept])


@isolated
class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(32, 96), nn.Linear(96, 32), nn.Linear(32, 3)

    def forward(self, x):
        return self.head((x + self.down(torch.relu(self.up(x)))).mean(1))


def test_an_engine_with_them_agrees_with_a_loop_over_records(loops):
    torch.manual_seed(0)
    model, x, y = Positions(), torch.randn(12, 40, 32), torch.randint(0, 3, (12,))
    assert products.serves(x, model.up.weight)
    engine = gradients.build(model, "cross-entropy", kind="fast")
    factors = torch.rand(1, 12)
    graded = engine(engine.flatten(model)[None], x[None], y[None])
    model.double()
    each = []
    for one, label in zip(x.double(), y):
        loss = nn.functional.cross_entropy(model(one[None]), label[None])
        each.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    wanted = torch.stack(each)
    torch.testing.assert_close(graded.norms[0].double(), wanted.norm(dim=1), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(graded.pull(factors)[0].double(), factors[0].double() @ wanted, rtol=1e-4, atol=1e-6)
