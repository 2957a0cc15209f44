"""Large matrices on disk: records, and what clients keep between rounds. Memory then does not grow with the clients.

A mapped file is read and written like memory, and the kernel keeps the pages it likes. Pages that were touched would
still count as this process's memory, so they are given back every ``GIVEN_BACK`` bytes; the file keeps what they held.
"""

from __future__ import annotations

import mmap
import tempfile
import warnings
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino.client.rows import Records

MAPPED_BYTES = 1 << 28
"""A matrix larger than this lives in a scratch file (in TMPDIR) instead of memory."""

GPU_BYTES = 1 << 32
"""A larger table of what clients keep leaves the GPU's memory."""

CPU = torch.device("cpu")

GIVEN_BACK = 1 << 26
"""Bytes read or written after which mapped pages are given back."""


FAULT_AROUND = 1 << 16
"""What the kernel maps around a page that is read."""


class Pages:
    """The pages of one mapping that this process holds."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping, self._touched = mapping, 0

    def touch(self, size: int) -> None:
        """So many bytes were read or written; from time to time all pages are given back."""
        self._touched += size
        if self._touched >= GIVEN_BACK:
            self._touched = 0
            self._mapping.madvise(mmap.MADV_DONTNEED)


def pages_of(array: NDArray[np.generic]) -> Pages | None:
    """The pages behind an array that was mapped from a file (``np.load(…, mmap_mode="r")``); None for one in memory.

    Also None for a private mapping (mode "c"): what was written to it would be lost with its pages.
    """
    base: object = array
    shared = False
    while isinstance(base, np.ndarray):
        shared |= isinstance(base, np.memmap) and base.mode in ("r", "r+", "w+")
        base = base.base
    return Pages(base) if shared and isinstance(base, mmap.mmap) else None


def make_records(
    x: NDArray[np.float32] | NDArray[np.int64],
    y: NDArray[np.generic],
    valid: NDArray[np.bool_],
    device: torch.device,
    units: NDArray[np.int64] | None = None,
) -> Records:
    """Records on a device; on the CPU those of a mapped file stay there and are read as they are drawn.

    ``units``: the records of every unit, where units have several.
    """
    members = None if units is None else torch.from_numpy(units).to(device)
    known = None if valid.all() else torch.from_numpy(valid).to(device)
    pages = pages_of(x) if device.type == "cpu" else None
    size = x[:1].nbytes + FAULT_AROUND
    touched = None if pages is None else lambda count: pages.touch(count * size)
    return Records(_tensor(x).to(device), _tensor(y).to(device), known, touched, members)


def _tensor(array: NDArray[np.generic]) -> Tensor:
    """The array's memory as a tensor, also where it may only be read: nothing here writes to records."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)


class Table:
    """A matrix [rows, width] of float32 that starts at zero, in memory or, beyond ``MAPPED_BYTES``, in a scratch file.

    The file has no name and goes when the table goes. On a GPU the limit is ``GPU_BYTES``.
    """

    def __init__(self, rows: int, width: int, device: torch.device = CPU) -> None:
        self.shape = (rows, width)
        self._pages: Pages | None = None
        size = 4 * rows * width
        if size <= (MAPPED_BYTES if device.type == "cpu" else GPU_BYTES):
            self.values = torch.zeros(rows, width, device=device)
            return
        with tempfile.TemporaryFile(prefix="sordino-table-") as file:
            file.truncate(size)
            mapping = mmap.mmap(file.fileno(), size)
        self._pages = Pages(mapping)
        self.values = torch.frombuffer(mapping, dtype=torch.float32).view(rows, width)

    @property
    def mapped(self) -> bool:
        """Whether the table lies on disk."""
        return self._pages is not None

    def read(self, rows: NDArray[np.int64]) -> Tensor:
        """A copy of these rows."""
        found = self.values[torch.from_numpy(rows).to(self.values.device)]
        self._touched(len(rows))
        return found

    def write(self, rows: NDArray[np.int64], values: Tensor) -> None:
        """Put these rows where they belong; of a row that comes twice the last one stays."""
        last = {int(row): i for i, row in enumerate(rows)}
        where, chosen = torch.tensor(list(last)), torch.tensor(list(last.values()))
        self.values[where.to(self.values.device)] = values[chosen.to(values.device)].to(self.values.device)
        self._touched(len(rows))

    def pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """Consecutive rows, as many as are given back at a time, to be read or written in place."""
        height = max(1, GIVEN_BACK // (4 * max(1, self.shape[1])))
        for start in range(0, self.shape[0], height):
            rows = slice(start, min(self.shape[0], start + height))
            yield rows, self.values[rows]
            self._touched(rows.stop - rows.start)

    def _touched(self, rows: int) -> None:
        if self._pages is not None:
            self._pages.touch(4 * rows * self.shape[1])
