"""The tight accountant is certified: never below the truth, and hardly above it."""

import math

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from scipy.special import gammaln, logsumexp
from scipy.stats import norm

from sordino.privacy.accounting import composed_epsilon, epsilon
from sordino.privacy.accounting.lattice import Guess, _first_below, crossing, discretise, extent
from sordino.privacy.accounting.parts import Kind, Part
from sordino.privacy.types import Adjacency, Event, Sampling

RELATION = {
    Adjacency.ZERO_OUT: dp.NeighboringRelation.REPLACE_SPECIAL,
    Adjacency.REPLACE_ONE: dp.NeighboringRelation.REPLACE_ONE,
}


def judged(events, delta, interval=1e-4):
    """dp-accounting's ε; its replace-one noise is a multiplier of C, ours of 2C."""
    adjacency = events[0].adjacency
    book = PLDAccountant(RELATION[adjacency], value_discretization_interval=interval)
    for event in events:
        inner = dp.GaussianDpEvent(event.noise * adjacency.sensitivity)
        sampled = dp.PoissonSampledDpEvent(event.sampling.rate, inner) if event.sampling.rate < 1 else inner
        book.compose(dp.SelfComposedDpEvent(sampled, event.count))
    return book.get_epsilon(delta)


def one_release_delta(epsilon_value, rate, sigma, exchange=False):
    """sup over both directions of the divergence of one release, by plain integration over outputs."""
    x = np.linspace(-12 * sigma - 1, 1 + 12 * sigma, 400_001)
    base, with_record = norm.pdf(x, 0, sigma), norm.pdf(x, 1, sigma)
    p = (1 - rate) * base + rate * with_record
    q = (1 - rate) * base + rate * norm.pdf(x, -1, sigma) if exchange else base
    step = x[1] - x[0]
    return max(
        np.maximum(p - math.exp(epsilon_value) * q, 0).sum() * step,
        np.maximum(q - math.exp(epsilon_value) * p, 0).sum() * step,
    )


@pytest.mark.parametrize(
    ("rate", "noise", "steps", "delta", "interval"),
    [
        (0.05, 2.0, 268, 1e-5, 1e-4),
        (0.003, 0.6, 20, 1e-6, 1e-4),
        (0.1, 30.0, 5000, 1e-3, 3e-5),
        (0.01, 0.7, 2000, 1e-5, 1e-4),
        (0.3, 5.0, 300, 1e-7, 1e-4),
    ],
)
def test_agrees_with_dp_accounting(rate, noise, steps, delta, interval):
    for adjacency in (Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE):
        event = Event("g", Sampling.poisson(rate), noise, steps, adjacency)
        ours = composed_epsilon([[event]], [delta])[0]
        assert ours == pytest.approx(judged([event], delta, interval), rel=1.5e-4)


@pytest.mark.parametrize("adjacency", [Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE])
def test_agrees_with_dp_accounting_on_a_mixed_composition(adjacency):
    events = [
        Event("gradient", Sampling.poisson(0.05), 2.0, 268, adjacency),
        Event("loss", Sampling.poisson(0.1), 5.0, 40, adjacency),
        Event("radius", Sampling.full(), 30.0, 20, adjacency),
    ]
    assert composed_epsilon([events], [1e-5])[0] == pytest.approx(judged(events, 1e-5), rel=1.5e-4)


@pytest.mark.parametrize("exchange", [False, True])
def test_one_release_costs_what_plain_integration_says(exchange):
    adjacency = "replace-one" if exchange else "zero-out"
    for rate, noise, delta in [(0.2, 0.8, 1e-4), (0.02, 0.5, 1e-5), (0.7, 2.0, 1e-3)]:
        spent = epsilon(noise, delta, rate, 1, adjacency=adjacency)
        sigma = 2 * noise if exchange else noise
        assert one_release_delta(spent, rate, sigma, exchange) <= delta * (1 + 1e-6)
        assert one_release_delta(spent * 0.9999, rate, sigma, exchange) >= delta * (1 - 1e-6)


def test_full_batches_cost_what_the_exact_formula_says():
    for noise, steps, delta in [(5.0, 10, 1e-5), (1.0, 1, 1e-8), (80.0, 1000, 1e-3)]:
        mu, spent = math.sqrt(steps) / noise, epsilon(noise, delta, 1.0, steps)
        exact = norm.cdf(mu / 2 - spent / mu) - math.exp(spent) * norm.cdf(-mu / 2 - spent / mu)
        assert exact == pytest.approx(delta, rel=1e-6)


