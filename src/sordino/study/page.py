"""The live page of a deployed run: the report, as far as it goes, and who was seen, on a port of 127.0.0.1."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from jinja2 import Template

from sordino.errors import BadInput, SordinoError
from sordino.study.judged import judged_lines
from sordino.study.result import complete, from_json, read_result, to_json
from sordino.study.serve import read_rounds
from sordino.study.status import COLUMNS, _cells, _refusals, _shown, headline, line_of, look, trouble

EVERY = 5  # seconds after which the live page loads itself again


EMPTY = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, '
    'initial-scale=1"><title>sordino</title></head><body><main></main>'
)


"""The report on a run that has not finished a round."""


class _Server(ThreadingHTTPServer):
    """A server that has nothing to say about browsers which close their connection, or never end a request."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Leave out what a browser does every day; everything else is an error of ours, and is shown."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class Page:
    """Serves the live page of a run on a port of 127.0.0.1 while it is open; nothing at all where ``port`` is None."""

    def __init__(self, folder: Path, port: int | None, console: Any) -> None:
        self.server: ThreadingHTTPServer | None = None
        if port is None:
            return
        try:
            self.server = _Server(("127.0.0.1", port), _handler(folder))
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
        trouble=trouble(seen),
        columns=COLUMNS,
        sites=[_cells(one) for one in seen["sites"]],
        shown=_shown,
        trust=[*judged_lines(seen["evaluation"]), *seen["trust"]],
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
