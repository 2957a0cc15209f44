"""Problem 1: the exact solver against CVXPY, against a dual certificate, and against what the theory says."""

import itertools
import math
import time

import cvxpy as cp
import mpmath
import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from sordino.errors import BadInput
from sordino.server.select import privacy_aware


def plain_objective(p, n, v, weight):
    total = sum(n)
    gap = sum(abs(a - b / total) for a, b in zip(p, n))
    return gap + math.sqrt(gap**2 + weight * sum(a * a * b for a, b in zip(p, v)))


def by_cvxpy(n, v, weight):
    """Clarabel's optimum of Problem 1 as a second-order cone programme."""
    u, scale = n / n.sum(), np.sqrt(weight * v)
    p, gap = cp.Variable(n.size), cp.Variable()
    cost = gap + cp.norm2(cp.hstack([gap, cp.multiply(scale, p)]))
    problem = cp.Problem(cp.Minimize(cost), [cp.sum(p) == 1, p >= 0, cp.norm1(p - u) <= gap])
    problem.solve(solver="CLARABEL", tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11)
    return problem.value


def certified_gap(p, n, v, weight):
    """How far p can be from optimal: g·p − min g for a subgradient g of the convex objective at p. Plain loops.

    Where p_k = u_k, up to its last digits, any slope of |p_k − u_k| in [−1, 1] will do.
    """
    n = np.asarray(n)
    u = list(n / n.sum())
    noise = [weight * one for one in v]
    gap = math.fsum(abs(a - b) for a, b in zip(p, u))
    root = math.hypot(gap, math.sqrt(math.fsum(a * a * b for a, b in zip(p, noise))))
    if root == 0.0:
        return 0.0
    slope = 1.0 + gap / root
    pull = [a * b / root for a, b in zip(p, noise)]
    moved = [0 if abs(a - b) <= 1e-15 * b else 1 if a > b else -1 for a, b in zip(p, u)]
    above = [slope + c for one, c in zip(moved, pull) if one == 1]
    level = sum(above) / len(above) if above else (max(pull) + min(pull)) / 2
    gradient = []
    for one, c in zip(moved, pull):
        gradient.append((one if one else min(1.0, max(-1.0, (level - c) / slope))) * slope + c)
    return math.fsum(a * g for a, g in zip(p, gradient)) - min(gradient)


def by_bisection(n, v, weight):
    """The optimum value in 40 digits: for every hi the lo that moves as much mass, until hi − lo = 2f. Plain loops."""
    with mpmath.workdps(40):
        noise = [mpmath.mpf(weight) * mpmath.mpf(one) for one in v]
        u = [mpmath.mpf(one) / sum(mpmath.mpf(other) for other in n) for one in n]
        marginal = [a * b for a, b in zip(u, noise)]

        def solve(is_too_high):
            low, high = mpmath.mpf(0), max(marginal)
            while high - low > high * mpmath.mpf("1e-30"):
                middle = mpmath.sqrt(low * high) if low > 0 else high / 1000
                low, high = (low, middle) if is_too_high(middle) else (middle, high)
            return high

        def at(high):
            mass = sum((y - high) / w for y, w in zip(marginal, noise) if y > high)
            low = mpmath.mpf(0)
            if min(noise) > 0:
                low = solve(lambda lo: sum((lo - y) / w for y, w in zip(marginal, noise) if y < lo) >= mass)
            square = sum(min(max(y, low), high) ** 2 / w for y, w in zip(marginal, noise) if w > 0)
            return low, 2 * mass + mpmath.sqrt(4 * mass**2 + square)

        def is_wide(high):
            low, value = at(high)
            return high - low > 2 * value

        return float(at(solve(is_wide))[1])


def instance(kind, source):
    """Sizes, variances and weight of a random problem of the given kind."""
    clients = int(source.integers(1 if kind == "any" else 2, 50))
    n = source.uniform(0.5, 1.5, clients) * 600
    v = source.uniform(size=clients)
    if kind == "twelve orders":
        v = 10 ** source.uniform(-12, 0, clients)
    elif kind == "public":
        v[source.random(clients) < 0.3] = 0.0
        v[0] = 0.0
    elif kind == "ties":
        v = np.round(v * 3) / 3
        n = np.round(n / 300) * 300
    elif kind == "equal sizes":
        n[:] = 7.0
    elif kind == "unequal sizes":
        n = 10 ** source.uniform(0, 6, clients)
    elif kind == "equal noise":
        v[:] = 0.3
    elif kind == "public and twelve orders":
        v = 10 ** source.uniform(-12, 0, clients)
        v[-1] = 0.0
    return n, v, float(10 ** source.uniform(-3, 5))


KINDS = (
    "any",
    "twelve orders",
    "public",
    "ties",
    "equal sizes",
    "unequal sizes",
    "equal noise",
    "public and twelve orders",
)


