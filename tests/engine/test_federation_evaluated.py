"""Four real SuperNodes over TLS: a run that is judged every other round, then its model judged once more."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from federation_network import Network
from federation_rig import table
from federation_spy import check_wire

import sordino as sd
from sordino.engine.federation.held import held_mask
from sordino.engine.federation.wire import SCORES, unpack
from sordino.privacy.held import HELD
from sordino.privacy.ledger import Ledger
from sordino.study.file import make_study
from sordino.study.finished import asked
from sordino.study.status import look

NAMES = ["anna", "bert", "cleo", "dora"]


def by_hand(network: Network, weights: torch.Tensor) -> float:
    """The share of all held-out records that these weights get right, from the sites' files and ledgers."""
    right = count = 0
    for name in NAMES:
        file = network.folder / f"{name}.npz"
        with np.load(file) as data, Ledger(network.folder / f"{name}.db") as book:
            out = held_mask(book, 0.4, file, len(data["y"]))
            x, y = data["x"][out].reshape(out.sum(), -1), data["y"][out]
        scores = x @ weights[:640].view(10, 64).numpy().T + weights[640:].numpy()
        right, count = right + int((scores.argmax(1) == y).sum()), count + len(y)
    assert 500 < count < 700
    return right / count


@pytest.mark.slow
def test_four_sites_judge_a_run_and_a_finished_model(tmp_path: Path):
    laid = Network.lay(tmp_path, dict.fromkeys(NAMES, 60.0), 1500, 0.4)
    study = table("dp-fedavg", laid.clients, rounds=4)
    study |= {"training": {"steps": 5, "rate": 0.3, "lr": 2.0}, "evaluation": {"every": 2}}
    with laid as network:
        result, folder = network.run(study)
        trained = sd.load(folder)
        once = asked(make_study(study), trained)
        later, again = network.run(json.loads(once.model_dump_json(exclude_none=True, exclude_defaults=True)), trained)
    accuracies = {one["round"]: one for one in result["evaluation"] if one["metric"] == "accuracy"}
    sent = {
        packet.facts["round"]: packet.tensors["weights"]
        for file in sorted((tmp_path / "anna.wire").glob("*.in"))
        if (packet := unpack(file.read_bytes())).kind == SCORES and packet.facts["brief"]["rounds"] == 4
    }
    assert set(accuracies) == set(sent) == {2, 4}
    assert torch.equal(sent[4], trained.weights)
    (last,) = (one for one in later["evaluation"] if one["metric"] == "accuracy")
    claims = [(accuracies[number], by_hand(network, sent[number])) for number in (2, 4)]
    claims.append((last, by_hand(network, trained.weights)))
    inside = [one["low"] <= truth <= one["high"] for one, truth in claims]
    assert sum(inside) >= 2, claims  # noise that nobody can foresee: one of three misses now and then, by little
    for one, truth in claims:
        assert abs(one["value"] - truth) < 0.75 * (one["high"] - one["low"])
        assert one["high"] - one["low"] < 0.15, "or it says nothing"
    spent = {one["client"]: one for one in result["privacy"]}
    for place, name in enumerate(NAMES):
        limit = network.clients.budgets[place].epsilon
        assert check_wire(network.sent(name), tmp_path / f"{name}.db") == 4 + 2 + 1
        with Ledger(tmp_path / f"{name}.db", readonly=True) as book:
            events = book.spent(name + HELD)
            assert [(one.what, one.count) for one in events] == [("scores+correct", 2), ("scores+correct", 1)]
            assert [one.what for one in book.spent(name)] == ["gradient"], "a finished model costs training nothing"
            assert book.epsilon([name])[name] == pytest.approx(spent[name]["training_epsilon"])
        assert spent[name]["held_epsilon"] == pytest.approx(0.8 * limit, rel=1e-3)
        assert spent[name]["spent_epsilon"] == max(spent[name]["held_epsilon"], spent[name]["training_epsilon"])
    assert look(folder)["evaluation"][0]["round"] == 4
    assert look(again)["state"] == "finished"
