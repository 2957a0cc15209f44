"""Features by name against loops, extractors of one's own, and that no record is seen beside another."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from sordino import models
from sordino.client import gradients
from sordino.client.gradients.losses import loss_by_name
from sordino.errors import BadInput
from sordino.models.isolation import OneByOne


class Mixing(nn.Module):
    """What no feature may do: it takes the batch's mean off, and remembers what it saw."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 5), nn.BatchNorm1d(5))
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x):
        found = self.inner(x.flatten(1))
        found = found - 0.5 * found.mean(0) + self.seen
        self.seen += found.sum(0)
        return found


def mixing(shape, width=5):
    return Mixing(math.prod(shape))


def picky(shape):
    class Picky(nn.Module):
        def forward(self, x):
            if float(x.flatten()[0]) > 0.9:
                raise ValueError("not this record")
            return x.flatten(1)

    return Picky()


def nothing(shape):
    return "no module"


def whole_batch(shape):
    class Sum(nn.Module):
        def forward(self, x):
            return x.sum()

    return Sum()


HERE = "test_models_features"


def features(spec, shape):
    model = models.build("logistic", shape, 3, features=spec)
    return model.get_submodule("features")


def of_length_one(numbers):
    """The numbers beside a constant of 0.25, so that all of them have length 1."""
    length = math.sqrt(sum(one**2 for one in numbers) / (1 - 0.25**2))
    return [*(one / length for one in numbers), 0.25]


@pytest.mark.parametrize("degree", [2, 3])
def test_polynomials_are_all_products(degree):
    x = torch.randn(3, 4, dtype=torch.float32)
    found = features({"name": "polynomial", "degree": degree}, (4,))(x)
    for record, out in zip(x.tolist(), found.tolist()):
        wanted = []
        for many in range(1, degree + 1):
            for chosen in itertools.combinations_with_replacement(record, many):
                wanted.append(math.prod(chosen))
        assert out == pytest.approx(of_length_one(wanted), abs=1e-6)


@pytest.mark.parametrize("soft", [True, False])
def test_bins_are_those_of_the_formula(soft):
    x = torch.tensor([[-3.0, -1.0, 0.13, 7.0], [1.0, 0.999, -0.5, -7.0]])
    spec = {"name": "binned", "bins": 5, "soft": soft, "low": -1, "high": 1, "columns": 3}
    found = features(spec, (4,))(x)
    for record, out in zip(x.tolist(), found.tolist()):
        wanted = []
        for value in record[:3]:
            inside = min(1.0, max(-1.0, value))
            for k in range(5):
                if soft:
                    wanted.append(max(0.0, 1 - abs(inside - (-1 + k * 0.5)) / 0.5))
                else:
                    low, high = -1 + k * 0.4, -1 + (k + 1) * 0.4
                    wanted.append(float(low <= inside < high or (k == 4 and inside == 1.0)))
        wanted = [one - 1 / 5 for one in wanted] + [record[3]]
        assert out == pytest.approx(of_length_one(wanted), abs=1e-6)


@pytest.mark.parametrize("spec", ["polynomial", "binned", {"name": "binned", "soft": False}])
def test_features_of_encoded_numbers_have_length_one_at_most(spec):
    corners = torch.tensor(list(itertools.product([0.0, 0.3, 1.0], repeat=4)))
    assert float(features(spec, (4,))(corners).norm(dim=1).max()) <= 1 + 1e-6


def test_random_features_are_those_of_the_network_of_that_name():
    x = torch.rand(3, 7)
    one = models.build("random-features", (7,), 3, 5, hidden=11)
    two = models.build("logistic", (7,), 3, 5, features={"name": "random", "hidden": 11})
    assert torch.equal(one(x), two(x))


def test_scattering_before_a_model_is_that_of_scatter_linear_with_the_places_of_an_image():
    x = torch.rand(3, 1, 8, 8)
    fixed, _ = models.split_fixed(models.build("scatter-linear", (1, 8, 8), 3, 5, angles=6))
    before = models.build("logistic", (1, 8, 8), 3, 5, features={"name": "scatter", "angles": 6})
    flat = before.get_submodule("features")(x).flatten(1)
    assert torch.allclose(fixed(x)[:, :-1], flat * math.sqrt(1 - 0.25**2), atol=1e-6)
    images = models.build("cnn-small", (1, 28, 28), 3, features="scatter")
    models.check(images, (1, 28, 28), 3)


SPECS = ["scatter", "random", "polynomial", "binned", f"{HERE}:mixing"]


@pytest.mark.parametrize("spec", SPECS)
def test_features_are_split_off_and_hold_nothing_to_train(spec):
    model = models.build("mlp", (1, 8, 8), 3, features=spec)
    fixed, rest = models.split_fixed(model.train())
    x = torch.rand(6, 1, 8, 8)
    assert torch.allclose(rest(models.apply_fixed(fixed, x)), model(x), atol=1e-6)
    assert not [one for one in fixed.parameters() if one.requires_grad]
    assert [name for name, one in model.named_parameters() if one.requires_grad] == [
        name for name, _ in rest.named_parameters()
    ]
    assert models.why_not_isolated(model) is None
    models.refuse_batch_statistics(model)


