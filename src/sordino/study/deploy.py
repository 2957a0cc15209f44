"""A study as a deployment sees it: what is sent to sites, the plan for those who came, the result in the end."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sordino import methods, models
from sordino.client import gradients
from sordino.client.augment import Augment
from sordino.client.gradients.losses import loss_by_name
from sordino.data.own import load_folder
from sordino.data.schema import Schema, parse_schema
from sordino.engine.federation.consent import levels_from_plain
from sordino.errors import BadInput
from sordino.methods import Plan, Population
from sordino.methods.auto import MOST
from sordino.methods.evaluation import Evaluation, Judging, judge
from sordino.methods.tuning import judged_louder
from sordino.privacy.types import RECORD, Adjacency, Budget, check_promised
from sordino.server.facts import Layout
from sordino.study.features import described
from sordino.study.file import Study
from sordino.study.result import records_of, to_json

USUAL = {"records": 1_000_000, "held": 100_000, "epsilon": 1.0, "delta": 1e-6}
"""A declaration that every study can be planned for."""

Facts = Mapping[str, Mapping[str, Any]]
"""What the sites that came declared, by name, in order (R5)."""


@dataclass(frozen=True)
class Served:
    """A study made ready at the server: the first weights, and the brief that every site gets."""

    study: Study
    template: nn.Module
    start: Tensor
    layout: Layout
    brief: dict[str, Any]
    shown: Tensor
    """The model's first weights; ``start`` are those of what is trained, which may be something in its place."""

    @property
    def loss(self) -> str:
        """The name of the loss: it follows from whether there are classes."""
        return "half-squared-error" if self.brief["classes"] is None else "cross-entropy"

    @property
    def records(self) -> dict[str, Any]:
        """What the model takes, for the result."""
        classes = self.brief["classes"]
        task = "regression" if classes is None else "classification"
        return records_of(self.study.data.table_schema, task, classes)

    def plan(
        self,
        facts: Facts,
        noises: Sequence[Sequence[Sequence[float]]] | None = None,
        looking: Mapping[str, Any] | None = None,
    ) -> Plan:
        """Schedule and noise for these sites; ``noises`` of a run that goes on.

        ``looking``: of one of several runs that are evaluated under one budget, how much larger the noise of its
        evaluations is ("factors", by site) and how many "runs" there are.
        """
        sizes = np.array([int(one["records"]) for one in facts.values()], dtype=np.int64)
        unit = unit_of(self.study)
        budgets = tuple(Budget(float(f["epsilon"]), float(f["delta"]), f["adjacency"], unit) for f in facts.values())
        levels = tuple(levels_from_plain(f.get("levels", ()), b) for f, b in zip(facts.values(), budgets))
        sites, seed, method = (
            Population(tuple(facts), sizes, budgets, levels=levels),
            self.study.study.seed,
            self.study.chosen_method(),
        )
        given = self.study.settings()
        shape, tokens = tuple(self.brief["shape"]), self.brief.get("tokens")
        reach = models.reach(self.template, shape, tokens) if methods.wants_auto(method, given) else 1.0
        learner = methods.Learner(len(self.start), self.brief["classes"], reach, models.weight_size(self.template))
        trust = self.study.trust.chosen()
        plan = methods.settle(method, given, sites, learner, seed, noises=noises, trust=trust)
        judging = self.judging(facts, budgets, plan.schedule.rounds, method.private)
        if looking is not None and judging is not None:
            judging = judged_louder(judging, np.array(looking["factors"]), int(looking["runs"]))
        return dataclasses.replace(plan, judging=judging)

    def judging(self, facts: Facts, budgets: Sequence[Budget], rounds: int, private: bool) -> Judging | None:
        """How a run of so many rounds is evaluated on the sites' held-out records; None where it is not."""
        settings = Evaluation.parse(self.brief.get("evaluation"))
        if settings is None:
            return None
        held = [int(one.get("held", 0)) for one in facts.values()]
        if not any(held):
            raise BadInput(
                "[evaluation] needs held-out records, and no site has any: sites say data.held_out in SITE.toml, or "
                "the study does without [evaluation]"
            )
        return judge(settings, rounds, self.brief["classes"], held, budgets, private)

    def agreed(self, plan: Plan) -> Served:
        """The same with the number of rounds that was settled once it was known who came."""
        return dataclasses.replace(self, brief={**self.brief, "rounds": plan.training.rounds})

    def sound(self, facts: Facts) -> tuple[dict[str, Any], dict[str, str]]:
        """The sites that this study can be planned for, and why it cannot be for the others.

        One site's declaration may not fit the study (fewer records than a batch): tried among sites that fit, only the
        odd one fails. Where those fail too it is the study that does not work, and the error says so.
        """
        try:
            self.plan(facts)
            return dict(facts), {}
        except Exception:  # whatever a declaration does to an accountant: it must not stop the others
            usual = {name: {k: v for k, v in {**one, **USUAL}.items() if k != "levels"} for name, one in facts.items()}
            self.plan(usual)
        odd: dict[str, str] = {}
        for name, one in facts.items():
            try:
                self.plan({**usual, name: one})
            except Exception as error:
                odd[name] = f"what it declares does not suit the study: {error}"
        kept = {name: one for name, one in facts.items() if name not in odd}
        if kept:
            self.plan(kept)
        return kept, odd

    def about(self, facts: Facts, plan: Plan) -> dict[str, Any]:
        """What study.json and result.json say about the study."""
        named = self.brief["model"]
        model = {"name": named["name"], "options": {k: v for k, v in named["options"].items() if k != "features"}}
        also = ("shape", "classes", "parameters", "tokens", "features", "frozen")
        about = {
            "data": {"name": self.study.study.name, "sites": list(facts), "schema": self.brief["schema"]},
            "budgets": [c.budget.epsilon for c in plan.clients],
            "sizes": [c.records for c in plan.clients],
            "model": {**model, **{key: self.brief[key] for key in also if key in self.brief}},
            "loss": self.loss,
            "method": {"name": plan.method.name, **plan.method.describe()},
            "training": {k: v for k, v in dataclasses.asdict(plan.training).items() if k != "augment" or v},
        }
        about |= {"auto": plan.why} if plan.why else {}
        about |= {key: self.brief[key] for key in ("trust", "evaluation") if key in self.brief}
        plain: dict[str, Any] = json.loads(to_json(about))
        return plain


