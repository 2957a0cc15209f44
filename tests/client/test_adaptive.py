"""The client's part of adaptive clipping: what is asked of norms, how records count, what is uploaded."""

import math

import pytest
import torch

from sordino.client import ask, clip, local
from sordino.errors import BadInput
from sordino.privacy.gate import bounded

NORMS = torch.tensor([[0.0, 0.5, 2.0, 3.0, 1e30]])
LOSSES = torch.zeros_like(NORMS)


def test_squared_norms_are_cut_at_the_square_of_the_clip():
    asked = ask.squared_norms()
    values = asked.values(LOSSES, NORMS, {"clip": 2.0})
    assert values.tolist() == [[0.0, 0.25, 4.0, 4.0, 4.0]], "1e30 would overflow if squared first"
    assert asked.bound({"clip": 2.0}) == 4.0
    assert values.max() <= asked.bound({"clip": 2.0})


def test_with_a_reach_the_bound_follows_the_radius_and_never_exceeds_the_clip():
    asked = ask.squared_norms(reach=2.0)
    assert asked.bound({"clip": 3.0, "radius": 1.0}) == 4.0
    assert asked.values(LOSSES, NORMS, {"clip": 3.0, "radius": 1.0}).tolist() == [[0.0, 0.25, 4.0, 4.0, 4.0]]
    assert asked.bound({"clip": 3.0, "radius": 2.0}) == 9.0
    assert asked.bound({"clip": 3.0}) == 9.0, "before the first radius"
    columns = asked.bound({"clip": 3.0, "radius": torch.tensor([[1.0], [2.0]])})
    assert columns.tolist() == [[4.0], [9.0]]
    with pytest.raises(BadInput, match="reach"):
        ask.squared_norms(reach=1.0)


def test_the_share_under_the_radius_is_centred_so_its_bound_is_a_half():
    asked = ask.under_radius()
    values = asked.values(LOSSES, NORMS, {"clip": 9.0, "radius": 2.0})
    assert values.tolist() == [[0.5, 0.5, 0.5, -0.5, -0.5]]
    assert asked.bound({"clip": 9.0}) == 0.5
    first = asked.values(LOSSES, NORMS, {"clip": 1.0})
    assert first.tolist() == [[0.5, 0.5, -0.5, -0.5, -0.5]], "before the first answer the radius is the clip"


def test_questions_understand_a_radius_of_its_own_for_every_row():
    """Rows of several runs in one stack: a column of radii."""
    norms = torch.tensor([[1.0, 3.0], [1.0, 3.0]])
    columns = {"clip": torch.tensor([[2.0], [4.0]])}
    assert ask.squared_norms().values(norms, norms, columns).tolist() == [[1.0, 4.0], [1.0, 9.0]]
    assert ask.under_radius().values(norms, norms, columns).tolist() == [[0.5, -0.5], [0.5, 0.5]]


def test_moving_clipping_is_flat_clipping_at_the_broadcast_radius():
    rule = clip.moving()
    public = {"clip": 5.0, "radius": 1.0}
    factors = bounded(rule.factors(LOSSES, NORMS, public), NORMS, rule.bound(public))
    for factor, norm in zip(factors[0].tolist(), NORMS[0].tolist()):
        assert factor == pytest.approx(min(1.0, 1.0 / norm) if norm else 1.0)
    assert rule.bound({"clip": 5.0}) == 5.0


@pytest.mark.parametrize("gamma", [0.0, 0.01, 1.0])
def test_automatic_clipping_normalises_with_a_stabiliser(gamma):
    rule = clip.automatic(gamma)
    public = {"clip": 0.7}
    factors = bounded(rule.factors(LOSSES, NORMS, public), NORMS, rule.bound(public))
    for factor, norm in zip(factors[0, 1:].tolist(), NORMS[0, 1:].tolist()):
        assert factor == pytest.approx(0.7 / (norm + gamma))
    assert (factors * NORMS <= 0.7 * (1 + 1e-6)).all()
    assert torch.isfinite(factors).all(), "a record without a gradient is no reason for infinity"


def test_automatic_clipping_without_privacy_clips_nothing():
    assert (clip.automatic().factors(LOSSES, NORMS, {"clip": math.inf}) == 1).all()


def test_a_negative_stabiliser_is_refused():
    with pytest.raises(BadInput, match="gamma"):
        clip.automatic(-0.1)


def test_averaged_descends_like_sgd_and_uploads_the_mean_of_the_iterates_it_stepped_from():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(3, generator=generator)
    gradients = torch.randn(4, 2, 3, generator=generator)
    rule, params, state = local.averaged(), start.expand(2, 3).clone(), {"mine": torch.ones(2, 3)}
    plain, visited = start.expand(2, 3).clone(), []
    for gradient in gradients:
        visited.append(plain.clone())
        plain = plain - 0.1 * gradient
        params, state = rule.update(params, state, gradient.clone(), {"lr": 0.1})
    upload, state = rule.finish(params, start, state, {"lr": 0.1})
    assert torch.allclose(upload["update"], plain - start, atol=1e-6)
    assert torch.allclose(upload["iterate"], torch.stack(visited).mean(0) - start, atol=1e-6)
    assert list(state) == ["mine"], "what a turn noted for itself does not outlive it"
