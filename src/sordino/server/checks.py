"""What the selection of clients refuses, each with a cause and a remedy. Numbers in, float64 arrays out."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sordino.errors import BadInput

Array = NDArray[np.float64]
Index = NDArray[np.int64]

SUM_TOLERANCE = 1e-9
"""How far from 1 a sum of probabilities may lie: rounding in a study file, not a different distribution."""


def vector(values: ArrayLike, name: str, length: int | None = None) -> Array:
    """``values`` as a finite vector, one number per client."""
    try:
        found = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise BadInput(f"{name} must be numbers, one per client ({error})") from None
    if found.ndim != 1 or found.size == 0:
        raise BadInput(f"{name} must be a non-empty list with one number per client, not of shape {found.shape}")
    if length is not None and found.size != length:
        raise BadInput(f"{name} has {found.size} entries for {length} clients: give one per client")
    bad = np.flatnonzero(~np.isfinite(found))
    if bad.size:
        raise BadInput(f"{name}[{bad[0]}] is {found[bad[0]]}: every client needs a finite number")
    return found


def at_least(values: Array, least: float, name: str, remedy: str) -> Array:
    """``values`` if none lies below ``least``."""
    bad = np.flatnonzero(values < least)
    if bad.size:
        raise BadInput(f"{name}[{bad[0]}] is {values[bad[0]]:g}, below {least:g}: {remedy}")
    return values


def noise_variances(variances: ArrayLike, clients: int) -> Array:
    """V_k ≥ 0, the noise factor of every client."""
    return at_least(vector(variances, "variances", clients), 0.0, "variances", "a variance is never negative")


def record_counts(sizes: ArrayLike) -> Array:
    """n_k > 0, the number of records of every client."""
    found = vector(sizes, "sizes")
    bad = np.flatnonzero(found <= 0)
    if bad.size:
        raise BadInput(
            f"sizes[{bad[0]}] is {found[bad[0]]:g}: a client needs records (n > 0) to take part, or leave it out"
        )
    return found


def distribution(probabilities: ArrayLike, length: int | None = None) -> Array:
    """Probabilities over clients: ≥ 0, summing to 1 up to rounding; returned so that they sum to 1."""
    found = vector(probabilities, "probabilities", length)
    at_least(found, 0.0, "probabilities", "a probability is never negative")
    total = float(found.sum())
    if abs(total - 1.0) > SUM_TOLERANCE:
        raise BadInput(f"probabilities sum to {total:.12g}, not 1: divide them by their sum if they are weights")
    return found / total


def importance_weights(importance: ArrayLike | None, clients: int) -> Array:
    """c_k ≥ 0, what one participation of each client counts; 1 where nothing is said."""
    found = np.ones(clients) if importance is None else vector(importance, "importance", clients)
    return at_least(found, 0.0, "importance", "an importance weight is never negative")


def positive(value: float, name: str, remedy: str, *, or_zero: bool = False) -> float:
    """A finite number > 0, or ≥ 0 with ``or_zero``."""
    number = float(value)
    if not (math.isfinite(number) and (number > 0.0 or (or_zero and number == 0.0))):
        raise BadInput(f"{name} is {number!r}: {remedy}")
    return number


def whole(value: int, name: str, least: int = 1) -> int:
    """A whole number of at least ``least``."""
    if int(value) != value or value < least:
        raise BadInput(f"{name} is {value!r}: it must be a whole number of at least {least}")
    return int(value)
