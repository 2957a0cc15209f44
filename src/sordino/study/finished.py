"""A finished model, judged on held-out records of sites or clients that need not have trained it: one release each.

Nothing is trained. A site is asked exactly as in the only round of a run that is evaluated after it, under the same
limits, and its held-out account pays under a run of its own.
"""

from __future__ import annotations

import json
import logging
import math
import tempfile
import uuid
from pathlib import Path
from typing import Any

import torch

from sordino.engine.checkpoint import Checkpoint, write_atomic
from sordino.engine.federation.exchange import Transport, farewell
from sordino.engine.federation.inbox import Inbox
from sordino.engine.federation.verdicts import Question, ask_scores
from sordino.errors import BadInput, SordinoError
from sordino.methods.evaluation import Evaluation
from sordino.privacy.held import HELD
from sordino.privacy.ledger import Ledger
from sordino.study.conduct import BYE, JUDGED, enrolment, notice_of, settled
from sordino.study.deploy import prepare
from sordino.study.file import Study, make_study
from sordino.study.prepared import Run
from sordino.study.result import checksum, to_json
from sordino.study.run import load
from sordino.study.run import prepare as prepare_run
from sordino.study.session import Session

log = logging.getLogger("sordino.coordinator")


def asked(study: Study, run: Run) -> Study:
    """The study of one evaluation: the model and seed of the saved run, one round, and who is asked as the study says.

    Refuses records of another kind than the model's.
    """
    about = run.result["study"]["model"]
    if run.template is None:
        raise BadInput(
            "this run was saved with a model of your own, which nobody else can build: name it module:factory"
        )
    table = json.loads(study.model_dump_json(by_alias=True, exclude_none=True, exclude_defaults=True))
    table["study"] = {**table.get("study", {}), "seed": run.result["seed"], "rounds": 1}
    model: dict[str, Any] = {"name": about["name"], "options": about["options"]}
    if about.get("features") is not None:
        model["features"] = {"name": about["features"]["name"], **about["features"]["options"]}
    settings = {key: value for key, value in table.get("evaluation", {}).items() if key in ("share", "bins", "spend")}
    table |= {"model": model, "training": {}, "evaluation": {**settings, "every": 1}}
    for section in ("trust", "sweep", "compare", "tune"):
        table.pop(section, None)
    found = make_study(table)
    if found.chosen_method().local.begin is not None:
        raise BadInput(
            f"method {found.method.name!r} gives every site a model of its own, and this evaluates a common one: name "
            "another, such as --set method.name=dp-fedavg"
        )
    return found


def rehearse(study: Study, run: Run) -> dict[str, Any]:
    """Judge a model by the clients of a study in this process, as sites would: with their budgets' noise.

    Which records are held out follows from the run's seed and ``evaluation.share``: those that a run of this study with
    ``[evaluation]`` held out too. Another run's model may have been trained on them.
    """
    clients, settings = study.federation(), study.arguments()
    _check_kind(run, clients.shape, clients.classes, clients.tokens)
    model, seed, options = (settings.pop(key) for key in ("model", "seed", "model_options"))
    trust, evaluation = settings.pop("trust"), settings.pop("evaluation")
    more = {"trust": trust, "evaluation": evaluation}
    ready = prepare_run(clients, model, study.chosen_method(), seed, options, settings, **more)
    with tempfile.TemporaryDirectory() as scratch, Ledger(Path(scratch) / "ledger.db", durable=False) as book:
        session = Session(ready, book, uuid.uuid4().hex, torch.device("cpu"))
        state, scoring = Checkpoint(1, session.state.weights, run.weights), session.setup.scoring
        if scoring is None:
            raise SordinoError("a study of one evaluation has one")
        rows = scoring.look(state, session.setup.records, ready.key)["evaluation"]
        names = [ready.clients.names[i] for i in scoring.judging.who]
        spent = {name: book.epsilon([name + HELD])[name + HELD] if session.book else math.inf for name in names}
    privacy = [
        {
            "client": name,
            "held": scoring.judging.held[i],
            "delta": ready.plan.clients[i].budget.delta,
            "held_epsilon": spent[name],
        }
        for i, name in zip(scoring.judging.who, names)
    ]
    return _result(study, run, rows, privacy, {}, simulated=True, private=ready.plan.private)


