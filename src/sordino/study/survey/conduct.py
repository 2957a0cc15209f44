"""A survey of real sites at the server, in one folder that can be taken up again at any point.

serve.json (what was asked for) → enrolled.json (who came, with how many held-out records) → inbox (their tables) →
drafted.toml and survey.json; failed.json where it cannot go on.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sordino.engine.federation import wire
from sordino.engine.federation.exchange import Transport, exchange
from sordino.engine.federation.inbox import Inbox
from sordino.engine.federation.wire import Packet, pack
from sordino.errors import BadInput, BudgetRefused, SordinoError
from sordino.privacy.types import Budget
from sordino.study.conduct import enrolment, notice_of, settled
from sordino.study.file import Study, make_study
from sordino.study.survey.plan import PART, SurveyPlan, plan_survey
from sordino.study.survey.result import made, write

log = logging.getLogger("sordino.coordinator")


def ask_survey(folder: Path, transport: Transport) -> dict[str, Any]:
    """Do what serve.json says of a survey, or what is left of it; returns what survey.json says."""
    about = json.loads((folder / "serve.json").read_text())
    study = make_study(about["study"])
    brief = brief_of(study, str(about["run"]))
    enrolled = settled(folder / "enrolled.json", lambda: enrolment(folder, study, brief, transport, with_records))
    facts = enrolled["sites"]
    for one in facts.values():  # JSON has no infinity: a null ε is one again
        one["epsilon"] = math.inf if one["epsilon"] is None else one["epsilon"]
    plan = planned(study, facts)
    log.info("asking %d sites for %d cells each", len(plan.asked), plan.survey.width)
    notice_of(folder, {"round": 0, "phase": "survey", "asked": [one.name for one in plan.asked]})
    tables, spent, refused = ask(transport, brief, plan, study.deployment.timeout, Inbox(folder / "inbox"))
    result = made(study, plan, tables, spent, enrolled["refused"] | refused, simulated=False)
    write(result, folder)
    notice_of(folder, {"round": 0, "phase": "finished", "asked": []})
    return result


def brief_of(study: Study, run: str) -> dict[str, Any]:
    """What every site is told: the survey, and what it is accounted under."""
    adjacency = study.budgets.adjacency
    return {"name": study.study.name, "run": run, "survey": study.survey.asked().plain(), "adjacency": adjacency}


def with_records(facts: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """The sites that hold records out, and why the others cannot be asked."""
    there = {name: dict(one) for name, one in facts.items() if one.get("held")}
    return there, {name: "it declares no held-out records" for name in facts if name not in there}


def planned(study: Study, facts: Mapping[str, Mapping[str, Any]]) -> SurveyPlan:
    """The survey of the sites that came, by what they declared."""
    budgets = {name: Budget(one["epsilon"], one["delta"], one["adjacency"]) for name, one in facts.items()}
    held = {name: int(one["held"]) for name, one in facts.items()}
    return plan_survey(study.survey.asked(), study.survey.spend, held, budgets)


Asked = tuple[dict[str, NDArray[np.float64]], dict[str, dict[str, Any]], dict[str, str]]


def ask(
    transport: Transport, brief: dict[str, Any], plan: SurveyPlan, seconds: float, inbox: Inbox | None = None
) -> Asked:
    """Every site's tables, what it says it spent, and why others gave none. Nothing that a site sends stops the others.

    Raises where nobody answers: ``BudgetRefused`` if for want of budget.
    """
    requests = [
        (one.name, pack(Packet(wire.SURVEY, {"brief": brief, "terms": wire.terms_to_plain(one.terms)})))
        for one in plan.asked
    ]
    heard = exchange(transport, requests, seconds, inbox, "survey")
    tables, spent, refused = {}, {}, dict(heard.refused) | dict.fromkeys(heard.absent, "it did not answer")
    for i, packet in heard.replies.items():
        name = plan.asked[i].name
        try:
            tables[name] = _table(packet, plan.survey.width)
            spent[name] = {key: _epsilon(packet.facts.get(key)) for key in ("survey_epsilon", "held_epsilon")}
        except BadInput as error:
            refused[name] = str(error)
    for name, why in refused.items():
        log.warning("%s gave no table: %s", name, why)
    if not tables:
        kind = BudgetRefused if heard.broke else SordinoError
        raise kind("nobody answered the survey: " + "; ".join(f"{name}: {why}" for name, why in refused.items()))
    return tables, spent, refused


def _table(packet: Packet, width: int) -> NDArray[np.float64]:
    """The noisy counts in a reply; refuses anything else."""
    found = packet.tensors.get(PART)
    if found is None or found.dtype is not torch.float64 or found.shape != (width,) or len(packet.tensors) != 1:
        raise BadInput(f"it sent something else than {width} counts")
    if not bool(torch.isfinite(found).all()):
        raise BadInput("it sent counts that are no numbers")
    return found.numpy()


def _epsilon(said: Any) -> float | None:
    """What a site says it spent; None where that is nothing that can be written down."""
    known = isinstance(said, int | float) and not isinstance(said, bool)
    return float(said) if known and 0.0 <= said <= 1e6 else None
