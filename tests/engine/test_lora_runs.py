"""Runs of adapters beside frozen weights: stopped and taken up again, saved and loaded, by several processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_sharded import assert_alike
from torch import nn

import sordino as sd
from sordino.errors import BadInput
from sordino.privacy.gate import Gate, Permit
from sordino.study.file import read_study

SETTINGS = {"rounds": 4, "rate": 0.2, "steps": 2, "lr": 0.3, "clip": 1.0}
LORA = {"rank": 2, "alpha": 4, "train": ["3"]}


def public_net(seed: int = 7) -> nn.Module:
    """Weights that somebody published."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))


def trained(digits: Any, out: Path, method: str = "dp-scaffold", net: nn.Module | None = None, **more: Any) -> Any:
    options = {"model_options": {"lora": LORA}, "out": out}
    return sd.train(digits, public_net() if net is None else net, method, **SETTINGS, **options, **more)


@pytest.fixture(scope="module")
def whole(digits, tmp_path_factory):
    """The run that nobody interrupted, and its folder."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return trained(digits, folder), folder


def charged(folder: Path) -> list[Any]:
    with sd.privacy.Ledger(folder / "ledger.db", readonly=True) as book:
        assert book.verify()
        return [book.spent(one.client) for one in book.accounts()]


def turns_in(folder: Path) -> float:
    """How many turns the first client has been charged for."""
    return sum(event.count for event in charged(folder)[0]) / SETTINGS["steps"]


def between_rounds(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    def stop(record: dict[str, Any]) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt

    return {"callbacks": [stop]}


def within_a_round(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """After the third round's first step was charged and released."""
    release = Gate.release

    def stopped(self: Gate, permit: Permit, step: int, *more: Any) -> Any:
        if permit.turns[0].round == 3 and step == 1:
            raise KeyboardInterrupt
        return release(self, permit, step, *more)

    patch.setattr(Gate, "release", stopped)
    return {}


@pytest.mark.parametrize("stop", [between_rounds, within_a_round])
def test_a_run_that_was_killed_and_resumed_ends_like_one_that_was_not(digits, whole, tmp_path, stop):
    (run, folder), half = whole, tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        trained(digits, half, **stop(patch))
    assert len((half / "log.jsonl").read_text().splitlines()) == 2, "in the third round, or before it"
    assert (turns_in(half) > 2) == (stop is within_a_round)
    resumed = trained(digits, half, resume=True)
    assert torch.equal(resumed.weights, run.weights)
    assert resumed.result["final"] == run.result["final"]
    assert resumed.privacy == run.privacy
    assert charged(half) == charged(folder), "no turn was paid for twice"
    x = torch.from_numpy(digits.x[:4])
    assert torch.equal(resumed.model(x), run.model(x)), "beside the same frozen weights"


def test_a_run_is_not_resumed_beside_other_frozen_weights(digits, tmp_path):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        trained(digits, tmp_path / "run", **between_rounds(patch))
    before = charged(tmp_path / "run")
    with pytest.raises(BadInput, match=r"holds a run with another model\.frozen"):
        trained(digits, tmp_path / "run", net=public_net(8), resume=True)
    assert charged(tmp_path / "run") == before


def test_a_saved_run_is_loaded_with_the_network_of_before_and_predicts_the_same(digits, whole, tmp_path):
    """Both as it was given to ``train`` and with adapters beside it; and beside no other weights."""
    whole[0].save(tmp_path / "run.safetensors")
    rows = digits.x[:6]
    wanted = whole[0].predict(rows)
    for model in (public_net(), sd.models.lora(public_net(), **LORA)):
        found = sd.load(tmp_path / "run.safetensors", model=model).predict(rows)
        np.testing.assert_array_equal(found.probabilities, wanted.probabilities)
        assert list(found.prediction) == list(wanted.prediction)
    for other in (public_net(8), sd.models.lora(public_net(8), **LORA)):
        with pytest.raises(BadInput, match="frozen weights are not those that this run's adapters were trained beside"):
            sd.load(tmp_path / "run.safetensors", model=other)
    with pytest.raises(BadInput, match=r"sd\.load\(path, model=…\)"):
        sd.load(tmp_path / "run.safetensors").predict(rows)


def test_models_of_clients_own_are_adapters_beside_the_same_frozen_weights(digits, tmp_path):
    run = sd.train(digits, "mlp", "mr-mtl", **SETTINGS, model_options={"hidden": 8, "lora": 2}, out=tmp_path / "run")
    x, again = torch.from_numpy(digits.x[:4]), sd.load(tmp_path / "run")
    first, second = (again.model_of(name) for name in digits.names[:2])
    assert torch.equal(first(x), run.model_of(digits.names[0])(x))
    assert not torch.equal(first(x), second(x))
    assert torch.equal(first[1].base.weight, second[1].base.weight)


STUDY = """
[study]
name = "adapters"
rounds = 3
[data]
name = "digits"
records = 600
partition = "iid"
clients = 4
[budgets]
epsilon = [0.5, 2.0, 8.0, 1.0]
delta = 1e-4
[model]
name = "mlp"
options = {hidden = 12}
lora = {rank = 2, alpha = 4, train = ["3"]}
[method]
name = "dp-scaffold"
[training]
rate = 0.3
lr = 0.3
"""


@pytest.mark.slow  # test_sharded has two processes that train adapters without the command
def test_two_processes_of_the_command_end_like_one(tmp_path):
    path = tmp_path / "study.toml"
    path.write_text(STUDY)
    command = [sys.executable, "-m", "sordino", "run", str(path), "--out", str(tmp_path / "two"), "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    read, two = read_study(path), sd.load(tmp_path / "two")
    more = {"name": read.study.name, "out": tmp_path / "one"}
    one = sd.train(read.federation(), method=read.chosen_method(), **more, **read.arguments())
    assert_alike((two.result, two.weights, None), (sd.load(tmp_path / "one").result, one.weights, None))
    assert charged(tmp_path / "two") == charged(tmp_path / "one")
