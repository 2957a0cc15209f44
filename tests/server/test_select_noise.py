"""Noise factors V_k, the paper's closed form, and the default weight η."""

import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant

from sordino.errors import BadInput
from sordino.server.select import closed_form_factors, default_weight, noise_factors, privacy_aware


def plain_closed_form(n, b, epsilon, delta):
    """Eq. 7 in 50 digits."""
    with mpmath.workdps(50):
        r = mpmath.mpf(b) / mpmath.mpf(n)
        inner = mpmath.log(1 + (mpmath.exp(mpmath.mpf(epsilon)) - 1) / r)
        return float(8 * mpmath.log(mpmath.e + r * inner / mpmath.mpf(delta)) / (mpmath.mpf(n) * r * inner) ** 2)


def test_closed_form_equals_the_formula_from_tiny_to_huge_budgets():
    epsilons = [1e-9, 1e-3, 0.1, 1.0, 5.0, 29.9, 30.1, 100.0, 800.0]
    found = closed_form_factors([600] * 9, [128] * 9, epsilons, [1e-5] * 9)
    expected = [plain_closed_form(600, 128, one, 1e-5) for one in epsilons]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_closed_form_of_full_batches_is_the_unamplified_composition():
    found = closed_form_factors([50], [50], [0.7], [1e-4])
    assert found[0] == pytest.approx(8 * math.log(math.e + 0.7 / 1e-4) / (50 * 0.7) ** 2, rel=1e-12)


def test_public_data_has_no_noise_and_replace_one_has_four_times_the_variance():
    zero_out = closed_form_factors([100, 200], [10, 20], [math.inf, 1.0], [1e-5, 1e-5])
    replace_one = closed_form_factors([100, 200], [10, 20], [math.inf, 1.0], [1e-5, 1e-5], adjacency="replace-one")
    assert zero_out[0] == 0.0
    assert replace_one[1] == pytest.approx(4 * zero_out[1], rel=1e-15)


@pytest.mark.parametrize(("epsilon", "excess"), [(0.1, 3.23), (1.0, 5.28), (5.0, 7.73)])
def test_closed_form_picks_as_many_times_the_needed_noise_as_measured(epsilon, excess):
    """n=600, b=128, δ=1e-5, T·K=1000: noise divided by the excess still meets ε under a tight accountant."""
    factors = closed_form_factors([600], [128], [epsilon], [1e-5])
    noise = 128 * math.sqrt(factors[0] * 1000) / excess
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
    event = dp_accounting.PoissonSampledDpEvent(128 / 600, dp_accounting.GaussianDpEvent(noise))
    accountant.compose(event, 1000)
    assert accountant.get_epsilon(1e-5) == pytest.approx(epsilon, rel=5e-3)


@pytest.mark.parametrize(("adjacency", "sensitivity"), [("zero-out", 1.0), ("replace-one", 2.0)])
def test_noise_factors_are_the_variance_of_the_average_per_participation_step(adjacency, sensitivity):
    z, b, turns, steps = [2.0, 0.0, 7.5], [64.0, 10.0, 32.0], [3, 1, 20], 5
    found = noise_factors(z, b, turns, steps, adjacency)
    for k in range(3):
        std_of_average = sensitivity * z[k] / b[k]  # C = 1
        assert found[k] * turns[k] * steps == pytest.approx(std_of_average**2, rel=1e-14)


def test_one_number_stands_for_all_clients():
    np.testing.assert_array_equal(noise_factors([1.0, 2.0], 10, 4, 1), noise_factors([1.0, 2.0], [10, 10], [4, 4], 1))


def test_default_weight_makes_problem_one_the_bound_of_theorem_two():
    assert default_weight(dimension=26_010, rounds=100, steps=4) == pytest.approx(2 * 26_010 * math.sqrt(400))
    assert default_weight(10, 9, 1, smoothness=0.5) == pytest.approx(2 * 10 * 3 * 0.5)


def test_default_weight_does_something_at_the_papers_setting_and_nothing_without_heterogeneity():
    source = np.random.default_rng(0)
    n = np.round(600 * source.uniform(0.5, 1.5, 100))
    weight = default_weight(26_010, 100)
    mixed = closed_form_factors(n, np.full(100, 128), source.uniform(0.001, 1, 100), np.full(100, 1e-5))
    p = privacy_aware(n, mixed, weight)
    assert 0.1 < np.abs(p - n / n.sum()).sum() < 1.0
    alike = np.full(100, 600.0)
    same = closed_form_factors(alike, np.full(100, 128), np.full(100, 0.5), np.full(100, 1e-5))
    np.testing.assert_array_equal(privacy_aware(alike, same, weight), np.full(100, 0.01))


@pytest.mark.parametrize(
    ("call", "cause"),
    [
        (lambda: closed_form_factors([10], [10], [0.0], [1e-5]), "ε > 0"),
        (lambda: closed_form_factors([10], [10], [math.nan], [1e-5]), "ε > 0"),
        (lambda: closed_form_factors([10], [11], [1.0], [1e-5]), "batches"),
        (lambda: closed_form_factors([10], [5], [1.0], [0.0]), "deltas"),
        (lambda: closed_form_factors([-1], [5], [1.0], [1e-5]), r"sizes\[0\]"),
        (lambda: closed_form_factors([10], [5], [1.0], [1e-5], adjacency="next-door"), "adjacency"),
        (lambda: noise_factors([-1.0], [5], [1], 1), "never negative"),
        (lambda: noise_factors([1.0], [0], [1], 1), "batches"),
        (lambda: noise_factors([1.0], [5], [0], 1), "turns"),
        (lambda: noise_factors([1.0], [5], [1], 0), "steps"),
        (lambda: default_weight(0, 10), "dimension"),
        (lambda: default_weight(10, 10, smoothness=math.nan), "smoothness"),
    ],
)
def test_refused_with_the_cause(call, cause):
    with pytest.raises(BadInput, match=cause):
        call()
