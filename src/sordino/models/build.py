"""From a name, a ``module:factory`` string or a module to a network with reproducible first weights."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sordino.errors import BadInput
from sordino.models import residual, zoo

Factory = Callable[..., nn.Module]

_ZOO: dict[str, Factory] = {
    "linear": zoo.linear,
    "logistic": zoo.logistic,
    "mlp": zoo.mlp,
    "cnn-small": zoo.cnn_small,
    "random-features": zoo.random_features,
    "robust-hdp-cnn": zoo.robust_hdp_cnn,
    "tramer-mnist": zoo.tramer_mnist,
    "tramer-cifar": zoo.tramer_cifar,
    "fedavg-cnn": zoo.fedavg_cnn,
    "resnet18-gn": residual.resnet18_gn,
    "mobilenetv2-gn": residual.mobilenetv2_gn,
}


def names() -> list[str]:
    """Names that ``build`` knows, in the order of the documentation."""
    return list(_ZOO)


def build(
    spec: str | nn.Module, shape: tuple[int, ...], classes: int | None, seed: int = 0, **options: Any
) -> nn.Module:
    """Build a network for records of one shape.

    Parameters
    ----------
    spec
        A name of :func:`names`, ``"module:factory"`` (called as ``factory(shape, classes, **options)``), or an
        ``nn.Module``, which is returned as it is.
    shape
        Shape of one record without the batch axis: ``(features,)`` or ``(channels, height, width)``.
    classes
        Number of labels, or None for regression, which gets one output.
    seed
        Seed of the first weights. They are the same whatever the state of the global generator, which is left
        as it was found.
    **options
        Passed to the factory, such as ``hidden=512`` for ``random-features``.
    """
    if isinstance(spec, nn.Module):
        if options:
            raise BadInput(f"model options {sorted(options)} were given together with a ready module; drop them")
        return spec
    shape = _checked_shape(shape)
    if classes is not None and classes < 2:
        raise BadInput(f"classes = {classes}: a classifier needs at least 2 labels; use classes=None for regression")
    factory = _factory(spec)
    _refuse_unknown_options(spec, factory, options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = factory(shape, classes, **options)
    if not isinstance(model, nn.Module):
        raise BadInput(f"model '{spec}' returned a {type(model).__name__}; a factory must return a torch.nn.Module")
    return model


def check_spec(spec: str, options: dict[str, Any]) -> None:
    """Refuse a name that ``build`` does not know, or options that the model does not have, before anything is built."""
    _refuse_unknown_options(spec, _factory(spec), options)


def _checked_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    sizes = tuple(int(size) for size in shape)
    if not sizes or min(sizes) < 1:
        raise BadInput(f"record shape {shape} has an empty axis; give (features,) or (channels, height, width)")
    return sizes


def _factory(spec: str) -> Factory:
    if spec in _ZOO:
        return _ZOO[spec]
    if ":" not in spec:
        near = difflib.get_close_matches(spec, _ZOO, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise BadInput(
            f"unknown model '{spec}' (model.name): {hint}known: {', '.join(_ZOO)}, or your own as 'module:factory'"
        )
    module_name, _, attribute = spec.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise BadInput(
            f"model '{spec}': cannot import '{module_name}' ({error}); is its folder on PYTHONPATH?"
        ) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise BadInput(f"model '{spec}': '{module_name}' has no function '{attribute}'")
    chosen: Factory = factory
    return chosen


def _refuse_unknown_options(spec: str, factory: Factory, options: dict[str, Any]) -> None:
    accepted = inspect.signature(factory).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        return
    unknown = sorted(set(options) - set(list(accepted)[2:]))
    if unknown:
        known = ", ".join(list(accepted)[2:]) or "none"
        raise BadInput(f"model '{spec}' has no option {', '.join(unknown)}; its options: {known}")
