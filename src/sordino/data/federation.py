"""A federation: clients that have been dealt their records, and their budgets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from sordino.data.budgets import BudgetTerms, Spec, warn_of, warn_of_deltas
from sordino.data.partitions import Index
from sordino.data.units import flat
from sordino.errors import BadInput
from sordino.privacy.held import held_out
from sordino.privacy.levels import Consent, Levels
from sordino.privacy.types import RECORD, Adjacency, Budget

Features = npt.NDArray[np.float32] | npt.NDArray[np.int64]
"""Numbers, or token ids."""

Targets = npt.NDArray[np.int64] | npt.NDArray[np.float32]

Ranged = tuple[int, float, float]
"""How many numbers, counted from the first, lie in [low, high]."""


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """The clients of a study: one set of shared arrays, and for every client its name, its records and its budget.

    Attributes
    ----------
    x, y, valid
        Shared arrays over all records. ``valid[j]`` is False for a null row: it counts in n_i and contributes zero.
    units, unit_name
        Where a unit of privacy has several records: those of every unit, ``[units, m]``, −1 behind the last; and the
        word for a unit.
    names, train, test
        Per client: its name, the indices of its training units (records where ``units`` is None) and of its test
        records. Null rows are in ``train`` (n_i stays what was declared) but never in ``test``, where there is nothing
        to predict. A client's ``test`` may be empty. A unit is in one of the two.
    central
        A test set of the server's own, or None.
    budgets, batch_sizes
        Per client, or None while undecided; published budgets bring their batch sizes.
    description
        How all of this was made, as plain JSON values.
    sorted_files
        Whether the clients are files in the order of their names, which nobody chose.
    ranged
        How many of a record's first numbers have a declared range, and which; None for anything but tables.
    tokens
        Where records are token ids (text): how many there are; None where they are numbers.
    words
        Columns that were kept as words, one a record: None where there was none, all of a unit's where they differ.
    consent
        Levels of consent, where budgets differ within a client (``with_levels``), of all records. ``budgets`` are then
        the strictest level's.
    schema
        How records were made numbers, and what the classes are called, as a table; None: not said.
    """

    name: str
    x: Features
    y: Targets
    valid: npt.NDArray[np.bool_]
    names: list[str]
    train: list[Index]
    test: list[Index]
    central: tuple[Features, Targets] | None
    task: str
    classes: int | None
    budgets: tuple[Budget, ...] | None = None
    batch_sizes: tuple[int, ...] | None = None
    description: dict[str, Any] = field(default_factory=dict)
    sorted_files: bool = False
    ranged: Ranged | None = None
    tokens: int | None = None
    words: Mapping[str, Sequence[object]] = field(default_factory=dict)
    consent: Consent | None = None
    schema: Mapping[str, Any] | None = None
    units: Index | None = None
    unit_name: str = RECORD

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        whose = "" if self.units is None else f" of {self.sizes.sum()} units ({self.unit_name})"
        count = sum(len(self.records_of(part)) for part in self.train)
        return f"<Federation {self.name}: {len(self)} clients, {count} training records{whose} of {self.shape}>"

    @property
    def unit_records(self) -> int:
        """The most records that a unit has."""
        return 1 if self.units is None else int(self.units.shape[1])

    def records_of(self, part: Index) -> Index:
        """The records of these units."""
        return part if self.units is None else flat(self.units[part])

    @property
    def clients(self) -> int:
        """How many clients there are (N)."""
        return len(self.names)

    @cached_property
    def sizes(self) -> Index:
        """The number of training units of each client (n_i): public by declaration."""
        return np.array([len(part) for part in self.train], dtype=np.int64)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of one record."""
        return tuple(self.x.shape[1:])

    def by_record(self) -> Federation:
        """The same clients and records, every record a unit of its own; for comparison. Budgets are to be set anew."""
        train = [np.sort(self.records_of(part)) for part in self.train]
        return replace(self, units=None, unit_name=RECORD, train=train, budgets=None, consent=None)

    def only(self, place: int) -> Federation:
        """One client by itself, with its own records and nobody else's."""
        mine, test = self.train[place], self.test[place]
        rows = np.unique(np.concatenate([self.records_of(mine), test]))
        units = None
        if self.units is not None:
            table = self.units[mine]
            units = np.where(table < 0, -1, np.searchsorted(rows, np.maximum(table, 0)))
        return replace(
            self,
            x=self.x[rows],
            y=self.y[rows],
            valid=self.valid[rows],
            names=[self.names[place]],
            train=[np.searchsorted(rows, mine) if units is None else np.arange(len(mine), dtype=np.int64)],
            test=[np.searchsorted(rows, test)],
            budgets=None if self.budgets is None else (self.budgets[place],),
            batch_sizes=None if self.batch_sizes is None else (self.batch_sizes[place],),
            description={**self.description, "only": self.names[place]},
            units=units,
            words={name: [column[k] for k in rows] for name, column in self.words.items()},
            consent=None if self.consent is None else self.consent.of(rows if units is None else mine),
        )

    def held_out(self, share: float, seed: int) -> tuple[Federation, tuple[Index, ...]]:
        """The clients without a share of their training units, and each client's units that were taken.

        By a hash of the seed and the unit's place, as a site parts its own (``privacy.held``); everybody keeps one.
        """
        key = hashlib.sha256(f"held out {seed}".encode()).digest()
        train, taken = [], []
        for part in self.train:
            out = held_out(key, (f"place {k}" for k in part.tolist()), share)
            out[:1] &= not out.all()
            train.append(part[~out])
            taken.append(part[out])
        return replace(self, train=train), tuple(taken)

    def with_budgets(
        self,
        spec: Spec,
        delta: float | Sequence[float] | Mapping[str, float] = 1e-5,
        seed: int = 0,
        adjacency: str | Adjacency = Adjacency.ZERO_OUT,
        public: str | Sequence[str] = (),
        order: Sequence[str] | None = None,
        **options: float,
    ) -> Federation:
        """The same federation with a budget (ε_i, δ_i, adjacency) for every client.

        Parameters
        ----------
        spec
            ``"dist1"``…``"dist9"`` (Table 4 of Robust-HDP); ``"dist1-published"``… (its authors' 20 values and batch
            sizes); ``"uniform"`` with ``low=`` and ``high=``, or ``{"uniform": [low, high]}``;
            ``{"mixture": [[weight, mean, variance], …]}``; ``{"north": 3.0, "south": 1.0}``, by name; a list, in the
            order of ``order`` or of the clients; one number for all; or ``{"csv": path, "column": name}``, by name
            where a column of it holds the clients' names (``"client": column`` says which). ε ≤ 0 is drawn again.
        delta
            One δ for all clients or one each, as a table by name or a list.
        seed
            Governs the draw of the budgets and nothing else.
        public
            The name (or names) of clients whose data is public: their ε is ∞ whatever ``spec`` says.
        order
            Clients' names in the order that lists of budgets follow; needed where clients are files of a folder.
        """
        named = (public,) if isinstance(public, str) else tuple(public)
        made = self.with_terms(BudgetTerms(spec, delta, seed, adjacency, named, order, dict(options)))
        warn_of(made.names, made.budgets or ())
        return made

    def with_levels(
        self,
        levels: Mapping[str, float],
        column: str | Sequence[Any],
        delta: float | Sequence[float] | Mapping[str, float] = 1e-5,
        adjacency: str | Adjacency = Adjacency.ZERO_OUT,
    ) -> Federation:
        """The same federation with budgets that differ within every client, by the level that a record's person chose.

        A record whose word is missing or names no level is of the strictest; of a unit with several records the
        strictest of their levels counts. See docs/levels.md.

        Parameters
        ----------
        levels
            ε by level: ``{"strict": 0.5, "standard": 1.0, "generous": 4.0}``.
        column
            The column that says a record's level, kept by ``from_folder(…, also=[column])``; or a word for every
            record, in the order of ``x`` (for ``from_arrays`` the clients' records one after another).
        """
        if isinstance(column, str) and column not in self.words:
            raise BadInput(
                f"the column {column!r} was not kept with the records: load them with from_folder(…, also=[{column!r}])"
            )
        words = self.words[column] if isinstance(column, str) else column
        if len(words) != len(self.x):
            raise BadInput(f"{len(words)} words of levels for {len(self.x)} records: give one each, in the order of x")
        consent = Consent.of_words(words, levels, "budgets.levels")
        consent = consent if self.units is None else consent.of_units(self.units)
        made = self.with_budgets(min(consent.epsilons.values()), delta, adjacency=adjacency)
        named = column if isinstance(column, str) else "words"
        described = {**made.description["budgets"], "levels": dict(consent.epsilons), "column": named}
        return replace(made, consent=consent, description={**made.description, "budgets": described})

    @property
    def levels(self) -> tuple[Levels, ...]:
        """By client the levels of its training records, with how many each has; empty where budgets have no levels."""
        if self.consent is None or self.budgets is None:
            return ()
        return tuple(self.consent.of(part).levels(budget) for part, budget in zip(self.train, self.budgets))

    @property
    def members(self) -> tuple[dict[str, Index], ...]:
        """By client and level which of its training records have it; empty where budgets have no levels."""
        if self.consent is None:
            return ()
        return tuple(self.consent.of(part).members for part in self.train)

    def with_terms(self, terms: BudgetTerms) -> Federation:
        """``with_budgets``, its arguments put together; warns of a δ above 1/n only (``warn_of`` looks at ε)."""
        budgets, batches = terms.of(self.names, self.sorted_files)
        budgets = tuple(replace(one, unit=self.unit_name) for one in budgets)
        warn_of_deltas(self.names, self.sizes.tolist(), budgets)
        made = {"spec": terms.spec, "delta": terms.delta, "seed": terms.seed, "public": list(terms.public)}
        made |= {"adjacency": str(Adjacency.parse(terms.adjacency)), **terms.options}
        made |= {} if terms.order is None else {"order": list(terms.order)}
        description = {**self.description, "budgets": plain(made)}
        return replace(self, budgets=budgets, batch_sizes=batches, description=description, consent=None)


def plain(value: Any) -> Any:
    """The value as JSON can hold it: lists, str, numbers; a number that is not finite becomes None."""

    def other(item: Any) -> Any:
        if isinstance(item, Mapping):
            return dict(item)
        return item.tolist() if isinstance(item, np.ndarray | np.number) else str(item)

    return json.loads(json.dumps(value, default=other), parse_constant=lambda _: None)
