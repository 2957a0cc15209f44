"""Persons of several records through whole runs: equal to a plain loop, and deployed as simulated."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from federation_rig import Rig, simulated, table
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import sordino as sd
from sordino.client.augment import Augment
from sordino.privacy.generators import Keyed, Turn
from sordino.privacy.statement import _at_sites, statement, statement_text
from sordino.privacy.trust import Shared
from sordino.privacy.types import Event, Sampling
from sordino.study import run as running
from sordino.study.session import train_prepared, train_together


def patients(epsilon=(0.8, 3.0, 12.0), most=4, null=True):
    """Digits as visits of patients who have one to seven each, of which four count; a few are null rows."""
    digits = sd.data.load("digits").subset(600, 0)
    random = np.random.default_rng(5)
    ids = np.repeat(np.arange(len(digits)), random.integers(1, 8, len(digits)))[: len(digits)]
    random.shuffle(ids)
    valid = digits.valid.copy()
    if null:
        valid[random.permutation(len(ids))[:40]] = False
        valid[np.flatnonzero(ids == ids[0])] = False  # one patient of null rows only
    dealt = replace(digits, valid=valid).by_unit(ids, most, "patient").partition("iid", clients=len(epsilon), seed=1)
    return dealt.with_budgets(list(epsilon), 1e-4)


def plain_run(model, clients, plan, key, rounds, augment=None):
    """DP-FedAvg person by person, in float64: mean gradient of a person's records (and their copies), clipped once."""
    source, model = Keyed(key), copy.deepcopy(model).double()
    shares = clients.sizes / clients.sizes.sum()
    for number in range(1, rounds + 1):
        start = parameters_to_vector(model.parameters()).detach().clone()
        combined = torch.zeros_like(start)
        for i, one in enumerate(plan.clients):
            local, turn, terms = copy.deepcopy(model), Turn(one.name, number), one.terms
            for step, batch in enumerate(source.batches(turn, "gradient", terms.sampling, one.records, terms.count)):
                total = torch.zeros_like(start)
                for person in clients.train[i][batch]:
                    own = [k for k in clients.units[person] if k >= 0 and clients.valid[k]]
                    gradient = torch.zeros_like(start)
                    for k in own:
                        x = torch.from_numpy(clients.x[k]).double()
                        seen = [x] if augment is None else [move.of(x) for move in augment.moves(number, step)]
                        for version in seen:
                            local.zero_grad()
                            cross_entropy(local(version[None]), torch.tensor([clients.y[k]])).backward()
                            each = torch.cat([p.grad.flatten() for p in local.parameters()])
                            gradient += each / (len(own) * len(seen))
                    total += gradient * min(1.0, plan.training.clip / max(float(gradient.norm()), 1e-300))
                noise = source.normal([turn], "gradient/gradient", step, torch.empty(1, len(total)))[0].double()
                released = (total + one.noise * plan.training.clip * noise) / (terms.sampling.rate * one.records)
                weights = parameters_to_vector(local.parameters()).detach()
                vector_to_parameters(weights - plan.training.lr * released, local.parameters())
            combined += float(shares[i]) * (parameters_to_vector(local.parameters()).detach() - start)
        vector_to_parameters(start + combined, model.parameters())
    return parameters_to_vector(model.parameters()).detach()