@pytest.mark.parametrize("kind", [Kind.POISSON, Kind.EXCHANGE, Kind.GAUSSIAN])
def test_a_lattice_dominates_its_release_at_every_order_in_both_directions(kind):
    part = Part(kind, 1.0 if kind is Kind.GAUSSIAN else 0.1, 0.9, 1)
    sigma = 1.8 if kind is Kind.EXCHANGE else 0.9
    lattice = discretise(part, 0.05, *extent(part, 1e-9, 50.0))
    p, losses = lattice.mass, lattice.losses
    q = p * np.exp(-losses)
    assert p.sum() + lattice.lost == pytest.approx(1.0, abs=1e-12)
    assert q.sum() + lattice.lost_back == pytest.approx(1.0, abs=1e-12)
    for order in (-1.0, -0.3, -0.05, 0.0, 0.02, 0.3, 1.0, 2.5):
        forward = lattice.lost + sum(max(0.0, a - math.exp(order) * b) for a, b in zip(p, q))
        backward = lattice.lost_back + sum(max(0.0, b - math.exp(order) * a) for a, b in zip(p, q))
        x = np.linspace(-12 * sigma - 1, 1 + 12 * sigma, 200_001)
        rate = part.rate
        real_p = (1 - rate) * norm.pdf(x, 0, sigma) + rate * norm.pdf(x, 1, sigma)
        other = -1 if kind is Kind.EXCHANGE else 0
        real_q = (1 - rate) * norm.pdf(x, 0, sigma) + rate * norm.pdf(x, other, sigma)
        step = x[1] - x[0]
        real_forward = np.maximum(real_p - math.exp(order) * real_q, 0).sum() * step
        real_backward = np.maximum(real_q - math.exp(order) * real_p, 0).sum() * step
        assert forward >= real_forward - 1e-9
        assert backward >= real_backward - 1e-9
        assert forward <= real_forward + 2e-3, "chords of step 0.05 stay close to the curve"


def test_the_fast_composition_equals_repeated_plain_convolution():
    part, count, delta = Part(Kind.POISSON, 0.2, 1.1, 4), 4, 1e-4
    lattice = discretise(part, 0.002, *extent(part, 1e-12, 60.0))

    def by_convolution(one):
        mass, lost = one.mass, 1 - (1 - one.lost) ** count
        for _ in range(count - 1):
            mass = np.convolve(mass, one.mass)
        losses = count * one.start + one.step * np.arange(mass.size)
        low, high = 0.0, 50.0
        for _ in range(60):
            middle = (low + high) / 2
            divergence = lost + (mass * np.maximum(0, -np.expm1(middle - losses))).sum()
            low, high = (middle, high) if divergence > delta else (low, middle)
        return high

    plain = max(by_convolution(lattice), by_convolution(lattice.reversed()))
    assert epsilon(part.noise, delta, part.rate, count) == pytest.approx(plain, rel=1e-4)


def summed_attack_delta(rate, sigma, steps, epsilon_value, exchange):
    """The divergence of the *sum* of all outputs: what an actual adversary achieves, so a lower bound on δ(ε)."""
    many = rate * steps + 14 * (math.sqrt(rate * steps) + 1) + 40
    k = np.arange(min(steps, int(many)) + 1)
    log_weight = gammaln(steps + 1) - gammaln(k + 1) - gammaln(steps - k + 1)
    log_weight += k * math.log(rate) + (steps - k) * math.log1p(-rate)
    wide = sigma * math.sqrt(steps)
    x = np.linspace(-10 * wide - (many if exchange else 0), many + 10 * wide, 4001)

    def density(sign):
        return np.exp(logsumexp(log_weight - (x[:, None] - sign * k) ** 2 / (2 * wide**2), axis=1)) / (
            wide * math.sqrt(2 * math.pi)
        )

    p, q = density(1), density(-1) if exchange else norm.pdf(x, 0, wide)
    step = x[1] - x[0]
    return max(
        np.maximum(p - math.exp(epsilon_value) * q, 0).sum() * step,
        np.maximum(q - math.exp(epsilon_value) * p, 0).sum() * step,
    )


