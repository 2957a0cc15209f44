"""Layers of large networks on a CPU: norms from positions, compiled loops, sums by native kernels, against loops."""

import pytest
import torch
from gradient_reference import assert_graded_like_plain, plain_gradients, relative
from torch import nn

from sordino import native
from sordino.client.gradients import groups, weights
from sordino.client.gradients.fast import Fast
from sordino.client.gradients.losses import loss_by_name
from sordino.client.gradients.patches import Geometry
from sordino.client.gradients.positions import squared_convolution

GEOMETRIES = {
    "plain": Geometry((3, 3), (1, 1), (1, 1), (1, 1)),
    "stride 2": Geometry((3, 3), (2, 2), (1, 1), (1, 1)),
    "one by one": Geometry((1, 1), (1, 1), (0, 0), (1, 1)),
    "one by one, stride 2": Geometry((1, 1), (2, 2), (0, 0), (1, 1)),
    "dilated": Geometry((3, 2), (1, 1), (2, 1), (2, 3)),
    "all at once": Geometry((2, 3), (3, 2), (1, 2), (2, 1)),
    "wide padding": Geometry((2, 2), (1, 2), (3, 3), (1, 1)),
    "one axis": Geometry((1, 3), (1, 2), (0, 1), (1, 1)),
    "one output": Geometry((6, 7), (1, 1), (0, 0), (1, 1)),
}
ORDERS = {"first": torch.contiguous_format, "last": torch.channels_last}
compiled = pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "without"])


@pytest.fixture
def loops(compiled):
    """Compiled loops, or none; skipped where they cannot be had."""
    if not compiled:
        with native.set_aside():
            yield
    elif not groups.serves(torch.zeros(1)):
        pytest.skip("compiled loops cannot be had here")
    else:
        yield


def images(geometry, copies, order, channels=35, outputs=9):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3 * copies, channels, 6, 7, generator=generator)
    dy = torch.randn(3 * copies, outputs, *geometry.output(6, 7), generator=generator)
    return (each.contiguous(memory_format=ORDERS[order]) for each in (x, dy))


