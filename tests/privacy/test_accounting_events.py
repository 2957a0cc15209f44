"""Compositions of several releases: cost, joint calibration with a stated split, and how much a budget affords."""

import math

import numpy as np
import pytest

from sordino.errors import BadInput
from sordino.privacy.accounting import (
    ACCOUNTANTS,
    accountant_named,
    affordable,
    calibrate,
    calibrate_events,
    composed_epsilon,
    epsilon,
    pld,
    replace_one_epsilon,
    split,
    steps_within,
)
from sordino.privacy.types import Adjacency, Budget, Event, Sampling, joined

GRADIENT = Event("gradient", Sampling.poisson(0.05), 2.0, 268)
LOSS = Event("loss", Sampling.poisson(0.05), 5.0, 268)


def scaled(events, scale):
    return [Event(e.what, e.sampling, e.noise * scale, e.count, e.adjacency) for e in events]


def test_one_event_costs_what_epsilon_says():
    assert composed_epsilon([[GRADIENT]], [1e-5])[0] == epsilon(2.0, 1e-5, 0.05, 268)


def test_counts_add_up_however_they_are_written():
    pieces = [GRADIENT.times(100), LOSS, GRADIENT.times(168)]
    assert composed_epsilon([pieces], [1e-5])[0] == composed_epsilon([[LOSS, GRADIENT]], [1e-5])[0]


def test_full_batches_merge_exactly():
    many = [Event("a", Sampling.full(), 10.0, 25), Event("b", Sampling.full(), 20.0, 100)]
    one = [Event("a", Sampling.full(), joined(2.0, 2.0))]
    assert composed_epsilon([many], [1e-5])[0] == pytest.approx(composed_epsilon([one], [1e-5])[0], rel=1e-12)


def test_nothing_costs_nothing_and_no_noise_costs_everything():
    costs = composed_epsilon([[], [GRADIENT.times(0)], [Event("raw", Sampling.full(), 0.0)]], [1e-5] * 3)
    assert costs.tolist() == [0.0, 0.0, math.inf]
    silent = Event("silent", Sampling.poisson(0.5), math.inf, 1000)
    assert composed_epsilon([[GRADIENT, silent]], [1e-5])[0] == composed_epsilon([[GRADIENT]], [1e-5])[0]


def test_equal_clients_are_computed_once(monkeypatch):
    seen = []
    real = pld.epsilons

    def counting(compositions, deltas):
        seen.extend(compositions)
        return real(compositions, deltas)

    monkeypatch.setattr(pld, "epsilons", counting)
    clients = [[Event("g", Sampling.poisson(0.0517), 2.0 + (i % 3), 50)] for i in range(60)]
    costs = composed_epsilon(clients, 1e-5)
    assert len(seen) == 3
    assert len(set(costs.tolist())) == 3
    composed_epsilon(clients, 1e-5)
    assert len(seen) == 3, "a second look is free"


def test_two_adjacencies_do_not_compose():
    other = Event("gradient", Sampling.poisson(0.05), 2.0, 1, Adjacency.REPLACE_ONE)
    with pytest.raises(BadInput, match="do not compose"):
        composed_epsilon([[GRADIENT, other]], [1e-5])
    with pytest.raises(BadInput, match="adjacency"):
        calibrate_events([[other]], [Budget(1.0, 1e-5)])
    with pytest.raises(BadInput, match="adjacency"):
        affordable([GRADIENT], Budget(1.0, 1e-5, Adjacency.REPLACE_ONE), 10)


def test_a_wrong_delta_or_a_missing_budget_is_refused():
    with pytest.raises(BadInput, match="delta"):
        composed_epsilon([[GRADIENT]], [0.0])
    with pytest.raises(BadInput, match="one of each"):
        calibrate_events([[GRADIENT], [LOSS]], [Budget(1.0, 1e-5)])
    with pytest.raises(BadInput, match="noise 0"):
        calibrate_events([[Event("raw", Sampling.full(), 0.0)]], [Budget(1.0, 1e-5)])


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_joint_calibration_meets_the_budget_and_keeps_the_ratio_of_the_noises(accountant):
    template = [GRADIENT, LOSS, Event("radius", Sampling.full(), 40.0, 10)]
    budgets = [Budget(0.5, 1e-5), Budget(4.0, 1e-6), Budget(math.inf, 1e-5)]
    scales = calibrate_events([template] * 3, budgets, accountant)
    assert scales[2] == 0.0
    for scale, budget in zip(scales[:2], budgets):
        spent = composed_epsilon([scaled(template, scale)], [budget.delta], accountant)[0]
        assert budget.epsilon * (1 - 5e-4) <= spent <= budget.epsilon


