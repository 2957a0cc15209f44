"""Which engine a model gets, why, and what is refused."""

import subprocess
import sys

import pytest
import torch
from gradient_reference import assert_graded_like_plain
from torch import nn

from sordino.client import gradients
from sordino.errors import BadInput
from sordino.models import isolated


@isolated
class Scaled(nn.Module):
    """A parameter of the module's own, which no rule knows."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(x * self.scale)


@isolated
class Twice(nn.Module):
    """One layer run twice in a pass."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


@isolated
class TwiceConvolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Conv1d(1, 1, 3, padding=1), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.inner(torch.tanh(self.inner(x.unsqueeze(1)))).squeeze(1))


@isolated
class PastTheLayer(nn.Module):
    """Reads a layer's weight without calling the layer, as weight penalties and tied decoders do."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(x) + x @ self.out.weight.t()


class Mixing(nn.Module):
    """Subtracts the batch's mean: a record's output depends on the others."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(x - x.mean(0))


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        (Scaled, "no fast rule"),
        (TwiceConvolved, "runs 2 times"),
        (PastTheLayer, "differ"),
        (Mixing, "not known to treat records one by one"),
    ],
)
def test_a_model_the_fast_engine_cannot_serve_goes_to_the_exact_one_with_a_reason(factory, reason):
    torch.manual_seed(0)
    model = factory()
    x, y = torch.randn(2, 4, 4), torch.randint(0, 3, (2, 4))
    engine = gradients.build(model, "cross-entropy")
    assert_graded_like_plain(engine, model, x, y)
    (plan,) = engine.describe()
    assert plan.method == "exact"
    assert reason in plan.reason
    with pytest.raises(BadInput, match="use kind='auto'"):
        gradients.build(model, "cross-entropy", "fast", shape=(4,))


def test_grading_on_a_cpu_imports_no_compiler():
    """What torch would import for nothing takes 180 MB and seconds, at the start of every run and every site's turn."""
    code = (
        "import sys, torch; from sordino import models; from sordino.client import gradients;"
        "model = models.build('resnet18-gn', (3, 8, 8), 10, 0, stem='small');"
        "engine = gradients.build(model, 'cross-entropy', shape=(3, 8, 8)); params = engine.flatten(model)[None];"
        "graded = engine(params, torch.randn(1, 3, 3, 8, 8), torch.zeros(1, 3, dtype=torch.long));"
        "graded.pull(torch.ones(1, 3)); sys.exit(any(name in sys.modules for name in ('torch._dynamo',"
        "'torch._inductor', 'sympy')) or engine.describe()[0].method == 'exact')"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_plan_names_every_layer_with_its_method_and_reason():
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3),
        nn.Flatten(),
        nn.Linear(576, 3),
    )
    before = {plan.layer: plan for plan in gradients.build(model, "cross-entropy").describe()}
    assert "size of its input" in before["3"].reason
    plans = {plan.layer: plan for plan in gradients.build(model, "cross-entropy", shape=(3, 8, 8)).describe()}
    assert list(plans) == ["0", "1", "3", "5"]
    assert [plan.kind for plan in plans.values()] == ["Conv2d", "GroupNorm", "Conv2d", "Linear"]
    assert [plan.method for plan in plans.values()] == ["per-record", "per-record", "per-record", "ghost"]
    assert all(plan.reason for plan in plans.values())


def test_batch_norm_is_refused_with_its_name_and_the_remedy():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(BadInput, match=r"layer '1' is BatchNorm1d.*private_ready"):
        gradients.build(model, "cross-entropy")


def test_a_layer_that_runs_twice_and_tied_weights_are_served_by_the_fast_engine():
    torch.manual_seed(0)
    tied = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3))
    tied[2].weight = tied[0].weight
    for model in (Twice(), tied):
        engine = gradients.build(model, "cross-entropy")
        assert_graded_like_plain(engine, model, torch.randn(2, 4, 4), torch.randint(0, 3, (2, 4)))
        assert "exact" not in {plan.method for plan in engine.describe()}


@pytest.mark.parametrize(
    ("loss", "kind", "message"), [("hinge", "auto", "unknown loss"), ("cross-entropy", "quick", "unknown gradient")]
)
def test_unknown_names_are_refused_with_what_is_known(loss, kind, message):
    with pytest.raises(BadInput, match=message):
        gradients.build(nn.Linear(2, 2), loss, kind)


def test_a_model_with_nothing_to_train_is_refused():
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(BadInput, match="no trainable parameter"):
        gradients.build(model, "cross-entropy")
