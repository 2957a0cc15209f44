"""The gradient engine as the client's round sees it."""

import copy

import pytest
import torch
from gradient_reference import assert_graded_like_plain, plain_gradients, relative, rows_of_parameters
from torch import nn

from sordino import models
from sordino.client import gradients
from sordino.client.gradients import Alone, convolution
from sordino.client.gradients.losses import loss_by_name
from sordino.errors import BadInput, SordinoError

ZOO = [
    ("linear", (7,), None),
    ("logistic", (1, 8, 8), 10),
    ("mlp", (7,), 4),
    ("random-features", (7,), 2),
    ("cnn-small", (1, 8, 8), 10),
    ("robust-hdp-cnn", (1, 28, 28), 10),
    ("tramer-mnist", (1, 28, 28), 10),
    ("tramer-cifar", (3, 32, 32), 10),
    ("fedavg-cnn", (1, 28, 28), 10),
]


def batch(shape, classes, rows=2, width=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(rows, width, *shape, generator=generator, dtype=dtype)
    if classes is None:
        return x, torch.randn(rows, width, generator=generator, dtype=dtype)
    return x, torch.randint(0, classes, (rows, width), generator=generator)


def loss_for(classes):
    return "half-squared-error" if classes is None else "cross-entropy"


@pytest.fixture
def small():
    model = models.build("cnn-small", (1, 8, 8), 10)
    return model, gradients.build(model, "cross-entropy", "fast")


@pytest.mark.parametrize("kind", ["exact", "fast"])
@pytest.mark.parametrize(("name", "shape", "classes"), ZOO)
def test_every_small_model_of_the_zoo_is_graded_like_a_loop_over_records(name, shape, classes, kind):
    model = models.build(name, shape, classes)
    engine = gradients.build(model, loss_for(classes), kind)
    x, y = batch(shape, classes)
    assert_graded_like_plain(engine, model, x, y, loss_for(classes))


# In float32 MobileNetV2's activations on the edge of ReLU6 change sides by rounding, for autograd as for the engine.
@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        ("resnet18-gn", torch.float32, 1e-5),
        ("resnet18-gn", torch.float64, 1e-9),
        ("mobilenetv2-gn", torch.float64, 1e-9),
    ],
)
def test_deep_models_of_the_zoo_are_graded_like_a_loop_over_records(name, dtype, tolerance):
    model = models.build(name, (3, 32, 32), 10).to(dtype)
    engine = gradients.build(model, "cross-entropy", "fast", shape=(3, 32, 32))
    x, y = batch((3, 32, 32), 10, rows=1, width=3, dtype=dtype)
    params = engine.flatten(model).unsqueeze(0)
    graded = engine(params, x, y)
    losses, plain = plain_gradients(model, params[0], x[0], y[0])
    assert relative(graded.losses[0], losses) < tolerance
    assert relative(graded.norms[0], plain.norm(dim=1)) < tolerance
    factors = torch.tensor([[0.3, 1.0, 0.0]], dtype=dtype)
    assert relative(graded.pull(factors)[0], factors[0].double() @ plain) < tolerance


def test_factors_of_one_give_the_gradient_of_the_summed_loss(small):
    model, engine = small
    x, y = batch((1, 8, 8), 10, rows=1, width=20)
    pulled = engine(engine.flatten(model).unsqueeze(0), x, y).pull(torch.ones(1, 20))[0]
    total = nn.functional.cross_entropy(model(x[0]), y[0], reduction="sum")
    wanted = torch.cat([grad.reshape(-1) for grad in torch.autograd.grad(total, list(model.parameters()))])
    assert relative(pulled, wanted.double()) < 1e-5


