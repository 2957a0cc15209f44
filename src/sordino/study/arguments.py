"""Arguments of ``sd.train`` and ``sd.plan`` that are of a wrong kind: refused with what to give instead."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sordino.data import Dataset, Federation
from sordino.errors import BadInput


def check_clients(clients: Any) -> None:
    """Refuse what is no federation, and say which step is missing."""
    if isinstance(clients, Dataset):
        raise BadInput(
            f"the records of {clients.name} have no clients yet: "
            "call .partition(…) and .with_budgets(…) on the data set"
        )
    if not isinstance(clients, Federation):
        raise BadInput(
            f"clients is {_shown(clients)}: give a federation, sd.data.load(…).partition(…).with_budgets(…), or "
            "sd.data.from_arrays(…), from_folder(…) of data that belongs to clients"
        )


def check_seed(seed: Any) -> None:
    """Refuse a seed that is no whole number ≥ 0."""
    if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool) or seed < 0:
        raise BadInput(f"seed is {_shown(seed)}: give a whole number ≥ 0")


def check_options(options: Any) -> None:
    """Refuse options of a model that are no table."""
    if options is not None and not isinstance(options, Mapping):
        raise BadInput(f"model_options is {_shown(options)}: give a table such as {{'hidden': 64}}")


def check_flag(name: str, value: Any) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise BadInput(f"{name} is {_shown(value)}: it is True or False")


def check_callbacks(callbacks: Any) -> None:
    """Refuse callbacks that are no list of functions."""
    if callable(callbacks):
        raise BadInput("callbacks is a function: put it into a list, callbacks=[…]")
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, (str, bytes)):
        raise BadInput(f"callbacks is {_shown(callbacks)}: give a list of functions, or leave it out")
    for one in callbacks:
        if not callable(one):
            raise BadInput(f"callbacks holds {_shown(one)}: each is a function that takes a round's record")


def as_path(name: str, value: Any) -> Path:
    """A path from what the argument ``name`` says."""
    if not isinstance(value, (str, os.PathLike)):
        raise BadInput(f"{name} is {_shown(value)}: give a path, as text or pathlib.Path")
    return Path(value)


def _shown(value: Any) -> str:
    """None and short values as they are, others by their type: they may be long, or records."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return repr(value)[:60]
    return f"a {type(value).__name__}"
