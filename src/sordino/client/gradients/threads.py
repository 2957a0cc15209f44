"""Independent pieces of CPU work on threads of their own, one core each.

Splitting every small operation over the cores costs a barrier each; splitting the records does not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def workers() -> int:
    """How many pieces run at once: torch's number of threads, which is 1 inside a piece."""
    return torch.get_num_threads()


def spread(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """``[work(item) for item in items]`` with as many items at once as torch has threads, in the order of items.

    Inside a piece torch has one thread, so nested calls run in place. The first error of a piece is raised here.
    """
    count = min(workers(), len(items))
    if count <= 1:
        return [work(item) for item in items]
    return list(_pool(workers(), os.getpid()).map(work, items))


@lru_cache(maxsize=4)
def _pool(count: int, process: int) -> ThreadPoolExecutor:
    """One pool per number of threads and process (threads do not survive a fork)."""
    pool = ThreadPoolExecutor(count, thread_name_prefix="sordino", initializer=torch.set_num_threads, initargs=(1,))
    # Setting a worker's number of threads also changes the default of threads yet to come: start all, then restore.
    list(pool.map(lambda _: torch.get_num_threads(), range(count)))
    torch.set_num_threads(count)
    return pool
