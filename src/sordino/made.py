"""How a part of a method knows what made it: a factory and its options, which is the part's identity."""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from sordino.errors import BadInput

Options = ParamSpec("Options")
Value = TypeVar("Value", bound=Any)

_LABELS = ("name", "made")


@dataclass(frozen=True)
class Made:
    """The factory that made a part, as ``module:name``, all its options, defaults included, and the fields it set.

    A part that was changed afterwards (``dataclasses.replace``) has other fields: it is not what the factory made.
    """

    factory: str
    options: tuple[tuple[str, Any], ...]
    fields: tuple[tuple[str, Any], ...] = field(default=(), compare=False, repr=False)

    def still(self, value: Any) -> bool:
        """Whether this is the value that the factory made, with none of its fields exchanged."""
        whole = {one.name for one in fields(value)} - set(_LABELS) == set(dict(self.fields))
        return whole and all(getattr(value, name) is held for name, held in self.fields)


def part(
    *, named: bool = False, more: type | None = None
) -> Callable[[Callable[Options, Value]], Callable[Options, Value]]:
    """Mark a factory of parts: the values it makes carry a ``Made``, and its options can be listed (``options_of``).

    Parameters
    ----------
    named: whether the options that were given are shown in the value's name: ``robust-hdp(every=5)``.
    more: the dataclass whose fields are options too, where the factory takes them as ``**options``.
    """

    def around(factory: Callable[Options, Value]) -> Callable[Options, Value]:
        signature = inspect.signature(factory)

        @wraps(factory)
        def make(*args: Options.args, **kwargs: Options.kwargs) -> Value:
            value = factory(*args, **kwargs)
            given = signature.bind(*args, **kwargs)
            if named and given.arguments:
                shown = ", ".join(f"{key}={option}" for key, option in given.arguments.items())
                value = replace(value, name=f"{value.name}({shown})")
            given.apply_defaults()
            told = dict(given.arguments)
            if more is not None:
                rest = told.pop(_rest(signature))
                told = {**{one.name: one.default for one in fields(more)}, **told, **rest}
            held = tuple((one.name, getattr(value, one.name)) for one in fields(value) if one.name not in _LABELS)
            made = Made(f"{factory.__module__}:{factory.__qualname__}", tuple(sorted(told.items())), held)
            return replace(value, made=made)

        make.__dict__["more"] = more
        return make

    return around


def _rest(signature: inspect.Signature) -> str:
    """The name of the parameter that takes all other keywords."""
    kind = inspect.Parameter.VAR_KEYWORD
    return next(one.name for one in signature.parameters.values() if one.kind is kind)


def is_factory(value: Any) -> bool:
    """Whether somebody marked this as a factory of parts (``part``)."""
    return isinstance(value, types.FunctionType) and "more" in vars(value)


def options_of(factory: Callable[..., Any]) -> list[str]:
    """The names of a factory's options."""
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    names = [one.name for one in inspect.signature(factory).parameters.values() if one.kind not in kinds]
    more = getattr(factory, "more", None)
    return names + ([one.name for one in fields(more) if one.name not in names] if more else [])


def imported(spec: str, what: str, modules: Collection[str] | None = None) -> Any:
    """What ``module:attribute`` names, imported from what is installed here or lies in the working directory.

    ``what`` is what the caller is looking for, for messages; ``modules``: those that may be imported (None: any).
    """
    module, _, attribute = spec.partition(":")
    if not (all(word.isidentifier() for word in module.split(".")) and attribute.isidentifier()):
        raise BadInput(f"{what} {spec!r} is not a name: write module:attribute, such as my_methods:my_rule")
    if modules is not None and module not in modules:
        allowed = f"this site allows {', '.join(modules)}" if modules else "this site allows none (limits.modules)"
        raise BadInput(f"{what} {spec!r} comes from the module {module!r}, which is not allowed here: {allowed}")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise BadInput(f"{what} {spec!r}: cannot import {module!r} ({error}); is its folder on PYTHONPATH?") from None
    if not hasattr(found, attribute):
        raise BadInput(f"{what} {spec!r}: {module!r} has nothing called {attribute!r}")
    return getattr(found, attribute)
