"""Levels of consent in a plan: which methods can keep them, and rates and noise that do (``privacy.levels``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sordino.errors import BadInput
from sordino.methods.method import Method
from sordino.methods.training import Population, Training
from sordino.privacy.accounting.rates import level_rates
from sordino.privacy.gate import Terms
from sordino.privacy.groups import Group, expected_batch, mean_rate
from sordino.privacy.levels import Level, Levels
from sordino.privacy.trust import Trust
from sordino.privacy.types import Budget, Sampling, Scheme

COMPOSES = ("pld", "rdp")
"""Accountants that can say what every level costs; the published rules pick one noise for one budget."""


@dataclass(frozen=True)
class LevelPlan:
    """What one level of a client will spend: its public facts, and ε of the whole plan for its records."""

    level: Level
    epsilon: float

    @property
    def budget(self) -> Budget:
        """(ε, δ) that its people agreed to."""
        return self.level.budget


def check_levels(method: Method, training: Training, population: Population, trust: Trust) -> None:
    """Refuse what cannot sample one client's records at several rates, and say why."""
    if not any(population.levels):
        return
    told = f"method {method.name!r} does not go with levels of consent: "
    if Scheme.parse(training.sampling) is not Scheme.POISSON:
        raise BadInput(
            f"levels of consent differ in how often their records are sampled, and training.sampling = "
            f"{training.sampling!r} takes all alike: use 'poisson', with training.rate below 1"
        )
    if any(one.batch == "own" and one.size == "full" for one in method.ask):
        raise BadInput(f"{told}it asks a question of all records, and no level can be asked less; use ask.size")
    if method.private and method.calibrate.accountant not in COMPOSES:
        raise BadInput(
            f"{told}calibrate = {method.calibrate.by!r} picks noise for one budget a client; use calibrate = 'tight'"
        )
    if trust.shared:
        raise BadInput(
            "trust.noise = 'shared' does not go with levels of consent yet: sites agree on one rate each; use noise "
            "per site, or one budget a client"
        )


def in_groups(terms: Terms, levels: Levels) -> Terms:
    """Terms of a client whose records have these levels, all still at one rate."""
    if not levels:
        return terms
    return _with_rates(terms, [Group(one.name, terms.sampling.rate, one.records) for one in levels if one.records])


def rates_of(terms: Terms) -> list[float]:
    """The rate of every group of records."""
    return [one.rate for one in terms.groups]


def at_rates(terms: Terms, rates: Sequence[float]) -> Terms:
    """The terms with these rates of their groups."""
    return _with_rates(terms, [replace(one, rate=float(rate)) for one, rate in zip(terms.groups, rates, strict=True)])


def _with_rates(terms: Terms, groups: Sequence[Group]) -> Terms:
    return replace(
        terms, sampling=Sampling.poisson(mean_rate(groups)), divisor=expected_batch(groups), groups=tuple(groups)
    )


def calibrated(
    shapes: Sequence[Sequence[tuple[Terms, int]]], levels: Sequence[Levels], accountant: str
) -> list[list[list[float]]]:
    """Of clients with levels: multipliers of every kind of release, and after them the rates of its groups.

    One noise for all levels, rates such that each costs its own ε, and the gradient's mean rate as it was.
    """
    templates = [[replace(t, groups=()).event.times(t.count * max(1, count)) for t, count in shape] for shape in shapes]
    found = level_rates(templates, levels, accountant)
    return [
        [
            [*(z * scale for _, z in t.parts), *(min(1.0, factor * t.sampling.rate) for factor in factors.tolist())]
            for t, _ in shape
        ]
        for shape, (scale, factors) in zip(shapes, found)
    ]
