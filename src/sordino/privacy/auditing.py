"""Auditing: what an attacker can prove about a mechanism by running it, against what the ledger claims.

The game. Each of m canaries is included by a fair coin; the mechanism runs once; every canary gets a score. A lower
bound on ε follows from how well scores tell included canaries from excluded ones. If it exceeds the claim, the claim is
false. Two bounds: an assumption-free one from a single run (Steinke, Nasr and Jagielski 2023), and a sharper one for
mechanisms whose scores have Gaussian shape, which also notices noise that is only a little too small.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from sordino.errors import BadInput

Mechanism = Callable[[NDArray[np.bool_]], NDArray[np.float64]]
"""From who is included to a score for every canary, which should be higher, or lower, for included ones."""


@dataclass(frozen=True)
class Verdict:
    """What an audit found. ``passed`` is False when a bound, true with this confidence, exceeds the claimed ε."""

    claimed: float
    one_run: float
    gaussian: float
    canaries: int
    confidence: float

    @property
    def passed(self) -> bool:
        """Whether neither bound contradicts the claim."""
        return max(self.one_run, self.gaussian) <= self.claimed


def audit(
    mechanism: Mechanism, claimed: float, delta: float, canaries: int = 200_000, seed: int = 0, confidence: float = 0.99
) -> Verdict:
    """Run ``mechanism`` once on canaries included by fair coins, and bound its ε from below.

    Parameters
    ----------
    claimed: ε that the ledger says the run costs, at this ``delta``.
    confidence: probability with which each bound is below the true ε.
    """
    if not claimed > 0 or not 0 < delta < 1 or canaries < 100:
        raise BadInput(f"an audit needs ε > 0, δ in (0, 1) and 100 canaries: got {claimed}, {delta}, {canaries}")
    included = np.random.default_rng(seed).random(canaries) < 0.5
    scores = np.asarray(mechanism(included), dtype=np.float64)
    if scores.shape != included.shape or not np.isfinite(scores).all():
        raise BadInput(f"the mechanism must give a finite score for each of {canaries} canaries, got {scores.shape}")
    spare = max(10, canaries // 100)  # which way scores point is learnt from a few canaries that then sit out
    gap = scores[:spare][included[:spare]].mean() - scores[:spare][~included[:spare]].mean()
    scores, included = (scores if gap >= 0 else -scores)[spare:], included[spare:]
    return Verdict(
        claimed,
        one_run_bound(scores, included, claimed, delta, confidence),
        gaussian_bound(scores, included, delta, confidence),
        canaries,
        confidence,
    )


def one_run_bound(
    scores: NDArray[np.float64], included: NDArray[np.bool_], claimed: float, delta: float, confidence: float
) -> float:
    """ε refuted by one run: the top and bottom scores are guessed in and out, the rest abstains.

    How many to guess is settled by the claim alone, before looking at the scores.
    """
    guesses = _guesses(len(scores), claimed, delta, 1 - confidence)
    order = np.argsort(scores)
    correct = int(included[order[-guesses // 2 :]].sum() + (~included[order[: guesses // 2]]).sum())
    return _largest_refuted(len(scores), guesses, correct, delta, 1 - confidence)


def one_run_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Probability of so many correct guesses if the mechanism were (ε, δ)-DP (Theorem 5.2 of Steinke et al.).

    P[Binomial(r, e^ε/(1+e^ε)) ≥ v] + 2 m δ max_i P[v > Binomial ≥ v−i] / i.
    """
    q = 1 / (1 + math.exp(-epsilon))
    tail = stats.binom.sf(correct - 1, guesses, q)
    if delta == 0 or correct == 0:
        return min(1.0, float(tail))
    # every i up to 64, then a 1 % grid: between grid points the larger mass over the smaller i is an upper bound
    grid = (
        np.arange(64, max(65, correct))
        if correct < 256
        else np.geomspace(64, correct, 2 + int(100 * math.log(correct)))
    )
    ends = np.unique(np.concatenate([np.arange(1, 65), np.round(grid).astype(int), [correct]]))
    ends = ends[ends <= correct]
    below = stats.binom.cdf(correct - 1, guesses, q) - stats.binom.cdf(correct - 1 - ends, guesses, q)
    starts = np.concatenate([[1], np.minimum(ends[:-1] + 1, ends[1:])])
    return min(1.0, float(tail + 2 * canaries * delta * np.max(below / starts)))


