"""Adapters of low rank: what is trained, what they compute, how they are merged, saved and exported."""

import copy

import pytest
import torch
from torch import nn

import sordino as sd
from sordino import models
from sordino.errors import BadInput


def net():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoder(layer, 1), nn.Flatten(), nn.Linear(40, 3))


def shaken(model):
    with torch.no_grad():
        for one in model.parameters():
            if one.requires_grad:
                one.normal_(std=0.3)
    return model


def test_at_first_it_is_the_model_and_only_adapters_are_trained():
    model = net()
    made, x = models.lora(model, rank=2), torch.randn(4, 5, 8)
    torch.testing.assert_close(made(x), model(x))
    trained = {name.split(".")[-2] for name, one in made.named_parameters() if one.requires_grad}
    assert trained == {"down", "up"}
    places = {name.rpartition(".down")[0].rpartition(".")[2] for name, _ in made.named_parameters() if ".down" in name}
    assert {"query", "key", "value", "out_proj", "linear1", "linear2"} <= places
    assert all(one.requires_grad for one in model.parameters()), "the model itself is left as it was"


def test_the_formula():
    base = nn.Linear(6, 4)
    made = shaken(models.lora(nn.Sequential(base), rank=2, alpha=3.0))[0]
    x = torch.randn(5, 6)
    wanted = x @ base.weight.T + base.bias + 3.0 / 2 * (x @ made.down.weight.T) @ made.up.weight.T
    torch.testing.assert_close(made(x), wanted)


def test_merged_is_the_same_function_under_the_names_of_before():
    model = net()
    made, x = shaken(models.lora(model, rank=2, alpha=5.0)), torch.randn(4, 5, 8)
    before = copy.deepcopy(made.state_dict())
    one = models.merged(made)
    torch.testing.assert_close(one(x), made(x))
    assert list(one.state_dict()) == list(model.state_dict())
    assert not models.has_adapters(one)
    assert all(torch.equal(value, before[key]) for key, value in made.state_dict().items()), "the adapted one stays"


class Sharing(nn.Module):
    """A table that is the head as well, a layer that is used in two places, and attention that stays torch's own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.first, self.out = nn.Embedding(5, 6), nn.Linear(6, 6), nn.Linear(6, 5)
        self.second, self.out.weight = self.first, self.table.weight
        self.seen = nn.MultiheadAttention(6, 2, batch_first=True, add_zero_attn=True)

    def forward(self, x):
        inner = self.second(torch.relu(self.first(self.table(x))))
        return self.out(self.seen(inner, inner, inner)[0]).mean(1)


def test_weights_and_layers_that_are_shared_stay_shared():
    model, x = Sharing(), torch.arange(12).view(3, 4) % 5
    made = models.lora(model, rank=2)
    torch.testing.assert_close(made(x), model(x))
    assert made.first is made.second, "one pair of adapters, wherever the layer is used"
    trained = {name.rpartition(".")[0] for name, one in shaken(made).named_parameters() if one.requires_grad}
    assert trained == {"first.down", "first.up", "out.down", "out.up"}
    one = models.merged(made)
    torch.testing.assert_close(one(x), made(x))
    assert one.first is one.second
    assert torch.equal(one.table.weight, model.table.weight), "what is merged into the head is not for the table"
    assert set(one.state_dict()) == set(model.state_dict())


def test_targets_and_modules_that_are_trained_whole():
    made = models.lora(net(), rank=2, targets=["query", "value"], train=["3"])
    trained = sorted(name for name, one in made.named_parameters() if one.requires_grad)
    inner = "1.layers.0.self_attn"
    assert trained == sorted(
        [
            "3.weight",
            "3.bias",
            *(f"{inner}.{part}.{own}.weight" for part in ("query", "value") for own in ("down", "up")),
        ]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank = 0"),
        ({"rank": True}, "rank = True"),
        ({"rank": 10**12}, "rank = 1000000000000 is more than the inputs and outputs of any layer, at most 40"),
        ({"alpha": -1.0}, "alpha = -1.0"),
        ({"alpha": 1e39}, "no larger than float32 holds"),
        ({"alpha": 10**400}, "no larger than float32 holds"),
        ({"targets": ["quary"]}, "no layer is called 'quary'"),
        ({"targets": "query"}, "list of names"),
        ({"targets": 5}, "list of names"),
        ({"targets": []}, "no layer is left to put an adapter beside"),
        ({"train": ["tail"]}, "no layer is called 'tail'"),
        ({"ranks": 3}, "no option ranks"),
    ],
)
def test_wrong_options_are_refused_with_what_there_is(options, message):
    with pytest.raises(BadInput, match=message):
        models.build(net(), (5, 8), 3, lora=options)


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(BadInput, match="no linear layer"):
        models.lora(nn.Sequential(nn.Conv1d(2, 2, 3)))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused_before_a_budget_pays_for_them(number):
    clients = sd.data.load("digits").partition("iid", clients=2, seed=0).with_budgets(8.0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    model[1].weight.data[0, 0] = number
    with pytest.raises(BadInput, match=r"'1\.base\.weight' hold NaN or infinity, .* mend what they were loaded"):
        sd.plan(clients, model, model_options={"lora": 2})


def test_a_run_is_saved_loaded_and_exported(tmp_path):
    clients = sd.data.load("digits").partition("iid", clients=2, seed=0).with_budgets(8.0)
    options = {"hidden": 12, "lora": {"rank": 2, "alpha": 4}}
    run = sd.train(clients, "mlp", "dp-fedavg", rounds=2, batch=16, lr=0.1, clip=1.0, model_options=options)
    about = run.result["study"]["model"]
    assert about["parameters"] == 2 * (64 + 12) + 2 * (12 + 10)
    assert len(about["frozen"]) == 64
    run.save(tmp_path / "run.pt")
    again = sd.load(tmp_path / "run.pt")
    x = torch.rand(3, 1, 8, 8)
    torch.testing.assert_close(again.model.eval()(x), run.model.eval()(x))
    torch.testing.assert_close(models.merged(again.model)(x), run.model(x))
    run.export(tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(program(x), run.model(x).softmax(-1))


def test_adapters_beside_other_weights_are_refused(tmp_path):
    clients = sd.data.load("digits").partition("iid", clients=2, seed=0).with_budgets(8.0)

    def made(seed):
        torch.manual_seed(seed)
        return models.lora(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), rank=2)

    run = sd.train(clients, made(0), "dp-fedavg", rounds=1, batch=16, lr=0.1, clip=1.0)
    run.save(tmp_path / "run.pt")
    assert sd.load(tmp_path / "run.pt", model=made(0)).model is not None
    with pytest.raises(BadInput, match="frozen weights"):
        sd.load(tmp_path / "run.pt", model=made(1))