@pytest.mark.parametrize("name", ["cnn-small", "tramer-mnist"])
def test_norms_are_those_of_opacus_per_sample_gradients(name):
    opacus = pytest.importorskip("opacus")
    model = models.build(name, (1, 28, 28), 10)
    engine = gradients.build(model, "cross-entropy", "fast")
    x, y = batch((1, 28, 28), 10, rows=1, width=6)
    wrapped = opacus.GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    nn.functional.cross_entropy(wrapped(x[0]), y[0], reduction="sum").backward()
    theirs = torch.cat([parameter.grad_sample.flatten(1) for parameter in wrapped.parameters()], 1)
    graded = engine(engine.flatten(model).unsqueeze(0), x, y)
    assert relative(graded.norms[0], theirs.norm(dim=1).double()) < 1e-5
    factors = torch.rand(1, 6)
    assert relative(graded.pull(factors)[0], (factors[0] @ theirs).double()) < 1e-5


@pytest.mark.parametrize("kind", ["fast", "exact"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_a_record_that_is_not_finite_contributes_nothing_and_harms_nobody(kind, poison):
    model = models.build("cnn-small", (1, 8, 8), 10)
    engine = gradients.build(model, "cross-entropy", kind)
    x, y = batch((1, 8, 8), 10, rows=2, width=4)
    params = rows_of_parameters(engine, model, 2)
    clean = engine(params, x, y)
    factors = torch.full((2, 4), 0.7)
    without = factors.clone()
    without[1, 2] = 0.0
    norms, wanted = clean.norms.clone(), clean.pull(without).clone()
    x[1, 2] = poison
    dirty = engine(params, x, y)
    assert dirty.norms[1, 2] == torch.inf
    torch.testing.assert_close(dirty.pull(factors), wanted, rtol=1e-5, atol=1e-7)
    norms[1, 2] = torch.inf
    torch.testing.assert_close(dirty.norms, norms, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["fast", "exact"])
def test_with_weights_that_are_not_finite_every_record_contributes_nothing(kind):
    model = models.build("mlp", (5,), 3)
    engine = gradients.build(model, "cross-entropy", kind, shape=(5,))
    x, y = batch((5,), 3, rows=1, width=4)
    params = torch.full((1, engine.dimension), float("nan"))
    graded = engine(params, x, y)
    assert bool((graded.norms == torch.inf).all())
    assert not graded.pull(torch.ones(1, 4)).any()


@pytest.mark.parametrize("kind", ["fast", "exact"])
def test_padding_contributes_nothing_whatever_it_holds(kind):
    model = models.build("cnn-small", (1, 8, 8), 10)
    engine = gradients.build(model, "cross-entropy", kind)
    x, y = batch((1, 8, 8), 10, rows=2, width=5)
    params = rows_of_parameters(engine, model, 2)
    mask = torch.tensor([[True, True, True, False, False], [False] * 5])
    x[~mask] = float("nan")
    graded = engine(params, x, y, mask)
    assert not graded.losses[~mask].any()
    assert not graded.norms[~mask].any()
    pulled = graded.pull(torch.full((2, 5), float("inf")).where(~mask, torch.ones(2, 5)))
    assert not pulled[1].any()
    _, plain = plain_gradients(model, params[0], x[0, :3], y[0, :3])
    assert relative(pulled[0], plain.sum(0)) < 1e-5


@pytest.mark.parametrize("kind", ["fast", "exact"])
def test_an_empty_batch_has_a_sum_of_zero(kind):
    model = models.build("cnn-small", (1, 8, 8), 10)
    engine = gradients.build(model, "cross-entropy", kind)
    flat = engine.flatten(model)
    rows = engine(flat.expand(3, -1), torch.zeros(3, 0, 1, 8, 8), torch.zeros(3, 0, dtype=torch.long))
    assert rows.norms.shape == (3, 0)
    assert torch.equal(rows.pull(torch.zeros(3, 0)), torch.zeros(3, engine.dimension))
    nobody = torch.zeros(0, dtype=torch.long)
    ragged = engine.shared(flat, torch.zeros(0, 1, 8, 8), nobody, nobody, 2)
    assert torch.equal(ragged.pull(torch.zeros(0)), torch.zeros(2, engine.dimension))


def test_the_sum_goes_into_the_buffer_given(small):
    model, engine = small
    x, y = batch((1, 8, 8), 10, rows=2, width=3)
    graded = engine(rows_of_parameters(engine, model, 2), x, y)
    out = torch.full((2, engine.dimension), float("nan"))
    assert graded.pull(torch.ones(2, 3), out=out) is out
    assert torch.equal(out, graded.pull(torch.ones(2, 3)))


def test_a_graded_batch_cannot_be_pulled_after_the_next_call(small):
    model, engine = small
    x, y = batch((1, 8, 8), 10, rows=1, width=3)
    params = engine.flatten(model).unsqueeze(0)
    first = engine(params, x, y)
    engine(params, x, y)
    with pytest.raises(SordinoError, match="stale"):
        first.pull(torch.ones(1, 3))
    second = engine(params, x, y)
    engine.losses(params, x, y)
    with pytest.raises(SordinoError, match="stale"):
        second.pull(torch.ones(1, 3))


@pytest.mark.parametrize("kind", ["fast", "exact"])
def test_layout_flatten_and_load_agree_with_the_model(kind):
    model = models.build("cnn-small", (1, 8, 8), 10)
    engine = gradients.build(model, "cross-entropy", kind)
    named = dict(model.named_parameters())
    flat = engine.flatten(model)
    assert engine.dimension == flat.numel() == sum(parameter.numel() for parameter in named.values())
    for name, shape, offset in engine.layout:
        assert torch.equal(flat[offset : offset + named[name].numel()].view(shape), named[name])
    engine.load(model, flat + 1)
    assert torch.equal(engine.flatten(model), flat + 1)
    with pytest.raises(BadInput, match="parameters"):
        engine.load(model, flat[1:])


@pytest.mark.parametrize("kind", ["fast", "exact"])
def test_losses_and_predictions_need_no_gradient(kind):
    model = nn.Sequential(models.build("cnn-small", (1, 8, 8), 6), nn.Dropout(0.5))
    engine = gradients.build(model, "cross-entropy", kind, shape=(1, 8, 8))
    x, y = batch((1, 8, 8), 6, rows=2, width=40)
    flat = engine.flatten(model)
    model.eval()
    torch.testing.assert_close(engine.predict(flat, x[0]), model(x[0]))
    plain = models.build("cnn-small", (1, 8, 8), 6)
    engine = gradients.build(plain, "cross-entropy", kind)
    params = rows_of_parameters(engine, plain, 2)
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[1, 30:] = False
    torch.testing.assert_close(engine.losses(params, x, y, mask), engine(params, x, y, mask).losses)


def test_the_engine_leaves_the_model_alone(small):
    model, engine = small
    before = copy.deepcopy(model.state_dict())
    x, y = batch((1, 8, 8), 10)
    engine(rows_of_parameters(engine, model, 2), x, y).pull(torch.ones(2, 3))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model(x[0]).isfinite().all()


def test_exact_gradients_too_many_to_keep_are_computed_again():
    from sordino.client.gradients.exact import Exact
    from sordino.client.gradients.losses import loss_by_name

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    x, y = batch((6,), 3, rows=2, width=9)
    kept, again = (
        Exact(model, loss_by_name("cross-entropy"), ""),
        Exact(model, loss_by_name("cross-entropy"), "", kept_bytes=2 * 83 * 4),
    )
    params = rows_of_parameters(kept, model, 2)
    kept.module.eval()
    again.module.eval()
    first, second = kept(params, x, y), again(params, x, y)
    torch.testing.assert_close(first.norms, second.norms)
    torch.testing.assert_close(first.pull(torch.ones(2, 9)), second.pull(torch.ones(2, 9)))
    again.module.train()
    one = again(params[:1], x[:1, :1], y[:1, :1])
    assert torch.allclose(one.pull(torch.ones(1, 1)).norm(), one.norms[0, 0])


def test_dropout_drops_the_same_for_the_norm_and_for_the_sum():
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Dropout(0.5), nn.Linear(30, 3))
    for kind in ("fast", "exact"):
        engine = gradients.build(model, "cross-entropy", kind)
        x, y = batch((20,), 3, rows=1, width=1)
        params = engine.flatten(model).unsqueeze(0)
        norms = set()
        for _ in range(5):
            graded = engine(params, x, y)
            torch.testing.assert_close(graded.pull(torch.ones(1, 1)).norm(), graded.norms[0, 0])
            norms.add(round(float(graded.norms), 6))
        assert len(norms) > 1


def test_norms_of_large_layers_do_not_lose_digits():
    model = nn.Sequential(nn.Conv2d(64, 128, 5, padding=2), nn.Flatten(), nn.Linear(128 * 400, 2))
    engine = gradients.build(model, "cross-entropy", "fast", shape=(64, 20, 20))
    assert engine.describe()[0].method == "per-record"
    x, y = batch((64, 20, 20), 2, rows=1, width=1)
    params = engine.flatten(model).unsqueeze(0)
    _, plain = plain_gradients(model, params[0], x[0], y[0])
    assert relative(engine(params, x, y).norms[0], plain.norm(dim=1)) < 1e-6


def test_memory_per_record_is_known_after_the_first_batch_and_small_beside_a_gradient_of_a_linear_layer():
    model = nn.Sequential(nn.Linear(1000, 500), nn.ReLU(), nn.Linear(500, 10))
    engine = gradients.build(model, "cross-entropy", "fast")
    assert engine.bytes_per_record == 4 * engine.dimension, "the most it can be, but for activations"
    x, y = batch((1000,), 10, rows=1, width=4)
    engine(engine.flatten(model).unsqueeze(0), x, y)
    assert 4 * (1000 + 2 * 500 + 10) <= engine.bytes_per_record <= 4 * engine.dimension / 20
    assert gradients.build(model, "cross-entropy", "exact").bytes_per_record == 4 * engine.dimension


def test_records_behind_a_batch_that_make_its_size_a_usual_one_change_nothing(monkeypatch):
    """On a GPU native convolutions get zeros behind the records, so that their library sees few sizes."""
    model = models.build("cnn-small", (1, 8, 8), 10)
    x, y = batch((1, 8, 8), 10, rows=1, width=5)
    engine = gradients.build(model, "cross-entropy", "fast")
    params = engine.flatten(model).unsqueeze(0)
    plain = engine(params, x, y)
    total = plain.pull(torch.ones(1, 5))
    monkeypatch.setattr(convolution, "of_few_sizes", lambda x: nn.functional.pad(x, (0,) * 7 + (3,)))
    padded = engine(params, x, y)
    assert torch.allclose(padded.losses, plain.losses, atol=1e-6)
    assert torch.allclose(padded.norms, plain.norms, rtol=1e-5)
    assert torch.allclose(padded.pull(torch.ones(1, 5)), total, atol=1e-6)


def test_few_sizes_are_few_and_never_much_larger():
    sizes = {convolution.usual_size(n) for n in range(1, 20_000)}
    assert len(sizes) < 80
    assert all(n <= convolution.usual_size(n) <= max(n + 31, 1.125 * n) for n in range(1, 20_000))


@pytest.mark.parametrize("kind", ["exact", "fast"])
@pytest.mark.parametrize("name", ["cnn-small", "tramer-mnist"])
def test_units_norms_and_standardised_filters_are_graded_like_a_loop_over_records(name, kind):
    shape = (1, 20, 20)
    model = models.build(name, shape, 10, unit="tanh", norm="group", standardise_weights=True)
    engine = gradients.build(model, "cross-entropy", kind)
    assert_graded_like_plain(engine, model, *batch(shape, 10))
    assert ("exact" in {line.method for line in engine.describe()}) == (kind == "exact")
    wide, x, y = copy.deepcopy(model).double(), *batch(shape, 10, dtype=torch.float64)
    assert_graded_like_plain(gradients.build(wide, "cross-entropy", kind), wide, x, y, tolerance=1e-10)
    x, y = batch(shape, 10, rows=1)
    weights = engine.flatten(model)
    alone = Alone(model, loss_by_name("cross-entropy")).under(weights)(x[0], y[0])
    assert relative(alone.gradients, plain_gradients(model, weights, x[0], y[0])[1]) < 1e-5
