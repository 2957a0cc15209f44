"""Features by name: fixed maps that a study puts before its model. None looks at more than one record.

``features = "scatter"``, or with options ``{name = "binned", bins = 16}``, or ``"module:factory"`` for an extractor of
one's own, such as a network that was trained on public data.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Collection, Mapping
from itertools import combinations_with_replacement
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from sordino.errors import BadInput
from sordino.made import imported
from sordino.models.fixed import Features, FixedFeatures
from sordino.models.isolation import OneByOne, dtype_of, isolated
from sordino.models.scatter import Intercept, UnitLength, features_of, scattered

Shape = tuple[int, ...]
Spec = str | Mapping[str, Any]
"""A name, or a table with the name and its options."""

Own = TypeVar("Own", bound=Callable[..., nn.Module])

MOST = 200_000
"""More features than this a record are refused before anything is built for them."""

_MARK = "_makes_features"


def extractor(factory: Own) -> Own:
    """Mark a factory of features: a site calls no other function of the modules that it allows."""
    setattr(factory, _MARK, True)
    return factory


@isolated
class Products(nn.Module):
    """All products of one to ``degree`` of a record's d numbers."""

    def __init__(self, count: int, degree: int) -> None:
        super().__init__()
        self.count, self.degree = count, degree
        self.size = math.comb(count + degree, degree) - 1
        for many in range(2, degree + 1):
            places = torch.tensor(list(combinations_with_replacement(range(count), many)), device="cpu")
            self.register_buffer(f"places{many}", places.t().contiguous(), persistent=False)

    def extra_repr(self) -> str:
        """What the map is made by."""
        return f"{self.count}, degree={self.degree}"

    def forward(self, x: Tensor) -> Tensor:
        """Products of a batch of flat records."""
        found = [x]
        for many in range(2, self.degree + 1):
            first, *others = self.get_buffer(f"places{many}")
            product = x[:, first]
            for places in others:
                product = product * x[:, places]
            found.append(product)
        return torch.cat(found, 1)


@isolated
class Bins(nn.Module):
    """Every number x in [low, high] as ``bins`` numbers, which sum to 1, less their mean 1/bins.

    Soft: the hat functions max(0, 1 − |x − c_k|/w) around c_k = low + k·w, w = (high − low)/(bins − 1), of which two
    are not 0; a linear head on them is a broken line. Hard: 1 for the bin that x is in, else 0. The first ``columns``
    numbers are binned, the others (such as the 0 and 1 of categories) stay as they are.
    """

    def __init__(self, count: int, columns: int, bins: int, low: float, high: float, soft: bool) -> None:
        super().__init__()
        self.count, self.columns, self.bins, self.low, self.high, self.soft = count, columns, bins, low, high, soft
        self.size = columns * bins + count - columns

    def extra_repr(self) -> str:
        """What the map is made by."""
        kind = "soft" if self.soft else "hard"
        return f"{self.columns} of {self.count}, {self.bins} {kind} bins in [{self.low}, {self.high}]"

    def forward(self, x: Tensor) -> Tensor:
        """Bins of a batch of flat records."""
        inside = ((x[:, : self.columns] - self.low) / (self.high - self.low)).clamp(0, 1)[:, :, None]
        places = torch.arange(self.bins, device=x.device, dtype=x.dtype)
        if self.soft:
            found = (1 - (inside * (self.bins - 1) - places).abs()).clamp(min=0)
        else:
            found = ((inside * self.bins).floor().clamp(max=self.bins - 1) == places).to(x.dtype)
        return torch.cat([found.flatten(1) - 1 / self.bins, x[:, self.columns :]], 1)


Made = tuple[list[nn.Module], Shape]
"""The modules of a map, and the shape of one record's features."""


def _scatter(shape: Shape, angles: int = 6) -> Made:
    """Normed scattering coefficients of images (:mod:`scatter`), as a map of length 1 with the places of an image."""
    maps, out = scattered(shape, angles), features_of(shape, angles)
    return [*maps, nn.Flatten(), UnitLength(), nn.Unflatten(1, out)], out


def _unit(shape: Shape) -> Made:
    """x/‖x‖ and a constant: a record's numbers divided by their length."""
    return [nn.Flatten(), UnitLength(), Intercept()], (math.prod(shape) + 1,)


def _random(shape: Shape, hidden: int = 128) -> Made:
    """relu(x·W + c) with W and c drawn by the study's seed, as ``random-features`` has it."""
    _whole("random", "hidden", hidden, 1, MOST)
    return [nn.Flatten(), FixedFeatures(math.prod(shape), hidden)], (hidden,)


def _polynomial(shape: Shape, degree: int = 2) -> Made:
    """Products of numbers, of length 1; numbers and products grow differently, so that a record's size still shows."""
    _whole("polynomial", "degree", degree, 2, 8)
    count = math.prod(shape)
    size = math.comb(count + degree, degree) - 1
    if size > MOST:
        raise BadInput(
            f"features 'polynomial': {count} numbers have {size} products of degree up to {degree}, more than {MOST}: "
            "use a smaller degree, or 'random' or 'binned'"
        )
    return [nn.Flatten(), Products(count, degree), UnitLength(), Intercept()], (size + 1,)


