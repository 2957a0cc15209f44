"""Principal component pursuit against a plain implementation run to full convergence, and its corner cases."""

import time

import numpy as np
import pytest
import torch

from sordino.errors import BadInput
from sordino.server import pursuit


def plain_admm(matrix, iterations=20_000, settle=1e-8):
    """Algorithm 3 as printed (with the sign of line 3 put right): full SVDs, μ = dn/(4Σ|M|), from zero."""
    rows, columns = matrix.shape
    lam, mu = 1 / np.sqrt(max(rows, columns)), rows * columns / (4 * np.abs(matrix).sum())
    sparse, dual = np.zeros_like(matrix), np.zeros_like(matrix)
    for _ in range(iterations):
        left, singular, right = np.linalg.svd(matrix - sparse + dual / mu, full_matrices=False)
        low = (left * np.maximum(singular - 1 / mu, 0)) @ right
        inner = matrix - low + dual / mu
        before, sparse = sparse, np.sign(inner) * np.maximum(np.abs(inner) - lam / mu, 0)
        dual = dual + mu * (matrix - low - sparse)
        off = np.linalg.norm(matrix - low - sparse, axis=0) + np.linalg.norm(sparse - before, axis=0)
        if (off <= settle * np.linalg.norm(matrix, axis=0)).all():
            return low, sparse
    raise AssertionError("the reference did not converge")


def low_rank_plus_spikes(rows, columns, rank, share, seed):
    rng = np.random.default_rng(seed)
    low = rng.normal(size=(rows, rank)) @ rng.normal(size=(rank, columns))
    return low, np.where(rng.random((rows, columns)) < share, rng.choice([-3.0, 3.0], (rows, columns)), 0.0)


def objective(low, sparse):
    lam = 1 / np.sqrt(max(low.shape))
    return np.linalg.svd(low, compute_uv=False).sum() + lam * np.abs(sparse).sum()


VARIANCES = np.array([0.01, 0.04, 0.1, 0.3, 1.0, 1.0, 4.0, 9.0])


@pytest.mark.parametrize(
    ("signal", "rank"), [(0.05, 2), (0.5, 2), (3.0, 1)], ids=["noise dominates", "mixed", "signal dominates"]
)
def test_matches_a_plain_run_to_full_convergence(noise, signal, rank):
    matrix = noise.plant(VARIANCES, signal, rank=rank, rows=400, seed=3).double().numpy()
    low, sparse = plain_admm(matrix)
    found = pursuit.solve(matrix)
    expected = (sparse**2).sum(0) / len(matrix)
    assert found.converged
    np.testing.assert_allclose(found.variances, expected, rtol=0.01)
    np.testing.assert_allclose(found.weights, (1 / expected) / (1 / expected).sum(), rtol=0.01)
    assert np.linalg.norm(found.low_rank.numpy() - low) < 0.01 * np.linalg.norm(matrix)
    assert np.linalg.norm(found.sparse.numpy() - sparse) < 0.01 * np.linalg.norm(matrix)
    assert objective(found.low_rank.numpy(), matrix - found.low_rank.numpy()) <= objective(low, matrix - low) * 1.001


def test_tighter_tolerances_give_the_plain_answer_to_four_digits(noise):
    matrix = noise.plant(VARIANCES, 0.5, rank=2, rows=300, seed=1).double().numpy()
    low, sparse = plain_admm(matrix)
    found = pursuit.solve(matrix, tolerance=1e-6, residual=1e-9, iterations=20_000)
    assert found.converged
    assert objective(found.low_rank.numpy(), found.sparse.numpy()) <= objective(low, sparse) * (1 + 1e-6)
    np.testing.assert_allclose(found.low_rank.numpy(), low, atol=1e-4 * np.abs(matrix).max())
    np.testing.assert_allclose(found.sparse.numpy(), sparse, atol=1e-4 * np.abs(matrix).max())


