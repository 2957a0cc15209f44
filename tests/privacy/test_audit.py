"""The audit's statistics: bounds stay below the truth, come near it, and catch mechanisms that are broken."""

import math

import numpy as np
import pytest
from scipy import stats

from sordino.errors import BadInput
from sordino.privacy.accounting import epsilon
from sordino.privacy.auditing import audit, gaussian_bound, gaussian_epsilon, one_run_p_value

DELTA = 1e-5


def gaussian(mu: float, seed: int = 1):
    """A mechanism that is exactly μ-GDP for every canary."""

    def run(included):
        return mu * included + np.random.default_rng(seed).standard_normal(len(included))

    return run


@pytest.mark.parametrize(
    ("mu", "gaussian_share", "one_run_share"), [(0.1, 0.6, 0.35), (0.5, 0.9, 0.45), (2.0, 0.97, 0.3)]
)
def test_both_bounds_stay_below_the_true_epsilon_and_come_near_it(mu, gaussian_share, one_run_share):
    truth = gaussian_epsilon(mu, DELTA)
    found = audit(gaussian(mu), truth, DELTA)
    assert found.passed
    assert found.gaussian > gaussian_share * truth
    assert found.one_run > one_run_share * truth


@pytest.mark.parametrize("claimed", [0.5, 1.0, 2.0, 4.0])
def test_noise_divided_by_one_point_two_is_caught(claimed):
    mu = _mu_of(claimed)
    assert audit(gaussian(mu), claimed, DELTA).passed
    assert not audit(gaussian(1.2 * mu), claimed, DELTA).passed


@pytest.mark.parametrize("claimed", [0.5, 1.0, 2.0])
def test_the_assumption_free_bound_alone_catches_half_the_noise(claimed):
    assert audit(gaussian(2 * _mu_of(claimed)), claimed, DELTA).one_run > claimed


def test_false_alarms_are_rare():
    """At 99 % confidence at most a few of 60 sound mechanisms may fail."""
    mu = _mu_of(1.0)
    failed = sum(gaussian_bound(*_scores(mu, seed), DELTA, 0.99) > 1.0 for seed in range(60))
    assert failed <= 3


def _scores(mu, seed):
    included = np.random.default_rng(seed).random(20_000) < 0.5
    return gaussian(mu, seed + 1000)(included), included


def test_gaussian_epsilon_agrees_with_the_accountant():
    for mu in (0.2, 1.0, 3.0):
        assert gaussian_epsilon(mu, DELTA) == pytest.approx(epsilon(1 / mu, DELTA, 1.0, 1, sampling="full"), rel=1e-3)


def test_the_one_run_p_value_equals_a_plain_sum():
    m, r, v, eps, delta = 50, 20, 16, 0.7, 1e-3
    q = 1 / (1 + math.exp(-eps))
    mass = [stats.binom.pmf(k, r, q) for k in range(r + 1)]
    tail = sum(mass[v:])
    worst = max(sum(mass[v - i : v]) / i for i in range(1, v + 1))
    assert one_run_p_value(m, r, v, eps, delta) == pytest.approx(tail + 2 * m * delta * worst)
    m, r, v = 200_000, 20_000, 14_000
    mass = stats.binom.cdf(v - 1, r, q) - stats.binom.cdf(v - 1 - np.arange(1, v + 1), r, q)
    plain = stats.binom.sf(v - 1, r, q) + 2 * m * 1e-7 * (mass / np.arange(1, v + 1)).max()
    assert plain <= one_run_p_value(m, r, v, eps, 1e-7) <= 1.05 * plain


def test_nonsense_is_refused():
    with pytest.raises(BadInput, match="audit needs"):
        audit(gaussian(1.0), -1.0, DELTA)
    with pytest.raises(BadInput, match="finite score"):
        audit(lambda included: np.full(len(included), np.nan), 1.0, DELTA)


def _mu_of(target: float) -> float:
    low, high = 1e-4, 50.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_epsilon(middle, DELTA) < target else (low, middle)
    return low