def gaussian_bound(scores: NDArray[np.float64], included: NDArray[np.bool_], delta: float, confidence: float) -> float:
    """ε of the Gaussian mechanism whose separation μ the scores prove.

    Two thresholds, a third of the way in from the medians of included and excluded, each give error rates with
    Clopper–Pearson bounds; μ ≥ Φ⁻¹(1 − FPR) − Φ⁻¹(FNR). The sharper of the two counts, at half the error each.
    Assumes that scores are Gaussian with a shift, which the tests check against the real client step.
    """
    middle = np.median(scores[included]), np.median(scores[~included])
    best = 0.0
    for threshold in (0.65 * middle[0] + 0.35 * middle[1], 0.35 * middle[0] + 0.65 * middle[1]):
        false_positive = _upper(int((scores[~included] > threshold).sum()), int((~included).sum()), confidence)
        false_negative = _upper(int((scores[included] <= threshold).sum()), int(included.sum()), confidence)
        best = max(best, float(stats.norm.isf(false_positive) + stats.norm.isf(false_negative)))
    return gaussian_epsilon(best, delta)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """ε(δ) of a mechanism that is exactly μ-GDP: δ = Φ(−ε/μ + μ/2) − e^ε Φ(−ε/μ − μ/2)."""
    if mu <= 0:
        return 0.0

    def excess(epsilon: float) -> float:
        second = math.exp(epsilon + float(stats.norm.logcdf(-epsilon / mu - mu / 2)))
        return float(stats.norm.cdf(-epsilon / mu + mu / 2)) - second - delta

    if excess(0.0) <= 0:
        return 0.0
    top = mu * mu / 2 + mu * float(stats.norm.isf(delta)) + 1.0
    return float(optimize.brentq(excess, 0.0, top, xtol=1e-9))


def _upper(errors: int, trials: int, confidence: float) -> float:
    """Clopper–Pearson upper bound of an error rate, at a quarter of the allowed error."""
    return float(stats.beta.ppf(1 - (1 - confidence) / 4, errors + 1, max(1, trials - errors)))


def _guesses(canaries: int, epsilon: float, delta: float, error: float) -> int:
    """How many canaries to guess so that a Gaussian mechanism with just the claimed ε would be refuted most."""
    mu = optimize.brentq(lambda m: gaussian_epsilon(m, delta) - epsilon, 1e-6, 10 * (epsilon + 1) ** 0.5 + 10)
    best, chosen = -1.0, canaries
    for share in (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0):
        guesses = max(2, 2 * int(canaries * share / 2))
        correct = _expected_correct(guesses, share, mu)
        value = _largest_refuted(canaries, guesses, correct, delta, error)
        if value > best:
            best, chosen = value, guesses
    return chosen


def _expected_correct(guesses: int, share: float, mu: float) -> int:
    """Correct guesses, less two deviations, when scores are an even mixture of N(0, 1) and N(μ, 1)."""
    cut = optimize.brentq(lambda t: stats.norm.sf(t) + stats.norm.sf(t - mu) - share, -12, mu + 12)
    accuracy = float(stats.norm.sf(cut - mu)) / share
    return int(guesses * accuracy - 2 * math.sqrt(guesses * accuracy * (1 - accuracy)))


def _largest_refuted(canaries: int, guesses: int, correct: int, delta: float, error: float) -> float:
    """The largest ε whose p-value is below ``error``."""

    def p_value(epsilon: float) -> float:
        return one_run_p_value(canaries, guesses, correct, epsilon, delta)

    if p_value(0.0) > error:
        return 0.0
    low, high = 0.0, 1.0
    while p_value(high) <= error and high < 100:
        low, high = high, 2 * high
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle) <= error else (low, middle)
    return low
