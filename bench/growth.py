"""How time and memory of a private round grow with clients, records and parameters; each point in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed

from bench import ours, workloads
from bench.memory import added, resident_peak
from sordino import models
from sordino.engine.mapped import make_records
from sordino.errors import SordinoError
from sordino.study.show import Sheet

RECORDS = 60
"""Records of a client where the number of clients grows."""

POOL = 10_000
"""Clients with records of their own; more share those of others: 1.9 GB on disk, where 100,000 clients' would be 19."""

MANY = 100_000
"""The largest federation, which takes minutes."""

WARM = 5000
"""From so many clients on, what is built once (the engine's check, its buffers) takes no share worth a second round."""

AXES: dict[str, Sequence[int]] = {
    "clients": (10, 100, 1000, 10_000),
    "records": (32, 128, 512, 2048, 8192),
    "parameters": (10_000, 100_000, 1_000_000, 10_000_000),
}
WORDS = {
    "clients": f"clients of {RECORDS} records (on disk), one step of 32 each, CNN of 28,938 parameters",
    "records": "records in the one step of one client, CNN of 28,938 parameters",
    "parameters": "parameters of a perceptron, one step of 64 of one client",
}
Show = Callable[[str], None]


def growth(
    axes: Sequence[str] = tuple(AXES), show: Show = print, many: bool = False, processes: int = 1
) -> dict[str, Any]:
    """By axis: for every size the seconds of a round after a warm-up, and the MB that its peak adds.

    ``many``: also 100,000 clients. With several ``processes``, which share the clients of a round, only clients grow.
    """
    found: dict[str, Any] = {}
    for axis in axes if processes == 1 else ["clients"]:
        found[axis] = {"what": WORDS[axis], "points": []}
        for size in [*AXES[axis], *([MANY] if many and axis == "clients" else [])]:
            show(f"growth with {axis}: {size:,}")
            found[axis]["points"].append({"size": size, **_in_processes(axis, size, processes)})
    return found


def _in_processes(axis: str, size: int, count: int) -> dict[str, float]:
    """One point, measured in a process of its own, or in several: the first one's time, everybody's memory."""
    with tempfile.TemporaryDirectory(prefix="sordino-growth-") as folder:
        told, started = [], []
        for rank in range(count):
            code = f"from bench.growth import point; print(point({axis!r}, {size}, {rank}, {count}, {folder!r}))"
            pipe = subprocess.PIPE
            started.append(subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe))
        try:
            told = [one.communicate() for one in started]
        finally:
            for one in started:
                one.kill()
    failed = [err for one, (_, err) in zip(started, told) if one.returncode]
    if failed:
        raise SordinoError(f"growth with {axis} failed at {size}: {failed[0].decode()[-1000:]}")
    points: list[dict[str, float]] = [json.loads(out.splitlines()[-1]) for out, _ in told]
    added_up = ("cpu_seconds", "peak_mb", "resident_mb")
    return points[0] | {key: sum(one[key] for one in points) for key in added_up}


def point(axis: str, size: int, rank: int = 0, count: int = 1, folder: str = "") -> str:
    """One point as JSON, measured in this process. The largest federations are timed in their first round."""
    if count > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // count))
        distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=count)
    run = many_clients(size) if axis == "clients" else _one_client(axis, size)
    peak, (seconds, used) = added(lambda: _timed(run))
    resident = resident_peak()
    if axis != "clients" or size < WARM:
        seconds, used = _timed(run)
    return json.dumps({"seconds": seconds, "cpu_seconds": used, "peak_mb": peak, "resident_mb": resident})


def _timed(run: Callable[[], None]) -> tuple[float, float]:
    """Seconds on the clock, and of all cores: the latter says what others' load did to the former."""
    started, used = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - started, time.process_time() - used


def _one_client(axis: str, size: int) -> Callable[[], None]:
    wide = max(1, size // 795)  # a perceptron on 784 features with 10 classes has 795 parameters a hidden unit
    work = {
        "records": workloads.Workload("", 1, 1, size, 10 * size, "robust-hdp-cnn", (1, 28, 28)),
        "parameters": workloads.Workload("", 1, 1, 64, 640, "mlp", (1, 28, 28), {"hidden": wide}),
    }[axis]
    return ours.sordino(workloads.prepare(work))


def many_clients(clients: int, model: str = "robust-hdp-cnn") -> Callable[[], None]:
    """A round of so many clients whose records lie on disk, as long as this process lives."""
    work = workloads.Workload("", clients, 1, 32, RECORDS, model, (1, 28, 28))
    folder = tempfile.TemporaryDirectory(prefix="sordino-growth-")
    x = _random_file(Path(folder.name) / "x.npy", min(clients, POOL) * RECORDS, work.shape)
    y = np.random.default_rng(0).integers(0, 10, len(x))
    records = make_records(x, y, np.ones(len(y), bool), torch.device("cpu"))
    built = models.build(model, work.shape, 10, 0)
    plan = workloads.plan_of(work, sum(p.numel() for p in built.parameters()))
    run = ours.sordino(workloads.Task(work, records.x, records.y, built, plan, []), records=records)
    return lambda: (folder, run())[1]


def _random_file(path: Path, count: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Random records in a file, written piece by piece and mapped."""
    random = np.random.default_rng(0)
    written = np.lib.format.open_memmap(path, "w+", np.float32, (count, *shape))
    for start in range(0, count, 4096):
        place = written[start : start + 4096]
        place[:] = random.standard_normal(place.shape, dtype=np.float32)
    written.flush()
    del written
    found: np.ndarray[Any, Any] = np.load(path, mmap_mode="r")
    return found


def growth_table(found: dict[str, Any]) -> Sheet:
    """The points as a table, with the cost of one more."""
    table = Sheet(("grows", "size", "seconds", "µs each", "CPU seconds", "peak MB", "resident MB"))
    for axis, one in found.items():
        for i, at in enumerate(one["points"]):
            each = 1e6 * at["seconds"] / at["size"]
            name = f"{axis}: {one['what']}" if i == 0 else axis
            times = f"{at['seconds']:.2f}", f"{each:,.2f}", f"{at['cpu_seconds']:.2f}"
            table.add_row(name, f"{at['size']:,}", *times, f"{at['peak_mb']:.0f}", f"{at['resident_mb']:.0f}")
    return table


def growth_rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The points of ``growth_table``, unrounded."""
    return [{"grows": axis, **at} for axis, one in found.items() for at in one["points"]]
