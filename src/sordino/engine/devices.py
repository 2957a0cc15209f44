"""Devices by name, and how many threads a step is worth."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sordino.errors import BadInput


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