def looped(x, dy, geometry, copies):
    """Every record's gradient in float64, number by number over positions and taps: ``[n, outputs, kh, kw, c]``."""
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = geometry
    found = torch.zeros(len(x) // copies, dy.shape[1], kh, kw, x.shape[1], dtype=torch.float64)
    for j in range(len(x)):
        for i in range(dy.shape[2]):
            for k in range(dy.shape[3]):
                for a in range(kh):
                    for b in range(kw):
                        row, column = i * sh + a * dh - ph, k * sw + b * dw - pw
                        if 0 <= row < x.shape[2] and 0 <= column < x.shape[3]:
                            seen, slope = x[j, :, row, column].double(), dy[j, :, i, k].double()
                            found[j // copies, :, a, b] += torch.outer(slope, seen)
    return found


@compiled
@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_squared_norms_from_positions_are_those_of_a_loop(loops, name, order, copies):
    geometry = GEOMETRIES[name]
    x, dy = images(geometry, copies, order)
    found = squared_convolution(x, dy, geometry, copies)
    wanted = looped(x, dy, geometry, copies).flatten(1).square().sum(1)
    torch.testing.assert_close(found.square, wanted, rtol=1e-8, atol=0)  # with what cancellation may hide on top
    assert bool((found.excess > 0).all())


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_compiled_gradients_of_weights_are_those_of_a_loop(name, order, copies):
    geometry = GEOMETRIES[name]
    x, dy = images(geometry, copies, order)
    if not weights.serves(x):
        pytest.skip("compiled loops cannot be had here")
    out = torch.full((3, 9, 35 * geometry.taps), torch.nan)
    squares = weights.gradients(x, dy, geometry, copies, out)
    assert relative(out, looped(x, dy, geometry, copies).flatten(2)) < 1e-6
    torch.testing.assert_close(squares, out.double().flatten(1).square().sum(1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("channels", [6, 66, 130])
def test_compiled_group_norms_are_those_of_autograd_record_by_record(channels, order, affine):
    if not groups.serves(torch.zeros(1)):
        pytest.skip("compiled loops cannot be had here")
    torch.manual_seed(2)
    x, dy = (torch.randn(3, channels, 9, 5).contiguous(memory_format=ORDERS[order]) for _ in range(2))
    x = x * 3 + 50  # a mean that squares would cancel against
    scale, shift = (torch.randn(channels), torch.randn(channels)) if affine else (None, None)
    normed = groups.forward(x, scale, shift, 2, 1e-5)
    back = groups.backward(dy, x, normed.mean, normed.inverse, scale, True)
    assert groups.backward(dy, x, normed.mean, normed.inverse, scale, False).input is None
    for j in range(3):
        one = x[j : j + 1].double().requires_grad_()
        own = (torch.ones(channels) if scale is None else scale).double().requires_grad_()
        level = (torch.zeros(channels) if shift is None else shift).double().requires_grad_()
        out = nn.functional.group_norm(one, 2, own, level, 1e-5)
        wanted = torch.autograd.grad(out, (one, own, level), dy[j : j + 1].double())
        assert relative(normed.out[j], out[0].detach()) < 1e-5
        for got, right in zip((back.input[j], back.scale[j], back.shift[j]), wanted):
            assert relative(got, right.view_as(got)) < 1e-5


class Residual(nn.Module):
    """Every way of a large network in small: few positions, strides, 1×1 kernels, groups, a branch."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1, bias=False)
        self.first = nn.GroupNorm(4, 32)
        self.large = nn.Conv2d(32, 24, 3, padding=1)
        self.grouped = nn.Conv2d(24, 32, 3, padding=1, groups=2)
        self.down = nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False)
        self.shortcut = nn.Conv2d(32, 64, 1, stride=2, bias=False)
        self.second = nn.GroupNorm(8, 64)
        self.inner = nn.Conv2d(64, 64, 3, padding=1)
        self.last = nn.Linear(64, 5)

    def forward(self, x):
        x = self.grouped(torch.tanh(self.large(torch.tanh(self.first(self.stem(x))))))
        x = torch.tanh(self.second(self.down(x)) + self.shortcut(x))
        return self.last((x + self.inner(x)).mean((2, 3)))


LOSS = loss_by_name("cross-entropy")


def drawn(rows, width):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, width, 3, 12, 12, generator=generator)
    return x, torch.randint(0, 5, (rows, width), generator=generator)


@compiled
def test_a_residual_network_gives_the_norms_and_sums_of_a_loop_over_records(loops, compiled):
    torch.manual_seed(4)
    model = Residual()
    engine = Fast(model, LOSS)
    assert_graded_like_plain(engine, model, *drawn(2, 3), tolerance=2e-5)
    plans = {plan.layer: plan for plan in engine.describe()}
    assert {name for name, plan in plans.items() if plan.method == "ghost"} >= {"down", "inner"}
    assert plans["large"].reason.startswith("compiled" if compiled else "stride 1")
    assert plans["grouped"].reason.startswith("patches")


@compiled
def test_blocks_of_a_batch_are_the_batch(loops, monkeypatch):
    torch.manual_seed(4)
    model = Residual()
    x, y = drawn(1, 9)
    found = []
    for block in (1, 4):
        monkeypatch.setattr("sordino.client.gradients.fast.SMALLEST_BLOCK", block)
        monkeypatch.setattr("sordino.client.gradients.fast.BLOCK_BYTES", 1)
        engine = Fast(model, LOSS)
        for _ in range(2):  # the first pass finds out how large blocks should be
            graded = engine(engine.flatten(model)[None], x, y)
        found.append((graded.norms, graded.limits, graded.pull(torch.rand(1, 9, generator=torch.manual_seed(5)))))
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@compiled
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 3e38])
def test_a_broken_record_adds_exactly_nothing(loops, poison):
    torch.manual_seed(4)
    model = Residual()
    engine = Fast(model, LOSS)
    x, y = drawn(1, 4)
    x[0, 2] = poison
    graded = engine(engine.flatten(model)[None], x, y)
    assert bool(torch.isinf(graded.norms[0, 2]))
    assert bool(graded.norms[0, [0, 1, 3]].isfinite().all())
    factors = torch.tensor([[0.5, 1.0, torch.nan, 0.1]])
    pulled = graded.pull(factors)
    _, gradients = plain_gradients(model, engine.flatten(model), x[0], y[0])
    kept = torch.tensor([0, 1, 3])
    assert relative(pulled[0], factors[0, kept].double() @ gradients[kept]) < 1e-5


@compiled
def test_units_of_a_residual_network_are_the_mean_of_their_inputs(loops):
    torch.manual_seed(4)
    model = Residual()
    x, y = drawn(3, 2)  # three units of two inputs
    engine = Fast(model, LOSS, copies=2)
    graded = engine(engine.flatten(model)[None], x[None], y[None])
    _, each = plain_gradients(model, engine.flatten(model), x.flatten(0, 1), y.flatten())
    means = each.view(3, 2, -1).mean(1)
    assert relative(graded.norms[0], means.norm(dim=1)) < 1e-5
    assert bool((graded.limits[0] >= graded.norms[0]).all())
    factors = torch.tensor([[1.0, -0.5, 2.0]])
    assert relative(graded.pull(factors)[0], factors[0].double() @ means) < 1e-5


def test_sums_are_made_in_full_float32_whatever_is_allowed_elsewhere(monkeypatch):
    torch.manual_seed(4)
    model = Residual()
    engine = Fast(model, LOSS)
    graded = engine(engine.flatten(model)[None], *drawn(1, 4))
    settings, seen = torch.backends.mkldnn.conv, []
    native_gradient = torch.ops.aten.convolution_backward

    def watched(*given):
        seen.append(settings.fp32_precision)
        return native_gradient(*given)

    monkeypatch.setattr(torch.ops.aten, "convolution_backward", watched)
    before = settings.fp32_precision
    try:
        settings.fp32_precision = "bf16"
        graded.pull(torch.ones(1, 4))
        assert set(seen) == {"ieee"}
        assert settings.fp32_precision == "bf16"
    finally:
        settings.fp32_precision = before
