"""Factor analysis of the Gram matrix: against independent fits, on planted noise, and where it must not go wrong."""

import time

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.decomposition import FactorAnalysis

from sordino.errors import BadInput
from sordino.server import factor
from sordino.server.columns import gram


def planted_gram(noise, dist, signal, **options):
    matrix = noise.plant(noise.variances(dist), signal, **options)
    return gram(matrix), len(matrix)


def inverse(variances):
    return (1 / variances) / (1 / variances).sum()


def test_the_gram_matrix_is_one_pass_of_products():
    matrix = torch.randn(1001, 7, generator=torch.Generator().manual_seed(0))
    expected = np.array([[float(a.double() @ b.double()) / 1001 for b in matrix.T] for a in matrix.T])
    np.testing.assert_allclose(gram(matrix, block=70), expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(gram(matrix.T.contiguous().T), expected, rtol=1e-5, atol=1e-7)


def test_maximises_the_gaussian_likelihood(noise):
    """Against a general-purpose optimiser on the likelihood as textbooks write it: ln det Σ + tr(Σ⁻¹G)."""
    variances = np.array([0.5, 1.0, 2.0, 4.0, 1.0, 3.0])
    inner = gram(noise.plant(variances, 1.0, rank=1, rows=20_000, seed=2))
    found = factor.fit(inner, 20_000, rank=1)

    def likelihood(values):
        covariance = np.outer(values[6:], values[6:]) + np.diag(np.exp(values[:6]))
        return np.linalg.slogdet(covariance)[1] + np.trace(np.linalg.solve(covariance, inner))

    start = np.concatenate([np.log(np.diag(inner)) - 0.5, np.full(6, 0.5)])
    best = min(
        (minimize(likelihood, start * np.r_[np.ones(6), flip], method="BFGS") for flip in ([1] * 6, [1, -1] * 3)),
        key=lambda one: one.fun,
    )
    np.testing.assert_allclose(found.variances, np.exp(best.x[:6]), rtol=2e-3)
    covariance = np.outer(best.x[6:], best.x[6:]) + np.diag(found.variances)
    np.testing.assert_allclose(covariance, inner, atol=0.05)


def test_agrees_with_scikit_learn_where_its_em_converges(noise):
    variances = np.linspace(0.5, 3.0, 10)
    matrix = noise.plant(variances, 1.0, rank=2, rows=5000).double().numpy()
    peer = FactorAnalysis(2, tol=1e-8, max_iter=20_000).fit(matrix)
    centred = matrix - matrix.mean(0)
    found = factor.fit(centred.T @ centred / len(matrix), len(matrix), rank=2)
    np.testing.assert_allclose(found.variances, peer.noise_variance_, rtol=5e-3)


@pytest.mark.parametrize("signal", [0.03, 0.3, 1.0])
def test_noise_power_is_within_three_percent_of_the_optimum_for_all_published_budgets(noise, signal):
    """Dist1 to Dist9, one round, four planted directions, the rank chosen automatically; mean of three draws.

    A draw of directions in which the quietest client stands nearly alone can cost more in one round (7 % in one of
    thirty with Dist3, 4 % for the maximum likelihood estimate without the prior): no method could know better.
    """
    for dist in noise.dists:
        powers = []
        for seed in range(3):
            found = factor.fit(*planted_gram(noise, dist, signal, rank=4, seed=seed))
            powers.append(noise.excess(inverse(found.variances), noise.variances(dist)))
        assert np.mean(powers) < 1.03, dist
        assert max(powers) < 1.1, dist


def test_pooled_rounds_stay_within_three_percent_at_twice_the_rank(noise):
    """Eight equally strong directions, new ones every round: more than one round can tell apart, pooled it works."""
    for dist in ("Dist2", "Dist3", "Dist8"):
        rounds = []
        for seed in range(5):
            inner, rows = planted_gram(noise, dist, 1.0, rank=8, seed=seed)
            rounds.append(factor.GramOfRound(np.arange(20), inner, rows, factor.fit(inner, rows).rank))
        variances, converged = factor.pool(rounds, 20)
        assert converged
        assert noise.excess(inverse(variances), noise.variances(dist)) < 1.03, dist


def test_the_rank_is_the_smallest_that_fits(noise):
    for rank in (0, 1, 3, 6):
        inner, rows = planted_gram(noise, "Dist1", 1.0 if rank else 0.0, rank=max(rank, 1), seed=3)
        assert factor.fit(inner, rows).rank == rank


def test_too_large_a_rank_never_makes_a_noisy_client_look_quiet(noise):
    """Without the prior these fits send some ψ_i to 0 and give that client all the weight."""
    for rank in (6, 8, 10, 12):
        inner, rows = planted_gram(noise, "Dist3", 0.3, rank=4, seed=0)
        found = factor.fit(inner, rows, rank=rank)
        assert noise.excess(inverse(found.variances), noise.variances("Dist3")) < 1.15, rank


def test_pooling_rounds_with_different_participants(noise):
    variances = np.array([1.0, 2.0, 4.0, 0.5, 1.0, 8.0, 2.0, 1.0, 3.0, 0.7])
    rounds = []
    for seed in range(6):
        who = np.sort(np.random.default_rng(seed).choice(10, 7, replace=False))
        inner = gram(noise.plant(variances[who], 1.0, rank=2, rows=10_000, seed=seed))
        rounds.append(factor.GramOfRound(who, inner, 10_000, 2))
    found, converged = factor.pool(rounds, 11)
    assert converged
    np.testing.assert_allclose(found[:10], variances, rtol=0.05)
    assert np.isnan(found[10])


def test_one_pooled_round_is_a_plain_fit(noise):
    inner, rows = planted_gram(noise, "Dist7", 0.3)
    single = factor.fit(inner, rows)
    pooled, _ = factor.pool([factor.GramOfRound(np.arange(20), inner, rows, single.rank)], 20)
    np.testing.assert_allclose(pooled, single.variances, rtol=1e-6)


def test_the_scale_of_a_client_changes_its_variance_and_nothing_else(noise):
    inner, rows = planted_gram(noise, "Dist4", 0.3)
    scale = np.ones(20)
    scale[7] = 1e4
    before, after = factor.fit(inner, rows), factor.fit(inner * np.outer(scale, scale), rows)
    np.testing.assert_allclose(after.variances / scale**2, before.variances, rtol=1e-3)


def test_ranks_that_can_be_told_from_noise():
    for clients in range(2, 60):
        allowed = [r for r in range(clients) if (clients - r) ** 2 >= clients + r]
        assert factor.largest_rank(clients) == min(max(allowed), factor.MOST)


def test_what_cannot_be_analysed_is_refused():
    with pytest.raises(BadInput, match="more than 3 coordinates"):
        factor.fit(np.eye(3), 3)
    with pytest.raises(BadInput, match="zero or not finite"):
        factor.fit(np.diag([1.0, 0.0, 1.0]), 100)
    with pytest.raises(BadInput, match="rank 3"):
        factor.fit(np.eye(3), 100, rank=3)
    with pytest.raises(BadInput, match="n×n"):
        factor.fit(np.ones((3, 2)), 100)


def test_a_round_of_the_published_size_takes_under_100_ms(noise):
    matrix = noise.plant(noise.variances("Dist3"), 1.0, rank=8)
    times = []
    for _ in range(3):
        started = time.process_time()
        factor.fit(gram(matrix), len(matrix))
        times.append(time.process_time() - started)
    assert min(times) < 0.1


@pytest.mark.slow
def test_a_resnet_in_one_pass_and_under_three_seconds(noise):
    variances = noise.variances("Dist3")
    updates = torch.empty(20, 11_181_642)
    generator = torch.Generator().manual_seed(0)
    for row, variance in zip(updates, variances):
        row.normal_(0.0, float(variance**0.5), generator=generator)
    started = time.perf_counter()
    found = factor.fit(gram(updates.T), updates.shape[1])
    assert time.perf_counter() - started < 3.0
    assert noise.excess(inverse(found.variances), variances) < 1.001
