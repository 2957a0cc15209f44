"""Weights from a column matrix: the public face, each against a plain reference."""

import cvxpy as cp
import numpy as np
import pytest
import torch

from sordino.errors import BadInput
from sordino.server import aggregate, spread
from sordino.server.columns import inverse_weights

VARIANCES = np.array([0.1, 0.5, 1.0, 1.0, 2.0, 4.0, 8.0, 3.0])
FACES = [aggregate.robust_hdp, aggregate.factor_hdp, aggregate.random_effects]


@pytest.fixture(scope="module")
def updates(noise):
    return noise.plant(VARIANCES, 0.5, rank=2, rows=2000)


@pytest.mark.parametrize("face", FACES)
def test_weights_are_a_distribution_of_the_kind_that_came_in(face, updates):
    for matrix in (updates, updates.numpy(), updates.double(), updates.T.contiguous().T):
        weights = face(matrix)
        assert type(weights) is type(matrix)
        assert weights.shape == (8,)
        assert (np.asarray(weights) >= 0).all()
        assert float(weights.sum()) == pytest.approx(1.0, abs=1e-6)
    assert (updates @ face(updates)).shape == (2000,)


@pytest.mark.parametrize("face", FACES)
def test_who_sent_nothing_counts_for_nothing_and_changes_nothing(face, updates):
    some = updates.double()
    with_silence = torch.cat([some[:, :3], torch.zeros(2000, 1), some[:, 3:]], dim=1)
    weights = face(with_silence)
    assert weights[3] == 0.0
    others = torch.cat([weights[:3], weights[4:]])
    torch.testing.assert_close(others, face(some), rtol=5e-3, atol=1e-4)


@pytest.mark.parametrize("face", FACES)
def test_broken_matrices_are_refused_with_the_column(face, updates):
    broken = updates.clone()
    broken[17, 5] = float("nan")
    with pytest.raises(BadInput, match=r"\[5\]"):
        face(broken)
    with pytest.raises(BadInput, match="shape"):
        face(updates[:, 0])
    with pytest.raises(BadInput, match="every update is zero"):
        face(torch.zeros(10, 4))


def test_robust_hdp_is_within_one_percent_of_the_optimum_where_noise_dominates(noise):
    """Published budgets, no shared signal to speak of: the paper's Table 10 says 0.4 %. Dist3 at full size."""
    for dist in noise.dists:
        variances = noise.variances(dist)
        weights = aggregate.robust_hdp(noise.plant(variances, 1e-3, rows=28_938 if dist == "Dist3" else 8000))
        assert noise.excess(weights, variances) < 1.01, dist


def test_robust_hdp_weighs_by_the_inverse_power_of_the_noise_part(updates):
    from sordino.server import pursuit

    _, sparse = pursuit.decompose(updates)
    inverse = [1.0 / sum(float(x) ** 2 for x in column) for column in sparse.T]
    np.testing.assert_allclose(aggregate.robust_hdp(updates), np.array(inverse) / sum(inverse), rtol=1e-3)


def test_robust_hdp_estimates_from_sampled_rows(noise):
    variances = noise.variances("Dist2")
    matrix = noise.plant(variances, 1e-3, rows=20_000)
    sampled, other = (aggregate.robust_hdp(matrix, rows=5000, seed=seed) for seed in (0, 1))
    assert noise.excess(sampled, variances) < 1.01
    assert not torch.equal(sampled, other)


def test_inverse_weights_of_known_variances():
    np.testing.assert_allclose(inverse_weights([1.0, 2.0, 4.0]), np.array([4.0, 2.0, 1.0]) / 7)
    assert inverse_weights([0.0, 1.0, 0.0]).tolist() == [0.5, 0.0, 0.5]
    assert inverse_weights([np.inf, 1.0]).tolist() == [0.0, 1.0]


