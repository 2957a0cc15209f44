"""How held-out records are scored: each falls into one cell of a table, and is right or not."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sordino.client.rows import Records
from sordino.privacy.cells import NO_CELL, Cells
from sordino.privacy.gate import Gate, Permit
from sordino.privacy.types import Release


def placed(outputs: Tensor, targets: Tensor, valid: Tensor | None, cells: Cells) -> dict[str, tuple[Tensor, int]]:
    """The tables of an evaluation as the gate counts them: every record's cell, [records, 1], and their number.

    ``scores`` is the table, ``correct`` a table of one cell with the records that the model gets right. A null record,
    and one whose output is not finite, falls into no cell.
    """
    place = cells.place(outputs.detach().cpu().numpy(), targets.cpu().numpy())
    if valid is not None:
        place[~valid.cpu().numpy()] = NO_CELL
    found = {"scores": (torch.from_numpy(place)[:, None], cells.count)}
    if cells.classes:
        right = np.append(cells.right, False)[place]  # NO_CELL, −1, is the last
        found["correct"] = (torch.from_numpy(np.where(right, 0, NO_CELL))[:, None], 1)
    return found


def score(
    outputs: Tensor, records: Records, valid: Tensor | None, cells: Cells, permit: Permit, gate: Gate
) -> dict[str, Release]:
    """Release what held-out units say of a model: counts by cell, and how many are right; a unit counts once in all."""
    return gate.count(permit, 0, placed(outputs, records.y, valid, cells), records.whose)
