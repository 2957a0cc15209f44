"""A record of several inputs, in every engine: its loss is their mean, so gradient and norm are the mean's."""

import pytest
import torch
from gradient_reference import plain_gradients, relative, rows_of_parameters
from test_gradients_layers import CASES, Tokens

from sordino import models
from sordino.client import gradients
from sordino.client.gradients import Alone
from sordino.client.gradients.fast import Fast
from sordino.client.gradients.losses import loss_by_name

COPIES = 3
LOSS = loss_by_name("cross-entropy")


def units(shape, classes, rows=2, width=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, width, COPIES, *shape, generator=generator, dtype=dtype)
    return x, torch.randint(0, classes, (rows, width), generator=generator)


def plain_means(model, flat, x, y):
    """Losses ``[n]`` and gradients ``[n, d]`` of records, a loop over their inputs each."""
    found = [plain_gradients(model, flat, one, label.expand(COPIES)) for one, label in zip(x, y)]
    return torch.stack([losses.mean() for losses, _ in found]), torch.stack([each.mean(0) for _, each in found])


def assert_like_plain(engine, model, x, y, tolerance):
    rows, width = y.shape
    params = rows_of_parameters(engine, model, rows)
    mask = torch.ones(rows, width, dtype=torch.bool)
    mask[-1, -1] = False
    factors = torch.rand(rows, width, generator=torch.Generator().manual_seed(6)).to(params.dtype) + 0.1
    graded = engine(params, x, y, mask)
    pulled = graded.pull(factors)
    for row in range(rows):
        losses, each = plain_means(model, params[row].double(), x[row], y[row])
        keep = mask[row].double()
        assert relative(graded.losses[row], losses * keep) < tolerance
        assert relative(graded.norms[row], each.norm(dim=1) * keep) < tolerance
        assert relative(pulled[row], (factors[row].double() * keep) @ each) < tolerance
        assert bool((graded.limits[row] >= each.norm(dim=1) * keep).all())
    assert relative(engine.losses(params, x, y, mask), graded.losses.double()) < tolerance
    owner = torch.arange(rows * width) * 3 // (rows * width)
    graded = engine.shared(params[0], x.flatten(0, 1), y.flatten(), owner, 3)
    losses, each = plain_means(model, params[0].double(), x.flatten(0, 1), y.flatten())
    weights = torch.zeros(3, rows * width, dtype=torch.float64)
    weights[owner, torch.arange(rows * width)] = factors.flatten().double()
    assert relative(graded.losses, losses) < tolerance
    assert relative(graded.norms, each.norm(dim=1)) < tolerance
    assert relative(graded.pull(factors.flatten()), weights @ each) < tolerance
    single = engine.predict(params[0], x[0, :, 0])  # of single inputs
    model = Alone(model, LOSS)._model
    engine.load(model, params[0])
    assert relative(single, model.eval()(x[0, :, 0]).detach().double()) < tolerance


@pytest.mark.parametrize("stack", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_every_layer_of_the_fast_engine(case, stack):
    make, shape = CASES[case]
    torch.manual_seed(0)
    model = make().double()
    x, y = units(shape, 3)
    assert_like_plain(Fast(model, LOSS, stack=stack, copies=COPIES), model, x, y, 1e-9)


@pytest.mark.parametrize("kind", ["exact", "fast"])
@pytest.mark.parametrize(
    ("name", "shape"), [("cnn-small", (1, 8, 8)), ("logistic", (1, 8, 8)), ("fedavg-cnn", (3, 16, 16))]
)
def test_models_of_the_zoo_in_single_precision(name, shape, kind):
    model = models.build(name, shape, 4)
    x, y = units(shape, 4, dtype=torch.float32)
    assert_like_plain(gradients.build(model, "cross-entropy", kind, copies=COPIES), model, x, y, 1e-5)


@pytest.mark.parametrize("stack", [False, True])
def test_tokens_of_all_inputs_count_together(stack):
    torch.manual_seed(0)
    model = Tokens().double()
    x = torch.randint(0, 7, (2, 3, COPIES, 4), generator=torch.Generator().manual_seed(1))
    assert_like_plain(
        Fast(model, LOSS, stack=stack, copies=COPIES), model, x, torch.tensor([[0, 1, 2], [2, 1, 0]]), 1e-9
    )


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("name", ["cnn-small", "logistic", "tramer-cifar"])
def test_one_record_at_a_time(name, apart):
    shape = (3, 8, 8)
    model = models.build(name, shape, 4)
    x, y = (one.flatten(0, 1) for one in units(shape, 4, dtype=torch.float32))
    engine = Alone(model, LOSS, apart=apart, copies=COPIES)
    engine.check(shape, 4)
    weights = engine.flatten(model)
    graded = engine.under(weights)(x, y)
    losses, each = plain_means(model, weights.double(), x, y)
    together = graded.gradients.clone()
    assert relative(torch.tensor(graded.losses), losses) < 1e-5
    assert relative(together, each) < 1e-5
    assert engine.under(weights, gradients=False)(x, y).losses == graded.losses
    for place in range(len(y)):  # bit for bit as if it had been alone
        alone = engine.under(weights)(x[place : place + 1], y[place : place + 1])
        assert alone.losses[0] == graded.losses[place]
        assert torch.equal(alone.gradients[0], together[place])


@pytest.mark.parametrize("kind", ["exact", "fast"])
def test_a_record_with_one_broken_input_contributes_nothing(kind):
    model = models.build("cnn-small", (1, 8, 8), 4)
    engine = gradients.build(model, "cross-entropy", kind, copies=COPIES)
    x, y = units((1, 8, 8), 4, rows=1, dtype=torch.float32)
    params = engine.flatten(model)[None]
    x[0, 1, 2, 0, 0, 0] = torch.nan
    graded = engine(params, x, y)
    assert graded.norms[0, 1] == torch.inf
    kept = graded.pull(torch.ones(1, 3))
    wanted = engine(params, x[:, ::2], y[:, ::2]).pull(torch.ones(1, 2))
    torch.testing.assert_close(kept, wanted)
