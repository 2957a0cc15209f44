"""Shares and quantiles from noisy tables: against plain loops, and how often their intervals hold."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from sordino.server.counts import SURE, Counts, quantiles, share_of, worth_pooling

EDGES = np.linspace(0.0, 10.0, 21)


def test_settled_cells_add_up_and_their_noise_has_the_variance_that_is_stated():
    random = np.random.default_rng(0)
    truth = np.array([50.0, 30, 15, 4, 1, 0])
    weights = np.array([1.0, 1, 0, 0, 1, 0])
    found = []
    for _ in range(20_000):
        table = Counts.settled(truth + 7 * random.standard_normal(6), 100, 7.0)
        assert math.isclose(table.cells.sum(), 100, abs_tol=1e-9)
        found.append(weights @ table.cells)
    assert np.mean(found) == pytest.approx(81, abs=0.3)
    assert np.var(found) == pytest.approx(table.variance(weights), rel=0.03)


def test_the_interval_of_a_share_is_every_share_that_is_not_ruled_out():
    for found, records, variance in ((0.1, 200, 30.0), (0.0, 50, 0.0), (-0.03, 100, 9.0), (0.5, 1000, 4.0)):
        one = share_of(found, records, variance)
        grid = np.linspace(0, 1, 200_001)
        kept = grid[np.abs(found - grid) <= SURE * np.sqrt(grid * (1 - grid) / records + variance / records**2)]
        assert (one.low, one.high) == pytest.approx((kept[0], kept[-1]), abs=1e-5)


@pytest.mark.parametrize(("records", "deviation"), [(400, 3.0), (400, 20.0), (5000, 20.0)])
def test_intervals_hold_as_often_as_they_say(records, deviation):
    random = np.random.default_rng(1)
    levels, runs, held = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99), 400, np.zeros(8)
    truth = 5.0 + 1.2 * np.array([-2.3263, -1.6449, -0.6745, 0.0, 0.6745, 1.6449, 2.3263])
    for _ in range(runs):
        there = random.random(records) >= 0.08
        values = random.normal(5.0, 1.2, records)
        cells = np.where(there, np.searchsorted(EDGES, values, side="right"), len(EDGES) + 1)
        exact = np.bincount(cells, minlength=len(EDGES) + 3).astype(float)
        table = Counts.settled(exact + deviation * random.standard_normal(len(exact)), records, deviation)
        missing = table.share([len(EDGES) + 1])
        held[7] += missing.low <= 0.08 <= missing.high
        for k, one in enumerate(quantiles(table, EDGES, levels)):
            low, high = -np.inf if one.low is None else one.low, np.inf if one.high is None else one.high
            assert low <= one.value <= high or one.low is None
            held[k] += low <= truth[k] <= high
    assert (held / runs >= 0.95 - 2.6 * math.sqrt(0.95 * 0.05 / runs)).all(), held / runs


def test_quantiles_without_noise_are_the_quantiles():
    random = np.random.default_rng(2)
    values = random.uniform(0, 10, 100_000)
    exact = np.append(np.bincount(np.searchsorted(EDGES, values, side="right"), minlength=22), [0, 0]).astype(float)
    for level, one in zip((0.1, 0.5, 0.9), quantiles(Counts(exact, 100_000, 0.0), EDGES, (0.1, 0.5, 0.9))):
        assert one.value == pytest.approx(10 * level, abs=0.05)
        assert one.low <= 10 * level <= one.high


def test_values_outside_the_declared_range_leave_the_interval_open():
    exact = np.zeros(24)
    exact[0], exact[21] = 60, 40  # below and above, nothing between
    low, high = quantiles(Counts(exact, 100, 0.0), EDGES, (0.01, 0.99))
    assert (low.value, low.low) == (0.0, None)
    assert (high.value, high.high) == (10.0, None)


def test_an_empty_table_has_quantiles_that_say_nothing():
    for one in quantiles(Counts(np.zeros(24), 10, 50.0), EDGES, (0.01, 0.5, 0.99)):
        assert one.low is None or one.high is None


def test_the_sites_worth_pooling_are_the_best_of_all_subsets():
    random = np.random.default_rng(3)
    for _ in range(200):
        count = int(random.integers(1, 7))
        sizes = random.integers(10, 1000, count).tolist()
        deviations = np.exp(random.normal(2, 2, count)).tolist()

        def variance(some, sizes=sizes, deviations=deviations):
            total = sum(sizes[i] for i in some)
            return (sum(deviations[i] ** 2 for i in some) + total / 4) / total**2

        subsets = [s for k in range(1, count + 1) for s in itertools.combinations(range(count), k)]
        assert variance(worth_pooling(sizes, deviations)) == pytest.approx(min(map(variance, subsets)))