def test_recovers_a_low_rank_matrix_under_gross_errors():
    low, spikes = low_rank_plus_spikes(800, 30, 2, 0.05, seed=0)
    found_low, found_spikes = pursuit.decompose(low + spikes)
    np.testing.assert_allclose(found_low, low, atol=1e-3)
    np.testing.assert_allclose(found_spikes, spikes, atol=1e-3)
    assert ((np.abs(found_spikes) > 1e-6) == (spikes != 0)).all()


def test_weights_have_settled_where_the_residual_alone_would_stop_too_early(noise):
    """Dist3's noise spans a factor of 176 in size: the residual is 1e-5 when weights are still off by orders."""
    variances = noise.variances("Dist3")
    matrix = noise.plant(variances, 0.3, rows=4000)
    settled = pursuit.solve(matrix.double(), tolerance=1e-6, residual=1e-9)
    found = pursuit.solve(matrix)
    assert settled.converged
    np.testing.assert_allclose(found.weights, settled.weights, rtol=0.01)
    assert found.iterations < 500


@pytest.mark.parametrize("dist", ["Dist2", "Dist3", "Dist9"])
@pytest.mark.parametrize("signal", [0.03, 0.3, 1.0])
def test_where_it_stops_for_weights_variances_have_nearly_settled(noise, dist, signal):
    """It expects a thousandth to come, and is wrong by little."""
    matrix = noise.plant(noise.variances(dist), signal, rows=6000)
    settled = pursuit.solve(matrix.double(), tolerance=1e-6, residual=1e-9, iterations=20_000, parts=False)
    found = pursuit.solve(matrix, residual=pursuit.FOR_WEIGHTS, parts=False)
    assert settled.converged
    assert found.converged
    np.testing.assert_allclose(found.variances, settled.variances, rtol=3e-3)


def test_decompose_adds_up_keeps_the_kind_and_leaves_its_input_alone(noise):
    tensor = noise.plant(VARIANCES, 0.3, rank=2, rows=500)
    copy = tensor.clone()
    threads = torch.get_num_threads()
    for matrix in (tensor, tensor.numpy(), tensor.double()):
        low, sparse = pursuit.decompose(matrix)
        assert type(low) is type(sparse) is type(matrix)
        assert low.dtype == sparse.dtype == matrix.dtype
        off = np.asarray(matrix) - np.asarray(low) - np.asarray(sparse)
        assert np.linalg.norm(off) <= 2e-6 * np.linalg.norm(np.asarray(matrix))
    assert torch.equal(tensor, copy)
    assert torch.get_num_threads() == threads


def test_rows_in_either_memory_order_give_the_same_answer(noise):
    matrix = noise.plant(VARIANCES, 0.5, rank=2, rows=3000)
    tall, wide = pursuit.solve(matrix), pursuit.solve(matrix.T.contiguous().T)
    np.testing.assert_allclose(tall.weights, wide.weights, rtol=1e-3)


def test_blocks_of_rows_do_not_change_the_answer(noise, monkeypatch):
    matrix = noise.plant(VARIANCES, 0.5, rank=2, rows=1000)
    whole = pursuit.solve(matrix)
    monkeypatch.setattr(pursuit, "BLOCK", 100)
    np.testing.assert_allclose(pursuit.solve(matrix).weights, whole.weights, rtol=1e-3)


def test_a_sample_of_rows_estimates_the_same_weights(noise):
    matrix = noise.plant(noise.variances("Dist2"), 0.3, rows=20_000)
    full, sample = pursuit.solve(matrix), pursuit.solve(matrix, rows=8000, seed=1)
    assert len(sample.rows) == len(torch.unique(sample.rows)) == 8000
    assert sample.low_rank.shape == (8000, 20)
    np.testing.assert_allclose(sample.weights, full.weights, rtol=0.1)


def test_a_warm_start_from_the_round_before_ends_at_the_same_weights_sooner(noise):
    first = noise.plant(VARIANCES, 3.0, rank=2, rows=3000, seed=1)
    second = first + 0.05 * noise.plant(VARIANCES, 3.0, rank=2, rows=3000, seed=2)
    earlier = pursuit.solve(first)
    cold, warm = (pursuit.solve(second, start=start, residual=1e-4) for start in (None, earlier.projection))
    np.testing.assert_allclose(warm.weights, cold.weights, rtol=0.01)
    assert warm.iterations <= cold.iterations


