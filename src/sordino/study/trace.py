"""Look at one step of one client of a study, in simulation: every tensor between the batch and the upload."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sordino.data import Federation
from sordino.engine.debug import Trace
from sordino.engine.debug import trace as look
from sordino.methods import Method
from sordino.study.features import with_features
from sordino.study.folder import planned, read_state
from sordino.study.run import prepare
from sordino.study.session import Session


def trace(
    clients: Federation,
    model: str | nn.Module = "auto",
    method: str | Method = "auto",
    *,
    client: str,
    step: int = 0,
    out: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> Trace:
    """What ``train`` with these arguments does in one step of one client's turn; nothing is charged or changed.

    Parameters
    ----------
    client, step: whose turn, and which of its local steps (from 0).
    out: the folder of a run that was interrupted: its next round is looked at. Default: the first round of a new run.
    settings: rounds, seed, model_options, features and the keys of ``Training``, as ``train`` takes them.

    Guarantees
    ----------
    The draws are those of the run itself (same seed, same keys), so this is covered by no privacy guarantee: it is for
    simulations on data that the person who looks may see.
    """
    before = planned(Path(out)) if out is not None else None
    seed, options = settings.pop("seed", 0), settings.pop("model_options", None)
    options = with_features(options, settings.pop("features", None))
    ready = prepare(clients, model, method, seed, options, settings, before)
    cpu = torch.device("cpu")
    session = Session(ready, None, "debug", cpu, None if out is None else read_state(Path(out), cpu)[0])
    return look(session.setup, session.state, client, step)
