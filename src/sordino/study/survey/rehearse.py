"""A survey rehearsed on files at hand: parted, charged and noised as sites would, from keyed streams."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sordino.data.encode import RawTable
from sordino.data.own import client_files, stem_of
from sordino.data.survey import Survey, flat_places, read_raw
from sordino.errors import BadInput
from sordino.privacy.gate import Gate, fingerprint
from sordino.privacy.generators import Keyed, Turn
from sordino.privacy.held import HELD, held_out, places
from sordino.privacy.ledger import Ledger, LedgerPlan
from sordino.privacy.types import Budget
from sordino.study.file import Study
from sordino.study.survey.plan import PART, SurveyPlan, plan_survey
from sordino.study.survey.result import made


def budgets_of(study: Study, names: list[str], files: bool) -> dict[str, Budget]:
    """What ``[budgets]`` promises to these sites."""
    terms = study.budgets.terms(study.study.seed)
    if terms is None:
        raise BadInput("[budgets] says nothing: a survey costs ε, so give budgets.epsilon, such as 1.0")
    return dict(zip(names, terms.of(names, files)[0]))


def at_hand(study: Study) -> dict[str, Path]:
    """The files of a rehearsal, by the clients' names."""
    folder = study.data.folder or ("" if study.data.name == "digits" else study.data.name)
    if not folder:
        raise BadInput("data.folder is missing: name the folder with a file per client, or ask real sites with --serve")
    return {stem_of(file): file for file in client_files(Path(folder))}


def prepare(study: Study) -> tuple[SurveyPlan, dict[str, RawTable], dict[str, NDArray[np.bool_]]]:
    """The plan of a rehearsal, its files, and which of their records are held out. Sizes are public."""
    survey, files = study.survey.asked(), at_hand(study)
    tables = {name: read_raw(file, survey) for name, file in files.items()}
    masks = {}
    for name, table in tables.items():
        key = hashlib.sha256(f"held out {study.study.seed} {name}".encode()).digest()
        masks[name] = held_out(key, places(table.rows), study.survey.share)
    held = {name: int(mask.sum()) for name, mask in masks.items()}
    return plan_survey(survey, study.survey.spend, held, budgets_of(study, list(files), True)), tables, masks


def rehearse(study: Study) -> dict[str, Any]:
    """Do a survey on the files of ``data.folder``; what survey.json says."""
    plan, tables, masks = prepare(study)
    with tempfile.TemporaryDirectory(prefix="sordino-survey-") as scratch:
        released, spent = release(plan, tables, masks, f"survey {study.study.seed}", Path(scratch))
    return made(study, plan, released, spent, {}, simulated=True)


def release(
    plan: SurveyPlan,
    tables: Mapping[str, RawTable],
    masks: Mapping[str, NDArray[np.bool_]],
    run: str,
    folder: Path,
) -> tuple[dict[str, NDArray[np.float64]], dict[str, dict[str, Any]]]:
    """Every site's noisy tables, through the gate, and what its held-out account says."""
    released, spent = {}, {}
    with Ledger(folder / "ledger.db", durable=False) as ledger:
        gate = Gate(ledger, Keyed(run), run)
        ledger.open_accounts({one.name + HELD: one.budget for one in plan.asked}, simulated=True)
        ledger.declare([LedgerPlan(one.name + HELD, run, (one.terms.event,), 1) for one in plan.asked])
        for one in plan.asked:
            account = one.name + HELD
            permit = gate.grant([Turn(account, 1)], [one.terms], fingerprint(plan.survey.plain(), one.noise))
            cells = torch.from_numpy(flat_places(tables[one.name], plan.survey)[masks[one.name]])
            found = gate.count(permit, 0, {PART: (cells, plan.survey.width)})[PART]
            released[one.name] = found.value.numpy()
            spent[one.name] = {"survey_epsilon": ledger.epsilon([account], run)[account]}
            spent[one.name]["held_epsilon"] = ledger.epsilon([account])[account]
    return released, spent


def assumed(study: Study, held: int) -> SurveyPlan:
    """The plan of a deployed survey before anybody came: ``[budgets]`` for its sites, so many held-out records each."""
    survey: Survey = study.survey.asked()
    sites = study.deployment.sites
    if not sites:
        raise BadInput('deployment.sites lists the sites by name: sites = ["north", "south"]')
    return plan_survey(survey, study.survey.spend, dict.fromkeys(sites, held), budgets_of(study, sites, False))
