"""Study files: TOML in, a checked study out. Every message names the key, the value and the remedy."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from sordino import data, methods, models
from sordino.data import Dataset, Federation
from sordino.data.budgets import BudgetTerms, warn_of
from sordino.data.tokens import with_words_read
from sordino.errors import BadInput
from sordino.methods import Method, Training
from sordino.privacy.types import Adjacency, Scheme, check_pair
from sordino.study.sections import (
    BudgetKeys,
    CompareKeys,
    DataKeys,
    DeploymentKeys,
    EvaluationKeys,
    MethodKeys,
    ModelKeys,
    Section,
    StudyKeys,
    SurveyKeys,
    TrainingKeys,
    TrustKeys,
    explain,
)


class Study(Section):
    """A whole study."""

    study: StudyKeys = StudyKeys()
    data: DataKeys = DataKeys()
    budgets: BudgetKeys = BudgetKeys()
    model: ModelKeys = ModelKeys()
    method: MethodKeys = MethodKeys()
    training: TrainingKeys = TrainingKeys()
    trust: TrustKeys = TrustKeys()
    evaluation: EvaluationKeys | None = None
    compare: CompareKeys = CompareKeys()
    sweep: dict[str, Any] = Field(default={})
    tune: dict[str, Any] = Field(default={})
    deployment: DeploymentKeys = DeploymentKeys()
    survey: SurveyKeys = SurveyKeys()

    def check(self) -> None:
        """Refuse what cannot work and warn of what promises little, before a record is read; every command does so."""
        self.data.check()
        if self.sweep and self.tune:
            raise BadInput("[sweep] and [tune] contradict each other: a sweep charges every run on its own; keep one")
        names, files = self.data.expected_clients()
        self._check_methods(names)
        check_pair(Scheme.parse(self.training.sampling or "poisson"), Adjacency.parse(self.budgets.adjacency))
        terms = self.terms()
        if terms is not None and names is not None:
            warn_of(names, terms.of(names, files)[0])
        name, options = self.model.name, self.model.all_options()
        name, options = models.usual((1,), None, options) if name == "auto" else (name, options)
        models.check_spec(name, options)
        self.arguments()

    def _check_methods(self, names: Sequence[str] | None) -> None:
        """Every method that the study names, and the settings of training, which they share."""
        training = self.settings()
        settings = Training(**{key: value for key, value in training.items() if value != "auto"})
        for name in [self.method.name, *self.compare.methods]:
            method = self.chosen_method(name)
            if settings.select is not None and not method.select.draws:
                raise BadInput(
                    f"training.select does not go with method {name!r}, which asks everyone: drop it, or choose a "
                    "method that draws clients, such as 'unbiased' or 'privacy-aware'"
                )
        if names is None:
            return
        count = len(names)
        if settings.select is not None and settings.select > count:
            raise BadInput(f"training.select = {settings.select} of {count} clients: use at most {count} a round")
        for key in ("batch", "rate"):
            listed = training.get(key)
            if isinstance(listed, list) and len(listed) != count:
                raise BadInput(
                    f"training.{key} lists {len(listed)} values for {count} clients: give one each, or a single one"
                )

    @property
    def data_seed(self) -> int:
        """What the records are chosen and dealt by."""
        return self.study.seed if self.data.seed is None else self.data.seed

    def source(self) -> Dataset | None:
        """The records before they are dealt to clients; None where files belong to clients already (a schema)."""
        d = self.data
        if d.table_schema is not None:
            return None
        self.check()
        own: dict[str, Any] = {} if d.invalid == "refuse" else {"invalid": d.invalid}
        own |= {"also": self.budgets.also} if self.budgets.also else {}
        found = data.load(d.name, folder=d.folder, **{**d.options, **({} if d.name in data.SOURCES else own)})
        return found if d.records is None else found.subset(d.records, self.data_seed)

    def federation(self, source: Dataset | None = None) -> Federation:
        """Load the data (or take ``source``, what ``self.source()`` gave), deal it to clients, give them budgets."""
        self.check()
        d, seed, levels, also = self.data, self.data_seed, self.budgets.levels, self.budgets.also
        if d.table_schema is not None:
            where = d.folder or d.name
            clients = data.from_folder(
                where, d.table_schema, test=d.test, seed=seed, invalid=d.invalid, central=d.central, also=also
            )
        else:
            found = self.source() if source is None else source
            assert found is not None
            kind = d.partition or ("iid" if found.owners is None else "natural")
            dealt = {"test": d.test, "central": d.central, "minimum": d.minimum, **d.given()}
            clients = found.partition(kind, d.clients, seed, **dealt)
        terms = self.terms()
        if terms is not None and levels is not None:
            return clients.with_levels(levels, also[0], terms.delta, terms.adjacency)
        return clients if terms is None else clients.with_terms(terms)

    def terms(self) -> BudgetTerms | None:
        """What ``[budgets]`` says; None where it says nothing and nothing is promised."""
        found = self.budgets.terms(self.study.seed)
        if found is None and self.chosen_method().private:
            raise BadInput("[budgets] says nothing: give budgets.epsilon, or budgets.name such as 'dist2'")
        return found

    def chosen_method(self, name: str | None = None) -> Method:
        """The method with its parts exchanged as ``[method]`` says; ``name`` overrides the name only."""
        parts = self.method.model_dump(exclude={"name"}, exclude_none=True)
        return methods.get(name or self.method.name, parts)

    def arguments(self) -> dict[str, Any]:
        """Keywords for ``sd.train`` and ``sd.plan``, beside the clients and the method."""
        return {
            "model": self.model.name,
            "model_options": self.model.all_options(),
            "seed": self.study.seed,
            "trust": self.trust.chosen(),
            "evaluation": None if self.evaluation is None else self.evaluation.chosen(),
            **self.settings(),
            **self._lists_in_order(),
        }

    @property
    def planned_rounds(self) -> int | None:
        """How many rounds there are, unless that is chosen when the clients are known."""
        rounds = {**self.chosen_method().defaults, **self.settings()}.get("rounds", Training.rounds)
        return rounds if isinstance(rounds, int) else None

    def settings(self) -> dict[str, Any]:
        """What the study says about training, rounds included; ``auto`` where something is to be chosen."""
        rounds = {} if self.study.rounds is None else {"rounds": self.study.rounds}
        return {**rounds, **self.training.model_dump(exclude_none=True)}

    def _lists_in_order(self) -> dict[str, list[float]]:
        """Lists of ``[training]`` with a value for every client, which follow ``budgets.order`` where that is given."""
        lists = {key: getattr(self.training, key) for key in ("batch", "rate")}
        lists = {key: value for key, value in lists.items() if isinstance(value, list)}
        if not lists:
            return {}
        names, files = self.data.expected_clients()
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
        """What the file said, without ``[sweep]`` and ``[tune]``: a table of tables that ``make_study`` reads."""
        said: dict[str, Any] = self.model_dump(by_alias=True, exclude_unset=True, exclude={"sweep", "tune"})
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
        key, equals, text = setting.partition("=")
        if not equals or "." not in key:
            raise BadInput(f"--set {setting!r}: write section.key=value, for example training.lr=0.1")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()
        put(table, key.strip(), value, f"--set {setting!r}")
    try:
        return Study.model_validate(with_words_read(table, Path()))
    except ValidationError as error:
        raise BadInput(explain(error, Study)) from None


def put(table: dict[str, Any], key: str, value: Any, whose: str) -> None:
    """Put a value at a dotted key of a table of tables; ``whose`` names it where that cannot be done."""
    *sections, last = key.split(".")
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise BadInput(f"{whose}: {section} is not a section")
    table[last] = value
