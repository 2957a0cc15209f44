"""The sections of a study file, and what can be wrong with each by itself: by key, with the remedy."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from sordino.data.budgets import BudgetTerms
from sordino.data.dataset import check_options, client_names
from sordino.data.own import client_files, stem_of
from sordino.data.schema import parse_schema
from sordino.data.sources import SOURCES
from sordino.data.survey import Survey, parse_survey
from sordino.engine.devices import is_device
from sordino.errors import BadInput
from sordino.methods.evaluation import Evaluation
from sordino.privacy.levels import check_levels
from sordino.privacy.trust import Trust

_PARTITION = ("beta", "shards", "max_classes", "similarity", "sizes")
"""Keys of ``[data]`` that are options of a partition."""


class Section(BaseModel):
    """A table of a study; keys it does not know are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


def _device(name: str) -> str:
    if not is_device(name):
        raise PydanticCustomError("device", "it is unknown: use cpu, cuda, cuda:1 or auto")
    return name


Auto = Literal["auto"]
"""A setting that is chosen from public facts (``methods/auto.py``)."""


class StudyKeys(Section):
    """``[study]``: what the study is called, its seed and rounds, and where it is trained and tracked.

    Rounds that are not given are the method's own default: automatic for ``auto``, 40 for the others.
    """

    name: str = "study"
    seed: int = Field(default=0, ge=0)
    rounds: Annotated[int, Field(gt=0)] | Auto | None = None
    device: Annotated[str, AfterValidator(_device)] = "cpu"
    deterministic: bool = True
    track: Literal["tensorboard", "mlflow"] | None = None
    baselines: bool = False

    @field_validator("name")
    @classmethod
    def _one_folder(cls, name: str) -> str:
        if name != name.strip() or not name or name.startswith((".", "~", "-")) or re.search(r"[/\\\x00-\x1f]", name):
            raise ValueError("it names the folder below runs/, so it is a plain name without / or a leading dot")
        if len(name.encode()) > 200:
            raise ValueError("it names the folder below runs/, so it has at most 200 bytes")
        return name


class DataKeys(Section):
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

    def given(self, *keys: str) -> dict[str, Any]:
        """The keys among these that have a value; by default the options of the partition."""
        return {key: value for key in keys or _PARTITION if (value := getattr(self, key)) is not None}

    def expected_clients(self) -> tuple[list[str] | None, bool]:
        """The clients' names, as far as they follow without reading records, and whether they are files in order."""
        if self.table_schema is None and (self.name in SOURCES or self.partition not in (None, "natural")):
            if self._natural:
                return list(SOURCES[self.name].client_names or ()), False
            return (None if self.clients is None else client_names(self.clients)), False
        path = Path((self.folder or self.name) if self.table_schema is not None else self.name)
        return [stem_of(file) for file in client_files(path)], True

    @property
    def _natural(self) -> bool:
        """Whether a source by name keeps the clients that it comes with."""
        source = SOURCES.get(self.name)
        return source is not None and source.clients is not None and self.partition in (None, "natural")

    def check(self) -> None:
        """Refuse what cannot work. Looks at names of files, never into them."""
        if self.table_schema is not None:
            self._check_own(self.table_schema)
        elif self.name in SOURCES:
            self._check_source()
        elif self.name and not Path(self.name).exists():
            raise BadInput(
                f"data.name = {self.name!r} is unknown: use one of {', '.join(SOURCES)}, or a path to your own folder"
            )

    def _check_own(self, schema: dict[str, Any]) -> None:
        parse_schema(schema)
        if self.partition not in (None, "natural"):
            raise BadInput(
                f"data.partition = {self.partition!r} does not go with data.schema: your files are the clients"
            )
        names = self.expected_clients()[0] or []
        if self.clients not in (None, len(names)):
            raise BadInput(
                f"data.clients = {self.clients}, but there are {len(names)} files, one a client: leave it out"
            )
        given = self.given("records", *_PARTITION)
        given |= {"options": self.options} if self.options else {}
        given |= {"minimum": self.minimum} if self.minimum > 1 else {}
        for key, value in given.items():
            raise BadInput(f"data.{key} = {value!r} does not go with data.schema (files are clients): leave it out")

    def _check_source(self) -> None:
        name, kind, source = self.name, self.partition or "iid", SOURCES[self.name]
        if self.invalid != "refuse":
            raise BadInput(
                f"data.invalid = {self.invalid!r} is for files of your own, which {name} is not: leave it out"
            )
        if self._natural:
            check_options("natural", self.given())
            if self.clients not in (None, source.clients):
                raise BadInput(
                    f"data.clients = {self.clients}, but {name} comes with {source.clients} clients: leave it out"
                )
            return
        if kind == "natural":
            raise BadInput(f"data.partition = 'natural': {name} comes without clients, use iid, dirichlet, shards, …")
        if self.clients is None:
            raise BadInput("data.clients is missing: say how many clients the records are dealt to")
        check_options(kind, self.given())
        needed = {"dirichlet": "beta", "similarity": "similarity"}.get(kind)
        if needed is not None and needed not in self.given():
            raise BadInput(f"data.{needed} is missing: data.partition = {kind!r} needs it")
        if self.records is not None and name != "least-squares" and self.records > source.records:
            raise BadInput(f"data.records = {self.records}: {name} has {source.records} records to choose from")
        there = self.records or self.options.get("records") or source.records
        if isinstance(there, int) and self.clients * self.minimum > there:
            raise BadInput(
                f"data.clients = {self.clients} with at least data.minimum = {self.minimum} records each: there are "
                f"{there}, so use fewer clients or a smaller minimum"
            )


