"""A page as one file: a template filled with plain values, style, script and data inside it, written whole."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from sordino._version import __version__
from sordino.engine.checkpoint import write_atomic
from sordino.errors import BadInput
from sordino.privacy.attacker import at_most
from sordino.study.report import numbers


def filled(template: str, **values: Any) -> str:
    """The template that lies beside this file, filled in; on a page every value is escaped: a name is only text."""
    return _templates().get_template(template).render(values)


@cache
def _templates() -> Environment:
    found = Environment(
        loader=PackageLoader("sordino.study.report", ""),
        autoescape=lambda template: template is None or template.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # JSON inside a script element: tojson writes no "<", and a number that is not finite is an error.
    found.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": False, "allow_nan": False}
    found.globals |= {"asset": _asset, "plotly": _plotly, "missing": numbers.MISSING, "version": __version__}
    for word in ("plain", "percent", "span", "plus_minus", "listed", "duration", "certainty"):
        found.filters[word] = getattr(numbers, word)
    found.filters |= {
        "at_most": at_most,
        "md": in_markdown,
        "epsilon": numbers.as_epsilon,
        "epsilons": _epsilons,
        "counted": _counted,
        "sortable": _sortable,
    }
    return found


def in_markdown(text: Any) -> str:
    """A text that is only text in Markdown: a name can neither break a table nor become markup."""
    told = " ".join(str(text).split()).replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{one}" if one in "|`*_[]" else one for one in told)


def _asset(name: str) -> Markup:
    """A style sheet or a script of ours, which goes into the page as it is."""
    return Markup(resources.files(__package__).joinpath(name).read_text(encoding="utf-8"))


def _plotly() -> Markup:
    """The source of plotly.js as the installed package ships it. Imported here: nothing else needs plotly."""
    from plotly.offline import get_plotlyjs

    return Markup(get_plotlyjs())


def _epsilons(values: Sequence[float]) -> str:
    return numbers.span(values, numbers.as_epsilon)


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'s' if count > 1 else ''}"


def _sortable(value: float) -> float:
    """What a column sorts by: infinity after every number."""
    return value if math.isfinite(value) else 1e300


def write_page(page: str, path: str | os.PathLike[str]) -> Path:
    """Write a page to ``path``, whole or not at all: an earlier file stays until the new one is complete."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"the page cannot be written to {target}: {error.strerror}; name another file") from error
    write_atomic(target, page.encode())
    return target