@pytest.mark.filterwarnings("ignore:Solution may be inaccurate")
@pytest.mark.parametrize("kind", KINDS)
def test_objective_equals_cvxpy_on_random_and_degenerate_instances(kind):
    source = np.random.default_rng(KINDS.index(kind))
    for _ in range(25):
        n, v, weight = instance(kind, source)
        p = privacy_aware(n, v, weight)
        value = plain_objective(p, n, v, weight)
        assert abs(value - by_cvxpy(n, v, weight)) <= 1e-8 * max(1.0, value)
        assert abs(math.fsum(p) - 1.0) <= 1e-12
        assert (p > 0.0).all()
        assert certified_gap(p, n, v, weight) <= 1e-12 * max(1.0, value)


@pytest.mark.parametrize("spread", [12, 24, 100])
@pytest.mark.parametrize("weight", [1e-6, 1.0, 1e6, 1e12])
def test_optimal_and_positive_however_far_apart_the_variances_lie(spread, weight):
    source = np.random.default_rng(spread)
    for clients in (2, 3, 17, 300):
        n = source.uniform(1, 1000, clients)
        v = 10 ** source.uniform(-spread, 0, clients)
        p = privacy_aware(n, v, weight)
        assert (p > 0.0).all()
        assert abs(math.fsum(p) - 1.0) <= 1e-12
        assert certified_gap(p, n, v, weight) <= 1e-12 * max(1.0, plain_objective(p, n, v, weight))


@pytest.mark.parametrize(
    ("n", "v", "weight"),
    [
        ([0.9, 0.0014, 0.7, 0.2], [3.8e-32, 5.1e-18, 2.5e-25, 0.0099], 1.5e25),
        ([1.1, 1.05, 1.0], [1e-4, 1.1e-24, 3.7e-29], 7e26),
        ([5.0, 1e-4, 3.0, 2.0], [0.0, 1e-9, 1e-30, 1.0], 1e12),
        ([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 0.1], 40.0),
        ([1e6, 1.0, 1.0], [1e-3, 1e-12, 1.0], 1e9),
    ],
)
def test_clients_lowered_almost_to_nothing_do_not_spoil_the_others(n, v, weight):
    p = privacy_aware(n, v, weight)
    assert plain_objective(p, n, v, weight) == pytest.approx(by_bisection(n, v, weight), rel=1e-12)
    assert (p > 0.0).all()


@pytest.mark.parametrize("scale", [1e-305, 1e-150, 1e150, 1e298])
def test_no_overflow_at_the_ends_of_the_number_range(scale):
    n, v = np.array([3.0, 2.0, 1.0]), scale * np.array([1.0, 0.01, 0.5])
    p = privacy_aware(n, v, 1.0)
    assert np.isfinite(p).all()
    assert (p > 0.0).all()
    assert abs(p.sum() - 1.0) <= 1e-15
    if scale > 1:  # only noise counts
        np.testing.assert_allclose(p, (1 / v) / (1 / v).sum(), rtol=1e-12)
    else:  # only bias counts
        np.testing.assert_array_equal(p, n / n.sum())


def test_probabilities_are_the_shares_exactly_when_the_condition_says_so():
    source = np.random.default_rng(3)
    for _ in range(100):
        n, v, _ = instance("public" if source.random() < 0.3 else "any", source)
        u = n / n.sum()
        spread = (u * v).max() - (u * v).min()
        if spread == 0.0:
            continue
        threshold = 4.0 * (u * u * v).sum() / spread**2  # where √η (max uV − min uV) = 2 √(Σu²V)
        np.testing.assert_array_equal(privacy_aware(n, v, 0.9999 * threshold), u)
        moved = privacy_aware(n, v, 1.0001 * threshold)
        assert (moved != u).any()
        assert plain_objective(moved, n, v, 1.0001 * threshold) < plain_objective(u, n, v, 1.0001 * threshold)


def test_two_clients_agree_with_a_search_over_the_line():
    n = (2.0, 3.0)
    for v, weight in [((0.0, 1.0), 30.0), ((1.0, 9.0), 12.0), ((2.0, 2.0), 100.0), ((1e-6, 1.0), 1e3)]:
        best = minimize_scalar(
            lambda first, v=v, weight=weight: plain_objective((first, 1 - first), n, v, weight),
            bounds=(0.0, 1.0),
            method="bounded",
            options={"xatol": 1e-13},
        )
        p = privacy_aware(n, v, weight)
        assert plain_objective(p, n, v, weight) <= best.fun + 1e-12
        assert p[0] == pytest.approx(best.x, abs=1e-6)


def test_one_client_no_weight_and_all_public_keep_the_shares():
    np.testing.assert_array_equal(privacy_aware([5], [2.0], 1e9), [1.0])
    np.testing.assert_array_equal(privacy_aware([1, 3], [1.0, 50.0], 0.0), [0.25, 0.75])
    np.testing.assert_array_equal(privacy_aware([1, 3], [0.0, 0.0], 1e9), [0.25, 0.75])


