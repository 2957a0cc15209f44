"""What a server may broadcast beside the weights: every name with its type and range, checked before a charge.

A broadcast steers what a site computes from its records (factors, radii, learning rates), so a value outside its range
is refused, whoever sent it. Names that no built-in method uses are refused too; a method of your own that broadcasts
something declares it with ``declare`` where it is installed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sordino.engine.federation.policy import Policy, Refused
from sordino.errors import BadInput


@dataclass(frozen=True)
class Frame:
    """What a broadcast is checked against: the model's tensors, the site's limits, whether there is noise."""

    lengths: tuple[int, ...]
    policy: Policy
    private: bool

    @property
    def dimension(self) -> int:
        """Parameters of the model."""
        return sum(self.lengths)


Check = Callable[[str, Any, Frame], None]
"""(name, value, frame): raises ``Refused`` for what the name does not allow."""


def number(low: float, high: float, whole: bool = False) -> Check:
    """A number in [low, high], plain or as a float32 tensor [1, 1]."""

    def check(name: str, value: Any, frame: Frame) -> None:
        found = _one(name, value)
        if not low <= found <= high or (whole and found != round(found)):
            kind = "a whole number" if whole else "a number"
            raise Refused(f"the broadcast {name!r} is {found:g}: {kind} between {low:g} and {high:g} is allowed")

    return check


def vector(most: float) -> Check:
    """A float32 vector with an entry of size ≤ ``most`` for every parameter."""

    def check(name: str, value: Any, frame: Frame) -> None:
        if not isinstance(value, Tensor) or value.dtype is not torch.float32:
            raise Refused(f"the broadcast {name!r} is not a float32 vector")
        if value.shape not in ((frame.dimension,), (1, frame.dimension)):
            raise Refused(f"the broadcast {name!r} has shape {tuple(value.shape)}, not {frame.dimension} parameters")
        if not bool((value.abs() <= most).all()):  # NaN is not ≤ anything
            raise Refused(f"the broadcast {name!r} has entries beyond {most:g}, or that are no numbers")

    return check


def _one(name: str, value: Any) -> float:
    if isinstance(value, Tensor):
        if value.shape != (1, 1) or value.dtype is not torch.float32:
            raise Refused(f"the broadcast {name!r} has shape {tuple(value.shape)}: one number was expected")
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Refused(f"the broadcast {name!r} is a {type(value).__name__}: one number was expected")
    return float(value)


def _radius(name: str, value: Any, frame: Frame) -> None:
    low, high = frame.policy.clip if frame.private else (0.0, math.inf)
    number(low, high)(name, value, frame)


def _clip(name: str, value: Any, frame: Frame) -> None:
    number(1e-12, 1e12 if frame.private else math.inf)(name, value, frame)


def _steps(name: str, value: Any, frame: Frame) -> None:
    number(1, frame.policy.steps, whole=True)(name, value, frame)


def _basis(name: str, value: Any, frame: Frame) -> None:
    """k directions, [d, k]: orthonormal within each of the model's tensors, or zero."""
    if not isinstance(value, Tensor) or value.dtype is not torch.float32 or value.dim() != 2:
        raise Refused(f"the broadcast {name!r} is not a float32 matrix")
    if len(value) != frame.dimension or not 1 <= value.shape[1] <= MOST_DIRECTIONS:
        raise Refused(
            f"the broadcast {name!r} has shape {tuple(value.shape)}: {frame.dimension} parameters and 1 to "
            f"{MOST_DIRECTIONS} directions are allowed"
        )
    if not bool((value.abs() <= 1.0 + SLACK).all()):
        raise Refused(f"the broadcast {name!r} has entries that no direction has")
    for part in value.split(list(frame.lengths)):
        gram = part.T.double() @ part.double()
        if not float(torch.linalg.matrix_norm(gram, 2)) <= 1.0 + SLACK:
            raise Refused(f"the broadcast {name!r} is not orthonormal: it would stretch what is projected on it")


def _basis_sizes(name: str, value: Any, frame: Frame) -> None:
    if not isinstance(value, list) or any(type(one) is not int for one in value) or tuple(value) != frame.lengths:
        raise Refused(f"the broadcast {name!r} does not list the lengths of the model's tensors")


def _flag(name: str, value: Any, frame: Frame) -> None:
    number(0, 1, whole=True)(name, value, frame)


SLACK = 1e-3
MOST_DIRECTIONS = 1024

BROADCASTS: dict[str, Check] = {
    "lr": number(1e-12, 1e6),
    "clip": _clip,
    "radius": _radius,
    "mean_loss": number(-1e4, 1e4),
    "loss_bound": number(1e-6, 1e6),
    "steps": _steps,
    "control": vector(1e6),
    "basis": _basis,
    "basis_sizes": _basis_sizes,
    "private": _flag,
}
"""Every name that a built-in method broadcasts."""

REQUIRED = ("lr", "clip")
TOGETHER = ("basis", "basis_sizes")


def declare(name: str, check: Check) -> None:
    """Allow a broadcast of a method of your own; call it where the method is registered."""
    if name in BROADCASTS:
        raise BadInput(f"a broadcast {name!r} is declared already: choose another name")
    BROADCASTS[name] = check


def check_broadcast(public: Mapping[str, Any], frame: Frame) -> None:
    """Refuse a broadcast with an unknown name, a wrong type, or a value out of range."""
    for name in REQUIRED:
        if name not in public:
            raise Refused(f"the broadcast {name!r} is missing")
    for name, value in public.items():
        if name not in BROADCASTS:
            raise Refused(f"the broadcast {str(name)[:64]!r} is unknown here: this site knows {', '.join(BROADCASTS)}")
        BROADCASTS[name](name, value, frame)
    if any(name in public for name in TOGETHER) and not all(name in public for name in TOGETHER):
        raise Refused(f"the broadcasts {' and '.join(map(repr, TOGETHER))} come together")
