"""Uploads that are added up as they come give what the same rule gives for their matrix."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from sordino.errors import SordinoError
from sordino.server import rules
from sordino.server.defend import row_norms
from sordino.server.facts import Facts
from sordino.server.running import Running

ROWS, WIDTH = 9, 5000


def facts(**changes) -> Facts:
    rng = np.random.default_rng(0)
    noises, batches = rng.uniform(0.5, 3.0, ROWS), rng.uniform(20, 60, ROWS)
    steps = rng.integers(1, 4, ROWS).astype(float)
    made = Facts(
        clients=np.arange(ROWS),
        sizes=rng.integers(50, 500, ROWS).astype(float),
        epsilons=rng.uniform(0.5, 8.0, ROWS),
        batches=batches,
        noises=noises,
        steps=steps,
        variances=steps * (0.1 * noises / batches) ** 2,
        selection=rng.uniform(0.5, 2.0, ROWS),
        round=3,
    )
    return replace(made, **changes)


def updates(known: Facts) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, WIDTH, generator=generator) * torch.from_numpy(np.sqrt(known.variances)).float()[:, None]


def added(rule, known: Facts, matrix: torch.Tensor, chunks=((0, 1), (1, 5), (5, 9))):
    running = Running.of(rule, known, WIDTH)
    for first, last in chunks:
        running.add(np.arange(first, last), matrix[first:last].clone())
    return rule(running, known, {})


def agree(a, b) -> None:
    assert torch.linalg.vector_norm(a.delta - b.delta) <= 1e-6 * torch.linalg.vector_norm(b.delta)
    assert a.weights == pytest.approx(b.weights, rel=1e-12)
    assert a.diagnostics.get("log") == b.diagnostics.get("log")
    for name in ("noise_power", "least_noise_power"):
        assert a.diagnostics[name] == pytest.approx(b.diagnostics[name])


RULES = [rules.data_weighted(), rules.uniform(), rules.weiavg()]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_honest_uploads(rule):
    known = facts()
    agree(added(rule, known, updates(known)), rule(updates(known), known, {}))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_broken_and_poisoned_uploads_are_refused_and_bounded_alike(rule):
    known, matrix = facts(), updates(facts())
    matrix[2, 7], matrix[6] = math.nan, math.inf
    matrix[0] *= 1e6
    matrix[4] = 1e25
    found = added(rule, known, matrix)
    agree(found, rule(matrix, known, {}))
    assert found.weights[2] == found.weights[6] == 0
    assert sum("bounded" in line for line in found.diagnostics["log"]) == 2


def test_no_usable_upload_leaves_the_model_as_it_is():
    known = facts()
    found = added(rules.data_weighted(), known, torch.full((ROWS, WIDTH), math.nan))
    assert found.delta.shape == (WIDTH,)
    assert not found.delta.any()


def test_rules_that_look_at_updates_keep_their_matrix():
    assert Running.of(rules.robust_hdp(), facts(), WIDTH) is None
    assert Running.of(rules.declared_variance(), facts(), WIDTH) is None


def test_without_noise_nothing_bounds_a_row_in_advance_so_the_matrix_is_kept():
    silent = facts(noises=np.zeros(ROWS), variances=np.zeros(ROWS))
    assert Running.of(rules.data_weighted(), silent, WIDTH) is None


def test_refusing_everyone_who_counted_is_an_error_not_a_wrong_sum():
    """WeiAvg gives a public client everything; when that one is refused, the others were counted with nothing."""
    known = facts(epsilons=np.array([math.inf] + [1.0] * (ROWS - 1)))
    matrix = updates(known)
    matrix[0] = math.nan
    with pytest.raises(SordinoError, match="counted most were refused"):
        added(rules.weiavg(), known, matrix)


def test_norms_of_rows_are_right_where_float32_is_not():
    matrix = torch.randn(4, 20_001, generator=torch.Generator().manual_seed(0))
    matrix[1] *= 1e25
    matrix[2] *= 1e-25
    matrix[3, 5] = math.nan
    found = row_norms(matrix)
    assert found[:3] == pytest.approx(torch.linalg.vector_norm(matrix[:3].double(), dim=1).numpy(), rel=1e-6)
    assert np.isnan(found[3])


def test_a_rule_that_looks_at_more_than_a_sum_gets_its_matrix():
    """What was answered, or uploaded in place of an update, is not known while updates are added up."""
    plain = rules.data_weighted()
    assert Running.of(plain, facts(), WIDTH) is not None
    assert Running.of(replace(plain, needs=("loss",)), facts(), WIDTH) is None
    assert Running.of(replace(plain, receive=lambda uploads, known: uploads["update"]), facts(), WIDTH) is None
