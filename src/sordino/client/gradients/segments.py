"""Which row each record of a flat batch belongs to, and sums over the records of each row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from sordino.client.gradients import fused

SMALL, LARGE = 2**16, 2**19


@dataclass(frozen=True)
class Segments:
    """Records ``0..n-1``, sorted by row; row r owns ``bounds[r] .. bounds[r+1]``.

    Attributes
    ----------
    bounds
        Python numbers, so that no sum over rows waits for a device.
    width
        Records per row where all rows have the same number, else None.
    """

    bounds: tuple[int, ...]
    width: int | None

    @staticmethod
    def regular(rows: int, width: int) -> Segments:
        """Every row has ``width`` records."""
        bounds = tuple(range(0, rows * width + 1, width)) if width else (0,) * (rows + 1)
        return Segments(bounds, width)

    @staticmethod
    def ragged(rows_of: Tensor, rows: int) -> Segments:
        """From the sorted row number of every record."""
        counts = np.bincount(rows_of.cpu().numpy(), minlength=rows)
        width = int(counts[0]) if rows and counts.min() == counts.max() else None
        return Segments((0, *counts.cumsum().tolist()), width)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.bounds) - 1

    @property
    def records(self) -> int:
        """Number of records over all rows."""
        return self.bounds[-1]

    @cached_property
    def pieces(self) -> list[tuple[int, int, int]]:
        """``(row, start, stop)`` of every row that has records."""
        return [(row, a, b) for row, (a, b) in enumerate(pairwise(self.bounds)) if b > a]

    def skips(self, values: Tensor) -> bool:
        """Whether :meth:`weighted` leaves a record with factor 0 unread, whatever its values."""
        return bool(self.width) and self.rows > 1 and fused.serves(values)

    def weighted(self, factors: Tensor, values: Tensor, out: Tensor) -> None:
        """Σ_j factors_j · values_j per row: ``[n]``, ``[n, p]`` into ``out[rows, p]``."""
        if self.skips(values):
            fused.weighted(factors, values.contiguous(), out)
            return
        if self.width and self.rows > 1:
            weights = factors.view(self.rows, 1, self.width)
            out.copy_(torch.bmm(weights, values.view(self.rows, self.width, -1)).squeeze(1))
            return
        for row, start, stop in self._prepared(out):
            torch.mv(values[start:stop].t(), factors[start:stop], out=out[row])

    def outer(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """Σ over a row's records and positions of left ⊗ right.

        ``[n, t, o]``, ``[n, t, i]`` into ``out[rows, o·i]``.
        """
        wide, deep = left.shape[2], right.shape[2]
        # On a CPU a large matrix is better written where it belongs than written aside and copied.
        if self.width and self.rows > 1 and (out.device.type != "cpu" or wide * deep <= SMALL):
            left = left.reshape(self.rows, -1, wide)
            out.copy_(torch.bmm(left.transpose(1, 2), right.reshape(self.rows, -1, deep)).flatten(1))
            return
        for row, start, stop in self._prepared(out):
            flat = left[start:stop].reshape(-1, wide)
            _product(flat.t(), right[start:stop].reshape(-1, deep), out[row].view(wide, deep))

    def _prepared(self, out: Tensor) -> list[tuple[int, int, int]]:
        pieces = self.pieces
        if len(pieces) < self.rows:
            out.zero_()
        return pieces


def _product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """``left @ right``; a large one cut into as many rows of blocks as there are threads.

    The native product of a thin pair into a large matrix leaves all threads but one idle.
    """
    threads = torch.get_num_threads()
    wide, deep = out.shape
    if threads == 1 or wide % threads or wide * deep < LARGE:
        torch.mm(left, right, out=out)
        return
    cut = left.unflatten(0, (threads, wide // threads))
    torch.bmm(cut, right.expand(threads, -1, -1), out=out.view(threads, wide // threads, deep))