def far(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("model", ["logistic", "cnn-small"])
@pytest.mark.parametrize("steps", [1, 2])
def test_training_equals_a_plain_loop_over_persons(model, steps):
    clients = patients()
    settings = {"rounds": 2, "steps": steps, "rate": 0.1, "lr": 0.3, "clip": 0.7}
    ready = running.prepare(clients, model, "dp-fedavg", 2, None, settings)
    done = train_prepared(ready)
    assert far(done.weights, plain_run(ready.template, clients, ready.plan, ready.key, 2)) < 1e-5


def test_copies_of_a_persons_records_are_averaged_with_them():
    clients, augment = patients(), {"copies": 2, "shift": 1}
    settings = {"rounds": 1, "steps": 2, "rate": 0.05, "lr": 0.3, "clip": 0.7, "augment": augment}
    ready = running.prepare(clients, "logistic", "dp-fedavg", 2, None, settings)
    expected = plain_run(ready.template, clients, ready.plan, ready.key, 1, Augment(**augment))
    assert far(train_prepared(ready).weights, expected) < 1e-5


def test_runs_in_one_stack_end_as_each_alone():
    settings = {"rounds": 2, "steps": 2, "rate": 0.1, "lr": 0.3, "clip": 0.7}
    others = [patients(), patients(null=False)]
    runs = [running.prepare(one, "logistic", "dp-fedavg", 2, None, settings) for one in others]
    for one, ready in zip(train_together(runs, "cpu"), runs):
        assert far(one.weights, train_prepared(ready).weights) < 1e-5


def test_a_person_of_one_record_is_a_record():
    digits = sd.data.load("digits").subset(300, 0)
    settings = {"rounds": 2, "steps": 1, "rate": 0.1, "lr": 0.3, "clip": 0.7}
    found = []
    for data in (digits, digits.by_unit(range(300), 8)):
        clients = data.partition("iid", clients=3, seed=1).with_budgets(2.0, 1e-4)
        ready = running.prepare(clients, "logistic", "dp-fedavg", 2, None, settings)
        ready = replace(ready, study={**ready.study, "data": {}})  # what random streams are keyed by
        found.append(train_prepared(ready).weights)
    assert torch.equal(*found)


@pytest.mark.parametrize("method", ["dp-fedavg", "fedfdp", "dp-scaffold"])
def test_a_deployed_run_ends_with_the_simulations_weights(method, tmp_path):
    clients = patients()
    study = table(method, clients, rounds=2, steps=2, rate=0.1, lr=0.2)
    alone = simulated(clients, study, tmp_path / "simulated")
    with Rig(tmp_path, clients, study, alone.key, alone.noises) as rig:
        state = rig.train()
        assert {name: one["records"] for name, one in rig.facts.items()} == dict(
            zip(clients.names, clients.sizes.tolist())
        )
        with pytest.raises(sd.errors.BadInput, match="whose promise is to every patient, not to every record"):
            rig.wires.sites["client-00"].ledger.open_account("client-00", replace(clients.budgets[0], unit="record"))
    torch.testing.assert_close(state.shown, alone.weights, atol=1e-5, rtol=0)


def test_noise_that_sites_share_protects_persons_alike(tmp_path):
    clients = patients((2.0, 3.0, 4.0, 6.0))
    study = table("dp-fedavg", clients, rounds=2, rate=0.2, lr=0.2, steps=1)
    study["trust"] = {"noise": "shared", "colluders": 1}
    alone = simulated(clients, study, tmp_path / "simulated")
    with Rig(tmp_path, clients, study, alone.key, alone.noises) as rig:
        state = rig.train()
        told = statement(rig.wires.sites["client-00"].ledger, "client-00")
        (event,) = rig.wires.sites["client-00"].ledger.spent("client-00")
    torch.testing.assert_close(state.shown, alone.weights, atol=1e-5, rtol=0)
    assert event.shared is not None
    assert told["unit_name"] == "patient"


def test_somebody_at_several_sites_that_share_noise():
    """Two sites, a person in both batches or in one of them: never worse than what the statement says."""
    event = Event("gradient", Sampling.poisson(0.1), 4.0, 50, shared=Shared(4, 1, 0, 1e5, 10))
    two = _at_sites(event, 2)
    assert (two.noise, two.count) == (2.0, 50)
    assert two.sampling.rate == pytest.approx(0.19)
    z, q, epsilon, x = 4.0, 0.1, 0.5, np.linspace(-60, 60, 240_001)

    def hockey(shifts):
        """δ(ε) of one release, by integration: P = Σ_k p_k N(k, z²) against N(0, z²), both directions."""
        mixed = sum(p * np.exp(-((x - k) ** 2) / (2 * z**2)) for k, p in shifts)
        base = np.exp(-(x**2) / (2 * z**2))
        scale = (x[1] - x[0]) / (z * np.sqrt(2 * np.pi))
        return [scale * np.maximum(0, a - np.exp(epsilon) * b).sum() for a, b in ((mixed, base), (base, mixed))]

    really = hockey([(0, (1 - q) ** 2), (1, 2 * q * (1 - q)), (2, q**2)])
    claimed = hockey([(0, (1 - q) ** 2), (2, 1 - (1 - q) ** 2)])
    assert all(r <= c for r, c in zip(really, claimed))


def test_a_deployed_run_is_judged_by_persons_as_simulated(tmp_path):
    clients = patients()
    study = table("dp-fedavg", clients, rounds=2, rate=0.1, lr=0.2) | {"evaluation": {"every": 1, "share": 0.3}}
    alone = simulated(clients, study, tmp_path / "simulated")
    with Rig(tmp_path, clients, study, alone.key, alone.noises) as rig:
        state = rig.train()
        held = [one["held"] for one in rig.facts.values()]
    assert held == [len(one) for one in clients.held_out(0.3, 3)[1]]
    told = [row for record in state.history for row in record["evaluation"]]
    for got, wanted in zip(told, alone.result["evaluation"], strict=True):
        assert got["metric"] == wanted["metric"]
        assert got["value"] == pytest.approx(wanted["value"], abs=1e-5)


def test_the_result_the_ledger_and_its_statement_speak_of_patients(tmp_path):
    clients = patients()
    done = sd.train(clients, "logistic", "dp-fedavg", rounds=2, rate=0.1, lr=0.2, out=tmp_path / "run")
    assert {one["unit"] for one in done.privacy} == {"patient"}
    with sd.privacy.Ledger(tmp_path / "run" / "ledger.db", readonly=True) as book:
        told = statement(book, "client-00")
        text = statement_text(told)
        spent = book.spent("client-00")
    assert "one patient of this client, with all of its records here" in text
    assert "each patient drawn with probability" in text
    assert "A patient with records at several sites" in text
    assert "Patient-level (ε, δ)-differential privacy" in done.report(tmp_path / "report.html").read_text()
    wanted = [sd.privacy.epsilon(e.noise, 1e-4, e.sampling.rate, 2 * e.count) for e in spent]
    assert told["several_sites"][0] == {"sites": 2, "epsilon": pytest.approx(wanted[0], rel=1e-3)}
