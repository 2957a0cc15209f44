"""What discrete, shared noise costs: bounds against brute force, figures against dp-accounting's."""

from __future__ import annotations

import math
from dataclasses import replace
from decimal import Decimal, localcontext
from functools import lru_cache

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as oracle
from scipy import stats
from scipy.special import log_ndtr, logsumexp

from sordino.errors import BadInput
from sordino.privacy import accounting
from sordino.privacy.accounting import discrete, filters
from sordino.privacy.trust import Shared
from sordino.privacy.types import Adjacency, Budget, Event, Sampling

DIGITS = 190


@lru_cache
def weights(variance: Decimal, reach: int) -> list[int]:
    """exp(−k²/(2s²)) for |k| ≤ reach as integers, in units of 10⁻¹⁹⁰."""
    with localcontext() as context:
        context.prec = DIGITS + 10
        half = [int((-(Decimal(k * k) / (2 * variance))).exp() * Decimal(10) ** DIGITS) for k in range(reach + 1)]
    return half[:0:-1] + half


def distance(variances: list[Decimal]) -> Decimal:
    """The largest |ln(ratio)| of a sum of discrete Gaussians and one of the same variance, by adding up everything."""
    reach = math.ceil(30 * math.sqrt(sum(variances)))
    unit = 10**DIGITS
    summed = weights(variances[0], reach)
    for variance in variances[1:]:
        # Products of numbers with all digits in one number: multiplying two large numbers convolves what they hold.
        other, bits = weights(variance, reach), 2 * DIGITS * 4
        packed = [
            int.from_bytes(b"".join(v.to_bytes(bits // 8, "little") for v in row), "little") for row in (summed, other)
        ]
        product = (packed[0] * packed[1]).to_bytes((2 * len(summed)) * bits // 8, "little")
        rows = [
            int.from_bytes(product[i * bits // 8 : (i + 1) * bits // 8], "little") for i in range(2 * len(summed) - 1)
        ]
        summed = [one // unit for one in rows[reach:-reach]]
    one = weights(sum(variances), reach)
    span = range(reach - math.ceil(4 * math.sqrt(sum(variances))), reach + 1)
    with localcontext() as context:
        context.prec = DIGITS
        ratio = Decimal(sum(one)) / Decimal(sum(summed))
        return max(abs((Decimal(summed[k]) / Decimal(one[k]) * ratio).ln()) for k in span)


@pytest.mark.parametrize("deviation", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("shares", [2, 3, 6])
def test_a_sum_of_discrete_gaussians_is_as_near_to_one_as_stated(deviation: int, shares: int):
    found, stated = float(distance([Decimal(deviation**2)] * shares)), discrete.sum_distance(deviation, shares)
    assert found <= stated
    assert shares > 2 or found == pytest.approx(0.4 * stated, rel=1e-3)  # of two: 2·exp(−2π²ρ²) exactly, not 5


@pytest.mark.parametrize(("first", "second"), [("1", "2"), ("1.5", "3.2"), ("0.8", "5"), ("0.6", "0.6")])
def test_unequal_shares_are_near_too(first: str, second: str):
    a, b = Decimal(first), Decimal(second)
    found = float(distance([a * a, b * b]))
    assert found <= 5 * math.exp(-2 * math.pi**2 / float(1 / a**2 + 1 / b**2))


def log_cells(k: np.ndarray, deviation: float) -> np.ndarray:
    """ln P(⌊sX⌉ = k)."""
    inner, outer = log_ndtr(-(np.abs(k) - 0.5) / deviation), log_ndtr(-(np.abs(k) + 0.5) / deviation)
    return np.asarray(inner + np.log1p(-np.exp(outer - inner)))


def log_discrete(k: np.ndarray, deviation: float) -> np.ndarray:
    every = np.arange(-math.ceil(45 * deviation), math.ceil(45 * deviation) + 1)
    return np.asarray(-((k / deviation) ** 2) / 2 - logsumexp(-((every / deviation) ** 2) / 2))


@pytest.mark.parametrize("deviation", [5.0, 7.3, 20.0, 100.0])
def test_a_discrete_gaussian_is_as_near_to_a_rounded_one_as_stated(deviation: float):
    k = np.arange(-math.floor(discrete.REACH * deviation), math.floor(discrete.REACH * deviation) + 1)
    found = log_cells(k, deviation) - log_discrete(k, deviation)
    stated = (discrete.REACH**2 + 1) / (24 * deviation**2)
    assert np.abs(found).max() <= stated
    assert found.max() - found.min() <= stated * (1 + 1e-6)  # both directions together: 2η is twice what is needed
    assert found.max() >= 0.8 * stated
    assert found.min() == pytest.approx(-1 / (24 * deviation**2), rel=1e-3)


def test_the_tail_of_every_kind_of_noise_is_below_what_is_set_aside():
    assert math.log(2) + stats.norm.logsf(discrete.REACH - 0.1) <= math.log(discrete.TAIL)  # rounded, 5 steps or more
    for deviation in (5.0, 33.3):
        k = np.arange(math.floor(discrete.REACH * deviation) + 1, 44 * deviation)
        assert math.log(2) + logsumexp(log_discrete(k, deviation)) <= math.log(discrete.TAIL)


def hockey(first: np.ndarray, second: np.ndarray, epsilon: float) -> float:
    return float(np.maximum(first - math.exp(epsilon) * second, 0).sum())


def pair(law, deviation: float, shift: int, rate: float) -> tuple[np.ndarray, np.ndarray]:
    reach = math.ceil(38 * deviation) + shift
    k = np.arange(-reach, reach + 1)
    without = np.exp(law(k, deviation))
    return (1 - rate) * without + rate * np.exp(law(k - shift, deviation)), without


@pytest.mark.parametrize("rate", [1.0, 0.1])
@pytest.mark.parametrize(("deviation", "shift"), [(5.0, 5), (5.0, 2), (12.0, 4), (60.0, 60)])
def test_one_number_released_with_discrete_noise_costs_no_more_than_stated(deviation: float, shift: int, rate: float):
    """Against the rounded Gaussian, in both directions, for the divergences of (ε, δ) and of Rényi."""
    eta = (discrete.REACH**2 + 1) / (24 * deviation**2)
    ours, rounded = (pair(law, deviation, shift, rate) for law in (log_discrete, log_cells))
    for way in (slice(None), slice(None, None, -1)):
        for epsilon in (0.0, 0.1, 0.5, 1.0, 2.0, 4.0):
            stated = math.exp(eta) * hockey(*rounded[way], epsilon)
            assert hockey(*ours[way], epsilon + 2 * eta) <= stated + 1e-13
        for order in (1.5, 2.0, 8.0, 32.0):
            inner = slice(None) if shift < 0 else np.flatnonzero((ours[0] > 1e-290) & (ours[1] > 1e-290))
            both = []
            for one, two in ((ours[way]), (rounded[way])):
                terms = order * np.log(one[inner]) + (1 - order) * np.log(two[inner])
                both.append(float(logsumexp(terms)) / (order - 1))
            assert both[0] <= both[1] + discrete.renyi(order, eta)


@pytest.mark.parametrize("rate", [1.0, 0.2])
def test_what_three_sites_share_costs_no_more_than_stated(rate: float):
    """The real thing, summed up: three discrete Gaussians of five steps each, against the Gaussian of all three."""
    how, shift = shared(5.0, sites=3), 4
    deviation, reach = 5.0 * math.sqrt(3), 300
    k = np.arange(-reach, reach + 1)
    one = np.exp(log_discrete(k, 5.0))
    total = np.convolve(np.convolve(one, one, "same"), one, "same")
    moved = np.roll(total, shift)
    ours = (1 - rate) * total + rate * moved, total
    eta = discrete.ratio(how)
    rounded = pair(log_cells, deviation, shift, rate)
    for way in (slice(None), slice(None, None, -1)):
        for epsilon in (0.0, 0.3, 1.0, 2.0):
            assert hockey(*ours[way], epsilon + 2 * eta) <= math.exp(eta) * hockey(*rounded[way], epsilon) + 1e-13
            assert hockey(*ours[way], epsilon) == pytest.approx(hockey(*rounded[way], epsilon), rel=0.05, abs=1e-9)


def test_without_the_allowance_a_figure_would_be_too_low():
    """Counts at z = 2: the continuous Gaussian's δ is up to a quarter too low. With 64 steps it hardly shows."""
    excess = {}
    for steps in (1, 32):
        ours = pair(log_discrete, 2.0 * steps, steps, 1.0)
        for epsilon in np.linspace(0.2, 2.5, 400):
            wanted = stats.norm.cdf(0.25 - 2 * epsilon) - math.exp(epsilon) * stats.norm.cdf(-0.25 - 2 * epsilon)
            excess[steps] = max(excess.get(steps, 0), hockey(*ours, epsilon) / wanted - 1)
    assert excess[1] > 0.24
    assert excess[32] < 1e-3


def shared(deviation: float, width: int = 1, sites: int = 1, colluders: int = 0, dropouts: int = 0) -> Shared:
    return Shared(sites, colluders, dropouts, deviation, width)


def plain_allowance(events: list[Event]) -> tuple[float, float]:
    """(H, β) by plain loops."""
    total, beyond = 0.0, 0.0
    for event in events:
        if event.shared is not None:
            h, s, d = event.shared.honest, event.shared.deviation, event.shared.width
            for _ in range(event.count):
                total += d * (30**2 + 1) / (24 * h * s * s)
                total += sum(5 * d * math.exp(-2 * math.pi**2 * s * s / d * k / (k + 1)) for k in range(1, h))
                beyond += d * 2 * math.exp(-450)
    return total, beyond


@pytest.mark.parametrize(("rate", "noise", "count", "deviation"), [(1.0, 3.0, 4, 30.0), (0.1, 1.0, 20, 40.0)])
def test_an_account_covers_the_discrete_mechanism_itself(rate: float, noise: float, count: int, deviation: float):
    """dp-accounting's own discrete Gaussian, composed: never above our figure, above the continuous one's by a hair."""
    shift = round(deviation / noise)
    event = Event("count", Sampling.poisson(rate), deviation / shift, count, shared=shared(deviation))
    law = oracle.from_discrete_gaussian_mechanism(
        deviation, sensitivity=shift, value_discretization_interval=1e-5, pessimistic_estimate=False, sampling_prob=rate
    )
    found = law.self_compose(count).get_epsilon_for_delta(1e-5)
    stated = float(accounting.composed_epsilon([[event]], [1e-5])[0])
    assert found <= stated <= found + 2.5 * plain_allowance([event])[0] + 1e-3


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_a_figure_is_the_continuous_one_at_the_smaller_delta_and_twice_eta(accountant: str):
    batch = Sampling.poisson(0.05)
    how = shared(900.0, width=50, sites=7, colluders=2, dropouts=1)
    events = [
        Event("gradient", batch, 2.0, 268, shared=how),
        Event("loss", batch, 9.0, 30, shared=shared(400.0, 2, 5)),
        Event("own", Sampling.poisson(0.1), 6.0, 11),
    ]
    more, beyond = plain_allowance(events)
    assert more > 0.01  # coarse enough to show
    found = float(accounting.composed_epsilon([events], [1e-5], accountant)[0])
    reduced = 1e-5 * (1 - 1e-9) * math.exp(-more)
    assert (1 + math.exp(found)) * beyond <= 1e-9 * 1e-5
    bare = [replace(event, shared=None) for event in events]
    assert found == pytest.approx(
        float(accounting.composed_epsilon([bare], [reduced], accountant)[0]) + 2 * more, rel=1e-12
    )
    if accountant == "pld":
        laws = [
            oracle.from_gaussian_mechanism(
                e.noise, sampling_prob=e.sampling.rate, value_discretization_interval=1e-4
            ).self_compose(e.count)
            for e in bare
        ]
        wanted = laws[0].compose(laws[1]).compose(laws[2]).get_epsilon_for_delta(reduced) + 2 * more
        assert found == pytest.approx(wanted, rel=1e-3)


def test_fine_lattices_cost_nothing_that_shows():
    """The product's own: s = 2²⁰·√d·z/√h."""
    for width, sites, noise in ((28_938, 20, 2.0), (7_850, 10, 0.7), (10**7, 50, 8.0)):
        how = shared(2.0**20 * math.sqrt(width) * noise / math.sqrt(sites), width, sites)
        assert discrete.ratio(how) == pytest.approx(901 / (24 * 2.0**40 * noise**2), rel=1e-9)
        event = Event("gradient", Sampling.poisson(0.05), noise, 1000, shared=how)
        both = accounting.composed_epsilon([[event], [replace(event, shared=None)]], [1e-5, 1e-5])
        assert 0 < both[0] - both[1] < 3e-7 * both[1]


def test_nothing_changes_where_nothing_is_shared():
    events = [Event("g", Sampling.poisson(0.03), 1.7, 321), Event("l", Sampling.full(), 20.0, 5)]
    assert discrete.allowance(events) == discrete.Allowance()
    assert discrete.Allowance().delta(0.1 + 0.2) == 0.1 + 0.2
    assert discrete.Allowance().epsilon(0.1 + 0.2, 1e-5) == 0.1 + 0.2
    assert discrete.aim(events, Budget(0.3, 1e-7)) == (0.3, 1e-7)
    form = accounting.normal_form(events)
    for name in ("pld", "rdp"):
        direct = accounting.accountant_named(name)
        found = accounting.composed_epsilon([events], [1e-6], name)
        assert found[0] == direct.epsilons([form], np.array([1e-6]))[0]
        scale = accounting.calibrate_events([events], [Budget(2.0, 1e-6)], name)
        assert scale[0] == direct.scales([form], np.array([2.0]), np.array([1e-6]))[0]
    told = [replace(event, shared=shared(1e3)) for event in events[:1]]
    for name in ("rdp-robust-hdp", "closed-form-selection"):  # they pick noise, as published
        alike = [accounting.composed_epsilon([own], [1e-6], name)[0] for own in (events[:1], told)]
        assert alike[0] == alike[1]


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("deviation", [1e9, 2000.0, 300.0, 20.0, 1.0])
def test_calibrated_shared_noise_meets_its_budget(deviation: float, accountant: str):
    batch = Sampling.poisson(0.05)
    template = [
        Event("gradient", batch, 1.0, 100, shared=shared(deviation, 9, 5, 1)),
        Event("loss", batch, 4.0, 10, shared=shared(deviation, 1, 5, 1)),
    ]
    bare = [replace(event, shared=None) for event in template]
    for budget in (Budget(0.3, 1e-5), Budget(3.0, 1e-6), Budget(8.0, 1e-5)):
        scales = accounting.calibrate_events([template, bare], [budget, budget], accountant)
        found = float(
            accounting.composed_epsilon([discrete.scaled(template, float(scales[0]))], [budget.delta], accountant)[0]
        )
        assert found <= budget.epsilon
        assert scales[0] >= scales[1]
        if deviation == 1e9:
            assert scales[0] <= scales[1] * (1 + 1e-4)
            assert found >= budget.epsilon * (1 - 6e-4)
        less = discrete.scaled(template, float(scales[0]) * 0.7)  # never more than it takes, by much
        try:
            assert float(accounting.composed_epsilon([less], [budget.delta], accountant)[0]) > budget.epsilon
        except BadInput as refused:
            assert "too coarse" in str(refused)  # noqa: PT017


def test_turns_that_fit_are_counted_with_what_discreteness_costs():
    turn = [Event("gradient", Sampling.poisson(0.1), 3.0, 1, shared=shared(100.0, 4, 3))]
    budget = Budget(2.0, 1e-5)
    most = accounting.affordable(turn, budget, 10_000)
    costs = accounting.composed_epsilon([[turn[0].times(m)] for m in (most, most + 1)], [1e-5, 1e-5])
    assert costs[0] <= 2.0 < costs[1]
    assert most < accounting.affordable([replace(turn[0], shared=None)], budget, 10_000)


def test_replacing_a_record_halves_z_and_leaves_the_lattice_alone():
    event = Event("gradient", Sampling.poisson(0.1), 3.0, 50, shared=shared(500.0, 4, 3))
    moved = replace(event, noise=1.5, adjacency=Adjacency.REPLACE_ONE)
    assert accounting.replace_one_epsilon([event], 1e-5) == accounting.composed_epsilon([[moved]], [1e-5])[0]
    more, _ = plain_allowance([event])
    bare = accounting.composed_epsilon([[replace(moved, shared=None)]], [1e-5 * (1 - 1e-9) * math.exp(-more)])[0]
    assert accounting.replace_one_epsilon([event], 1e-5) == pytest.approx(bare + 2 * more, rel=1e-12)


def test_ones_own_share_is_discrete_too():
    event = Event("gradient", Sampling.poisson(0.1), 3.0, 50, shared=shared(500.0, 4, 9))
    own = event.alone()
    assert (own.noise, own.shared) == (1.0, shared(500.0, 4))
    assert own.alone() == own
    assert discrete.ratio(own.shared) == pytest.approx(9 * discrete.ratio(event.shared))


def test_a_filter_adds_it_at_its_order():
    event = Event("gradient", Sampling.poisson(0.1), 3.0, 50, shared=shared(500.0, 4, 3))
    bare, (more, _) = replace(event, shared=None), plain_allowance([event])
    for order in (1.5, 8.0, 40.0):
        grown = filters.divergence([bare], order) + (2 * order - 1) / (order - 1) * more
        assert filters.divergence([event], order) == pytest.approx(grown, rel=1e-12)
    budget = Budget(2.0, 1e-5)
    order = filters.order_for([event], budget)
    assert filters.share([event], budget) == pytest.approx(
        filters.divergence([event], order) / filters.room(budget, order)
    )
    assert filters.share([event], budget) > filters.share([bare], budget)
    most = filters.turns_within([event], budget, 1000, [], order)
    assert filters.divergence([event.times(50 * most)], order) <= filters.room(budget, order)
    assert filters.divergence([event.times(50 * (most + 1))], order) > filters.room(budget, order)


def test_what_is_too_coarse_is_refused_or_costs_everything():
    batch = Sampling.poisson(0.1)
    with pytest.raises(BadInput, match="too coarse"):
        accounting.composed_epsilon([[Event("g", batch, 3.0, 1, shared=shared(4.99))]], [1e-5])
    with pytest.raises(BadInput, match="too coarse"):  # 1/s² is a mean: one number of 16 may have 4.75 steps
        accounting.composed_epsilon([[Event("g", batch, 3.0, 1, shared=shared(19.0, 16))]], [1e-5])
    coarse = Event("g", batch, 3.0, 1000, shared=shared(5.0))
    assert accounting.composed_epsilon([[coarse]], [1e-5])[0] == math.inf
    assert accounting.composed_epsilon([[replace(coarse, noise=0.0, shared=shared(0.0))]], [1e-5])[0] == math.inf
    assert accounting.composed_epsilon([[replace(coarse, noise=math.inf)]], [1e-5])[0] == 0.0
    assert accounting.composed_epsilon([[coarse.times(0)]], [1e-5])[0] == 0.0
    loud = Event("g", Sampling.full(), 0.02, 1, shared=shared(1e6))  # ε of 1,500: e^ε times any tail is above δ
    assert accounting.composed_epsilon([[loud]], [1e-5])[0] == math.inf
    scale = float(accounting.calibrate_events([[loud]], [Budget(1000.0, 1e-5)])[0])
    assert accounting.composed_epsilon([discrete.scaled([loud], scale)], [1e-5])[0] <= 1000.0
