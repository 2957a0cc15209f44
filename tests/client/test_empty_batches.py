"""Several rows in one pass, some with nothing in their batch: each is charged, noised and released as it is alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sordino.client import gradients
from sordino.client.clip import flat
from sordino.client.local import sgd
from sordino.client.rows import Records, Rows
from sordino.client.turn import Work, take_turn
from sordino.models import build
from sordino.privacy.gate import Gate, Terms
from sordino.privacy.generators import Batches, Keyed, Turn
from sordino.privacy.ledger import Ledger, Plan
from sordino.privacy.types import Budget, Release, Sampling

CLIP, DIVISOR, NOISE = 0.7, 2.5, 1.5
DRAWN = {
    "full": [[0, 1, 2], [1], [0, 2], []],
    "empty": [[], [], [4, 5], []],
    "null": [[8], [8, 8], [9], []],
}
"""The batches of every client. Record 8 is null; record 0, odd in some tests, is what short batches are padded with."""

NOTHING = {"full": [3], "empty": [0, 1, 3], "null": [0, 1, 3]}
"""The steps in which nothing is in a client's batch."""

TERMS = Terms(Sampling.poisson(0.3), (("gradient", NOISE),), len(DRAWN["full"]), DIVISOR)


class Watched(Gate):
    """A gate that keeps what it releases."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger, Keyed("a run's key"), "run")
        self.values: list[Tensor] = []

    def _seal(self, *given: Any) -> Release:
        found = super()._seal(*given)
        self.values.append(found.value.clone())
        return found


def records_with(odd: float | None) -> Records:
    drawn = torch.Generator().manual_seed(0)
    x, y = torch.randn(12, 1, 8, 8, generator=drawn), torch.randint(0, 10, (12,), generator=drawn)
    if odd is not None:
        x[0] = odd
    return Records(x, y, torch.arange(12) != 8)


def turn_of(
    folder: Path, names: list[str], model: str, odd: float | None = None, stack: bool = False
) -> tuple[Tensor, Tensor]:
    """The turn of these clients in one pass: what was released, [steps, rows, d], and the updates, [rows, d]."""
    template = build(model, (1, 8, 8), 10, 0)
    engine = gradients.build(template, "cross-entropy", shape=(1, 8, 8))
    batches = [
        Batches(np.concatenate(DRAWN[name]).astype(np.int64), np.cumsum([len(one) for one in DRAWN[name]]))
        for name in names
    ]
    turns = [Turn(name, 1) for name in names]
    with Ledger(folder / f"{len(list(folder.iterdir()))}.db") as book:
        for name in names:
            book.open_account(name, Budget(1000.0, 1e-5), simulated=True)
        book.declare([Plan(name, "run", (TERMS.event,), 1) for name in names])
        gate = Watched(book)
        permit = gate.grant(turns, [TERMS] * len(names), "request")
        work = Work(engine, flat(), sgd(), stack=stack)
        start = Release.public(engine.flatten(template), "weights")
        public = {"lr": 0.3, "clip": CLIP}
        rows = Rows(turns, batches, records_with(odd))
        upload, _ = take_turn(work, rows, start, Release.public({}, "state"), public, permit, gate)
        for name in names:
            assert [(one.count, one.noise) for one in book.spent(name)] == [(TERMS.count, NOISE)]
    assert permit.used == {("gradient", step) for step in range(TERMS.count)}
    return torch.stack(gate.values), upload.parts["update"].value


@pytest.mark.parametrize("odd", [None, float("nan"), 1e18], ids=str)
@pytest.mark.parametrize("stack", [False, True], ids=["on a CPU", "as on a GPU"])
@pytest.mark.parametrize("model", ["logistic", "cnn-small"])
def test_an_empty_batch_in_a_pass_with_others_is_released_as_noise_alone(
    tmp_path: Path, model: str, stack: bool, odd: float | None
) -> None:
    released, _ = turn_of(tmp_path, list(DRAWN), model, odd, stack)
    assert released.isfinite().all()
    source, scale, room = Keyed("a run's key"), torch.tensor([NOISE * CLIP]), torch.zeros(1, released.shape[2])
    for row, name in enumerate(DRAWN):
        for step in range(TERMS.count):
            noise = source.normal([Turn(name, 1)], "gradient/gradient", step, room.clone(), scale)
            nothing = torch.equal(released[step, row], noise[0] * torch.tensor(1 / DIVISOR))
            assert nothing == (step in NOTHING[name])
            assert (noise != 0).all()
    even, _ = turn_of(tmp_path, list(DRAWN), model, None, stack)
    torch.testing.assert_close(released[:, 1:], even[:, 1:], atol=1e-6, rtol=0)  # the odd record is of the first row


@pytest.mark.parametrize("stack", [False, True], ids=["on a CPU", "as on a GPU"])
def test_a_row_with_empty_batches_is_what_it_is_alone(tmp_path: Path, stack: bool) -> None:
    released, updates = turn_of(tmp_path, list(DRAWN), "cnn-small", stack=stack)
    for row, name in enumerate(DRAWN):
        alone, update = turn_of(tmp_path, [name], "cnn-small")
        torch.testing.assert_close(released[:, row], alone[:, 0], atol=1e-5, rtol=0)
        torch.testing.assert_close(updates[row], update[0], atol=1e-5, rtol=0)
