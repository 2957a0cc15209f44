"""Budgets that run dry, clients that leave or join: what happens to a schedule, and to everybody's counts."""

import math

import numpy as np
import pytest

from sordino.errors import BadInput
from sordino.server.select import (
    NOBODY,
    compensation,
    draw,
    everyone,
    last_rounds,
    power_of_choice,
    redraw,
    uniform,
    within,
    without,
)


def test_last_rounds_say_when_each_budget_ends():
    schedule = draw([0.4, 0.3, 0.3, 0.0], rounds=25, select=2, seed=0)
    for client in range(4):
        rounds = [t + 1 for t in range(25) if client in schedule.asked[t]]
        assert last_rounds(schedule)[client] == (rounds[-1] if rounds else 0)


def test_without_asks_them_no_more_and_nobody_else_more_often():
    schedule = draw(uniform(6), rounds=30, select=4, seed=0)
    left = without(schedule, [1, 4], start=11)
    np.testing.assert_array_equal(left.asked[:10], schedule.asked[:10])
    for number in range(11, 31):
        before = [client for client in schedule.asked[number - 1] if client not in (1, 4)]
        assert left.round(number).clients.tolist() == before
    assert (left.counts <= schedule.counts).all()
    assert left.counts[0] == schedule.counts[0]
    assert last_rounds(left)[1] <= 10


def test_without_everybody_leaves_empty_rounds():
    left = without(draw(uniform(2), 5, 3, seed=0), [0, 1], start=3)
    assert left.round(3).clients.size == 0
    assert left.round(2).clients.size == 3


def test_without_works_for_everyone_and_for_candidate_sets():
    assert without(everyone(4, 3), [2], start=2).counts.tolist() == [3, 3, 1, 3]
    choice = power_of_choice(np.ones(8), 20, 4, 2, seed=0)
    left = without(choice, [3])
    assert left.queries[3] == 0
    np.testing.assert_array_equal(np.delete(left.queries, 3), np.delete(choice.queries, 3))


def test_without_compensates_for_those_who_remain():
    sizes, p = np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.4, 0.1, 0.2, 0.3])
    left = without(without(draw(p, 10, 3, 0, importance=compensation(p, sizes)), [1]), [3])
    remaining = np.array([0, 2])
    u, q = sizes[remaining] / sizes[remaining].sum(), p[remaining] / p[remaining].sum()
    for client, share, chance in zip(remaining, u, q):
        np.testing.assert_allclose(left.weights[left.asked == client], share / chance, rtol=1e-12)
    np.testing.assert_allclose(left.probabilities, [q[0], 0.0, q[1], 0.0], rtol=1e-12)
    refilled = within(left, math.inf)
    present = refilled.asked != NOBODY
    np.testing.assert_allclose(refilled.weights[present], left.weights[present], rtol=1e-12)


def test_within_never_exceeds_the_turns_and_fills_every_place_it_can():
    source = np.random.default_rng(0)
    for seed in range(20):
        p = source.dirichlet(np.ones(7))
        turns = source.integers(0, 30, 7)
        kept = within(draw(p, 20, 5, seed), turns)
        assert (kept.counts <= turns).all()
        assert kept.counts.sum() == min(100, turns.sum())


def test_within_leaves_alone_what_fits():
    schedule = draw(uniform(5), 20, 3, seed=0)
    same = within(schedule, schedule.counts)
    np.testing.assert_array_equal(same.asked, schedule.asked)
    np.testing.assert_array_equal(within(schedule, math.inf).asked, schedule.asked)


def test_within_counts_from_the_round_it_starts():
    schedule = draw(uniform(3), 20, 3, seed=0)
    kept = within(schedule, [0, 60, 60], start=6)
    np.testing.assert_array_equal(kept.asked[:5], schedule.asked[:5])
    assert (kept.asked[5:] != 0).all()
    assert (kept.asked[5:] != NOBODY).all()


def test_places_given_away_follow_the_probabilities_of_those_who_can_pay():
    p = np.array([0.4, 0.3, 0.2, 0.1])
    kept = within(draw(p, 4000, 5, seed=0), [0, math.inf, math.inf, math.inf])
    expected = 20_000 * np.array([0.0, 0.5, 1 / 3, 1 / 6])
    assert kept.counts[0] == 0
    assert (np.abs(kept.counts - expected) < 4 * np.sqrt(np.maximum(expected, 1))).all()


def test_within_compensates_for_those_who_can_still_pay():
    sizes, p = np.array([5.0, 3.0, 2.0]), np.array([0.2, 0.4, 0.4])
    schedule = draw(p, 40, 2, seed=1, importance=compensation(p, sizes))
    kept = within(schedule, [3, math.inf, math.inf])
    flat = kept.asked.ravel()
    dry = int(np.flatnonzero(flat == 0)[2])  # client 0's third and last turn
    full = (sizes / 10.0) / p
    rest = (sizes[1:] / 5.0) / (p[1:] / 0.8)
    for place, (client, weight) in enumerate(zip(flat, kept.weights.ravel())):
        assert weight == pytest.approx(full[client] if place <= dry else rest[client - 1], rel=1e-12)


def test_everyone_has_empty_places_when_budgets_end():
    kept = within(everyone(3, 5), [5, 2, 0])
    assert kept.counts.tolist() == [5, 2, 0]
    assert kept.round(3).clients.tolist() == [0]


def test_redraw_keeps_the_past_and_draws_the_rest_from_new_probabilities():
    schedule = draw([0.5, 0.5], 1000, 4, seed=0)
    new = redraw(schedule, [0.0, 0.25, 0.75], start=101)  # client 0 left, client 2 joined
    np.testing.assert_array_equal(new.asked[:100], schedule.asked[:100])
    later = np.bincount(new.asked[100:].ravel(), minlength=3)
    assert later[0] == 0
    assert abs(later[2] - 2700) < 4 * math.sqrt(3600 * 0.25 * 0.75)
    assert new.clients == 3
    assert new.counts.sum() == 4000


@pytest.mark.parametrize(
    ("call", "cause"),
    [
        (lambda: without(everyone(3, 2), [3]), "client 3"),
        (lambda: without(everyone(3, 2), [0], start=0), "start=0"),
        (lambda: within(everyone(3, 2), [1, 1]), "turns"),
        (lambda: within(everyone(2, 2), [1, -1]), r"turns\[1\]"),
        (lambda: within(everyone(2, 2), [1, math.nan]), "NaN"),
        (lambda: within(power_of_choice([1, 1], 2, 2, 1, 0), [1, 1]), "caps of its own"),
        (lambda: redraw(everyone(3, 2), [0.5, 0.5, 0.0], 1), "not drawn"),
        (lambda: redraw(draw(uniform(3), 2, 1, 0), [0.5, 0.5], 1), "left probability 0"),
    ],
)
def test_refused_with_the_cause(call, cause):
    with pytest.raises(BadInput, match=cause):
        call()
