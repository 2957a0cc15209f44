"""Weights and noise of a sum: the one-dimensional problem against brute force, and the figures that it rests on."""

import cvxpy
import numpy as np
import pytest

from sordino.data.budgets import published
from sordino.errors import BadInput
from sordino.privacy.accounting import calibrate
from sordino.server.sharing import balance, nearest

EXTREME = [0, 1, 3, 6]
"""Orders of magnitude that the sites' limits lie apart."""


def drawn(seed: int, orders: float, count: int | None = None):
    """Random a, p, τ² and n/h; a over so many orders of magnitude."""
    source = np.random.default_rng([seed, int(orders)])
    count = count or int(source.integers(2, 9))
    most = 10 ** source.uniform(-orders / 2, orders / 2, count) * source.uniform(0.9, 1.1, count)
    shares = source.dirichlet(np.ones(count)) + 1e-4
    # The scale at which bias and noise matter alike, and far to both sides of it.
    spread = 10 ** source.uniform(-3, 3) / most.sum() ** 2
    return most, shares / shares.sum(), float(spread), float(source.uniform(1, 5))


def plain_nearest(shares, limits):
    """min(p + λ, limit) with λ found by halving: as one would do it by hand."""
    low, high = 0.0, 1.0 + float(limits.max())
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(shares + middle, limits).sum() < 1 else (low, middle)
    return np.minimum(shares + high, limits)


def plain_cost(most, shares, spread, ratio, level):
    apart = plain_nearest(shares, most * level) - shares
    return spread * float(apart @ apart) + ratio * level**2


def plain_least(most, shares, spread, ratio):
    """The least cost on grids that close in on it, over every v that can be."""
    low, high = 1.0 / most.sum(), max(1.0 / most.sum(), float((shares / most).max()))
    best = np.inf
    for _ in range(7):
        grid = np.geomspace(low, high, 60)
        costs = [plain_cost(most, shares, spread, ratio, level) for level in grid]
        at = int(np.argmin(costs))
        best = min(best, costs[at])
        low, high = grid[max(0, at - 1)], grid[min(len(grid) - 1, at + 1)]
    return best


@pytest.mark.parametrize("orders", EXTREME)
@pytest.mark.parametrize("seed", range(3))
def test_the_nearest_weights_are_those_of_a_quadratic_programme(seed, orders):
    most, shares, _, _ = drawn(seed, orders)
    for slack in (1.0 + 1e-9, 1.05, 2.0, 1e3):
        limits = most / most.sum() * slack
        found = nearest(shares, limits)
        np.testing.assert_allclose(found, plain_nearest(shares, limits), atol=1e-9)
        assert found.sum() == pytest.approx(1.0, abs=1e-9)
        assert (found <= limits * (1 + 1e-12)).all()
        weights = cvxpy.Variable(len(shares))
        problem = cvxpy.Problem(
            cvxpy.Minimize(cvxpy.sum_squares(weights - shares)), [weights <= limits, cvxpy.sum(weights) == 1]
        )
        problem.solve(solver=cvxpy.CLARABEL)
        assert float(((found - shares) ** 2).sum()) == pytest.approx(problem.value, abs=1e-7)


@pytest.mark.parametrize("orders", EXTREME)
@pytest.mark.parametrize("seed", range(3))
def test_the_balance_is_the_least_cost_whatever_the_budgets(seed, orders):
    most, shares, spread, ratio = drawn(seed, orders)
    weights, level = balance(most, shares, spread, ratio)
    assert weights.sum() == pytest.approx(1.0, abs=1e-12)
    assert (weights <= most * level * (1 + 1e-9)).all()
    apart = weights - shares
    cost = spread * float(apart @ apart) + ratio * level**2
    assert cost <= plain_least(most, shares, spread, ratio) * (1 + 1e-5)


@pytest.mark.parametrize("seed", range(6))
def test_the_balance_is_that_of_the_joint_programme(seed):
    most, shares, spread, ratio = drawn(seed, 1)
    scale = float(most.sum())
    weights, level = cvxpy.Variable(len(most)), cvxpy.Variable()
    cost = spread * scale**2 * cvxpy.sum_squares(weights - shares) + ratio * cvxpy.square(level)
    problem = cvxpy.Problem(cvxpy.Minimize(cost), [weights <= (most / scale) * level, cvxpy.sum(weights) == 1])
    problem.solve(solver=cvxpy.CLARABEL)
    found, v = balance(most, shares, spread, ratio)
    apart = found - shares
    assert (spread * float(apart @ apart) + ratio * v**2) * scale**2 == pytest.approx(problem.value, rel=1e-5)
    np.testing.assert_allclose(found, weights.value, atol=2e-3)


