"""One bad client never destroys the model or the others' weights: every rule against every kind of bad update."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_rules import CLIP, LR, facts_of, round_of

from sordino.errors import BadInput
from sordino.server import defend, rules

BAD = 3
RULES = sorted(rules.RULES)


def spoil(updates, facts, how):
    """Row 3 misbehaves."""
    updates, generator = updates.clone(), torch.Generator().manual_seed(9)
    if how == "nan":
        updates[BAD, 7] = float("nan")
    elif how == "inf":
        updates[BAD, 7] = float("-inf")
    elif how == "huge":
        updates[BAD] = 1e9 * torch.randn(updates.shape[1], generator=generator)
    elif how == "zeros":
        updates[BAD] = 0.0
    elif how == "tiny":
        updates[BAD] *= 1e-9
    elif how == "opposite":
        updates[BAD] *= -1e3
    elif how == "more noise than declared":
        updates[BAD] += 0.5 * torch.randn(updates.shape[1], generator=generator)
    return updates


KINDS = ["nan", "inf", "huge", "zeros", "tiny", "opposite", "more noise than declared"]


@pytest.fixture(scope="module")
def honest():
    facts = facts_of(range(10))
    return round_of(facts), facts


@pytest.mark.parametrize("how", KINDS)
@pytest.mark.parametrize("name", RULES)
def test_the_step_stays_near_that_of_the_others(name, how, honest):
    updates, facts = honest
    others = np.array([i for i in range(10) if i != BAD])
    without = rules.RULES[name]()(updates[torch.from_numpy(others)], facts.only(others), {})
    outcome = rules.RULES[name]()(spoil(updates, facts, how), facts, {})
    assert torch.isfinite(outcome.delta).all()
    longest = float(updates.norm(dim=1).max())
    assert float((outcome.delta - without.delta).norm()) < 1.0 * longest
    if outcome.weights is not None and without.weights is not None:
        kept = outcome.weights[others] / outcome.weights[others].sum()
        np.testing.assert_allclose(kept, without.weights / without.weights.sum(), rtol=0.15)


@pytest.mark.parametrize("how", ["nan", "inf"])
@pytest.mark.parametrize("name", RULES)
def test_what_is_not_finite_is_refused_exactly_and_said(name, how, honest, caplog):
    updates, facts = honest
    others = np.array([i for i in range(10) if i != BAD])
    without = rules.RULES[name]()(updates[torch.from_numpy(others)], facts.only(others), {})
    with caplog.at_level(logging.WARNING, logger="sordino.server"):
        outcome = rules.RULES[name]()(spoil(updates, facts, how), facts, {})
    torch.testing.assert_close(outcome.delta, without.delta)
    if outcome.weights is not None:
        assert outcome.weights[BAD] == 0.0
    assert "client 3 refused" in caplog.text
    assert any("client 3 refused" in line for line in outcome.diagnostics["log"])


@pytest.mark.parametrize("name", RULES)
def test_honest_rounds_pass_untouched_and_in_silence(name, honest, caplog):
    updates, facts = honest
    screened = defend.screen(updates, facts)
    assert screened.updates is updates
    with caplog.at_level(logging.WARNING, logger="sordino.server"):
        outcome = rules.RULES[name]()(updates, facts, {})
    assert caplog.text == ""
    assert "log" not in outcome.diagnostics


def test_a_client_far_beyond_its_reach_is_scaled_down_and_named(honest):
    updates, facts = honest
    screened = defend.screen(spoil(updates, facts, "huge"), facts)
    explained = facts.steps[BAD] * LR * CLIP * (1 + 6 / np.sqrt(facts.batches[BAD])) + np.sqrt(facts.variances[BAD]) * (
        np.sqrt(4000) + 6
    )
    assert float(screened.updates[BAD].norm()) <= defend.SLACK * explained * 1.01
    assert torch.equal(screened.updates[0], updates[0])
    assert screened.lines[0].startswith("round 1: client 3 bounded")


def test_an_untruthful_variance_is_counted_as_what_the_norm_proves(honest):
    updates, facts = honest
    variances, noises = facts.variances.copy(), facts.noises.copy()
    variances[BAD], noises[BAD] = variances[BAD] / 1e6, noises[BAD] / 1e3
    lying = replace(facts, variances=variances, noises=noises)
    outcome = rules.declared_variance()(spoil(updates, facts, "more noise than declared"), lying, {})
    assert outcome.weights[BAD] < 0.05  # believed, it would have everything
    assert any("client 3 declared noise variance" in line for line in outcome.diagnostics["log"])


def test_a_client_that_claims_to_have_no_noise_gains_at_most_twice_its_share_from_random_effects(honest):
    updates, facts = honest
    variances, noises = facts.variances.copy(), facts.noises.copy()
    variances[BAD], noises[BAD] = 1e-12, 1e-6
    outcome = rules.random_effects()(updates, replace(facts, variances=variances, noises=noises), {})
    assert outcome.diagnostics["votes"][BAD] < 2 * facts.sizes[BAD] / facts.sizes.sum()


def test_an_update_smaller_than_its_own_noise_is_refused_where_small_is_rewarded(honest):
    updates, facts = honest
    for name in ("robust-hdp", "factor-hdp", "column-norm", "random-effects"):
        for how in ("tiny", "zeros"):
            outcome = rules.RULES[name]()(spoil(updates, facts, how), facts, {})
            assert outcome.weights[BAD] == 0.0
            assert any("client 3 refused" in line for line in outcome.diagnostics["log"])


def test_a_large_update_without_the_planned_noise_is_not_rewarded(honest):
    """What the others agree on, sent without noise of one's own, would look perfectly quiet."""
    updates, facts = honest
    updates = updates.clone()
    common = updates.mean(0)
    updates[BAD] = common / common.norm() * np.sqrt(4000 * facts.variances[BAD])
    outcome = rules.factor_hdp()(updates, facts, {})
    assert outcome.diagnostics["estimated_variances"][BAD] == pytest.approx(defend.FLOOR * facts.variances[BAD])
    assert any("where the plan asked" in line for line in outcome.diagnostics["log"])


