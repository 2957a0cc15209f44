"""What released tables say: equal to plain computations without noise, and intervals that contain the truth with it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from score_federations import (
    EPSILONS,
    RECORDS,
    SITES,
    WORLDS,
    a_number,
    cell,
    coverage,
    four_classes,
    noise,
    released,
    two_classes,
)

import sordino as sd
from sordino.errors import BadInput
from sordino.privacy.cells import NO_CELL, Cells
from sordino.server import intervals
from sordino.server.scores import Scores, estimates, threshold


def quiet(site: str, cells: Cells, places: list[int] | np.ndarray) -> Scores:
    """The table of these records without any noise."""
    table = np.bincount([place for place in places if place != NO_CELL], minlength=cells.count).astype(float)
    return Scores(site, table, float(table[cells.right].sum()), len(places), 0.0, 0.0)


def by_name(found) -> dict:
    return {one.metric: one for one in found}


@pytest.fixture
def two_sites():
    """Logits and labels of two sites with unlike records."""
    rng = np.random.default_rng(3)
    found = []
    for count, shift in ((300, 0.4), (120, -0.7)):
        labels = (rng.random(count) < 0.3).astype(int)
        logits = rng.standard_normal((count, 2)) + 1.2 * np.eye(2)[labels] + [0.0, shift]
        found.append((logits, labels))
    return found


class TestPlainly:
    """Without noise every estimate is the number that a plain loop over records finds."""

    def test_cells_of_two_classes(self, two_sites):
        cells = Cells("binary", 10)
        logits, labels = two_sites[0]
        for (zero, one), label, place in zip(logits, labels, cells.place(logits, labels)):
            chance = 1 / (1 + math.exp(zero - one))
            assert place == label * 10 + min(int(10 * chance), 9)
            assert cells.right[place] == ((chance >= 0.5) == (label == 1))

    def test_cells_of_more_classes_and_of_numbers(self):
        rng = np.random.default_rng(0)
        outputs, labels = rng.standard_normal((50, 5)), rng.integers(0, 5, 50)
        assert Cells("classes", 5).place(outputs, labels).tolist() == [
            5 * label + max(range(5), key=row.__getitem__) for row, label in zip(outputs.tolist(), labels.tolist())
        ]
        numbers = Cells("regression", 4, width=10.0)
        assert numbers.place([0, 4, 6, -1, 400, -400], [0, 0, 0, 0, 0, 0]).tolist() == [2, 2, 3, 1, 3, 0]

    def test_a_record_that_cannot_be_judged_has_no_cell(self):
        cells = Cells("binary", 2)
        outputs = [[0, 1], [np.nan, 1], [0, np.inf], [0, 1], [0, 1], [-1e308, 1e308]]
        assert cells.place(outputs, [1, 1, 1, 2, np.nan, 1]).tolist() == [3, -1, -1, -1, -1, 3]
        assert Cells("regression", 2).place([np.nan, 0.5], [0, 0]).tolist() == [-1, 1]

    def test_a_cell_depends_on_its_record_alone(self, two_sites):
        logits, labels = two_sites[0]
        cells = Cells("binary", 20)
        together = cells.place(logits.astype(np.float32), labels)
        alone = [int(cells.place(row[None].astype(np.float32), [label])[0]) for row, label in zip(logits, labels)]
        assert together.tolist() == alone

    def test_two_classes(self, two_sites):
        cells = Cells("binary", 10)
        places = [cells.place(*one) for one in two_sites]
        found = by_name(estimates([quiet(name, cells, p) for name, p in zip(("north", "south"), places)], cells))
        records = [(place // 10, place % 10) for one in places for place in one.tolist()]
        right = [(label == 1) == (bin >= 5) for label, bin in records]
        rates = [np.mean([(p // 10 == 1) == (p % 10 >= 5) for p in one.tolist()]) for one in places]
        assert found["accuracy"].value == pytest.approx(np.mean(right))
        assert found["mean_accuracy"].value == pytest.approx(np.mean(rates))
        assert found["accuracy/north"].value == pytest.approx(rates[0])
        recalls = [np.mean([ok for ok, (label, _) in zip(right, records) if label == c]) for c in (0, 1)]
        assert [found["recall/0"].value, found["recall/1"].value] == pytest.approx(recalls)
        assert found["balanced_accuracy"].value == pytest.approx(np.mean(recalls))
        ones, zeros = ([bin for label, bin in records if label == c] for c in (1, 0))
        wins = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in itertools.product(ones, zeros)]
        assert found["auc"].value == pytest.approx(np.mean(wins))
        shares, error = np.array([300, 120]) / 420, 1 - np.array(rates)
        plug_in = sum(p * (e - shares @ error) ** 2 for p, e in zip(shares, error))
        bias = sum(p * (1 - p) * e * (1 - e) / m for p, e, m in zip(shares, error, (300, 120)))
        assert found["psi"].value == pytest.approx(max(plug_in - bias, 0.0))
        gaps = [sum(label - (bin + 0.5) / 10 for label, bin in records if bin == b) for b in range(10)]
        calibration = found["calibration_error"]
        assert calibration.low <= np.abs(gaps).sum() / 420 <= calibration.high

    def test_more_classes(self):
        rng = np.random.default_rng(1)
        cells, labels = Cells("classes", 3), rng.integers(0, 3, 400)
        outputs = rng.standard_normal((400, 3)) + np.eye(3)[labels]
        found = by_name(estimates([quiet("one", cells, cells.place(outputs, labels))], cells))
        recalls = [np.mean(outputs[labels == c].argmax(1) == c) for c in range(3)]
        assert [found[f"recall/{c}"].value for c in range(3)] == pytest.approx(recalls)
        assert found["balanced_accuracy"].value == pytest.approx(np.mean(recalls))
        assert found["psi"].value == found["psi"].high == 0.0  # one site differs from nobody

    def test_numbers_are_known_to_half_a_bin(self):
        rng = np.random.default_rng(2)
        cells, residuals = Cells("regression", 40, width=8.0), 8.0 * 0.1 * rng.standard_normal(2000)
        found = by_name(estimates([quiet("one", cells, cells.place(residuals, np.zeros(2000)))], cells))
        plain = {"mean": np.abs(residuals).mean(), "root_mean_squared": np.sqrt((residuals**2).mean())}
        plain["median"] = np.median(np.abs(residuals))
        for name, value in plain.items():
            one = found[f"{name}_absolute_error" if name != "root_mean_squared" else "root_mean_squared_error"]
            assert abs(one.value - value) <= 8.0 / 40
            assert one.low <= value <= one.high

    def test_null_records_count_as_not_right_and_in_no_class(self):
        cells = Cells("classes", 2)
        found = by_name(estimates([quiet("one", cells, [3] * 60 + [0] * 20 + [NO_CELL] * 20)], cells))
        assert found["accuracy"].value == pytest.approx(0.8)
        assert found["recall/0"].value == found["recall/1"].value == 1.0


class TestIntervals:
    @pytest.mark.parametrize(("count", "total"), [(0, 20), (3, 20), (20, 20), (117, 600)])
    def test_without_noise_a_proportion_is_clopper_and_pearsons(self, count, total):
        exact = stats.binomtest(count, total).proportion_ci(0.95, method="exact")
        assert intervals.proportion(count, total, 0.0, 0.95) == pytest.approx((exact.low, exact.high), abs=1e-7)

    @pytest.mark.parametrize("deviation", [0.5, 2.5, 50.0])
    @pytest.mark.parametrize("truth", [0.0, 0.001, 0.02, 0.3, 0.97])
    def test_a_proportion_covers_exactly(self, truth, deviation):
        """Coverage by integration over counts and noise, not by draws: 95 % or more, whatever the truth."""
        total = 50
        noises = stats.norm.ppf((np.arange(400) + 0.5) / 400) * deviation
        # limits grow with the count, so that the counts whose interval holds the truth are an interval too
        low, high = (_edge(truth, total, deviation, side) for side in (1, 0))
        counts = np.arange(total + 1)[:, None] + noises
        held = ((counts >= low) & (counts <= high)).mean(1)
        assert stats.binom.pmf(np.arange(total + 1), total, truth) @ held > 0.947

    def test_ratios_of_what_may_be_absent_are_unknown(self):
        rng = np.random.default_rng(0)
        for _ in range(50):
            value, interval = intervals.ratio(40 * rng.standard_normal(10), np.arange(10) < 5, np.ones(10), 40.0, 0.95)
            assert 0.0 <= interval[0] <= value <= interval[1] <= 1.0
        counts = np.array([1.0, 2.0])
        assert intervals.ratio(counts, np.array([1.0, 0.0]), np.ones(2), 3.0, 0.95)[1] == (0.0, 1.0)
        assert intervals.pairs(-counts, -counts, np.eye(2), 1.0, 0.95) == (0.5, (0.0, 1.0))

    def test_estimates_outside_their_range_still_have_an_interval(self):
        cells = Cells("binary", 4)
        for sign in (-1, 1):
            wild = Scores("one", np.full(8, sign * 900.0), sign * 900.0, 50, 30.0, 30.0)
            for one in estimates([wild, Scores("two", wild.table, -wild.correct, 50, 30.0, 30.0)], cells):
                assert 0.0 <= one.low <= one.value <= one.high <= 1.0
                assert one.high - one.low > 0.01, one
        low, high = intervals.proportion(-900.0, 50, 30.0, 0.95)
        assert (low, high) == intervals.proportion(0.0, 50, 30.0, 0.95)
        assert high > 0.5

    def test_spread_of_equally_noisy_sites_is_a_noncentral_chi_square(self):
        """For n equal sites, nQ/w is χ²(n − 1) with noncentrality nΨ/w: the limits by SciPy's."""
        values = np.array([0.1, 0.3, 0.25, 0.5, 0.2])
        value, (low, high) = intervals.spread(values, np.full(5, 0.004), np.full(5, 0.2), 0.95, 0)
        seen = values.var()
        assert value == pytest.approx(seen - 0.004 * 4 / 5)
        scale = 5 / 0.004
        assert stats.ncx2.sf(scale * seen, 4, scale * low) == pytest.approx(0.025, abs=0.005)
        assert stats.ncx2.cdf(scale * seen, 4, scale * high) == pytest.approx(0.025, abs=0.005)

    def test_the_noise_of_a_count_at_epsilon_one(self):
        """600 held-out records, ten releases at ε = 1: 2 points a site, 0.6 over ten sites."""
        deviation = sd.privacy.calibrate(1.0, 1e-5, 1.0, 10, sampling="full")
        assert 100 * deviation / 600 == pytest.approx(2.0, abs=0.05)
        assert 100 * deviation * 10**0.5 / 6000 == pytest.approx(0.62, abs=0.01)


