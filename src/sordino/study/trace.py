"""Look at one step of one client of a study, in simulation: every tensor between the batch and the upload."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sordino import methods
from sordino.data import Federation
from sordino.engine.checkpoint import Checkpoint, load_checkpoint
from sordino.engine.debug import Trace
from sordino.engine.debug import trace as look
from sordino.methods import Method
from sordino.privacy.gate import Gate
from sordino.privacy.generators import Keyed
from sordino.study.folder import planned_noises
from sordino.study.run import make_setup, prepare


def trace(
    clients: Federation,
    model: str | nn.Module = "cnn-small",
    method: str | Method = "dp-fedavg",
    rounds: int = 40,
    seed: int = 0,
    *,
    client: str,
    step: int = 0,
    out: str | os.PathLike[str] | None = None,
    model_options: dict[str, Any] | None = None,
    **training: Any,
) -> Trace:
    """What ``train`` with these arguments does in one step of one client's turn; nothing is charged or changed.

    Parameters
    ----------
    client, step: whose turn, and which of its local steps (from 0).
    out: the folder of a run that was interrupted: its next round is looked at. Default: the first round of a new run.

    Guarantees
    ----------
    The draws are those of the run itself (same seed, same keys), so this is covered by no privacy guarantee: it is for
    simulations on data that the person who looks may see.
    """
    noises = planned_noises(Path(out)) if out is not None else None
    ready = prepare(clients, model, method, seed, model_options, {"rounds": rounds, **training}, noises)
    ready = replace(ready, plan=methods.adapt(ready.plan, {}, ready.engine.dimension, ready.seed))
    setup = make_setup(ready, Gate(None, Keyed(ready.key), "debug"), {}, torch.device("cpu"))
    first = ready.engine.flatten(ready.template)
    state = Checkpoint(0, first, first) if out is None else _state(Path(out))
    return look(setup, state, client, step)


def _state(folder: Path) -> Checkpoint:
    """The state that a run left in its folder, which is only read."""
    state = load_checkpoint(folder / "checkpoint.safetensors", torch.device("cpu"))
    lines = (folder / "log.jsonl").read_text().splitlines()[: state.round]
    state.history = [json.loads(line) for line in lines]
    return state
