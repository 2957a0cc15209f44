"""A person of several records in every engine: the mean of their gradients, whatever the number, padding or not."""

import pytest
import torch
from gradient_reference import plain_gradients, relative, rows_of_parameters
from test_gradients_layers import CASES

from sordino import models
from sordino.client import gradients
from sordino.client.gradients import Alone, fused
from sordino.client.gradients.fast import Fast
from sordino.client.gradients.losses import loss_by_name
from sordino.client.rows import Records, seen_alone

LOSS = loss_by_name("cross-entropy")
COUNTS = ((4, 1, 2), (3, 0, 4))
"""How many records every unit of two rows has: a full one, single ones, one that has none."""


def ragged(shape, classes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 3, 4, *shape, generator=generator, dtype=dtype)
    y = torch.randint(0, classes, (2, 3, 4), generator=generator)
    mask = torch.arange(4) < torch.tensor(COUNTS)[..., None]
    for row, unit in ((0, 1), (0, 2), (1, 0)):  # padding holds the unit's own first record
        x[row, unit][~mask[row, unit]] = x[row, unit, 0].clone()
    return x, y, mask


def plain(model, flat, x, y, mask):
    """Losses and gradients of units, a loop over their records each; zero for one without any."""
    found = [plain_gradients(model, flat, a[m], b[m]) if m.any() else None for a, b, m in zip(x, y, mask)]
    nothing = torch.zeros(len(flat), dtype=torch.float64)
    losses = torch.stack([torch.zeros(()).double() if one is None else one[0].mean() for one in found])
    return losses, torch.stack([nothing if one is None else one[1].mean(0) for one in found])


def assert_like_plain(engine, model, x, y, mask, tolerance):
    params = rows_of_parameters(engine, model, 2)
    factors = torch.rand(2, 3, generator=torch.Generator().manual_seed(6)).to(params.dtype) + 0.1
    graded = engine(params, x, y, mask)
    pulled = graded.pull(factors)
    for row in range(2):
        losses, each = plain(model, params[row].double(), x[row], y[row], mask[row])
        assert relative(graded.losses[row], losses) < tolerance
        assert relative(graded.norms[row], each.norm(dim=1)) < tolerance
        assert relative(pulled[row], factors[row].double() @ each) < tolerance
        assert bool((graded.limits[row] >= each.norm(dim=1) * (1 - 1e-12)).all())
    assert relative(engine.losses(params, x, y, mask), graded.losses.double()) < tolerance
    owner = torch.tensor([0, 0, 1, 2, 2, 2])
    flat_x, flat_y, flat_mask = (one.flatten(0, 1) for one in (x, y, mask))
    graded = engine.shared(params[0], flat_x, flat_y, owner, 3, flat_mask)
    losses, each = plain(model, params[0].double(), flat_x, flat_y, flat_mask)
    weights = torch.zeros(3, 6, dtype=torch.float64)
    weights[owner, torch.arange(6)] = factors.flatten().double()
    assert relative(graded.losses, losses) < tolerance
    assert relative(graded.norms, each.norm(dim=1)) < tolerance
    assert relative(graded.pull(factors.flatten()), weights @ each) < tolerance


@pytest.mark.parametrize("stack", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_every_layer_of_the_fast_engine(case, stack):
    make, shape = CASES[case]
    torch.manual_seed(0)
    model = make().double()
    assert_like_plain(Fast(model, LOSS, stack=stack, copies=4), model, *ragged(shape, 3), 1e-9)


@pytest.mark.parametrize("kind", ["exact", "fast"])
@pytest.mark.parametrize(("name", "shape"), [("cnn-small", (1, 8, 8)), ("logistic", (1, 8, 8))])
def test_models_of_the_zoo_in_single_precision(name, shape, kind):
    model = models.build(name, shape, 4)
    engine = gradients.build(model, "cross-entropy", kind, copies=4)
    assert_like_plain(engine, model, *ragged(shape, 4, torch.float32), 1e-5)


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("name", ["cnn-small", "logistic", "tramer-cifar"])
def test_at_a_site_a_unit_is_a_function_of_its_own_records_bit_for_bit(name, apart):
    shape = (3, 8, 8)
    model = models.build(name, shape, 4)
    x, y, mask = (one.flatten(0, 1) for one in ragged(shape, 4, torch.float32))
    engine = Alone(model, LOSS, apart=apart, copies=4)
    engine.check(shape, 4)
    weights = engine.flatten(model)
    graded = engine.under(weights)(x, y, mask)
    losses, each = plain(model, weights.double(), x, y, mask)
    some = mask.any(1)
    together = graded.gradients.clone()
    assert relative(torch.tensor(graded.losses)[some], losses[some]) < 1e-5
    assert relative(together[some], each[some]) < 1e-5
    for place in torch.nonzero(some).flatten().tolist():
        alone = engine.under(weights)(x[place : place + 1], y[place : place + 1], mask[place : place + 1])
        assert alone.losses[0] == graded.losses[place]
        assert torch.equal(alone.gradients[0], together[place])
        count = int(mask[place].sum())  # nor does it know how far others were padded
        bare = engine.under(weights)(x[place : place + 1, :count], y[place : place + 1, :count], None)
        assert torch.equal(bare.gradients[0], together[place])


def test_records_are_read_by_unit_and_each_by_itself():
    x, y = torch.arange(12.0).view(6, 2), torch.arange(6)
    records = Records(x, y, torch.tensor([1, 1, 0, 1, 1, 1]).bool(), members=torch.tensor([[4, -1], [0, 2], [1, 3]]))
    assert len(records) == 3
    seen, labels, mask = records.at(torch.tensor([1, 0]))
    assert seen.shape == (2, 2, 2)
    assert labels.tolist() == [[0, 2], [4, 4]], "what fills up a unit is its own"
    assert mask.tolist() == [[True, False], [True, False]], "a null record and a missing one"
    assert records.at(torch.tensor([0]))[1].shape == (1, 1), "as wide as the largest unit of the batch"
    assert torch.equal(records.single.at(torch.tensor([5]))[0], x[5:])
    part = records.only(torch.tensor([2, 0]))
    assert part.y.tolist() == [1, 3, 4]
    assert part.whose.tolist() == [0, 0, 1]
    assert seen_alone(torch.nn.Identity(), records).members is records.members


def test_the_kernels_of_a_gpu_take_units_too(monkeypatch):
    """Interpreted on a CPU where there is no GPU."""
    pytest.importorskip("triton")
    monkeypatch.setattr(fused, "INTERPRETED", not torch.cuda.is_available())
    for name in ("logistic", "cnn-small"):
        model = models.build(name, (1, 8, 8), 4)
        assert_like_plain(Fast(model, LOSS, stack=True, copies=4), model, *ragged((1, 8, 8), 4, torch.float32), 1e-5)
