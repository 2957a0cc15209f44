"""survey.json: every figure with its interval, what each site spent, and the drafted study."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sordino._version import __version__
from sordino.engine.checkpoint import write_atomic
from sordino.errors import BadInput
from sordino.study.file import Study
from sordino.study.result import to_json
from sordino.study.survey.draft import draft
from sordino.study.survey.figures import find
from sordino.study.survey.plan import SurveyPlan

SURVEY, DRAFTED = "survey.json", "drafted.toml"


def made(
    study: Study,
    plan: SurveyPlan,
    tables: Mapping[str, NDArray[np.float64]],
    spent: Mapping[str, Mapping[str, Any]],
    refused: Mapping[str, str],
    simulated: bool,
) -> dict[str, Any]:
    """What a survey found, as survey.json holds it; ``undrafted`` says why there is no draft."""
    figures, least = find(plan, tables), study.survey.least
    drafted, undrafted = None, None
    try:
        drafted = draft(study, figures)
    except BadInput as error:  # the figures were paid for: they are kept all the same
        undrafted = str(error)
    about = {
        "schema": 1,
        "study": study.study.name,
        "simulated": simulated,
        "survey": plan.survey.plain(),
        "spend": study.survey.spend,
        "plan": plan.plain(least),
        "expected": plan.expected(),
        "sites": list(figures.sites),
        "records": {"fewer_than": least} if figures.records < least else figures.records,
        "deviation": figures.deviation,
        "columns": [one.plain(least) for one in figures.columns],
        "spent": {name: dict(one) for name, one in spent.items()},
        "refused": dict(refused),
        "draft": drafted,
        "undrafted": undrafted,
        "versions": {"sordino": __version__},
    }
    plain: dict[str, Any] = json.loads(to_json(about))
    return plain


def write(result: Mapping[str, Any], folder: Path) -> None:
    """The drafted study first, where there is one: survey.json says that all is there."""
    folder.mkdir(parents=True, exist_ok=True)
    if result["draft"] is not None:
        write_atomic(folder / DRAFTED, str(result["draft"]).encode())
    write_atomic(folder / SURVEY, to_json(dict(result), indent=1).encode())
