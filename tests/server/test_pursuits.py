"""Principal component pursuit of many matrices at once: every one as it is solved alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_rules import facts_of, round_of

import sordino as sd
from sordino.server import estimated, pursuit, pursuits
from sordino.server.facts import Outcome
from sordino.server.rule import Call, combine_rounds
from sordino.study.run import prepare
from sordino.study.session import train_prepared, train_together


def matrix(seed: int, height: int = 400, wide: int = 8, scale: float = 1.0) -> torch.Tensor:
    """Two shared directions, and noise of another size in every column."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(height, 2, generator=generator) @ torch.randn(2, wide, generator=generator)
    noise = torch.randn(height, wide, generator=generator) * torch.linspace(0.1, 1.0, wide)
    return scale * (0.1 * (1 + seed) * shared + noise)


def agree(found: pursuit.Pursuit, alone: pursuit.Pursuit, rounding: float = 1e-6) -> None:
    assert (found.iterations, found.converged, found.rank) == (alone.iterations, alone.converged, alone.rank)
    np.testing.assert_allclose(found.variances, alone.variances, rtol=rounding)
    np.testing.assert_allclose(found.weights, alone.weights, rtol=rounding)
    np.testing.assert_allclose(found.singular_values, alone.singular_values, rtol=rounding, atol=1e-6)
    np.testing.assert_allclose(found.matrix_singular_values, alone.matrix_singular_values, rtol=rounding)
    np.testing.assert_allclose(found.projection.numpy(), alone.projection.numpy(), atol=1e-5)


@pytest.fixture
def batches(monkeypatch):
    """How many matrices every batch had."""
    seen = []

    class Counted(pursuits._Batch):
        def __init__(self, given, *rest):
            seen.append(len(given))
            super().__init__(given, *rest)

    monkeypatch.setattr(pursuits, "_Batch", Counted)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_is_solved_as_alone_whatever_its_size_and_leaves_when_it_has_settled(batches, dtype):
    given = [matrix(seed, scale=10.0 ** (seed - 2)).to(dtype) for seed in range(5)]
    settings = {"residual": pursuit.FOR_WEIGHTS}
    alone = [pursuit.solve(one, **settings) for one in given]
    assert len({one.iterations for one in alone}) > 1, "they settle at different times"
    for found, wanted in zip(pursuits.solve_all(given, **settings), alone):
        agree(found, wanted)
        torch.testing.assert_close(found.low_rank, wanted.low_rank, rtol=1e-4, atol=1e-5 * float(wanted.sparse.std()))
        torch.testing.assert_close(found.sparse, wanted.sparse, rtol=1e-4, atol=1e-5 * float(wanted.sparse.std()))
    assert batches == [5]


def test_warm_starts_and_drawn_rows_are_each_ones_own(batches):
    first = [matrix(seed, 600) for seed in range(3)]
    warm = [pursuit.solve(first[0]).projection, None, pursuit.solve(first[2]).projection]
    second = [one + 0.01 * matrix(9, 600) for one in first]
    settings = {"rows": 500, "seed": 4, "parts": False, "residual": 1e-4}
    found = pursuits.solve_all(second, starts=warm, **settings)
    for one, got, start in zip(second, found, warm):
        wanted = pursuit.solve(one, start=start, **settings)
        agree(got, wanted)
        assert torch.equal(got.rows, wanted.rows)
        assert got.low_rank is None
    assert batches == [3]


def test_the_limit_ends_those_that_have_not_settled():
    given = [matrix(seed) for seed in range(3)]
    alone = [pursuit.solve(one, iterations=45, residual=pursuit.FOR_WEIGHTS, parts=False) for one in given]
    found = pursuits.solve_all(given, iterations=45, residual=pursuit.FOR_WEIGHTS, parts=False)
    assert {one.iterations for one in alone} == {45} or len({one.converged for one in alone}) == 2
    for one, wanted in zip(found, alone):
        agree(one, wanted)
        assert one.unsettled == pytest.approx(wanted.unsettled, rel=1e-2)