def different_clients(rows=3000, between=0.5, seed=0):
    """A common mean, clients that differ from it, and noise of VARIANCES: (updates, true updates)."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=(rows, 1)) + np.sqrt(between) * rng.normal(size=(rows, 8))
    return truth + rng.normal(size=(rows, 8)) * np.sqrt(VARIANCES), truth


def test_reml_finds_the_spread_between_clients_and_how_sure_it_is():
    found = []
    for seed in range(40):
        matrix, _ = different_clients(rows=500, between=0.05, seed=seed)
        found.append(spread.reml(matrix.T @ matrix / 500, VARIANCES, 500))
    estimates = np.array([one.estimate for one in found])
    assert abs(estimates.mean() - 0.05) < 3 * estimates.std() / np.sqrt(40)
    assert estimates.std() == pytest.approx(np.mean([one.error for one in found]), rel=0.35)


def test_reml_maximises_the_restricted_likelihood_of_the_data_themselves():
    matrix, _ = different_clients(rows=60)
    contrasts = np.linalg.svd(np.eye(8) - 1 / 8)[0][:, :7]  # orthonormal, and orthogonal to the common mean

    def restricted(tau):
        covariance = contrasts.T @ np.diag(VARIANCES + tau) @ contrasts
        return sum(
            np.linalg.slogdet(covariance)[1] + row @ contrasts @ np.linalg.solve(covariance, contrasts.T @ row)
            for row in matrix
        )

    grid = np.linspace(0.2, 1.2, 101)
    best = grid[np.argmin([restricted(tau) for tau in grid])]
    assert spread.reml(matrix.T @ matrix / 60, VARIANCES, 60).estimate == pytest.approx(best, abs=0.011)


@pytest.mark.parametrize("horizon", [0.0, 1.0, 30.0])
def test_structured_votes_solve_the_quadratic_programme(horizon):
    rng = np.random.default_rng(1)
    loadings = rng.normal(size=(8, 3))
    gamma, shares = loadings @ loadings.T, rng.dirichlet(np.ones(8))
    votes = spread.least_error(gamma, VARIANCES, shares, horizon)
    w = cp.Variable(8)
    error = horizon * cp.quad_form(w - shares, cp.psd_wrap(gamma)) + cp.sum(cp.multiply(VARIANCES, w**2))
    best = cp.Problem(cp.Minimize(error), [w >= 0, cp.sum(w) == 1])
    best.solve(solver=cp.CLARABEL)
    np.testing.assert_allclose(votes, w.value, atol=1e-5)


def test_exchangeable_votes_are_the_structured_ones_for_a_diagonal_and_a_common_part():
    shares = np.arange(1.0, 9.0) / 36
    for tau, horizon in ((0.3, 1.0), (0.05, 100.0)):
        gamma = tau * np.eye(8) + 2.0
        expected = spread.least_error(gamma, VARIANCES, shares, horizon)
        np.testing.assert_allclose(spread.exchangeable(VARIANCES, tau, shares, horizon), expected, atol=1e-8)


def test_random_effects_reach_from_inverse_variance_to_the_shares():
    shares = np.arange(1.0, 9.0) / 36
    inverse = (1 / VARIANCES) / (1 / VARIANCES).sum()
    np.testing.assert_allclose(spread.exchangeable(VARIANCES, 0.0, shares), inverse)
    np.testing.assert_allclose(spread.exchangeable(VARIANCES, 1e9, shares), shares, rtol=1e-6)
    np.testing.assert_allclose(spread.exchangeable(np.zeros(8), 0.1, shares), shares)
    equal = spread.exchangeable(VARIANCES, 0.7, np.full(8, 1 / 8), horizon=2.0)
    np.testing.assert_allclose(equal, (1 / (VARIANCES + 1.4)) / (1 / (VARIANCES + 1.4)).sum())


def test_random_effects_estimate_the_mean_of_the_clients_better_than_either_extreme():
    matrix, truth = different_clients(rows=4000, between=0.5)
    errors = {
        name: float(((matrix @ weights - truth.mean(1)) ** 2).mean())
        for name, weights in {
            "random effects": aggregate.random_effects(matrix, VARIANCES, horizon=1.0),
            "inverse variance": inverse_weights(VARIANCES),
            "equal": np.full(8, 1 / 8),
        }.items()
    }
    assert min(errors, key=errors.get) == "random effects"


def test_random_effects_compare_what_clients_say_per_local_step():
    """Twice the steps, twice the update: per step such a client is quieter than its raw noise suggests."""
    rng = np.random.default_rng(0)
    steps = np.array([1.0, 1, 2, 2, 4, 4, 8, 8])
    variances = np.full(8, 0.5) * steps  # noise adds up over steps
    matrix = steps * rng.normal(size=(5000, 1)) + rng.normal(size=(5000, 8)) * np.sqrt(variances)
    weights = aggregate.random_effects(matrix, variances, steps=steps, horizon=0.0)
    votes = weights * steps / (weights * steps).sum()
    np.testing.assert_allclose(votes, steps / steps.sum(), rtol=1e-6)  # 1/v_i = K_i²/σ_i² ∝ K_i


def test_senseless_random_effects_are_refused(updates):
    with pytest.raises(BadInput, match="spread_by"):
        aggregate.random_effects(updates, VARIANCES, spread_by="guess")
    with pytest.raises(BadInput, match="horizon"):
        aggregate.random_effects(updates, VARIANCES, horizon=-1.0)
    with pytest.raises(BadInput, match="finite and ≥ 0"):
        aggregate.random_effects(updates, -VARIANCES)
