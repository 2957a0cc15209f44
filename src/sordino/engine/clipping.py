"""What clipping does, as an observer sees it in simulation: free, never released, covered by no guarantee (R12)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino.client.clip import Public, per_record, per_row
from sordino.client.rows import Records
from sordino.client.turn import Drawn, Work

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
        there = valid.view(len(valid), -1).any(1)
        x, y, owner, valid = x[there], y[there], owner[there], valid[there] if valid.dim() > 1 else None
    if len(y) == 0:
        return {}
    losses, norms = _graded(work, weights, work.seen((x, y, valid), number, 0))
    size = work.clip.factors(losses, norms, per_record(public, owner, len(train))).abs() * norms
    bounds = per_row(work.clip.bound(public), len(train), norms)[owner]
    cut = (size > bounds * (1 + 1e-6)).double().mean()
    squares = norms[torch.isfinite(norms)].double().square().cpu().numpy()
    found: dict[str, Any] = {"clipped_share": float(cut)}
    if len(squares) and squares.mean() > 0:
        found["median_norm"] = float(np.sqrt(np.median(squares)))
        found["tau"] = {f"{q:g}": float(np.quantile(squares, q) / squares.mean()) for q in QUANTILES}
    return found


def _graded(work: Work, weights: Tensor, batch: Drawn) -> tuple[Tensor, Tensor]:
    """Losses and gradient norms of these units."""
    (x, y, mask), found = batch, []
    for start in range(0, len(y), PIECE):
        part = slice(start, start + PIECE)
        alone = torch.zeros(len(y[part]), dtype=torch.int64, device=y.device)
        graded = work.engine.shared(weights, x[part], y[part], alone, 1, None if mask is None else mask[part])
        found.append((graded.losses, graded.norms))
    return torch.cat([losses for losses, _ in found]), torch.cat([norms for _, norms in found])
