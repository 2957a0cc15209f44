"""The simulation loop: equal to a plain loop, however rows are chunked; charged exactly; the same after a crash."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import sordino as sd
from sordino.engine import simulate as simulation
from sordino.errors import BudgetRefused
from sordino.privacy.ledger import Charge, Ledger, Plan
from sordino.privacy.types import Event, Sampling
from sordino.study import run as running
from sordino.study import session

_spec = importlib.util.spec_from_file_location("plain_loop", Path(__file__).with_name("plain_loop.py"))
plain_loop = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(plain_loop)

SETTINGS = {"rate": 0.2, "lr": 0.3, "clip": 0.7}


@pytest.mark.parametrize("steps", [1, 3])
def test_dp_fedavg_equals_a_plain_record_by_record_loop(digits, steps):
    ready = running.prepare(digits, "logistic", "dp-fedavg", 0, None, {"rounds": 2, "steps": steps, **SETTINGS})
    done = sd.train(digits, "logistic", "dp-fedavg", rounds=2, seed=0, steps=steps, **SETTINGS)
    expected = plain_loop.dp_fedavg(ready.template, digits, ready.plan, ready.key, rounds=2)
    assert plain_loop.close(done.weights, expected) < 1e-5


@pytest.mark.parametrize("method", ["dp-fedavg", "robust-hdp", "fedfdp", "adaptdp", "power-of-choice", "dp-scaffold"])
def test_how_often_somebody_looks_changes_no_bit_of_a_run(digits, method):
    often, once = (sd.train(digits, "logistic", method, rounds=4, evaluate=pace, **SETTINGS) for pace in (1, 4))
    assert torch.equal(often.weights, once.weights)
    assert often.metrics[-1]["loss"] == once.metrics[-1]["loss"]
    assert once.metrics[0]["loss"] is None
    assert often.privacy == once.privacy


def test_chunking_does_not_change_the_weights(digits, monkeypatch):
    whole = sd.train(digits, "logistic", rounds=2, **SETTINGS)
    monkeypatch.setattr(simulation, "CHUNK_BYTES", 1)
    rows = sd.train(digits, "logistic", rounds=2, **SETTINGS)
    assert plain_loop.close(rows.weights, whole.weights) < 1e-5


@pytest.mark.parametrize("steps", [1, 2])
def test_stacked_rows_give_the_same_weights_as_rows_one_by_one(digits, steps, monkeypatch):
    """The layout that a GPU uses, on the CPU, and the CPU's own."""
    shared = sd.train(digits, "cnn-small", rounds=2, steps=steps, **SETTINGS)
    monkeypatch.setattr(simulation, "CHUNK_HELD", 0)
    one_by_one = sd.train(digits, "cnn-small", rounds=2, steps=steps, **SETTINGS)
    assert plain_loop.close(shared.weights, one_by_one.weights) < 1e-5
    plain = session.Work
    monkeypatch.setattr(session, "Work", lambda *a, stack: plain(*a, stack=True))
    stacked = sd.train(digits, "cnn-small", rounds=2, steps=steps, **SETTINGS)
    assert plain_loop.close(stacked.weights, one_by_one.weights) < 1e-5


def test_a_stack_holds_no_more_records_than_its_memory_allows():
    def rows(stack, held):
        engine, local = SimpleNamespace(dimension=10, bytes_per_record=held), SimpleNamespace(begin=None)
        work = SimpleNamespace(alone=None, stack=stack, copies=1, engine=engine, local=local)
        terms = [SimpleNamespace(count=1, divisor=100.0)] * 50
        return [len(chunk) for chunk in simulation.chunks(work, terms)]

    assert rows(True, 1) == [50]
    most = simulation.STACK_HELD // (1 << 20) // 100
    assert rows(True, 1 << 20) == [most, 50 - most]
    assert rows(True, simulation.STACK_HELD) == [1] * 50, "a row is never cut"


