"""Rows: the participations of a chunk, and their batches as tensors.

Three layouts with one face. *One row*: unpadded, cut into pieces that fit memory. *Shared*: many rows that still have
the same weights (the first step of a round) as one flat ragged batch. *Stack*: many rows with weights of their own,
padded to the longest batch with a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sordino import models
from sordino.privacy.generators import Batches, Turn
from sordino.privacy.threads import one_thread

WIDTHS = 16


@dataclass(frozen=True)
class Records:
    """Records as tensors, in memory or mapped from disk. ``valid`` is False on null rows, which contribute zero.

    ``touched`` hears how many records were read, so that pages of a mapped file can be given back.
    """

    x: Tensor
    y: Tensor
    valid: Tensor | None = None
    touched: Callable[[int], None] | None = None

    def at(self, where: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The records at these positions, and which of them are valid (None: all)."""
        valid = None if self.valid is None else self.valid.index_select(0, where)
        x, y = self.x.index_select(0, where), self.y.index_select(0, where)
        if self.touched is not None:
            self.touched(len(where))
        return x, y, valid


def seen_alone(fixed: nn.Module, records: Records) -> Records:
    """Records as the first trained layer sees them: each by itself through the fixed modules before it, bit for bit.

    One on which they raise an error becomes a null row: it contributes zero, and nobody can tell (R8, R10).
    """
    with one_thread():
        x, fine = models.one_by_one(fixed, records.x)
    valid = fine if records.valid is None else fine & records.valid
    return Records(x, records.y, None if bool(valid.all()) else valid)


@dataclass(frozen=True)
class Rows:
    """Some participations with the same number of steps.

    ``batches[row][step]`` are positions in ``records``, drawn before the first step.
    """

    turns: list[Turn]
    batches: list[Batches]
    records: Records

    @cached_property
    def _lengths(self) -> NDArray[np.int64]:
        """Size of every batch, [rows, steps]."""
        return np.diff([row.ends for row in self.batches], axis=1, prepend=0)

    @cached_property
    def _widths(self) -> list[int]:
        """The longest batch of every step; on a GPU one of few sizes, since what it prepares for one is used again."""
        few = WIDTHS if self.records.y.is_cuda else 1
        return [-(-max(1, one) // few) * few for one in self._lengths.max(0).tolist()]

    @cached_property
    def _padded(self) -> tuple[Tensor, Tensor]:
        """Positions and mask of all steps, [steps, rows, b], on the records' device: one transfer a turn."""
        mask = np.arange(max(self._widths)) < self._lengths[:, :, None]
        where = np.zeros(mask.shape, dtype=np.int64)
        where[mask] = np.concatenate([row.positions for row in self.batches])
        device = self.records.y.device
        there, real = torch.from_numpy(where).to(device), torch.from_numpy(mask).to(device)
        return there.transpose(0, 1).contiguous(), real.transpose(0, 1).contiguous()

    @property
    def steps(self) -> int:
        """K, local steps (batches) of this turn."""
        return len(self.batches[0])

    def one(self, step: int, most: int) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """The only row's batch as [1, b, …] tensors, in pieces of at most ``most`` records."""
        where = torch.from_numpy(self.batches[0][step])
        for piece in where.split(most) if len(where) else ():
            x, y, mask = self.records.at(piece.to(self.records.y.device))
            yield x[None], y[None], None if mask is None else mask[None]

    def shared(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """All rows' valid records end to end: x[n, …], y[n], and which row each record belongs to (sorted)."""
        chosen = [row[step] for row in self.batches]
        owner = torch.from_numpy(np.repeat(np.arange(len(chosen)), [len(one) for one in chosen]))
        where = torch.from_numpy(np.concatenate(chosen))
        if self.records.valid is not None:
            keep = self.records.valid.index_select(0, where.to(self.records.valid.device)).cpu()
            where, owner = where[keep], owner[keep]
        x, y, _ = self.records.at(where.to(self.records.y.device))
        return x, y, owner.to(self.records.y.device)

    def stack(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """All rows' batches as [rows, b, …], padded to the step's longest, with the mask of real ones."""
        wide = self._widths[step]
        where, mask = self._padded[0][step, :, :wide], self._padded[1][step, :, :wide]
        x, y, valid = self.records.at(where.reshape(-1))
        if valid is not None:
            mask = mask & valid.view(mask.shape)
        return x.view(*where.shape, *x.shape[1:]), y.view(where.shape), mask