def _edge(truth: float, total: int, deviation: float, side: int) -> float:
    """The count at which the limit ``side`` of a proportion's interval passes the truth."""
    low, high = -8 * deviation - 1, total + 8 * deviation + 1
    for _ in range(25):
        middle = (low + high) / 2
        limit = intervals.proportion(middle, total, deviation, 0.95)[side]
        below = limit < truth if side == 1 else limit <= truth
        low, high = (middle, high) if below else (low, middle)
    return high if side == 1 else low


class TestThreshold:
    def test_the_best_edge_and_a_wanted_recall(self):
        cells = Cells("binary", 10)
        table = np.zeros((2, 10))
        table[0, :6], table[1, 3:] = 1000.0, 100.0
        scores = [Scores("one", table.ravel(), 5000.0, 6700, 1.0, 1.0)]
        best = threshold(scores, cells)
        balanced = {edge / 10: table[1, edge:].sum() / 700 - table[0, edge:].sum() / 6000 for edge in range(11)}
        assert best.edge == max(balanced, key=balanced.get) == 0.6
        assert (best.recall.value, best.false_positive_rate.value) == pytest.approx((4 / 7, 0.0))
        wanted = threshold(scores, cells, 0.9)
        assert wanted.edge == 0.3
        assert (wanted.recall.value, wanted.false_positive_rate.value) == pytest.approx((1.0, 0.5))
        assert threshold(scores, cells, 0.5).edge == 0.6

    def test_of_tables_that_say_nothing_it_is_one_half(self):
        scores = [Scores("one", np.full(20, -3.0), 10.0, 50, 40.0, 40.0)]
        found = threshold(scores, Cells("binary", 10))
        assert found.edge == 0.5
        assert (found.recall.low, found.recall.high) == (0.0, 1.0)

    def test_intervals_hold_at_the_edge_that_was_chosen(self):
        world, rng, runs = two_classes(4), np.random.default_rng(8), 150
        truth = world.cells.rows(world.chances.mean(0))
        held = np.zeros(2)
        for _ in range(runs):
            found = threshold(released(world, [5000] * 4, [noise(3.0)] * 4, rng), world.cells)
            rates = truth[:, round(10 * found.edge) :].sum(1) / truth.sum(1)
            held += [one.low <= rate <= one.high for one, rate in zip((found.false_positive_rate, found.recall), rates)]
        assert min(held) >= least_hits(runs, 2)

    @pytest.mark.parametrize("goal", ["best", 0.0, 1.5])
    def test_goals_that_mean_nothing(self, goal):
        with pytest.raises(BadInput, match="recall"):
            threshold([Scores("one", np.ones(4), 2.0, 4, 1.0, 1.0)], Cells("binary", 2), goal)


