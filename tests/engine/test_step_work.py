"""A step of many stacked rows is one function over rows: no call of Python is made for every client."""

import sys

import numpy as np
import pytest
import torch

from sordino.client import gradients
from sordino.client.ask import bounded_loss
from sordino.client.clip import flat
from sordino.client.local import sgd
from sordino.client.rows import Records, Rows
from sordino.client.turn import Work, answer, take_turn
from sordino.methods.asking import candidate_loss
from sordino.models import build
from sordino.privacy.gate import Gate, Terms
from sordino.privacy.generators import Batches, Keyed, Turn
from sordino.privacy.types import Release, Sampling


class Counted(Keyed):
    """Counts draws, and draws nothing: one keyed stream a row is allowed."""

    def __init__(self) -> None:
        super().__init__("k")
        self.draws = 0

    def normal(self, turns, what, step, out, scale=None):
        self.draws += 1
        return out


class Noisy(Gate):
    private = True


def calls(rows: int, steps: int) -> tuple[int, int]:
    """Calls of functions, Python's and built-in, that a turn makes; and calls of the source of noise."""
    engine = gradients.build(build("logistic", (20,), 5, 0), "cross-entropy", shape=(20,))
    records = Records(torch.randn(100, 20), torch.randint(0, 5, (100,)))
    batches = [Batches(np.tile(np.arange(4), steps), 4 * np.arange(1, steps + 1))] * rows
    turns = [Turn(f"c{i}", 1) for i in range(rows)]
    terms = [Terms(Sampling.full(), (("gradient", 1.0),), steps, 4.0)] * rows
    source = Counted()
    gate = Noisy(None, source, "run")
    permit = gate.grant(turns, terms, "r")
    work = Work(engine, flat(), sgd(), stack=True)
    start, state = Release.public(torch.zeros(engine.dimension), "w"), Release.public({}, "s")
    seen = 0

    def count(frame, event, argument):
        nonlocal seen
        seen += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        take_turn(work, Rows(turns, batches, records), start, state, {"lr": 0.1, "clip": 1.0}, permit, gate)
    finally:
        sys.setprofile(None)
    return seen, source.draws


def test_the_calls_of_a_further_step_do_not_depend_on_the_number_of_rows():
    few = calls(4, 12)[0] - calls(4, 2)[0]
    many = calls(64, 12)[0] - calls(64, 2)[0]
    assert many - few <= 50
    assert calls(64, 12)[1] == 12


class Forward:
    """An engine that gives losses and nothing else."""

    def __init__(self, engine) -> None:
        self.losses, self.dimension = engine.losses, engine.dimension

    def shared(self, *given):
        raise AssertionError("gradients were computed for a question about losses")

    __call__ = shared


@pytest.mark.parametrize("sizes", [(3, 0, 4), (5,)])
@pytest.mark.parametrize("question", [bounded_loss(1.5), candidate_loss(1.5).question])
def test_a_question_about_losses_takes_no_gradients_and_counts_finite_losses_only(question, sizes):
    model = build("logistic", (20,), 5, 0)
    engine = gradients.build(model, "cross-entropy", shape=(20,))
    records = Records(3 * torch.randn(100, 20), torch.randint(0, 5, (100,)))
    records.x[1, 0] = float("nan")
    batches = [Batches(np.arange(n) + 7 * i, np.array([n])) for i, n in enumerate(sizes)]
    turns = [Turn(f"c{i}", 1) for i in range(len(sizes))]
    gate = Gate(None, Keyed("k"), "run")
    permit = gate.grant(turns, [Terms(Sampling.full(), (("loss", 1.0),), 1, 4.0)] * len(sizes), "r")
    start = Release.public(engine.flatten(model), "w")
    work = Work(Forward(engine), flat(), sgd(), most=2)
    found = answer(work, question, Rows(turns, batches, records), start, {}, permit, gate).value
    wanted = [
        sum(
            min(1.5, torch.nn.functional.cross_entropy(model(records.x[[j]]), records.y[[j]]).item())
            for j in one[0]
            if torch.isfinite(records.x[j]).all()
        )
        / 4.0
        for one in batches
    ]
    assert torch.allclose(found[:, 0], torch.tensor(wanted), atol=1e-6)
