"""Work over one long vector, cut into blocks of a fixed size and shared among threads.

What a block yields depends on the block alone, never on the number of threads. The work must release the interpreter's
lock (drawing, hashing); torch's own thread count says how many threads there may be.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

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


def unlocked(function: Any) -> Any:
    """A loop over tensors, compiled by ``torch.jit`` so that it runs without the interpreter's lock.

    Where that is not to be had, the function as it is written: slower where threads share the work, the same numbers.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and without a successor that runs eagerly
        try:
            return torch.jit.script(function)
        except Exception:
            return function
