"""Evaluation in a deployment: sites judge the model on their held-out records, as a simulation does, and pay for it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation_rig import Rig, simulated, table
from scipy.stats import norm

import sordino as sd
from sordino.engine.checkpoint import load_checkpoint, save_checkpoint
from sordino.engine.federation import wire
from sordino.engine.federation.exchange import farewell
from sordino.engine.federation.wire import Packet, pack, unpack
from sordino.privacy.held import HELD, OF_HELD
from sordino.study.deployed import privacy_of

STEPS = {"steps": 2, "rate": 0.2, "lr": 0.5}


@pytest.fixture(scope="module")
def clients():
    digits = sd.data.load("digits", records=450).partition("iid", clients=3, seed=1)
    return digits.with_budgets([2.0, 4.0, 8.0], 1e-5)


def judged(method: str, clients: Any, rounds: int = 4, every: int = 2, **training: Any) -> dict[str, Any]:
    return table(method, clients, rounds=rounds, **(STEPS | training)) | {"evaluation": {"every": every, "share": 0.3}}


def epsilon_of(noise: float, times: int, delta: float) -> float:
    """ε of so many full-batch Gaussian releases, by bisection of the exact δ(ε) (Balle and Wang 2018)."""
    mu = math.sqrt(times) / noise

    def excess(epsilon: float) -> float:
        return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu) - delta

    low, high = 0.0, 100.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high


@pytest.mark.parametrize(
    ("method", "model", "trust"),
    [
        ("dp-fedavg", "logistic", {}),
        ("dp-fedavg", "cnn-small", {}),
        ("dp-fedavg", "logistic", {"noise": "shared"}),
        ("fedavg", "logistic", {}),
    ],
)
def test_a_deployment_is_judged_as_its_simulation_to_the_last_count(
    method: str, model: str, trust: dict, clients: Any, tmp_path: Path
):
    study = judged(method, clients, **({"steps": 1} if trust else {})) | {"model": {"name": model}, "trust": trust}
    alone = simulated(clients, study, tmp_path / "simulated")
    with Rig(tmp_path, clients, study, alone.key, alone.noises) as rig:
        state = rig.train()
        asked = [(who, unpack(data)) for who, data, _ in rig.wires.heard if unpack(data).kind == wire.SCORES]
    torch.testing.assert_close(state.shown, alone.weights, atol=1e-5, rtol=0)
    rows = [row for record in state.history for row in record.get("evaluation", [])]
    assert rows == alone.result["evaluation"]
    assert [record["round"] for record in state.history if "evaluation" in record] == [2, 4]
    assert [(who, one.facts["round"]) for who, one in asked] == [(who, n) for n in (2, 4) for who in clients.names]
    assert {"accuracy", "psi"} <= {row["metric"] for row in rows}


@pytest.mark.parametrize(
    ("source", "model", "epsilons"),
    [
        ("breast-cancer", {"name": "logistic"}, (4.0, math.inf)),
        ("least-squares", {"name": "linear"}, (4.0, 8.0)),
        ("digits", {"name": "logistic", "features": "unit"}, (4.0, 8.0)),
    ],
)
def test_two_classes_a_public_site_numbers_to_predict_and_fixed_features(
    source: str, model: dict, epsilons: tuple, tmp_path: Path
):
    dealt = sd.data.load(source).partition("iid", clients=2, seed=1).with_budgets(list(epsilons), 1e-5)
    study = judged("dp-fedavg", dealt, rounds=2, every=2, lr=0.05) | {"model": model}
    alone = simulated(dealt, study, tmp_path / "simulated")
    with Rig(tmp_path, dealt, study, alone.key, alone.noises) as rig:
        state = rig.train()
    assert state.history[-1]["evaluation"] == alone.result["evaluation"]
    assert len(state.history[-1]["judged"]) == 2


@pytest.mark.parametrize("method", ["mr-mtl", pytest.param("fine-tuned", marks=pytest.mark.slow)])
def test_where_sites_have_models_of_their_own_each_judges_its_own(method: str, clients: Any, tmp_path: Path):
    study = judged(method, clients, rounds=2, every=1)
    alone = simulated(clients, study, tmp_path / "simulated")
    with Rig(tmp_path, clients, study, alone.key, alone.noises) as rig:
        state = rig.train()
    assert [row for record in state.history for row in record["evaluation"]] == alone.result["evaluation"]


def test_both_accounts_are_charged_for_themselves_and_the_larger_is_told(clients: Any, tmp_path: Path):
    study = judged("dp-fedavg", clients)
    with Rig(tmp_path, clients, study) as rig:
        state = rig.train()
        plan = rig.ready.plan(rig.facts)
        spent = farewell(rig.wires, "run1", list(clients.names), 5.0)
        for place, name in enumerate(clients.names):
            site, terms = rig.wires.sites[name], plan.judging.terms[place]
            noise = 1.0 / math.sqrt(sum(z**-2 for _, z in terms.parts))
            expected = epsilon_of(noise, 2, 1e-5)
            book = site.ledger
            assert book.epsilon([name + HELD])[name + HELD] == pytest.approx(expected, rel=1e-3)
            assert expected == pytest.approx(0.8 * clients.budgets[place].epsilon, rel=1e-3)
            assert spent[name]["held_epsilon"] == pytest.approx(expected, rel=1e-3)
            assert spent[name]["training_epsilon"] == book.epsilon([name])[name]
            assert spent[name]["spent_epsilon"] == max(spent[name]["held_epsilon"], spent[name]["training_epsilon"])
            held = [one for one in spent[name]["releases"] if one["what"].endswith(OF_HELD)]
            assert held == [{"what": "scores+correct" + OF_HELD, "rate": 1.0, "noise": terms.event.noise, "count": 2}]
            assert site.held is not None
            assert len(site.held.y) + len(site.records.y) == len(clients.train[place])
    told = privacy_of(plan, state, spent)
    guessed = privacy_of(plan, state, {})
    for one, other in zip(told, guessed):
        assert (one["told_by"], other["told_by"]) == ("site", "server")
        assert other["held_epsilon"] == pytest.approx(one["held_epsilon"], rel=1e-3)
        assert [r["what"] for r in other["releases"]] == [r["what"] for r in one["releases"]]


def test_a_site_whose_reply_is_lost_or_makes_no_sense_is_missing_from_that_estimate(clients: Any, tmp_path: Path):
    odd = {
        "client-00": lambda packet: None,
        "client-01": lambda packet: {**packet.tensors, "scores": packet.tensors["scores"] + 1e9},
        "client-02": lambda packet: {**packet.tensors, "more": torch.zeros(1)},
    }
    with Rig(tmp_path, clients, judged("dp-fedavg", clients, rounds=3, every=1)) as rig:
        now = iter(odd)

        def fault(name: str, request: bytes, reply: bytes) -> bytes | None:
            asked, packet = unpack(request), unpack(reply)
            if asked.kind != wire.SCORES or name != list(odd)[asked.facts["round"] - 1]:
                return reply
            tensors = odd[next(now)](packet)
            return None if tensors is None else pack(Packet(packet.kind, packet.facts, tensors))

        rig.wires.fault = fault
        state = rig.train()
    for number, record in enumerate(state.history):
        name = list(odd)[number]
        assert name not in record["judged"]
        assert len(record["judged"]) == 2
        assert f"accuracy/{name}" not in {row["metric"] for row in record["evaluation"]}
        assert name in record["not_judged"].get("absent", record["not_judged"].get("refused"))
    assert "cannot give" in state.history[1]["not_judged"]["refused"]["client-01"]
    assert "nothing else" in state.history[2]["not_judged"]["refused"]["client-02"]


class Killed(BaseException):
    """The server's process is gone."""


