"""The live page of a deployed run: the report, as far as it goes, and who was seen, on a port of 127.0.0.1."""

from __future__ import annotations

import json
import threading
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from sordino.errors import BadInput, SordinoError
from sordino.study.report import render
from sordino.study.result import complete, from_json, read_result, to_json
from sordino.study.status import headline, line_of, look, rounds_of

EVERY = 5
"""Seconds after which the page loads itself again."""


class Page:
    """Serves the page while it is open; nothing at all where ``port`` is None."""

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
        """Two addresses: the page, and the same facts as JSON."""

        def do_GET(self) -> None:
            """Answer from the folder's files as they are now."""
            try:
                if self.path == "/status.json":
                    self._say(200, "application/json", json.dumps(look(folder)))
                elif self.path == "/":
                    self._say(200, "text/html; charset=utf-8", page(folder))
                else:
                    self._say(404, "text/plain; charset=utf-8", "there is / and /status.json")
            except SordinoError as error:
                self._say(503, "text/plain; charset=utf-8", f"not yet: {error}")

        def _say(self, code: int, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing in the terminal."""

    return Handler


def page(folder: Path) -> str:
    """The page as one HTML document: who was seen, and below it the report on the rounds so far."""
    seen = look(folder)
    result = _result(folder, seen)
    again = "" if seen["state"] == "finished" else f'<meta http-equiv="refresh" content="{EVERY}">'
    live = _live(seen)
    if result is None:
        title = escape(headline(seen))
        return f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>{again}<body>{live}</body>'
    document = render([result], title=headline(seen))
    return document.replace("</head>", f"{again}</head>", 1).replace("<main", f"{live}<main", 1)


def _live(seen: dict[str, Any]) -> str:
    """The table of sites and the last rounds."""
    columns = ("site", "records", "epsilon", "payable", "answered", "missed", "last_seen", "spent_epsilon")
    words = ("site", "records", "ε", "rounds it can pay", "answered", "missed", "last round seen", "ε spent")
    head = "".join(f"<th>{escape(word)}</th>" for word in words)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(_cell(one[column]))}</td>" for column in columns) + "</tr>"
        for one in seen["sites"]
    )
    refusals = [f"{one['site']}: {why}" for one in seen["sites"] for why in one["refused"]]
    said = "".join(f"<li>{escape(text)}</li>" for text in refusals) or "<li>nobody refused anything</li>"
    last = "".join(f"<li>{escape(line_of(one, seen['rounds']))}</li>" for one in seen["last"])
    return (
        f'<section id="live" style="max-width:72rem;margin:1rem auto;padding:0 1rem"><h2>{escape(headline(seen))}</h2>'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        f"<h3>Refusals</h3><ul>{said}</ul><h3>Last rounds</h3><ul>{last}</ul></section>"
    )


def _cell(value: Any) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _result(folder: Path, seen: dict[str, Any]) -> dict[str, Any] | None:
    """The result, or what there is of it after the rounds so far."""
    done = folder / "result.json"
    if done.exists():
        return json.loads(to_json(read_result(done)))  # type: ignore[no-any-return]
    about, history = folder / "study.json", rounds_of(folder)
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
