"""A site's engine against plain autograd, one record at a time in float64."""

from __future__ import annotations

import copy
import importlib.util
import inspect

import pytest
import torch
from torch import Tensor, nn

from sordino import models
from sordino.client.gradients import Alone, loops
from sordino.client.gradients.alone import BLOCK
from sordino.client.gradients.losses import loss_by_name
from sordino.privacy import threads

ZOO = {
    "logistic": (5,),
    "mlp": (5,),
    "random-features": (5,),
    "cnn-small": (1, 8, 8),
    "robust-hdp-cnn": (1, 12, 12),
    "tramer-mnist": (1, 20, 20),
    "tramer-cifar": (3, 8, 8),
    "fedavg-cnn": (3, 16, 16),
    "resnet18-gn": (3, 32, 32),
}


def plain(model: nn.Module, x: Tensor, y: Tensor, loss: str) -> tuple[list[float], Tensor]:
    """Losses and gradients by autograd in float64, a record at a time."""
    wide = copy.deepcopy(model).double()
    weights = [one for one in wide.parameters() if one.requires_grad]
    losses, rows = [], []
    for record, label in zip(x.double(), y):
        out = wide(record[None])
        value = (
            nn.functional.cross_entropy(out, label[None])
            if loss == "cross-entropy"
            else 0.5 * (out.flatten() - label.double()).square().sum()
        )
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(value, weights)]))
        losses.append(float(value.detach()))
    return losses, torch.stack(rows)


@pytest.mark.parametrize("name", ZOO)
def test_every_model_of_the_zoo(name: str):
    torch.manual_seed(3)
    model, count = models.build(name, ZOO[name], 4), 3 if name == "resnet18-gn" else 6
    x, y = torch.randn(count, *ZOO[name]), torch.arange(count) % 4
    weights = torch.nn.utils.parameters_to_vector([p for p in model.parameters() if p.requires_grad]).detach()
    wanted, rows = plain(model, x, y, "cross-entropy")
    for apart in (True, False):
        engine = Alone(model, loss_by_name("cross-entropy"), apart=apart)
        graded = engine.under(weights)(x, y)
        assert graded.losses == pytest.approx(wanted, rel=1e-5)
        assert float((graded.gradients.double() - rows).norm() / rows.norm()) < 1e-5
        assert engine.under(weights, gradients=False)(x, y).losses == graded.losses


def test_simple_chains_go_side_by_side_and_others_one_by_one():
    loss = loss_by_name("cross-entropy")
    assert Alone(models.build("robust-hdp-cnn", (1, 8, 8), 3), loss).block == BLOCK
    assert Alone(models.build("resnet18-gn", (3, 32, 32), 3), loss).block == 1
    assert Alone(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), loss).block == 1


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 0, 1), (2, 1, 1), (1, 2, 2), (3, 3, 1)])
@pytest.mark.parametrize("channels", [2, 6])
def test_convolutions_of_every_geometry(channels: int, stride: int, padding: int, dilation: int, bias: bool):
    torch.manual_seed(0)
    first = nn.Conv2d(3, channels, 3, padding=1, bias=bias)
    second = nn.Conv2d(channels, 5, (3, 2), stride, padding, dilation, bias=bias)
    side = second(first(torch.zeros(1, 3, 9, 9))).shape[2:].numel()
    model = nn.Sequential(first, nn.Tanh(), second, nn.ReLU(), nn.Flatten(), nn.Linear(5 * side, 3, bias=bias))
    x, y = torch.randn(4, 3, 9, 9), torch.arange(4) % 3
    engine = Alone(model, loss_by_name("cross-entropy"))
    graded = engine.under(torch.nn.utils.parameters_to_vector(model.parameters()).detach())(x, y)
    assert engine.block > 1
    _, rows = plain(model, x, y, "cross-entropy")
    assert float((graded.gradients.double() - rows).norm() / rows.norm()) < 1e-5


@pytest.mark.parametrize("outputs", [1, 2])
def test_half_squared_errors(outputs: int):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, outputs))
    x, y = torch.randn(5, 2, 2), torch.randn(5) if outputs == 1 else torch.randn(5, 2)
    graded = Alone(model, loss_by_name("half-squared-error")).under(
        torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    )(x, y)
    wanted, rows = plain(model, x, y, "half-squared-error")
    assert graded.losses == pytest.approx(wanted, rel=1e-5)
    assert float((graded.gradients.double() - rows).norm() / rows.norm()) < 1e-5


def test_loops_give_the_same_bits_without_the_compiler(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    model = models.build("tramer-cifar", (3, 8, 8), 3)
    x, y = torch.randn(3, 3, 8, 8), torch.tensor([0, 2, 1])
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    compiled = Alone(model, loss_by_name("cross-entropy")).under(weights)(x, y)
    kept = compiled.gradients.clone()
    monkeypatch.setattr(threads, "unlocked", lambda function: function)
    spec = importlib.util.find_spec(loops.__name__)
    spec.loader.exec_module(written := importlib.util.module_from_spec(spec))
    for name in ("seen_products", "slope_products", "vector_products", "column_sums", "input_gradients", "tangents"):
        assert isinstance(getattr(loops, name), torch.jit.ScriptFunction)
        assert inspect.isfunction(getattr(written, name))
        monkeypatch.setattr(loops, name, getattr(written, name))
    plainly = Alone(model, loss_by_name("cross-entropy")).under(weights)(x, y)
    assert plainly.losses == compiled.losses
    assert torch.equal(plainly.gradients, kept)
