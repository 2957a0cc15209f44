"""A client's turn: the only loop that sees gradients. The same function runs for a thousand rows and for one site.

    sample → per-record gradients → factors → gate (bound, noise, divide) → update → … → upload
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sordino.client.clip import Clip, Public
from sordino.client.gradients import Engine, Graded
from sordino.client.local import Local
from sordino.client.rows import Rows
from sordino.privacy.gate import Gate, Permit, Piece
from sordino.privacy.types import NotReleased, Release, derive


@dataclass(frozen=True)
class Work:
    """What a method does at a client, and how gradients are computed there.

    ``stack``: compute many rows with different weights at once (GPU); otherwise such rows come one at a time.
    ``most``: records per piece, so that a large draw is cut up and never truncated.
    """

    engine: Engine
    clip: Clip
    local: Local
    stack: bool = False
    most: int = 4096


@dataclass(frozen=True)
class Upload:
    """What leaves the clients of a chunk: named releases, a row each, and nothing else."""

    parts: Mapping[str, Release]

    def __post_init__(self) -> None:
        for name, part in self.parts.items():
            if not isinstance(part, Release):
                raise NotReleased(f"upload {name!r} is a {type(part).__name__} that did not pass the gate")


def take_turn(
    work: Work, rows: Rows, start: Release, state: Release, public: Public, permit: Permit, gate: Gate
) -> tuple[Upload, Release]:
    """K private steps from ``start`` (the weights the server sent, [d]), then the upload and the client's new state.

    Guarantees: the weights after each step are a function of releases and public facts alone, checked by type;
    ``rows.steps`` releases are made for every row, which is what ``permit`` was charged for.
    """
    count, width = len(rows.turns), work.engine.dimension
    bounds = {"gradient": torch.full((count,), work.clip.bound(public), device=start.value.device)}
    carried = derive("weights", lambda w, s: (w.expand(count, width).clone(), s), start, state)
    for step in range(rows.steps):
        pieces = _pieces(work, rows, step, carried.value[0], public)
        released = gate.release(permit, step, pieces, bounds, width)
        carried = derive("weights", lambda c, g: work.local.update(c[0], c[1], g, public), carried, released["gradient"])
    ended = derive("upload", lambda c, w: work.local.finish(c[0], w, c[1], public), carried, start)
    parts = {name: derive(name, lambda e, n=name: e[0][n], ended) for name in ended.value[0]}
    return Upload(parts), derive("state", lambda e: e[1], ended)


def _pieces(work: Work, rows: Rows, step: int, params: Tensor, public: Public) -> Iterator[Mapping[str, Piece]]:
    """The step's batch, graded: many rows with equal weights flat, many with different ones stacked, or one row."""
    if len(rows.turns) == 1:
        for x, y, mask in rows.one(step, work.most):
            yield _piece(work, work.engine(params, x, y, mask), public, lambda v: v[:, None])
    elif step == 0 and not work.stack:
        x, y, owner = rows.shared(step)
        if len(y):
            graded = work.engine.shared(params[0], x, y, owner, len(rows.turns))
            yield _piece(work, graded, public, lambda v: v[owner])
    else:
        x, y, stacked_mask = rows.stack(step)
        yield _piece(work, work.engine(params, x, y, stacked_mask), public, lambda v: v[:, None])


def _piece(work: Work, graded: Graded, public: Public, spread: Callable[[Tensor], Tensor]) -> Mapping[str, Piece]:
    factors = work.clip.factors(graded.losses, graded.norms, public)
    return {"gradient": Piece(graded.norms, factors, graded.pull, spread)}
