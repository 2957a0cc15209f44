"""Records never see each other, whatever a model does with its batch, in the mode that training uses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_lattice import CLIP, LOSS, Paid, released
from torch import Tensor, nn

from sordino import models
from sordino.client import gradients
from sordino.client.ask import bounded_loss
from sordino.client.clip import flat
from sordino.client.gradients import Alone
from sordino.client.local import sgd
from sordino.client.rows import Records, Rows
from sordino.client.turn import Work, answer
from sordino.errors import BadInput, SordinoError
from sordino.privacy.gate import Permit, Terms
from sordino.privacy.generators import Batches, Keyed, Turn
from sordino.privacy.types import Release, Sampling


class Hand(nn.Module):
    """A layer, after something that is done to the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def mix(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.mix(x))
        return out


class BatchNorm(Hand):
    def mix(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()


class CentringInTraining(Hand):
    """Innocent in evaluation."""

    def mix(self, x: Tensor) -> Tensor:
        return x - x.mean(0) if self.training else x


class MixingAboveTwo(Hand):
    """Innocent on two records."""

    def mix(self, x: Tensor) -> Tensor:
        return x + x.roll(1, 0) if len(x) > 2 else x


class Mixup(Hand):
    def mix(self, x: Tensor) -> Tensor:
        return 0.7 * x + 0.3 * x.flip(0) if self.training else x


class Remembering(Hand):
    """Carries the last record over to the next one in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(6))

    def mix(self, x: Tensor) -> Tensor:
        seen = x + self.last
        self.last.copy_(x[-1].detach())
        return seen


class Choosy(Hand):
    """Raises where it does not like a record."""

    def mix(self, x: Tensor) -> Tensor:
        if bool((x.abs() > 1e3).any()):
            raise ValueError("too large")
        return x


MIXING = [BatchNorm, CentringInTraining, MixingAboveTwo, Mixup]


def records(seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(9, 6), torch.arange(9) % 3


def sums(model: nn.Module, x: Tensor, y: Tensor, exact: bool) -> Tensor:
    """What is summed in one step, without noise."""
    return released(Keyed("x"), model, x, y, 0.0, exact, 1.0)


def losses(model: nn.Module, x: Tensor, y: Tensor, exact: bool) -> float:
    """The released sum of losses, cut at 5, without noise."""
    engine = gradients.build(model, "cross-entropy")
    work = Work(engine, flat(), sgd(), alone=Alone(model, LOSS) if exact else None)
    turn = Turn("north", 1)
    rows = Rows([turn], [Batches(np.arange(len(y)), np.array([len(y)]))], Records(x, y))
    permit = Permit([turn], [Terms(Sampling.full(), (("loss", 0.0),), 1, 1.0)])
    start = Release.public(engine.flatten(model), "weights")
    return float(answer(work, bounded_loss(5.0), rows, start, {"clip": CLIP}, permit, Paid(Keyed("x"))).value)


@pytest.mark.parametrize("exact", [False, True], ids=["simulation", "site"])
@pytest.mark.parametrize("kind", MIXING)
def test_one_record_moves_a_sum_by_its_own_term_and_an_answer_by_its_own_loss(kind: Any, exact: bool):
    torch.manual_seed(1)
    model, (x, y) = kind(), records()
    with torch.no_grad():
        model.layer.weight *= 30
    for scale in (1.0, 1e2, 1e4):
        other = x.clone()
        other[4] = torch.randn(6) * scale
        moved = (sums(model, x, y, exact) - sums(model, other, y, exact)).norm()
        assert float(moved) <= 2 * CLIP * (1 + 1e-3), f"replacing a record moved the sum by {float(moved):.3g} C"
        assert abs(losses(model, x, y, exact) - losses(model, other, y, exact)) <= 5 * (1 + 1e-3)


@pytest.mark.parametrize("kind", MIXING)
def test_such_models_get_one_record_at_a_time(kind: Any):
    (plan,) = gradients.build(kind(), "cross-entropy").describe()
    assert plan.method == "exact"
    assert "not known to treat records one by one" in plan.reason


def test_what_a_model_remembers_is_undone_before_the_next_record():
    torch.manual_seed(0)
    model, (x, y) = Remembering(), records()
    graded = Alone(model, LOSS).under(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    together = graded(x, y).gradients
    apart = torch.cat([graded(x[k : k + 1], y[k : k + 1]).gradients for k in range(9)])
    assert torch.equal(together, apart)


@pytest.mark.parametrize("broken", ["record", "label"])
@pytest.mark.parametrize("model", ["logistic", "cnn-small", Choosy])
def test_a_record_that_raises_adds_nothing_and_its_neighbours_cannot_tell(model: Any, broken: str):
    torch.manual_seed(0)
    shape = (1, 8, 8) if model == "cnn-small" else (6,)
    built = models.build(model, shape, 3) if isinstance(model, str) else model()
    x, y = torch.randn(9, *shape), torch.arange(9) % 3
    without = sums(built, torch.cat([x[:4], x[5:]]), torch.cat([y[:4], y[5:]]), exact=True)
    if broken == "record":
        x[4] = torch.inf
    else:
        y[4] = 1000
    assert torch.equal(sums(built, x, y, exact=True), without)
    assert losses(built, x, y, exact=True) == losses(
        built, torch.cat([x[:4], x[5:]]), torch.cat([y[:4], y[5:]]), exact=True
    )


@pytest.mark.parametrize(
    "spoil",
    [
        lambda model: model[1].register_forward_hook(lambda module, given, out: out - out.mean(0)),
        lambda model: setattr(model[1], "forward", lambda x: x.mean(0, keepdim=True).expand(len(x), -1)[:, :3]),
        lambda model: model.__setitem__(0, nn.Flatten(0)),
    ],
    ids=["hook", "forward put on an instance", "flattened records"],
)
def test_code_put_on_a_known_module_makes_it_unknown(spoil: Any):
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    assert models.why_not_isolated(model) is None
    spoil(model)
    assert models.why_not_isolated(model) is not None


def test_the_engine_is_not_chosen_by_what_a_record_holds():
    """The comparison with plain autograd took the first label that was drawn; a wrong one changed the engine."""
    model = models.build("logistic", (6,), 3)
    kinds = set()
    for label in (0, 2, 1000):
        engine = gradients.build(model, "cross-entropy")
        engine.settle(engine.flatten(model), torch.randn(4, 6), torch.full((4,), label))
        kinds.add(type(engine.engine).__name__)
    assert kinds == {"Fast"}


def test_a_model_that_fails_on_every_record_stops_a_simulation_and_is_refused_at_a_site():
    """At a site one cannot tell records that raise from a model that does; so the model is tried before."""

    class Broken(Hand):
        def mix(self, x: Tensor) -> Tensor:
            raise ValueError("never works")

    x, y = records()
    with pytest.raises(SordinoError, match="not one record of a batch could be computed: ValueError: never works"):
        sums(Broken(), x, y, exact=True)
    with pytest.raises(BadInput, match="never works"):
        Alone(Broken(), LOSS).check((6,), 3)


class Picky(nn.Module):
    """Before the first trained layer: raises where it does not like a record, and remembers the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if bool((x.abs() > 1e3).any()):
            raise ValueError("too large")
        seen = x + self.last
        self.last.copy_(x[-1])
        return seen


@pytest.mark.parametrize("first", [Picky, nn.Identity])
def test_a_record_that_raises_anywhere_takes_no_neighbour_along(first: Any, monkeypatch: pytest.MonkeyPatch):
    """In the model's fixed part, or in the clipping rule: a block of records once vanished with it."""
    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(first(), nn.Linear(6, 3)), records()
    rule = flat()

    def factors(losses: Tensor, norms: Tensor, public: Any) -> Tensor:
        if float(norms) > 100:
            raise ValueError("a rule that fails on large gradients")
        return torch.ones_like(norms)

    monkeypatch.setattr("test_lattice.flat", lambda: replace(rule, factors=factors))
    without = sums(model, torch.cat([x[:4], x[5:]]), torch.cat([y[:4], y[5:]]), exact=True)
    x[4] = 1e4
    assert float(without.norm()) > 0.5
    assert torch.equal(sums(model, x, y, exact=True), without)
