"""What released tables of scores say about a model: estimates whose intervals include noise and sampling.

The truth that an interval is about is a value in the populations that held-out records are drawn from, site by site;
"all records" means these populations mixed in proportion to the sites' numbers m_i of held-out records. Everything
here is computed from releases and public numbers: it costs nothing, however often it is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sordino.errors import BadInput
from sordino.privacy.cells import Cells
from sordino.server import intervals
from sordino.server.intervals import Array

CLEAR = 5.0
"""Deviations by which a class's count must exceed 0 for its recall to be averaged as a nearly normal number."""


@dataclass(frozen=True)
class Scores:
    """What one site released about one model: the table, how many were right, and how noisy both are."""

    site: str
    table: Array
    """Noisy counts, one per cell (``privacy.cells.Cells``)."""
    correct: float
    """The noisy number of records that the model gets right; not used for regression."""
    records: int
    """m_i, the public number of held-out records; of units, where each adds one in all."""
    table_deviation: float
    """Deviation of the noise of every cell, in counts."""
    correct_deviation: float


@dataclass(frozen=True)
class Estimate:
    """A metric with its interval: low ≤ value ≤ high."""

    metric: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Threshold:
    """Class 1 is answered where P(class 1) ≥ ``edge``; what that gives."""

    edge: float
    recall: Estimate
    false_positive_rate: Estimate


def estimates(scores: Sequence[Scores], cells: Cells, level: float = 0.95, seed: int = 0) -> list[Estimate]:
    """Every metric that the tables of these sites hold, each with an interval of this level.

    For classes: ``accuracy`` (share of all records that are right; one that cannot be read is not), ``mean_accuracy``
    (unweighted mean over sites), ``accuracy/SITE``, ``recall/CLASS`` (share of all records of the class that are
    right), ``balanced_accuracy`` (mean of the recalls) and ``psi`` = Σ p_i (e_i − e)², p_i = m_i/Σm, e_i the error
    rate. For two classes also ``auc`` (chance that a record of class 1 is in a higher bin than one of class 0; a half
    if in the same) and ``calibration_error`` (Σ_b |right share − mean score| over bins, weighted by their records).
    For regression ``mean_absolute_error``, ``root_mean_squared_error`` and ``median_absolute_error`` in the target's
    unit; an error larger than the declared range counts as large as the range.
    """
    table, noise = _pooled(scores, cells, level)
    if cells.kind == "regression":
        return _errors(table, cells, noise, level)
    found = _accuracies(scores, level)
    rows = cells.rows(table)
    right = cells.rows(cells.right)
    for label, (row, hits) in enumerate(zip(rows, right)):
        found.append(_made(f"recall/{label}", *intervals.ratio(row, hits, np.ones(len(row)), noise, level)))
    if cells.kind == "binary":
        half = 0.5 * (right[1][:, None] + right[0])
        order = np.tri(cells.size, k=-1) + 0.5 * np.eye(cells.size)
        found.append(_made("balanced_accuracy", *intervals.pairs(rows[1], rows[0], half, noise, level)))
        found.append(_made("auc", *intervals.pairs(rows[1], rows[0], order, noise, level)))
        found.append(_calibration(rows, sum(one.records for one in scores), noise, level, seed))
    else:
        found.append(_balanced(rows, right, noise, level))
    return [*found, _psi(scores, level, seed)]


def threshold(scores: Sequence[Scores], cells: Cells, goal: str | float = "balanced", level: float = 0.95) -> Threshold:
    """The bin edge from which on class 1 is answered, for two classes: post-processing of released tables.

    ``balanced`` maximises the estimated balanced accuracy; a number is a wanted recall of class 1, and the highest edge
    up to which all are estimated to reach it is taken. The intervals hold for whichever edge is chosen: each has the
    level 1 − α/(B + 1), as there are B + 1 edges. Where a class is not clearly present the edge is 1/2.
    """
    if cells.kind != "binary":
        raise BadInput(f"a threshold needs two classes, not cells of kind {cells.kind!r}")
    if isinstance(goal, str) and goal != "balanced":
        raise BadInput(f"goal = {goal!r} is unknown: use 'balanced' or a wanted recall in (0, 1]")
    if not isinstance(goal, str) and not 0.0 < goal <= 1.0:
        raise BadInput(f"goal = {goal!r} must be a recall in (0, 1], or 'balanced'")
    table, noise = _pooled(scores, cells, level)
    (zeros, ones), size = cells.rows(table), cells.size
    each = 1.0 - (1.0 - level) / (size + 1)
    edge = size // 2
    if min(zeros.sum(), ones.sum()) > intervals.normal(level) * noise * np.sqrt(size):
        recall, false = (np.append(row[::-1].cumsum()[::-1], 0.0) / row.sum() for row in (ones, zeros))
        reached = np.minimum.accumulate(recall[1:]) >= goal if not isinstance(goal, str) else None
        edge = int(np.argmax(recall - false)) if reached is None else int(reached.sum())
    above = (np.arange(size) >= edge).astype(np.float64)
    return Threshold(
        edge / size,
        _made("recall/1", *intervals.ratio(ones, above, np.ones(size), noise, each)),
        _made("false_positive_rate", *intervals.ratio(zeros, above, np.ones(size), noise, each)),
    )


