"""A deployed run at the server, from enrolment to result, in one folder that can be taken up again at any point.

serve.json (what was asked for) → enrolled.json (who came) → study.json (noise, fixed) → agreed.json (who can pay) →
log.jsonl and checkpoint, round by round → result.json; failed.json where it cannot go on, now.json for onlookers,
keys.json: which key every name belongs to in this run.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sordino.engine import rounds
from sordino.engine.checkpoint import Checkpoint, write_atomic
from sordino.engine.federation.coordinator import Coordinator, check_deployable
from sordino.engine.federation.descriptor import Charter, charter_of
from sordino.engine.federation.exchange import Transport, agree, enrol, farewell
from sordino.engine.federation.inbox import Inbox
from sordino.engine.federation.shared_rounds import SharedRounds
from sordino.errors import BadInput, BudgetRefused, SordinoError
from sordino.methods import Plan, adapt
from sordino.study.deploy import USUAL, Facts, Served, check_sites, judge_of, prepare
from sordino.study.deployed import result_of
from sordino.study.file import Study, make_study
from sordino.study.folder import EVALUATED, SURVEYED, TUNED, Folder, check_kind, planned
from sordino.study.judged import judged_lines
from sordino.study.prepared import Run
from sordino.study.result import to_json

log = logging.getLogger("sordino.coordinator")

Sound = Callable[[Facts], tuple[dict[str, Any], dict[str, str]]]
"""(what sites declare) → those that it can be done with, and why not with the others."""

JUDGED = "judged.safetensors"
"""The saved run whose model is judged, where nothing is trained."""

BYE = 60.0  # seconds sites have to say what they spent, once a run is over


def set_up(
    folder: Path,
    study: Study,
    resume: bool,
    keys: Path | None = None,
    kind: str = "deployed run",
    judged: Run | None = None,
) -> None:
    """Write down what a run is to do, after everything was checked that can be checked without the sites.

    ``keys``: the folder of the sites' public keys; None believes everybody, for trials and tests. ``kind``: a run, a
    survey, or a search. ``judged``: a finished run, whose model is to be judged and nothing trained.
    """
    file = folder / "serve.json"
    where = {"keys": None if keys is None else str(keys.resolve()), "path": str(Path.cwd())}
    if study.deployment.test is not None:  # the coordinator works in another folder
        study.deployment.test = str(Path(study.deployment.test).resolve())
    table = table_of(study)
    if file.exists():
        kept = json.loads(file.read_text())
        if not resume:
            raise BadInput(f"{folder} already holds a run: use --resume to go on with it, or choose another folder")
        if kept["study"] != table:
            raise BadInput(f"{folder} holds a run of another study: resume with the same file, or start afresh")
        if (kept.get("keys", keys) is None) != (keys is None):
            raise BadInput(f"{folder} holds a run {'without' if keys else 'with'} keys: resume it as it was begun")
        (folder / "failed.json").unlink(missing_ok=True)
    else:
        check_kind(folder, kind)
        check_sites(study)
        if kind == SURVEYED:
            study.survey.asked()
        elif kind != TUNED:  # its candidates are checked one by one
            check_run(study)
        folder.mkdir(parents=True, exist_ok=True)
        kept = {"study": table, "run": uuid.uuid4().hex, "kind": kind if judged is None else EVALUATED}
        if judged is not None:
            judged.save(folder / JUDGED)
    write_atomic(file, json.dumps({**kept, **where}, indent=1).encode())


def table_of(study: Study) -> dict[str, Any]:
    """A study as plain values, of which ``make_study`` makes the same again."""
    table: dict[str, Any] = json.loads(study.model_dump_json(by_alias=True, exclude_none=True, exclude_defaults=True))
    return table


def check_run(study: Study) -> None:
    """Refuse a study that cannot be trained with sites, whoever comes."""
    check_deployable(study.chosen_method())
    ready = prepare(study, "")
    judge_of(ready)
    if study.trust.chosen().shared:  # whether the method can share noise does not depend on who comes
        ready.plan({name: {**USUAL, "adjacency": study.budgets.adjacency} for name in study.deployment.sites})


def conduct(folder: Path, transport: Transport, do: Callable[[Path, Transport], dict[str, Any]] | None = None) -> Any:
    """Do what serve.json says, or what is left of it; returns the result. A reason to give up is written to disk.

    ``do``: something else than a training run: a survey, or the evaluation of a finished model.
    """
    try:
        return (do or conduct_run)(folder, transport)
    except SordinoError as error:
        write_atomic(folder / "failed.json", to_json({"reason": str(error), "code": error.exit_code}).encode())
        raise


def conduct_run(folder: Path, transport: Transport) -> dict[str, Any]:
    """Train the run that serve.json describes, from wherever it stands, to its result."""
    about = json.loads((folder / "serve.json").read_text())
    study, run = make_study(about["study"]), str(about["run"])
    where, ready = study.deployment, prepare(study, run)
    enrolled = settled(folder / "enrolled.json", lambda: enrolment(folder, study, ready.brief, transport, ready.sound))
    facts = facts_of(enrolled)
    ready, plan, kept = settle(folder, about, ready, facts)
    charter = None
    if plan.sharing is not None:
        charter = charter_of(plan, ready.brief, {name: one["key"] for name, one in facts.items()})
    try:
        agreed = settled(folder / "agreed.json", lambda: _agree(folder, ready, plan, transport, charter))
    except SordinoError:  # nobody takes part: what was declared for this run is free again
        farewell(transport, run, list(facts), min(BYE, where.timeout))
        raise
    payable, refused = agreed["payable"], enrolled["refused"] | agreed["refused"]
    plan = adapt(plan, payable, len(ready.start), study.study.seed)
    state = kept.checkpoint(torch.device("cpu")) or Checkpoint(0, ready.start, ready.shown)
    course, inbox, notice = rounds.Course(plan, ready.layout), Inbox(folder / "inbox"), partial(notice_of, folder)
    judged = agreed.get("evaluations", {})
    parts = (course, ready.brief, transport, inbox, payable, where.timeout, where.least, notice, judged)
    coordinator = Coordinator(*parts) if charter is None else SharedRounds(*parts, charter=charter)
    judge, began = judge_of(ready), time.monotonic()
    for now in coordinator.run(state):
        now.seconds, began = now.seconds + time.monotonic() - began, time.monotonic()
        if judge is not None and rounds.is_time(plan, now.round):
            now.history[-1] |= judge(now.shown)
        kept.keep(now)
        log.info("round %d of %d: %d answers", now.round, plan.schedule.rounds, len(now.history[-1]["participants"]))
        for line in judged_lines(now.history[-1].get("evaluation", [])):
            log.info("%s", line)
    if early := rounds.stopped(plan, state.round, state.history):
        log.warning("%s", early["reason"])
    notice_of(folder, {"round": state.round, "phase": "saying goodbye", "asked": list(facts)})
    spent = farewell(transport, run, list(facts), min(BYE, where.timeout))
    result = result_of(kept, plan, state, spent, refused, ready.records)
    result["final"] |= judge(state.chosen) if judge is not None else {}
    kept.finish(result, state.chosen)
    notice_of(folder, {"round": state.round, "phase": "finished", "asked": []})
    return result


def facts_of(enrolled: dict[str, Any]) -> dict[str, Any]:
    """What the sites that came declared; JSON has no infinity, so a null ε is one again."""
    facts: dict[str, Any] = enrolled["sites"]
    return {
        name: {**one, "epsilon": math.inf if one["epsilon"] is None else one["epsilon"]} for name, one in facts.items()
    }


def settle(folder: Path, about: dict[str, Any], ready: Served, facts: Facts) -> tuple[Served, Plan, Folder]:
    """A run's plan, by the noise that it began with or, before it begins, that serve.json fixes; its folder."""
    before = planned(folder)
    plan = ready.plan(facts, about.get("noises") if before is None else before.noises, about.get("looking"))
    ready = ready.agreed(plan)
    seed, run = ready.study.study.seed, str(about["run"])
    return ready, plan, Folder.open(folder, ready.about(facts, plan), plan, seed, True, deployed=run)


