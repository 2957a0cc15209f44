"""Where a deployed run stands, from the files in its folder: for a person at a terminal, and on a live page."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from sordino.errors import BadInput
from sordino.privacy.trust import SHARED, Against
from sordino.study.against import trust_lines
from sordino.study.judged import judged_line, judged_lines
from sordino.study.outage import state_of, trouble_of
from sordino.study.serve import read_rounds
from sordino.study.show import Sheet

COLUMNS = {
    "site": "site",
    "records": "records",
    "epsilon": "ε",
    "delta": "δ",
    "payable": "can pay",
    "answered": "answered",
    "missed": "missed",
    "last_seen": "last",
    "spent_epsilon": "ε spent",
}
"""What is shown of a site, and the word above it."""


def look(folder: Path) -> dict[str, Any]:
    """The state of the run in a folder: what it is doing, who takes part, what each spent and refused."""
    names = ("serve", "enrolled", "agreed", "result", "failed", "now", "evaluation")
    about, enrolled, agreed, result, failed, now, judged = (_read(folder / f"{name}.json") for name in names)
    if not about:
        raise BadInput(f"{folder} holds no deployed run: name the folder that `sordino serve` writes")
    history, study = read_rounds(folder), about["study"]
    spent = {one["client"]: one["spent_epsilon"] for one in result.get("privacy", ())}
    sites = [_site(name, enrolled, agreed, history) for name in study.get("deployment", {}).get("sites", [])]
    surveyed = (folder / "survey.json").exists()
    if result or judged or surveyed or failed:
        state = "finished" if result or judged or surveyed else "failed"
    else:
        state = state_of(folder)
    return {
        "name": study.get("study", {}).get("name", "study"),
        "method": study.get("method", {}).get("name", "dp-fedavg"),
        "run": about["run"],
        "state": state,
        "why": failed.get("reason"),
        "trouble": trouble_of(folder, state, about.get("kind")),
        "round": history[-1]["round"] if history else 0,
        "rounds": study.get("study", {}).get("rounds", 40),
        "now": now or None,
        "waiting": time.time() - now["since"] if now and state == "running" else None,
        "sites": [{**one, "spent_epsilon": spent.get(one["site"])} for one in sites],
        "trust": trust_lines([result]) if result else _planned_trust(study.get("trust", {})),
        "evaluation": next((one["evaluation"] for one in (judged, *reversed(history)) if one.get("evaluation")), []),
        "last": history[-5:],
    }


def _planned_trust(chosen: dict[str, Any]) -> list[str]:
    """Whom promises are to hold against, where a study shares noise."""
    if chosen.get("noise") != SHARED:
        return []
    return [f"noise is shared: promises hold {Against(int(chosen.get('colluders', 0))).words()}"]


def _site(name: str, enrolled: dict[str, Any], agreed: dict[str, Any], history: list[dict[str, Any]]) -> dict[str, Any]:
    facts = enrolled.get("sites", {}).get(name, {})
    first = [one["refused"][name] for one in (enrolled, agreed) if name in one.get("refused", {})]
    refusals = [f"round {one['round']}: {one['refused'][name]}" for one in history if name in one.get("refused", {})]
    dry = [one["round"] for one in history if name in one.get("cannot_pay", ())]
    seen = [one["round"] for one in history if name in one["participants"]]
    return {
        "site": name,
        "records": facts.get("records"),
        "epsilon": facts.get("epsilon"),
        "delta": facts.get("delta"),
        "payable": agreed.get("payable", {}).get(name),
        "answered": len(seen),
        "missed": sum(name in one.get("absent", ()) for one in history),
        "last_seen": max(seen, default=None),
        "refused": first[:1] + refusals + [f"its budget for this run was used up before round {n}" for n in dry[:1]],
        "enrolled": bool(facts),
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return found


def line_of(record: dict[str, Any], rounds: int | None) -> str:
    """What happened in one round, in one line."""
    of = "" if rounds is None else f"/{rounds}"
    parts = [f"round {record['round']}{of}: {len(record['participants'])} answers"]
    if record.get("central_accuracy") is not None:
        parts.append(f"accuracy {100 * record['central_accuracy']:.1f} % on the server's test records")
    parts += [judged_line(record["evaluation"])] if record.get("evaluation") else []
    parts += [f"{name} refused: {why}" for name, why in record.get("refused", {}).items()]
    if record.get("repeats"):
        parts.append("repeated without those who were lost")
    if record.get("absent"):
        parts.append(f"no answer from {', '.join(record['absent'])}")
    if record.get("cannot_pay"):
        parts.append(f"budget used up: {', '.join(record['cannot_pay'])}")
    if record.get("note"):
        parts.append(record["note"])
    return "; ".join(parts)


def headline(seen: dict[str, Any]) -> str:
    """Where the run stands, in one line."""
    text = f"{seen['name']} ({seen['method']}): {seen['state']}, round {seen['round']} of {seen['rounds']}"
    if seen["waiting"] is not None:
        text += f"; {seen['now']['phase']} of round {seen['now']['round']} for {seen['waiting']:.0f} s"
    return text + (f": {seen['why']}" if seen["why"] else "")


def table(seen: dict[str, Any]) -> Group:
    """The state of the run as a table for a terminal."""
    found = Sheet(tuple(COLUMNS.values()))
    for one in seen["sites"]:
        found.add_row(*(_shown(value) for value in _cells(one).values()))
    told = [Text(line) for line in (*judged_lines(seen["evaluation"]), *seen["trust"])]
    told += [Text(line, style="yellow") for line in _refusals(seen)]
    return Group(Text(headline(seen), style="bold"), *(Text(line, style="red") for line in trouble(seen)), found, *told)


def trouble(seen: dict[str, Any]) -> list[str]:
    """What is wrong with the server and what to do about it, a line each; nothing where all is well."""
    found = seen["trouble"]
    return [] if found is None else [str(found["what"]), f"what to do: {found['remedy']}"]


def _cells(site: dict[str, Any]) -> dict[str, Any]:
    """What is shown of a site. JSON has no infinity: the ε of a site that is enrolled is never missing."""
    endless = site["enrolled"] and site["epsilon"] is None
    return {key: site[key] for key in COLUMNS} | ({"epsilon": math.inf} if endless else {})


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return "∞" if math.isinf(value) else f"{value:.4g}"
    return "–" if value is None else str(value)


def _refusals(seen: dict[str, Any]) -> list[str]:
    return [f"{one['site']} refused – {why}" for one in seen["sites"] for why in one["refused"]]
