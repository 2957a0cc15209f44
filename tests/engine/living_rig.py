"""A site whose file changes between runs: SITE.toml, a CSV file with ids, and a server in the same process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from federation_rig import Fixture, Rig, records_of

from sordino.engine.federation import site as site_module
from sordino.engine.federation.attending import Roll
from sordino.engine.federation.exchange import farewell
from sordino.engine.federation.limits import Declared
from sordino.engine.federation.site import Purse, Site
from sordino.privacy.ledger import Ledger
from sordino.study.site_file import read_site

SITE = """\
[site]
name = "north"
server = "127.0.0.1:9092"
folder = "north"
[data]
path = "north.csv"
{data}
[data.schema]
target = "sick"
{schema}
classes = ["no", "yes"]
[data.schema.numeric]
age = [0, 1000]
weight = [0, 200]
[budget]
epsilon = {epsilon}
delta = 1e-5
adjacency = "{adjacency}"
[limits]
{limits}
"""
LIVING = 'id = "patient"\nliving = true'


@dataclass
class Ward:
    """The folder of one site. A patient's age is its number, so that a batch tells who was in it."""

    folder: Path
    data: str = LIVING
    limits: str = ""
    schema: str = ""
    epsilon: float = 2.0
    adjacency: str = "zero-out"
    training: dict[str, Any] = field(default_factory=lambda: {"steps": 1, "rate": 0.5, "lr": 0.1})
    more: dict[str, Any] = field(default_factory=dict)

    def write(self, *patients: int | range, names: dict[int, str] | None = None) -> None:
        """These patients are in the file now, in this order."""
        numbers = [k for one in patients for k in (one if isinstance(one, range) else [one])]
        rows = [f"{(names or {}).get(k, f'P-{k}')},{k},{50 + k % 100},{'yes' if k % 2 else 'no'}" for k in numbers]
        (self.folder / "north.csv").write_text("\n".join(["patient,age,weight,sick", *rows]) + "\n")

    def file(self) -> Path:
        said = SITE.format(**vars(self))
        path = self.folder / "SITE.toml"
        path.write_text(said)
        return path

    @contextmanager
    def site(self) -> Iterator[Site]:
        """The site, started."""
        with read_site(self.file()).open() as site:
            yield site

    @contextmanager
    def rig(self, run: str, rounds: int = 1) -> Iterator[Rig]:
        """A server that knows this site, before it enrols it."""
        clients = SimpleNamespace(names=["north"])
        study = {
            "study": {"rounds": rounds, "seed": 3},
            "model": {"name": "logistic"},
            "method": {"name": "dp-fedavg"},
            "training": self.training,
            "deployment": {"sites": ["north"], "shape": [2], "classes": 2},
            "budgets": {"adjacency": self.adjacency},
            **self.more,
        }
        rig = _Rig(self.folder / run, clients, study)
        rig.ward, rig.run = self, run
        with rig:
            yield rig

    def train(self, run: str, rounds: int = 1) -> dict[str, Any]:
        """A whole run; what the site declared, and what it said in the end."""
        with self.rig(run, rounds) as rig:
            rig.train()
            told = farewell(rig.wires, run, ["north"], 5.0)
            return {**rig.facts["north"], **told["north"]}


class _Rig(Rig):
    ward: Ward
    run: str

    def __enter__(self) -> Rig:
        super().__enter__()
        self.ready.brief["run"] = self.run
        return self

    def site(self, name: str) -> Site:
        return self.stack.enter_context(self.ward.site())


@dataclass
class Seen:
    """Who was in batches, and how many records they were drawn from."""

    patients: set[int] = field(default_factory=set)
    sizes: list[int] = field(default_factory=list)

    @classmethod
    def spy(cls, patch: pytest.MonkeyPatch) -> Seen:
        """Look at what every turn of any site reads."""
        seen, turn = cls(), site_module.take_turn

        def looked(work: Any, rows: Any, *rest: Any) -> Any:
            valid = rows.records.valid
            for where in rows.batches[0]:
                if rows.records.members is not None:
                    where = rows.records.members.numpy()[where]
                    where = where[where >= 0]
                real = where if valid is None else where[valid.numpy()[where]]
                seen.patients |= {round(float(one) * 1000) for one in rows.records.x[real][:, 0]}
            seen.sizes.append(len(rows.records))
            return turn(work, rows, *rest)

        patch.setattr(site_module, "take_turn", looked)
        return seen


class Cohorts(Rig):
    """Sites as a simulation's clients, in two cohorts each: the first half of the records, and the others."""

    def site(self, name: str) -> Site:
        place = self.clients.names.index(name)
        ids = [f"record {k}" for k in self.clients.train[place]]
        ledger = self.stack.enter_context(Ledger(self.folder / f"{name}.db"))
        ledger.call_roll("id", ids[: len(ids) // 2])
        ledger.bind(name, lambda salt: "records")
        ledger.open_account(name, self.clients.budgets[place])
        ledger.mark_not_private(name, "so that nobody joins the first cohort any more")
        roll = Roll.of(ledger.call_roll("id", ids))
        declared = Declared(len(ids), self.clients.shape, self.clients.classes, "")
        source = None if self.key is None else Fixture(self.key)
        more = self.everywhere, source, self.peers(name), None, None, None, roll
        purse = Purse(self.clients.budgets[place], ledger)
        return Site(name, records_of(self.clients, place), declared, purse, self.folder / name, *more)
