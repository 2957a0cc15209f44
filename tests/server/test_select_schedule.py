"""Schedules: drawn before training, counted, compensated; power-of-choice under its caps."""

import math
from collections import Counter

import numpy as np
import pytest

from sordino.errors import BadInput
from sordino.server.select import (
    NOBODY,
    choose,
    compensation,
    draw,
    everyone,
    power_of_choice,
    unbiased,
    uniform,
)


def test_unbiased_and_uniform_are_what_they_say():
    np.testing.assert_array_equal(unbiased([1, 3, 4]), [0.125, 0.375, 0.5])
    np.testing.assert_array_equal(uniform(4), [0.25] * 4)


def test_counts_are_how_often_each_client_was_drawn_over_all_rounds():
    schedule = draw([0.5, 0.3, 0.2, 0.0], rounds=40, select=3, seed=1)
    plain = Counter(int(client) for row in schedule.asked for client in row)
    assert [plain[k] for k in range(4)] == schedule.counts.tolist()
    assert schedule.counts.sum() == 120
    assert schedule.counts[3] == 0
    assert schedule.rounds == 40
    assert schedule.queries.tolist() == [0, 0, 0, 0]


def test_the_same_seed_gives_the_same_schedule_and_another_seed_another():
    first, again, other = (draw(uniform(20), 30, 5, seed) for seed in (4, 4, 5))
    np.testing.assert_array_equal(first.asked, again.asked)
    assert (first.asked != other.asked).any()


def test_draws_follow_the_probabilities():
    p = np.array([0.1, 0.2, 0.3, 0.4])
    schedule = draw(p, rounds=2000, select=10, seed=0)
    spread = np.sqrt(20_000 * p * (1 - p))
    assert (np.abs(schedule.counts - 20_000 * p) < 4 * spread).all()


def test_a_client_drawn_twice_in_a_round_is_two_virtual_copies():
    schedule = draw([0.9, 0.1], rounds=50, select=4, seed=0)
    for number in range(1, 51):
        turn = schedule.round(number)
        assert turn.clients.tolist() == schedule.asked[number - 1].tolist()
        keys = list(zip(turn.clients.tolist(), turn.copies.tolist()))
        assert len(set(keys)) == len(keys)  # (client, copy) names one row
        for client in set(turn.clients.tolist()):
            assert sorted(copy for one, copy in keys if one == client) == list(
                range(turn.clients.tolist().count(client))
            )
    with pytest.raises(BadInput, match="outside"):
        schedule.round(51)


def test_compensated_aggregate_is_unbiased_for_any_probabilities():
    source = np.random.default_rng(2)
    sizes, updates = source.uniform(1, 5, 12), source.normal(size=(12, 3))
    p = source.dirichlet(np.ones(12))
    c = compensation(p, sizes)
    expected = sum(p[k] * c[k] * updates[k] for k in range(12))
    meant = sum(sizes[k] / sizes.sum() * updates[k] for k in range(12))
    np.testing.assert_allclose(expected, meant, rtol=1e-12)


def test_mean_of_weighted_rows_estimates_the_unbiased_aggregate():
    sizes, updates = np.array([1.0, 2.0, 7.0]), np.array([5.0, -3.0, 1.0])
    p = np.array([0.5, 0.3, 0.2])
    schedule = draw(p, 20_000, 5, seed=3, importance=compensation(p, sizes))
    rounds = (schedule.weights * updates[schedule.asked]).mean(axis=1)
    error = rounds.std() / math.sqrt(rounds.size)
    assert abs(rounds.mean() - (sizes / sizes.sum()) @ updates) < 4 * error
    plain = draw(p, 20_000, 5, seed=3)
    assert (plain.weights == 1.0).all()
    assert abs(updates[plain.asked].mean() - (sizes / sizes.sum()) @ updates) > 20 * error  # without, it is biased


def test_compensating_size_proportional_draws_changes_nothing():
    np.testing.assert_allclose(compensation(unbiased([3, 5, 9]), [3, 5, 9]), 1.0, rtol=1e-15)


def test_everyone_takes_part_in_every_round_once():
    schedule = everyone(5, 3)
    assert schedule.counts.tolist() == [3] * 5
    assert schedule.round(2).clients.tolist() == [0, 1, 2, 3, 4]
    assert schedule.round(2).copies.tolist() == [0] * 5


