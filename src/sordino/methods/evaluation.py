"""How often a run is judged on held-out records, and with how much noise: ``[evaluation]`` of a study.

Every evaluation releases, from all held-out records of a site at once, a table over declared cells and the number of
records that the model gets right; both are one event of the held-out account.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sordino.errors import BadInput
from sordino.privacy.accounting import calibrate_events
from sordino.privacy.cells import Cells
from sordino.privacy.gate import Terms
from sordino.privacy.held import check_share
from sordino.privacy.types import Budget, Event, Sampling

TIMES = 10
"""How often a run is evaluated where nobody says: its last round among them."""


@dataclass(frozen=True)
class Evaluation:
    """The keys of ``[evaluation]``, and of ``sd.train(evaluation={…})``.

    Attributes
    ----------
    every: evaluate every this many rounds, and in the last; None: ten times in all.
    share: the share of every client's records that is held out in a simulation; a site decides for itself.
    bins: score bins of two classes, or bins of residuals; an even number. Each has noise of its own: few are precise.
    spend: how much of each client's ε the evaluations of one run may use.
    stop: end the run when so many evaluations in a row were no better than the best before them; None: never.
    keep: which model the run ends with: the ``last``, or the ``best`` by the estimate that decides (accuracy, or the
        mean absolute error). Both choices are made from released numbers, so they cost nothing.
    """

    every: int | None = None
    share: float = 0.2
    bins: int = 10
    spend: float = 0.8
    stop: int | None = None
    keep: Literal["last", "best"] = "last"

    def __post_init__(self) -> None:
        check_share(self.share, "evaluation.share")
        if self.every is not None and (type(self.every) is not int or self.every < 1):
            raise BadInput(f"evaluation.every = {self.every!r}: it is a number of rounds, from 1 upwards")
        if type(self.bins) is not int or not 2 <= self.bins <= 1000 or self.bins % 2:
            raise BadInput(f"evaluation.bins = {self.bins!r}: an even number from 2 to 1000, so that ½ is an edge")
        if not (isinstance(self.spend, (int, float)) and 0.0 < self.spend <= 1.0):
            raise BadInput(f"evaluation.spend = {self.spend!r}: a share of ε, above 0 and at most 1")
        if self.stop is not None and (type(self.stop) is not int or self.stop < 1):
            raise BadInput(f"evaluation.stop = {self.stop!r}: it is a number of evaluations, from 1 upwards")
        if self.keep not in ("last", "best"):
            raise BadInput(f"evaluation.keep = {self.keep!r} is unknown: use 'last' or 'best'")

    @classmethod
    def parse(cls, given: Evaluation | Mapping[str, Any] | None) -> Evaluation | None:
        """What a table of its keys says; None where nothing is evaluated."""
        if given is None or isinstance(given, Evaluation):
            return given
        known = list(cls.__dataclass_fields__)
        if not isinstance(given, Mapping) or (unknown := [key for key in given if key not in known]):
            told = f"it has no key {unknown[0]!r}" if isinstance(given, Mapping) else "it is a table"
            raise BadInput(f"evaluation = {given!r}: {told}; known: {', '.join(known)}")
        return cls(**given)

    def pace(self, rounds: int) -> int:
        """Every how many rounds a run of so many is evaluated."""
        return self.every or max(1, math.ceil(rounds / TIMES))

    def is_time(self, number: int, rounds: int) -> bool:
        """Whether this round, counted from 1, is evaluated."""
        return number % self.pace(rounds) == 0 or number == rounds

    def times(self, rounds: int) -> int:
        """How often a run of so many rounds is evaluated."""
        return sum(self.is_time(number, rounds) for number in range(1, rounds + 1))


@dataclass(frozen=True)
class Judging:
    """The evaluations of a run, planned: what each client releases in one, how often, and from how many records.

    ``terms``: by client; ``held``: the public number of its held-out records, 0 where it has none and releases nothing.
    """

    settings: Evaluation
    rounds: int
    cells: Cells
    terms: tuple[Terms, ...]
    held: tuple[int, ...]
    level: float = 0.95
    """How sure every interval is: 0.95, or 1 − 0.05/k where one of k evaluations is chosen by what they say."""

    @property
    def times(self) -> int:
        """How often the run is evaluated."""
        return self.settings.times(self.rounds)

    def is_time(self, number: int) -> bool:
        """Whether this round, counted from 1, is evaluated."""
        return self.settings.is_time(number, self.rounds)

    @property
    def who(self) -> list[int]:
        """The places of the clients that have held-out records."""
        return [place for place, count in enumerate(self.held) if count]


def cells_of(classes: int | None, bins: int) -> Cells:
    """The table for so many classes (None: a number to predict, in a range of width 1)."""
    if classes is None:
        return Cells("regression", bins)
    return Cells("binary", bins) if classes == 2 else Cells("classes", classes)


def parts_of(classes: int | None) -> tuple[str, ...]:
    """What one evaluation releases: the table, and with classes how many records are right."""
    return ("scores", "correct") if classes else ("scores",)


def judge(
    settings: Evaluation,
    rounds: int,
    classes: int | None,
    held: Sequence[int],
    budgets: Sequence[Budget],
    private: bool,
) -> Judging:
    """Plan the evaluations of a run: their parts have equal shares of ``spend``·ε.

    z of each of k parts is √k times what the whole event needs. Public clients add no noise, and nobody does where the
    method is not private.
    """
    if not any(held):
        raise BadInput("[evaluation] needs held-out records, and nobody has any: raise evaluation.share")
    cells = cells_of(classes, settings.bins)
    parts = parts_of(classes)
    event = [Event("scores", Sampling.full(), 1.0, settings.times(rounds), b.adjacency) for b in budgets]
    targets = [Budget(b.epsilon * settings.spend, b.delta, b.adjacency) for b in budgets]
    noises = calibrate_events([[one] for one in event], targets) if private else [0.0] * len(budgets)
    each = math.sqrt(len(parts))
    terms = [
        Terms(Sampling.full(), tuple((part, float(z) * each) for part in parts), 1, 1.0, b.adjacency)
        for z, b in zip(noises, budgets)
    ]
    # A round that is chosen by its estimate has a lucky one: then the intervals of all rounds are to hold at once.
    chosen = settings.keep == "best" or settings.stop is not None
    level = 1.0 - 0.05 / settings.times(rounds) if chosen else 0.95
    return Judging(settings, rounds, cells, tuple(terms), tuple(int(count) for count in held), level)
