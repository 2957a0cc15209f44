"""What the server tells whom: most of a broadcast is for everyone, entries under ``each/`` are for one client each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

EACH = "each/"
"""``each/NAME`` holds a tensor with a row for every client; a client is told its own row, under NAME."""


def told(public: Mapping[str, Any], clients: NDArray[np.int64]) -> dict[str, Any]:
    """The broadcast as the rows of these clients get it: a row each of what differs between clients."""
    found: dict[str, Any] = {}
    for name, value in public.items():
        if name.startswith(EACH):
            found[name.removeprefix(EACH)] = value[torch.from_numpy(clients).to(value.device)]
        else:
            found[name] = value
    return found
