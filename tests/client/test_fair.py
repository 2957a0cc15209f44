"""Fair clipping and fair steps: sensitivity under any loss, and the formulas record by record."""

import math

import numpy as np
import pytest
import torch

from sordino.client.ask import bounded_loss, scalar_piece
from sordino.client.clip import fair, flat
from sordino.client.local import fair_step
from sordino.errors import BadInput
from sordino.methods import asking
from sordino.privacy.gate import Gate, Piece, Terms, bounded
from sordino.privacy.generators import Keyed, Turn
from sordino.privacy.types import Sampling

CLIP = 0.7
HUGE = [math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 1e30, -1e30, 1e9, -1e9, 1e-30, 0.0, -0.0, 1.0, 2.5]


def factors(losses, mean, weight=0.5):
    public = {"clip": CLIP} if mean is None else {"clip": CLIP, "mean_loss": mean}
    return fair(weight).factors(torch.tensor(losses, dtype=torch.float32), torch.ones(len(losses)), public)


def test_factors_follow_the_formula_and_are_never_negative():
    losses, mean, weight = [0.0, 0.5, 1.0, 4.0, 100.0], 3.0, 0.5
    expected = [max(0.0, 1 + weight * (loss - mean)) for loss in losses]
    assert factors(losses, mean, weight).tolist() == pytest.approx(expected)
    assert expected[0] == 0.0


def test_before_the_first_release_every_record_counts_once():
    assert factors([0.0, 7.0, 1e9], None).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("mean", [0.0, 2.0, -50.0, 1e9, -1e9, 1e30])
def test_no_record_moves_the_sum_by_more_than_the_clip_whatever_its_loss(mean):
    """Adversarial losses and gradients: negative and huge factors, NaN, infinities, vanishing and exploding norms."""
    norms = torch.tensor([0.0, 1e-30, 1e-12, 0.3, 0.7, 1.0, 1e6, 1e30, 3e38, math.inf, math.nan])
    losses = torch.tensor(HUGE)
    grid_losses, grid_norms = (one.flatten() for one in torch.meshgrid(losses, norms, indexing="ij"))
    rule = fair(10.0)
    public = {"clip": CLIP, "mean_loss": mean}
    kept = bounded(rule.factors(grid_losses, grid_norms, public), grid_norms, rule.bound(public))
    moved = kept.double().abs() * grid_norms.double()
    usable = torch.isfinite(grid_norms)
    assert torch.isfinite(kept).all()
    assert (kept >= 0).all()
    assert (kept[~usable] == 0).all()
    assert moved[usable].max() <= CLIP * (1 + 1e-5)
    assert (kept[~torch.isfinite(grid_losses)] == 0).all()


def test_one_record_moves_the_released_sum_by_at_most_the_clip():
    """The same through the gate: the sum with and without the worst record, in every direction and loss."""
    rule, public = fair(3.0), {"clip": CLIP, "mean_loss": 2.0}
    terms = Terms(Sampling.full(), (("gradient", 0.0),), 1, 1.0)
    generator = torch.Generator().manual_seed(0)
    others = torch.randn(1, 5, 4, generator=generator)

    def released(gradients, losses):
        gate = Gate(None, Keyed("k"), "r")
        permit = gate.grant([Turn("a", 1)], [terms], "q")
        norms = gradients.norm(dim=2)
        piece = Piece(
            norms, rule.factors(losses, norms, public), lambda a: (a[..., None] * gradients).nansum(1), _column
        )
        return gate.release(permit, 0, [{"gradient": piece}], {"gradient": torch.tensor([CLIP])}, 4)["gradient"].value

    losses = torch.rand(1, 5, generator=generator) * 4
    base = released(others, losses)
    for loss in HUGE:
        for scale in (1e-3, 1.0, 1e4, 1e20):
            worst = torch.randn(1, 1, 4, generator=generator) * scale
            more = released(torch.cat([others, worst], 1), torch.cat([losses, torch.tensor([[loss]])], 1))
            assert (more - base).norm() <= CLIP * (1 + 1e-4)


