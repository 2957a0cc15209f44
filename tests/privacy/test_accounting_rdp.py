"""Rényi accounting against plain loops, numerical integration and dp-accounting."""

import math

import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant as reference
from scipy.integrate import quad

from sordino.privacy.accounting import epsilon, rdp
from sordino.privacy.accounting.parts import Kind, Part

POINTS = [(0.05, 2.0), (0.003, 0.4), (0.3, 100.0), (0.5, 1.0), (0.2, 0.15)]


def test_the_orders_are_dp_accountings():
    assert list(rdp.ORDERS) == pytest.approx(reference.DEFAULT_RDP_ORDERS)


@pytest.mark.parametrize(("rate", "noise"), POINTS)
def test_integer_orders_equal_the_binomial_sum_term_by_term(rate, noise):
    orders = [2, 3, 7, 20]
    ours = rdp.sampled(np.array([rate]), np.array([noise]), orders)[0]
    for order, value in zip(orders, ours):
        total = sum(
            math.comb(order, k) * (1 - rate) ** (order - k) * rate**k * math.exp(k * (k - 1) / (2 * noise**2))
            for k in range(order + 1)
            if k * (k - 1) / (2 * noise**2) < 600
        )
        if order * (order - 1) / (2 * noise**2) < 600:
            assert value * (order - 1) == pytest.approx(math.log(total), rel=1e-9, abs=1e-13)
    dp = reference._compute_rdp_poisson_subsampled_gaussian(rate, noise, orders)
    assert ours == pytest.approx(dp, rel=1e-9, abs=1e-13)


@pytest.mark.parametrize(("rate", "noise"), POINTS)
def test_fractional_orders_equal_the_integral(rate, noise):
    orders = [1.1, 2.5, 6.3]
    ours = rdp.sampled(np.array([rate]), np.array([noise]), orders)[0]

    for order, value in zip(orders, ours):
        assert value * (order - 1) == pytest.approx(integrated_log_moment(rate, noise, order), rel=1e-6, abs=1e-11)


def integrated_log_moment(rate, noise, order):
    """ln E[(1−q+q e^((2x−1)/(2z²)))^α] by adaptive quadrature, scaled by its peak."""

    def log_integrand(x):
        log = np.logaddexp(math.log1p(-rate), math.log(rate) + (x - 0.5) / noise**2)
        return order * log - x**2 / (2 * noise**2)

    peak = float(log_integrand(np.linspace(-9 * noise, order + 9 * noise, 2001)).max())
    ends = (-12 * noise, order + 12 * noise)
    total, _ = quad(
        lambda x: math.exp(log_integrand(x) - peak), *ends, limit=500, points=[0.0, order], epsabs=0, epsrel=1e-12
    )
    return math.log(total) + peak - 0.5 * math.log(2 * math.pi * noise**2)


def test_fractional_orders_are_never_looser_than_dp_accountings():
    """dp-accounting adds the alternating terms of the fractional series as if all were positive: valid, but looser."""
    orders = [1.5, 2.5, 4.7, 9.9]
    for rate, noise in POINTS[:3]:
        ours = rdp.sampled(np.array([rate]), np.array([noise]), orders)[0]
        dp = reference._compute_rdp_poisson_subsampled_gaussian(rate, noise, orders)
        assert np.all(ours <= dp * (1 + 1e-9) + 1e-13)


def test_conversion_equals_a_plain_loop_over_orders():
    curve = rdp.sampled(np.array([0.05]), np.array([2.0]), rdp.ORDERS) * 268
    plain = min(
        r + math.log((a - 1) / a) - (math.log(1e-5) + math.log(a)) / (a - 1) for a, r in zip(rdp.ORDERS, curve[0])
    )
    assert rdp.convert(curve, np.array([1e-5]))[0] == pytest.approx(plain, rel=1e-12)
    assert epsilon(2.0, 1e-5, 0.05, 268, accountant="rdp") == pytest.approx(plain, rel=1e-12)
    assert plain == pytest.approx(reference.compute_epsilon(rdp.ORDERS, curve[0], 1e-5)[0], rel=1e-12)


def test_the_curve_of_a_composition_is_the_sum_over_its_parts():
    parts = [(Part(Kind.POISSON, 0.05, 2.0, 10), Part(Kind.GAUSSIAN, 1.0, 30.0, 1))]
    both = rdp.curve(rdp.table(parts), [2.0, 5.5])[0]
    sampled = rdp.sampled(np.array([0.05]), np.array([2.0]), [2.0, 5.5])[0]
    assert both == pytest.approx(10 * sampled + np.array([2.0, 5.5]) / (2 * 900.0), rel=1e-12)


@pytest.mark.parametrize(("rate", "noise"), [(0.05, 2.0), (0.003, 0.4), (0.1, 5.0), (0.5, 1.0)])
def test_sampling_without_replacement_equals_dp_accountings_bound(rate, noise):
    orders = [1.5, 2, 2.7, 9, 10.9, 20, 40, 300]
    ours = rdp.fixed_size(np.array([rate]), np.array([noise]), orders)[0]
    assert ours == pytest.approx(reference._compute_rdp_sample_wor_gaussian(rate, noise, orders), rel=1e-9)


def test_without_replacement_rows_do_not_depend_on_the_batch_they_are_computed_in():
    rates, noises = np.array([0.05, 0.2, 0.01]), np.array([0.5, 20.0, 3.0])
    together = rdp.fixed_size(rates, noises, [2.0, 8.0, 33.0])
    for i in range(3):
        alone = rdp.fixed_size(rates[i : i + 1], noises[i : i + 1], [2.0, 8.0, 33.0])[0]
        assert together[i] == pytest.approx(alone, rel=1e-10)


def test_even_moments_equal_the_alternating_sum_where_that_is_stable():
    noise = 0.7
    logs = rdp._even_moments(np.array([noise]), 6)[0]
    for l, log in zip((2, 4, 6), logs):
        exact = sum((-1) ** (l - k) * math.comb(l, k) * math.exp(k * (k - 1) / (2 * noise**2)) for k in range(l + 1))
        assert math.exp(log) == pytest.approx(exact, rel=1e-9)


def test_tight_fixed_batches_use_the_renyi_bound_and_cost_about_twice_the_noise_of_poisson():
    fixed = epsilon(2.0, 1e-5, 0.05, 268, "fixed", "pld", "replace-one")
    assert fixed == epsilon(2.0, 1e-5, 0.05, 268, "fixed", "rdp", "replace-one")
    assert fixed > epsilon(2.0, 1e-5, 0.05, 268, "poisson", "pld", "replace-one")
