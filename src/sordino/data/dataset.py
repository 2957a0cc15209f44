"""Records before and after they are dealt to clients: a ``Dataset``, and the ``Federation`` that it becomes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from sordino.data import partitions
from sordino.data.budgets import BudgetTerms, Spec, warn_of, warn_of_deltas
from sordino.data.partitions import Index, Parts, generator
from sordino.data.units import (
    UNIT_NAME,
    UNIT_RECORDS,
    check_unit_name,
    check_unit_records,
    flat,
    kept,
    members,
    numbered,
    of_clients,
    spoken,
)
from sordino.errors import BadInput
from sordino.privacy.held import held_out
from sordino.privacy.levels import Consent, Levels
from sordino.privacy.types import RECORD, Adjacency, Budget

Features = npt.NDArray[np.float32]
Targets = npt.NDArray[np.int64] | npt.NDArray[np.float32]

Ranged = tuple[int, float, float]
"""How many numbers, counted from the first, lie in [low, high]."""

OPTIONS: dict[str, frozenset[str]] = {
    "iid": frozenset({"sizes"}),
    "dirichlet": frozenset({"beta"}),
    "shards": frozenset({"shards", "max_classes"}),
    "similarity": frozenset({"similarity", "sizes"}),
    "natural": frozenset(),
}
"""The partitions and the options each of them knows."""


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Records with their targets, before they are dealt to clients.

    Attributes
    ----------
    x, y, valid
        Features (float32), targets (int64 class numbers, or float32) and whether a record is valid. An invalid record
        is a null row: x = 0, y = 0, valid = False.
    task, classes
        ``"classification"`` with the number of classes, or ``"regression"`` with None.
    test_x, test_y
        The set's own test records, or None.
    owners, names
        For data that comes with clients: the client of every record and the clients' names.
    sorted_files
        Whether those clients are files in the order of their names.
    ranged
        For tables: how many of a record's first numbers have a declared range, and the range they were scaled to.
    words
        Columns that were kept as words, one a record: None where there was none, all of a unit's where they differ.
    units, unit_records, unit_name
        Where a unit of privacy has several records: the number of every record's unit, the public cap on how many of
        them count (those beyond it are left out when records are dealt), and the word for a unit.
    """

    name: str
    x: Features
    y: Targets
    task: str
    classes: int | None
    valid: npt.NDArray[np.bool_]
    test_x: Features | None = None
    test_y: Targets | None = None
    owners: Index | None = None
    names: tuple[str, ...] | None = None
    source: dict[str, Any] = field(default_factory=dict)
    sorted_files: bool = False
    ranged: Ranged | None = None
    words: Mapping[str, Sequence[object]] = field(default_factory=dict)
    units: Index | None = None
    unit_records: int = UNIT_RECORDS
    unit_name: str = UNIT_NAME

    def __len__(self) -> int:
        return len(self.x)

    def __repr__(self) -> str:
        return f"<Dataset {self.name}: {len(self)} records of {self.x.shape[1:]}, {self.task}>"

    def subset(self, records: int, seed: int = 0) -> Dataset:
        """A random choice of ``records`` records, in their old order; the test set stays."""
        if isinstance(records, bool) or not isinstance(records, int) or not 1 <= records <= len(self):
            raise BadInput(f"data.records is {records!r}: {self.name} has {len(self)} records to choose from")
        chosen = np.sort(generator(seed, "subset").permutation(len(self))[:records])
        return replace(self._only(chosen), source={**self.source, "records": records, "records_seed": seed})

    def _only(self, chosen: Index) -> Dataset:
        """These records alone."""
        owners, of = (None if one is None else one[chosen] for one in (self.owners, self.units))
        words = {column: tuple(own[k] for k in chosen.tolist()) for column, own in self.words.items()}
        x, y, valid = self.x[chosen], self.y[chosen], self.valid[chosen]
        return replace(self, x=x, y=y, valid=valid, owners=owners, units=of, words=words)

    def by_unit(self, ids: Sequence[object], records: int | None = None, name: str | None = None) -> Dataset:
        """The same records with another unit of privacy: ``ids`` says of every record whose it is.

        Parameters
        ----------
        ids
            Equal ids mark records of one unit. Where records come with clients it is a unit at each of them, and where
            they are dealt anew it goes to one client as a whole.
        records
            The public cap: of a unit with more records so many count, chosen by a hash (``data.units``).
        name
            The word for a unit, such as ``"patient"``.

        Guarantees
        ----------
        Whatever is drawn, clipped, counted, held out or dealt to clients from here on is whole units; n_i is the
        number of client i's units, and every promise is made for a unit.
        """
        if len(ids) != len(self):
            raise BadInput(f"{len(ids)} ids for {len(self)} records: say of every record whose it is")
        most = check_unit_records(UNIT_RECORDS if records is None else records, "unit_records")
        called = check_unit_name(UNIT_NAME if name is None else name, "unit_name")
        names = [str(one) for one in ids]
        units = numbered(names)
        whose = units if self.owners is None else of_clients(units, self.owners)
        keep = kept(whose, names, most)
        told = {**self.source, "unit": {"name": called, "records": most}}
        words = {column: spoken(own, whose) for column, own in self.words.items()}
        found = replace(self, units=units, unit_records=most, unit_name=called, source=told, words=words)
        return found if keep.all() else found._only(np.flatnonzero(keep))

    def partition(
        self,
        kind: str,
        clients: int | None = None,
        seed: int = 0,
        test: float = 0.2,
        central: float = 0.0,
        minimum: int = 1,
        **options: Any,
    ) -> Federation:
        """Deal the records to clients.

        Parameters
        ----------
        kind
            ``"iid"``; ``"dirichlet"`` with ``beta=``; ``"shards"`` with ``shards=`` per client (default 2) and, if
            wanted, ``max_classes=``; ``"similarity"`` with ``similarity=`` percent IID; ``"natural"`` for data that
            comes with clients. ``iid`` and ``similarity`` take ``sizes=(a, b)``: unequal sizes ∝ U(a, b).
        clients
            How many clients (the natural partition knows).
        seed
            Governs who gets which record, and the split into training and test records. Units of several records stay
            whole: they are dealt by their first record's label.
        test
            The share of every client's records that is set aside for testing; 0 for none.
        central
            The share of all records that is set aside first, as a central test set, when the data set has none itself.
        minimum
            The fewest records, training and test together, that a client may have.
        """
        check_options(kind, options)
        table = None if self.units is None else self._members(self.units, kind)
        first = np.arange(len(self), dtype=np.int64) if table is None else table[:, 0]
        pool, held = self._without_central(central, seed, first if table is None else table)
        if kind == "natural":
            noted: dict[str, Any] = {}
            parts, names = self._natural(clients, pool, first)
        else:
            count = _checked_clients(clients, len(pool), minimum)
            dealt, noted = self._dealt(kind, count, seed, minimum, self.y[first[pool]], options)
            parts, names = [pool[part] for part in dealt], client_names(count)
        shortest = min(range(len(parts)), key=lambda k: len(parts[k]))
        if len(parts[shortest]) < minimum:
            raise BadInput(
                f"client {names[shortest]!r} would have {len(parts[shortest])} records, fewer than {minimum}: "
                "use fewer clients, another partition or seed, or a smaller minimum"
            )
        train, tests = partitions.split(parts, test, generator(seed, "split"))
        made = {"kind": kind, "clients": len(parts), "seed": seed, "test": test, "minimum": minimum, **options, **noted}
        if central:
            made["central"] = central
        tests = tests if table is None else [flat(table[part]) for part in tests]
        tests = [part[self.valid[part]] for part in tests]
        described = {"source": plain(self.source | {"name": self.name}), "partition": plain(made)}
        return Federation(
            self.name, self.x, self.y, self.valid, names, train, tests, held, self.task, self.classes,
            description=described, sorted_files=self.sorted_files and kind == "natural", ranged=self.ranged,
            words=self.words, units=table, unit_name=RECORD if table is None else self.unit_name,
        )  # fmt: skip

    def _members(self, units: Index, kind: str) -> Index:
        """The records of every unit that is dealt: of a person at each client, where clients stay as they came."""
        if kind == "natural":
            return members(numbered(units) if self.owners is None else of_clients(units, self.owners))
        # A person's records at several clients come together again: they may be more than of one unit count.
        keep = np.flatnonzero(kept(units, units.astype(str).tolist(), self.unit_records))
        table = members(numbered(units[keep]))
        return np.where(table < 0, -1, keep[table])

    def _without_central(self, share: float, seed: int, table: Index) -> tuple[Index, tuple[Features, Targets] | None]:
        """The units to deal out, and the central test set; ``table`` has the records of every unit."""
        everything = np.arange(len(table), dtype=np.int64)
        if not 0 <= share < 1:
            raise BadInput(f"data.central is {share!r}: the share of a central test set must be at least 0 and below 1")
        if self.test_x is not None and self.test_y is not None:
            if share:
                raise BadInput(f"{self.name} has a test set already: leave out central, or load it with merge=True")
            return everything, (self.test_x, self.test_y)
        if not share:
            return everything, None
        order = generator(seed, "central").permutation(len(table))
        taken, pool = np.split(order, [round(share * len(table))])
        held = flat(table[taken])
        held = np.sort(held[self.valid[held]])
        return np.sort(pool), (self.x[held], self.y[held])

    def _dealt(
        self, kind: str, count: int, seed: int, minimum: int, labels: Targets, options: Mapping[str, Any]
    ) -> tuple[Parts, dict[str, Any]]:
        """Which of the labelled records each client gets, and what is worth noting about the deal."""
        random = generator(seed, "partition")
        if kind == "dirichlet":
            if self.task != "classification":
                raise BadInput("the dirichlet partition needs classes: use iid or similarity for regression")
            beta = _needed(kind, "beta", options)
            parts, moved = partitions.dirichlet(labels.astype(np.int64), count, beta, minimum, random)
            return parts, {"topped_up": moved}
        if kind == "shards":
            return partitions.shards(labels, count, options.get("shards", 2), options.get("max_classes"), random), {}
        bounds = options.get("sizes")
        if bounds is None:
            sizes = partitions.equal_sizes(len(labels), count)
        else:
            sizes = partitions.unequal_sizes(len(labels), count, bounds, generator(seed, "sizes"))
        percent = 100.0 if kind == "iid" else _needed(kind, "similarity", options)
        return partitions.similarity(labels, sizes, percent, random), {}

    def _natural(self, clients: int | None, pool: Index, first: Index) -> tuple[Parts, list[str]]:
        """The clients that the data came with; ``first``: a record of every unit."""
        if self.owners is None or self.names is None:
            raise BadInput(f"{self.name} comes without clients: use iid, dirichlet, shards or similarity")
        if clients is not None and clients != len(self.names):
            raise BadInput(f"{self.name} comes with {len(self.names)} clients, not {clients}: leave out clients")
        owner = self.owners[first[pool]]
        order = pool[np.argsort(owner, kind="stable")]
        return np.split(order, np.cumsum(np.bincount(owner, minlength=len(self.names)))[:-1]), list(self.names)


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
    words
        Columns that were kept as words, one a record: None where there was none, all of a unit's where they differ.
    consent
        Levels of consent, where budgets differ within a client (``with_levels``), of all records. ``budgets`` are then
        the strictest level's.
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
    words: Mapping[str, Sequence[object]] = field(default_factory=dict)
    consent: Consent | None = None
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

        Parameters
        ----------
        levels
            ε by level: ``{"strict": 0.5, "standard": 1.0, "generous": 4.0}``.
        column
            The column that says a record's level, kept by ``from_folder(…, also=[column])``; or a word for every
            record, in the order of ``x`` (for ``from_arrays`` the clients' records one after another).

        A record whose word is missing or names no level is of the strictest; of a unit with several records the
        strictest of their levels counts. See docs/levels.md.
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


def check_options(kind: str, options: Mapping[str, Any]) -> None:
    """Refuse an unknown partition, and an option that it does not know."""
    if kind not in OPTIONS:
        raise BadInput(f"partition {kind!r} is unknown: use one of {', '.join(OPTIONS)}")
    for name in sorted(set(options) - OPTIONS[kind]):
        known = ", ".join(sorted(OPTIONS[kind])) or "none"
        raise BadInput(f"the {kind} partition has no option {name!r}: its options are {known}")


def _checked_clients(clients: int | None, records: int, minimum: int) -> int:
    """The number of clients, when the records suffice for it."""
    if clients is None or isinstance(clients, bool) or not isinstance(clients, int | np.integer) or clients < 1:
        raise BadInput(f"data.clients is {clients!r}: say how many clients there are, a whole number ≥ 1")
    if isinstance(minimum, bool) or not isinstance(minimum, int) or minimum < 1:
        raise BadInput(f"data.minimum is {minimum!r}: it must be a whole number ≥ 1")
    if clients > records:
        raise BadInput(f"{clients} clients are more than the {records} records: use at most {records} clients")
    if clients * minimum > records:
        raise BadInput(
            f"{clients} clients with at least {minimum} records each need {clients * minimum}, there are {records}: "
            "use fewer clients or a smaller minimum"
        )
    return int(clients)


def _needed(kind: str, name: str, options: Mapping[str, Any]) -> float:
    """A numeric option without which the partition makes no sense."""
    value = options.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise BadInput(f"the {kind} partition needs a number for {name}, got {value!r}")
    return float(value)


def client_names(count: int) -> list[str]:
    """``client-00``, ``client-01``, …: zero-padded to the same length, at least two digits."""
    digits = max(2, len(str(count - 1)))
    return [f"client-{k:0{digits}d}" for k in range(count)]


def plain(value: Any) -> Any:
    """The value as JSON can hold it: lists, str, numbers; a number that is not finite becomes None."""

    def other(item: Any) -> Any:
        if isinstance(item, Mapping):
            return dict(item)
        return item.tolist() if isinstance(item, np.ndarray | np.number) else str(item)

    return json.loads(json.dumps(value, default=other), parse_constant=lambda _: None)