def test_a_weight_of_zero_is_flat_clipping_and_plain_descent():
    assert fair(0).name == flat().name
    assert fair(0).needs == ()
    assert fair(0.1).needs == ("loss",)
    assert fair_step(0).name == "sgd"
    assert fair_step(0).needs == ()


@pytest.mark.parametrize("weight", [-0.1, math.nan, math.inf])
def test_weights_that_make_no_sense_are_refused(weight):
    for rule in (fair, fair_step):
        with pytest.raises(BadInput, match="λ"):
            rule(weight)


def test_the_fair_step_is_longer_where_the_loss_is_above_the_mean():
    params, gradient = torch.zeros(3, 2), torch.tensor([[1.0, 2.0]] * 3)
    public = {"lr": 0.5, "mean_loss": 2.0, "loss": torch.tensor([[1.0], [2.0], [5.0]])}
    stepped, _ = fair_step(0.4).update(params, {}, gradient.clone(), public)
    for row, loss in zip(stepped, [1.0, 2.0, 5.0]):
        length = 0.5 * (1 + 0.4 * (loss - 2.0))
        assert row.tolist() == pytest.approx([-length * 1.0, -length * 2.0])


def test_a_bounded_fair_step_is_never_longer_than_most_steps_and_never_climbs():
    params, gradient = torch.zeros(4, 1), torch.ones(4, 1)
    public = {"lr": 0.5, "mean_loss": 2.0, "loss": torch.tensor([[0.5], [2.5], [1e30], [3.5]])}
    stepped, _ = fair_step(1.0, most=2.5).update(params, {}, gradient, public)
    assert stepped.flatten().tolist() == pytest.approx([0.0, -0.75, -1.25, -1.25])
    first, _ = fair_step(1.0, most=2.5).update(torch.zeros(4, 1), {}, torch.ones(4, 1), {"lr": 0.5, "loss": params})
    assert first.flatten().tolist() == [-0.5] * 4, "before the first loss a step is a step"
    assert fair_step(1.0, most=2.5).name != fair_step(1.0).name


@pytest.mark.parametrize("most", [0.5, -1.0, math.nan, math.inf])
def test_a_bound_below_one_step_is_refused(most):
    with pytest.raises(BadInput, match=r"local\.most"):
        fair_step(1.0, most=most)


def test_the_loss_question_sums_losses_cut_to_the_bound():
    question = bounded_loss(2.5)
    assert question.bound({}) == 2.5
    assert question.bound({"loss_bound": 0.4}) == 0.4
    assert asking.exact_loss().question.bound({}) == math.inf
    losses = torch.tensor([[0.1, 7.0, -3.0, math.nan, math.inf, 2.0]])
    values = question.values(losses, torch.ones_like(losses), {})
    piece = scalar_piece(values, None, 1, _column)
    total = piece.pull(bounded(piece.factors, piece.norms, torch.tensor([[2.5]]))).item()
    assert total == pytest.approx(0.1 + 2.5 + 0.0 + 0.0 + 0.0 + 2.0)


@pytest.mark.parametrize("start", [0.0, -1.0, math.inf, math.nan])
def test_a_loss_bound_is_positive_and_finite(start):
    with pytest.raises(BadInput, match="loss bound"):
        asking.loss(start=start)
    if not start > 0:
        with pytest.raises(BadInput, match="loss bound"):
            bounded_loss(start)


def _column(v):
    return v[:, None]


def test_factors_come_in_the_shape_of_the_batch():
    for shape in ((4,), (2, 3)):
        losses = torch.from_numpy(np.random.default_rng(0).random(shape, dtype=np.float32))
        assert fair(0.3).factors(losses, losses, {"mean_loss": 1.0}).shape == shape