def _binned(
    shape: Shape, bins: int = 4, soft: bool = True, low: float = 0.0, high: float = 1.0, columns: int | None = None
) -> Made:
    """Bins over the range that encoded numbers have, [0, 1], or [−1, 1] under ``scale = "signed"``; of length 1."""
    count = math.prod(shape)
    binned = count if columns is None else columns
    _whole("binned", "columns", binned, 0, count)
    _whole("binned", "bins", bins, 2, max(2, MOST // max(1, binned)))
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise BadInput(
            f"features 'binned': low = {low} and high = {high}: the range of encoded numbers, such as 0 and 1"
        )
    module = Bins(count, binned, bins, float(low), float(high), bool(soft))
    return [nn.Flatten(), module, UnitLength(), Intercept()], (module.size + 1,)


def _whole(name: str, option: str, value: Any, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise BadInput(f"features '{name}': {option} = {value!r}: a whole number from {least} to {most}")


_BUILT_IN: dict[str, Callable[..., Made]] = {
    "scatter": _scatter,
    "unit": _unit,
    "random": _random,
    "polynomial": _polynomial,
    "binned": _binned,
}


def check_features(spec: Spec, modules: Collection[str] | None = None) -> Callable[..., Any]:
    """The factory that a study's ``features`` names; refuses names, options and modules that it must not name.

    ``modules``: those that may be imported (None: any). Where they are limited, at a site, somebody else chose the
    name: only a factory that is marked with :func:`extractor`, and was written in that module, is called then.
    """
    name, options = parsed(spec)
    factory: Callable[..., Any]
    if ":" in name:
        factory = imported(name, "features", modules)
        if not callable(factory):
            raise BadInput(f"features '{name}' is a {type(factory).__name__}: it has to be a function of a shape")
        marked = getattr(factory, _MARK, False) is True and getattr(factory, "__module__", None) in (modules or ())
        if modules is not None and not marked:
            raise BadInput(
                f"features '{name}' is not marked as a factory of features: a site calls nothing else "
                "(@sordino.models.extractor above its definition marks it)"
            )
    elif name in _BUILT_IN:
        factory = _BUILT_IN[name]
    else:
        near = difflib.get_close_matches(name, _BUILT_IN, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise BadInput(
            f"unknown features '{name}' (model.features): {hint}known: {', '.join(_BUILT_IN)}, or your own as "
            "'module:factory'"
        )
    accepted = inspect.signature(factory).parameters
    unknown = sorted(set(options) - set(list(accepted)[1:]))
    if unknown and not any(one.kind is one.VAR_KEYWORD for one in accepted.values()):
        has = ", ".join(list(accepted)[1:]) or "none"
        raise BadInput(f"features '{name}' have no option {', '.join(unknown)}; their options: {has}")
    return factory


def parsed(spec: Spec) -> tuple[str, dict[str, Any]]:
    """The name and the options in what a study says."""
    options = {"name": spec} if isinstance(spec, str) else dict(spec) if isinstance(spec, Mapping) else {}
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise BadInput(f"model.features = {spec!r}: a name, or a table such as {{name = 'binned', bins = 16}}")
    return name, options


def make_features(spec: Spec, shape: Shape, tokens: int | None = None) -> Features:
    """The fixed map that a study names, for records of a shape; ``tokens``: of token ids, where they are no numbers."""
    name, options = parsed(spec)
    factory = check_features(spec)
    if name in _BUILT_IN and tokens is not None:
        raise BadInput(
            f"features '{name}' are made of numbers, and these records are token ids of texts: leave them out, or put "
            "'module:factory' there, such as word vectors that are public"
        )
    if name in _BUILT_IN:
        try:
            maps, out = factory(shape, **options)
        except TypeError as error:
            raise BadInput(f"features '{name}': {error}") from None
        return Features(name, options, out, *maps)
    with torch.device("cpu"):  # it may hold weights that were read from a file
        inner = factory(shape, **options)
        if not isinstance(inner, nn.Module):
            raise BadInput(f"features '{name}' made a {type(inner).__name__}; a factory must return a torch.nn.Module")
        alone = OneByOne(inner)
        try:
            with torch.no_grad():
                found = alone(torch.zeros((2, *shape), dtype=dtype_of(tokens)))
        except Exception as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise BadInput(f"features '{name}' cannot process a record of shape {tuple(shape)}: {reason}") from error
    if found.dim() < 2 or len(found) != 2 or not found.is_floating_point():
        raise BadInput(f"features '{name}' give {tuple(found.shape)} for 2 records: they must give numbers for each")
    return Features(name, options, tuple(found.shape[1:]), alone)