def _pooled(scores: Sequence[Scores], cells: Cells, level: float) -> tuple[Array, float]:
    """The sum of all sites' tables and the deviation of its noise; refuses what no site can have released."""
    if not scores:
        raise BadInput("no site has released scores: at least one is needed")
    if not 0.0 < level < 1.0:
        raise BadInput(f"level = {level} must lie between 0 and 1: 0.95 is usual")
    for one in scores:
        if np.shape(one.table) != (cells.count,) or not np.isfinite(one.table).all() or not np.isfinite(one.correct):
            raise BadInput(
                f"the scores of {one.site!r} are not {cells.count} finite counts: the sites need equal cells"
            )
        deviations = (one.table_deviation, one.correct_deviation)
        if one.records < 1 or not np.isfinite(deviations).all() or min(deviations) < 0:
            raise BadInput(f"the scores of {one.site!r} need at least one record, and deviations that are not negative")
    table: Array = np.sum([one.table for one in scores], axis=0)
    return table, float(np.sqrt(sum(one.table_deviation**2 for one in scores)))


def _made(metric: str, value: float, interval: intervals.Interval) -> Estimate:
    low, high = interval
    return Estimate(metric, min(max(value, low), high), low, high)


def _accuracies(scores: Sequence[Scores], level: float) -> list[Estimate]:
    """The count ``correct`` over m, of all records, as a mean over sites, and of every site."""
    counts, deviations = (np.array([getattr(one, name) for one in scores]) for name in ("correct", "correct_deviation"))
    totals = np.array([one.records for one in scores], dtype=np.float64)

    def share(metric: str, count: float, total: int, deviation: float) -> Estimate:
        value = float(np.clip(count / total, 0.0, 1.0))
        return _made(metric, value, intervals.proportion(count, total, deviation, level))

    everyone = share("accuracy", float(counts.sum()), int(totals.sum()), float(np.sqrt((deviations**2).sum())))
    mean = Estimate("mean_accuracy", everyone.value, everyone.low, everyone.high)
    if len(set(totals)) > 1:
        value = float(np.clip((counts / totals).mean(), 0.0, 1.0))
        mean = _made("mean_accuracy", value, intervals.mean_of_proportions(counts, totals, deviations, level))
    each = [share(f"accuracy/{one.site}", one.correct, one.records, one.correct_deviation) for one in scores]
    return [everyone, mean, *each]


def _balanced(rows: Array, right: Array, noise: float, level: float) -> Estimate:
    """The mean of the recalls r_c of k classes.

    Classes of at least ``CLEAR`` deviations: r ± √Σ (r_c − limit_c)²/k (Zou and Donner 2008), their errors being
    independent. The limits of all others are added up, each at the level 1 − α/(their number); if there are both sorts,
    each sort gets half of α.
    """
    classes, size = rows.shape
    clear = rows.sum(1) >= CLEAR * noise * np.sqrt(size)
    sorts = int(clear.any()) + int((~clear).any())
    others = max(int((~clear).sum()), 1)
    value, low, high, squares = 0.0, 0.0, 0.0, np.zeros(2)
    for row, hits, normal in zip(rows, right, clear):
        span = (-1.0, 2.0) if normal else (0.0, 1.0)
        part = 1.0 - (1.0 - level) / (sorts if normal else sorts * others)
        found, limits = intervals.ratio(row, hits, np.ones(size), noise, part, span)
        value += found
        low, high = (low + found, high + found) if normal else (low + limits[0], high + limits[1])
        squares += (np.array(limits) - found) ** 2 if normal else 0.0
    ends = (low - float(np.sqrt(squares[0])), high + float(np.sqrt(squares[1])))
    mean, lowest, highest = (float(np.clip(number / classes, 0.0, 1.0)) for number in (value, *ends))
    return _made("balanced_accuracy", mean, (lowest, highest))


