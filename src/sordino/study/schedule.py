"""One scheduler for many runs: one by one or in stacks, in this process or shared by several.

Runs that are finished are not made again, runs that were stopped go on, and a run that fails does not stop the others.
With several processes, each takes some of the runs and loads what it needs by itself; the first process only listens,
and ends the others when it is stopped or one of them fails.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import connection
from typing import Any, Generic, Protocol, TypeVar

import torch

from sordino.engine.devices import torch_device
from sordino.errors import BadInput, SordinoError
from sordino.study.prepared import Prepared, Run
from sordino.study.session import Callback

log = logging.getLogger("sordino.study")

STACK_ROWS = 1000
"""Most participations of one round that share a stack, over all of its runs."""

STACK_NUMBERS = 2_000_000_000
"""Most parameters times rows of a stack: 8 GB for the updates of one round."""

PAUSE = 0.2
"""Seconds between two looks at whether every process is still there."""

OWN_FAULT = (SordinoError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)
"""What one run, or its size, may raise in a stack: the runs are then trained alone, and it is told whose it was."""

Job = TypeVar("Job")
Tell = Callable[[Sequence[Any], dict[str, Any]], None]
"""Hears of every round that is done: whose, several jobs for a stack, and its record."""


@dataclass(frozen=True)
class Ending(Generic[Job]):
    """How a run ended; ``error`` says why it has no result, ``note`` what its maker wants known beside it."""

    job: Job
    error: SordinoError | None = None
    note: Any = None


class Maker(Protocol[Job]):
    """Makes runs of jobs, and keeps their results. It can be pickled, for every process has one."""

    def finished(self, job: Job) -> bool:
        """Whether the job's result is there."""

    def begun(self, job: Job) -> bool:
        """Whether the job was stopped while it trained alone: then it goes on alone."""

    def kin(self, job: Job) -> Hashable:
        """What jobs of one stack have in common beside what their runs are, such as the device."""

    def prepared(self, job: Job) -> Prepared:
        """The job's run, ready to train."""

    def alone(self, job: Job, ready: Prepared, tell: Callback) -> Run:
        """Train one run by itself, from where it was stopped if it was."""

    def together(self, jobs: Sequence[Job], runs: Sequence[Prepared], tell: Callback) -> Sequence[Run | SordinoError]:
        """Train several runs in one stack; where one ends without a result stands why."""

    def close(self, job: Job, found: Run | SordinoError, seconds: float) -> Ending[Job]:
        """Keep what a run came to."""


@dataclass(frozen=True)
class Scheduler:
    """How runs are made.

    Attributes
    ----------
    device: where they are trained.
    stack: train runs that share a model together; None: on a GPU. ``rows`` caps a stack.
    processes: how many share the runs. Several keep a GPU busy that one cannot; on a CPU each takes a run at a time.
    deadline: nothing is begun after this moment (``time.monotonic``).
    """

    device: str = "cpu"
    stack: bool | None = None
    processes: int = 1
    rows: int = STACK_ROWS
    deadline: float | None = None

    def run(self, jobs: Sequence[Job], maker: Maker[Job], tell: Tell) -> Iterator[Ending[Job]]:
        """Make all runs that are not finished; yields how each ended, as it ends."""
        if self.processes < 1:
            raise BadInput(f"processes is {self.processes}: at least one is needed")
        stack = torch_device(self.device).type == "cuda" if self.stack is None else self.stack
        how = replace(self, stack=stack)
        waiting = [job for job in jobs if not maker.finished(job)]
        if min(self.processes, len(waiting)) < 2:
            return _made(waiting, maker, how, tell)
        shares = dealt(jobs, maker.finished, self.processes) if stack else [[job] for job in waiting]
        return _shared(shares, maker, how, tell)


def _made(jobs: Sequence[Job], maker: Maker[Job], how: Scheduler, tell: Tell) -> Iterator[Ending[Job]]:
    """Make these runs in this process."""
    for stack in _stacks(jobs, maker, how):
        if how.deadline is not None and time.monotonic() > how.deadline:
            return
        if len(stack) > 1:
            started, some = time.perf_counter(), [job for job, _ in stack]
            try:
                found = maker.together(some, [ready for _, ready in stack], partial(tell, some))
            except OWN_FAULT as error:
                log.warning("%d runs are trained one by one, for in a stack: %s", len(stack), error)
            else:
                seconds = (time.perf_counter() - started) / len(stack)
                for job, one in zip(some, found):
                    yield maker.close(job, one, seconds)
                continue
        for job, ready in stack:
            yield _alone(job, ready, maker, tell)


