"""One simulation over several processes: every process takes the turns of some clients, and sums go round.

All processes open the same round (plan, draws and broadcasts depend on the seed alone), take the turns of the clients
whose number fits their rank, and add up: the sums of a rule that is one, the matrix of any other. So all of them end a
round with the same weights. What a client keeps between rounds stays with the process that takes its turns.

``torch.distributed`` must be initialised by the caller (``torchrun``, any backend; gloo on a CPU). Only the first
process has the ledger and the run folder; the others charge scratch ledgers, which count nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as group
from numpy.typing import NDArray
from torch import Tensor

from sordino.server.running import Running
from sordino.server.summed import Summed

Value = TypeVar("Value")


@dataclass(frozen=True)
class Shard:
    """This process's share of a simulation."""

    rank: int
    size: int

    @classmethod
    def now(cls) -> Shard | None:
        """The share of this process, or None where there is one process only."""
        if not (group.is_available() and group.is_initialized() and group.get_world_size() > 1):
            return None
        return cls(group.get_rank(), group.get_world_size())

    @property
    def first(self) -> bool:
        """Whether this process writes what a run leaves behind."""
        return self.rank == 0

    def rows(self, clients: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which rows are taken here: all turns of a client in one process, which keeps its state."""
        return np.flatnonzero(clients % self.size == self.rank)

    def same(self, value: Value) -> Value:
        """What the first process has, in all of them."""
        held: list[Any] = [value]
        group.broadcast_object_list(held)
        found: Value = held[0]
        return found

    def summed(self, values: Tensor) -> Tensor:
        """Σ over processes, in place."""
        group.all_reduce(values)
        return values

    def joined(self, uploads: dict[str, Any], count: int, like: Tensor) -> dict[str, Any]:
        """Everyone's uploads from those of every process: rows taken elsewhere are zero here, so they are added."""
        widths: list[Any] = [None] * self.size
        group.all_gather_object(widths, {n: v.shape[1] for n, v in uploads.items() if isinstance(v, Tensor)})
        for name, width in sorted({n: w for one in widths for n, w in one.items()}.items()):
            if name not in uploads:
                uploads[name] = torch.zeros(count, width, dtype=like.dtype, device=like.device)
            self.summed(uploads[name])
        for name in sorted(name for name, one in uploads.items() if isinstance(one, (Running, Summed))):
            uploads[name].join(self.summed, like)
        return uploads
