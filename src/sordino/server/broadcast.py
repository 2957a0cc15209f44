"""What a server may broadcast beside the weights: checks of every value, made at a site before anything is charged.

A broadcast steers what a site computes from its records (factors, radii, learning rates), so a value outside its range
is refused, whoever sent it. Every part of a method lists what it broadcasts, with a check; other names are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sordino.errors import BadInput

SLACK = 1e-3
"""How much longer than one a direction may be by rounding."""

MOST_DIRECTIONS = 1024


@dataclass(frozen=True)
class Frame:
    """What a broadcast is checked against.

    ``lengths``: of the model's tensors; ``clip``, ``steps``: the site's range of radii and most local steps of a turn;
    ``private``: whether noise is added; ``public``: the whole broadcast.
    """

    lengths: tuple[int, ...]
    clip: tuple[float, float]
    steps: int
    private: bool
    public: Mapping[str, Any]

    @property
    def dimension(self) -> int:
        """The number of the model's parameters."""
        return sum(self.lengths)


Check = Callable[[str, Any, Frame], None]
"""(name, value, frame): raises ``BadInput`` for a value that the name does not allow."""


def number(low: float, high: float, whole: bool = False) -> Check:
    """A check for a number in [low, high], plain or as a float32 tensor [1, 1]."""

    def check(name: str, value: Any, frame: Frame) -> None:
        if isinstance(value, Tensor):
            if value.shape != (1, 1) or value.dtype is not torch.float32:
                raise BadInput(f"the broadcast {name!r} has shape {tuple(value.shape)}: one number was expected")
        elif isinstance(value, bool) or not isinstance(value, (int, float)):
            raise BadInput(f"the broadcast {name!r} is a {type(value).__name__}: one number was expected")
        found = float(value)
        if not low <= found <= high or (whole and found != round(found)):
            kind = "a whole number" if whole else "a number"
            raise BadInput(f"the broadcast {name!r} is {found:g}: {kind} between {low:g} and {high:g} is allowed")

    return check


def vector(most: float) -> Check:
    """A check for a float32 vector with an entry of size ≤ ``most`` for every parameter."""

    def check(name: str, value: Any, frame: Frame) -> None:
        if not isinstance(value, Tensor) or value.dtype is not torch.float32:
            raise BadInput(f"the broadcast {name!r} is not a float32 vector")
        if value.shape not in ((frame.dimension,), (1, frame.dimension)):
            raise BadInput(f"the broadcast {name!r} has shape {tuple(value.shape)}, not {frame.dimension} parameters")
        if not bool((value.abs() <= most).all()):  # NaN is not ≤ anything
            raise BadInput(f"the broadcast {name!r} has entries beyond {most:g}, or that are no numbers")

    return check


def radius(name: str, value: Any, frame: Frame) -> None:
    """Check a clipping radius: it lies in the range that the site allows."""
    low, high = frame.clip if frame.private else (0.0, math.inf)
    number(low, high)(name, value, frame)


def steps(name: str, value: Any, frame: Frame) -> None:
    """Check a number of local steps: whole, and at most what the site allows."""
    number(1, frame.steps, whole=True)(name, value, frame)


def directions(name: str, value: Any, frame: Frame) -> None:
    """Check k directions, [d, k]: orthonormal within each of the model's tensors, or zero."""
    if not isinstance(value, Tensor) or value.dtype is not torch.float32 or value.dim() != 2:
        raise BadInput(f"the broadcast {name!r} is not a float32 matrix")
    if len(value) != frame.dimension or not 1 <= value.shape[1] <= MOST_DIRECTIONS:
        raise BadInput(
            f"the broadcast {name!r} has shape {tuple(value.shape)}: {frame.dimension} parameters and 1 to "
            f"{MOST_DIRECTIONS} directions are allowed"
        )
    if not bool((value.abs() <= 1.0 + SLACK).all()):
        raise BadInput(f"the broadcast {name!r} has entries that no direction has")
    for part in value.split(list(frame.lengths)):
        gram = part.T.double() @ part.double()
        if not float(torch.linalg.matrix_norm(gram, 2)) <= 1.0 + SLACK:
            raise BadInput(f"the broadcast {name!r} is not orthonormal: it would stretch what is projected on it")


def lengths(name: str, value: Any, frame: Frame) -> None:
    """Check a list of the lengths of the model's tensors."""
    if not isinstance(value, list) or any(type(one) is not int for one in value) or tuple(value) != frame.lengths:
        raise BadInput(f"the broadcast {name!r} does not list the lengths of the model's tensors")


def together(other: str, check: Check) -> Check:
    """A check of a broadcast that makes sense only together with another one."""

    def both(name: str, value: Any, frame: Frame) -> None:
        check(name, value, frame)
        if other not in frame.public:
            raise BadInput(f"the broadcasts {name!r} and {other!r} come together")

    return both


def _clip(name: str, value: Any, frame: Frame) -> None:
    number(1e-12, 1e12 if frame.private else math.inf)(name, value, frame)


ALWAYS: dict[str, Check] = {"lr": number(1e-12, 1e6), "clip": _clip}
"""What every request broadcasts."""


def check_broadcast(known: Mapping[str, Check], frame: Frame) -> None:
    """Refuse a broadcast with an unknown name, a wrong type, or a value out of range.

    ``known``: what the method's parts broadcast beside ``ALWAYS``.
    """
    allowed = {**known, **ALWAYS}
    for name in ALWAYS:
        if name not in frame.public:
            raise BadInput(f"the broadcast {name!r} is missing")
    for name, value in frame.public.items():
        if name not in allowed:
            raise BadInput(f"the broadcast {str(name)[:64]!r} is unknown here: this site knows {', '.join(allowed)}")
        allowed[name](name, value, frame)
