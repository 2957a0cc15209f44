"""One run by several processes of this machine (``sordino run --processes``): started, watched and ended together.

This process trains nothing: it listens, shows the first one's rounds, and when one of them fails, is killed or is to be
interrupted, it ends the others. They meet through a file and talk over the loopback (gloo); what they do together is in
``engine.sharded``. Every finished round is in the run folder, from which any number of processes goes on.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as group

from sordino.engine.devices import torch_device
from sordino.engine.sharded import ProcessLost
from sordino.errors import BadInput, SordinoError
from sordino.study.file import Study
from sordino.study.result import read_result
from sordino.study.run import train
from sordino.study.schedule import end_with_parent
from sordino.study.session import Callback

log = logging.getLogger("sordino.study")

PATIENCE = timedelta(minutes=30)
"""How long one process waits for another that is there but does not answer; one that is gone is noticed at once."""

LAST_WORDS = 5.0
"""Seconds that processes have to say what went wrong, or to seal a ledger, before they are killed."""


@dataclass(frozen=True)
class Task:
    """What every process is told: the study, where its run is kept, and how."""

    study: Study
    folder: Path
    ledger: Path | None = None
    resume: bool = False
    baselines: bool = False


@dataclass(frozen=True)
class _Worker:
    rank: int
    process: Any
    news: Any


def check_processes(count: int, device: str) -> None:
    """Refuse, or warn of, a number of processes that makes no sense on this machine."""
    if count < 1:
        raise BadInput(f"processes is {count}: at least one is needed")
    if count > 1 and torch_device(device).type == "cuda":
        raise BadInput(
            f"--processes shares the clients of one run among the cores of a CPU, and study.device is {device!r}: one "
            "process keeps a GPU busy by itself; leave --processes away, or set study.device = 'cpu'"
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if count > max(1, cores):
        log.warning("%d processes on %d cores wait for each other: more than %d bring nothing", count, cores, cores)


def train_shared(task: Task, count: int, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
    """Train a study's run with ``count`` processes; returns its result. ``callbacks`` hear the record of every round.

    Guarantees: when one process fails or is killed, all are ended and an error says why; nothing keeps running.
    """
    check_processes(count, task.study.study.device)
    spawn = multiprocessing.get_context("spawn")  # a forked process has its parent's threads' locks
    threads = max(1, torch.get_num_threads() // count)
    workers: list[_Worker] = []
    with tempfile.TemporaryDirectory(prefix="sordino-meet-") as scratch:
        try:
            with _unheard(signal.SIGINT):  # what they start with: Ctrl-C is for this process, which ends them
                for rank in range(count):
                    news, ours = spawn.Pipe(duplex=False)
                    given = (task, rank, count, Path(scratch) / "meet", threads, ours)
                    workers.append(_Worker(rank, spawn.Process(target=_work, args=given, daemon=True), news))
                    workers[-1].process.start()
                    ours.close()
            _listen(workers, callbacks)
        finally:
            _end(workers)
    return read_result(task.folder / "result.json")


def _listen(workers: Sequence[_Worker], callbacks: Sequence[Callback]) -> None:
    """Hear everybody until all are done; raises what went wrong."""
    there: dict[Any, _Worker] = {one.news: one for one in workers}
    errors: list[SordinoError] = []
    until: float | None = None
    while there:
        heard: list[Any] = connection.wait(list(there), None if until is None else max(0.0, until - time.monotonic()))
        if not heard:
            break
        for news in heard:
            try:
                kind, told = news.recv()
            except (EOFError, OSError):
                kind, told = "error", _lost(there[news], len(workers))
            if kind == "round":
                for callback in callbacks:
                    callback(told)
                continue
            del there[news]
            if kind == "error":
                errors.append(told)
                until = time.monotonic() + LAST_WORDS if until is None else until
    if errors:  # who was only left alone has the least to say
        raise min(errors, key=lambda one: (isinstance(one, ProcessLost), isinstance(one, _Ended)))


class _Ended(SordinoError):
    """A process that ended without a word."""


def _lost(worker: _Worker, count: int) -> _Ended:
    worker.process.join(LAST_WORDS)
    code = worker.process.exitcode
    how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with status {code}"
    why = ", perhaps for want of memory" if code == -signal.SIGKILL else ""
    return _Ended(
        f"process {worker.rank + 1} of {count} {how}{why}, and the others were ended: every finished round is kept; "
        "give the same command again with --resume, with as many --processes as you like"
    )


def _end(workers: Sequence[_Worker]) -> None:
    """End all that are still there: in order where they can, by force where they cannot."""
    for one in workers:
        if one.process.pid is not None:
            one.process.terminate()
    until = time.monotonic() + LAST_WORDS
    for one in workers:
        if one.process.pid is not None:
            one.process.join(max(0.0, until - time.monotonic()))
            if one.process.is_alive():
                one.process.kill()
                one.process.join()
        one.news.close()


@contextmanager
def _unheard(number: signal.Signals) -> Iterator[None]:
    """Ignore a signal for a moment: what is started meanwhile ignores it for good."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)


def _work(task: Task, rank: int, count: int, meet: Path, threads: int, news: Any) -> None:
    """One of the processes."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    if rank == 0:
        signal.signal(signal.SIGTERM, _interrupt)  # it has a ledger to seal; the others have nothing
    else:
        logging.getLogger("sordino").setLevel(logging.ERROR)  # what the first says, it says for all
    torch.set_num_threads(threads)
    try:
        _meet(rank, count, meet)
        callbacks = [_teller(news)] if rank == 0 else []
        study = task.study
        train(
            study.federation(),
            method=study.chosen_method(),
            out=task.folder,
            ledger=task.ledger,
            resume=task.resume,
            device=study.study.device,
            deterministic=study.study.deterministic,
            name=study.study.name,
            baselines=task.baselines,
            callbacks=callbacks,
            **study.arguments(),
        )
        group.destroy_process_group()
        news.send(("end", None))
    except SordinoError as error:
        news.send(("error", error))
    except Exception as error:  # whatever it is, the process that listens has to hear of it
        what = f"in one of {count} processes, {type(error).__name__}: {error}"
        news.send(("error", SordinoError(f"{what}; give the same command again with --resume to go on")))
    except KeyboardInterrupt:
        pass  # by the process that listens, which knows why
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is ending


def _teller(news: Any) -> Callable[[dict[str, Any]], None]:
    return lambda record: news.send(("round", record))


def _interrupt(number: int, frame: Any) -> None:
    """SIGTERM ends the first process like Ctrl-C: its ledger is sealed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _meet(rank: int, count: int, meet: Path) -> None:
    """Find the others, through a file, and talk to them over the loopback alone."""
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):
            os.environ["GLOO_SOCKET_IFNAME"] = name
    group.init_process_group("gloo", init_method=meet.as_uri(), rank=rank, world_size=count, timeout=PATIENCE)
