"""Checkpoints: everything a run needs to go on, in one file that is replaced atomically. Never any randomness."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sordino.engine.mapped import Table
from sordino.errors import BadInput
from sordino.server.facts import ServerState

_NAMES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What safetensors calls the kinds of numbers."""


Left = tuple[NDArray[np.int64], Mapping[str, Tensor]]
"""What some turns left behind: the client of each row, and its new rows by name."""


@dataclass
class Checkpoint:
    """The state of a run between two rounds.

    ``shown``: the weights to evaluate and hand out: the weights themselves, or their average. ``server``: what the
    server carries from round to round. ``clients``: what clients keep, by name a table with a row per client. ``best``:
    the weights of the best round so far, where a run is to end with those. ``request``: the hash that the round under
    way is charged under; it is not kept.
    """

    round: int
    weights: Tensor
    shown: Tensor
    server: ServerState = field(default_factory=ServerState)
    clients: dict[str, Table] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    best: Tensor | None = None
    request: str = ""

    @property
    def chosen(self) -> Tensor:
        """The weights that the run ends with: those of its best round, or the last ones."""
        return self.shown if self.best is None else self.best

    def kept_rows(self, names: Iterable[str], clients: NDArray[np.int64], count: int) -> dict[str, Tensor]:
        """What these of ``count`` clients kept under these names, on the model's device; zeros before a first turn."""
        found = {}
        for name in names:
            if name not in self.clients:
                self.clients[name] = Table(count, len(self.weights), self.weights.device)
            found[name] = self.clients[name].read(clients).to(self.weights.device)
        return found

    def keep(self, left: Sequence[Left]) -> None:
        """Write what the turns of a round left, after all of them: copies of one client start from the same state.

        A client drawn twice keeps what its last turn left, which is what the server's half of a method reckons with.
        """
        for clients, after in left:
            for name, values in after.items():
                self.clients[name].write(clients, values)


def write_atomic(path: Path, data: bytes | Iterable[bytes | memoryview]) -> None:
    """Write a file so that a crash leaves the old one or the new one, never half of one; durable when it returns.

    Data that comes in pieces is never all in memory.
    """
    temporary = path.with_name(path.name + ".part")
    try:
        with open(temporary, "wb") as file:
            for piece in [data] if isinstance(data, bytes) else data:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise BadInput(f"cannot write {path}: {error.strerror}; free some space or choose another folder") from error


def save_checkpoint(path: Path, state: Checkpoint) -> None:
    """Write ``state`` to ``path``."""
    tensors = {"weights": state.weights}
    if state.shown is not state.weights:
        tensors["shown"] = state.shown
    if state.best is not None:
        tensors["best"] = state.best
    plain: dict[str, Any] = {}
    for name, value in _flat(state.server).items():
        if isinstance(value, Tensor):
            tensors[f"server/{name}"] = value
        else:
            plain[name] = value
    about = {"round": state.round, "server": plain, "history": state.history, "seconds": state.seconds}
    held: dict[str, Tensor | Table] = {**tensors, **{f"client/{name}": one for name, one in state.clients.items()}}
    write_atomic(path, _packed(held, {"sordino": json.dumps(about)}))


def _flat(server: ServerState) -> dict[str, Any]:
    """The server's state as one table, each name under the place it belongs to."""
    places = {"rule": server.rule, "step": server.step, "public/each": server.each, "public": server.public}
    found = {f"{place}/{name}": value for place, held in places.items() for name, value in held.items()}
    single = {"next_steps": server.next_steps, "start": server.start, "steps_used": server.steps_used}
    return found | {name: value for name, value in single.items() if value is not None}


_OLD = {"pull_start": "start", "public/steps": "next_steps", "out": "step/average", "out_count": "step/count"}
"""Names of single values in checkpoints of sordino 0.1."""


def _server_state(flat: dict[str, Any]) -> ServerState:
    """What ``_flat`` wrote; also reads the names of sordino 0.1, which had no places but ``public``."""
    found: dict[str, dict[str, Any]] = {"rule": {}, "step": {}, "public/each": {}, "public": {}}
    single: dict[str, Any] = {}
    for told, value in flat.items():
        name = re.sub("^after_", "step/", _OLD.get(told, told))
        place = next((one for one in found if name.startswith(f"{one}/")), None)
        if place is not None:
            found[place][name.removeprefix(f"{place}/")] = value
        elif name in ("next_steps", "start", "steps_used"):
            single[name] = value
        else:
            found["rule"][re.sub("^(robust_hdp|factor_hdp|random_effects)_", "", name)] = value
    return ServerState(found["rule"], found["step"], found["public"], found["public/each"], **single)


def _packed(tensors: dict[str, Tensor | Table], about: dict[str, str]) -> Iterator[bytes | memoryview]:
    """A safetensors file in pieces: with the library's own writer a table on disk would be all in memory."""
    header: dict[str, Any] = {"__metadata__": about}
    end = 0
    for name, one in tensors.items():
        values = one.values if isinstance(one, Table) else one
        begin, end = end, end + values.nbytes
        header[name] = {"dtype": _NAMES[values.dtype], "shape": list(values.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for one in tensors.values():
        pieces = (piece for _, piece in one.pieces()) if isinstance(one, Table) else [one]
        for piece in pieces:
            plain: Any = piece.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            yield memoryview(plain)


def load_checkpoint(path: Path, device: torch.device) -> Checkpoint:
    """Read back what ``save_checkpoint`` wrote."""
    try:
        with safe_open(str(path), framework="pt") as file:
            about = json.loads((file.metadata() or {})["sordino"])
            names = [name for name in file.keys() if not name.startswith("client/")]  # noqa: SIM118
            # Where numbers lie in memory decides how products are rounded: a copy lies where a new tensor would.
            tensors = {name: file.get_tensor(name).clone().to(device) for name in names}
            clients = {
                name.removeprefix("client/"): _table(file.get_slice(name), device)
                for name in file.keys()  # noqa: SIM118
                if name.startswith("client/")
            }
    except (SafetensorError, OSError, KeyError, json.JSONDecodeError) as error:
        raise BadInput(f"{path} is not a checkpoint of sordino ({error}): start again without --resume") from None
    server = dict(about["server"])
    server |= {name.removeprefix("server/"): t for name, t in tensors.items() if name.startswith("server/")}
    return Checkpoint(
        about["round"],
        tensors["weights"],
        tensors.get("shown", tensors["weights"]),
        _server_state(server),
        clients,
        about["history"],
        about["seconds"],
        tensors.get("best"),
    )


def _table(stored: Any, device: torch.device) -> Table:
    """A client table from a checkpoint, read in pieces."""
    rows, width = stored.get_shape()
    found = Table(rows, width, device)
    for some, place in found.pieces():
        place.copy_(stored[some])
    return found
