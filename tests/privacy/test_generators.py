"""Randomness: keyed streams never collide and do not depend on chunking; secret ones cannot be repeated or stored."""

import itertools
import os
import pickle

import numpy as np
import pytest
import torch
from scipy import stats

from sordino.errors import BadInput, SordinoError
from sordino.privacy.generators import Keyed, Secret, Turn, draw
from sordino.privacy.normals import BLOCK
from sordino.privacy.types import Sampling


def test_every_part_of_the_key_gives_another_stream():
    draws = set()
    kinds = itertools.product(("r1", "r2"), ("a", "b"), (1, 2), (0, 1), ("gradient", "loss"), (0, 1))
    for run, client, number, copy, what, step in kinds:
        out = Keyed(run).normal([Turn(client, number, copy)], what, step, torch.empty(1, 8))
        draws.add(tuple(out[0].tolist()))
    assert len(draws) == 64


def test_keys_cannot_be_confused_by_joining_their_parts():
    first = Keyed("ab").normal([Turn("c", 1)], "x", 0, torch.empty(1, 4))
    second = Keyed("a").normal([Turn("bc", 1)], "x", 0, torch.empty(1, 4))
    assert not torch.equal(first, second)


def test_noise_does_not_depend_on_chunking_bit_for_bit():
    turns = [Turn(f"c{i}", 3) for i in range(7)]
    whole = Keyed("k").normal(turns, "gradient", 2, torch.empty(7, 1001))
    parts = [
        Keyed("k").normal(turns[i : i + n], "gradient", 2, torch.empty(n, 1001)) for i, n in ((0, 3), (3, 1), (4, 3))
    ]
    assert torch.equal(whole, torch.cat(parts))


def _float_rows(width):
    return Keyed("k").normal([Turn("a", 1), Turn("b", 1)], "gradient", 0, torch.empty(2, width)).numpy()


def _exact_rows(source):
    return lambda width: np.stack(
        [source.rounded(Turn(name, 1), "gradient", 0, width, 1e7).numpy() / 1e7 for name in "ab"]
    )


@pytest.mark.parametrize(
    "rows", [_float_rows, _exact_rows(Keyed("k")), _exact_rows(Secret())], ids=["keyed", "keyed exact", "secret"]
)
def test_long_rows_are_standard_normal_within_and_across_their_blocks(rows):
    out = rows(2 * BLOCK + 5000)
    for row in out:
        blocks = [row[:BLOCK], row[BLOCK : 2 * BLOCK], row[2 * BLOCK :]]
        assert all(stats.kstest(block, "norm").pvalue > 1e-4 for block in blocks)
        assert abs(np.corrcoef(blocks[0], blocks[1])[0, 1]) < 0.01
        assert not np.isin(blocks[2][:10], row[: 2 * BLOCK]).all()
    assert abs(np.corrcoef(out)[0, 1]) < 0.01


def test_long_rows_do_not_depend_on_threads_chunking_or_length_bit_for_bit():
    turns, width, before = [Turn("a", 1), Turn("b", 1)], 2 * BLOCK + 77, torch.get_num_threads()
    alone = Keyed("k").normal(turns, "gradient", 0, torch.empty(2, width))
    try:
        torch.set_num_threads(3)
        threaded = Keyed("k").normal(turns, "gradient", 0, torch.empty(2, width))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone, threaded)
    assert torch.equal(alone[1:], Keyed("k").normal(turns[1:], "gradient", 0, torch.empty(1, width)))
    assert torch.equal(alone[:, :500], Keyed("k").normal(turns, "gradient", 0, torch.empty(2, 500)))


@pytest.mark.parametrize("width", [300, BLOCK + 300])
def test_noise_added_in_place_is_the_noise_that_fill_draws_times_the_scale(width):
    turns, scale = [Turn("a", 1), Turn("b", 1)], torch.tensor([2.0, 0.5])
    noise = Keyed("k").normal(turns, "gradient", 0, torch.empty(2, width))
    held = torch.randn(2, width, generator=torch.Generator().manual_seed(0))
    added = Keyed("k").normal(turns, "gradient", 0, held.clone(), scale)
    assert torch.allclose(added, held + scale[:, None] * noise, atol=1e-6)


def test_noise_is_standard_normal_and_rows_are_independent():
    out = Keyed("k").normal([Turn("a", 1), Turn("b", 1)], "gradient", 0, torch.empty(2, 50_000)).numpy()
    assert stats.kstest(out[0], "norm").pvalue > 1e-3
    assert abs(np.corrcoef(out)[0, 1]) < 0.02


def test_sampling_and_noise_do_not_share_a_stream():
    source, turn = Keyed("k"), Turn("a", 1)
    coins = np.random.Generator(np.random.Philox(key=source._key(turn, "gradient", "sampling", 0))).random(4)
    noise = np.random.Generator(np.random.Philox(key=source._key(turn, "gradient", "noise", 0))).random(4)
    assert not np.allclose(coins, noise)


