"""What clipping does, as an observer sees it in simulation: free, never released, covered by no guarantee (R12)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino.client.clip import Public, per_record, per_row
from sordino.client.rows import Records
from sordino.client.turn import Work

RECORDS = 2048


"""At most this many records are looked at, evenly spaced over all clients' training records."""


PIECE = 128


"""So many at a time: an observer should not take more memory than a step does."""


QUANTILES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def watch_clipping(
    work: Work, records: Records, train: list[NDArray[np.int64]], weights: Tensor, public: Public, number: int = 1
) -> dict[str, Any]:
    """At these weights: the share of records that the gate scales down, their median gradient norm, and τ_q.

    τ_q = Q_q({‖g_j‖²}) / mean ‖g_j‖², the quantile-mean ratio of AdaptDP-FedAvg's Definition 1. ``public``: what every
    client was told; ``number``: the round, whose first step's copies are looked at where records have copies.
    """
    where, whose = np.concatenate(train), np.repeat(np.arange(len(train)), [len(one) for one in train])
    some = np.linspace(0, len(where) - 1, min(len(where), RECORDS)).round().astype(np.int64)
    x, y, valid = records.at(torch.from_numpy(where[some]).to(records.y.device))
    owner = torch.from_numpy(whose[some]).to(records.y.device)
    if valid is not None:
        x, y, owner = x[valid], y[valid], owner[valid]
    if len(y) == 0:
        return {}
    losses, norms = _graded(work, weights, x if work.augment is None else work.augment.of(x, number, 0), y)
    size = work.clip.factors(losses, norms, per_record(public, owner, len(train))).abs() * norms
    bounds = per_row(work.clip.bound(public), len(train), norms)[owner]
    cut = (size > bounds * (1 + 1e-6)).double().mean()
    squares = norms[torch.isfinite(norms)].double().square().cpu().numpy()
    found: dict[str, Any] = {"clipped_share": float(cut)}
    if len(squares) and squares.mean() > 0:
        found["median_norm"] = float(np.sqrt(np.median(squares)))
        found["tau"] = {f"{q:g}": float(np.quantile(squares, q) / squares.mean()) for q in QUANTILES}
    return found


def _graded(work: Work, weights: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and gradient norms of these records."""
    found = []
    for some_x, some_y in zip(x.split(PIECE), y.split(PIECE)):
        alone = torch.zeros(len(some_y), dtype=torch.int64, device=y.device)
        graded = work.engine.shared(weights, some_x, some_y, alone, 1)
        found.append((graded.losses, graded.norms))
    return torch.cat([losses for losses, _ in found]), torch.cat([norms for _, norms in found])
