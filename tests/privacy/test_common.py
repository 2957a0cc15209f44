"""Integers on a common lattice: what one record moves them by, what noise they have, and what holds a site back."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sordino.errors import SordinoError
from sordino.privacy.common import Common, ceiling, within
from sordino.privacy.gate import Block, Gate, OneByOne, Permit, Terms, exact_units
from sordino.privacy.generators import Keyed, Turn
from sordino.privacy.ledger import Ledger
from sordino.privacy.trust import Shared
from sordino.privacy.types import Adjacency, Sampling

WIDTH, BATCH, WEIGHT, BOUND = 40, 8.0, 0.2, 0.5
GRAIN = WEIGHT / BATCH * 2.0**-20 / math.sqrt(WIDTH)
STEP = GRAIN * BATCH / WEIGHT
TURN = Turn("a", 1)


def terms(z: float = 2.0, sites: int = 5, deviation: float | None = None, adjacency: str = "zero-out") -> Terms:
    """Noise z in the sum of five sites of which one conspires: each adds half of it."""
    shared = Shared(sites, 1, 0, 1.0, WIDTH)
    level = z * WEIGHT / BATCH * Adjacency.parse(adjacency).sensitivity
    own = shared.share * level * (1 + 1e-6 + 2.0**-21) / GRAIN if deviation is None else deviation
    common = (Common(STEP, own),)
    return Terms(Sampling.poisson(0.1), (("gradient", z),), 1, BATCH, Adjacency.parse(adjacency), shared, common)


def batch_of(vectors: Tensor, factors: list[float] | None = None) -> OneByOne:
    norms = [float(one.double().norm()) for one in vectors]
    scale = factors or [1.0] * len(vectors)

    def some(which):
        return {"gradient": Block(vectors[list(which)], [norms[k] for k in which], [scale[k] for k in which])}

    return OneByOne(len(vectors), some, 4)


@pytest.fixture
def gate(tmp_path: Path):
    with Ledger(tmp_path / "l.db", durable=False) as book:
        yield Gate(book, Keyed("key"), "run")


def release(gate: Gate, one: Terms, vectors: Tensor) -> Tensor:
    permit = Permit([TURN], [one])
    return gate.release_whole(permit, 0, batch_of(vectors), {"gradient": torch.tensor([BOUND])}, WIDTH)[
        "gradient"
    ].value


def plain(vectors: Tensor) -> np.ndarray:
    """Every record's weighted, clipped term in steps of γ = C·grain, rounded and added one by one, in plain Python."""
    total = [0] * WIDTH
    for vector in vectors.double().numpy():
        norm = math.sqrt(sum(float(x) ** 2 for x in vector))
        scale = min(1.0, BOUND / norm) * WEIGHT / BATCH / (BOUND * GRAIN)
        for i, x in enumerate(vector):
            total[i] += round(float(x) * scale)
    return np.array(total)


def test_integers_are_the_rounded_terms_plus_the_discrete_noise_that_was_charged(gate: Gate):
    vectors, one = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(3)), terms()
    value = release(gate, one, vectors)
    assert value.dtype is torch.int64
    noise = Keyed("key").discrete(TURN, "gradient/gradient", 0, WIDTH, one.common[0].deviation)
    assert np.abs((value[0] - noise).numpy() - plain(vectors)).max() <= 9  # a product may round to the other side


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_noise_is_worth_what_was_charged(gate: Gate, adjacency: str):
    """z·Δ·S of deviation in the sum of the four that are left, half of it at each."""
    one = terms(adjacency=adjacency)
    wide = Common(one.common[0].step, one.common[0].deviation)
    assert wide.multiplier(WIDTH, 4, one.adjacency.sensitivity) == pytest.approx(2.0, rel=1e-12)
    drawn = torch.cat([Keyed("k").discrete(Turn("a", n), "x", 0, 5000, wide.deviation) for n in range(8)]).double()
    moved = one.adjacency.sensitivity * BOUND * WEIGHT / BATCH  # by one record, in the weighted mean
    in_sum = math.sqrt(4) * float(drawn.std()) * BOUND * GRAIN
    assert in_sum / moved == pytest.approx(2.0, rel=0.02)


