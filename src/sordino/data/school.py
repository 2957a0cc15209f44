"""School: exam scores of pupils of 139 schools, each school a client; a MATLAB file with a cell per school."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.io import loadmat

from sordino.data.dataset import Dataset, client_names
from sordino.errors import BadInput


def read_school(path: Path, checksum: str, scale: Mapping[str, Any]) -> Dataset:
    """Pupils (28 columns, an exam score) with their schools; columns and scores divided by public constants.

    ``scale``: the highest ``score``, and which columns are ``percentages``. The file is small and comes from no
    package, so its md5 is checked here.
    """
    found = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    if found != checksum:
        raise BadInput(f"{path} has md5 {found}, not {checksum}: it is damaged or another version, get it again")
    cells = loadmat(path)
    columns = [np.asarray(one, dtype=np.float32) for one in cells["X"].ravel()]
    scores = [np.asarray(one, dtype=np.float32).ravel() for one in cells["Y"].ravel()]
    x: npt.NDArray[np.float32] = np.concatenate(columns)
    x[:, scale["percentages"]] /= 100
    y: npt.NDArray[np.float32] = np.concatenate(scores) / np.float32(scale["score"])
    owners = np.repeat(np.arange(len(scores), dtype=np.int64), [len(one) for one in scores])
    valid, names = np.ones(len(y), dtype=bool), tuple(client_names(len(scores)))
    schema = {"task": "regression", "range": [0, scale["score"]]}
    return Dataset("school", x, y, "regression", None, valid, owners=owners, names=names, schema=schema)
