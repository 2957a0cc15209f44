"""Peak memory of one piece of work, in a process of its own: what it adds to the loaded libraries and data."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from sordino.errors import SordinoError

Found = TypeVar("Found")


def peak_memory(workload: str, peer: str) -> float:
    """Peak resident memory in MB that a peer's first round adds in a fresh process."""
    code = (
        "from bench import memory, peers, workloads;"
        f"run = peers.find({peer!r})(workloads.prepare(workloads.find({workload!r})));"
        "print(memory.added(run)[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SordinoError(f"{workload} with {peer} failed in a process of its own: {done.stderr[-1000:]}")
    return float(done.stdout.split()[-1])


def added(work: Callable[[], Found]) -> tuple[float, Found]:
    """MB by which resident memory peaked during ``work`` over what it was before, and what the work returned.

    The kernel's mark of the highest resident size is reset first: it also counts what was freed long ago, and a forked
    child begins with its parent's.
    """
    gc.collect()
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        raise SordinoError("peak memory is measured on Linux only: use --no-memory")
    reset.write_text("5")
    before = _status("VmRSS")
    found = work()
    # The kernel counts by thread and adds up later: a mark may lie some pages below what was there before.
    return max(0.0, _status("VmHWM") - before) / 1024, found


def resident_peak() -> float:
    """The highest resident size of this process since ``added`` began to look, in MB, libraries included."""
    return _status("VmHWM") / 1024


def _status(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith(key)).split()[1])
