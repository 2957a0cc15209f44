"""One simulation over several processes: every process takes the turns of some clients, and the first combines them.

All processes open the same round (plan, draws and broadcasts depend on the seed alone) and take the turns of the
clients whose number fits their rank; updates are added up, the first process closes the round, and its state goes
round. What a client keeps between rounds stays with the process that takes its turns; checkpoints have it by client, so
that any number of processes can go on. Only the first process has the ledger and the run folder: it charges for all,
and nobody draws before it has.

``torch.distributed`` must be initialised by the caller (``torchrun``, ``study.processes``; gloo on a CPU). An error in
one process is everybody's, and one that is gone ends the others: nobody waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as group
from numpy.typing import NDArray
from torch import Tensor

from sordino.engine.checkpoint import Checkpoint
from sordino.engine.mapped import Table
from sordino.errors import SordinoError
from sordino.privacy.gate import Gate, Permit, Terms
from sordino.privacy.generators import Source, Turn
from sordino.privacy.ledger import Ledger
from sordino.server.running import Running
from sordino.server.summed import Summed

Value = TypeVar("Value")


class ProcessLost(SordinoError):
    """Another process of the same run ended, or does not answer."""


@contextmanager
def _talking() -> Iterator[None]:
    """What the network says when a process is gone, in words."""
    try:
        yield
    except RuntimeError as error:
        raise ProcessLost(
            "another process of this run ended or did not answer, so this one ends too; every finished round is kept: "
            "go on with resume=True (--resume), with as many processes as you like"
        ) from error


@dataclass(frozen=True)
class Shard:
    """This process's share of a simulation: all of it where ``size`` is 1."""

    rank: int = 0
    size: int = 1

    @classmethod
    def now(cls) -> Shard:
        """The share of this process."""
        if not (group.is_available() and group.is_initialized()):
            return ALONE
        return cls(group.get_rank(), group.get_world_size())

    @property
    def first(self) -> bool:
        """Whether this process charges, combines, and writes what a run leaves behind."""
        return self.rank == 0

    def rows(self, clients: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which rows are taken here: all turns of a client in one process, which keeps its state."""
        return np.flatnonzero(clients % self.size == self.rank)

    def same(self, value: Value) -> Value:
        """What the first process has, in all of them."""
        return self.of_first(lambda: value)

    def of_first(self, find: Callable[[], Value], device: torch.device | None = None) -> Value:
        """What the first process finds, in all of them; an error there is everybody's. Tensors come to ``device``."""
        if self.size == 1:
            return find()
        held: list[Any] = [None, None]
        if self.first:
            try:
                held[0] = find()
            except Exception as error:
                held[1] = _told(error)
                with _talking():
                    group.broadcast_object_list([None, held[1]])
                raise
        with _talking():
            group.broadcast_object_list(held)
        if held[1] is not None:
            raise held[1]
        found: Value = held[0] if self.first or device is None else _on(held[0], device)
        return found

    def together(self, find: Callable[[], Value]) -> Value:
        """What this process finds while the others find theirs; an error in one of them is everybody's."""
        if self.size == 1:
            return find()
        own: Exception | None = None
        try:
            found = find()
        except Exception as error:
            own = error
        errors = [one for one in self.gathered(None if own is None else _told(own)) if one is not None]
        if own is not None:
            raise own
        if errors:
            raise errors[0]
        return found

    def gathered(self, value: Value) -> list[Value]:
        """What all processes have, in order of rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with _talking():
            group.all_gather_object(found, value)
        return found

    def summed(self, values: Tensor) -> Tensor:
        """Σ over processes, in place."""
        if self.size > 1:
            with _talking():
                group.all_reduce(values)
        return values

    def joined(self, uploads: dict[str, Any], count: int, like: Tensor) -> dict[str, Any]:
        """Everyone's uploads from those of every process: rows taken elsewhere are zero here, so they are added."""
        if self.size == 1:
            return uploads
        widths = self.gathered({n: v.shape[1] for n, v in uploads.items() if isinstance(v, Tensor)})
        for name, width in sorted({n: w for one in widths for n, w in one.items()}.items()):
            if name not in uploads:
                uploads[name] = torch.zeros(count, width, dtype=like.dtype, device=like.device)
            self.summed(uploads[name])
        for name in sorted(name for name, one in uploads.items() if isinstance(one, (Running, Summed))):
            uploads[name].join(self.summed, like)
        return uploads

    def collect(self, state: Checkpoint, names: Iterable[str], clients: int) -> None:
        """Bring what all clients keep under these names into the first process's tables."""
        if self.size == 1:
            return
        for name in names:
            state.kept_rows([name], np.zeros(0, dtype=np.int64), clients)  # a table, where nobody had a turn here yet
            for some, piece in state.clients[name].pieces():
                own = torch.from_numpy(self.rows(np.arange(some.start, some.stop))).to(piece.device)
                sent = torch.zeros_like(piece)
                sent[own] = piece[own]
                self.summed(sent)
                if self.first:
                    piece.copy_(sent)

    def spread(self, state: Checkpoint | None, device: torch.device) -> Checkpoint | None:
        """The state that the first process goes on from, in all of them; every process has its own clients' tables."""
        if self.size == 1:
            return state
        found = self.of_first(lambda: None if state is None else replace(state, clients={}), device)
        if found is None:
            return None
        kept = {} if state is None else state.clients
        shapes = self.same({name: table.shape for name, table in kept.items()})
        found = found if state is None else state
        for name, (rows, width) in shapes.items():
            table = kept[name] if name in kept else Table(rows, width, device)
            for some, piece in table.pieces():
                sent = piece.clone() if self.first else torch.empty_like(piece)
                with _talking():
                    group.broadcast(sent, 0)
                own = torch.from_numpy(self.rows(np.arange(some.start, some.stop))).to(piece.device)
                piece[own] = sent[own]
            found.clients[name] = table
        return found


ALONE = Shard()


class SharedGate(Gate):
    """The gate of one of several processes: the first charges for all, and nobody draws before the charge is durable.

    A refusal is everybody's. Only the first has a ``ledger``; ``private`` says whether there is one.
    """

    def __init__(self, ledger: Ledger | None, source: Source, run: str, shard: Shard, private: bool) -> None:
        super().__init__(ledger, source, run)
        self._shard, self._private = shard, private

    @property
    def private(self) -> bool:
        """Whether releases are noised, and charged by the first process."""
        return self._private

    def grant(self, turns: Sequence[Turn], terms: Sequence[Terms], request: str, masks: str = "") -> Permit:
        """Let the first process charge these turns in one durable transaction; see ``Gate.grant``."""
        charge = super().grant

        def charged() -> None:
            charge(turns, terms, request, masks)

        self._shard.of_first(charged)
        return Permit(list(turns), list(terms))


def _told(error: Exception) -> SordinoError:
    """An error as other processes hear it."""
    if isinstance(error, SordinoError):
        return error
    return SordinoError(f"in one of several processes, {type(error).__name__}: {error}")


def _on(value: Any, device: torch.device) -> Any:
    """The same with all tensors of a GPU on this process's one."""
    if isinstance(value, Tensor):
        return value.to(device) if value.is_cuda else value
    if isinstance(value, dict):
        return {key: _on(one, device) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on(one, device) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: _on(getattr(value, one.name), device) for one in fields(value)})
    return value
