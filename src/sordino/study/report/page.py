"""A page as one file: template, style, script and data put together, written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from sordino.errors import BadInput


def asset(name: str) -> str:
    """A file that lies beside this one."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def script(name: str) -> str:
    """What all pages share, then the page's own script, inside one function: nothing is global."""
    return f'"use strict";\n(() => {{\n{asset("common.js")}\n{asset(name)}}})();\n'


def plotly() -> str:
    """The source of plotly.js as the installed package ships it. Imported here: nothing else needs plotly."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def filled(name: str, parts: Mapping[str, str]) -> str:
    """The template with every ``{{name}}`` replaced, in one pass: what is put in is never searched for names again."""
    pieces = asset(name).split("{{")
    done = [pieces[0]]
    for piece in pieces[1:]:
        key, _, rest = piece.partition("}}")
        done += [parts[key.strip()], rest]
    return "".join(done)


def as_json(value: Any) -> str:
    """JSON that may stand inside a script element: no ``<`` can end it, nothing but finite numbers."""
    dumped = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return dumped.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def write_page(page: str, path: str | os.PathLike[str]) -> Path:
    """Write a page to ``path``; an earlier file stays until the new one is complete."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(page)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).chmod(0o644)
            Path(temporary).replace(target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise BadInput(f"the page cannot be written to {target}: {reason}; free space or name another file") from error
    return target
