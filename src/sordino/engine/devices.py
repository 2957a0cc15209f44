"""Devices by name, how a GPU is made to repeat itself bit for bit, and how many threads a step is worth."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sordino.errors import BadInput, SordinoError

log = logging.getLogger("sordino.engine")


def is_device(name: str) -> bool:
    """Whether this is how a device is called, on whatever machine: ``cpu``, ``cuda``, ``cuda:1`` or ``auto``."""
    return isinstance(name, str) and re.fullmatch(r"cpu|auto|cuda(:\d+)?", name) is not None


def torch_device(name: str) -> torch.device:
    """The device of this machine by that name; ``auto``: its GPU, where it has one."""
    if not is_device(name):
        raise BadInput(f"device {name!r} is unknown: use cpu, cuda, cuda:1 or auto")
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if there else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not there:
        raise BadInput(f"device {name!r} was asked for, but this machine has no usable GPU: use cpu or auto")
    if device.type == "cuda" and (device.index or 0) >= there:
        raise BadInput(f"device {name!r} was asked for, but this machine has {there} GPUs, counted from cuda:0")
    return device


WORKSPACE, SETTLED = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""What is read at the first product of a process on a GPU, and a value under which products repeat themselves."""

REFUSED = "does not have a deterministic implementation"
"""What torch says of an operation that cannot repeat itself."""


@contextmanager
def repeatable(device: torch.device, wanted: bool = True) -> Iterator[None]:
    """Compute so that the same run ends in the same bits, on a GPU too; a CPU does anyway, at one number of threads.

    A GPU takes torch's deterministic algorithms while this lasts, and no convolution chosen by a stopwatch; then all is
    as it was, but for the environment variable that cuBLAS asks for, which has to stay: it is read once in a process.
    Where cuBLAS was at work before it could be set, a warning says that runs may differ in their last bits.

    Guarantees: an operation that cannot repeat itself is refused by name, and never taken silently.
    """
    if device.type != "cuda" or not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filling: Any = torch.utils.deterministic
    chosen, filled = torch.backends.cudnn.benchmark, filling.fill_uninitialized_memory
    os.environ.setdefault(WORKSPACE, SETTLED)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # Torch would fill every new buffer with NaN, half of a small step's kernels, to show code that reads what nobody
    # wrote. Padding is such memory here; that no result depends on it is tested with NaN in it.
    filling.fill_uninitialized_memory = False
    try:
        if not _products_repeat(device):
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            log.warning(
                "this run may not repeat bit for bit: %s was not %s at the first product of this process on %s; set it "
                "before Python starts, or say deterministic = false",
                WORKSPACE,
                SETTLED,
                device,
            )
        yield
    except (RuntimeError, SordinoError) as error:
        if REFUSED not in str(error):
            raise
        operation = str(error).split(REFUSED)[0].split()[-1]
        raise BadInput(
            f"{operation} cannot repeat itself bit for bit on {device}, and the model needs it: use another layer, or "
            "deterministic = false in [study] (in Python deterministic=False), and runs may differ in their last bits"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = chosen
        filling.fill_uninitialized_memory = filled


def _products_repeat(device: torch.device) -> bool:
    """Whether torch takes products on this device for repeatable: it asks once, at the first of them in a process."""
    try:
        torch.ones(2, 2, device=device) @ torch.ones(2, 2, device=device)
    except RuntimeError as error:
        if WORKSPACE in str(error):
            return False
        raise
    return True


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
