"""The paper's bounds against plain loops over the formulas."""

import math

import numpy as np
import pytest

from papers import theory_selection as theory
from sordino.errors import BadInput
from sordino.server import bounds
from sordino.server.select import compensation, default_weight, draw, privacy_aware, unbiased, uniform

SOURCE = np.random.default_rng(0)
SIZES = SOURCE.uniform(100, 300, 9)
VARIANCES = 10 ** SOURCE.uniform(-4, -1, 9)
CHOSEN = SOURCE.dirichlet(np.ones(9))
NORMS = [[SOURCE.exponential(2.0, 5) for _ in range(9)] for _ in range(4)]  # [iteration][client][record]
MEAN_NORMS = [0.3, 1.7, 2.5, 0.9]
CLIP, DISSIMILARITY = 1.3, 0.4


def plain_q(norm, mean_norm):
    return max(1.0, norm / CLIP) / max(1.0, mean_norm / CLIP)


def plain_clipping(weights):
    """max over iterations of Σ_k weight_k · mean_d |q − 1|, plus B₂/C."""
    worst = 0.0
    for t in range(4):
        total = 0.0
        for k in range(9):
            total += weights[k] * sum(abs(plain_q(norm, MEAN_NORMS[t]) - 1.0) for norm in NORMS[t][k]) / 5
        worst = max(worst, total)
    return worst + DISSIMILARITY / CLIP


def distortions():
    return [[theory.distortion(NORMS[t][k], MEAN_NORMS[t], CLIP) for k in range(9)] for t in range(4)]


def test_privacy_error_is_the_sum_of_squared_probabilities_times_noise():
    plain = sum(CHOSEN[k] ** 2 * 50 * VARIANCES[k] for k in range(9))
    assert theory.privacy_error(CHOSEN, VARIANCES, 50) == pytest.approx(plain, rel=1e-13)


def test_selection_error_adds_the_selection_gap_the_clipping_gap_and_the_dissimilarity():
    u = SIZES / SIZES.sum()
    plain = sum(abs(CHOSEN[k] - u[k]) for k in range(9)) + plain_clipping(u)
    found = theory.selection_error(CHOSEN, SIZES, distortions(), DISSIMILARITY, CLIP)
    assert found == pytest.approx(plain, rel=1e-13)
    assert theory.selection_error(u, SIZES) == 0.0


def test_clipping_error_weighs_by_selection_probability():
    found = theory.clipping_error(CHOSEN, distortions(), DISSIMILARITY, CLIP)
    assert found == pytest.approx(plain_clipping(CHOSEN), rel=1e-13)
    one = theory.clipping_error(CHOSEN, distortions()[0], DISSIMILARITY, CLIP)
    assert one <= found


AT = theory.StronglyConvex(
    smoothness=3.0, convexity=0.7, gradient=2.0, clip=1.3, beta=2.5, gamma=4.0, trade=0.6, distance=1.9, start=5.0
)


def plain_theorem_one(T, g_select, g_clip, g_dp):
    L, mu, B1, C, beta, gamma, G = 3.0, 0.7, 2.0, 1.3, 2.5, 4.0, 0.6
    Z = math.sqrt(9 / 2 * L * G * gamma * 1.9**2 + (1 + 9 * G) / 2 * beta**2 * T * L / (gamma + T) * C**2 + gamma * 5.0)
    second = math.sqrt(18 * G * beta * T * L / (gamma + T) * B1 * C / mu * g_clip)
    third = math.sqrt(2 * L) * beta * T * C / (2 * (gamma + T))
    return (
        Z / math.sqrt(gamma + T)
        + second
        + third * (g_select + math.sqrt((1 + 1 / G) * g_select**2 + (1 + 9 * G) * g_dp))
    )


@pytest.mark.parametrize("iterations", [1, 17, 1000])
def test_theorem_one(iterations):
    found = theory.strongly_convex(iterations, 0.3, 0.2, 0.05, AT)
    assert found == pytest.approx(plain_theorem_one(iterations, 0.3, 0.2, 0.05), rel=1e-13)


def test_corollary_one_is_the_limit_of_theorem_one():
    limit = theory.strongly_convex_limit(0.3, 0.2, 0.05, AT)
    assert theory.strongly_convex(1e16, 0.3, 0.2, 0.05, AT) == pytest.approx(limit, rel=1e-7)
    plain = math.sqrt(18 * 0.6 * 2.5 * 3.0 * 2.0 * 1.3 / 0.7 * 0.2) + math.sqrt(3.0) * 2.5 * 1.3 / math.sqrt(2) * (
        0.3 + math.sqrt((1 + 1 / 0.6) * 0.3**2 + (1 + 9 * 0.6) * 0.05)
    )
    assert limit == pytest.approx(plain, rel=1e-13)


def plain_theorem_two(T, g_select, g_dp, L, B1, start):
    lasting = B1 / 2 * (g_select + math.sqrt(g_select**2 + 2 * math.sqrt(T) * L * g_dp))
    return lasting + math.sqrt(start / math.sqrt(T) + 1 / 2 / math.sqrt(T) * L * B1**2)


@pytest.mark.parametrize("iterations", [1, 17, 1000])
def test_theorem_two(iterations):
    found = theory.non_convex(iterations, 0.3, 0.05, smoothness=3.0, gradient=2.0, start=5.0)
    assert found == pytest.approx(plain_theorem_two(iterations, 0.3, 0.05, 3.0, 2.0, 5.0), rel=1e-13)