def test_public_clients_share_what_they_gain_by_size_and_nobody_else_gains():
    n, v = np.array([10.0, 30.0, 40.0, 20.0]), np.array([0.0, 0.0, 5.0, 0.1])
    u, p = n / n.sum(), privacy_aware([10, 30, 40, 20], [0.0, 0.0, 5.0, 0.1], 100.0)
    assert p[1] / p[0] == pytest.approx(3.0, rel=1e-12)
    assert p[0] > u[0]
    assert (p[2:] <= u[2:]).all()
    assert (p[2:] > 0).all()
    assert certified_gap(p, n, v, 100.0) <= 1e-14


def test_equal_clients_are_treated_equally_and_order_does_not_matter():
    source = np.random.default_rng(5)
    n, v = source.choice([1.0, 2.0, 3.0], 40), source.choice([0.1, 0.5, 4.0], 40)
    p = privacy_aware(n, v, 50.0)
    for size in (1.0, 2.0, 3.0):
        for noise in (0.1, 0.5, 4.0):
            alike = p[(n == size) & (v == noise)]
            assert np.ptp(alike) <= 1e-16
    order = source.permutation(40)
    np.testing.assert_allclose(privacy_aware(n[order], v[order], 50.0), p[order], rtol=1e-13)


def test_more_weight_means_more_bias_and_less_noise():
    source = np.random.default_rng(6)
    n, v = source.uniform(0.5, 1.5, 100), 10 ** source.uniform(-4, 0, 100)
    u = n / n.sum()
    bias, noise = [], []
    for weight in 10.0 ** np.arange(-1, 9):
        p = privacy_aware(n, v, weight)
        bias.append(np.abs(p - u).sum())
        noise.append((p**2 * v).sum())
    assert all(later >= earlier - 1e-15 for earlier, later in itertools.pairwise(bias))
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in itertools.pairwise(noise))
    assert bias[0] == 0.0
    assert bias[-1] > 0.5
    np.testing.assert_allclose(privacy_aware(n, v, 1e30), (1 / v) / (1 / v).sum(), rtol=1e-9)


def test_each_client_keeps_its_share_or_meets_one_of_two_levels_of_marginal_noise():
    source = np.random.default_rng(7)
    n, v = source.uniform(0.5, 1.5, 200), 10 ** source.uniform(-3, 0, 200)
    weight = 300.0
    u, p = n / n.sum(), privacy_aware(n, v, 300.0)
    marginal = weight * p * v
    assert np.ptp(marginal[p > u]) <= 1e-12
    assert np.ptp(marginal[p < u]) <= 1e-12
    width = marginal[p < u].mean() - marginal[p > u].mean()
    assert width == pytest.approx(2 * plain_objective(p, n, v, weight), rel=1e-10)
    assert (p == u).any()


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (([1, -2], [1, 1], 1.0), r"sizes\[1\] is -2"),
        (([1, 0], [1, 1], 1.0), "needs records"),
        (([1, 2], [1, -1], 1.0), r"variances\[1\] is -1"),
        (([1, 2], [1, math.nan], 1.0), r"variances\[1\] is nan"),
        (([1, 2], [1, math.inf], 1.0), r"variances\[1\] is inf"),
        (([1, 2], [1], 1.0), "1 entries for 2 clients"),
        (([1, 2], [1, 1], math.nan), "weight is nan"),
        (([1, 2], [1, 1], -1.0), "weight is -1"),
        (([1, 2], [1, 1], math.inf), "weight is inf"),
        (([1, 2], [1e300, 1], 1e300), "overflows"),
        (([], [], 1.0), "non-empty"),
        ((["many", 2], [1, 1], 1.0), "must be numbers"),
    ],
)
def test_refused_with_the_cause(arguments, cause):
    with pytest.raises(BadInput, match=cause):
        privacy_aware(*arguments)


def seconds(clients, kind):
    source = np.random.default_rng(clients)
    n = source.uniform(0.5, 1.5, clients)
    v = source.uniform(size=clients) if kind == "one order" else 10 ** source.uniform(-12, 0, clients)
    fastest = math.inf
    for _ in range(3):
        start = time.perf_counter()
        p = privacy_aware(n, v, 1e6)
        fastest = min(fastest, time.perf_counter() - start)
    assert abs(p.sum() - 1.0) <= 1e-12
    assert (p != n / n.sum()).any()
    return fastest


@pytest.mark.parametrize("kind", ["one order", "twelve orders"])
def test_a_hundred_thousand_clients_in_a_blink(kind):
    assert seconds(100_000, kind) < 0.15


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one order", "twelve orders"])
def test_a_million_clients_in_under_two_seconds(kind):
    assert seconds(1_000_000, kind) < 2.0


def test_a_large_problem_is_solved_to_the_last_digit():
    source = np.random.default_rng(9)
    n, v = source.uniform(0.5, 1.5, 20_000), 10 ** source.uniform(-6, 0, 20_000)
    assert certified_gap(privacy_aware(n, v, 1e5), n, v, 1e5) <= 1e-13