@pytest.mark.parametrize(("held", "most"), [(1 << 9, 40), (simulation.CHUNK_HELD // 250, 2), (1 << 16, 1)])
def test_on_a_cpu_rows_of_small_models_share_passes_and_larger_ones_have_their_own(held, most):
    engine, local = SimpleNamespace(dimension=10, bytes_per_record=held), SimpleNamespace(begin=None)
    work = SimpleNamespace(alone=None, stack=False, copies=1, engine=engine, local=local)
    terms = [SimpleNamespace(count=3, divisor=one) for one in [100.0, 140.0, 400.0, 100.0] * 20]
    chunks = [[terms[i].divisor for i in chunk] for chunk in simulation.chunks(work, terms)]
    assert max(map(len, chunks)) in (most, most + most // 2)
    assert all(max(chunk) <= 1.5 * min(chunk) for chunk in chunks), "a short batch is not padded to a long one"
    assert sum(map(len, chunks)) == len(terms)


def test_drawing_the_next_round_ahead_changes_nothing(digits, monkeypatch):
    """A GPU's host does so while the device works."""
    plain = sd.train(digits, "logistic", "unbiased", rounds=3, steps=2, select=3, **SETTINGS)
    close, ahead = simulation.close_round, []

    def closed(setup, state, opened, uploads):
        simulation.draw_ahead(setup, opened)
        ahead.append(len(setup.gate.source._ahead))
        return close(setup, state, opened, uploads)

    monkeypatch.setattr(simulation, "close_round", closed)
    again = sd.train(digits, "logistic", "unbiased", rounds=3, steps=2, select=3, **SETTINGS)
    assert np.array_equal(again.weights, plain.weights)
    assert ahead == [3, 3, 3]


def test_large_batches_are_cut_into_pieces_and_never_truncated(digits, monkeypatch):
    whole = sd.train(digits, "logistic", rounds=1, steps=2, **SETTINGS)
    plain = session.Work
    monkeypatch.setattr(session, "Work", lambda *a, stack: plain(*a, stack=stack, most=3))
    pieces = sd.train(digits, "logistic", rounds=1, steps=2, **SETTINGS)
    assert plain_loop.close(pieces.weights, whole.weights) < 1e-5


def test_fedavg_is_not_private_and_says_so(digits):
    done = sd.train(digits, "logistic", "fedavg", rounds=2, **SETTINGS)
    assert done.result["private"] is False
    assert all(p["spent_epsilon"] == np.inf for p in done.privacy)


def test_a_client_with_half_the_epsilon_adds_the_noise_it_should(digits):
    plan = sd.plan(digits, "logistic", rounds=3, **SETTINGS).plan
    for one in plan.clients:
        budget = one.budget
        expected = sd.privacy.calibrate(budget.epsilon, budget.delta, one.terms.sampling.rate, 3)
        assert one.noise == pytest.approx(expected, rel=1e-3)
        assert one.epsilon <= budget.epsilon


def test_minimum_epsilon_gives_everyone_the_strictest_budget(digits):
    done = sd.train(digits, "logistic", "minimum-epsilon", rounds=3, **SETTINGS)
    strictest = min(b.epsilon for b in digits.budgets)
    assert all(p["spent_epsilon"] <= strictest for p in done.privacy)


def test_exactly_the_planned_releases_happen_and_are_charged(digits):
    done = sd.train(digits, "logistic", rounds=3, steps=2, **SETTINGS)
    for one in done.privacy:
        assert [(r["what"], r["count"]) for r in one["releases"]] == [("gradient", 6)]
        assert 0.97 * one["epsilon"] < one["spent_epsilon"] <= one["epsilon"]
        assert one["replace_one_epsilon"] > one["spent_epsilon"]


def test_a_common_ledger_is_cumulative_over_runs_and_refuses_to_be_overdrawn(digits, tmp_path):
    first = sd.train(digits, "logistic", rounds=2, ledger=tmp_path / "l.db", **SETTINGS)
    with pytest.raises(BudgetRefused, match=r"nobody's budget pays for a single turn .*client-00"):
        sd.train(digits, "logistic", rounds=2, ledger=tmp_path / "l.db", **SETTINGS)
    with sd.privacy.Ledger(tmp_path / "l.db", readonly=True) as book:
        assert book.epsilon() == {one["client"]: one["spent_epsilon"] for one in first.privacy}
        for name, budget in zip(digits.names, digits.budgets):
            assert book.epsilon()[name] <= budget.epsilon


def test_a_client_whose_budget_ends_sits_out_and_the_others_go_on(digits, tmp_path):
    """One client has spent most of its budget in an earlier run; it takes part while its filter can pay."""
    poor = digits.names[0]
    with Ledger(tmp_path / "l.db") as book:
        book.open_account(poor, digits.budgets[0], simulated=True)
        noise = sd.privacy.calibrate(0.5 * digits.budgets[0].epsilon, digits.budgets[0].delta, 1.0, 1)
        event = Event("gradient", Sampling.full(), noise)
        book.declare([Plan(poor, "earlier", (event,), 1)])
        book.charge([Charge(poor, "earlier", "once", "gradient", 1, "r")])
    done = sd.train(digits, "logistic", rounds=6, ledger=tmp_path / "l.db", **SETTINGS)
    took = [poor in one["participants"] for one in done.metrics]
    assert took[0]
    assert not took[-1]
    assert all(set(digits.names[1:]) <= set(one["participants"]) for one in done.metrics)
    assert all(p["spent_epsilon"] <= p["epsilon"] for p in done.privacy)


def test_null_records_count_in_n_and_contribute_nothing(digits):
    """A record that is invalid is as if its gradient were zero: same sampling, same divisor."""
    from dataclasses import replace

    valid = digits.valid.copy()
    gone = digits.train[0][:5]
    valid[gone] = False
    x = digits.x.copy()
    x[gone] = np.nan
    nulled = replace(digits, valid=valid, x=x)
    assert nulled.sizes.tolist() == digits.sizes.tolist()
    for steps in (1, 2):
        done = sd.train(nulled, "logistic", rounds=2, steps=steps, **SETTINGS)
        assert torch.isfinite(done.weights).all()
        assert np.isfinite(done.result["final"]["loss"])


SCRIPT = """
import sys, time
import sordino as sd
import torch
torch.set_num_threads(1)
clients = sd.data.load("digits").subset(600, seed=0).partition("dirichlet", clients=6, beta=0.5, seed=0, minimum=30)
clients = clients.with_budgets([0.5, 1.0, 2.0, 4.0, 8.0, 1.0], delta=1e-4)
sd.train(clients, "logistic", rounds=12, steps=2, rate=0.2, lr=0.3, clip=0.7, out=sys.argv[1], resume=True,
         callbacks=[lambda record: time.sleep(0.05)])
"""


def test_a_killed_run_resumes_to_the_same_weights_and_the_same_charges(digits, tmp_path):
    whole = sd.train(digits, "logistic", rounds=12, steps=2, out=tmp_path / "whole", **SETTINGS)
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path / "cut")])
        log = tmp_path / "cut" / "log.jsonl"
        lines = len(log.read_text().splitlines()) if log.exists() else 0
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            if log.exists() and len(log.read_text().splitlines()) > lines + 1:
                break
            time.sleep(0.005)
        time.sleep(np.random.default_rng(lines).uniform(0, 0.05))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    resumed = sd.train(digits, "logistic", rounds=12, steps=2, out=tmp_path / "cut", resume=True, **SETTINGS)
    assert torch.equal(resumed.weights, whole.weights)
    with Ledger(tmp_path / "whole" / "ledger.db") as a, Ledger(tmp_path / "cut" / "ledger.db") as b:
        for name in digits.names:
            assert a.spent(name) == b.spent(name)
    kept = [json.loads(line) for line in (tmp_path / "cut" / "log.jsonl").read_text().splitlines()]
    assert [one["round"] for one in kept] == list(range(1, 13))


def test_a_diverging_run_stops_with_a_clear_message(digits):
    with pytest.raises(sd.SordinoError, match=r"diverged; use a smaller training\.lr"):
        sd.train(digits, "logistic", "fedavg", rounds=3, lr=1e30, server_lr=1e30, rate=0.5)


def test_the_servers_steps_shrink_over_the_last_rounds_by_equal_parts(digits):
    settings = sd.methods.Training(server_lr=2.0, cooldown=0.5)
    assert [settings.server_rate(number, 8) for number in range(1, 9)] == [2.0] * 5 + [1.5, 1.0, 0.5]
    assert sd.methods.Training(server_lr=2.0).server_rate(8, 8) == 2.0

    def trained(rounds, **more):
        return sd.train(digits, "logistic", "fedavg", rounds=rounds, lr=0.3, sampling="full", **more).weights

    once, twice = trained(1), trained(2)
    assert plain_loop.close(trained(2, cooldown=1.0), once + 0.5 * (twice - once)) < 1e-5
    assert plain_loop.close(trained(2, cooldown=0.5), twice) < 1e-5
    with pytest.raises(sd.errors.BadInput, match="share of the rounds"):
        trained(2, cooldown=1.5)


def test_the_model_is_drawn_a_share_of_the_way_back_to_its_start(digits):
    """The second round by hand: the step that a run without pull takes from the same weights, less ρ(w − w_0)."""

    def steps(pull):
        """Weights after every round, with every record in every step and no noise."""
        seen = []
        for rounds in (1, 2, 3):
            seen.append(sd.train(digits, "logistic", "fedavg", rounds=rounds, lr=0.3, sampling="full", pull=pull))
        return [one.weights for one in seen]

    free, drawn = steps(0.0), steps(0.25)
    start = sd.train(digits, "logistic", "fedavg", rounds=1, lr=1e-30, sampling="full").weights
    assert torch.equal(drawn[0], free[0])  # nothing to go back from yet
    assert plain_loop.close(drawn[1], free[1] - 0.25 * (free[0] - start)) < 1e-5
    gone = [float((one[2] - start).norm()) for one in (free, drawn)]
    assert gone[1] < 0.8 * gone[0]
    cooled = sd.train(digits, "logistic", "fedavg", rounds=2, lr=0.3, sampling="full", pull=0.25, cooldown=1.0).weights
    assert plain_loop.close(cooled, free[0] + 0.5 * (drawn[1] - free[0])) < 1e-5
    with pytest.raises(sd.errors.BadInput, match="share of the way back"):
        sd.train(digits, "logistic", "fedavg", rounds=1, pull=1.0)


def test_a_run_that_is_drawn_back_remembers_its_start_over_a_restart(digits, tmp_path):
    settings = {**SETTINGS, "rounds": 4, "pull": 0.3}
    whole = sd.train(digits, "logistic", out=tmp_path / "whole", **settings)

    def stop(record):
        if record["round"] == 2:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        sd.train(digits, "logistic", out=tmp_path / "cut", callbacks=[stop], **settings)
    resumed = sd.train(digits, "logistic", out=tmp_path / "cut", resume=True, **settings)
    assert torch.equal(resumed.weights, whole.weights)