def test_the_gate_refuses_noise_below_what_was_charged(gate: Gate):
    enough = terms().common[0].deviation
    release(gate, terms(deviation=enough), torch.zeros(1, WIDTH))
    with pytest.raises(SordinoError, match="was charged"):
        release(gate, terms(deviation=enough * 0.9999), torch.zeros(1, WIDTH))
    with pytest.raises(SordinoError, match="was charged"):
        release(gate, terms(sites=4, deviation=enough * math.sqrt(3 / 4)), torch.zeros(1, WIDTH))


def test_integers_leave_only_under_terms_that_share_noise(gate: Gate):
    alone = Terms(Sampling.poisson(0.1), (("gradient", 2.0),), 1, BATCH)
    with pytest.raises(SordinoError, match="how noise is shared"):
        release(gate, alone, torch.zeros(1, WIDTH))
    with pytest.raises(SordinoError, match="how noise is shared"):
        release(Gate(None, Keyed("key"), "run"), terms(), torch.zeros(1, WIDTH))
    permit, bounds = Permit([TURN], [terms()]), {"gradient": torch.tensor([BOUND])}
    gate.release_whole(permit, 0, batch_of(torch.zeros(1, WIDTH)), bounds, WIDTH)
    with pytest.raises(SordinoError, match="released already"):
        gate.release_whole(permit, 0, batch_of(torch.zeros(1, WIDTH)), bounds, WIDTH)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30])
def test_one_record_moves_the_integers_by_no_more_than_the_sensitivity(scale: float):
    """Vectors chosen to round badly: just above half a step in every coordinate, and long ones in one direction."""
    lattice = Common(STEP, 1.0).lattice(BOUND, WIDTH)
    most = lattice.sensitivity / lattice.step
    half = torch.full((1, WIDTH), float(lattice.step) * 0.5000001)
    generator = torch.Generator().manual_seed(5)
    for vector in (half, torch.ones(1, WIDTH), torch.randn(1, WIDTH, generator=generator), torch.eye(WIDTH)[:1]):
        moved = exact_units(batch_of(vector * scale), {"gradient": lattice})["gradient"]
        assert float(moved.norm()) <= most


class TestCeiling:
    def test_a_batch_of_coins_is_larger_with_no_probability_worth_naming(self):
        """Chernoff's bound over all sizes of batch, on a fine grid; the true tail where it can be computed."""
        sizes = np.geomspace(1e-6, 1e7, 20_000)
        more = 1 + 100 / sizes
        exponents = sizes * ((1 + more) * np.log1p(more) - more)
        assert exponents.min() > 54 * math.log(10)
        assert sizes[exponents.argmin()] == pytest.approx(70, rel=0.1)

    @pytest.mark.parametrize("size", [1.0, 8.0, 70.0, 2000.0])
    def test_it_is_above_all_that_an_honest_batch_can_say(self, size: float):
        lattice = Common(STEP, 1.0).lattice(BOUND, WIDTH)
        drawn = np.random.default_rng(0).poisson(size, 100_000).max()
        units = torch.zeros(1, WIDTH, dtype=torch.float64)
        units[0, 0] = drawn * math.floor(lattice.sensitivity / lattice.step)
        assert within(units, ceiling(lattice, size)) is units

    def test_what_is_longer_is_projected_and_stays_on_the_lattice(self):
        units = torch.tensor([[300.0, -400.0, 0.0]], dtype=torch.float64)
        assert torch.equal(within(units, 50.0), torch.tensor([[30.0, -40.0, 0.0]], dtype=torch.float64))

    def test_projected_neighbours_are_no_further_apart_than_the_docstring_says(self):
        """|p(S) − p(S′)| ≤ |S − S′| + √d, in steps, at the edge of the ball and far outside it."""
        generator = torch.Generator().manual_seed(7)
        for _ in range(300):
            one = torch.randn(1, WIDTH, generator=generator, dtype=torch.float64).mul_(1000).round_()
            other = one + torch.randn(1, WIDTH, generator=generator, dtype=torch.float64).mul_(30).round_()
            longest = float(one.norm()) * float(torch.rand(1, generator=generator) * 1.2)
            apart = float((within(one, longest) - within(other, longest)).norm())
            assert apart <= float((one - other).norm()) + math.sqrt(WIDTH)


def test_fewer_colluders_leave_more_noise_only_where_others_are_there_for_sure():
    assert Shared(4, 1, 0, 1e6, 5).factor(0) == pytest.approx(math.sqrt(4 / 3))
    assert Shared(4, 3, 0, 1e6, 5).factor(0) == 1.0, "own noise is all: a round may have nobody else"