def _alone(job: Job, ready: Prepared | SordinoError, maker: Maker[Job], tell: Tell) -> Ending[Job]:
    started = time.perf_counter()
    found: Run | SordinoError
    try:
        found = ready if isinstance(ready, SordinoError) else maker.alone(job, ready, partial(tell, [job]))
    except SordinoError as error:
        found = error
    return maker.close(job, found, time.perf_counter() - started)


def _stacks(jobs: Sequence[Job], maker: Maker[Job], how: Scheduler) -> Iterator[list[tuple[Job, Any]]]:
    """Runs to train at once, each ``Prepared`` or the error that says why it is not.

    Where nothing is stacked they are prepared one by one, as they are trained.
    """
    groups: dict[Hashable, list[tuple[Job, Any]]] = {}
    for place, job in enumerate(jobs):
        ready: Prepared | SordinoError
        try:
            ready = maker.prepared(job)
        except SordinoError as error:
            ready = error
        if not how.stack:
            yield [(job, ready)]
        elif isinstance(ready, SordinoError) or not ready.stackable or maker.begun(job):
            groups[place] = [(job, ready)]
        else:
            groups.setdefault((maker.kin(job), ready.kinship), []).append((job, ready))
    for group in groups.values():
        stack: list[tuple[Job, Any]] = []
        held = 0
        for job, found in group:
            rows = 0 if isinstance(found, SordinoError) else int(found.plan.schedule.asked.shape[1])
            if stack and held + rows > min(how.rows, STACK_NUMBERS // found.engine.dimension):
                yield stack
                stack, held = [], 0
            stack.append((job, found))
            held += rows
        yield stack


def dealt(jobs: Sequence[Job], finished: Callable[[Job], bool], processes: int) -> list[list[Job]]:
    """A share of the waiting runs for each process, to be stacked: like cards, so that it has some of every method.

    All runs are dealt, finished ones too: what is kept of a stack belongs to these very runs, so that a share must
    not change because another one is finished.
    """
    shares = [[job for job in jobs[k::processes] if not finished(job)] for k in range(processes)]
    return [share for share in shares if share]


def _shared(shares: Sequence[list[Job]], maker: Maker[Job], how: Scheduler, tell: Tell) -> Iterator[Ending[Job]]:
    """Make the runs of all shares in several processes, each of which takes a share when it has none."""
    spawn = multiprocessing.get_context("spawn")  # a forked process cannot use a GPU
    tasks, news = spawn.Queue(), spawn.Queue()
    count = min(how.processes, len(shares))
    for share in [*shares, *[None] * count]:
        tasks.put(share)
    threads = max(1, (os.cpu_count() or 1) // count)
    given = (maker, how, tasks, news, threads)
    workers = [spawn.Process(target=_work, args=given, daemon=True) for _ in range(count)]
    for worker in workers:
        worker.start()
    try:
        busy = count
        while busy:
            try:
                kind, told = news.get(timeout=PAUSE)
            except queue.Empty:
                _check_there(workers)
                continue
            if kind == "round":
                tell(*told)
            elif kind == "ending":
                yield told
            elif kind == "error":
                raise told
            else:
                busy -= 1
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join()


def _check_there(workers: Sequence[Any]) -> None:
    """A worker that was killed tells nothing."""
    lost = [worker for worker in workers if worker.exitcode]
    if lost:
        raise SordinoError(
            f"{len(lost)} of {len(workers)} processes ended without a word (exit status {lost[0].exitcode}), perhaps "
            "for want of memory: call it again with fewer --processes, it goes on where they were"
        )


def end_with_parent() -> None:
    """End this process when the one that started it was killed: the same runs may be begun again at any moment."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _work(maker: Maker[Any], how: Scheduler, tasks: Any, news: Any, threads: int) -> None:
    """A worker: shares of runs until there are none."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process hears it, and ends the others
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    try:
        while (share := tasks.get()) is not None:
            for ending in _made(share, maker, how, lambda jobs, record: news.put(("round", (jobs, record)))):
                news.put(("ending", ending))
    except Exception as error:  # whatever it is, the first process has to hear of it
        what = f"in one of several processes, {type(error).__name__}: {error}"
        news.put(("error", SordinoError(f"{what}; call it again to go on, or with --processes 1")))
        return
    news.put(("end", None))