@pytest.mark.parametrize("source", [Keyed("k"), Secret()], ids=["keyed", "secret"])
def test_poisson_draws_are_independent_coins(source):
    """Inclusion counts match the rate, pairs of records and pairs of steps are uncorrelated, sizes are binomial."""
    batches = source.batches(Turn("a", 1), "gradient", Sampling.poisson(0.3), 50, 4000)
    hits = np.zeros((4000, 50))
    for step, batch in enumerate(batches):
        hits[step, batch] = 1
    assert hits.mean() == pytest.approx(0.3, abs=0.01)
    correlation = np.corrcoef(hits.T) - np.eye(50)
    assert np.abs(correlation).max() < 0.1  # 6.3 standard deviations: secret draws cannot be seeded
    assert np.abs(np.corrcoef(hits[:-1].ravel(), hits[1:].ravel())[0, 1]) < 0.01
    assert hits.sum(1).var() == pytest.approx(50 * 0.3 * 0.7, rel=0.1)


def test_batches_drawn_ahead_are_those_that_would_be_drawn_when_asked_for():
    poisson = Sampling("poisson", 0.1)
    asked = [(Turn(name, 2), "gradient", poisson, 50, 3) for name in ("a", "b")]
    ahead, fresh = Keyed("run"), Keyed("run")
    ahead.expect(asked)
    for one in (*asked, *asked):  # once from what was drawn ahead, once anew
        drawn, wanted = ahead.batches(*one), fresh.batches(*one)
        assert np.array_equal(drawn.positions, wanted.positions)
        assert np.array_equal(drawn.ends, wanted.ends)
    ahead.expect(asked)
    ahead.expect([])
    assert not ahead._ahead, "what was not asked for is forgotten"


def test_fixed_draws_have_the_exact_size_without_repeats_and_cover_evenly():
    generator = np.random.default_rng(0)
    batches = draw(generator, Sampling.fixed(7, 20), 20, 3000)
    assert all(len(set(b.tolist())) == 7 for b in batches)
    counts = np.bincount(np.concatenate(batches), minlength=20)
    assert stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize(
    ("rate", "records", "size"), [(0.015, 100, 1), (0.019999, 100, 1), (0.02, 100, 2), (0.99, 10, 9)]
)
def test_fixed_draws_never_have_more_records_than_their_rate_paid_for(rate, records, size):
    drawn = draw(np.random.default_rng(0), Sampling("fixed", rate), records, 3)
    assert [len(one) for one in drawn] == [size] * 3
    assert size <= rate * records + 1e-9


def test_a_rate_that_came_from_whole_numbers_gives_them_back_and_any_other_is_refused():
    for records in range(1, 400):
        for batch in range(1, records + 1):
            sampling = Sampling.fixed(batch, records)
            assert sampling.size(records) == batch
            sampling.check_whole(records)
    for rate, records in ((0.015, 100), (0.001, 100), (1 / 3, 100)):
        with pytest.raises(BadInput, match="whole number of records"):
            Sampling("fixed", rate).check_whole(records)
    Sampling.poisson(0.015).check_whole(100)


def test_full_draws_are_everything():
    assert [one.tolist() for one in draw(np.random.default_rng(0), Sampling.full(), 5, 2)] == [[0, 1, 2, 3, 4]] * 2


@pytest.mark.parametrize("rate", [1e-6, 0.003, 0.5, 0.999, 1.0])
def test_poisson_draws_have_the_right_rate_at_both_ends(rate):
    """Gaps between heads: every position is equally likely, batch sizes are binomial, no record twice in a batch."""
    batches = draw(np.random.default_rng(1), Sampling.poisson(rate), 40, 20_000)
    assert len(batches) == 20_000
    assert all(len(set(b.tolist())) == len(b) and (b < 40).all() for b in list(batches)[:200])
    counts = np.bincount(np.concatenate(batches), minlength=40)
    spread = 5 * np.sqrt(20_000 * rate * (1 - rate)) + 1e-9
    assert (np.abs(counts - 20_000 * rate) <= spread + 2).all()
    sizes = np.array([len(b) for b in batches])
    assert sizes.var() == pytest.approx(40 * rate * (1 - rate), rel=0.05, abs=0.001)


def test_secret_noise_never_repeats_and_is_never_stored():
    first, second = Secret(), Secret()
    values = [s.rounded(Turn("a", 1), "gradient", 0, 16, 1e6) for s in (first, first, second)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(values, 2))
    with pytest.raises(SordinoError, match="never"):
        pickle.dumps(first)


def test_a_forked_child_does_not_repeat_its_parents_noise():
    source = Secret()
    reader, writer = os.pipe()
    if os.fork() == 0:
        drawn = source.batches(Turn("a", 1), "g", Sampling.poisson(0.5), 200, 1)
        os.write(writer, source.rounded(Turn("a", 1), "g", 0, 8, 1e6).numpy().tobytes() + drawn[0].tobytes())
        os._exit(0)
    os.wait()
    child = os.read(reader, 1 << 16)
    parent = source.rounded(Turn("a", 1), "g", 0, 8, 1e6).numpy().tobytes()
    assert child[: len(parent)] != parent
    assert child[len(parent) :] != source.batches(Turn("a", 1), "g", Sampling.poisson(0.5), 200, 1)[0].tobytes()


def test_a_site_has_no_floating_point_noise():
    with pytest.raises(SordinoError, match="exact"):
        Secret().normal([Turn("a", 1)], "gradient", 0, torch.empty(1, 8))
