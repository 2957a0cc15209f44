"""A federation: one set of shared arrays, and for every client the records, the budget and the name it has."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from sordino.data.budgets import Spec, by_name, epsilons, in_order, is_by_name
from sordino.data.partitions import Index
from sordino.errors import BadInput
from sordino.privacy.types import Adjacency, Budget, check_promised

log = logging.getLogger("sordino.data")

LARGE = 20.0
"""Above this ε a promise says next to nothing: a record may make what is seen e^20, half a billion, times likelier."""

Features = npt.NDArray[np.float32]
Targets = npt.NDArray[np.int64] | npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """The clients of a study.

    Attributes
    ----------
    x, y, valid
        Shared arrays over all records. ``valid[j]`` is False for a null row: it counts in n_i and contributes zero.
    names, train, test
        Per client: its name and the indices of its training and test records. Null rows are in ``train`` (n_i stays
        what was declared) but never in ``test``, where there is nothing to predict. A client's ``test`` may be empty.
    central
        A test set of the server's own, or None.
    budgets, batch_sizes
        Per client, or None while undecided; published budgets bring their batch sizes.
    description
        How all of this was made, as plain JSON values.
    sorted_files
        Whether the clients are files in the order of their names, which nobody chose.
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

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"<Federation {self.name}: {len(self)} clients, {self.sizes.sum()} training records of {self.shape}>"

    @property
    def clients(self) -> int:
        """How many clients there are (N)."""
        return len(self.names)

    @property
    def sizes(self) -> Index:
        """The number of training records of each client (n_i): public by declaration."""
        return np.array([len(part) for part in self.train], dtype=np.int64)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one record."""
        return tuple(self.x.shape[1:])

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
            A distribution, a table by name, a list, a number or a file: see ``sordino.data.budgets.epsilons``.
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
        made = self.with_terms(Terms(spec, delta, seed, adjacency, named, order, dict(options)))
        warn_of(made.names, made.budgets or ())
        return warn_of_deltas(made)

    def with_terms(self, terms: Terms) -> Federation:
        """``with_budgets``, its arguments put together."""
        budgets, batches = terms.of(self.names, self.sorted_files)
        made: dict[str, Any] = {
            "spec": terms.spec,
            "delta": terms.delta,
            "seed": terms.seed,
            "public": list(terms.public),
        }
        made |= {"adjacency": str(Adjacency.parse(terms.adjacency)), **terms.options}
        made |= {} if terms.order is None else {"order": list(terms.order)}
        description = {**self.description, "budgets": plain(made)}
        return replace(self, budgets=budgets, batch_sizes=batches, description=description)


@dataclass(frozen=True)
class Terms:
    """What was said about budgets, before it is known whose they are; the arguments of ``with_budgets``."""

    spec: Spec
    delta: float | Sequence[float] | Mapping[str, float] = 1e-5
    seed: int = 0
    adjacency: str | Adjacency = Adjacency.ZERO_OUT
    public: tuple[str, ...] = ()
    order: Sequence[str] | None = None
    options: dict[str, float] = field(default_factory=dict)

    def of(self, names: Sequence[str], sorted_files: bool = False) -> tuple[tuple[Budget, ...], tuple[int, ...] | None]:
        """A budget for each of these clients, and batch sizes where they come along. Touches no record."""
        unknown = set(self.public) - set(names)
        if unknown:
            raise BadInput(f"budgets.public names {min(unknown)!r}, which is no client: clients are {names[0]}, …")
        spec = self.spec
        if is_by_name(spec):  # public clients need no budget
            spec = {**dict.fromkeys(self.public, math.inf), **cast(Mapping[str, Any], spec)}
        values, batches = epsilons(spec, names, self.seed, self.order, sorted_files, **self.options)
        deltas = self._deltas(names, sorted_files)
        kind = Adjacency.parse(self.adjacency)
        check_promised(kind)
        budgets = []
        for name, epsilon, one in zip(names, values, deltas):
            try:
                budgets.append(Budget(math.inf if name in self.public else epsilon, float(one), kind))
            except BadInput as error:
                raise BadInput(f"client {name!r}: {error}") from None
        return tuple(budgets), batches

    def _deltas(self, names: Sequence[str], sorted_files: bool) -> list[float]:
        if isinstance(self.delta, int | float):
            return [float(self.delta)] * len(names)
        if isinstance(self.delta, Mapping):
            return by_name(self.delta, "delta", names)
        deltas = list(self.delta)
        if len(deltas) != len(names):
            raise BadInput(f"budgets.delta has {len(deltas)} values for {len(names)} clients: give one each, or one")
        return in_order(deltas, "delta", names, self.order, sorted_files)


def warn_of(names: Sequence[str], budgets: Sequence[Budget]) -> None:
    """Say what budgets do not promise."""
    if budgets and all(one.is_public for one in budgets):
        _say_once("NOT PRIVATE: every client's epsilon is infinite, so nobody's records are protected")
    large = [f"{name} ({b.epsilon:g})" for name, b in zip(names, budgets) if LARGE < b.epsilon < math.inf]
    if large:
        told = ", ".join(large[:5]) + (f" and {len(large) - 5} more" if len(large) > 5 else "")
        _say_once(
            f"budgets.epsilon above {LARGE:g} promises next to nothing: {told}; promises that mean something are about "
            "0.1 to 10"
        )


def warn_of_deltas(clients: Federation) -> Federation:
    """Say whose δ is so large that a record may be given away whole; returns the same clients."""
    pairs = zip(clients.names, clients.sizes.tolist(), clients.budgets or ())
    found = [f"{name} ({b.delta:g}, {n} records)" for name, n, b in pairs if b.delta * n > 1 and not b.is_public]
    if found:
        told = ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
        _say_once(f"budgets.delta above 1/records allows to give a record away whole: {told}; choose it well below")
    return clients


@lru_cache(maxsize=1024)
def _say_once(text: str) -> None:
    """Log a warning, the same one once: a study with many runs gives its clients budgets many times."""
    log.warning("%s", text)


def client_names(count: int) -> list[str]:
    """``client-00``, ``client-01``, …: zero-padded to the same length, at least two digits."""
    digits = max(2, len(str(count - 1)))
    return [f"client-{k:0{digits}d}" for k in range(count)]


def plain(value: Any) -> Any:
    """The value as JSON can hold it: lists, str, numbers; an infinite number becomes None."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float | np.number):
        number = value.item() if isinstance(value, np.number) else value
        return number if math.isfinite(number) else None
    return str(value)