def _calibration(rows: Array, records: int, noise: float, level: float, seed: int) -> Estimate:
    """Σ_b |D_b|/m with D_b = (1 − c_b) x_b − c_b y_b, c_b the bin's middle, x_b and y_b its records of class 1 and 0.

    |Σ|D̃_b| − Σ|D_b|| ≤ Σ|D̃_b − D_b|, whose quantile is simulated; and the mean score of a bin is known to half a bin.
    """
    zeros, ones = rows
    size = len(ones)
    middles = (np.arange(size) + 0.5) / size
    gaps = (1.0 - middles) * ones - middles * zeros
    weights = np.stack([1.0 - middles, -middles], axis=1)
    drawn = np.array([intervals.sampled(np.array(two), w, noise) for two, w in zip(zip(ones, zeros), weights)])
    variances = noise**2 * (weights**2).sum(1) + drawn
    draws = np.random.default_rng(seed).standard_normal((intervals.DRAWS // 4, size))
    reach = float(np.quantile(np.abs(draws) @ np.sqrt(variances), level))
    total = min(float(np.abs(gaps).sum()), float(records))
    value = float(np.sqrt(np.maximum(gaps**2 - variances, 0.0)).sum()) / records
    low, high = (total - reach) / records - 0.5 / size, (total + reach) / records + 0.5 / size
    return _made("calibration_error", value, (min(max(low, 0.0), 1.0), min(max(high, 0.0), 1.0)))


def _psi(scores: Sequence[Scores], level: float, seed: int) -> Estimate:
    """Ψ of the error rates: ẽ_i = 1 − c̃_i/m_i has the variance a_i(1 − a_i)/m_i + s_i²/m_i²."""
    totals = np.array([one.records for one in scores], dtype=np.float64)
    rates = np.array([one.correct for one in scores]) / totals
    inside = np.clip(rates, 0.0, 1.0)
    noise = (np.array([one.correct_deviation for one in scores]) / totals) ** 2
    variances = inside * (1.0 - inside) / totals + noise
    return _made("psi", *intervals.spread(1.0 - rates, variances, totals / totals.sum(), level, seed))


def _errors(table: Array, cells: Cells, noise: float, level: float) -> list[Estimate]:
    """Means and median of the absolute residual |r| from its bins; a binned value is known to half a bin, 1/B.

    Both means move by at most half a bin when every residual moves by as much (Minkowski).
    """
    size, width = cells.size, cells.width
    middles = np.abs((np.arange(size) + 0.5) * 2.0 / size - 1.0)
    half, ones = 1.0 / size, np.ones(size)

    def wider(metric: str, value: float, low: float, high: float) -> Estimate:
        low, high = max(low - half, 0.0), min(high + half, 1.0)
        return _made(metric, value * width, (low * width, high * width))

    mean, limits = intervals.ratio(table, middles, ones, noise, level)
    square, squares = intervals.ratio(table, middles**2, ones, noise, level)
    roots = [float(np.sqrt(number)) for number in (square, *squares)]
    return [
        wider("mean_absolute_error", mean, *limits),
        wider("root_mean_squared_error", roots[0], roots[1], roots[2]),
        _median(table, cells, noise, level),
    ]


def _median(table: Array, cells: Cells, noise: float, level: float) -> Estimate:
    """The median of |r|, from sign tests at the bins' edges t: Σ_{|r| < t} x̃ − ½ Σ x̃ has mean 0 at the median.

    Its variance is at most (s² B + Σ x)/4. From either end edges are passed as long as the test says that the median
    lies beyond them, which needs no correction for how many there are.
    """
    half = cells.size // 2
    folded = table[half:] + table[:half][::-1]
    gaps = folded.cumsum() - 0.5 * folded.sum()
    drawn = float(intervals.sampled(table, np.full(cells.size, 0.5), noise))
    reach = intervals.normal(level) * np.sqrt(noise**2 * cells.size / 4.0 + drawn)
    low = int(np.argmax(gaps > -reach)) if (gaps > -reach).any() else half - 1
    passed = (gaps <= reach)[::-1]
    high = half - int(np.argmax(passed)) if passed.any() else 0
    high = min(max(high + 1, low + 1), half)
    crossed = int(np.argmax(gaps >= 0.0)) if (gaps >= 0.0).any() else half - 1
    unit = cells.width / half
    return _made("median_absolute_error", (crossed + 0.5) * unit, (low * unit, high * unit))
