"""Study files: TOML in, a checked study out. Every message names the key, the value and the remedy."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from sordino import data, methods
from sordino.data import Dataset, Federation
from sordino.data.budgets import BudgetTerms
from sordino.engine.devices import is_device
from sordino.errors import BadInput
from sordino.methods import Method
from sordino.study.checks import check_study, expected_clients


class Section(BaseModel):
    """A table of a study; keys it does not know are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


def _device(name: str) -> str:
    if not is_device(name):
        raise PydanticCustomError("device", "it is unknown: use cpu, cuda, cuda:1 or auto")
    return name


Device = Annotated[str, AfterValidator(_device)]


class About(Section):
    """``[study]``."""

    name: str = "study"
    seed: int = Field(default=0, ge=0)
    rounds: int = Field(default=40, gt=0)
    device: Device = "cpu"
    track: Literal["tensorboard", "mlflow"] | None = None

    @field_validator("name")
    @classmethod
    def _one_folder(cls, name: str) -> str:
        if name != name.strip() or not name or name.startswith((".", "~", "-")) or re.search(r"[/\\\x00-\x1f]", name):
            raise ValueError("it names the folder below runs/, so it is a plain name without / or a leading dot")
        if len(name.encode()) > 200:
            raise ValueError("it names the folder below runs/, so it has at most 200 bytes")
        return name


class Data(Section):
    """``[data]``: a source by name, or a folder of your own files with a schema; how it is dealt to clients."""

    name: str = "digits"
    folder: str | None = None
    options: dict[str, Any] = {}
    records: int | None = Field(default=None, gt=0)
    table_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    invalid: Literal["refuse", "null"] = "refuse"
    partition: Literal["iid", "dirichlet", "shards", "similarity", "natural"] | None = None
    clients: int | None = Field(default=None, gt=0)
    seed: int | None = None
    test: float = Field(default=0.2, ge=0, lt=1)
    central: float = Field(default=0.0, ge=0, lt=1)
    minimum: int = Field(default=1, gt=0)
    beta: float | None = Field(default=None, gt=0)
    shards: int | None = Field(default=None, gt=0)
    max_classes: int | None = Field(default=None, gt=0)
    similarity: float | None = Field(default=None, ge=0, le=100)
    sizes: list[float] | None = None


class Budgets(Section):
    """``[budgets]``: ε by distribution, by clients' names, as a number, list, mixture or file; δ; adjacency."""

    name: str | None = None
    epsilon: float | list[float] | dict[str, float] | None = None
    mixture: list[list[float]] | None = None
    csv: str | None = None
    column: str | None = None
    client: str | None = None
    low: float | None = None
    high: float | None = None
    delta: float | list[float] | dict[str, float] = 1e-5
    order: list[str] | None = None
    adjacency: Literal["zero-out", "add-remove", "replace-one"] = "zero-out"
    public: list[str] = []
    seed: int | None = None


class Model(Section):
    """``[model]``: a name or ``module:factory``, and its options."""

    name: str = "cnn-small"
    options: dict[str, Any] = {}


Part = str | dict[str, Any]


class MethodParts(Section):
    """``[method]``: a name, and parts to exchange."""

    name: str = "dp-fedavg"
    select: Part | None = None
    ask: Part | None = None
    local: Part | None = None
    clip: Part | None = None
    aggregate: Part | None = None
    server: Part | None = None
    calibrate: Part | None = None


class TrainingKeys(Section):
    """``[training]``: keywords of ``sd.train``."""

    batch: float | list[float] | None = None
    rate: float | list[float] | None = None
    steps: int | None = None
    epochs: float | None = None
    lr: float | None = None
    server_lr: float | None = None
    cooldown: float | None = None
    exact_noise: bool | None = None
    pull: float | None = None
    clip: float | None = None
    sampling: Literal["poisson", "fixed", "full"] | None = None
    select: int | None = None
    evaluate: int | None = None


