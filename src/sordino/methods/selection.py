"""Selection as a part of a method: who takes part in which round, settled before training (R6)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sordino.methods.training import Population, Training

Schedule = list[NDArray[np.int64]]
"""The clients of each round, by index; a client listed twice acts as two virtual clients."""


@dataclass(frozen=True)
class Selection:
    """A selection rule by name: (population, training, seed) → the whole schedule."""

    name: str
    schedule: Callable[[Population, Training, int], Schedule]


def everyone() -> Selection:
    """Every client, every round."""
    return Selection("everyone", lambda p, t, seed: [np.arange(len(p.names))] * t.rounds)