def settled(file: Path, find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What was found once, and is written down: a run that is taken up again does not ask again."""
    if not file.exists():
        write_atomic(file, to_json(find(), indent=1).encode())
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def enrolment(folder: Path, study: Study, brief: dict[str, Any], transport: Transport, sound: Sound) -> dict[str, Any]:
    """Who takes part and who does not, by asking everyone who is there within the time."""
    where = study.deployment
    until = time.monotonic() + where.enrol
    notice_of(folder, {"round": 0, "phase": "enrolment", "asked": where.sites})
    while not set(where.sites) <= transport.names() and time.monotonic() < until:
        time.sleep(0.5)
    here = [name for name in where.sites if name in transport.names()]
    facts, refused, odd = enrol(transport, brief, here, where.timeout) if here else ({}, {}, {})
    facts, unfit = sound(facts)
    odd |= unfit
    for name, why in odd.items():
        log.warning("%s is refused, and the others go on: %s", name, why)
    missing = [name for name in where.sites if name not in {*facts, *refused, *odd}]
    refused |= dict.fromkeys(missing, f"it did not come within {where.enrol:g} s")
    complete = not refused or where.absent == "go on"  # whom the server refuses does not stop the others
    refused |= odd
    if not facts or not complete:
        why = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise SordinoError(
            f"the federation is not complete: {why}. deployment.absent = 'go on' goes on with the others"
        )
    return {"sites": facts, "refused": refused}


def _agree(folder: Path, ready: Served, plan: Plan, transport: Transport, charter: Charter | None) -> dict[str, Any]:
    """How many turns every site can pay, and why some refused."""
    notice_of(folder, {"round": 0, "phase": "offer", "asked": [c.name for c in plan.clients]})
    found = agree(transport, ready.brief, plan, ready.study.deployment.timeout, charter)
    payable, refused = found.payable, found.refused
    dry = [name for name, turns in payable.items() if turns == 0 and name not in refused]
    for name, why in refused.items():
        log.warning("%s refused: %s", name, why)
    for name in dry:
        log.warning("%s sits out: its budget pays for no turn of this plan", name)
    if not any(payable.values()) and not refused:
        raise BudgetRefused(
            f"nobody takes part: no site's budget pays for one turn of this plan ({', '.join(dry)}); plan fewer "
            "rounds or less precise ones, or let officers top the sites' ledgers up"
        )
    willing = np.array([i for i, c in enumerate(plan.clients) if payable.get(c.name)], dtype=np.int64)
    if any(payable.values()) and not rounds.enough(plan, willing):
        reasons = refused | dict.fromkeys(dry, "its budget pays for no turn")
        raise SordinoError(
            f"{len(willing)} sites would share noise, too few for their promises to hold: "
            + "; ".join(f"{name}: {why}" for name, why in reasons.items())
        )
    if not any(payable.values()):
        reasons = refused | dict.fromkeys(dry, "its budget pays for no turn")
        raise SordinoError("nobody takes part: " + "; ".join(f"{name}: {why}" for name, why in reasons.items()))
    return dataclasses.asdict(found)


def notice_of(folder: Path, what: dict[str, Any]) -> None:
    """Say to onlookers what is going on."""
    write_atomic(folder / "now.json", to_json({**what, "since": time.time()}).encode())
