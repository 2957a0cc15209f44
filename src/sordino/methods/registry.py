"""The methods by name. ``register`` adds your own; ``get`` finds one and exchanges parts on request."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from sordino.client.clip import flat
from sordino.client.local import sgd
from sordino.errors import BadInput
from sordino.methods.method import Calibrate, Method
from sordino.methods.selection import everyone
from sordino.server import after, rules

_METHODS: dict[str, Method] = {}

PARTS: dict[str, dict[str, Any]] = {
    "select": {"everyone": everyone},
    "local": {"sgd": sgd},
    "clip": {"flat": flat},
    "aggregate": rules.RULES,
    "server": after.STEPS,
}
"""What ``[method]`` in a study may put in place of a part: a name, or a table with the name and its options."""


def register(method: Method, *, replace_existing: bool = False) -> Method:
    """Make a method available by its name, to studies and the command line too."""
    if method.name in _METHODS and not replace_existing:
        raise BadInput(f"a method {method.name!r} exists already: choose another name, or pass replace_existing=True")
    _METHODS[method.name] = method
    return method


def names() -> list[str]:
    """All registered names, in the order of registration."""
    return list(_METHODS)


def get(method: str | Method, overrides: Mapping[str, Any] | None = None) -> Method:
    """A method by name, with parts exchanged: ``{"aggregate": "uniform"}``, ``{"calibrate": "rdp"}``."""
    if isinstance(method, str):
        if method not in _METHODS:
            near = difflib.get_close_matches(method, _METHODS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(_METHODS)}"
            raise BadInput(f"method {method!r} is unknown: {hint}")
        method = _METHODS[method]
    for part, choice in (overrides or {}).items():
        method = replace(method, **{part: _part(part, choice)})
    return method


def _part(part: str, choice: Any) -> Any:
    if part == "calibrate":
        return Calibrate(**choice) if isinstance(choice, Mapping) else Calibrate(choice)
    if part not in PARTS:
        raise BadInput(f"method.{part} is unknown: a method has the parts {', '.join([*PARTS, 'calibrate'])}")
    options = dict(choice) if isinstance(choice, Mapping) else {"name": choice}
    name = options.pop("name", None)
    if name not in PARTS[part]:
        raise BadInput(f"method.{part} = {name!r} is unknown: use one of {', '.join(PARTS[part])}")
    made = PARTS[part][name]
    try:
        if part in ("aggregate", "server"):
            return partial(made, **options) if options else made
        return made(**options)
    except TypeError as error:
        raise BadInput(f"method.{part}: {error}") from None


for _method in (
    Method("fedavg", private=False, summary="Federated averaging without privacy: the ceiling. NOT PRIVATE."),
    Method("dp-fedavg", summary="Every client its own noise; updates weighted by size."),
    Method(
        "minimum-epsilon",
        calibrate=Calibrate(strictest=True),
        summary="Everyone uses the noise of the strictest client; updates weighted by size.",
    ),
):
    register(_method)
