"""The GPU's kernels, run by Triton's interpreter on a CPU: they give what the engine without them gives."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import nn

from sordino.client.gradients import build, fused
from sordino.client.gradients.fast import Fast
from sordino.client.gradients.lengths import ROUNDING, VANISHES, Length
from sordino.client.gradients.losses import loss_by_name
from sordino.client.gradients.tape import Segments
from sordino.client.gradients.types import Graded
from sordino.models.standardised import StandardisedConv2d
from sordino.privacy.generators import Keyed, Turn

pytest.importorskip("triton", reason="pip install triton runs the GPU's kernels on a CPU")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the kernels run on the GPU here")

LOSS = loss_by_name("cross-entropy")
ROWS, WIDTH, CLASSES = 3, 4, 3


def pooled_pairs() -> nn.Module:
    """Convolution, rectifier and pool twice: one kernel each; 13 is not a multiple of the pool."""
    return nn.Sequential(
        nn.Conv2d(1, 5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(5, 18, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18 * 9, CLASSES),
    )  # fmt: skip


def odd_shapes() -> nn.Module:
    """Stride, dilation, an overlapping pool with padding, more channels than a block, no bias."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1, stride=2), nn.ReLU(), nn.MaxPool2d(3, stride=1, padding=1),
        nn.Conv2d(6, 18, 3, padding=1, bias=False), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(18, 20, 2, dilation=2), nn.Flatten(), nn.Linear(20, CLASSES),
    )  # fmt: skip


def framed_shapes() -> nn.Module:
    """On the way back: a stride that leaves a rest, holes, a pool of 4, padding beyond what the kernel reaches."""
    return nn.Sequential(
        nn.Conv2d(1, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 17, 4, stride=2, padding=1), nn.Tanh(),
        nn.Conv2d(17, 4, 2, dilation=2, padding=1), nn.ReLU(), nn.MaxPool2d(4),
        nn.Conv2d(4, 3, 1, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 3, stride=(2, 1)),
        nn.Flatten(), nn.Linear(2, CLASSES),
    )  # fmt: skip


def many_seen() -> nn.Module:
    """A pool after the first layer, whose kernels have too many numbers for one product a window."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 11, padding=5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 36, CLASSES)
    )


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(fused, "INTERPRETED", True)


def standardised() -> nn.Module:
    """Standardised filters, forward by the kernel."""
    return nn.Sequential(
        StandardisedConv2d(1, 5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        StandardisedConv2d(5, 4, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, CLASSES),
    )  # fmt: skip


def graded(model, stacked, params, x, y, mask, factors, monkeypatch):
    monkeypatch.setattr(fused, "INTERPRETED", stacked)
    engine = Fast(model, LOSS, stack=True, copies=x.shape[2] if x.dim() == 6 else 1)
    found = engine(params, x, y, mask)
    losses, norms = found.losses.clone(), found.norms.clone()
    return losses, norms, found.pull(factors), {plan.reason for plan in engine.describe()}


@pytest.mark.parametrize(
    ("network", "copies"),
    [(pooled_pairs, 1), (odd_shapes, 1), (framed_shapes, 1), (many_seen, 1), (pooled_pairs, 2), (standardised, 2)],
)
def test_kernels_give_the_losses_norms_and_sums_of_the_engine_without_them(network, copies, monkeypatch):
    torch.manual_seed(0)
    model = network()
    dimension = sum(p.numel() for p in model.parameters())
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    params = flat + 0.05 * torch.randn(ROWS, dimension)
    x, y = torch.randn(ROWS, WIDTH, 1, 13, 13), torch.randint(0, CLASSES, (ROWS, WIDTH))
    mask = torch.ones(ROWS, WIDTH, dtype=torch.bool)
    mask[0, 2:] = False  # padding at the end, which no kernel computes
    mask[2, 1] = False  # a null record in the middle
    if copies > 1:
        x = torch.randn(ROWS, WIDTH, copies, 1, 13, 13)
    x[1, 1, ..., 0, 3, 3] = float("nan")
    given = (params, x, y, mask, torch.rand(ROWS, WIDTH), monkeypatch)
    losses, norms, sums, ways = graded(model, False, *given)
    seen_losses, seen_norms, seen_sums, seen_ways = graded(model, True, *given)
    assert seen_ways != ways or copies > 1, "the kernels must have been used"  # with copies not for gradients
    usable = torch.isfinite(norms)
    assert not usable[1, 1]
    assert torch.equal(torch.isfinite(seen_norms), usable), "a record that is not finite is seen by both"
    assert torch.allclose(seen_losses[usable], losses[usable], rtol=1e-5)
    assert torch.allclose(seen_norms[usable], norms[usable], rtol=1e-5)
    assert torch.allclose(seen_sums, sums, rtol=1e-4, atol=1e-5)
    assert torch.isfinite(seen_sums).all(), "a record with factor zero is not even read"


def test_an_infinite_input_that_no_output_shows_is_seen_all_the_same(monkeypatch):
    """Weights below zero make it −∞, which the rectifier makes 0; the gradient has a product of 0 and ∞."""
    torch.manual_seed(0)
    model = pooled_pairs()
    params = torch.cat([p.detach().flatten() for p in model.parameters()]).repeat(ROWS, 1)
    params[:, : 5 * 9] = -params[:, : 5 * 9].abs()
    x, y = torch.rand(ROWS, WIDTH, 1, 13, 13), torch.zeros(ROWS, WIDTH, dtype=torch.long)
    x[1, 1, 0, 3, 3] = float("inf")
    given = params, x, y, torch.ones(ROWS, WIDTH, dtype=torch.bool), torch.ones(ROWS, WIDTH), monkeypatch
    losses, norms, _, _ = graded(model, False, *given)
    seen_losses, seen_norms, sums, _ = graded(model, True, *given)
    assert torch.isfinite(losses).all(), "the loss does not show it"
    assert torch.isfinite(seen_losses).all()
    assert torch.isfinite(norms).sum() == ROWS * WIDTH - 1
    assert torch.equal(torch.isfinite(norms), torch.isfinite(seen_norms))
    assert torch.isfinite(sums).all()


def test_mixed_precision_gives_the_same_where_tf32_is_exact(interpreted):
    """The interpreter multiplies in float32, so that only the kernels' other branch is compared."""
    torch.manual_seed(0)
    model = pooled_pairs()
    params = torch.cat([p.detach().flatten() for p in model.parameters()]) + 0.05 * torch.randn(ROWS, 1)
    given = params, torch.randn(ROWS, WIDTH, 1, 13, 13), torch.zeros(ROWS, WIDTH, dtype=torch.long)
    full, mixed = (Fast(model, LOSS, stack=True, mixed=one)(*given, None) for one in (False, True))
    assert torch.allclose(mixed.losses, full.losses, rtol=1e-5)
    assert torch.allclose(mixed.norms, full.norms, rtol=1e-5)


