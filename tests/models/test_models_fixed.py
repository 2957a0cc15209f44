"""What a network does before its first trained layer is done once for every record, and changes nothing."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
from torch import nn

import sordino as sd
from sordino import models
from sordino.client import gradients
from sordino.study.run import prepare
from sordino.study.session import train_prepared


@pytest.mark.parametrize(
    ("name", "options", "shape"),
    [("random-features", {"hidden": 9}, (1, 8, 8)), ("robust-hdp-cnn", {"standardise": True}, (1, 8, 8))],
)
def test_the_two_parts_together_are_the_model(name, options, shape):
    model = models.build(name, shape, 3, 0, **options)
    fixed, rest = models.split_fixed(model)
    x = torch.randn(5, *shape)
    assert torch.allclose(rest(models.apply_fixed(fixed, x)), model(x), atol=1e-6)
    trained = {key for key, value in model.named_parameters() if value.requires_grad}
    assert {key for key, _ in rest.named_parameters()} == trained, "names stay, so weights can be loaded into the model"
    assert not list(fixed.parameters())


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Flatten(), nn.Linear(64, 3)),
        nn.Sequential(nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, 3)),
        nn.Linear(64, 3),
    ],
    ids=["nothing worth it", "random at every step", "not a sequence"],
)
def test_other_models_stay_whole(model):
    fixed, rest = models.split_fixed(model)
    assert fixed is None
    assert rest is model


def test_a_run_ends_as_it_would_with_the_whole_model_at_every_step(digits):
    training = {"rounds": 3, "batch": 16, "steps": 2, "lr": 0.5, "clip": 1.0}
    ready = prepare(digits, "random-features", "adaptdp", 0, {"hidden": 32}, training)
    assert ready.fixed is not None
    whole = replace(ready, fixed=None, engine=gradients.build(ready.template, "cross-entropy"))
    one, two = train_prepared(ready), train_prepared(whole)
    assert torch.allclose(one.weights, two.weights, atol=1e-5)
    assert one.result["final"]["loss"] == pytest.approx(two.result["final"]["loss"], rel=1e-4)
    x = torch.from_numpy(digits.x[:7])
    assert torch.equal(one.model(x).argmax(1), two.model(x).argmax(1)), "the trained module takes records as they are"


def test_saved_runs_take_records_as_they_are(digits, tmp_path):
    run = sd.train(digits, "random-features", "dp-fedavg", 2, batch=16, steps=1, model_options={"hidden": 16})
    run.save(tmp_path / "run.sordino")
    x = torch.from_numpy(digits.x[:5])
    assert torch.allclose(sd.load(tmp_path / "run.sordino").model(x), run.model(x))


def test_threads_that_take_pieces_of_their_own_change_nothing(monkeypatch):
    fixed, _ = models.split_fixed(models.build("scatter-linear", (1, 8, 8), 3))
    x = torch.rand(40, 1, 8, 8)
    whole = models.apply_fixed(fixed, x)
    monkeypatch.setattr(importlib.import_module("sordino.models.fixed"), "BATCH", 7)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.allclose(models.apply_fixed(fixed, x), whole, atol=1e-6)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
