"""What a network is asked for, checked before it is built: a name or a module, and options of the right kind."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

import torch
from torch import nn

from sordino.errors import BadInput

log = logging.getLogger("sordino.models")


def check_kind(spec: Any) -> None:
    """Refuse what is neither a name nor a module: a class, a function, None."""
    if isinstance(spec, (str, nn.Module)):
        return
    if isinstance(spec, type) and issubclass(spec, nn.Module):
        raise BadInput(f"model is the class {spec.__name__}: give one of its modules, {spec.__name__}(…)")
    if callable(spec):
        name = getattr(spec, "__name__", type(spec).__name__)
        raise BadInput(f"model is {name!r}, which makes one: give what it returns, or its name as 'module:factory'")
    raise BadInput(f"model is {spec!r}: give a name such as 'auto' or 'mlp', 'module:factory', or a torch.nn.Module")


def check_options(name: str, factory: Callable[..., nn.Module], options: Mapping[str, Any]) -> None:
    """Refuse options that a built-in network does not have, or of another kind than their defaults."""
    accepted = inspect.signature(factory).parameters
    own = list(accepted)[2:]
    unknown = sorted(set(options) - {*own, "features", "lora"})
    if unknown and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        raise BadInput(f"model '{name}' has no option {', '.join(unknown)}; its options: {', '.join(own) or 'none'}")
    if ":" in name:  # of one's own: what its options may be is its own business
        return
    for key in sorted(set(options) & set(own)):
        value, usual = options[key], accepted[key].default
        whole = isinstance(usual, int) and not isinstance(usual, bool)
        if whole and (not isinstance(value, Integral) or isinstance(value, bool) or value < 1):
            raise BadInput(f"model '{name}': {key} = {value!r}: it is one whole number ≥ 1, such as {usual}")
        if isinstance(usual, (bool, str)) and not isinstance(value, type(usual)):
            told = "true or false" if isinstance(usual, bool) else f"a word, such as {usual!r}"
            raise BadInput(f"model '{name}': {key} = {value!r}: it is {told}")


def with_vocabulary(
    name: str, factory: Callable[..., nn.Module], options: Mapping[str, Any], tokens: int | None
) -> dict[str, Any]:
    """The options with the ``vocabulary`` of a network that reads token ids, of which there are ``tokens``.

    Refuses a network for numbers where records are token ids, and one for token ids where they are numbers.
    """
    reads = "vocabulary" in inspect.signature(factory).parameters
    if tokens is None:
        if reads and "vocabulary" not in options:
            raise BadInput(
                f"model '{name}' reads text, and these records are numbers: declare a text column as "
                "[data.schema.text], or take another model, such as 'auto'"
            )
        return dict(options)
    if not reads and ":" not in name:
        raise BadInput(
            f"model '{name}' takes numbers, and these records are texts: use 'text-bag' or 'text-encoder', or put "
            "features of your own before it"
        )
    if options.get("vocabulary", tokens) != tokens:
        raise BadInput(
            f"model '{name}': vocabulary = {options['vocabulary']!r}, and the records have {tokens} token ids: leave "
            "it out, it follows from the schema"
        )
    return {**options, **({"vocabulary": tokens} if reads else {})}


def in_single_precision(model: nn.Module) -> nn.Module:
    """The model itself, or where its weights are of another precision a copy of it in float32.

    Records, noise and what clients send are float32, so a float64 or half-precision model trains as its float32 copy.
    """
    others = {str(one.dtype) for one in model.parameters() if one.is_floating_point() and one.dtype != torch.float32}
    if not others:
        return model
    log.warning("the model's weights are %s: a copy in torch.float32 is trained", ", ".join(sorted(others)))
    return copy.deepcopy(model).float()
