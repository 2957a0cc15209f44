"""Where a deployed run stands, from the files in its folder: for a person at a terminal, and on a live page."""

from __future__ import annotations

import json
import math
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from jinja2 import Template
from rich.console import Group
from rich.table import Table
from rich.text import Text

from sordino.errors import BadInput, SordinoError
from sordino.study.result import complete, from_json, read_result, to_json
from sordino.study.serve import is_locked, read_rounds

EVERY = 5  # seconds after which the live page loads itself again

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

EMPTY = '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>sordino</title></head><body><main></main>'
"""The report on a run that has not finished a round."""


def look(folder: Path) -> dict[str, Any]:
    """The state of the run in a folder: what it is doing, who takes part, what each spent and refused."""
    names = ("serve", "enrolled", "agreed", "result", "failed", "now")
    about, enrolled, agreed, result, failed, now = (_read(folder / f"{name}.json") for name in names)
    if not about:
        raise BadInput(f"{folder} holds no deployed run: name the folder that `sordino serve` writes")
    history, study = read_rounds(folder), about["study"]
    spent = {one["client"]: one["spent_epsilon"] for one in result.get("privacy", ())}
    sites = [_site(name, enrolled, agreed, history) for name in study.get("deployment", {}).get("sites", [])]
    if result or failed:
        state = "finished" if result else "failed"
    elif is_locked(folder, "coordinator"):
        state = "running"
    else:
        state = "starting" if is_locked(folder, "serve") else "interrupted"
    return {
        "name": study.get("study", {}).get("name", "study"),
        "method": study.get("method", {}).get("name", "dp-fedavg"),
        "run": about["run"],
        "state": state,
        "why": failed.get("reason"),
        "round": history[-1]["round"] if history else 0,
        "rounds": study.get("study", {}).get("rounds", 40),
        "now": now or None,
        "waiting": time.time() - now["since"] if now and state == "running" else None,
        "sites": [{**one, "spent_epsilon": spent.get(one["site"])} for one in sites],
        "last": history[-5:],
    }


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


def line_of(record: dict[str, Any], rounds: int) -> str:
    """What happened in one round, in one line."""
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
    """Where the run stands, in one line."""
    text = f"{seen['name']} ({seen['method']}): {seen['state']}, round {seen['round']} of {seen['rounds']}"
    if seen["waiting"] is not None:
        text += f"; {seen['now']['phase']} of round {seen['now']['round']} for {seen['waiting']:.0f} s"
    return text + (f": {seen['why']}" if seen["why"] else "")


def table(seen: dict[str, Any]) -> Group:
    """The state of the run as a table for a terminal."""
    found = Table(header_style="bold")
    for word in COLUMNS.values():
        found.add_column(word, justify="left" if word == "site" else "right", no_wrap=True)
    for one in seen["sites"]:
        found.add_row(*(_shown(value) for value in _cells(one).values()))
    return Group(Text(headline(seen), style="bold"), found, *(Text(line, style="yellow") for line in _refusals(seen)))


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


class Page:
    """Serves the live page of a run on a port of 127.0.0.1 while it is open; nothing at all where ``port`` is None."""

    def __init__(self, folder: Path, port: int | None, console: Any) -> None:
        self.server: ThreadingHTTPServer | None = None
        if port is None:
            return
        try:
            self.server = ThreadingHTTPServer(("127.0.0.1", port), _handler(folder))
        except OSError as error:
            raise BadInput(f"--page {port}: {error.strerror}; choose another port") from None
        console.print(f"live page: http://127.0.0.1:{self.server.server_address[1]}/", highlight=False)

    def __enter__(self) -> Page:
        if self.server is not None:
            threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()


def _handler(folder: Path) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers two addresses from the folder's files as they are now: the page, and the same facts as JSON."""

        def do_GET(self) -> None:
            code, kind, text = 404, "text/plain", "there is / and /status.json"
            try:
                if self.path == "/status.json":
                    code, kind, text = 200, "application/json", json.dumps(look(folder))
                elif self.path == "/":
                    code, kind, text = 200, "text/html", page(folder)
            except SordinoError as error:
                code, text = 503, f"not yet: {error}"
            body = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing in the terminal."""

    return Handler


def page(folder: Path) -> str:
    """The live page as one HTML document: who was seen, and below it the report on the rounds so far."""
    from sordino.study.report import render

    seen, template = look(folder), Path(__file__).parent / "report" / "live.html"
    live = Template(template.read_text(), autoescape=True).render(
        headline=headline(seen),
        columns=COLUMNS,
        sites=[_cells(one) for one in seen["sites"]],
        shown=_shown,
        refusals=_refusals(seen),
        rounds=[line_of(one, seen["rounds"]) for one in seen["last"]],
    )
    result = _so_far(folder, seen)
    document = EMPTY if result is None else render([result], title=headline(seen))
    again = "" if seen["state"] == "finished" else f'<meta http-equiv="refresh" content="{EVERY}">'
    return document.replace("</head>", f"{again}</head>", 1).replace("<main", f"{live}<main", 1)


def _so_far(folder: Path, seen: dict[str, Any]) -> dict[str, Any] | None:
    """The result, or what there is of it after the rounds so far; None before the first."""
    if seen["state"] == "finished":
        plain: dict[str, Any] = json.loads(to_json(read_result(folder / "result.json")))
        return plain
    about, history = folder / "study.json", read_rounds(folder)
    if not about.exists() or not history:
        return None
    kept = from_json(about.read_text())
    parts = {
        "study": kept["study"],
        "method": seen["method"],
        "seed": kept["seed"],
        "rounds": history,
        "final": dict.fromkeys(("accuracy", "loss", "psi", "worst_accuracy", "client_accuracy")),
        "privacy": [],
        "private": True,
        "simulated": False,
        "seconds": 0.0,
    }
    return complete(parts, None)
