"""Convolutions joined with their pools by compiled loops, beside the same models without them."""

import contextlib
import ctypes

import pytest
import torch
from gradient_reference import assert_graded_like_plain, plain_gradients, relative
from torch import nn

from sordino import models, native
from sordino.client import gradients
from sordino.client.gradients import pooled
from sordino.client.gradients.patches import Geometry
from sordino.native import build

pytestmark = pytest.mark.skipif(pooled.loops() is None, reason="no compiler here")

WAYS = {"compiled": contextlib.nullcontext, "aside": native.set_aside}
CASES = [  # channels, outputs, kernel, stride, padding, pool, image, copies
    (1, 16, (5, 5), (1, 1), (2, 2), 2, (28, 28), 1),
    (16, 32, (5, 5), (1, 1), (2, 2), 2, (14, 14), 1),
    (32, 64, (5, 5), (1, 1), (2, 2), 2, (14, 14), 1),
    (1, 32, (3, 3), (1, 1), (1, 1), 2, (13, 11), 3),
    (1, 16, (7, 7), (1, 1), (0, 3), 2, (15, 9), 1),
    (1, 17, (5, 5), (1, 1), (0, 0), 2, (12, 12), 1),
    (3, 5, (3, 3), (2, 2), (2, 1), 3, (19, 16), 2),
    (2, 49, (2, 6), (1, 3), (0, 1), 1, (5, 17), 1),
    (40, 3, (6, 1), (1, 1), (1, 0), 2, (9, 7), 1),
    (7, 130, (9, 9), (1, 1), (4, 4), 4, (9, 31), 2),
]


def sizes_of(channels, outputs, kernel, stride, padding, pool, image, copies, units=3):
    high, wide = Geometry(kernel, stride, padding, (1, 1)).output(*image)
    n = units * copies
    return pooled.Sizes(
        n, copies, channels, *image, outputs, kernel, stride, padding, pool, (high // pool, wide // pool)
    )


def drawn(sizes, seed=1):
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (sizes.inputs, sizes.channels, sizes.height, sizes.width),
        (sizes.outputs, sizes.channels, *sizes.kernel),
        (sizes.outputs,),
        (sizes.inputs, sizes.outputs, *sizes.pooled),
    )
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("case", CASES)
def test_the_loops_agree_with_plain_float64(case):
    sizes = sizes_of(*case)
    for name, gap in pooled.gaps(pooled.loops(), sizes, *drawn(sizes)).items():
        assert gap < 3e-6, name


@pytest.mark.parametrize("flags", ["-mno-avx512f", "-mno-avx"])
def test_narrower_vectors_agree_too(flags):
    if build.platform.machine() != "x86_64":
        pytest.skip("other processors have one width of vectors")
    library = ctypes.CDLL(str(build.built(build.SOURCES / "pooled.cpp", ("-O1", flags))))
    pooled.declare(library)
    for case in CASES:
        sizes = sizes_of(*case)
        assert max(pooled.gaps(library, sizes, *drawn(sizes)).values()) < 3e-6, case


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_check_passes_wherever_the_loops_are_first_asked_for(context):
    with context():
        assert pooled.wrong(pooled.loops()) is None


def test_the_check_finds_a_loop_that_is_wrong(tmp_path):
    for right, broken in (("value > best", "value >= best + 1"), ("count += value != 0", "count += value > 0")):
        for source in build.SOURCES.iterdir():
            if source.suffix in {".cpp", ".h"}:
                (tmp_path / source.name).write_text(source.read_text().replace(right, broken))
        library = ctypes.CDLL(str(build.built(tmp_path / "pooled.cpp", ("-O1",))))
        assert "is off by" in pooled.wrong(library)


def conv(*channels, kernel=3, **options):
    return nn.Conv2d(*channels, kernel, **options), nn.ReLU()


def frozen(model, *names):
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


MODELS = {
    "robust-hdp-cnn": (lambda: models.build("robust-hdp-cnn", (1, 28, 28), 10), (1, 28, 28), 2),
    "three colours, odd sizes": (
        lambda: nn.Sequential(
            *conv(3, 17, padding=1), nn.MaxPool2d(2), *conv(17, 5), nn.MaxPool2d(3), nn.Flatten(), nn.Linear(20, 4)
        ),
        (3, 19, 17),
        2,
    ),
    "strides, no bias": (
        lambda: nn.Sequential(
            *conv(2, 6, stride=2, bias=False), nn.MaxPool2d(2), *conv(6, 3, kernel=2), nn.Flatten(), nn.Linear(12, 4)
        ),
        (2, 14, 14),
        1,
    ),
    "a fixed bias": (
        lambda: frozen(nn.Sequential(*conv(1, 16), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(144, 4)), "0.bias"),
        (1, 8, 8),
        1,
    ),
    "fixed weights": (
        lambda: frozen(nn.Sequential(*conv(1, 16), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(144, 4)), "0.weight"),
        (1, 8, 8),
        0,
    ),
    "holes and groups": (
        lambda: nn.Sequential(
            *conv(2, 4, dilation=2),
            nn.MaxPool2d(2),
            *conv(4, 4, groups=2),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(4, 4),
        ),
        (2, 12, 12),
        0,
    ),
}


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("name", list(MODELS))
def test_a_model_is_graded_like_a_loop_over_records_with_loops_and_without(name, way):
    make, shape, joined = MODELS[name]
    torch.manual_seed(3)
    model = make()
    x = torch.randn(2, 3, *shape)
    y = torch.randint(0, 4, (2, 3))
    with WAYS[way]():
        engine = gradients.build(model, "cross-entropy", "fast", shape=shape)
        assert_graded_like_plain(engine, model, x, y)
        found = [plan.reason.startswith("compiled") for plan in engine.describe()]
    assert sum(found) == (joined if way == "compiled" else 0)


