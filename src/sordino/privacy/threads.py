"""Work over one long vector, cut into blocks of a fixed size and shared among threads.

What a block yields depends on the block alone, never on the number of threads. The work must release the interpreter's
lock (drawing, hashing); torch's own thread count says how many threads there may be.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import TypeVar

import torch

Job = TypeVar("Job")
Found = TypeVar("Found")


def side_by_side(function: Callable[[Job], Found], jobs: Sequence[Job]) -> list[Found]:
    """``function`` of every job, in order."""
    threads = min(torch.get_num_threads(), len(jobs))
    if threads < 2:
        return [function(job) for job in jobs]
    return list(_pool(threads, os.getpid()).map(function, jobs))


@lru_cache(maxsize=1)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Threads of this process: a forked child has none of its parent's."""
    return ThreadPoolExecutor(threads, thread_name_prefix="sordino")


@contextmanager
def one_thread() -> Iterator[None]:
    """This thread computes alone: torch would otherwise share its work among threads, and round as they do."""
    before = torch.get_num_threads()
    if before > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if before > 1:
            torch.set_num_threads(before)
