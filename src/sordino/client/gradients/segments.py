"""Which row each record of a flat batch belongs to, and sums over the records of each row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
        return Segments(tuple(range(0, rows * width + 1, width)) if width else (0,) * (rows + 1), width)

    @staticmethod
    def ragged(rows_of: Tensor, rows: int) -> Segments:
        """From the sorted row number of every record."""
        counts = torch.bincount(rows_of.cpu(), minlength=rows)
        bounds = (0, *torch.cumsum(counts, 0).tolist())
        width = int(counts[0]) if rows and bool((counts == counts[0]).all()) else None
        return Segments(bounds, width)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.bounds) - 1

    @property
    def records(self) -> int:
        """Number of records over all rows."""
        return self.bounds[-1]

    def pieces(self) -> list[tuple[int, int, int]]:
        """``(row, start, stop)`` of every row that has records."""
        return [(row, a, b) for row, (a, b) in enumerate(zip(self.bounds, self.bounds[1:])) if b > a]

    def weighted(self, factors: Tensor, values: Tensor) -> Tensor:
        """Σ_j factors_j · values_j per row: ``[n]``, ``[n, p]`` → ``[rows, p]``."""
        if self.width:
            weights = factors.view(self.rows, 1, self.width)
            return torch.bmm(weights, values.view(self.rows, self.width, -1)).squeeze(1)
        out = values.new_zeros(self.rows, values.shape[1])
        for row, start, stop in self.pieces():
            torch.mv(values[start:stop].t(), factors[start:stop], out=out[row])
        return out

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        """Σ over a row's records and positions of left ⊗ right: ``[n, t, o]``, ``[n, t, i]`` → ``[rows, o, i]``."""
        wide, deep = left.shape[2], right.shape[2]
        if self.width:
            left = left.reshape(self.rows, -1, wide)
            return torch.bmm(left.transpose(1, 2), right.reshape(self.rows, -1, deep))
        out = left.new_zeros(self.rows, wide, deep)
        for row, start, stop in self.pieces():
            flat = left[start:stop].reshape(-1, wide)
            torch.mm(flat.t(), right[start:stop].reshape(-1, deep), out=out[row])
        return out