class TestRefused:
    @pytest.mark.parametrize(
        ("scores", "named"),
        [
            ([], "no site"),
            ([Scores("one", np.ones(3), 1.0, 4, 1.0, 1.0)], "not 4 finite"),
            ([Scores("one", np.full(4, np.nan), 1.0, 4, 1.0, 1.0)], "not 4 finite"),
            ([Scores("one", np.ones(4), 1.0, 0, 1.0, 1.0)], "at least one record"),
            ([Scores("one", np.ones(4), 1.0, 4, -1.0, 1.0)], "not negative"),
        ],
    )
    def test_what_no_site_can_have_released(self, scores, named):
        with pytest.raises(BadInput, match=named):
            estimates(scores, Cells("binary", 2))

    @pytest.mark.parametrize(("kind", "size", "width"), [("ranks", 2, 1), ("binary", 3, 1), ("regression", 2, 0)])
    def test_cells(self, kind, size, width):
        with pytest.raises(BadInput, match=r"kind|even|width"):
            Cells(kind, size, width)

    def test_outputs_of_another_number(self):
        with pytest.raises(BadInput, match="3 outputs"):
            Cells("binary", 2).place(np.zeros((4, 3)), np.zeros(4))


def least_hits(runs: int, cells: int) -> int:
    """The fewest hits of ``runs`` that do not contradict 95 %, with an error of 1 % over all ``cells`` (Bonferroni)."""
    return int(stats.binom.ppf(0.01 / cells, runs, 0.95))