def test_rows_too_long_for_32_bits_give_the_same(monkeypatch):
    torch.manual_seed(0)
    model = pooled_pairs()
    params = torch.cat([p.detach().flatten() for p in model.parameters()]) + 0.05 * torch.randn(ROWS, 1)
    x, y = torch.randn(ROWS, WIDTH, 1, 13, 13), torch.zeros(ROWS, WIDTH, dtype=torch.long)
    given = params, x, y, torch.ones(ROWS, WIDTH, dtype=torch.bool), torch.ones(ROWS, WIDTH), monkeypatch
    plain = graded(model, True, *given)
    monkeypatch.setattr(fused, "MOST_COUNTED", 1)
    for one, other in zip(plain[:3], graded(model, True, *given)[:3]):
        assert torch.equal(one, other)


@pytest.mark.parametrize("network", [pooled_pairs, odd_shapes, framed_shapes, standardised])
def test_nothing_depends_on_memory_that_nobody_wrote(network, monkeypatch):
    """Kernels leave padding unwritten; torch can fill every new buffer with NaN, to show who reads such memory."""
    torch.manual_seed(0)
    model = network()
    params = torch.cat([p.detach().flatten() for p in model.parameters()]) + 0.05 * torch.randn(ROWS, 1)
    mask = torch.ones(ROWS, WIDTH, dtype=torch.bool)
    mask[0, 1:], mask[1] = False, False
    given = params, torch.randn(ROWS, WIDTH, 1, 13, 13), torch.zeros(ROWS, WIDTH, dtype=torch.long), mask
    plain = graded(model, True, *given, torch.rand(ROWS, WIDTH), monkeypatch)[:2]
    torch.use_deterministic_algorithms(True)  # which fills
    try:
        factors = torch.full((ROWS, WIDTH), 2.0)
        losses, norms, sums, _ = graded(model, True, *given, factors, monkeypatch)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(losses, plain[0])
    assert torch.equal(norms, plain[1])
    assert torch.equal(sums, graded(model, True, *given, factors, monkeypatch)[2])


def test_where_a_kernel_does_not_compile_the_engine_does_without_them(interpreted, monkeypatch):
    class Broken:
        def __getitem__(self, grid):
            raise ValueError("no such instruction")

    monkeypatch.setattr(fused, "_refused", False)
    monkeypatch.setattr("sordino.client.gradients.kernels.outer_squares", Broken())
    torch.manual_seed(0)
    model = pooled_pairs()
    engine = build(model, "cross-entropy")
    x, y = torch.randn(1, 4, 1, 13, 13), torch.randint(0, CLASSES, (1, 4))
    with pytest.warns(UserWarning, match="kernels are not used.*no such instruction"):
        found = engine(engine.flatten(model)[None], x, y)
    wanted = build(model, "cross-entropy", "exact")(engine.flatten(model)[None], x, y)
    assert isinstance(engine.engine, Fast), "slower, and still not the exact engine"
    assert torch.allclose(found.norms, wanted.norms, rtol=1e-5)


