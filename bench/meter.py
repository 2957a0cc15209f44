"""How work is measured on a device: seconds by its own clock, and the memory that it adds."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from bench.memory import peak_memory
from sordino.engine.devices import torch_device

Work = Callable[[], object]


class Meter(ABC):
    """Seconds and megabytes of some work on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def seconds(self, work: Work) -> float:
        """How long it takes until the device has done all of it."""

    @abstractmethod
    def peak(self, workload: str, peer: str, work: Work) -> float:
        """MB that a peer's round adds at its peak."""

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """What the device is, and how it computes."""


class Processor(Meter):
    """A CPU: the wall clock, and resident memory in a process of its own."""

    def seconds(self, work: Work) -> float:
        """Seconds on the wall clock."""
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    def peak(self, workload: str, peer: str, work: Work) -> float:
        """Peak resident memory that the first round adds in a fresh process."""
        return peak_memory(workload, peer)

    def about(self) -> dict[str, Any]:
        """Nothing beyond the machine."""
        return {"device": "cpu"}


class Graphics(Meter):
    """A GPU: events on its stream, from a moment when it has nothing left to do, and its allocator's own count.

    Host work before the first kernel and between kernels counts: the stream waits for it.
    """

    def seconds(self, work: Work) -> float:
        """Seconds from the first event to the last."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        first.record()
        work()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    def peak(self, workload: str, peer: str, work: Work) -> float:
        """Peak of allocated memory over what was allocated before; buffers that a warm peer holds do not count."""
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        torch.cuda.synchronize(self.device)
        return (torch.cuda.max_memory_allocated(self.device) - before) / 2**20

    def about(self) -> dict[str, Any]:
        """The GPU's name, and what torch lets native operations round to TF32, which peers use."""
        return {
            "device": torch.cuda.get_device_name(self.device),
            "tf32": {
                "convolutions": torch.backends.cudnn.allow_tf32,
                "products": torch.backends.cuda.matmul.allow_tf32,
            },
        }


def meter_of(device: str) -> Meter:
    """The meter of a device by name; one that this machine does not have is refused."""
    found = torch_device(device)
    return Graphics(found) if found.type == "cuda" else Processor(found)