def ask_sites(folder: Path, transport: Transport) -> dict[str, Any]:
    """Do what serve.json says of a finished model: enrol the sites, ask each once; writes evaluation.json."""
    about = json.loads((folder / "serve.json").read_text())
    study, run, judged = make_study(about["study"]), str(about["run"]), load(folder / JUDGED)
    ready, where = prepare(study, run), study.deployment
    enrolled = settled(folder / "enrolled.json", lambda: enrolment(folder, study, ready.brief, transport, ready.sound))
    facts = enrolled["sites"]
    for one in facts.values():  # JSON has no infinity: a null ε is one again
        one["epsilon"] = math.inf if one["epsilon"] is None else one["epsilon"]
    plan = ready.plan(facts)
    who = [] if plan.judging is None else plan.judging.who
    notice_of(folder, {"round": 1, "phase": "evaluation", "asked": [plan.clients[i].name for i in who]})
    question = Question(judged.weights, 1, 1, {})
    found = ask_scores(plan, ready.brief, who, question, transport, where.timeout, Inbox(folder / "inbox"))
    spent = farewell(transport, run, list(facts), min(BYE, where.timeout))
    why = {**enrolled["refused"], **found.missing.refused}
    why |= dict.fromkeys(found.missing.absent, "it did not answer")
    if not found.rows:
        raise SordinoError("no site judged the model: " + "; ".join(f"{name}: {one}" for name, one in why.items()))
    counted = {plan.clients[i].name: i for i in who if plan.clients[i].name in found.judged}
    privacy = [
        {
            "client": name,
            "held": facts[name]["held"],
            "delta": facts[name]["delta"],
            "held_epsilon": spent.get(name, {}).get("held_epsilon"),
        }
        for name in counted
    ]
    result = _result(study, judged, found.rows, privacy, why, simulated=False, private=plan.private)
    write_atomic(folder / "evaluation.json", to_json(result, indent=1).encode())
    notice_of(folder, {"round": 1, "phase": "finished", "asked": []})
    return result


def set_up_evaluation(study: Study, run: Run) -> Study:
    """What sites are asked, where the study says which they are; checked against the model without them."""
    table = json.loads(study.model_dump_json(by_alias=True, exclude_none=True, exclude_defaults=True))
    about = run.result["study"]["model"]
    if study.deployment.shape is None and study.data.table_schema is None:
        table["deployment"] = {**table.get("deployment", {}), "shape": about["shape"], "classes": about["classes"]}
        if about.get("tokens") is not None:
            table["data"] = {**table.get("data", {}), "schema": run.result["records"]["schema"]}
    found = make_study(table)
    ready = prepare(found, "")
    _check_kind(run, tuple(ready.brief["shape"]), ready.brief["classes"], ready.brief.get("tokens"))
    if len(ready.shown) != len(run.weights):
        raise BadInput(f"the saved weights are {len(run.weights)} numbers, and the model has {len(ready.shown)}")
    return found


def _check_kind(run: Run, shape: tuple[int, ...], classes: int | None, tokens: int | None) -> None:
    about = run.result["study"]["model"]
    if tokens != about.get("tokens"):
        raise BadInput(
            f"the model takes ids of {about.get('tokens') or 'no'} tokens, the study's records have "
            f"{tokens or 'none'}: their tokenizers differ, they do not fit"
        )
    if (list(shape), classes) != (list(about["shape"]), about["classes"]):
        raise BadInput(
            f"the model takes records of shape {about['shape']} with {about['classes']} classes, the study's records "
            f"have shape {list(shape)} with {classes}: they do not fit"
        )


def _result(
    study: Study,
    run: Run,
    rows: list[dict[str, Any]],
    privacy: list[dict[str, Any]],
    refused: dict[str, str],
    simulated: bool,
    private: bool,
) -> dict[str, Any]:
    settings = Evaluation() if study.evaluation is None else study.evaluation.chosen()
    return {
        "study": study.study.name,
        "model": {"name": study.model.name, "checksum": checksum(run.weights)},
        "evaluation": rows,
        "settings": {"bins": settings.bins, "spend": settings.spend},
        "privacy": privacy,
        "refused": refused,
        "simulated": simulated,
        "private": private,
    }
