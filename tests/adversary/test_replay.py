"""Every private method, twice, on neighbouring data, with what was released frozen: nothing else may differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from replay import Tape, neighbours, replay_simulation, replay_sites
from torch import Tensor, nn

import sordino as sd
from sordino import methods
from sordino.data import Federation
from sordino.privacy import gate

PRIVATE = [name for name in methods.names() if methods.get(name).private]
DEPLOYABLE = [name for name in PRIVATE if name != "optimum"]

WAYS = {
    "poisson zero-out": ("zero-out", {"rate": 0.9}),
    "poisson replace-one": ("replace-one", {"rate": 0.9}),
    "fixed replace-one": ("replace-one", {"rate": 0.9, "sampling": "fixed"}),
    "full zero-out": ("zero-out", {"sampling": "full"}),
    "full replace-one": ("replace-one", {"sampling": "full"}),
}
KINDS = ["huge", "label", "nan", "plain"]


def three(adjacency: str) -> Federation:
    digits = sd.data.load("digits", records=90).partition("iid", clients=3, seed=0)
    return digits.with_budgets([2.0, 4.0, 9.0], 1e-3, adjacency=adjacency)


def simulated(method: str, way: str, kind: str, model: Any = "logistic", **more: Any) -> None:
    adjacency, training = WAYS[way]
    first, second, tape = neighbours(three(adjacency), kind, adjacency)
    settings = {"model": model, "method": method, "rounds": 2, "steps": 2, "seed": 1, "lr": 0.2, **training, **more}
    findings = replay_simulation(first, second, tape, **settings)
    assert not findings, "\n".join(map(str, findings[:5]))
    shows(tape, kind)


def deployed(
    folder: Path, method: str, way: str, kind: str, model: str = "logistic", trust: Any = None, **more: Any
) -> None:
    adjacency, training = WAYS[way]
    clients = three(adjacency)
    first, second, tape = neighbours(clients, kind, adjacency)
    study = {
        "study": {"rounds": 2, "seed": 1},
        "model": {"name": model},
        "method": {"name": method},
        "budgets": {"adjacency": adjacency},
        "training": {"steps": 2, "lr": 0.2, **training, **more},
        "deployment": {"sites": list(clients.names), "shape": list(clients.shape), "classes": clients.classes},
    }
    if trust is not None:
        study["trust"] = trust
    findings = replay_sites(folder, first, second, tape, study)
    assert not findings, "\n".join(map(str, findings[:5]))
    shows(tape, kind)


def shows(tape: Tape, kind: str) -> None:
    """The odd record was in a batch, or the replay shows nothing; unless nobody who has one was chosen to train.

    Nor does it show anything where nothing was released: a site answers every trouble with ``unavailable``.
    """
    assert tape.made, "nothing was released"
    chosen = any(turn.client in tape.changed and part == "gradient" for turn, _, part in tape.made)
    assert tape.moved > 0 or kind in ("nan", "raises") or not chosen


def turns(choices: list[Any], number: int) -> Any:
    """A different one for every method, so that a small grid sees all of them."""
    return choices[number % len(choices)]


@pytest.mark.parametrize("method", PRIVATE)
def test_a_simulation_of_every_method(method: str):
    place = PRIVATE.index(method)
    simulated(method, "poisson zero-out", turns(KINDS, place))
    simulated(method, turns(list(WAYS)[1:], place), turns(KINDS, place + 1))


@pytest.mark.parametrize("method", DEPLOYABLE)
def test_sites_of_every_method(tmp_path: Path, method: str):
    place = DEPLOYABLE.index(method)
    deployed(tmp_path, method, turns(list(WAYS), place), turns(KINDS, place + 2))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", ["dp-fedavg", "fedfdp", "adaptdp"])
def test_sites_that_share_noise(tmp_path: Path, method: str, way: str):
    """What a record moves is a sum of integers, by no more than its noise was made for; messages are the same."""
    kind = turns(KINDS, list(WAYS).index(way) + len(method))
    deployed(tmp_path, method, way, kind, trust={"noise": "shared", "colluders": 1}, steps=1)


def test_integers_that_a_record_moves_too_far_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    honest = gate.exact_units
    monkeypatch.setattr(gate, "exact_units", lambda *args: {part: 1.1 * one for part, one in honest(*args).items()})
    with pytest.raises(AssertionError, match="a sum that one record moves by more"):
        deployed(tmp_path, "dp-fedavg", "full zero-out", "huge", trust={"noise": "shared"}, steps=1)


@pytest.mark.parametrize("model", ["mlp", "cnn-small"])
@pytest.mark.parametrize("kind", KINDS)
def test_other_models(tmp_path: Path, model: str, kind: str):
    simulated("fedfdp", "poisson zero-out", kind, model)
    deployed(tmp_path, "dp-scaffold", "poisson replace-one", kind, model)


@pytest.mark.parametrize("way", ["poisson zero-out", "poisson replace-one"])
def test_a_record_that_makes_the_model_raise_is_a_null_record(tmp_path: Path, way: str):
    """R10: it contributes zero and never aborts a round; at a site nobody can tell."""
    deployed(tmp_path, "dp-fedavg", way, "raises")


class Sorting(nn.Module):
    """Gives every record the score of another one, by the records' order."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.layer(x)[torch.argsort(x[:, 0])]


class Centring(Sorting):
    """Takes the batch's mean away from every record."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.layer(x - x.mean(0, keepdim=True))


@pytest.mark.parametrize("model", [Sorting, Centring])
@pytest.mark.parametrize("exact", [False, True])
def test_a_model_that_mixes_records_moves_no_sum_by_more_than_was_declared(model: type[nn.Module], exact: bool):
    for kind in ("huge", "label"):
        simulated("dp-fedavg", "full zero-out", kind, model(), clip=0.1, exact_noise=exact)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", PRIVATE)
def test_the_whole_grid(tmp_path: Path, method: str, way: str, kind: str):
    for model in ("logistic",) if method == "least-squares" else ("logistic", "mlp", "cnn-small"):
        simulated(method, way, kind, model)
        if method in DEPLOYABLE:
            deployed(tmp_path / model, method, way, kind, model)
