"""One thread for small work: where a step is shorter than waking a second thread, that thread only costs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL_STEP = 500_000
"""Parameters × records of a step below which one thread is faster than two."""


@contextmanager
def threads_for_step(parameters: int, records: float) -> Iterator[None]:
    """As many threads as a step of this size is worth, while it lasts."""
    before = torch.get_num_threads()
    if parameters * records < SMALL_STEP:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
