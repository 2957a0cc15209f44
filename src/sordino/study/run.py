"""``sd.train`` and ``sd.plan``: from clients, a model and a method to a run with a result."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np
from torch import nn

from sordino import methods, models
from sordino.client import gradients
from sordino.client.augment import Augment
from sordino.data import Federation
from sordino.engine.devices import torch_device
from sordino.engine.mapped import pages_of
from sordino.engine.sharded import Shard
from sordino.errors import BadInput
from sordino.methods import Method, Population
from sordino.methods.evaluation import Evaluation, judge
from sordino.methods.settings import Settings
from sordino.models.features import Spec
from sordino.privacy.trust import NOBODY_TRUSTED, Trust
from sordino.privacy.types import Budget
from sordino.study.arguments import as_path, check_callbacks, check_clients, check_flag, check_options, check_seed
from sordino.study.baselines import Compared
from sordino.study.features import described, with_features
from sordino.study.folder import Folder, Keeper, Planned, planned
from sordino.study.prepared import Prepared, Run
from sordino.study.result import load_run, to_json
from sordino.study.session import Callback, train_alone
from sordino.study.view import PlanView


def load(path: str | os.PathLike[str], model: nn.Module | None = None) -> Run:
    """A run from the file that ``run.save`` wrote, or from a run folder.

    ``model``: the module of a run that trained one of your own, built as it was then; it gets the trained weights. It
    may be the one without adapters where the run put them there (``model_options={"lora": …}``).
    """
    result, weights, personal = load_run(as_path("path", path))
    about = result["study"]["model"]
    template = model
    adapters = about.get("options", {}).get("lora")
    if model is not None and adapters is not None and not models.has_adapters(model):
        template = model = models.build(model, tuple(about["shape"]), about["classes"], result["seed"], lora=adapters)
    if model is not None:
        models.check(model, tuple(about["shape"]), about["classes"], models.dtype_of(about.get("tokens")))
    elif about["name"] in models.names() or ":" in about["name"]:
        options, features = about["options"], about.get("features")
        if features is not None:
            options = {**options, "features": {"name": features["name"], **features["options"]}}
        records = tuple(about["shape"]), about["classes"], result["seed"]
        template = models.build(about["name"], *records, tokens=about.get("tokens"), **options)
        if features is not None and described(template)["sha256"] != features["sha256"]:
            raise BadInput(f"features '{features['name']}' are not what this run was trained with: their hash differs")
    if template is not None and "frozen" in about and models.digest(template) != about["frozen"]:
        raise BadInput(
            "the model's frozen weights are not those that this run's adapters were trained beside: build it as then"
        )
    return Run(result, weights, template, personal)


def prepare(
    clients: Federation,
    model: str | nn.Module,
    method: str | Method,
    seed: int,
    model_options: dict[str, Any] | None,
    training: dict[str, Any],
    before: Planned | None = None,
    precision: str = "float32",
    trust: Trust = NOBODY_TRUSTED,
    evaluation: Evaluation | None = None,
) -> Prepared:
    """Check the arguments against each other, build the model, make the plan. Touches no record.

    ``before``: what a run that goes on settled before it started.
    """
    chosen = methods.get(method)
    check_clients(clients)
    check_seed(seed)
    check_options(model_options)
    if clients.budgets is None and chosen.private:
        raise BadInput(f"method {chosen.name!r} is private, but the clients have no budgets: call .with_budgets(…)")
    held = None
    if evaluation is not None and evaluation.keep == "best" and chosen.local.begin is not None:
        raise BadInput(f"evaluation.keep = 'best' is one model's best round, and {chosen.name!r} has one per client")
    if evaluation is not None:
        clients, held = clients.held_out(evaluation.share, seed)
    budgets = clients.budgets or tuple(Budget(math.inf, 1e-5) for _ in clients.names)
    batches = None if clients.batch_sizes is None else np.asarray(clients.batch_sizes, dtype=np.float64)
    population = Population(tuple(clients.names), clients.sizes, budgets, batches, clients.levels)
    given = {key: value for key, value in training.items() if value is not None}
    options = dict(model_options or {})
    if isinstance(model, str) and model == "auto":
        model, options = models.usual(clients.shape, clients.ranged, options, clients.tokens)
    template = models.build(model, clients.shape, clients.classes, seed, tokens=clients.tokens, **options)
    models.check(template, clients.shape, clients.classes, models.dtype_of(clients.tokens))
    loss = "cross-entropy" if clients.task == "classification" else "half-squared-error"
    if precision not in {"float32", "mixed"}:
        raise BadInput(f"precision {precision!r} is unknown: use float32 or mixed")
    augment = None if given.get("augment") is None else Augment.parse(given["augment"])
    if augment is not None:
        augment.check(clients.shape)
    # A map of every record by itself is applied once, not at every step; a mapped file is too large for that, and
    # copies are made before it, other ones in every step.
    each_step = pages_of(clients.x) is not None or augment is not None
    fixed, trained = (None, template) if each_step else models.split_fixed(template)
    copies = clients.unit_records * (1 if augment is None else augment.copies)
    build = partial(gradients.build, mixed=precision == "mixed", copies=copies)
    engine = build(trained, loss)
    judged_by, graded_loss = None, ""
    if chosen.local.trains is not None:
        judged_by = engine
        trained, graded_loss = chosen.local.trains(trained)
        engine = build(trained, graded_loss)
    auto = methods.wants_auto(chosen, given)
    reach = models.reach(template, clients.shape, clients.tokens) if auto else 1.0
    learner = methods.Learner(engine.dimension, clients.classes, reach, models.weight_size(template))
    plan = methods.settle(chosen, given, population, learner, seed, noises=before and before.noises, trust=trust)
    if evaluation is not None and held is not None:
        sizes = [len(one) for one in held]
        judging = judge(evaluation, plan.schedule.rounds, clients.classes, sizes, budgets, chosen.private)
        plan = replace(plan, judging=judging)
    study = {
        "data": clients.description,
        "budgets": [None if math.isinf(b.epsilon) else b.epsilon for b in budgets],
        "sizes": clients.sizes.tolist(),
        "model": {
            "name": model if isinstance(model, str) else type(model).__name__,
            "options": {key: value for key, value in options.items() if key != "features"},
            "shape": list(clients.shape),
            "classes": clients.classes,
            "parameters": engine.dimension,
            **({} if clients.tokens is None else {"tokens": clients.tokens}),
            **({"features": described(template)} if "features" in options else {}),
            **({"frozen": models.digest(template)} if models.has_adapters(template) else {}),
        },
        "loss": loss,
        "method": {"name": chosen.name, **chosen.describe()},
        # Only where it is asked for: random streams are keyed by all of this, and old runs are to repeat.
        "training": {k: v for k, v in asdict(plan.training).items() if k not in ("exact_noise", "augment") or v},
        "precision": precision,
        **({"trust": asdict(trust)} if trust.shared else {}),
        **({} if evaluation is None else {"evaluation": asdict(evaluation)}),
    }
    return Prepared(
        clients,
        template,
        engine,
        plan,
        json.loads(to_json(study)),
        seed,
        trained,
        fixed,
        judged_by,
        graded_loss,
        held,
        before is not None and before.first_keys,
    )


def plan(
    clients: Federation,
    model: str | nn.Module = "auto",
    method: str | Method = "auto",
    rounds: int | Literal["auto"] | None = None,
    seed: int = 0,
    *,
    model_options: dict[str, Any] | None = None,
    features: Spec | None = None,
    trust: Trust | Mapping[str, Any] | None = None,
    evaluation: Evaluation | Mapping[str, Any] | None = None,
    **training: Unpack[Settings],
) -> PlanView:
    """What ``train`` with these arguments would do: noise per client, schedule, cost, warnings. No training."""
    options, settings = with_features(model_options, features), {"rounds": rounds, **training}
    judged = Evaluation.parse(evaluation)
    ready = prepare(clients, model, method, seed, options, settings, trust=Trust.parse(trust), evaluation=judged)
    return PlanView(ready.plan, ready.engine.dimension, ready.engine.describe(), seed)


def train(
    clients: Federation,
    model: str | nn.Module = "auto",
    method: str | Method = "auto",
    rounds: int | Literal["auto"] | None = None,
    seed: int = 0,
    *,
    out: str | os.PathLike[str] | None = None,
    ledger: str | os.PathLike[str] | None = None,
    resume: bool = False,
    device: str = "cpu",
    callbacks: Sequence[Callback] = (),
    model_options: dict[str, Any] | None = None,
    features: Spec | None = None,
    name: str | None = None,
    precision: str = "float32",
    deterministic: bool = True,
    trust: Trust | Mapping[str, Any] | None = None,
    evaluation: Evaluation | Mapping[str, Any] | None = None,
    baselines: bool = False,
    **training: Unpack[Settings],
) -> Run:
    """Train one model together, every client under its own budget.

    Under ``torchrun`` (or with ``sordino run --processes``) several processes train one run together; give them all the
    same arguments: each takes the turns of some clients, the first charges and writes, all return the same run.

    Parameters
    ----------
    clients: a federation with budgets: ``sd.data.load(…).partition(…).with_budgets(…)``.
    model: a name, ``"module:factory"``, or an ``nn.Module``. ``"auto"`` is a linear head on fixed features: scattering
        for images, bins for tables with declared ranges, which words there are for texts.
    features: a fixed map to put before the model, applied once: ``"scatter"``, ``{"name": "binned", "bins": 16}``,
        ``"module:factory"``.
    method: a registered name, or ``sd.Method(…)``. ``"auto"`` sets itself from public facts: sizes, budgets, the model.
    rounds: T; ``"auto"`` chooses. By default the method's own: automatic for ``auto``, 40 for the others.
    out: a run folder (result.json, ledger, checkpoint, log); ``resume=True`` goes on where it stopped.
    ledger: a ledger file that is cumulative over runs; default: a fresh one in the run folder. A run that goes on
        remembers its own, and refuses another.
    callbacks: called with each round's record.
    name: what to call the study in reports.
    precision: ``"mixed"`` lets a GPU compute activations in TF32; gradients of parameters and norms never are.
    deterministic: repeat the run bit for bit on a GPU too, by slower algorithms; ``False`` lets its last bits vary. The
        same run either way: draws, keys and promises do not depend on it.
    trust: ``{"noise": "shared", "colluders": 3}``: the server sees the sum of all updates alone, sites share the noise,
        and promises hold against the server and any three other sites (``Trust``). Default: noise per site, which holds
        against everybody.
    evaluation: ``{"every": 5}``: hold some records of every client out, and judge the model by them as a deployment
        would: with noise, paid from an account of their own (``Evaluation``); see ``result["evaluation"]``.
    baselines: also train what the run is compared with: every client's data alone at its own ε, and everybody together
        without noise; see ``result["baselines"]``, which always has the majority class. Costs two more runs.
    **training: fields of ``Training``: batch or rate, steps or epochs, lr, clip, sampling, select, …. ``lr``, ``clip``,
        ``rate`` and ``evaluate`` may be ``"auto"`` for any method.

    Guarantees
    ----------
    Every release is charged to the ledger before its noise is drawn; no client's spent ε exceeds its budget.
    """
    check_callbacks(callbacks)
    check_flag("deterministic", deterministic)
    if resume and out is None:
        raise BadInput("resume=True needs out=, the folder of the run to go on with")
    shard, folder = Shard.now(), None if out is None else as_path("out", out)
    before = shard.of_first(lambda: planned(folder) if folder is not None and resume else None)
    options, settings = with_features(model_options, features), {"rounds": rounds, **training}
    chosen = Trust.parse(trust), Evaluation.parse(evaluation)
    ready = prepare(clients, model, method, seed, options, settings, before, precision, *chosen)
    ready = replace(ready, deterministic=deterministic)
    if len(set(shard.gathered((ready.key, models.frozen(ready.template))))) > 1:
        raise BadInput(
            "the processes of this run were given other arguments, or a model with other frozen weights: they have to "
            "be the same everywhere (a seed before weights are drawn, or model='module:factory')"
        )
    if baselines:
        like = partial(_like, model=model, seed=seed, options=options, precision=precision, deterministic=deterministic)
        ready = replace(ready, baselines=Compared(ready, settings, like, device).find)
    torch_device(device)  # refuses one that is not there, before a folder is made
    pays = None if ledger is None else as_path("ledger", ledger)
    keeper = shard.of_first(lambda: Keeper(pays) if folder is None else keep_in(folder, ready, resume, pays))
    return train_alone(ready, keeper, device, callbacks, name)


def _like(
    clients: Federation,
    method: Method,
    settings: dict[str, Any],
    *,
    model: str | nn.Module,
    seed: int,
    options: dict[str, Any] | None,
    precision: str,
    deterministic: bool,
) -> Prepared:
    """A run with other clients, another method and other settings than the one it is compared with, else the same."""
    ready = prepare(clients, model, method, seed, options, settings, precision=precision)
    return replace(ready, deterministic=deterministic)


def keep_in(path: Path, ready: Prepared, resume: bool, ledger: Path | None = None) -> Folder:
    """Keep a run in the folder at ``path``: a new one, or with ``resume`` the one that an interrupted run left."""
    return Folder.open(path, ready.study, ready.plan, ready.seed, resume, ledger=ledger, rules=ready.rules)