class Compare(Section):
    """``[compare]``: methods and seeds to run side by side."""

    methods: list[str] = []
    seeds: list[Annotated[int, Field(ge=0)]] = []

    @field_validator("methods", "seeds")
    @classmethod
    def _once(cls, values: list[Any]) -> list[Any]:
        twice = next((one for place, one in enumerate(values) if one in values[:place]), None)
        if twice is not None:
            raise ValueError(f"{twice!r} is listed twice, and one run twice shows no spread: leave out one of them")
        return values


class Deployment(Section):
    """``[deployment]``: which sites take part, what their records look like, how long the server waits.

    ``test``: a file of records that the server may look at, to judge the model by.
    """

    sites: list[str] = []
    shape: list[int] | None = None
    classes: int | None = Field(default=None, gt=1)
    test: str | None = None
    enrol: float = Field(default=300.0, gt=0)
    timeout: float = Field(default=600.0, gt=0)
    least: int = Field(default=1, gt=0)
    absent: Literal["refuse", "go on"] = "refuse"


class Study(Section):
    """A whole study."""

    study: About = About()
    data: Data = Data()
    budgets: Budgets = Budgets()
    model: Model = Model()
    method: MethodParts = MethodParts()
    training: TrainingKeys = TrainingKeys()
    compare: Compare = Compare()
    sweep: dict[str, Any] = {}
    deployment: Deployment = Deployment()

    def check(self) -> None:
        """Refuse what cannot work, before a record is read; every command does so first."""
        check_study(self)

    def source(self) -> Dataset | None:
        """The records before they are dealt to clients; None where files belong to clients already (a schema)."""
        if self.data.table_schema is not None:
            return None
        self.check()
        return self._load()

    def _load(self) -> Dataset:
        d = self.data
        own = {} if d.name in data.SOURCES or d.invalid == "refuse" else {"invalid": d.invalid}
        found = data.load(d.name, folder=d.folder, **{**d.options, **own})
        return found if d.records is None else found.subset(d.records, self._data_seed)

    @property
    def _data_seed(self) -> int:
        return self.study.seed if self.data.seed is None else self.data.seed

    def federation(self, source: Dataset | None = None) -> Federation:
        """Load the data (or take ``source``, what ``self.source()`` gave), deal it to clients, give them budgets."""
        self.check()
        d, seed = self.data, self._data_seed
        if d.table_schema is not None:
            clients = data.from_folder(
                d.folder or d.name, d.table_schema, test=d.test, seed=seed, invalid=d.invalid, central=d.central
            )
        else:
            source = self._load() if source is None else source
            keys = ("beta", "shards", "max_classes", "similarity", "sizes")
            given = {key: getattr(d, key) for key in keys if getattr(d, key) is not None}
            clients = source.partition(
                d.partition or ("iid" if source.owners is None else "natural"),
                d.clients,
                seed,
                test=d.test,
                central=d.central,
                minimum=d.minimum,
                **given,
            )
        terms = self.terms()
        return clients if terms is None else clients.with_terms(terms)

    def terms(self) -> BudgetTerms | None:
        """What ``[budgets]`` says; None where it says nothing and nothing is promised."""
        b = self.budgets
        ways = {"name": b.name, "epsilon": b.epsilon, "mixture": b.mixture, "csv": b.csv}
        given = [key for key, value in ways.items() if value is not None]
        if len(given) > 1:
            raise BadInput(f"budgets.{given[0]} and budgets.{given[1]} contradict each other: keep one of them")
        if not given:
            if self.chosen_method().private:
                raise BadInput("[budgets] says nothing: give budgets.epsilon, or budgets.name such as 'dist2'")
            return None
        spec: Any = ways[given[0]]
        if b.mixture is not None:
            spec = {"mixture": b.mixture}
        elif b.csv is not None:
            spec = {"csv": b.csv, "column": b.column or "epsilon"} | ({"client": b.client} if b.client else {})
        bounds = {key: value for key, value in (("low", b.low), ("high", b.high)) if value is not None}
        seed = self.study.seed if b.seed is None else b.seed
        return BudgetTerms(spec, b.delta, seed, b.adjacency, tuple(b.public), b.order, bounds)

    def chosen_method(self, name: str | None = None) -> Method:
        """The method with its parts exchanged as ``[method]`` says; ``name`` overrides the name only."""
        parts = self.method.model_dump(exclude={"name"}, exclude_none=True)
        return methods.get(name or self.method.name, parts)

    def arguments(self) -> dict[str, Any]:
        """Keywords for ``sd.train`` and ``sd.plan``, beside the clients and the method."""
        return {
            "model": self.model.name,
            "model_options": self.model.options,
            "rounds": self.study.rounds,
            "seed": self.study.seed,
            **self.training.model_dump(exclude_none=True),
            **self._lists_in_order(),
        }

    def _lists_in_order(self) -> dict[str, list[float]]:
        """Lists of ``[training]`` with a value for every client, which follow ``budgets.order`` where that is given."""
        lists = {key: getattr(self.training, key) for key in ("batch", "rate")}
        lists = {key: value for key, value in lists.items() if isinstance(value, list)}
        if not lists:
            return {}
        names, files = expected_clients(self)
        names, order = names or [], self.budgets.order
        if files and len(names) > 1 and order is None:
            raise BadInput(
                f"training.{next(iter(lists))} is a list, but these clients are files, whose order follows from their "
                f"names: give one value for all, or say whose is whose with budgets.order = {json.dumps(names)}"
            )
        if order is None or len(order) != len(names):
            return lists
        return {key: [dict(zip(order, value))[name] for name in names] for key, value in lists.items()}

    def table(self) -> dict[str, Any]:
        """What the file said, without ``[sweep]``: a table of tables that ``make_study`` reads."""
        said: dict[str, Any] = self.model_dump(by_alias=True, exclude_unset=True, exclude={"sweep"})
        return said