def test_candidates_are_different_clients_and_queries_count_them():
    schedule = power_of_choice(np.arange(1, 21), rounds=60, candidates=6, select=2, seed=0)
    for row in schedule.asked:
        assert len(set(row.tolist())) == 6
    plain = Counter(int(client) for row in schedule.asked for client in row)
    assert [plain[k] for k in range(20)] == schedule.queries.tolist()
    assert schedule.queries.sum() == 360


def test_caps_are_headroom_times_a_fair_share_and_never_above_the_queries():
    schedule = power_of_choice(np.ones(20), 60, candidates=6, select=2, seed=0, headroom=1.5)
    for queries, cap in zip(schedule.queries.tolist(), schedule.counts.tolist()):
        assert cap == min(queries, math.ceil(1.5 * queries * 2 / 6 - 1e-9))
    generous = power_of_choice(np.ones(20), 60, candidates=6, select=2, seed=0, headroom=math.inf)
    np.testing.assert_array_equal(generous.counts, generous.queries)


def test_single_candidates_are_drawn_in_proportion_to_size():
    schedule = power_of_choice([1, 2, 7], rounds=20_000, candidates=1, select=1, seed=1)
    expected = 20_000 * np.array([0.1, 0.2, 0.7])
    assert (np.abs(schedule.queries - expected) < 4 * np.sqrt(expected)).all()


def test_pairs_of_candidates_follow_drawing_one_after_the_other():
    schedule = power_of_choice([1, 2, 7], rounds=20_000, candidates=2, select=1, seed=2)
    never_first = sum(set(row.tolist()) == {1, 2} for row in schedule.asked) / 20_000
    expected = 0.2 * 0.7 / 0.8 + 0.7 * 0.2 / 0.3
    assert never_first == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / 20_000))


def test_choose_takes_the_largest_losses_below_the_cap():
    used, caps = np.array([0, 3, 0, 0, 0]), np.array([3, 3, 3, 3, 3])
    assert choose([0, 1, 2, 4], [0.5, 9.0, 0.7, 0.6], 2, used, caps).tolist() == [2, 4]
    assert choose([0, 2, 4], [0.5, math.nan, 0.6], 2, used, caps).tolist() == [4, 0]
    assert choose([0, 2], [math.nan, 0.6], 2, used, caps).tolist() == [2]
    assert choose([3, 0, 2], [1.0, 1.0, 1.0], 2, used, caps).tolist() == [3, 0]
    assert choose([1, 0, NOBODY], [5.0, 1.0, 7.0], 2, used, caps).tolist() == [0]
    assert choose([1], [5.0], 2, used, caps).tolist() == []


def test_no_client_trains_beyond_its_cap_whatever_the_losses():
    schedule = power_of_choice(np.ones(15), rounds=80, candidates=8, select=4, seed=0, headroom=1.2)
    used = np.zeros(15, dtype=int)
    for number in range(1, 81):
        candidates = schedule.round(number).clients
        losses = 100.0 - candidates  # the same clients are always the worst
        for client in choose(candidates, losses, schedule.select, used, schedule.counts):
            used[client] += 1
    assert (used <= schedule.counts).all()
    assert (used == schedule.counts)[:3].all()


@pytest.mark.parametrize(
    ("call", "cause"),
    [
        (lambda: draw([0.5, 0.6], 1, 1, 0), "sum to 1.1"),
        (lambda: draw([1.5, -0.5], 1, 1, 0), "negative"),
        (lambda: draw([math.nan, 1.0], 1, 1, 0), "nan"),
        (lambda: draw([0.5, 0.5], 0, 1, 0), "rounds"),
        (lambda: draw([0.5, 0.5], 1, 0, 0), "select"),
        (lambda: draw([0.5, 0.5], 1, 1, -3), "seed"),
        (lambda: draw([0.5, 0.5], 1, 1, 0, importance=[1.0]), "importance"),
        (lambda: unbiased([3, -1]), r"sizes\[1\] is -1"),
        (lambda: compensation([1.0, 0.0], [1, 1]), "never drawn"),
        (lambda: power_of_choice([1, 1], 5, 1, 2, 0), "below select"),
        (lambda: power_of_choice([1, 1], 5, 3, 2, 0), "only 2"),
        (lambda: power_of_choice([1, 1], 5, 2, 1, 0, headroom=0.5), "headroom"),
        (lambda: choose([0, 1], [1.0], 1, [0, 0], [1, 1]), "1 losses for 2"),
        (lambda: choose([0, 2], [1.0, 2.0], 1, [0, 0], [1, 1]), "used and caps"),
    ],
)
def test_refused_with_the_cause(call, cause):
    with pytest.raises(BadInput, match=cause):
        call()
