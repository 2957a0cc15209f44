"""The 24 triples of the accuracy benchmark: eight data sets, three federations of each, ε rotating from 0.1 to 8."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from papers.experiment import Cell
from sordino.data.partitions import generator

BASES = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Triple number k has the ε of place 2k mod 7, so that neighbours differ and every set sees small and large ones."""

LEAST, MOST, DELTA = 0.1, 8.0, 1e-5
ALIKE, UNLIKE, MANY = range(3)
"""The federations: few alike clients with one ε; Dirichlet(0.3), every ε drawn; more clients, Dirichlet(1), two ε."""

SCHOOL = "school"
"""The one regression set. Its federations: pupils at random, pupils at random in unequal numbers, the 139 schools."""

CLIENTS = {
    "digits": (4, 12, 20),
    "breast-cancer": (3, 6, 8),
    "mnist": (5, 20, 40),
    "fashion-mnist": (10, 20, 40),
    "cifar10": (10, 20, 40),
    "adult": (4, 20, 40),
    "bank-marketing": (5, 15, 40),
    SCHOOL: (10, 20, 139),
}
WHOLE = ("digits", "breast-cancer", SCHOOL)
RECORDS, FEWER = 12_000, {"cifar10": 6_000}
"""So many of the other sets, so that the benchmark runs on a CPU; fewer of CIFAR-10 with its 9,408 features."""

MERGED = ("mnist", "fashion-mnist", "cifar10", "adult")
"""Sets with test records of their own, which are dealt out too: here every client sets a fifth aside."""

MINIMUM = {"breast-cancer": 10}


@dataclass(frozen=True)
class Triple:
    """A data set, a federation and budgets: triple number ``3·set + federation``."""

    number: int
    name: str
    federation: int
    clients: int
    base: float

    @property
    def key(self) -> str:
        """A name for files."""
        return f"{self.name}-{self.federation}"

    @property
    def range(self) -> tuple[float, float]:
        """The least and the largest ε that a client may have."""
        if self.federation == ALIKE:
            return self.base, self.base
        low = max(self.base / 4, LEAST)
        if self.federation == MANY:
            return low, self.base
        return low, min(2 * self.base, MOST) if self.base > LEAST else 4 * LEAST

    @property
    def row(self) -> str:
        """What a table calls it."""
        low, high = self.range
        told = f"{low:g}" if low == high else f"{low:g}–{high:g}"
        kind = {ALIKE: "alike", UNLIKE: "unlike", MANY: "many"}[self.federation]
        return f"{self.name}, {self.clients} {kind}, ε {told}"

    def epsilons(self, seed: int) -> list[float]:
        """Every client's ε: the base; drawn log-uniformly from the range, anew for every seed; or by turns its ends."""
        low, high = self.range
        if self.federation == UNLIKE:
            drawn = generator(seed, f"accuracy {self.key}").uniform(math.log(low), math.log(high), self.clients)
            return [float(f"{value:.3g}") for value in np.exp(drawn)]
        return [low if client % 2 == 0 else high for client in range(self.clients)]

    @property
    def data(self) -> dict[str, Any]:
        """``Cell.data``: the set, and how it is dealt out."""
        options = {} if self.name in WHOLE else {"records": FEWER.get(self.name, RECORDS)}
        dealt: dict[str, Any] = {"kind": "iid", "clients": self.clients}
        if self.name == SCHOOL and self.federation == UNLIKE:
            dealt |= {"sizes": (0.1, 1.9)}
        elif self.name == SCHOOL and self.federation == MANY:
            dealt = {"kind": "natural"}
        elif self.federation != ALIKE:
            beta = 0.3 if self.federation == UNLIKE else 1.0
            dealt = {"kind": "dirichlet", "clients": self.clients, "beta": beta, "minimum": MINIMUM.get(self.name, 20)}
        merged = {"merge": True} if self.name in MERGED else {}
        return {"name": self.name, "options": {**options, **merged}, **dealt, "test": 0.2}

    def cell(self, run: Asked, seed: int) -> Cell:
        """One training run on this triple: partition, budgets and start are those of the seed, whatever the method."""
        budgets = {"spec": self.epsilons(seed), "delta": DELTA}
        place = ("", self.row, run.column)
        return Cell(*place, self.data, "auto", run.method, run.training, budgets, dict(run.parts), seed=seed)


@dataclass(frozen=True)
class Asked:
    """What is trained on a triple: its column in the table, the method, its settings and parts."""

    column: str
    method: str
    training: Mapping[str, Any]
    parts: Mapping[str, Any] = field(default_factory=dict)


def triples() -> tuple[Triple, ...]:
    """All 24, set by set."""
    found = []
    for place, (name, counts) in enumerate(CLIENTS.items()):
        for federation, clients in enumerate(counts):
            number = 3 * place + federation
            found.append(Triple(number, name, federation, clients, BASES[2 * number % len(BASES)]))
    return tuple(found)