@pytest.mark.parametrize("spec", SPECS)
def test_at_a_site_a_records_features_are_the_same_bits_whatever_lies_beside_it(spec):
    model = models.build("logistic", (1, 8, 8), 3, features=spec)
    fixed, _ = models.split_fixed(model)
    x = torch.rand(6, 1, 8, 8)
    whole, valid = models.one_by_one(fixed, x)
    assert valid.all()
    for k in range(6):
        assert torch.equal(models.one_by_one(fixed, x[k : k + 1])[0][0], whole[k])
    assert torch.equal(models.one_by_one(fixed, x.flip(0))[0].flip(0), whole)
    assert torch.allclose(models.apply_fixed(fixed, x), whole, atol=1e-6)


@pytest.mark.parametrize("spec", ["binned", f"{HERE}:mixing"])
def test_all_engines_agree_on_a_model_whose_features_were_not_split_off(spec):
    model, x, y = (
        models.build("logistic", (1, 4, 4), 3, features=spec),
        torch.rand(4, 1, 4, 4),
        torch.tensor([0, 1, 2, 0]),
    )
    sums = []
    for kind in ("fast", "exact") if spec == "binned" else ("fast",):  # vmap cannot follow writes into buffers
        engine = gradients.build(model, "cross-entropy", kind=kind)
        graded = engine.shared(engine.flatten(model), x, y, torch.zeros(4, dtype=torch.long), 1)
        sums.append(graded.pull(torch.ones(4)).squeeze(0))
    for apart in (True, False):
        alone = gradients.Alone(model, loss_by_name("cross-entropy"), apart=apart)
        sums.append(alone.under(alone.flatten(model))(x, y).gradients.sum(0))
    for one in sums[1:]:
        assert torch.allclose(one, sums[0], atol=1e-5)


def test_what_only_an_extractor_may_do_is_still_seen_beside_it():
    """A module that lies both inside and beside is open: the inside does not hide it."""
    bad = Mixing(4)
    assert models.why_not_isolated(nn.Sequential(OneByOne(bad))) is None
    assert "Mixing" in models.why_not_isolated(nn.Sequential(OneByOne(bad), bad))
    with pytest.raises(BadInput, match="BatchNorm"):
        models.refuse_batch_statistics(nn.Sequential(OneByOne(bad), bad))
    hooked = OneByOne(nn.Linear(3, 3))
    hooked.register_forward_hook(lambda module, given, out: out + out.sum())
    assert "code of its own" in models.why_not_isolated(nn.Sequential(hooked))


def test_a_record_on_which_an_extractor_fails_is_a_null_row():
    fixed, _ = models.split_fixed(models.build("logistic", (3,), 3, features=f"{HERE}:picky"))
    found, valid = models.one_by_one(fixed, torch.tensor([[0.1, 0.2, 0.3], [0.95, 0.2, 0.3]]))
    assert valid.tolist() == [True, False]
    assert found[1].tolist() == [0.0, 0.0, 0.0]


def test_a_hash_tells_features_apart():
    def told(spec, seed=0):
        return models.build("logistic", (7,), 3, seed, features=spec).get_submodule("features").describe()["sha256"]

    assert told("random") == told("random")
    assert len({told("random"), told("random", 1), told({"name": "random", "hidden": 9}), told("polynomial")}) == 4


@pytest.mark.parametrize(
    ("spec", "shape", "message"),
    [
        ("scater", (1, 8, 8), "did you mean 'scatter'"),
        ("scatter", (30,), "at least 8×8"),
        ({"name": "binned", "bin": 3}, (4,), "no option bin; their options: bins"),
        ({"name": "binned", "bins": 1}, (4,), "bins = 1"),
        ({"name": "binned", "bins": 10**9}, (4,), "bins = 1000000000"),
        ({"name": "binned", "low": 1, "high": 0}, (4,), "low = 1"),
        ({"name": "binned", "low": "a"}, (4,), "features 'binned'"),
        ({"name": "binned", "columns": 9}, (4,), "columns = 9"),
        ({"name": "polynomial", "degree": 8}, (500,), "use a smaller degree"),
        ({"name": "random", "hidden": 10**9}, (4,), "hidden = 1000000000"),
        ({"bins": 3}, (4,), "model.features"),
        (f"{HERE}:nothing", (4,), "made a str"),
        (f"{HERE}:whole_batch", (4,), "cannot process|must give numbers"),
        (f"{HERE}:absent", (4,), "nothing called 'absent'"),
        ("no_such_module_here:make", (4,), "cannot import"),
        ({"name": f"{HERE}:mixing", "depth": 3}, (4,), "no option depth"),
    ],
    ids=str,
)
def test_mistakes_are_named_with_the_remedy(spec, shape, message):
    with pytest.raises(BadInput, match=message):
        models.build("logistic", shape, 3, features=spec)
