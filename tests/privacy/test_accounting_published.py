"""Noise as the papers compute it: their formulas term by term, their limits, and their own tables."""

import math

import numpy as np
import pytest

from sordino.errors import BadInput
from sordino.privacy.accounting import calibrate, composed_epsilon, epsilon, published
from sordino.privacy.accounting.parts import Kind, Part
from sordino.privacy.types import Adjacency, Event, Sampling


def test_the_closed_form_is_equation_7():
    eps, delta, rate, steps, records = 1.0, 1e-5, 128 / 600, 1000, 600
    log_odds = math.log(1 + (math.e**eps - 1) / rate)
    factor = 8 * math.log(math.e + rate * log_odds / delta) / (records**2 * rate**2 * log_odds**2)
    noise_on_the_mean = math.sqrt(factor * steps)
    z = noise_on_the_mean * records * rate
    assert calibrate(eps, delta, rate, steps, accountant="closed-form-selection") == pytest.approx(z, rel=1e-12)


def test_the_closed_form_is_inverted():
    for eps in (0.1, 1.0, 30.0):
        noise = calibrate(eps, 1e-5, 0.1, 500, accountant="closed-form-selection")
        assert epsilon(noise, 1e-5, 0.1, 500, accountant="closed-form-selection") == pytest.approx(eps, rel=1e-9)


def test_the_closed_form_refuses_several_kinds_of_release():
    events = [Event("a", Sampling.poisson(0.1), 1.0), Event("b", Sampling.poisson(0.1), 2.0)]
    with pytest.raises(BadInput, match="one kind"):
        composed_epsilon([events], [1e-5], "closed-form-selection")


def plain_amplified_rdp(order, rate, noise):
    """S(ε(·), γ)(α) of the paper, term by term, with ε(j) = j/(2z²) and ε(∞) = ∞."""
    total = 1 + rate**2 * math.comb(order, 2) * min(4 * (math.exp(1 / noise**2) - 1), 2 * math.exp(1 / noise**2))
    for j in range(3, order + 1):
        total += rate**j * math.comb(order, j) * 2 * math.exp((j - 1) * j / (2 * noise**2))
    return math.log(total) / (order - 1)


@pytest.mark.parametrize(("eps", "rate", "steps"), [(20.0, 1 / 15, 1500), (30.0, 0.05, 200), (6.0, 0.01, 50)])
def test_wor_paper_picks_the_least_noise_its_theorem_accepts(eps, rate, steps):
    delta = 1e-4
    order = 1 + math.ceil(2 * math.log(1 / delta) / eps)
    noise = calibrate(eps, delta, rate, steps, "fixed", "wor-paper", "replace-one")
    assert steps * plain_amplified_rdp(order, rate, noise) <= eps / 4 * (1 + 1e-9)
    assert steps * plain_amplified_rdp(order, rate, noise * 0.9999) > eps / 4
    assert epsilon(noise, delta, rate, steps, "fixed", "wor-paper", "replace-one") <= eps * (1 + 1e-9)


T1 = (100 / 2000, 150 * 20)  # rate and R·K of the paper's artificial task, two clients
T3 = (100 / 1500, 1000 * 15)  # and of MNIST


@pytest.mark.parametrize(("task", "eps"), [(T3, 1.0), (T3, 4.0), (T3, 8.0), (T1, 1.0), (T1, 4.0)])
def test_wor_paper_says_when_it_certifies_no_noise_at_all(task, eps):
    rate, steps = task
    delta = 1e-4
    order = 1 + math.ceil(2 * math.log(1 / delta) / eps)
    rest = sum(rate**j * math.comb(order, j) for j in range(3, order + 1))
    assert steps / (order - 1) * math.log(1 + 2 * rest) >= eps / 4
    with pytest.raises(BadInput, match="certifies no noise at all"):
        calibrate(eps, delta, rate, steps, "fixed", "wor-paper", "replace-one")
    assert calibrate(eps, delta, rate, steps, "fixed", "pld", "replace-one") < 80.0, "the tightened bound does certify"


def test_wor_paper_certifies_the_artificial_task_at_epsilon_8():
    assert calibrate(8.0, 1e-4, *T1, "fixed", "wor-paper", "replace-one") > 0


def test_wor_paper_is_for_fixed_or_full_batches():
    with pytest.raises(BadInput, match="fixed"):
        calibrate(5.0, 1e-4, 0.1, 10, accountant="wor-paper")


def test_the_papers_levels_are_hardly_private_by_its_own_rule():
    """Half of ε for DP-FedAvg's one phase: Bank Marketing's level 3 is about ε = 5, MNIST's level 1 about a million."""
    delta, batch = np.array([1e-4]), 100

    def level(records, steps, sigma):
        part = Part(Kind.FIXED, batch / records, sigma * batch / 2, steps)
        return published.wor_epsilons([(part,)], delta, share=0.5)[0]

    assert level(22605, 100 * 226, 0.03) == pytest.approx(5.0, rel=0.1)
    assert level(1500, 1000 * 15, 0.003) == pytest.approx(1.2e6, rel=0.05)


def test_wor_paper_costs_the_more_expensive_of_its_two_phases():
    sampling = Sampling.fixed(100, 1500)
    gradients = Event("g", sampling, 6.0, 1500, Adjacency.REPLACE_ONE)
    radius = Event("c", Sampling.full(), 200.0, 100, Adjacency.REPLACE_ONE)
    together = composed_epsilon([[gradients, radius]], [1e-4], "wor-paper")[0]
    assert together == max(composed_epsilon([[gradients], [radius]], [1e-4, 1e-4], "wor-paper"))


def test_robust_hdps_accountant_names_its_floor():
    floor = math.log(1e4) / 63
    assert calibrate(floor * 1.05, 1e-4, 0.01, 100, accountant="rdp-robust-hdp") > 0
    with pytest.raises(BadInput, match="certifies no"):
        calibrate(floor * 0.99, 1e-4, 0.01, 100, accountant="rdp-robust-hdp")


def test_robust_hdps_accountant_is_looser_than_ours():
    ours = calibrate(1.0, 1e-4, 0.01, 20_000)
    assert calibrate(1.0, 1e-4, 0.01, 20_000, accountant="rdp") > ours
    assert calibrate(1.0, 1e-4, 0.01, 20_000, accountant="rdp-robust-hdp") > 1.1 * ours