@pytest.mark.parametrize("selection", [0.0, 0.01, 0.4, 2.0])
@pytest.mark.parametrize("privacy", [1e-6, 1e-3, 0.1])
def test_corollary_two_is_where_the_bound_is_smallest(selection, privacy):
    best = theory.best_iterations(selection, privacy, smoothness=1.5, gradient=2.0, start=3.0)
    value = plain_theorem_two(best, selection, privacy, 1.5, 2.0, 3.0)
    grid = np.exp(np.linspace(0.0, math.log(best) + 8.0, 4000))
    assert value <= min(plain_theorem_two(one, selection, privacy, 1.5, 2.0, 3.0) for one in grid) * (1 + 1e-12)
    if best > 1.0:  # eq. 25: the derivative vanishes there
        A, Q, R = selection**2, 2 * privacy * 1.5, 3.0 + 0.5 * 1.5 * 4.0
        rising = 2.0 / 8 * Q / math.sqrt(A + Q * math.sqrt(best)) / math.sqrt(best)
        assert rising == pytest.approx(math.sqrt(R) / 4 * best**-1.25, rel=1e-10)


def test_without_noise_more_rounds_always_help_and_with_much_noise_one_is_best():
    assert theory.best_iterations(0.3, 0.0, 1.0) == math.inf
    assert theory.best_iterations(0.0, 1e6, 1.0) == 1.0


def test_aggregate_noise_is_what_simulated_draws_add():
    """The mean over many schedules of the plain per-round sum, with the term that the chance in T_k adds."""
    p, c = CHOSEN, compensation(CHOSEN, SIZES)
    rounds, select, steps = 30, 4, 3
    for importance in (None, c):
        counted = np.ones(9) if importance is None else c
        found = []
        for seed in range(300):
            schedule = draw(p, rounds, select, seed, importance=importance)
            counts = schedule.counts
            total = 0.0
            for t in range(rounds):
                for k in schedule.asked[t]:
                    total += (counted[k] / select) ** 2 * VARIANCES[k] * counts[k] * steps * CLIP**2
            found.append(total / rounds)
        chance = steps / select * CLIP**2 * sum(counted[k] ** 2 * VARIANCES[k] * p[k] * (1 - p[k]) for k in range(9))
        expected = bounds.aggregate_noise(p, VARIANCES, rounds * steps, CLIP, importance) + chance
        assert np.mean(found) == pytest.approx(expected, abs=4 * np.std(found) / math.sqrt(300))


def test_rank_orders_rules_by_the_bound_and_says_why():
    weight = default_weight(1000, rounds=50, steps=2)
    rules = {
        "uniform": uniform(9),
        "unbiased": unbiased(SIZES),
        "unbiased-compensated": (CHOSEN, compensation(CHOSEN, SIZES)),
        "privacy-aware": privacy_aware(SIZES, VARIANCES, weight),
    }
    ranked = bounds.rank(rules, SIZES, VARIANCES, dimension=1000, iterations=100, clip=CLIP)
    by_name = {one.rule: one for one in ranked}
    assert [one.bound for one in ranked] == sorted(one.bound for one in ranked)
    assert ranked[0].rule == "privacy-aware"
    u = SIZES / SIZES.sum()
    for name in ("uniform", "unbiased", "privacy-aware"):
        p = rules[name]
        gap = sum(abs(p[k] - u[k]) for k in range(9))
        noise = sum(p[k] ** 2 * VARIANCES[k] for k in range(9))
        plain = (gap + math.sqrt(gap**2 + 2 * 1000 * 10.0 * noise)) / 2
        assert by_name[name].bound == pytest.approx(plain, rel=1e-12)
        assert by_name[name].bias == pytest.approx(gap, abs=1e-15)
        assert by_name[name].noise == pytest.approx(CLIP**2 * 100 * noise, rel=1e-12)
        problem_one = gap + math.sqrt(gap**2 + weight * noise)
        assert 2 * by_name[name].bound == pytest.approx(problem_one, rel=1e-12)
    compensated, plain = by_name["unbiased-compensated"], by_name["unbiased"]
    assert compensated.noise == pytest.approx(plain.noise, rel=1e-12)  # compensation takes back what p had gained
    assert compensated.bias == pytest.approx(0.0, abs=1e-15)


@pytest.mark.parametrize(
    ("call", "cause"),
    [
        (lambda: theory.privacy_error([0.5, 0.6], [1, 1], 3), "sum to 1.1"),
        (lambda: theory.privacy_error([0.5, 0.5], [1, -1], 3), r"variances\[1\]"),
        (lambda: theory.selection_error([1.0], [1.0], [[-1.0]]), "distortions"),
        (lambda: theory.selection_error([1.0], [1.0], [1.0, 2.0]), "distortions"),
        (lambda: theory.selection_error([1.0], [1.0], clip=0.0), "clip"),
        (lambda: theory.non_convex(0, 0.1, 0.1, 1.0), "iterations"),
        (lambda: theory.non_convex(1, math.nan, 0.1, 1.0), "selection"),
        (lambda: theory.best_iterations(0.1, -1.0, 1.0), "privacy"),
        (lambda: theory.StronglyConvex(1.0, 1.0, 2.0, 1.0, beta=2.0), "must exceed"),
        (lambda: theory.StronglyConvex(1.0, 1.0, 2.0, 1.0, beta=3.0, gamma=0.5), "gamma"),
        (lambda: theory.StronglyConvex(1.0, 0.0, 2.0, 1.0, beta=3.0), "convexity"),
        (lambda: bounds.rank({"x": [0.5, 0.5]}, [1, 1], [1, 1], 3, 10, smoothness=math.inf), "smoothness"),
    ],
)
def test_refused_with_the_cause(call, cause):
    with pytest.raises(BadInput, match=cause):
        call()
