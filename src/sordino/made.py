"""How a part of a method knows what made it: a factory and its options, which is the part's identity."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, ParamSpec, TypeVar

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


@dataclass(frozen=True)
class Factory(Generic[Options, Value]):
    """A function that makes parts, marked as such (``@part``): what it makes carries a ``Made``.

    ``more``: the dataclass whose fields are options too, where the function takes them as ``**options``. The options
    that were given are shown in the name of what one's own factories make, and of a value whose class says so
    (``shows_options``): ``robust-hdp(every=5)``.
    """

    make: Callable[Options, Value]
    more: type | None = None

    @property
    def __wrapped__(self) -> Callable[Options, Value]:
        return self.make

    @property
    def __name__(self) -> str:
        return self.make.__name__

    def __call__(self, *args: Options.args, **kwargs: Options.kwargs) -> Value:
        """Make a part with these options."""
        value = self.make(*args, **kwargs)
        signature = inspect.signature(self.make)
        given = signature.bind(*args, **kwargs)
        own = not self.make.__module__.startswith("sordino.")
        if (
            given.arguments
            and (own or getattr(value, "shows_options", False))
            and "(" not in getattr(value, "name", "(")
        ):
            shown = ", ".join(f"{key}={option}" for key, option in given.arguments.items())
            value = replace(value, name=f"{value.name}({shown})")
        given.apply_defaults()
        told = dict(given.arguments)
        if self.more is not None:
            others = [one.name for one in signature.parameters.values() if one.kind is one.VAR_KEYWORD]
            told = {**{one.name: one.default for one in fields(self.more)}, **told, **told.pop(others[0])}
            del told[others[0]]
        held = tuple((one.name, getattr(value, one.name)) for one in fields(value) if one.name not in _LABELS)
        made = Made(f"{self.make.__module__}:{self.make.__qualname__}", tuple(sorted(told.items())), held)
        return replace(value, made=made)


part = Factory
"""``@part`` above a function marks it as a factory of parts."""


def options_of(factory: Callable[..., Any]) -> list[str]:
    """The names of a factory's options."""
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    names = [one.name for one in inspect.signature(factory).parameters.values() if one.kind not in kinds]
    more = factory.more if isinstance(factory, Factory) else None
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
