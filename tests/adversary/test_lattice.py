"""A site's noise leaves no grid of its own: exactly sampled, on the lattice of the sums, as large as was charged."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from sordino.client import gradients
from sordino.client.clip import flat
from sordino.client.gradients import Alone
from sordino.client.gradients.losses import loss_by_name
from sordino.client.local import sgd
from sordino.client.rows import Records, Rows
from sordino.client.turn import Work, take_turn
from sordino.privacy import calibrate
from sordino.privacy import lattice as rounded
from sordino.privacy.gate import Gate, Permit, Terms
from sordino.privacy.generators import Batches, Keyed, Secret, Source, Turn, system_words
from sordino.privacy.lattice import Lattice
from sordino.privacy.types import Release, Sampling

LOSS = loss_by_name("cross-entropy")
CLIP = 1.0


class Paid(Gate):
    """A gate whose charges are paid elsewhere: these attacks look at what one turn lets out."""

    def __init__(self, source: Source) -> None:
        super().__init__(None, source, "attack")

    @property
    def private(self) -> bool:
        return True


def released(source: Source, model: nn.Module, x: Tensor, y: Tensor, z: float, exact: bool, divisor: float) -> Tensor:
    """The gradient that one step lets out, times the divisor; with C = lr = 1 the update is −1 times it."""
    engine = gradients.build(model, "cross-entropy")
    work = Work(engine, flat(), sgd(), alone=Alone(model, LOSS) if exact else None)
    start = Release.public(engine.flatten(model), "weights")
    turn = Turn("north", 1)
    rows = Rows([turn], [Batches(np.arange(len(y)), np.array([len(y)]))], Records(x, y))
    permit = Permit([turn], [Terms(Sampling.full(), (("gradient", z),), 1, divisor)])
    seen: dict[str, Tensor] = {}

    class Watching(Paid):
        def _seal(self, *given: Any) -> Release:
            found = super()._seal(*given)
            seen["value"] = found.value.clone()
            return found

    take_turn(work, rows, start, Release.public({}, "state"), {"lr": 1.0, "clip": CLIP}, permit, Watching(source))
    return seen["value"][0].double() * divisor


def grid_score(noise: np.ndarray) -> float:
    """How well pairs of numbers fit √(−2 ln u)·(cos, sin) with u a multiple of 2⁻²⁴: near 1 for float32 noise."""
    squared = noise[0:-1:2] ** 2 + noise[1::2] ** 2
    inside = squared[squared < 0.05]
    return float(np.cos(2 * np.pi * 2.0**24 * -np.expm1(-inside / 2)).mean()) if len(inside) else 0.0


def guesses(exact: bool, turns: int, seed: int = 0) -> float:
    """How often the attack names rightly whether a record took part, everything else being known, at ε = 0.1.

    Two clues together: the grid of the noise, and the likelihood ratio of the Gaussian. The first decides where it
    speaks at all.
    """
    torch.manual_seed(seed)
    z = float(calibrate(0.1, 1e-5, 1.0, 1, "full"))
    model, x, y = nn.Sequential(nn.Flatten(), nn.Linear(256, 10)), torch.rand(12, 256), torch.arange(12) % 10
    source: Source = Secret() if exact else Keyed("known to nobody, for once")
    sums = {
        with_it: released(Keyed("x"), model, x[: 12 if with_it else 11], y[: 12 if with_it else 11], 0.0, exact, 1.0)
        for with_it in (False, True)
    }
    apart = (sums[True] - sums[False]).numpy()
    coins = np.random.default_rng(seed).integers(0, 2, turns).astype(bool)
    right = 0
    for number, inside in enumerate(coins):
        if isinstance(source, Keyed):
            source = Keyed(f"turn {number}")
        count = 12 if inside else 11
        value = released(source, model, x[:count], y[:count], z, exact, 1.0)
        residual = {with_it: (value - total).numpy() / (z * CLIP) for with_it, total in sums.items()}
        scores = {with_it: grid_score(one) for with_it, one in residual.items()}
        likelier = float(residual[False] @ apart) > float(apart @ apart) / (2 * z * CLIP)
        grid = abs(scores[True] - scores[False]) > 0.5
        right += (scores[True] > scores[False] if grid else likelier) == inside
    return right / turns


def test_float_noise_gives_membership_away():
    """Why simulations say that they protect nobody: the attack is real."""
    assert guesses(exact=False, turns=60) > 0.95


def test_a_site_does_not_give_membership_away():
    """At ε = 0.1 nobody guesses better than e^ε/(1 + e^ε) + δ; 2,000 turns, 99 % interval."""
    share, turns = guesses(exact=True, turns=2000), 2000
    allowed = math.exp(0.1) / (1 + math.exp(0.1)) + 1e-5
    print(f"guessed {share:.4f} of {turns}; ε = 0.1 allows {allowed:.4f}")
    assert share - 2.576 * math.sqrt(0.25 / turns) <= allowed


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20, float("nan")])
def test_every_release_lies_on_its_lattice_whatever_the_data(scale: float):
    model = nn.Sequential(nn.Flatten(), nn.Linear(5, 3))
    for count in (0, 1, 7):
        x, y = torch.randn(count, 5) * scale, torch.zeros(count, dtype=torch.long)
        value = released(Secret(), model, x, y, 1.3, True, 4.0)
        steps = value / Lattice(CLIP, 18).step
        assert torch.equal(steps, steps.round())


def test_noise_used_is_noise_charged():
    model, width = nn.Sequential(nn.Flatten(), nn.Linear(400, 10)), 4010
    values = torch.cat(
        [released(Secret(), model, torch.zeros(0, 400), torch.zeros(0).long(), 2.5, True, 1.0) for _ in range(50)]
    )
    wanted = 2.5 * Lattice(CLIP, width).sensitivity
    assert float(values.std()) == pytest.approx(wanted, rel=5 / math.sqrt(2 * len(values)))
    assert stats.kstest(values.numpy() / wanted, "norm").pvalue > 1e-4


@pytest.mark.parametrize("deviation", [0.3, 1.7, 12.5])
def test_small_deviations_have_the_probabilities_of_a_rounded_normal(deviation: float):
    drawn = rounded.rounded_normals(system_words, deviation, 400_000)
    reach = math.ceil(4 * deviation)
    values = np.arange(-reach, reach + 1)
    chance = stats.norm.cdf((values + 0.5) / deviation) - stats.norm.cdf((values - 0.5) / deviation)
    counts = np.array([(drawn == one).sum() for one in values])
    rest = [len(drawn) - counts.sum()], [len(drawn) * (1 - chance.sum())]
    expected = np.append(len(drawn) * chance, rest[1])
    found = np.append(counts, rest[0])
    large = expected > 5
    assert stats.chisquare(found[large], expected[large] * found[large].sum() / expected[large].sum()).pvalue > 1e-5


def _stream(seed: int):
    generator = np.random.default_rng(seed)
    return lambda count: generator.integers(0, 1 << 64, count, dtype=np.uint64)


def test_what_float64_decides_is_what_exact_arithmetic_decides(monkeypatch: pytest.MonkeyPatch):
    quick = [rounded.rounded_normals(_stream(seed), 1e7 + seed, 1)[0] for seed in range(300)]
    monkeypatch.setattr(rounded, "ROUND_MARGIN", 1.0)  # nothing is clear any more
    assert quick == [rounded.rounded_normals(_stream(seed), 1e7 + seed, 1)[0] for seed in range(300)]


def test_the_tail_has_no_end_and_the_right_shape():
    table = rounded.cells()
    weight = int(table.ends[-1]) - int(table.ends[-2])
    kept = [rounded._beyond(_stream(seed), seed % weight, 1e6) for seed in range(300)]
    found = np.array([one / 1e6 for one in kept if one is not None])
    assert found.min() >= 9
    assert found.mean() == pytest.approx(9.10852, abs=0.04)
    assert len(found) / 300 == pytest.approx(table.scale * math.exp(-40.5) * 32 / 9 / weight * 0.98809, abs=0.09)


def test_the_envelope_is_an_envelope():
    table = rounded.cells()
    heights = np.diff(table.ends.astype(object), prepend=0)[:-1].astype(float)
    left = np.arange(rounded.CELLS) / rounded.CELLS_PER_UNIT
    assert (heights >= table.scale * np.exp(-(left**2) / 2) * (1 - 1e-15)).all()
    assert int(table.ends[-1]) < 2**63


def test_noise_too_large_for_exact_sums_is_refused_in_words():
    with pytest.raises(Exception, match="do not fit exact sums"):
        Lattice(1.0, 10**6).check_room(1, 2.0**50)