def test_a_model_that_no_fast_engine_serves_does_not_switch_the_kernels_off(interpreted, monkeypatch):
    monkeypatch.setattr(fused, "_refused", False)
    monkeypatch.setattr("sordino.client.gradients.choose.disagreement", lambda *given: "its sums differ")
    model = pooled_pairs()
    engine = build(model, "cross-entropy")
    engine(engine.flatten(model)[None], torch.randn(1, 2, 1, 13, 13), torch.zeros(1, 2, dtype=torch.long))
    assert not isinstance(engine.engine, Fast)
    assert fused.serves(torch.zeros(1)), "other models still have them"


def test_a_record_with_factor_zero_is_not_read_whatever_it_holds(interpreted):
    values = torch.randn(6, 10)
    values[4] = float("nan")
    factors = torch.tensor([1.0, 2.0, 0.5, 1.0, 0.0, 3.0])
    out = torch.empty(2, 10)
    Segments.regular(2, 3).weighted(factors, values, out)
    wanted = torch.stack([values[0] + 2 * values[1] + 0.5 * values[2], values[3] + 3 * values[5]])
    assert torch.allclose(out, wanted, atol=1e-6)


@pytest.mark.parametrize("classes", [3, 10, 37])
def test_the_loss_kernel_gives_cross_entropy_and_its_slopes(classes, interpreted):
    torch.manual_seed(0)
    outputs, y = 5 * torch.randn(19, classes), torch.randint(0, classes, (19,))
    outputs[3, 1], outputs[4, 0], outputs[5] = float("nan"), float("inf"), 300.0
    losses, slopes = fused.cross_entropy(outputs, y)
    given = outputs.double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(given, y, reduction="none")
    (wanted_slopes,) = torch.autograd.grad(wanted.sum(), given)
    fine = torch.isfinite(wanted)
    assert torch.equal(torch.isfinite(losses), fine), "what is not a number is seen"
    assert torch.allclose(losses[fine].double(), wanted[fine], rtol=1e-5, atol=1e-6)
    assert torch.allclose(slopes[fine].double(), wanted_slopes[fine], rtol=1e-5, atol=1e-6)
    one_label = y[:1].expand(19)  # as the engine's own check has it: one number in memory
    same = torch.nn.functional.cross_entropy(outputs, one_label, reduction="none")
    fine = torch.isfinite(same)
    assert torch.allclose(fused.cross_entropy(outputs, one_label)[0][fine], same[fine], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
def test_the_norm_kernel_gives_the_norm_of_an_outer_product(bias, interpreted):
    torch.manual_seed(0)
    x, dy = torch.randn(7, 1000), torch.randn(7, 11)
    wanted = torch.einsum("ni,no->nio", x.double(), dy.double()).square().sum((1, 2))
    wanted = wanted + dy.double().square().sum(1) if bias else wanted
    assert torch.allclose(fused.outer_squares(x, dy, bias).double(), wanted, rtol=1e-5)


def test_noise_added_in_place_is_the_noise_that_fill_draws_times_the_scale():
    from sordino.privacy import noise_cuda  # needs triton

    keys, scale, held = torch.tensor([7, -3]), torch.tensor([0.5, 2.0]), torch.randn(2, 1500)
    drawn = noise_cuda.fill(torch.empty(2, 1500), keys, 3)
    assert torch.allclose(noise_cuda.fill(held.clone(), keys, 3, scale), held + scale[:, None] * drawn)


def test_noise_depends_on_row_step_and_column_alone_and_is_standard_normal():
    from sordino.privacy import noise_cuda  # needs triton

    keys = torch.tensor([7, -3, 7])
    first = noise_cuda.fill(torch.empty(3, 3000), keys, 0)
    assert torch.equal(first[0], first[2]), "the same key is the same stream, wherever the row lies"
    assert torch.equal(noise_cuda.fill(torch.empty(1, 100), keys[1:2], 0)[0], first[1, :100])
    later = noise_cuda.fill(torch.empty(3, 3000), keys, 1)
    both = torch.stack([first[0], first[1], later[0], later[1]]).double().numpy()
    assert np.abs(np.corrcoef(both) - np.eye(4)).max() < 0.1
    assert np.abs(both.mean()) < 0.05
    assert both.var() == pytest.approx(1, abs=0.05)


def test_a_turns_keys_are_made_once_for_all_its_steps():
    source = Keyed("run")
    turns = [Turn("a", 1), Turn("b", 1)]
    held = source.keys_on(turns, "gradient", torch.device("cpu"))
    assert source.keys_on(turns, "gradient", torch.device("cpu")) is held
    other = source.keys_on([Turn("a", 2), Turn("b", 1)], "gradient", torch.device("cpu"))
    assert other[1] == held[1]
    assert other[0] != held[0]
    assert source.keys_on(turns, "loss", torch.device("cpu"))[0] != held[0]


def test_the_kernel_that_bounds_contributions_gives_what_the_gate_gives():
    """Hostile factors, norms and bounds, a bound a row or a record: the same numbers to the last bit."""
    from sordino.privacy import bounded_cuda  # needs triton
    from sordino.privacy.gate import LARGEST_FACTOR, TINY, bounded

    hostile = [0.0, -0.0, 1.0, -1.0, 1e-45, 1e-38, 1e-20, 3e6, -1e30, np.inf, -np.inf, np.nan]
    factors = torch.tensor(hostile)[:, None].expand(-1, 14).contiguous()
    norms = torch.tensor([0.0, 1e-300, 1e-45, 1e-20, 0.1, 1.0, 1.5, 1e6, 1e20, 1e38, 1e300, np.inf, np.nan, 2.0])
    norms = norms.double().expand(len(hostile), -1).contiguous()
    for bound in (0.0, 1e-30, 0.7, 1e30, float("inf"), float("nan")):
        each = torch.full((len(hostile), 1), bound)
        wanted = bounded(factors, norms, each).nan_to_num(7.0)
        found = bounded_cuda.bounded(factors, norms, each, LARGEST_FACTOR, TINY)
        assert torch.equal(found.nan_to_num(7.0), wanted)
        flat = factors.flatten(), norms.flatten(), each.expand(-1, norms.shape[1]).flatten()
        assert torch.equal(bounded_cuda.bounded(*flat, LARGEST_FACTOR, TINY).nan_to_num(7.0), wanted.flatten())
    torch.manual_seed(0)
    factors, norms = torch.randn(5, 3000), torch.rand(5, 3000).double() * 3
    bound = torch.rand(5, 1)
    found = bounded_cuda.bounded(factors, norms, bound, LARGEST_FACTOR, TINY)
    assert torch.equal(found, bounded(factors, norms, bound))
    assert (found.double().abs() * norms <= bound.double() * (1 + 1e-7)).all()


def test_the_kernel_of_lengths_gives_what_graded_gives(interpreted):
    """Norms, limits and who counts, of hostile squares in up to four groups, with padding and without."""
    torch.manual_seed(0)
    n, entries = 300, 1000
    groups = [torch.rand(n), torch.rand(n, 3), torch.rand(n, 2).double(), torch.rand(n).double() * 1e30]
    groups[0][:4] = torch.tensor([float("nan"), float("inf"), 0.0, 1e38])
    loss, mask, excess = torch.randn(n), torch.rand(n) > 0.3, torch.rand(n).double()
    loss[4:6] = torch.tensor([float("nan"), -float("inf")])
    mask[:6] = True
    mask[6], groups[0][6], loss[6] = False, float("nan"), float("nan")
    margins = [torch.tensor(one, dtype=torch.float64) for one in (1 + ROUNDING, VANISHES * entries**0.5)]
    for squares, real, more in ((groups, mask, excess), (groups[:1], None, None), (groups[1:3], mask, None)):
        square = sum(one.double().reshape(n, -1).sum(1) for one in squares)
        finite = (loss + square).abs() < torch.inf
        wanted = Graded(loss, Length(square, more), finite, lambda *given: None, (1, entries)).in_rows(loss.shape, real)
        losses, norms, limits, usable = fused.lengths_of(loss, real, squares, more, *margins)
        assert torch.equal(usable, finite if real is None else finite & real)
        assert torch.equal(losses.nan_to_num(7.0), wanted.losses.nan_to_num(7.0))
        assert torch.allclose(norms, wanted.norms, rtol=1e-6, atol=0)
        assert torch.allclose(limits, wanted.limits, rtol=1e-14, atol=0)


def test_a_linear_layers_sum_does_not_read_records_with_factor_zero(interpreted):
    torch.manual_seed(0)
    dy, x, factors = torch.randn(40, 11), torch.randn(40, 70), torch.rand(40)
    wanted = torch.einsum("rj,rjo,rji->roi", *(one.double().unflatten(0, (2, 20)) for one in (factors, dy, x)))
    wanted[0] -= factors[3].double() * torch.outer(dy[3], x[3]).double()
    factors[3], dy[3], x[3] = 0.0, float("nan"), float("inf")
    out = torch.empty(2, 11 * 70)
    fused.weighted_outer(factors, dy, x, out)
    assert torch.allclose(out.double(), wanted.flatten(1), rtol=1e-5, atol=1e-5)
