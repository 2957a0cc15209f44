"""A data set before anybody owns it, and how it is dealt to clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sordino.data import partitions
from sordino.data.federation import Features, Federation, Targets, client_names, plain
from sordino.data.partitions import Index, Parts
from sordino.data.seeds import generator
from sordino.errors import BadInput

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
    """Records with their targets.

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

    def __len__(self) -> int:
        return len(self.x)

    def __repr__(self) -> str:
        return f"<Dataset {self.name}: {len(self)} records of {self.x.shape[1:]}, {self.task}>"

    def subset(self, records: int, seed: int = 0) -> Dataset:
        """A random choice of ``records`` records, in their old order; the test set stays."""
        if isinstance(records, bool) or not isinstance(records, int) or not 1 <= records <= len(self):
            raise BadInput(f"data.records is {records!r}: {self.name} has {len(self)} records to choose from")
        chosen = np.sort(generator(seed, "subset").permutation(len(self))[:records])
        owners = None if self.owners is None else self.owners[chosen]
        source = {**self.source, "records": records, "records_seed": seed}
        return replace(self, x=self.x[chosen], y=self.y[chosen], valid=self.valid[chosen], owners=owners, source=source)

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
            Governs who gets which record, and the split into training and test records.
        test
            The share of every client's records that is set aside for testing; 0 for none.
        central
            The share of all records that is set aside first, as a central test set, when the data set has none itself.
        minimum
            The fewest records, training and test together, that a client may have.
        """
        check_options(kind, options)
        pool, held = self._without_central(central, seed)
        parts, names, noted = self._dealt(kind, clients, seed, minimum, pool, options)
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
        return Federation(
            name=self.name,
            x=self.x,
            y=self.y,
            valid=self.valid,
            names=names,
            train=train,
            test=tests if self.valid.all() else [part[self.valid[part]] for part in tests],
            central=held,
            task=self.task,
            classes=self.classes,
            description={"source": plain(self.source | {"name": self.name}), "partition": plain(made)},
            sorted_files=self.sorted_files and kind == "natural",
        )

    def _without_central(self, share: float, seed: int) -> tuple[Index, tuple[Features, Targets] | None]:
        """The records to deal out, and the central test set."""
        everything = np.arange(len(self), dtype=np.int64)
        if not 0 <= share < 1:
            raise BadInput(f"data.central is {share!r}: the share of a central test set must be at least 0 and below 1")
        if self.test_x is not None and self.test_y is not None:
            if share:
                raise BadInput(f"{self.name} has a test set already: leave out central, or load it with merge=True")
            return everything, (self.test_x, self.test_y)
        if not share:
            return everything, None
        order = generator(seed, "central").permutation(len(self))
        held, pool = np.split(order, [round(share * len(self))])
        held = np.sort(held[self.valid[held]])
        return np.sort(pool), (self.x[held], self.y[held])

    def _dealt(
        self, kind: str, clients: int | None, seed: int, minimum: int, pool: Index, options: Mapping[str, Any]
    ) -> tuple[Parts, list[str], dict[str, Any]]:
        """Index arrays into the whole data set, the clients' names, and what is worth noting about the deal."""
        if kind == "natural":
            return *self._natural(clients, pool), {}
        count = _checked_clients(clients, len(pool), minimum)
        labels, random = self.y[pool], generator(seed, "partition")
        noted: dict[str, Any] = {}
        if kind == "dirichlet":
            if self.task != "classification":
                raise BadInput("the dirichlet partition needs classes: use iid or similarity for regression")
            given = _needed(kind, "beta", options)
            parts, noted["topped_up"] = partitions.dirichlet(labels.astype(np.int64), count, given, minimum, random)
        elif kind == "shards":
            parts = partitions.shards(labels, count, options.get("shards", 2), options.get("max_classes"), random)
        else:
            bounds = options.get("sizes")
            sizes = (
                partitions.equal_sizes(len(pool), count)
                if bounds is None
                else partitions.unequal_sizes(len(pool), count, bounds, generator(seed, "sizes"))
            )
            parts = (
                partitions.iid(sizes, random)
                if kind == "iid"
                else partitions.similarity(labels, sizes, _needed(kind, "similarity", options), random)
            )
        return [pool[part] for part in parts], client_names(count), noted

    def _natural(self, clients: int | None, pool: Index) -> tuple[Parts, list[str]]:
        """The clients that the data came with."""
        if self.owners is None or self.names is None:
            raise BadInput(f"{self.name} comes without clients: use iid, dirichlet, shards or similarity")
        if clients is not None and clients != len(self.names):
            raise BadInput(f"{self.name} comes with {len(self.names)} clients, not {clients}: leave out clients")
        owner = self.owners[pool]
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
