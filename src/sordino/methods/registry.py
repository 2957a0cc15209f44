"""The methods by name. ``register`` adds your own; ``get`` finds one and exchanges parts on request."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from sordino.client.ask import capped_loss
from sordino.client.clip import flat
from sordino.client.local import sgd
from sordino.client.projected import projected
from sordino.errors import BadInput
from sordino.methods import adaptive, fairness, selection
from sordino.methods.asking import Ask
from sordino.methods.method import Calibrate, Method
from sordino.server import after, rules

_METHODS: dict[str, Method] = {}

PARTS: dict[str, dict[str, Any]] = {
    "select": {
        "everyone": selection.everyone,
        "uniform": selection.uniform,
        "unbiased": selection.unbiased,
        "unbiased-compensated": selection.compensated,
        "privacy-aware": selection.privacy_aware,
        "power-of-choice": selection.power_of_choice,
    },
    "ask": {**adaptive.ASKS, **fairness.ASKS},
    "local": {"sgd": sgd, "projected": projected, **adaptive.LOCALS, **fairness.LOCALS},
    "clip": {"flat": flat, **adaptive.CLIPS, **fairness.CLIPS},
    "aggregate": {**rules.RULES, **adaptive.RULES, **fairness.RULES},
    "server": {**after.STEPS, **adaptive.STEPS},
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
    return replace(method, **{part: _part(part, choice) for part, choice in (overrides or {}).items()})


def _part(part: str, choice: Any) -> Any:
    if part == "calibrate":
        return _calibrate(choice)
    if part not in PARTS:
        raise BadInput(f"method.{part} is unknown: a method has the parts {', '.join([*PARTS, 'calibrate'])}")
    options = dict(choice) if isinstance(choice, Mapping) else {"name": choice}
    name = options.pop("name", None)
    if name not in PARTS[part]:
        raise BadInput(f"method.{part} = {name!r} is unknown: use one of {', '.join(PARTS[part])}")
    made = PARTS[part][name]
    try:
        if part in ("aggregate", "server"):
            _check_options(part, name, made, options)
            return partial(made, **options) if options else made
        return made(**options)
    except TypeError as error:
        raise BadInput(f"method.{part}: {error}") from None


def _calibrate(choice: Any) -> Calibrate:
    """``"rdp"``, or a table: ``{name = "rdp", strictest = true}``."""
    if not isinstance(choice, Mapping):
        return Calibrate(choice)
    options = {("by" if key == "name" else key): value for key, value in choice.items()}
    for key in options:
        if key not in ("by", "strictest"):
            raise BadInput(f"method.calibrate has no option {key!r}: use name, strictest")
    return Calibrate(**options)


def _check_options(part: str, name: str, made: Any, options: Mapping[str, Any]) -> None:
    """Refuse options that a rule does not have, before any record is touched: they are its keyword-only parameters."""
    parameters = inspect.signature(made).parameters.values()
    known = [one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        return
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            has = f"did you mean {near[0]!r}?" if near else f"use {', '.join(known)}" if known else "it has none"
            raise BadInput(f"method.{part} = {name!r} has no option {option!r}: {has}")


def _loudest() -> tuple[Ask, ...]:
    """Power-of-choice asks its candidates for their loss; the engine chooses by the answers."""
    return (Ask(capped_loss(bound=4.0), lambda answers, facts, state: state, share=0.1, of="candidates"),)


def _chosen(name: str, select: selection.Selection, summary: str, ask: tuple[Ask, ...] = ()) -> Method:
    """A method that draws clients: their updates are averaged, because the draw already weighs them."""
    return Method(name, select=select, ask=ask, aggregate=rules.uniform, summary=summary)


def _combined(name: str, summary: str) -> Method:
    return Method(name, aggregate=rules.RULES[name], summary=summary)


BUILT_IN = (
    Method("fedavg", private=False, summary="Federated averaging without privacy: the ceiling. NOT PRIVATE."),
    Method("dp-fedavg", summary="Every client its own noise; updates weighted by size."),
    Method(
        "minimum-epsilon",
        calibrate=Calibrate(strictest=True),
        summary="Everyone uses the noise of the strictest client; updates weighted by size.",
    ),
    _chosen("uniform", selection.uniform(), "A few clients a round, all equally likely."),
    _chosen("unbiased", selection.unbiased(), "A few clients a round, drawn in proportion to their records."),
    _chosen(
        "unbiased-compensated",
        selection.compensated(),
        "Privacy-aware draws with importance weights that keep the objective unbiased.",
    ),
    _chosen("privacy-aware", selection.privacy_aware(), "Draws clients to balance bias against noise (Problem 1)."),
    _chosen(
        "power-of-choice",
        selection.power_of_choice(),
        "Of some candidates, those with the largest released loss take part.",
        _loudest(),
    ),
    _combined("weiavg", "Updates weighted by ε."),
    _combined("pfa", "Noisy updates projected on the directions of the less noisy ones."),
    Method(
        "pfa-plus",
        local=projected(),
        aggregate=rules.RULES["pfa-plus"],
        summary="PFA in the basis of the round before: private clients upload a few coefficients.",
    ),
    _combined("robust-hdp", "Noise estimated by principal component pursuit; updates weighted by its inverse."),
    _combined("factor-hdp", "Noise estimated by factor analysis; updates weighted by its inverse (ours)."),
    _combined("random-effects", "Weights 1/(σ² + τ²): noise against how much clients differ (ours)."),
    _combined("declared-variance", "Updates weighted by the inverse of the noise that clients declare."),
    _combined("column-norm", "Updates weighted by the inverse of their squared norm."),
    _combined("optimum", "The oracle: inverse of the noise a simulation really used. Simulation only."),
    *adaptive.ADAPTIVE,
    *fairness.FAIR,
)
for _method in BUILT_IN:
    register(_method)
