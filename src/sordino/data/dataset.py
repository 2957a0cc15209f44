"""Records before they are dealt to clients: a ``Dataset``, and the ways to deal it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sordino.data import partitions
from sordino.data.federation import Features, Federation, Ranged, Targets, plain
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
from sordino.privacy.types import RECORD

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
        Features (float32, or int64 where they are token ids), targets (int64 class numbers, or float32) and whether a
        record is valid. An invalid record is a null row: x = 0, y = 0, valid = False.
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
    tokens
        Where records are token ids (text): how many there are.
    words
        Columns that were kept as words, one a record: None where there was none, all of a unit's where they differ.
    schema
        How records were made numbers, and what the classes are called, as a table (``data.schema``); None: not said.
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
    tokens: int | None = None
    words: Mapping[str, Sequence[object]] = field(default_factory=dict)
    schema: Mapping[str, Any] | None = None
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
            tokens=self.tokens, words=self.words, schema=self.schema,
            units=table, unit_name=RECORD if table is None else self.unit_name,
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
