"""Where a deployed run stands, from the files in its folder: for a person at a terminal, and for the live page."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from sordino.errors import BadInput
from sordino.study.serve import is_coordinated, is_served


def look(folder: Path) -> dict[str, Any]:
    """The state of the run in a folder: what it is doing, who takes part, what each spent and refused."""
    about = _read(folder / "serve.json")
    if about is None:
        raise BadInput(f"{folder} holds no deployed run: name the folder that `sordino serve` writes")
    enrolled = _read(folder / "enrolled.json") or {"sites": {}, "refused": {}}
    agreed = _read(folder / "agreed.json") or {"payable": {}, "refused": {}}
    history, result = rounds_of(folder), _read(folder / "result.json")
    failed, now = _read(folder / "failed.json"), _read(folder / "now.json")
    named = about["study"].get("deployment", {}).get("sites", [])
    spent = {one["client"]: one for one in (result or {}).get("privacy", ())}
    sites = [_site(name, enrolled, agreed, history, spent.get(name)) for name in named]
    if result:
        state = "finished"
    elif failed:
        state = "failed"
    elif is_coordinated(folder):
        state = "running"
    else:
        state = "starting" if is_served(folder) else "interrupted"
    return {
        "name": about["study"].get("study", {}).get("name", "study"),
        "method": about["study"].get("method", {}).get("name", "dp-fedavg"),
        "run": about["run"],
        "state": state,
        "why": None if failed is None else failed["reason"],
        "round": history[-1]["round"] if history else 0,
        "rounds": about["study"].get("study", {}).get("rounds", 40),
        "now": now,
        "waiting": None if now is None or state != "running" else time.time() - now["since"],
        "sites": sites,
        "last": history[-5:],
    }


def _site(
    name: str, enrolled: dict[str, Any], agreed: dict[str, Any], history: list[dict[str, Any]], spent: Any
) -> dict[str, Any]:
    facts = enrolled["sites"].get(name, {})
    refusals = [f"round {one['round']}: {one['refused'][name]}" for one in history if name in one.get("refused", {})]
    dry = [one["round"] for one in history if name in one.get("cannot_pay", ())]
    if dry:
        refusals.append(f"its budget for this run was used up before round {dry[0]}")
    first = enrolled["refused"].get(name) or agreed["refused"].get(name)
    return {
        "site": name,
        "records": facts.get("records"),
        "epsilon": facts.get("epsilon"),
        "delta": facts.get("delta"),
        "payable": agreed["payable"].get(name),
        "answered": sum(name in one["participants"] for one in history),
        "missed": sum(name in one.get("absent", ()) for one in history),
        "last_seen": max((one["round"] for one in history if name in one["participants"]), default=None),
        "spent_epsilon": None if spent is None else spent["spent_epsilon"],
        "refused": [*([first] if first else []), *refusals],
        "enrolled": bool(facts),
    }


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    """The rounds in the log; half a last line, while it is written, does not count."""
    found = []
    try:
        for line in (folder / "log.jsonl").read_text().splitlines():
            found.append(json.loads(line))
    except (FileNotFoundError, json.JSONDecodeError):
        pass
    return found


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return found


def line_of(record: dict[str, Any], rounds: int) -> str:
    """One round in one line."""
    parts = [f"round {record['round']}/{rounds}: {len(record['participants'])} answers"]
    if record.get("central_accuracy") is not None:
        parts.append(f"accuracy {100 * record['central_accuracy']:.1f} % on the server's test records")
    parts += [f"{name} refused: {why}" for name, why in record.get("refused", {}).items()]
    if record.get("absent"):
        parts.append(f"no answer from {', '.join(record['absent'])}")
    if record.get("cannot_pay"):
        parts.append(f"budget used up: {', '.join(record['cannot_pay'])}")
    if record.get("note"):
        parts.append(record["note"])
    return "; ".join(parts)


def headline(seen: dict[str, Any]) -> str:
    """The run in one line."""
    text = f"{seen['name']} ({seen['method']}): {seen['state']}, round {seen['round']} of {seen['rounds']}"
    if seen["waiting"] is not None:
        text += f"; {seen['now']['phase']} of round {seen['now']['round']} for {seen['waiting']:.0f} s"
    return text + (f": {seen['why']}" if seen["why"] else "")


def table(seen: dict[str, Any]) -> Group:
    """The run as a person reads it."""
    found = Table(header_style="bold")
    for column in ("site", "records", "ε", "δ", "can pay", "answered", "missed", "last", "ε spent"):
        found.add_column(column, justify="left" if column == "site" else "right", no_wrap=True)
    for one in seen["sites"]:
        found.add_row(
            one["site"],
            _or_dash(one["records"]),
            ("∞" if one["enrolled"] else "–") if one["epsilon"] is None else _number(one["epsilon"]),
            _or_dash(one["delta"]),
            _or_dash(one["payable"]),
            str(one["answered"]),
            str(one["missed"]),
            _or_dash(one["last_seen"]),
            "–" if one["spent_epsilon"] is None else _number(one["spent_epsilon"]),
        )
    refusals = [f"{one['site']} refused – {why}" for one in seen["sites"] for why in one["refused"]]
    return Group(Text(headline(seen), style="bold"), found, *(Text(line, style="yellow") for line in refusals))


def _or_dash(value: Any) -> str:
    return "–" if value is None else _number(value) if isinstance(value, float) else str(value)


def _number(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:.4g}"
