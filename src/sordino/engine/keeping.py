"""What clients keep between rounds (control variates, duals): in simulation a table for every name, a row a client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sordino.engine.checkpoint import Checkpoint
from sordino.engine.mapped import Table

Left = tuple[NDArray[np.int64], Mapping[str, Tensor]]
"""What some turns left behind: the client of each row, and its new rows by name."""


def kept_rows(state: Checkpoint, names: Iterable[str], clients: NDArray[np.int64], count: int) -> dict[str, Tensor]:
    """What these of ``count`` clients kept, on the model's device; zeros before their first turn."""
    found = {}
    for name in names:
        if name not in state.clients:
            state.clients[name] = Table(count, len(state.weights), state.weights.device)
        found[name] = state.clients[name].read(clients).to(state.weights.device)
    return found


def keep(state: Checkpoint, left: Sequence[Left]) -> None:
    """Write what the turns of a round left, after all of them: copies of one client start from the same state.

    A client drawn twice keeps what its last turn left, which is what the server's half of a method reckons with.
    """
    for clients, after in left:
        for name, values in after.items():
            state.clients[name].write(clients, values)
