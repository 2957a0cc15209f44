"""A survey rehearsed on files at hand: parted, charged and noised as sites would, from keyed streams."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sordino.data.encode import unit_ids
from sordino.data.own import client_files, stem_of
from sordino.data.read import RawTable, delimiter_of, read_table
from sordino.data.schema import Schema, parse_schema
from sordino.data.survey import Survey, flat_places, read_raw
from sordino.data.units import UNIT_NAME, numbered
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


@dataclass(frozen=True)
class HeldOut:
    """Which rows of a file are held out, and whose each of those is, where a person counts with all of theirs."""

    rows: NDArray[np.bool_]
    whose: NDArray[np.int64] | None

    @property
    def units(self) -> int:
        """How many are held out: records, or persons."""
        return int(self.rows.sum()) if self.whose is None else len(np.unique(self.whose))


def prepare(study: Study) -> tuple[SurveyPlan, dict[str, RawTable], dict[str, HeldOut]]:
    """The plan of a rehearsal, its files, and which of their records are held out. Sizes are public."""
    survey, files = study.survey.asked(), at_hand(study)
    schema = None if study.data.table_schema is None else parse_schema(study.data.table_schema)
    tables = {name: read_raw(file, survey, schema) for name, file in files.items()}
    held = {name: _held(study, name, file, tables[name].rows) for name, file in files.items()}
    budgets = budgets_of(study, list(files), True)
    if study.survey.unit is not None:
        budgets = {name: replace(one, unit=UNIT_NAME) for name, one in budgets.items()}
    sizes = {name: one.units for name, one in held.items()}
    return plan_survey(survey, study.survey.spend, sizes, budgets), tables, held


def _held(study: Study, name: str, file: Path, rows: int) -> HeldOut:
    """What a site of this file would hold out: some of its records, or persons with all of theirs."""
    key, share = hashlib.sha256(f"held out {study.study.seed} {name}".encode()).digest(), study.survey.share
    if study.survey.unit is None:
        return HeldOut(held_out(key, places(rows), share), None)
    schema = Schema("", "classification", None, unit=study.survey.unit)
    ids = unit_ids(read_table(file, [study.survey.unit], delimiter_of(file)), schema)
    out = held_out(key, (f"id {one}" for one in ids), share) & np.array([one not in schema.missing for one in ids])
    return HeldOut(out, numbered([one for one, taken in zip(ids, out) if taken]))


def rehearse(study: Study) -> dict[str, Any]:
    """Do a survey on the files of ``data.folder``; what survey.json says."""
    plan, tables, held = prepare(study)
    with tempfile.TemporaryDirectory(prefix="sordino-survey-") as scratch:
        released, spent = release(plan, tables, held, f"survey {study.study.seed}", Path(scratch))
    return made(study, plan, released, spent, {}, simulated=True)


def release(
    plan: SurveyPlan,
    tables: Mapping[str, RawTable],
    held: Mapping[str, HeldOut],
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
            own = held[one.name]
            cells = torch.from_numpy(flat_places(tables[one.name], plan.survey)[own.rows])
            whose = None if own.whose is None else torch.from_numpy(own.whose)
            found = gate.count(permit, 0, {PART: (cells, plan.survey.width)}, whose)[PART]
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
