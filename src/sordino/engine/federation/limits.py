"""What a site declares about its records, and the limits that it sets, whatever a server asks."""

from __future__ import annotations

from dataclasses import dataclass

from sordino.errors import BadInput
from sordino.privacy.levels import Levels

BLANK = (0,)
"""The shape of records that no schema says anything about: they can be surveyed, and not trained on."""


class Refused(BadInput):
    """The site's policy says no."""


@dataclass(frozen=True)
class Declared:
    """What a site says about its records; public (R5)."""

    records: int
    shape: tuple[int, ...]
    classes: int | None
    schema: str
    """A hash of the feature schema: names, ranges, categories, labels."""
    held: int = 0
    """How many units are held out; ``records`` counts the units that training sees."""
    unit_records: int = 1
    """The most records of a unit that count: 1 where every record is a unit of its own."""
    tokens: int | None = None
    """Where records are token ids (text): how many there are; None where they are numbers."""
    levels: Levels = ()
    """Where records have levels of consent: what each level offers a run, and how many training records it has."""

    @property
    def task(self) -> str:
        """What is learnt from the records: ``classification`` or ``regression``."""
        return "regression" if self.classes is None else "classification"


@dataclass(frozen=True)
class Policy:
    """Limits of one site.

    Attributes
    ----------
    methods: allowed by name; None: every private one that is installed here.
    not_private: whether methods without noise may run on these records at all.
    models: allowed by name; None: those that come with sordino. Models of your own must be listed.
    rounds, steps, parameters: the most turns of a run (repeated ones count), local steps of a turn, model parameters.
    run_epsilon: the most ε that one run's releases may cost; None: all of the budget. A run is what the server calls
        one: it can start several, and the budget is what limits them together.
    least_noise: the smallest noise multiplier of any release, whatever the budget would pay for.
    clip: the range of clipping radii. A tiny radius would put noise below what floats resolve, so there is a floor.
    modules: Python modules that methods, parts and features named ``module:attribute`` may come from; this site's
        copies run.
    colluders: how many other sites may at least conspire with the server without breaking this site's promise, where
        noise is shared; None: noise is not shared, this site adds all that its budget asks for.
    survey: whether held-out records may be asked what their columns hold.
    """

    methods: tuple[str, ...] | None = None
    not_private: bool = False
    models: tuple[str, ...] | None = None
    rounds: int = 1000
    steps: int = 10_000
    parameters: int = 200_000_000
    run_epsilon: float | None = None
    least_noise: float = 0.1
    clip: tuple[float, float] = (1e-4, 1e4)
    modules: tuple[str, ...] = ()
    colluders: int | None = None
    survey: bool = True
