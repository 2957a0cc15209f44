"""SITE.toml: what one site has, what it allows, where its ledger lies. Read at the site only."""

from __future__ import annotations

import logging
import math
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, PrivateAttr, ValidationError, field_validator, model_validator
from torch import Tensor

from sordino.client.rows import Records
from sordino.data.budgets import LARGE
from sordino.data.encode import unit_ids
from sordino.data.own import TABLES, kind_of, load_folder, read_words, schema_beside
from sordino.data.read import delimiter_of, read_by, read_table
from sordino.data.schema import Schema, parse_schema, word
from sordino.data.survey import Places, Survey, places, read_raw
from sordino.data.tokens import with_words_read
from sordino.data.units import UNIT_NAME, kept, members, numbered
from sordino.engine.federation.attending import Roll, check_living
from sordino.engine.federation.certificates import check_name
from sordino.engine.federation.held import commit_to, held_mask
from sordino.engine.federation.limits import BLANK, Declared, Policy
from sordino.engine.federation.node import Address
from sordino.engine.federation.peers import Peers
from sordino.engine.federation.signing import load_private
from sordino.engine.federation.site import Purse, Site
from sordino.engine.federation.surveying import Raw
from sordino.errors import BadInput, SordinoError
from sordino.privacy.generators import Source
from sordino.privacy.ledger import Ledger
from sordino.privacy.levels import Consent, check_levels
from sordino.privacy.living import canonical
from sordino.privacy.types import RECORD, Adjacency, Budget, check_promised
from sordino.study.deploy import schema_hash
from sordino.study.living import called, version_of
from sordino.study.sections import Section, explain

log = logging.getLogger("sordino.site")

HELD_SHARE = 0.2
"""The share of records that is held out where a survey comes before there is a schema, and nobody says."""


class SiteAbout(Section):
    """``[site]``: its name, the server's address, a folder for its own files."""

    name: str
    server: str
    folder: str = "."


class SiteData(Section):
    """``[data]``: one CSV, Excel, Parquet or NPZ file, and the schema that says what its columns mean.

    ``held_out``: the share of the records that training never sees, for evaluations and surveys; ``id``: the column
    that names a record. Without it records are known by their places, and the file may never change. ``unit``: the
    column of persons who are protected with all of their records, as the schema's; a site may insist on it here, and a
    survey, which comes before there is a schema, counts by it. ``living``: records come, are corrected and go, known by
    their unit or id; ``withdrawn``: a file of ids, one a line, whose consent is revoked.
    """

    path: str
    table_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    held_out: float | None = Field(default=None, gt=0, lt=1)
    id: str | None = None
    unit: str | None = None
    living: bool = False
    withdrawn: str | None = None

    @model_validator(mode="after")
    def _noted(self) -> Self:
        if self.withdrawn is not None and not self.living:
            raise ValueError("who withdrew is noted where data live: say data.living = true")
        return self


class SiteBudget(Section):
    """``[budget]``: what may be spent in all, over all runs, and where that is kept.

    ``levels``: in place of ``epsilon``, ε by level of consent; ``column`` of the file says which level a record has.
    """

    epsilon: float | None = Field(default=None, gt=0)
    delta: float = Field(gt=0, lt=1)
    adjacency: Literal["zero-out", "add-remove", "replace-one"] = "zero-out"
    composition: Literal["declared", "filter"] | None = None
    ledger: str = "ledger.db"
    column: str | None = None
    levels: dict[str, float] | None = None

    def promised(self) -> Budget:
        """ε, δ and adjacency, of the strictest level where there are several; refuses what cannot be promised."""
        adjacency = Adjacency.parse(self.adjacency)
        check_promised(adjacency)
        if (self.levels is None) is not (self.column is None):
            raise BadInput("budget.levels and budget.column go together: ε by level, and the column that says which")
        if (self.levels is None) is (self.epsilon is None):
            raise BadInput("say budget.epsilon, or budget.levels with ε by level of consent: one of the two")
        epsilon = self.epsilon if self.levels is None else min(check_levels(self.levels, "budget.levels").values())
        assert epsilon is not None
        return Budget(epsilon, self.delta, adjacency)