def test_a_round_without_a_usable_update_leaves_the_model_alone(honest):
    updates, facts = honest
    for name in RULES:
        outcome = rules.RULES[name]()(torch.full_like(updates, float("nan")), facts, {"kept": 1})
        assert torch.equal(outcome.delta, torch.zeros(updates.shape[1]))
        assert outcome.memory == {"kept": 1}
        assert "no update could be used" in outcome.diagnostics["log"][-1]


def test_without_noise_only_the_typical_length_bounds_updates():
    facts = facts_of(range(5))
    public = replace(facts, noises=np.zeros(5), variances=np.zeros(5))
    updates = torch.randn(5, 100, generator=torch.Generator().manual_seed(0)) * torch.as_tensor(facts.steps)[:, None]
    updates = updates.float()
    assert defend.screen(updates, public).updates is updates
    updates[2] *= 20  # honest clients may differ this much where nothing is clipped: they pass unchanged
    assert defend.screen(updates, public).updates is updates
    updates[2] *= 1e4
    bounded = defend.screen(updates, public).updates.norm(dim=1)
    assert float(bounded[2]) < 2 * defend.LOOSE * float(bounded[0])


def test_a_single_client_is_never_bounded_by_itself():
    facts = facts_of([2])
    alone = replace(facts, noises=np.zeros(1), variances=np.zeros(1))
    updates = torch.ones(1, 50) * 1e6
    assert torch.equal(rules.data_weighted()(updates, alone, {}).delta, updates[0])


def test_rows_and_facts_must_match(honest):
    updates, facts = honest
    with pytest.raises(BadInput, match="a row each"):
        rules.uniform()(updates[:4], facts, {})
    with pytest.raises(BadInput, match="a row each"):
        rules.uniform()(updates[0], facts, {})


def test_what_only_a_simulation_knows_follows_its_rows(honest):
    _, facts = honest
    some = facts.only(np.array([1, 4]))
    np.testing.assert_array_equal(some.true_variances, facts.variances[[1, 4]])
    assert some.lr == LR
    assert some.clients.tolist() == [1, 4]