@pytest.mark.parametrize("orders", EXTREME)
def test_no_spread_means_the_least_noise_and_endless_spread_everybodys_share(orders):
    most, shares, _, ratio = drawn(11, orders, count=7)
    weights, level = balance(most, shares, 0.0, ratio)
    assert level == pytest.approx(1 / most.sum())
    np.testing.assert_allclose(weights, most / most.sum())
    tiny, near = balance(most, shares, 1e-30, ratio)
    assert near == pytest.approx(1 / most.sum(), rel=1e-6)
    np.testing.assert_allclose(tiny, most / most.sum(), atol=1e-6)
    weights, level = balance(most, shares, 1e30, ratio)
    np.testing.assert_allclose(weights, shares, atol=1e-6)
    assert level == pytest.approx((shares / most).max(), rel=1e-6)


def test_one_client_is_all_of_it():
    weights, level = balance(np.array([4.0]), np.array([1.0]), 0.3, 1.0)
    assert (weights.tolist(), level) == ([1.0], 0.25)


@pytest.mark.parametrize("spread", [0.0, 1e-6, 1.0, 1e6])
def test_equal_clients_count_alike(spread):
    weights, level = balance(np.full(5, 3.0), np.full(5, 0.2), spread, 2.0)
    np.testing.assert_allclose(weights, 0.2)
    assert level == pytest.approx(1 / 15)


@pytest.mark.parametrize("seed", range(10))
def test_a_stricter_site_never_counts_more_than_a_laxer_one_of_its_size(seed):
    most, _, spread, ratio = drawn(seed, 2)
    weights, _ = balance(np.sort(most), np.full(len(most), 1 / len(most)), spread, ratio)
    assert (np.diff(weights) >= -1e-9).all()


@pytest.mark.parametrize("seed", range(10))
def test_a_site_that_becomes_stricter_never_counts_more(seed):
    most, shares, spread, ratio = drawn(seed, 1)
    before, _ = balance(most, shares, spread, ratio)
    for strict in range(len(most)):
        less = most.copy()
        less[strict] *= 0.5
        after, level = balance(less, shares, spread, ratio)
        assert after[strict] <= before[strict] + 1e-6
        assert level > 0


def test_one_strict_site_does_not_drown_all():
    """Nineteen sites of a = 1 and one of 10⁻⁴: shares as they are would cost 500 times the noise."""
    most = np.array([1e-4] + [1.0] * 19)
    weights, level = balance(most, np.full(20, 0.05), 1.0, 1.0)
    assert level < 1.2 / 19
    assert 0 < weights[0] <= 1e-4 * level * (1 + 1e-9)


def test_nonsense_is_refused():
    for bad in ([0.0, 1.0], [np.inf, 1.0], [np.nan, 1.0], [-1.0, 1.0]):
        with pytest.raises(BadInput, match="finite budget"):
            balance(np.array(bad), np.array([0.5, 0.5]), 1.0, 1.0)


def _gain(most):
    """Noise per site at its best weights, 1/√Σa², over shared noise, 1/Σa."""
    _, level = balance(most, np.full(len(most), 1 / len(most)), 0.0, 1.0)
    return 1 / np.sqrt((most**2).sum()) / level


def test_what_the_published_budgets_gain():
    """20 budgets: 3.1 to 4.3 times less noise where a ∝ ε; with tight noise 3.4 to 4.4, half colluding 2.4 to 3.1."""
    budgets = {name: np.array(each, dtype=float) for name, each in published()["epsilons"].items()}
    simply = {name: _gain(each) for name, each in budgets.items()}
    assert min(simply, key=simply.get) == "Dist2"
    assert {name: round(simply[name], 1) for name in ("Dist2", "Dist1", "Dist9")} == {
        "Dist2": 3.1,
        "Dist1": 4.3,
        "Dist9": 4.3,
    }
    tight = {name: _gain(120.0 / calibrate(each, 1e-4, 0.05, 1000)) for name, each in budgets.items()}
    assert (round(min(tight.values()), 1), round(tight["Dist1"], 1), round(tight["Dist9"], 1)) == (3.4, 4.4, 4.3)
    halved = [gain / np.sqrt(20 / 10) for gain in tight.values()]
    assert (round(min(halved), 1), round(max(halved), 1)) == (2.4, 3.1)


def test_equal_sites_gain_the_root_of_their_number():
    for count in (2, 9, 20):
        assert _gain(np.full(count, 0.7)) == pytest.approx(np.sqrt(count))