def test_a_server_that_dies_during_an_evaluation_goes_on_and_nobody_pays_twice(clients: Any, tmp_path: Path):
    study = judged("dp-fedavg", clients, rounds=2, every=1)
    with Rig(tmp_path / "peace", clients, study, key="the same draws") as rig:
        calm = rig.train()
    with Rig(tmp_path / "killed", clients, study, key="the same draws") as rig:
        server, file = rig.coordinator(), tmp_path / "checkpoint"
        killed = []

        def kill_once(name: str, request: bytes, reply: bytes) -> bytes:
            asked = unpack(request)
            if asked.kind == wire.SCORES and name == "client-01" and asked.facts["round"] not in killed:
                killed.append(asked.facts["round"])
                raise Killed
            return reply

        rig.wires.fault = kill_once
        state, history = rig.first(), []
        while state.round < 2:
            try:
                for now in server.run(state):
                    save_checkpoint(file, now)
                    history = list(now.history)
            except Killed:
                state = load_checkpoint(file, torch.device("cpu")) if file.exists() else rig.first()
                state.history = list(history)
                for name in clients.names:  # sites are started again too
                    rig.wires.sites[name].ledger.close()
                    rig.wires.sites[name] = rig.site(name)
        charges = [rig.wires.sites[n].ledger.charges(n + HELD, "run1", "scores+correct") for n in clients.names]
    assert killed == [1, 2]
    assert charges == [2, 2, 2]
    assert state.history == calm.history


def test_the_noise_that_a_site_adds_is_the_noise_that_was_charged(clients: Any, tmp_path: Path):
    """100 cells and a count, 5 times at 3 sites, against what a plain loop counts: the deviation is z, of both."""
    study = judged("dp-fedavg", clients, rounds=5, every=1)
    with Rig(tmp_path, clients, study) as rig:
        state = rig.train()
        plan = rig.ready.plan(rig.facts)
        shares: dict[str, list[float]] = {"scores": [], "correct": []}
        for name, data, reply in rig.wires.heard:
            asked, packet = unpack(data), unpack(reply)
            if asked.kind != wire.SCORES:
                continue
            place, held = clients.names.index(name), rig.wires.sites[name].held
            weights, bias = asked.tensors["weights"][:640].view(10, 64), asked.tensors["weights"][640:]
            truth = {"scores": np.zeros(100), "correct": np.zeros(1)}
            for x, y in zip(held.x, held.y.tolist()):
                guess = int((weights @ x.flatten() + bias).argmax())
                truth["scores"][10 * y + guess] += 1
                truth["correct"] += guess == y
            for part, z in plan.judging.terms[place].parts:
                shares[part] += ((packet.tensors[part].numpy() - truth[part]) / z).tolist()
    assert len(state.history) == 5
    assert len(shares["scores"]) == 1500
    assert abs(np.std(shares["scores"]) - 1) < 4.5 / math.sqrt(2 * 1500)
    assert abs(np.mean(shares["scores"])) < 4.5 / math.sqrt(1500)
    assert 0.4 < np.sqrt(np.mean(np.square(shares["correct"]))) < 1.8
