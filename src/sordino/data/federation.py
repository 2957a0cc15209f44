"""A federation: one set of shared arrays, and for every client the records, the budget and the name it has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sordino.data.budgets import Spec, epsilons
from sordino.data.partitions import Index
from sordino.errors import BadInput
from sordino.privacy.types import Adjacency, Budget, check_promised

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
        delta: float | Sequence[float] = 1e-5,
        seed: int = 0,
        adjacency: str | Adjacency = Adjacency.ZERO_OUT,
        public: str | Sequence[str] = (),
        **options: float,
    ) -> Federation:
        """The same federation with a budget (ε_i, δ_i, adjacency) for every client.

        Parameters
        ----------
        spec
            A distribution, a list, a number or a file: see ``sordino.data.budgets.epsilons``.
        delta
            One δ for all clients or one each.
        seed
            Governs the draw of the budgets and nothing else.
        public
            The name (or names) of clients whose data is public: their ε is ∞ whatever ``spec`` says.
        """
        values, batches = epsilons(spec, self.names, seed, **options)
        deltas = [delta] * len(self) if isinstance(delta, int | float) else list(delta)
        if len(deltas) != len(self):
            raise BadInput(f"budgets.delta has {len(deltas)} values for {len(self)} clients: give one each, or one")
        public = [public] if isinstance(public, str) else list(public)
        unknown = set(public) - set(self.names)
        if unknown:
            raise BadInput(f"budgets.public names {min(unknown)!r}, which is no client: clients are {self.names[0]}, …")
        kind = Adjacency.parse(adjacency)
        check_promised(kind)
        budgets = []
        for name, epsilon, one in zip(self.names, values, deltas):
            try:
                budgets.append(Budget(math.inf if name in public else epsilon, float(one), kind))
            except BadInput as error:
                raise BadInput(f"client {name!r}: {error}") from None
        made = {"spec": spec, "delta": delta, "seed": seed, "adjacency": str(kind), "public": public, **options}
        description = {**self.description, "budgets": plain(made)}
        return replace(self, budgets=tuple(budgets), batch_sizes=batches, description=description)


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