def check_sites(study: Study) -> None:
    """Refuse a study that does not say who takes part."""
    sites = study.deployment.sites
    if len(set(sites)) != len(sites) or not sites:
        raise BadInput('deployment.sites lists the sites by name, each once: sites = ["north", "south"]')


def prepare(study: Study, run: str) -> Served:
    """Make a study ready to be served. Touches no records: the server has none."""
    check_sites(study)
    check_promised(Adjacency.parse(study.budgets.adjacency))
    shape, classes, schema = declared_records(study)
    raw = study.data.table_schema
    known = None if raw is None else parse_schema(raw)
    ranged, tokens = (None, None) if known is None else (known.ranged, known.tokens)
    method = study.chosen_method()  # refuses what is unknown, before anything is sent
    name, options = study.model.name, study.model.all_options()
    if name == "auto":
        name, options = models.usual(shape, ranged, options, tokens)
    template = models.build(name, shape, classes, study.study.seed, tokens=tokens, **options)
    models.check(template, shape, classes, models.dtype_of(tokens))
    engine = gradients.build(template, "cross-entropy" if classes is not None else "half-squared-error")
    start = shown = engine.flatten(template)
    if method.local.trains is not None:
        module, loss = method.local.trains(template)
        engine = gradients.build(module, loss)
        start = engine.flatten(module)
    layout = tuple((name, tuple(size), offset) for name, size, offset in engine.layout)
    frozen = models.frozen(template)
    brief = {
        "name": study.study.name,
        "run": run,
        "seed": study.study.seed,
        # At most so many, where their number is settled by who comes.
        "rounds": study.study.rounds if isinstance(study.study.rounds, int) else MOST,
        "method": {"name": study.method.name, **study.method.model_dump(exclude={"name"}, exclude_none=True)},
        "model": {"name": name, "options": options},
        "parameters": engine.dimension,
        "layout": [[name, list(size), offset] for name, size, offset in layout],
        "shape": list(shape),
        "classes": classes,
        "schema": schema,
        "adjacency": study.budgets.adjacency,
        **({} if tokens is None else {"tokens": tokens}),
        **({"features": described(template)} if "features" in options else {}),
        **({} if frozen is None else {"frozen": frozen}),
    }
    trust = study.trust.chosen()
    if trust.shared:
        brief["trust"] = dataclasses.asdict(trust)
    if study.evaluation is not None:
        brief["evaluation"] = dataclasses.asdict(study.evaluation.chosen())
    if study.training.augment is not None:
        augment = Augment.parse(study.training.augment)
        augment.check(shape)
        brief["augment"] = dataclasses.asdict(augment)
    return Served(study, template, start, layout, brief, shown)


