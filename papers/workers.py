"""Several processes that share an experiment's runs: one alone cannot keep a GPU busy, nor use many cores.

Each takes some of the runs, loads what it needs by itself and writes finished runs where all look for them. The first
process only listens: it shows how far they are, and ends them all when it is stopped or one of them fails.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from papers.experiment import Cell
from papers.make import Workshop
from papers.runner import Runner, Silent
from sordino.errors import SordinoError

PAUSE = 0.2
"""Seconds between two looks at whether everybody is still there."""


def finish(runner: Runner, cells: Sequence[Cell], what: str, processes: int) -> list[Cell]:
    """``runner.finish`` in so many processes; returns the cells that had to be left for another time."""
    waiting = runner.waiting(cells)
    if min(processes, len(waiting)) < 2:
        return runner.finish(waiting, what)
    shares = dealt(cells, waiting, processes) if runner.stack else [[cell] for cell in waiting]
    runner.watch.begin(sum(cell.settled.training["rounds"] for cell in waiting), len(waiting), what)
    spawn = multiprocessing.get_context("spawn")  # a forked process cannot use a GPU
    tasks, news = spawn.Queue(), spawn.Queue()
    count = min(processes, len(shares))
    for share in [*shares, *[None] * count]:
        tasks.put(share)
    shop = runner.workshop
    bare = replace(runner, workshop=Workshop(shop.folder, shop.stand_in, shop.precision), watch=Silent())
    threads = max(1, (os.cpu_count() or 1) // count)
    workers = [spawn.Process(target=_work, args=(bare, tasks, news, threads), daemon=True) for _ in range(count)]
    for worker in workers:
        worker.start()
    try:
        return _listen(runner, workers, news)
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join()


def dealt(cells: Sequence[Cell], waiting: Sequence[Cell], processes: int) -> list[list[Cell]]:
    """A share of the waiting runs for each process, to be stacked: like cards, so that it has some of every method.

    All runs are dealt, finished ones too: what is kept of a stack belongs to these very runs, so that a share must
    not change because another one is finished.
    """
    every, wanted = list({cell.id: cell for cell in cells}.values()), {cell.id for cell in waiting}
    shares = [[cell for cell in every[k::processes] if cell.id in wanted] for k in range(processes)]
    return [share for share in shares if share]


def _listen(runner: Runner, workers: Sequence[Any], news: Any) -> list[Cell]:
    """Pass on what the workers tell until all have ended."""
    left: list[Cell] = []
    busy = len(workers)
    while busy:
        try:
            kind, told = news.get(timeout=PAUSE)
        except queue.Empty:
            _all_there(workers)
            continue
        if kind == "error":
            raise told
        if kind == "end":
            busy -= 1
        elif kind == "left":
            left += told
        elif kind == "replaced":
            runner.workshop.replaced.update(told)
        else:
            getattr(runner.watch, kind)(told)
    return left


def _all_there(workers: Sequence[Any]) -> None:
    """A worker that was killed tells nothing."""
    lost = [worker for worker in workers if worker.exitcode]
    if lost:
        raise SordinoError(
            f"{len(lost)} of {len(workers)} processes ended without a word (exit status {lost[0].exitcode}), perhaps "
            "for want of memory: call it again with fewer --processes, it goes on where they were"
        )


def _work(runner: Runner, tasks: Any, news: Any, threads: int) -> None:
    """A worker: shares of runs until there are none."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process hears it, and ends the others
    torch.set_num_threads(threads)
    runner = replace(runner, watch=_Telling(news.put))
    try:
        while (share := tasks.get()) is not None:
            news.put(("left", runner.finish(share, "")))
            news.put(("replaced", dict(runner.workshop.replaced)))
    except SordinoError as error:
        news.put(("error", error))
        return
    except Exception as error:  # whatever it is, the first process has to hear of it
        what = f"in one of several processes, {type(error).__name__}: {error}"
        news.put(("error", SordinoError(f"{what}; call it again to go on, or with --processes 1")))
        return
    news.put(("end", None))


@dataclass(frozen=True)
class _Telling:
    """A worker's watch: tells the first process, which knows the whole."""

    put: Callable[[tuple[str, Any]], None]

    def begin(self, rounds: int, runs: int, what: str) -> None:
        """Nothing: the first process has said how much there is."""

    def advance(self, rounds: int) -> None:
        """So many rounds are done."""
        self.put(("advance", rounds))

    def say(self, line: str) -> None:
        """Something a person should know."""
        self.put(("say", line))