class BudgetKeys(Section):
    """``[budgets]``: ε by distribution, by clients' names, as a number, list, mixture or file; δ; adjacency.

    ``levels``: ε by level of consent, where records of one client differ; ``column`` of the clients' files says which.
    """

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
    levels: dict[str, float] | None = None

    @property
    def also(self) -> list[str]:
        """Columns of the clients' files that are read beside the records: that of the levels."""
        return [] if self.levels is None or self.column is None else [self.column]

    def _of_levels(self, levels: dict[str, float]) -> BudgetTerms:
        """What holds for every client whatever its records' levels: the strictest one's ε."""
        others = ("name", "epsilon", "mixture", "csv", "client", "low", "high", "order")
        given = [key for key in others if getattr(self, key) is not None] + ["public"] * bool(self.public)
        if given or isinstance(self.delta, list):
            raise BadInput(
                f"budgets.{given[0] if given else 'delta'} does not go with budgets.levels, which say every record's "
                "ε: keep column, levels, one delta and adjacency"
            )
        if self.column is None:
            raise BadInput("budgets.levels needs budgets.column: the column of the clients' files that says the level")
        return BudgetTerms(min(check_levels(levels, "budgets.levels").values()), self.delta, 0, self.adjacency)

    def terms(self, seed: int) -> BudgetTerms | None:
        """What the section promises to every client; None where it says nothing."""
        if self.levels is not None:
            return self._of_levels(self.levels)
        for key in ("column", "client"):
            if getattr(self, key) is not None and self.csv is None:
                raise BadInput(
                    f"budgets.{key} names a column of budgets.csv, which is missing: name the file there"
                    + (", or give budgets.levels" if key == "column" else "")
                )
        ways = {"name": self.name, "epsilon": self.epsilon, "mixture": self.mixture, "csv": self.csv}
        given = [key for key, value in ways.items() if value is not None]
        if len(given) > 1:
            raise BadInput(f"budgets.{given[0]} and budgets.{given[1]} contradict each other: keep one of them")
        if not given:
            return None
        spec: Any = ways[given[0]]
        if self.mixture is not None:
            spec = {"mixture": self.mixture}
        elif self.csv is not None:
            spec = {"csv": self.csv, "column": self.column or "epsilon"}
            spec |= {"client": self.client} if self.client else {}
        bounds = {key: value for key, value in (("low", self.low), ("high", self.high)) if value is not None}
        seed = seed if self.seed is None else self.seed
        return BudgetTerms(spec, self.delta, seed, self.adjacency, tuple(self.public), self.order, bounds)


Exchanged = str | dict[str, Any] | None
"""A part of a method to exchange: its name, or a table with the name and its options."""


