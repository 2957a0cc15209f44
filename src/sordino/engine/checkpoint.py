"""Checkpoints: everything a run needs to go on, in one file that is replaced atomically. Never any randomness."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from sordino.errors import BadInput


@dataclass
class Checkpoint:
    """The state of a run between two rounds.

    ``server`` and ``clients`` are the method's state: tensors and plain numbers by name.
    """

    round: int
    weights: Tensor
    shown: Tensor
    """The weights to evaluate and hand out: the weights themselves, or their average."""
    server: dict[str, Any] = field(default_factory=dict)
    clients: dict[str, Tensor] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that a crash leaves the old one or the new one, never half of one; durable when it returns."""
    temporary = path.with_name(path.name + ".part")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
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
    plain: dict[str, Any] = {}
    for name, value in state.server.items():
        if isinstance(value, Tensor):
            tensors[f"server/{name}"] = value
        else:
            plain[name] = value
    tensors |= {f"client/{name}": value for name, value in state.clients.items()}
    about = {"round": state.round, "server": plain, "history": state.history, "seconds": state.seconds}
    packed = save({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, {"sordino": json.dumps(about)})
    write_atomic(path, packed)


def load_checkpoint(path: Path, device: torch.device) -> Checkpoint:
    """Read back what ``save_checkpoint`` wrote."""
    try:
        with safe_open(str(path), framework="pt") as file:
            about = json.loads((file.metadata() or {})["sordino"])
            tensors = {name: file.get_tensor(name).to(device) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, json.JSONDecodeError) as error:
        raise BadInput(f"{path} is not a checkpoint of sordino ({error}): start again without --resume") from None
    server = dict(about["server"])
    server |= {name.removeprefix("server/"): t for name, t in tensors.items() if name.startswith("server/")}
    clients = {name.removeprefix("client/"): t for name, t in tensors.items() if name.startswith("client/")}
    return Checkpoint(
        about["round"],
        tensors["weights"],
        tensors.get("shown", tensors["weights"]),
        server,
        clients,
        about["history"],
        about["seconds"],
    )