class Limits(Section):
    """``[limits]``: what a server may ask for; the attributes of ``Policy``.

    ``modules``: Python modules whose methods, parts and features (``module:attribute`` in a study) this site allows.
    """

    methods: list[str] | None = None
    not_private: bool = False
    models: list[str] | None = None
    rounds: int = Field(default=1000, gt=0)
    steps: int = Field(default=10_000, gt=0)
    parameters: int = Field(default=200_000_000, gt=0)
    run_epsilon: float | None = Field(default=None, gt=0)
    least_noise: float = Field(default=0.1, ge=0)
    clip: list[float] = Field(default=[1e-4, 1e4], min_length=2, max_length=2)
    modules: list[str] = Field(default=[])
    colluders: int | None = Field(default=None, ge=0)
    survey: bool = True

    @field_validator("clip")
    @classmethod
    def _range(cls, clip: list[float]) -> list[float]:
        if not 0 < clip[0] <= clip[1] < math.inf:
            raise ValueError("it is the smallest and the largest radius, both positive")
        return clip


class KeyFiles(Section):
    """``[keys]``: the authority that signed the server's certificate, and this site's private key."""

    authority: str
    private: str


class SiteTrust(Section):
    """``[trust]``: the folder of the other sites' public keys (NAME.pub), by which this site knows them."""

    peers: str