@pytest.mark.parametrize("way", list(WAYS))
def test_units_of_several_inputs(way):
    model = models.build("robust-hdp-cnn", (1, 28, 28), 10)
    x, y = torch.randn(1, 3, 4, 1, 28, 28), torch.randint(0, 10, (1, 3))
    with WAYS[way]():
        engine = gradients.build(model, "cross-entropy", "fast", copies=4)
        flat = engine.flatten(model)
        graded = engine(flat[None], x, y)
        pulled = graded.pull(torch.tensor([[0.5, 1.0, 2.0]]))[0]
    _, each = plain_gradients(model, flat, x[0].flatten(0, 1), y[0].repeat_interleave(4))
    units = each.unflatten(0, (3, 4)).mean(1)
    assert relative(graded.norms[0], units.norm(dim=1)) < 1e-5
    assert relative(pulled, torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64) @ units) < 1e-5


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_a_record_that_is_not_finite_adds_exactly_nothing(way, value):
    model = models.build("robust-hdp-cnn", (1, 28, 28), 10)
    x, y = torch.randn(1, 6, 1, 28, 28), torch.randint(0, 10, (1, 6))
    with WAYS[way]():
        engine = gradients.build(model, "cross-entropy", "fast")
        flat = engine.flatten(model)[None]
        others = torch.tensor([True, True, False, True, True, True])
        wanted = engine(flat, x[:, others], y[:, others]).pull(torch.ones(1, 5)).clone()
        x[0, 2, 0, 13, 13] = value
        graded = engine(flat, x, y)
        assert bool(graded.norms[0, 2] == torch.inf)
        assert bool(graded.limits[0, 2] == torch.inf)
        assert relative(graded.pull(torch.ones(1, 6))[0], wanted[0].double()) < 1e-6


def test_an_activation_that_the_rectifier_hides_is_still_seen():
    """−∞ is rectified to 0 and the loss is finite; products of the gradient's zeros with ∞ would not have been."""
    model = nn.Sequential(*conv(1, 16), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(144, 4))
    with torch.no_grad():
        model[0].weight.fill_(-1.0)
    x, y = torch.randn(1, 2, 1, 8, 8), torch.zeros(1, 2, dtype=torch.long)
    x[0, 1] = torch.inf
    for way in WAYS.values():
        with way():
            engine = gradients.build(model, "cross-entropy", "fast")
            graded = engine(engine.flatten(model)[None], x, y)
            assert bool(graded.losses.isfinite().all())
            assert graded.norms.isfinite().tolist() == [[True, False]]


def test_records_have_the_same_bits_in_any_company_and_on_any_number_of_threads():
    sizes = sizes_of(*CASES[1], units=5)
    x, weight, bias, dy = drawn(sizes)
    before = torch.get_num_threads()

    def run(order, threads):
        torch.set_num_threads(threads)
        own = sizes._replace(inputs=len(order))
        last, slopes = (one[order].permute(0, 2, 3, 1).contiguous() for one in (x, dy))
        out, taken, dx = torch.empty_like(slopes), torch.empty_like(slopes, dtype=torch.uint8), torch.empty_like(last)
        grads, shifts = x.new_empty(len(order), 32, 400), x.new_empty(len(order), 32)
        scratch, library = pooled.Workspace(), pooled.loops()
        pooled.run_forward(library, own, last, weight, bias, out, taken, scratch)
        squares = pooled.run_backward(library, own, last, slopes, taken, weight, grads, shifts, dx, scratch)
        return [one[order.index(3)].clone() for one in (out, taken, dx, grads, shifts, squares)]

    try:
        wanted = run([3], 1)
        for order, threads in (([3, 0], 1), ([0, 1, 2, 3, 4], 2), ([4, 3, 3, 1], 3)):
            for got, one in zip(run(order, threads), wanted):
                assert torch.equal(got, one)
    finally:
        torch.set_num_threads(before)


def test_other_numbers_go_another_way():
    model = models.build("cnn-small", (1, 8, 8), 10).double()
    engine = gradients.build(model, "cross-entropy", "fast", shape=(1, 8, 8))
    assert not any(plan.reason.startswith("compiled") for plan in engine.describe())
