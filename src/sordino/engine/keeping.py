"""What clients keep between rounds (control variates, duals): in simulation a table for every name, a row a client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino.engine.checkpoint import Checkpoint

Left = tuple[NDArray[np.int64], Mapping[str, Tensor]]
"""What some turns left behind: the client of each row, and its new rows by name."""

TABLE_BYTES = 1 << 32
"""A larger table stays in the machine's memory, not in the GPU's."""


def kept_rows(state: Checkpoint, names: Iterable[str], clients: NDArray[np.int64], count: int) -> dict[str, Tensor]:
    """What these of ``count`` clients kept, on the model's device; zeros before their first turn."""
    found = {}
    for name in names:
        if name not in state.clients:
            small = 4 * count * len(state.weights) <= TABLE_BYTES
            state.clients[name] = torch.zeros(
                count, len(state.weights), device=state.weights.device if small else torch.device("cpu")
            )
        table = state.clients[name]
        found[name] = table[torch.from_numpy(clients).to(table.device)].to(state.weights.device)
    return found


def keep(state: Checkpoint, left: Sequence[Left]) -> None:
    """Write what the turns of a round left, after all of them: copies of one client start from the same state.

    A client drawn twice keeps what its last turn left, which is what the server's half of a method reckons with.
    """
    for clients, after in left:
        last = {int(client): row for row, client in enumerate(clients)}
        where, rows = torch.tensor(list(last)), torch.tensor(list(last.values()))
        for name, values in after.items():
            table = state.clients[name]
            table[where.to(table.device)] = values[rows.to(values.device)].to(table.device)