def read_study(path: Path, settings: Sequence[str] = ()) -> Study:
    """A study from a file, with ``key=value`` settings (TOML values) put over it."""
    try:
        table = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise BadInput(f"study file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"study file {path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{path} is not valid TOML: {error}") from None
    return make_study(table, settings)


def make_study(table: dict[str, Any], settings: Sequence[str] = ()) -> Study:
    """A study from a table of tables."""
    for setting in settings:
        _put(table, setting)
    try:
        return Study.model_validate(table)
    except ValidationError as error:
        raise BadInput(explain(error, Study)) from None


def _put(table: dict[str, Any], setting: str) -> None:
    key, equals, text = setting.partition("=")
    *sections, last = key.strip().split(".")
    if not equals or not sections:
        raise BadInput(f"--set {setting!r}: write section.key=value, for example training.lr=0.1")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise BadInput(f"--set {setting!r}: {section} is not a section")
    table[last] = value


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """The first thing that is wrong with a file, by key, with a remedy."""
    found = error.errors(include_url=False)
    first = next((one for one in found if one["type"] == "extra_forbidden"), found[0])  # a misspelt key also is missing
    where = [str(one) for one in first["loc"]]
    key = ".".join(where[:2])
    if first["type"] == "extra_forbidden":
        known = _known(where, model)
        near = difflib.get_close_matches(where[-1], known, n=1)
        return f"unknown key {key}: " + (f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}")
    told = first["msg"].removeprefix("Value error, ")
    return f"{key} = {first['input']!r}: {told[0].lower()}{told[1:]}"


def _known(where: list[str], model: type[BaseModel]) -> list[str]:
    if len(where) < 2:
        return list(model.model_fields)
    section = model.model_fields[where[0]].annotation
    fields = getattr(section, "model_fields", {})
    return [field.alias or name for name, field in fields.items()]