def test_no_attack_on_the_summed_outputs_beats_the_certified_epsilon():
    rng = np.random.default_rng(5)
    tightest = 0.0
    for _ in range(60):
        rate, steps = 10 ** rng.uniform(-3, -0.05), int(10 ** rng.uniform(0, 3))
        noise, delta = 10 ** rng.uniform(-0.5, 2), 10 ** rng.uniform(-9, -1)
        exchange = bool(rng.integers(2))
        spent = epsilon(noise, delta, rate, steps, adjacency="replace-one" if exchange else "zero-out")
        if noise * math.sqrt(steps) < 0.02 * (rate * steps + 60) or spent > 300:
            continue  # the plain integration grid would be too coarse
        reached = summed_attack_delta(rate, 2 * noise if exchange else noise, steps, spent, exchange)
        assert reached <= delta * (1 + 1e-5) + 1e-13, (rate, noise, steps, delta, exchange)
        tightest = max(tightest, reached / delta)
    assert tightest > 0.999, "the attack should nearly reach the claim somewhere, else this test shows nothing"


def test_the_adding_direction_counts_where_it_is_the_worse_one():
    """At ε near 0 the two directions differ little; the certified value covers both."""
    rate, sigma, delta = 0.6, 1.0, 0.2
    spent = epsilon(sigma, delta, rate, 1)
    assert one_release_delta(spent, rate, sigma) <= delta * (1 + 1e-6)


@pytest.mark.parametrize(
    ("noise", "rate", "steps", "delta"),
    [
        (0.01, 0.3, 100, 1e-5),
        (5000.0, 0.5, 100, 1e-9),
        (0.8, 1e-6, 14, 8.6e-8),
        (1.0, 0.999999, 100, 1e-6),
        (0.5, 1e-5, 10**6, 1e-5),
        (40.0, 1e-5, 50_000, 5e-11),
        (2.0, 0.1, 1, 0.4),
    ],
)
def test_far_corners_give_a_finite_bound_no_larger_than_renyi(noise, rate, steps, delta):
    spent = epsilon(noise, delta, rate, steps)
    assert 0.0 <= spent <= epsilon(noise, delta, rate, steps, accountant="rdp") * 1.001


@pytest.mark.parametrize(
    ("rate", "noise", "steps", "delta"),
    [(0.05, 2.0, 268, 1e-5), pytest.param(0.0014, 0.05, 1000, 1e-3, marks=pytest.mark.slow)],
)
def test_a_wrong_guess_costs_time_but_never_an_epsilon_that_is_too_small(rate, noise, steps, delta):
    part = Part(Kind.POISSON, rate, noise, steps)
    truth = epsilon(noise, delta, rate, steps)
    low, high = extent(part, 1e-5 * delta / steps, 10 * truth)
    lattice = discretise(part, max(2e-3, (high - low) / 20_000), low, high)
    sides = set()
    for tilt in np.geomspace(0.01, 100.0, 9) / truth:
        for factor in (0.0, 0.1, 0.5, 1.0, 2.0, 10.0):
            found, side = crossing([lattice], [steps], delta, Guess(tilt, factor * truth, truth / 4))
            sides.add(side)
            # Side 0 claims ε = found, side −1 claims ε ≤ found; side 1 claims nothing.
            assert side == 1 or found >= truth * (1 - 1e-4), (tilt, factor, side)
    assert sides == {-1, 0, 1}, "the guesses are wrong in every way there is"


def test_a_divergence_that_never_falls_to_the_target_has_no_crossing():
    assert _first_below(lambda k: 2.0 - k / 1000, 0.5, 1000) is None
    assert _first_below(lambda k: 2.0 - k / 1000, 1.5, 1000)[0] == 500
    assert _first_below(lambda k: 2.0 - k / 1000, 2.5, 1000)[0] == 0


def test_epsilon_grows_with_steps_and_falls_with_noise():
    steps = epsilon(2.0, 1e-5, 0.05, np.arange(1, 400, 7))
    noises = epsilon(np.geomspace(0.4, 40.0, 40), 1e-5, 0.05, 200)
    assert np.all(np.diff(steps) > 0)
    assert np.all(np.diff(noises) < 0)
