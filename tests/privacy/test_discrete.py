"""Discrete Gaussians: the right probabilities, whatever the words, and nothing left to float64's rounding."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats

from sordino.privacy import discrete
from sordino.privacy.discrete import TAIL, ZERO, discrete_normals
from sordino.privacy.envelope import CELLS_PER_UNIT, cells
from sordino.privacy.generators import EXACT_PIECE, Keyed, Secret, Turn, system_words
from sordino.privacy.lattice import Lattice


def stream(seed: int):
    generator = np.random.default_rng(seed)
    return lambda count: generator.integers(0, 1 << 64, count, dtype=np.uint64)


def given(*words: int):
    """These words, then no more."""
    rest = list(words)
    return lambda count: np.array([rest.pop(0) for _ in range(count)], dtype=np.uint64)


def exact(deviation: float, values: np.ndarray) -> np.ndarray:
    """P(k) by adding everything up."""
    reach = math.ceil(15 * deviation)
    total = math.fsum(math.exp(-((k / deviation) ** 2) / 2) for k in range(-reach, reach + 1))
    return np.exp(-((values / deviation) ** 2) / 2) / total


@pytest.mark.parametrize("deviation", [1.0, 1.3, 2.5, 5.0, 40.0, 333.3])
def test_every_integer_has_its_probability(deviation: float):
    drawn = discrete_normals(stream(7), deviation, 1_000_000)
    assert drawn.dtype == np.int64
    reach = math.ceil(4.5 * deviation)
    values = np.arange(-reach, reach + 1)
    expected = len(drawn) * exact(deviation, values)
    found = np.bincount(np.clip(drawn, -reach - 1, reach + 1) + reach + 1, minlength=2 * reach + 3)
    large = expected > 10
    counts, wanted = found[1:-1][large], expected[large]
    counts, wanted = np.append(counts, len(drawn) - counts.sum()), np.append(wanted, len(drawn) - wanted.sum())
    assert stats.chisquare(counts, wanted).pvalue > 1e-4


@pytest.mark.parametrize("deviation", [1e6, 2.0**40, 2.0**45])
def test_large_deviations_have_the_shape_and_the_moments(deviation: float):
    drawn = discrete_normals(stream(11), deviation, 100_000) / deviation
    assert stats.kstest(drawn, "norm").pvalue > 1e-4
    for power, wanted in ((1, 0), (2, 1), (3, 0), (4, 3)):
        spread = math.sqrt(stats.norm.moment(2 * power) - wanted**2)
        assert np.mean(drawn**power) == pytest.approx(wanted, abs=4.5 * spread / math.sqrt(len(drawn)))
    low = np.mod(discrete_normals(stream(12), deviation, 100_000), 16)  # the last digits are as fair as the first
    assert stats.chisquare(np.bincount(low)).pvalue > 1e-4


def test_neighbouring_draws_are_not_related():
    drawn = discrete_normals(stream(3), 50.0, 400_000) / 50.0
    for lag in (1, 2, 8192):
        assert abs(np.mean(drawn[lag:] * drawn[:-lag])) < 4.5 / math.sqrt(len(drawn))


def slowly(first: int, offset: int, deviation: float) -> int | str | None:
    """What one pair of words means, by the definition, in decimals of 60 digits; "more" where it takes more words."""
    table = cells(Fraction(CELLS_PER_UNIT, 2) / Fraction(deviation))
    mark, sign = first >> 1, -1 if first & 1 else 1
    ends = [int(end) for end in table.ends]
    cell = next((i for i, end in enumerate(ends) if mark < end), len(ends))
    left = mark - (ends[cell - 1] if cell else 0)
    if cell >= TAIL:
        return "more" if cell == TAIL else 0 if cell == ZERO and left + 1 <= table.atom else None
    with localcontext() as context:
        context.prec = 60
        s = Decimal(deviation)
        low, high = (s * (Decimal(cell) + Decimal(offset + i) / 2**64) / CELLS_PER_UNIT for i in (0, 1))
        if math.floor(low) + 1 != math.ceil(high):
            return "more"
        k = math.ceil(high)
        height = Decimal(table.scale) * (-((k / s) ** 2) / 2).exp()
        if left < height < left + 1:
            return "more"
        return sign * k if left + 1 <= height else None


@pytest.mark.parametrize("deviation", [1.0, 1.75, 7.3, 1e4, 3e9 + 0.1, 2.0**41 / 3, 2.0**45])
def test_what_is_decided_in_float64_is_what_the_definition_says(deviation: float):
    wrong = 0
    for seed in range(400):
        pair = [int(word) for word in stream(seed)(2)]
        wanted = slowly(*pair, deviation)
        if wanted != "more":
            table = cells(Fraction(CELLS_PER_UNIT, 2) / Fraction(deviation))
            values, kept = discrete._attempt(given(*pair), table, deviation, 1)
            wrong += (int(values[0]) if kept[0] else None) != wanted
    assert wrong == 0


def test_what_float64_decides_is_what_exact_arithmetic_decides(monkeypatch: pytest.MonkeyPatch):
    quick = [discrete_normals(stream(seed), 10.0 ** (seed % 13), 1)[0] for seed in range(300)]
    monkeypatch.setattr(discrete, "ACCEPT_MARGIN", 2.0)  # nothing is clear any more
    monkeypatch.setattr(discrete, "WHOLE_MARGIN", 1.0)
    assert quick == [discrete_normals(stream(seed), 10.0 ** (seed % 13), 1)[0] for seed in range(300)]


def test_words_on_the_edge_are_decided_by_the_digits_that_follow():
    """A point whose 64 digits leave open between which integers it lies, and one exactly at the edge of being kept."""
    deviation = 2.0**45 - 12345.0
    table = cells(Fraction(CELLS_PER_UNIT, 2) / Fraction(deviation))
    cell, whole = 20, round(20.5 * deviation / CELLS_PER_UNIT)
    edge = Fraction(whole * CELLS_PER_UNIT) / Fraction(deviation) - cell  # v with y = whole
    offset = math.floor(edge * 2**64)
    rest = edge * 2**64 - offset
    assert 0 < rest < 1
    first = int(table.starts[cell]) << 1  # nothing left: always kept
    below, above = math.floor(rest * 2**64) - 1, math.floor(rest * 2**64) + 1
    assert discrete_normals(given(first, offset, below), deviation, 1)[0] == whole
    assert discrete_normals(given(first | 1, offset, above), deviation, 1)[0] == -whole - 1
    assert slowly(first, offset, deviation) == "more"

    deviation, cell, offset = 1000.0, 40, 2**63
    table = cells(Fraction(CELLS_PER_UNIT, 2) / Fraction(deviation))
    k = math.floor(deviation * 40.5 / CELLS_PER_UNIT) + 1
    with localcontext() as context:
        context.prec = 80
        height = Decimal(table.scale) * (-((k / Decimal(deviation)) ** 2) / 2).exp()
        left, rest = int(height), int((height - int(height)) * 2**64)
    first = (int(table.starts[cell]) + left) << 1
    assert discrete_normals(given(first, offset, rest - 1), deviation, 1)[0] == k
    values, kept = discrete._attempt(given(first, offset, rest + 1), table, deviation, 1)
    assert not kept[0]
    values, kept = discrete._attempt(given(first - 2, offset), table, deviation, 1)  # one less is clear: no more words
    assert (bool(kept[0]), int(values[0])) == (True, k)


def test_zero_has_exactly_its_share():
    """The cell of 0 has a mass that is no integer: its last unit is decided by further digits."""
    deviation = 3.7
    table = cells(Fraction(CELLS_PER_UNIT, 2) / Fraction(deviation))
    assert table.atom == Fraction(table.scale) * CELLS_PER_UNIT / 2 / Fraction(deviation)
    start, whole = int(table.starts[ZERO]), math.floor(table.atom)
    part = int((table.atom - whole) * 2**64)
    for left, more, wanted in (
        (0, (), True),
        (whole - 1, (), True),
        (whole, (part - 1,), True),
        (whole, (part + 1,), False),
    ):
        values, kept = discrete._attempt(given((start + left) << 1, 5, *more), table, deviation, 1)
        assert (bool(kept[0]), int(values[0])) == (wanted, 0)
    outside = (int(table.ends[-1]) << 1) | 1
    assert outside < 2**64
    assert not discrete._attempt(given(outside, 5), table, deviation, 1)[1][0]


@pytest.mark.parametrize("deviation", [1.0, 2.5, 100.0, 2.0**45])
def test_the_tail_has_no_end_and_the_right_shape(deviation: float):
    table = cells(Fraction(CELLS_PER_UNIT, 2) / Fraction(deviation))
    start, weight = int(table.starts[TAIL]), int(table.ends[TAIL]) - int(table.starts[TAIL])
    found, tries = [], 200
    for seed in range(tries):
        source = stream(seed)
        opening = [(start + int(source(1)[0]) % weight) << 1, 0]

        def words(count: int, opening: list[int] = opening, source=source) -> np.ndarray:
            return np.array([opening.pop(0) if opening else source(1)[0] for _ in range(count)], dtype=np.uint64)

        values, kept = discrete._attempt(words, table, deviation, 1)
        found += [int(values[0])] if kept[0] else []
    first = 9 * deviation + 1 if deviation <= 100 else 9 * deviation  # y ≥ 9s stands for ⌊y⌋ + 1
    assert min(found) >= first or deviation == 2.5  # 9·2.5 is no integer: the tail begins within a stretch
    if deviation <= 100.0:
        k = np.arange(math.floor(9 * deviation) + 1, 14 * deviation)
        length = np.minimum(1, k - 9 * deviation)  # of the stretch of k, what lies in the tail
        masses = length * np.exp(-((k / deviation) ** 2) / 2) * CELLS_PER_UNIT / deviation * table.scale
        share, mean = masses.sum() / weight, (masses * k).sum() / masses.sum()
        spread = math.sqrt((masses * k**2).sum() / masses.sum() - mean**2)
    else:
        share, mean, spread = (
            0.98809 * table.scale * math.exp(-40.5) * 32 / 9 / weight,
            9.10852 * deviation,
            0.107 * deviation,
        )
    assert len(found) / tries == pytest.approx(share, abs=4.5 * math.sqrt(share * (1 - share) / tries) + 1e-12)
    assert np.mean(found) == pytest.approx(mean, abs=4.5 * spread / math.sqrt(len(found)) + 1e-9)


@pytest.mark.parametrize("deviation", [0.0, 0.99, -3.0, 2.0**45 * 1.001, math.nan, math.inf])
def test_deviations_out_of_reach_are_refused(deviation: float):
    with pytest.raises(ValueError, match="between 1 and 2\\^45"):
        discrete_normals(system_words, deviation, 3)


def test_keyed_draws_depend_on_their_key_and_place_alone():
    source, turn, wide = Keyed("run"), Turn("a", 3), 3 * EXACT_PIECE + 17
    values = source.discrete(turn, "gradient", 0, wide, 1e5)
    assert (values.dtype, len(values)) == (torch.int64, wide)
    assert torch.equal(values, Keyed("run").discrete(turn, "gradient", 0, wide, 1e5))
    assert torch.equal(values[: 2 * EXACT_PIECE], source.discrete(turn, "gradient", 0, 2 * EXACT_PIECE, 1e5))
    others = [(Turn("b", 3), "gradient", 0), (Turn("a", 4), "gradient", 0), (turn, "loss", 0), (turn, "gradient", 1)]
    for other in others:
        assert (values == source.discrete(*other, wide, 1e5)).float().mean() < 1e-3
    rounded = source.rounded(turn, "gradient", 0, wide, 1e5).numpy()
    assert abs(np.corrcoef(values.numpy(), rounded)[0, 1]) < 5 / math.sqrt(wide)  # words of another purpose
    assert stats.kstest(values.numpy() / 1e5, "norm").pvalue > 1e-4


def test_secret_draws_never_repeat():
    first, second = Secret(), Secret()
    values = [one.discrete(Turn("a", 1), "gradient", 0, 20_000, 2.0**30) for one in (first, first, second)]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert int((values[i] == values[j]).sum()) <= 1
    assert stats.kstest(torch.cat(values).numpy() / 2.0**30, "norm").pvalue > 1e-4


def test_a_lattice_may_have_an_agreed_step():
    usual = Lattice(0.7, 100)
    assert usual.step == 2.0 ** math.floor(math.log2(0.7 * 2**-16 / 10))
    assert len({usual, Lattice(0.7, 100, usual.step)}) == 1
    own = Lattice(0.7, 3, 0.7e-6 / 3)
    assert own.sensitivity == 0.7 * (1 + 1e-6) + own.step * math.sqrt(3) / 2
    rows = torch.tensor([[0.3, -0.4, 0.0], [30.0, 40.0, 0.0]])
    total = torch.zeros(3, dtype=torch.float64)
    own.add(total, rows, [0.5, 50.0], [1.0, 1.0])
    by_hand = np.rint(np.float32([0.3, -0.4, 0.0]).astype(float) / own.step) + np.rint(
        np.array([0.42, 0.56, 0]) / own.step
    )
    assert np.abs(total.numpy() - by_hand).max() <= 1
    assert torch.equal(total, total.round())
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(Exception, match="no points to round to"):
            Lattice(0.7, 3, wrong)