def test_only_small_ones_of_one_shape_are_solved_together_and_so_many_as_fit(batches, monkeypatch):
    given = [matrix(0), matrix(1, wide=7), torch.zeros(400, 8), matrix(2), matrix(3), matrix(4), matrix(5, 9000)]
    monkeypatch.setattr(pursuits, "TOGETHER", {"cpu": 2 * matrix(0).numel()})
    found = pursuits.solve_all(given, residual=pursuit.FOR_WEIGHTS, parts=False)
    assert batches == [2, 2], "the one of zeros, of other shapes, and the large one are solved alone"
    for one, got in zip(given, found):
        agree(got, pursuit.solve(one, residual=pursuit.FOR_WEIGHTS, parts=False))


def rounds(count: int) -> list[Call]:
    """The same round of several runs, each with updates of its own; in one somebody sends what is refused."""
    about = facts_of(range(8))
    calls = [Call(round_of(about, dimension=500, seed=seed), about, {}) for seed in range(count)]
    calls[1].updates[3] = torch.nan
    return calls


def alike(found: Outcome, wanted: Outcome) -> None:
    torch.testing.assert_close(found.delta, wanted.delta, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(found.weights, wanted.weights, rtol=1e-5)  # float32
    assert found.diagnostics.keys() == wanted.diagnostics.keys()
    assert found.diagnostics["iterations"] == wanted.diagnostics["iterations"]
    assert found.diagnostics.get("log") == wanted.diagnostics.get("log")
    assert found.memory.keys() == wanted.memory.keys()


def test_rules_of_one_making_combine_at_once_each_as_alone(batches):
    rule = estimated.robust_hdp()
    calls = rounds(4)
    found = combine_rounds([estimated.robust_hdp() for _ in calls], calls)
    assert batches == [3], "where a row was refused the matrix has another shape"
    batches.clear()
    for one, call in zip(found, calls):
        alike(one, rule(*call))
    later = [Call(call.updates * 1.1, replace(call.facts, round=2), one.memory) for call, one in zip(calls, found)]
    for one, call in zip(combine_rounds([rule] * 4, later), later):
        alike(one, rule(*call))
    assert batches == [3]


def test_rules_with_other_options_changed_ones_and_ones_of_ones_own_are_called_by_themselves(batches):
    first = estimated.robust_hdp()

    def own(updates, facts, memory):
        return Outcome(updates.mean(0), None, memory)

    rules = [first, estimated.robust_hdp(every=2), replace(first, refuse_small=False), replace(first, combine=own)]
    calls = [Call(*call) for call in rounds(5) if bool(call.updates.isfinite().all())]
    found = combine_rounds(rules, calls)
    assert batches == []
    assert found[3].weights is None
    for rule, one, call in zip(rules[:3], found, calls):
        alike(one, rule(*call))


def test_nobody_is_estimated_again_between_two_estimates_unless_somebody_is_new(batches):
    rule, calls = estimated.robust_hdp(every=3), rounds(3)
    first = combine_rounds([rule] * 3, calls)
    later = [Call(call.updates, replace(call.facts, round=2), one.memory) for call, one in zip(calls, first)]
    later[2] = later[2]._replace(memory={})
    batches.clear()
    found = combine_rounds([rule] * 3, later)
    assert ["iterations" in one.diagnostics for one in found] == [False, False, True]
    assert batches == []


def test_runs_of_a_stack_end_as_alone(batches):
    """Nine runs of Robust-HDP, their pursuits at once, against each trained by itself."""
    clients = sd.data.load("digits").subset(300, 0).partition("iid", clients=6, seed=0)
    settings = {"rounds": 3, "rate": 0.3, "lr": 0.3}
    runs = [
        prepare(clients.with_budgets(name, delta=1e-4, seed=seed), "logistic", "robust-hdp", seed, None, settings)
        for name in ("dist1", "dist2", "dist3")
        for seed in range(3)
    ]
    alone = [train_prepared(one) for one in runs]
    assert batches == []
    together = train_together(runs, "cpu")
    assert batches == [9, 9, 9]
    for one, wanted in zip(together, alone):
        torch.testing.assert_close(one.weights, wanted.weights, rtol=1e-4, atol=1e-5)
        for mine, theirs in zip(one.metrics, wanted.metrics):
            assert mine["weights"] == pytest.approx(theirs["weights"], rel=1e-4)
            assert mine["diagnostics"]["iterations"] == theirs["diagnostics"]["iterations"]