HARD = {
    "noise larger than counts": (two_classes, [50] * 4, [noise(0.3)] * 4),
    "little noise": (two_classes, [50] * 4, [noise(8.0)] * 4),
    "nearly all right": (lambda sites: two_classes(sites, 0.3, 0.0, 3.3), [600] * 2, [noise(8.0)] * 2),
    "unequal sites, unequal noise": (two_classes, [50, 600, 2000, 300], [noise(e) for e in (8.0, 0.3, 3.0, 1.0)]),
    "four classes": (four_classes, [600] * 4, [noise(3.0)] * 4),
    "a number": (a_number, [600] * 4, [noise(3.0)] * 4),
}


@pytest.mark.parametrize("case", HARD)
def test_intervals_contain_the_truth(case):
    make, records, deviations = HARD[case]
    world, runs = mixed(make(len(records)), records), 120
    found = coverage(world, tuple(world.truth), records, deviations, runs, seed=1)
    for metric, (hits, _) in found.items():
        assert hits >= least_hits(runs, 40), (metric, hits)


def mixed(world, records):
    """The world's truth for sites of unequal size."""
    if len(set(records)) == 1:
        return world
    pooled = world.cells.rows(np.average(world.chances, axis=0, weights=records))
    right = world.cells.rows(world.cells.right)
    rates = (world.chances * world.cells.right).sum(1)
    recalls = (pooled * right).sum(1) / pooled.sum(1)
    accuracy = np.average(rates, weights=records)
    wins = np.tri(world.cells.size, k=-1) + 0.5 * np.eye(world.cells.size)
    truth = {"accuracy": accuracy, "mean_accuracy": rates.mean(), "accuracy/0": rates[0], "recall/0": recalls[0]}
    truth |= {"recall/1": recalls[1], "balanced_accuracy": recalls.mean()}
    truth |= {"auc": pooled[1] @ wins @ pooled[0] / pooled[1].sum() / pooled[0].sum()}
    return replace(world, truth=truth | {"psi": np.average((rates - accuracy) ** 2, weights=records)})


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
def test_coverage_of_every_cell(name):
    """400 runs a cell: no cell is significantly below 95 %, at 1 % over all cells of all worlds."""
    count = len(EPSILONS) * len(RECORDS) * len(SITES) * sum(len(metrics) for _, metrics in WORLDS.values())
    for epsilon, records, sites in itertools.product(EPSILONS, RECORDS, SITES):
        for metric, (hits, _) in cell(name, epsilon, records, sites, 400).items():
            assert hits >= least_hits(400, count), (metric, epsilon, records, sites, hits)
