"""The methods by name. ``register`` adds your own; ``get`` finds one and exchanges parts on request.

A name may be ``module:attribute`` wherever a method or a part is named: then it is imported, a value or a factory.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from sordino.client import clip, corrections, local, moments, personal
from sordino.errors import BadInput
from sordino.made import Factory, imported, options_of
from sordino.methods import asking, selection
from sordino.methods.built_in import PARTS_OF, SUMMARIES
from sordino.methods.calibrate import Calibrate
from sordino.methods.method import KINDS, Method
from sordino.server import after, fair, radius, rules
from sordino.server.moments import least_squares
from sordino.server.personal import PERSONAL_RULES

_METHODS: dict[str, Method] = {}

PARTS: dict[str, dict[str, Callable[..., Any]]] = {
    "select": {
        "everyone": selection.everyone,
        "uniform": selection.uniform,
        "unbiased": selection.unbiased,
        "unbiased-compensated": selection.compensated,
        "privacy-aware": selection.privacy_aware,
        "power-of-choice": selection.power_of_choice,
    },
    "ask": {
        "squared-norm": asking.squared_norm,
        "under-radius": asking.under_radius,
        "loss": asking.loss,
        "nothing": lambda: (),
    },
    "local": {
        "sgd": local.sgd,
        "projected": local.projected,
        "averaged": local.averaged,
        "fair": local.fair_step,
        "scaffold": corrections.scaffold,
        "fedprox": corrections.fedprox,
        "feddyn": corrections.feddyn,
        "moments": moments.moments,
        "mr-mtl": personal.mr_mtl,
        "fine-tuned": personal.fine_tuned,
    },
    "clip": {"flat": clip.flat, "moving": clip.moving, "automatic": clip.automatic, "fair": clip.fair},
    "aggregate": {
        **rules.RULES,
        "averaged": radius.averaged,
        **fair.FAIR_RULES,
        **PERSONAL_RULES,
        "least-squares": least_squares,
    },
    "server": after.STEPS,
}
"""What ``[method]`` in a study may put in place of a part: a name, or a table with the name and its options."""


def register(method: Method, *, replace_existing: bool = False) -> Method:
    """Make a method available by its name, to studies and the command line too."""
    if method.name in names() and not replace_existing:
        raise BadInput(f"a method {method.name!r} exists already: choose another name, or pass replace_existing=True")
    _METHODS[method.name] = method
    return method


def names() -> list[str]:
    """All names of methods: those that come with sordino, then those that were registered."""
    return list(dict.fromkeys([*PARTS_OF, *_METHODS]))


def get(
    method: str | Method, overrides: Mapping[str, Any] | None = None, modules: Collection[str] | None = None
) -> Method:
    """A method by name, with parts exchanged: ``{"aggregate": "uniform"}``, ``{"calibrate": "rdp"}``.

    ``modules``: the modules that names like ``module:attribute`` may come from; None: any. Where they are limited, at a
    site, somebody else chose the names: methods must be values then, and only marked factories of parts are called.
    """
    if isinstance(method, str) and ":" in method:
        found = imported(method, "method", modules)
        if modules is None and callable(found):
            found = _called(f"method {method!r}", found, {})
        if not isinstance(found, Method):
            raise BadInput(f"method {method!r} is a {type(found).__name__}: it has to be a sordino.Method")
        method = found
    elif isinstance(method, str):
        if method not in _METHODS and method in PARTS_OF:
            _METHODS[method] = Method(method, summary=SUMMARIES[method], **PARTS_OF[method]())
        if method not in _METHODS:
            near = difflib.get_close_matches(method, names(), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names())}, or module:attribute"
            raise BadInput(f"method {method!r} is unknown: {hint}")
        method = _METHODS[method]
    elif not isinstance(method, Method):
        raise BadInput(f"method is {method!r}: give a name such as 'auto' or 'dp-fedavg', or a value sd.Method(…)")
    return replace(method, **{part: _part(part, choice, modules) for part, choice in (overrides or {}).items()})


def _part(part: str, choice: Any, modules: Collection[str] | None) -> Any:
    """A part from what a study says: a name, or a table with the name and its options."""
    if part == "calibrate":
        return _called(
            "method.calibrate", _calibrate, dict(choice) if isinstance(choice, Mapping) else {"name": choice}
        )
    if part not in PARTS:
        raise BadInput(f"method.{part} is unknown: a method has the parts {', '.join([*PARTS, 'calibrate'])}")
    options = dict(choice) if isinstance(choice, Mapping) else {"name": choice}
    name = options.pop("name", None)
    if isinstance(name, str) and ":" in name:
        made = imported(name, f"method.{part}", modules)
    elif name in PARTS[part]:
        made = PARTS[part][name]
    else:
        raise BadInput(
            f"method.{part} = {name!r} is unknown: use one of {', '.join(PARTS[part])}, or your own as module:attribute"
        )
    if isinstance(made, KINDS[part]):
        if options:
            raise BadInput(f"method.{part} = {name!r} is a ready value and has no options: name a factory instead")
        return made
    if not callable(made):
        raise BadInput(f"method.{part} = {name!r} is a {type(made).__name__}, not a {KINDS[part].__name__}")
    if modules is not None and ":" in str(name) and not (isinstance(made, Factory) and made.make.__module__ in modules):
        raise BadInput(
            f"method.{part} = {name!r} is not marked as a factory of parts: a site calls nothing else "
            "(@sordino.parts.part above its definition marks it)"
        )
    return _called(f"method.{part} = {name!r}", made, options)


def _calibrate(name: str = "tight", strictest: bool = False, shares: str = "limit") -> Calibrate:
    return Calibrate(name, strictest, shares)


def _called(where: str, factory: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """What a factory makes with these options; one that it does not have is refused with the nearest that it has."""
    known = options_of(factory)
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            has = f"did you mean {near[0]!r}?" if near else f"use {', '.join(known)}" if known else "it has none"
            raise BadInput(f"{where} has no option {option!r}: {has}")
    try:
        return factory(**options)
    except TypeError as error:
        raise BadInput(f"{where}: {error}") from None