class SiteFile(Section):
    """A whole SITE.toml, read and checked; paths in it are relative to the folder where it lies."""

    site: SiteAbout
    data: SiteData
    budget: SiteBudget
    limits: Limits = Limits()
    keys: KeyFiles | None = None
    trust: SiteTrust | None = None
    _lies: Path = PrivateAttr(default=Path())

    def at(self, name: str) -> Path:
        """The full path of a path in the file."""
        return (self._lies / name).resolve()

    @property
    def policy(self) -> Policy:
        """What a server may ask for, as ``[limits]`` says it."""
        said: dict[str, Any] = {key: tuple(one) if isinstance(one, list) else one for key, one in self.limits}
        return Policy(**said)

    def address(self, insecure: bool) -> Address:
        """Where the server is; without keys only if somebody said so in so many words."""
        if insecure:
            return Address.parse(self.site.server, None, None)
        if self.keys is None:
            raise BadInput("[keys] is missing: name keys.authority and keys.private, or join with --insecure")
        files = {key: self.at(name) for key, name in self.keys}
        for key, one in files.items():
            if not one.is_file():
                raise BadInput(f"keys.{key}: {one} does not exist; `sordino certify` makes keys for a trial")
        return Address.parse(self.site.server, **files)

    def peers(self) -> Peers | None:
        """This site's enrolment key and those of others that it pinned; None where it has no key to sign with."""
        if self.keys is None or not self.at(self.keys.private).is_file():
            return None
        folder = None if self.trust is None else self.at(self.trust.peers)
        return Peers.read(check_name(self.site.name), load_private(self.at(self.keys.private)), folder)

    def records(self) -> tuple[Records, Declared]:
        """The site's records, and what it says about them; blank ones where there is no schema yet."""
        where = self.at(self.data.path)
        if self._blank:
            count = read_table(where, None, delimiter_of(where)).rows
            records = Records(torch.zeros(count, *BLANK), torch.zeros(count), members=self._blank_units())
            return records, Declared(len(records), BLANK, None, "")
        raw = self.data.table_schema or schema_beside(where)
        schema = parse_schema(raw)
        self._check_unit(schema)
        dataset = load_folder(where, raw, "null")  # R8: what cannot be encoded is a null row, and n stays n
        valid = None if dataset.valid.all() else torch.from_numpy(dataset.valid)
        whose, most = None, 1
        if dataset.units is not None:
            whose, most = torch.from_numpy(members(dataset.units, schema.unit_records)), schema.unit_records
        records = Records(torch.from_numpy(dataset.x), torch.from_numpy(dataset.y), valid, members=whose)
        shape, hashed = dataset.x.shape[1:], schema_hash(schema)
        about = len(records), shape, dataset.classes, hashed
        return records, Declared(*about, unit_records=most, tokens=dataset.tokens)

    def _check_unit(self, schema: Schema) -> None:
        """Refuse a schema that protects another unit than this site insists on, or parts a unit's records."""
        if self.data.unit is not None and schema.unit != self.data.unit:
            found = "single records" if schema.unit is None else f"{schema.unit!r}"
            raise BadInput(f"data.unit is {self.data.unit!r}, and the schema protects {found}: agree on one")
        if schema.unit is not None and self.data.id not in (None, schema.unit):
            raise BadInput(
                f"data.id is {self.data.id!r}, and {schema.unit!r} is the unit of privacy: whoever has several records "
                "is held out with all of them; leave data.id out"
            )

    def _blank_units(self) -> Tensor | None:
        """The records of every unit of a table that no schema says anything about; None where a record is one."""
        if self.data.unit is None:
            return None
        whose = self._whose(None)
        own = np.flatnonzero(whose >= 0)
        table = members(whose[own])
        return torch.from_numpy(np.where(table < 0, -1, own[table]))

    def _whose(self, schema: Schema | None) -> NDArray[np.int64]:
        """The number of every row's unit, as ``records`` counts them; −1 for rows that count for nobody."""
        asked = schema or Schema("", "classification", None, unit=self.data.unit)
        where = self.at(self.data.path)
        ids = unit_ids(read_by(where, [str(asked.unit)], asked), asked)
        found = np.full(len(ids), -1, dtype=np.int64)
        own = np.flatnonzero([one not in asked.missing for one in ids])
        numbers, names = numbered([ids[k] for k in own]), [ids[k] for k in own]
        found[own] = numbers if schema is None else np.where(kept(numbers, names, asked.unit_records), numbers, -1)
        return found

    @property
    def _schema(self) -> Schema | None:
        """The schema where the site has one yet."""
        return None if self._blank else parse_schema(self.data.table_schema or schema_beside(self.at(self.data.path)))

    @property
    def unit(self) -> str:
        """The word for what this site protects as one."""
        schema = self._schema
        if schema is None:
            return RECORD if self.data.unit is None else UNIT_NAME
        return RECORD if schema.unit is None else schema.unit_name

    @property
    def _blank(self) -> bool:
        """Whether nothing says what the columns of this table mean: then it can be surveyed, and not trained on."""
        where = self.at(self.data.path)
        described = self.data.table_schema is not None or (where.parent / "schema.toml").exists()
        return not described and where.is_file() and kind_of(where) in TABLES

    @contextmanager
    def open(self, source: Source | None = None) -> Iterator[Site]:
        """Load the records, open the ledger. ``source``: a generator for tests, which marks the ledger NOT PRIVATE."""
        before = version_of(self.at(self.data.path))
        if self.data.living and self._column is None:
            raise BadInput("data.living: people are known by a column of the file: name it as data.id, or data.unit")
        if self.data.living and self.budget.levels is not None:
            raise BadInput(
                "levels of consent and living data do not go together yet: leave budget.levels or data.living"
            )
        budget = replace(self.budget.promised(), unit=self.unit)
        (records, declared), folder = self.records(), self.at(self.site.folder)
        folder.mkdir(parents=True, exist_ok=True)
        with Ledger(self.at(self.budget.ledger)) as ledger:
            name, purse = check_name(self.site.name), Purse(budget, ledger, self.budget.composition, self.consent())
            check_living(ledger, self.data.living)
            roll = self._roll(ledger, records, before) if self.data.living else None
            held = self.held(ledger, len(records))
            raw = None if held is None or kind_of(self.at(self.data.path)) == "npz" else self._raw(ledger)
            commit = commit_to(ledger, self.at(self.data.path), records, held is not None)
            more = self.peers(), held, raw, commit, roll
            yield Site(name, records, declared, purse, folder, self.policy, source, *more)

    def _roll(self, ledger: Ledger, records: Records, before: tuple[int, ...]) -> Roll:
        """In which cohort everybody is; ``before``: the version of the file that the records were read from.

        A ledger that was kept for records whose ids it did not know begins with those very records.
        """
        where, spelt = self.at(self.data.path), self._spelt()
        if version_of(where) != before or len(spelt) != len(records):
            raise BadInput(f"{where} was changed while it was read: start the site again, and exchange files in one go")
        if ledger.life() is None and ledger.bindings():
            ledger.bind(check_name(self.site.name), commit_to(ledger, where, records, False))
        listed = None if self.data.withdrawn is None else self.at(self.data.withdrawn)
        return called(ledger, str(self._column), spelt, listed)

    def consent(self) -> Consent | None:
        """Which unit has which level of consent, in the order of ``records``; None where all have one budget."""
        levels, column, where = self.budget.levels, self.budget.column, self.at(self.data.path)
        if levels is None or column is None:
            return None
        if self._blank:
            bare, table = Schema("", "classification", None), self._blank_units()
            consent = Consent.of_words(read_words(where, column, bare), levels, "budget.levels")
            return consent if table is None else consent.of_units(table.numpy())
        raw = self.data.table_schema or schema_beside(where)
        dataset = load_folder(where, raw, "null", [column])
        consent = Consent.of_words(dataset.words[column], levels, "budget.levels")
        return consent if dataset.units is None else consent.of_units(members(dataset.units))

    def _raw(self, ledger: Ledger) -> Raw:
        """How a survey reads the held-out records: from the file, as they are, parted anew by the ledger's key."""
        where, living = self.at(self.data.path), self.data.living
        ids = self._ids() if living else []

        def read(survey: Survey) -> tuple[Places, NDArray[np.int64] | None]:
            table = read_raw(where, survey, self._schema)
            if living and self._ids() != ids:
                raise SordinoError(f"{where} holds other people's records than when this site started: start it again")
            if self._unit_column is None:
                held = self.held(ledger, table.rows)
                assert held is not None
                return places(table, survey)[held], None
            whose = self._whose(self._schema)
            held = self.held(ledger, int(whose.max(initial=-1)) + 1)
            assert held is not None
            rows = (whose >= 0) & held[whose]
            return places(table, survey)[rows], numbered(whose[rows])

        return read

    def held(self, ledger: Ledger, count: int) -> NDArray[np.bool_] | None:
        """Which of the file's ``count`` units are held out, as its ledger remembers; None where none are.

        Where the file does not say how many, the ledger does; a table without a schema can do nothing but be surveyed.
        """
        share, where, known = self.data.held_out, self.at(self.data.path), ledger.parted()
        if share is None and known is not None:
            share = known.share
        elif share is None and self._blank:
            share = HELD_SHARE
        if share is None:
            return None
        column = self._column
        if column is None:
            return held_mask(ledger, share, where, count)
        return held_mask(ledger, share, where, count, column, self._ids())

    @property
    def _unit_column(self) -> str | None:
        """The column of units of several records; None where every record is one."""
        schema = self._schema
        return self.data.unit if schema is None else schema.unit

    @property
    def _column(self) -> str | None:
        """The column that units are known by: their own, or that of records' ids; None where they have none."""
        return self._unit_column or self.data.id

    def _ids(self) -> list[str]:
        """The id of every unit, in the order of their numbers; where data live, in the spelling they are known by."""
        return [canonical(one) for one in self._spelt()] if self.data.living else self._spelt()

    def _spelt(self) -> list[str]:
        """The same as the file spells them. Records without an id of their own count as one's."""
        column, where = str(self._column), self.at(self.data.path)
        if self._unit_column is None:
            table = read_by(where, [column], self._schema or Schema("", "classification", None))
            return [f"id {one}" for one in table.columns[column].to_pylist()]
        schema = self._schema or Schema("", "classification", None, unit=column)
        if kind_of(where) == "npz":
            ids = [word(one) for one in np.load(where, allow_pickle=False)[column].tolist()]
        else:
            ids = unit_ids(read_by(where, [column], schema), schema)
        return [f"id {one}" for one in dict.fromkeys(ids) if one not in schema.missing]

    def rebind(self, reason: str, officer: str) -> str:
        """Record that the ledger goes on under this file's site name and records; returns the account that goes along.

        What was spent stays spent.
        """
        (records, _), where = self.records(), self.at(self.budget.ledger)
        if not where.exists():
            raise BadInput(f"there is no ledger at {where}: a new one is tied to its site when it is first used")
        with Ledger(where) as ledger:
            name = check_name(self.site.name)
            own, consent = commit_to(ledger, self.at(self.data.path), records, False), self.consent()
            return ledger.rebind(name, own if consent is None else consent.committed(own), reason, officer)


def read_site(path: Path) -> SiteFile:
    """A site's file, or an error that names the key and the remedy."""
    try:
        table = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise BadInput(f"site file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"site file {path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{path} is not valid TOML: {error}") from None
    try:
        found = SiteFile.model_validate(with_words_read(table, path.parent))
    except ValidationError as error:
        raise BadInput(explain(error, SiteFile)) from None
    found._lies = path.parent
    said = found.budget.promised().epsilon  # what cannot be promised is refused before records are read
    if said == math.inf:
        log.warning("NOT PRIVATE: budget.epsilon = inf says that this site's records are public")
    named = {f"levels.{name}": one for name, one in (found.budget.levels or {}).items()} or {"epsilon": said}
    for key, epsilon in named.items():
        if LARGE < epsilon < math.inf:
            log.warning(
                "budget.%s = %g promises next to nothing: promises that mean something are about 0.1 to 10",
                key,
                epsilon,
            )
    return found
