"""Rows: the participations of a chunk, and their batches as tensors.

What is drawn, clipped and counted is a *unit* of privacy: a record, or a person with several records.

Three layouts with one face. *One row*: unpadded, cut into pieces that fit memory. *Shared*: many rows that still have
the same weights (the first step of a round) as one flat ragged batch. *Stack*: many rows with weights of their own,
padded to the longest batch with a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
    ``members[units, m]`` are the positions of each unit's records, −1 behind the last; None where every record is a
    unit of its own.
    """

    x: Tensor
    y: Tensor
    valid: Tensor | None = None
    touched: Callable[[int], None] | None = None
    members: Tensor | None = None

    def __len__(self) -> int:
        return len(self.y if self.members is None else self.members)

    @property
    def single(self) -> Records:
        """The same records, each by itself."""
        return self if self.members is None else Records(self.x, self.y, self.valid, self.touched)

    @property
    def whose(self) -> Tensor | None:
        """The number of every record's unit, ``[records]``; None where every record is one.

        For records that all belong to some unit, as ``only`` leaves them.
        """
        if self.members is None:
            return None
        real = self.members >= 0
        found = torch.empty(int(real.sum()), dtype=torch.int64)
        found[self.members[real].cpu()] = torch.arange(len(real)).repeat_interleave(real.sum(1).cpu())
        return found

    def only(self, units: Tensor) -> Records:
        """These units alone, their records in memory."""
        if self.members is None:
            return Records(*self.at(units))
        chosen = self.members[units]
        real = chosen >= 0
        where = torch.full_like(chosen, -1)
        where[real] = torch.arange(int(real.sum()), device=chosen.device)
        return replace(Records(*self.single.at(chosen[real])), members=where)

    def at(self, where: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The units at these positions, and what is valid (None: all).

        Records ``x[n, …]``, ``y[n]``, valid ``[n]``; units of several records ``x[n, m, …]``, ``y[n, m]``, valid
        ``[n, m]``, where m is the largest of them (on a GPU of all units: it prepares for one shape).
        """
        if self.members is not None:
            return self._units(self.members.index_select(0, where))
        valid = None if self.valid is None else self.valid.index_select(0, where)
        x, y = self.x.index_select(0, where), self.y.index_select(0, where)
        if self.touched is not None:
            self.touched(len(where))
        return x, y, valid

    def _units(self, members: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        real = members >= 0
        if members.shape[1] > 1 and not members.is_cuda:
            most = max(1, int(real.sum(1).max())) if len(real) else 1
            members, real = members[:, :most], real[:, :most]
        # A unit's own first record fills up its row: nobody else's numbers are near it.
        places = torch.where(real, members, members[:, :1]).clamp_(min=0)
        x, y, valid = self.single.at(places.reshape(-1))
        real = real if valid is None else real & valid.view(real.shape)
        if self.members is not None and self.members.shape[1] == 1:
            return x, y, real[:, 0]
        shape = members.shape
        known = None if not real.is_cuda and bool(real.all()) else real
        return x.view(*shape, *x.shape[1:]), y.view(*shape, *y.shape[1:]), known


def seen_alone(fixed: nn.Module, records: Records) -> Records:
    """Records as the first trained layer sees them: each by itself through the fixed modules before it, bit for bit.

    One on which they raise an error becomes a null row: it contributes zero, and nobody can tell (R8, R10).
    """
    with one_thread():
        x, fine = models.one_by_one(fixed, records.x)
    valid = fine if records.valid is None else fine & records.valid
    return Records(x, records.y, None if bool(valid.all()) else valid, members=records.members)


@dataclass(frozen=True)
class Rows:
    """Some participations with the same number of steps.

    ``batches[row][step]`` are positions of units in ``records``, drawn before the first step.
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
        """The longest batch of every step; on a GPU of all steps, one of few sizes: what it prepares is used again."""
        longest = self._lengths.max(0)
        if not self.records.y.is_cuda:
            return [max(1, one) for one in longest.tolist()]
        return [-(-max(1, int(longest.max())) // WIDTHS) * WIDTHS] * self.steps

    @cached_property
    def padded(self) -> tuple[Tensor, Tensor]:
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
        """The only row's batch as [1, b, …] tensors, in pieces of at most ``most`` units."""
        where = torch.from_numpy(self.batches[0][step])
        for piece in where.split(most) if len(where) else ():
            x, y, mask = self.records.at(piece.to(self.records.y.device))
            yield x[None], y[None], None if mask is None else mask[None]

    def shared(self, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """All rows' units end to end: x[n, …], y[n], and which row each belongs to (sorted).

        Null records are left out; of units with several records the last tensor says which are valid.
        """
        chosen = [row[step] for row in self.batches]
        owner = torch.from_numpy(np.repeat(np.arange(len(chosen)), [len(one) for one in chosen]))
        where = torch.from_numpy(np.concatenate(chosen))
        if self.records.valid is not None and self.records.members is None:
            keep = self.records.valid.index_select(0, where.to(self.records.valid.device)).cpu()
            where, owner = where[keep], owner[keep]
        x, y, valid = self.records.at(where.to(self.records.y.device))
        return x, y, owner.to(self.records.y.device), valid if self.records.members is not None else None

    def stack(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """All rows' batches as [rows, b, …], padded to the step's longest, with the mask of real ones.

        The mask has an axis more where units have several records.
        """
        wide = self._widths[step]
        return self.stacked(self.padded[0][step, :, :wide], self.padded[1][step, :, :wide])

    def stacked(self, where: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same of the units at positions ``where[rows, b]``, of which those are real that the mask says."""
        x, y, valid = self.records.at(where.reshape(-1))
        if valid is not None:
            tail = valid.shape[1:]
            mask = mask.view(*mask.shape, *[1] * len(tail)) & valid.view(*mask.shape, *tail)
        return x.view(*where.shape, *x.shape[1:]), y.view(*where.shape, *y.shape[1:]), mask