class ModelKeys(Section):
    """``[model]``: a name or ``module:factory``, its options, a fixed map before it, adapters beside its layers."""

    name: str = "auto"
    options: dict[str, Any] = {}
    features: Exchanged = None
    lora: int | dict[str, Any] | None = None

    def all_options(self) -> dict[str, Any]:
        """What ``models.build`` takes beside the name: the options, and the features and adapters where there are."""
        also = {"features": self.features, "lora": self.lora}
        return {**self.options, **{key: value for key, value in also.items() if value is not None}}


class MethodKeys(Section):
    """``[method]``: a name, and parts to exchange."""

    name: str = "auto"
    select: Exchanged = None
    ask: Exchanged = None
    local: Exchanged = None
    clip: Exchanged = None
    aggregate: Exchanged = None
    server: Exchanged = None
    calibrate: Exchanged = None


class TrainingKeys(Section):
    """``[training]``: keywords of ``sd.train``."""

    batch: float | list[float] | None = None
    rate: float | list[float] | Auto | None = None
    steps: int | None = None
    epochs: float | None = None
    lr: float | Auto | None = None
    server_lr: float | None = None
    cooldown: float | None = None
    exact_noise: bool | None = None
    augment: dict[str, Any] | None = None
    pull: float | None = None
    clip: float | Auto | None = None
    sampling: Literal["poisson", "fixed", "full"] | None = None
    select: int | None = None
    evaluate: int | Auto | None = None

    @field_validator("augment", mode="before")
    @classmethod
    def _table(cls, given: Any) -> Any:
        if given is not None and not isinstance(given, dict):
            raise ValueError("it is a table, such as {copies = 4, shift = 2, mirror = true}")
        return given


class TrustKeys(Section):
    """``[trust]``: whether sites share noise, and how many may conspire with the server or be lost."""

    noise: Literal["per-site", "shared"] = "per-site"
    colluders: int = Field(default=0, ge=0)
    dropouts: int = Field(default=0, ge=0)

    def chosen(self) -> Trust:
        """The choice as a value; refuses colluders where nothing is shared."""
        return Trust(self.noise, self.colluders, self.dropouts)


class EvaluationKeys(Section):
    """``[evaluation]``: how often the model is judged on held-out records, and what that may cost."""

    every: int | None = Field(default=None, gt=0)
    share: float = Field(default=0.2, gt=0, lt=1)
    bins: int = Field(default=10, ge=2, le=1000, multiple_of=2)
    spend: float = Field(default=0.8, gt=0, le=1)
    stop: int | None = Field(default=None, gt=0)
    keep: Literal["last", "best"] = "last"

    def chosen(self) -> Evaluation:
        """The settings as a value."""
        return Evaluation(**self.model_dump())


class CompareKeys(Section):
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


class SurveyKeys(Section):
    """``[survey]``: what sites are asked about their columns before there is a schema, and what that may cost.

    ``spend``: how much of each site's ε one survey may use; ``least``: counts below this are told as "fewer than";
    ``share``: the share of records that a rehearsal holds out, ``unit``: the column of persons that it counts once
    each, with all of their records (a site decides both for itself, in its ``[data]``).
    """

    target: str | None = None
    spend: float = Field(default=0.4, gt=0, le=1)
    least: int = Field(default=50, ge=0)
    share: float = Field(default=0.2, gt=0, lt=1)
    missing: list[str] | None = None
    unit: str | None = None
    columns: dict[str, Any] = {}

    def asked(self) -> Survey:
        """The declared tables; refuses what cannot be asked, by key."""
        words = {} if self.missing is None else {"missing": self.missing}
        return parse_survey({"target": self.target, "columns": self.columns, **words})


class DeploymentKeys(Section):
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


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """The first thing that is wrong with a file, by key, with a remedy."""
    found = error.errors(include_url=False)
    first = next((one for one in found if one["type"] == "extra_forbidden"), found[0])  # a misspelt key also is missing
    where = [str(one) for one in first["loc"]]
    key = ".".join(where[:2])
    if first["type"] != "extra_forbidden":
        told = first["msg"].removeprefix("Value error, ")
        return f"{key} = {first['input']!r}: {told[0].lower()}{told[1:]}"
    fields = model.model_fields
    if len(where) > 1:
        fields = getattr(fields[where[0]].annotation, "model_fields", {})
    known = [field.alias or name for name, field in fields.items()]
    near = difflib.get_close_matches(where[-1], known, n=1)
    return f"unknown key {key}: " + (f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}")