def declared_records(study: Study) -> tuple[tuple[int, ...], int | None, str | None]:
    """Shape of a record, number of classes (None: regression), and the schema's hash if the study has one."""
    where, raw = study.deployment, study.data.table_schema
    schema = None if raw is None else parse_schema(raw)
    shape = where.shape
    if shape is None and schema is not None and schema.features:
        shape = [len(schema.features)]
    if shape is None:
        raise BadInput(
            "the server has no records to look at: declare deployment.shape, such as [1, 28, 28], or [data.schema]"
        )
    if schema is None:
        return tuple(shape), where.classes, None
    return tuple(shape), None if schema.classes is None else len(schema.classes), schema_hash(schema)


def judge_of(ready: Served) -> Callable[[Tensor], dict[str, float | None]] | None:
    """How good weights are on the server's own records, if it has some; these are nobody's secret, and cost nothing."""
    study, classes = ready.study, ready.brief["classes"]
    if study.deployment.test is None:
        return None
    raw = study.data.table_schema or {"classes": list(range(classes or 0))}
    own = load_folder(Path(study.deployment.test), raw)
    if list(own.x.shape[1:]) != ready.brief["shape"] or own.classes != classes:
        raise BadInput(f"deployment.test: its records have shape {own.x.shape[1:]}, the sites' {ready.brief['shape']}")
    engine, values = gradients.build(ready.template, ready.loss), loss_by_name(ready.loss).values
    x, y = torch.from_numpy(own.x), torch.from_numpy(own.y)

    def look(weights: Tensor) -> dict[str, float | None]:
        with torch.no_grad():
            out = torch.cat([engine.predict(weights, piece) for piece in x.split(1024)])
        right = float((out.argmax(-1) == y).double().mean()) if classes is not None else None
        return {"central_accuracy": right, "central_loss": float(values(out, y).double().mean())}

    return look


def unit_of(study: Study) -> str:
    """What the study's promises are made for: a record, or what its schema calls a unit of several."""
    raw = study.data.table_schema
    schema = None if raw is None else parse_schema(raw)
    return RECORD if schema is None or schema.unit is None else schema.unit_name


def schema_hash(schema: Schema) -> str:
    """What two sites compare to see that their columns mean the same. How a file is laid out is its own affair."""
    aside = {"delimiter", "names"} | ({"unit", "unit_records", "unit_name"} if schema.unit is None else set())
    aside |= {"rule"} if schema.rule is None else set()
    aside |= {key for key in ("text", "ids") if not getattr(schema, key)}
    body = {name: value for name, value in dataclasses.asdict(schema).items() if name not in aside}
    body["order"] = [list(table) for table in (schema.numeric, schema.categorical, schema.text)]  # that of the inputs
    return hashlib.sha256(json.dumps(body, sort_keys=True, default=str).encode()).hexdigest()