def test_joint_calibration_of_a_single_event_is_calibrate():
    template = [Event("g", Sampling.poisson(0.05), 1.0, 268)]
    assert calibrate_events([template], [Budget(2.0, 1e-5)])[0] == calibrate(2.0, 1e-5, 0.05, 268)


def test_split_gives_each_event_its_share_of_mu_squared():
    shares, counts, rates = [3.0, 1.0], [1000, 50], [0.02, 0.3]
    noises = split(shares, counts, rates)
    parts = [count * rate**2 / z**2 for count, rate, z in zip(counts, rates, noises)]
    assert parts[0] / parts[1] == pytest.approx(3.0)
    with pytest.raises(BadInput, match="positive"):
        split([1.0, 0.0], counts, rates)
    with pytest.raises(BadInput, match="one length"):
        split([1.0], counts, rates)


def test_a_nine_to_one_split_leaves_the_gradient_little_noisier_than_alone():
    counts, rates = [1000, 1000], [0.02, 0.02]
    noises = split([0.9, 0.1], counts, rates)
    template = [Event(str(i), Sampling.poisson(q), z, n) for i, (q, z, n) in enumerate(zip(rates, noises, counts))]
    scale = calibrate_events([template], [Budget(1.0, 1e-5)])[0]
    alone = calibrate(1.0, 1e-5, 0.02, 1000)
    assert noises[0] * scale / alone == pytest.approx(1 / math.sqrt(0.9), rel=0.02)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_a_budget_affords_exactly_the_turns_that_fit(accountant):
    budget, turn = Budget(2.0, 1e-5), [GRADIENT.times(5), LOSS.times(1)]
    spent = [Event("earlier", Sampling.poisson(0.1), 4.0, 30)]
    turns = affordable(turn, budget, 1000, spent, accountant)

    def cost(m):
        events = [*spent, *(event.times(event.count * m) for event in turn)]
        return composed_epsilon([events], [budget.delta], accountant)[0]

    assert 0 < turns < 1000
    assert cost(turns) <= budget.epsilon < cost(turns + 1)
    assert affordable(turn, budget, turns - 3, spent, accountant) == turns - 3


def test_the_calibrated_number_of_turns_is_affordable_and_not_one_more():
    """A schedule calibrated for T turns must be allowed T turns by the same accountant."""
    rng = np.random.default_rng(3)
    for _ in range(8):
        rate, steps = 10 ** rng.uniform(-2.5, -0.5), int(10 ** rng.uniform(1, 3.5))
        budget = Budget(10 ** rng.uniform(-1, 1), 10 ** rng.uniform(-7, -3))
        noise = calibrate(budget.epsilon, budget.delta, rate, steps)
        step = [Event("g", Sampling.poisson(rate), noise)]
        assert affordable(step, budget, steps) == steps
        limit = affordable(step, budget, 2 * steps + 2)
        assert steps <= limit <= steps * (1 + 2e-3) + 1


def test_what_is_overdrawn_affords_nothing_and_public_data_affords_everything():
    spent = [GRADIENT.times(5000)]
    assert affordable([GRADIENT.times(1)], Budget(1.0, 1e-5), 10, spent) == 0
    assert affordable([GRADIENT.times(1)], Budget(math.inf, 1e-5), 10, spent) == 10
    assert affordable([GRADIENT], Budget(1.0, 1e-5), 0) == 0
    with pytest.raises(BadInput, match="turns"):
        affordable([GRADIENT], Budget(1.0, 1e-5), -1)


def test_steps_within_is_the_last_step_that_fits():
    steps = steps_within(2.0, 1e-5, 0.05, 2.0)
    assert epsilon(2.0, 1e-5, 0.05, steps) <= 2.0 < epsilon(2.0, 1e-5, 0.05, steps + 1)
    assert steps_within(0.01, 1e-5, 0.05, 0.5) == 0


def test_the_replace_one_figure_takes_the_same_noise_over_twice_the_sensitivity():
    events = [GRADIENT, Event("radius", Sampling.full(), 30.0, 4)]
    halved = [Event(e.what, e.sampling, e.noise / 2, e.count, Adjacency.REPLACE_ONE) for e in events]
    assert replace_one_epsilon(events, 1e-5) == composed_epsilon([halved], [1e-5])[0]
    assert replace_one_epsilon(halved, 1e-5) == composed_epsilon([halved], [1e-5])[0]
    assert replace_one_epsilon([GRADIENT], 1e-5) == pytest.approx(3.48, abs=0.005)


def test_every_accountant_is_registered_with_words():
    for name in ACCOUNTANTS:
        assert accountant_named(name).words