def test_the_iteration_limit_is_reported_never_silent(noise):
    matrix = noise.plant(VARIANCES, 0.5, rank=2, rows=400)
    found = pursuit.solve(matrix, iterations=12)
    assert not found.converged
    assert found.iterations == 12
    with pytest.warns(pursuit.NotSettled, match="after 12 iterations"):
        pursuit.warn_unsettled(found)


def test_corner_cases_have_sane_answers(noise):
    matrix = noise.plant(VARIANCES, 0.5, rank=2, rows=400)
    matrix[:, 3] = 0.0
    found = pursuit.solve(matrix)
    assert found.variances[3] == 0.0
    assert (found.low_rank[:, 3].abs() < 1e-5).all()
    nothing = pursuit.solve(torch.zeros(10, 3))
    assert nothing.converged
    assert nothing.rank == 0
    assert torch.equal(nothing.low_rank, torch.zeros(10, 3))
    assert pursuit.solve(torch.randn(50, 1)).weights.tolist() == [1.0]
    flat = torch.randn(6, 30, generator=torch.Generator().manual_seed(0))  # more clients than coordinates
    reference = plain_admm(flat.double().numpy())[1]
    np.testing.assert_allclose(pursuit.solve(flat, tolerance=1e-5).sparse.numpy(), reference, atol=0.02)


def test_one_client_of_another_scale_does_not_slow_the_others_down(noise):
    matrix = noise.plant(VARIANCES, 0.5, rank=2, rows=600)
    matrix[:, 2] *= 1e5
    found = pursuit.solve(matrix.double())
    settled = pursuit.solve(matrix.double(), tolerance=1e-5, iterations=3000)
    others = np.arange(8) != 2
    np.testing.assert_allclose(found.variances[others], settled.variances[others], rtol=0.02)


def test_what_is_not_a_finite_matrix_is_refused_by_name():
    with pytest.raises(BadInput, match=r"columns \[1\]"):
        pursuit.solve(torch.tensor([[1.0, float("nan")], [2.0, 3.0]]))
    with pytest.raises(BadInput, match="shape"):
        pursuit.solve(torch.zeros(5))


@pytest.mark.slow
@pytest.mark.parametrize(("dist", "signal"), [("Dist3", 0.3), ("Dist8", 1.0)])
def test_full_size_against_plain_admm(noise, dist, signal):
    """28,938×20: weights within 1 % of plain ADMM after thousands of iterations, in under 5 s."""
    matrix = noise.plant(noise.variances(dist), signal)
    low, sparse = plain_admm(matrix.double().numpy(), settle=1e-6)
    started = time.perf_counter()
    found = pursuit.solve(matrix)
    assert time.perf_counter() - started < 5.0
    expected = (sparse**2).sum(0)
    np.testing.assert_allclose(found.weights, (1 / expected) / (1 / expected).sum(), rtol=0.01)
    for part, reference in ((found.low_rank, low), (found.sparse, sparse)):
        assert np.linalg.norm(part.numpy() - reference) < 0.002 * np.linalg.norm(matrix.numpy())


@pytest.mark.slow
def test_a_resnet_in_under_forty_seconds_and_two_gigabytes(noise):
    """11.18M×20 with 200,000 sampled rows, beside an input of 0.9 GB."""
    import resource

    variances = noise.variances("Dist2")
    updates = torch.empty(20, 11_181_642)
    generator = torch.Generator().manual_seed(0)
    for row, variance in zip(updates, variances):
        row.normal_(0.0, float(variance**0.5), generator=generator)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    found = pursuit.solve(updates.T, rows=200_000, parts=False)
    assert time.perf_counter() - started < 40.0
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20 < 2.0
    assert noise.excess(found.weights, variances) < 1.01
