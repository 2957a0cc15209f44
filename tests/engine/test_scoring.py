"""A simulated run that is judged on held-out records: the split, the noise, the accounts, and what is shown."""

from __future__ import annotations

import math

import numpy as np
import pytest

import sordino as sd
from sordino.errors import BadInput
from sordino.privacy.held import HELD
from sordino.privacy.ledger import Ledger

TRAINING = {"model": "logistic", "method": "dp-fedavg", "rounds": 6, "rate": 0.5, "lr": 0.5}


def clients(budgets=(1.0, 4.0, math.inf), task="digits"):
    found = sd.data.load(task).partition("iid", clients=len(budgets), seed=0)
    return found.with_budgets(list(budgets), delta=1e-5)


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    where = tmp_path_factory.mktemp("run") / "ledger.db"
    run = sd.train(clients(), evaluation={"every": 2, "share": 0.3}, ledger=where, **TRAINING)
    return run, where


def test_training_never_sees_what_is_held_out():
    whole = clients()
    rest, taken = whole.held_out(0.3, seed=0)
    for before, after, out in zip(whole.train, rest.train, taken):
        assert sorted([*after, *out]) == sorted(before)
        assert not set(after) & set(out)
        assert abs(len(out) / len(before) - 0.3) < 0.1
    again = whole.held_out(0.3, seed=0)[1]
    assert all((one == other).all() for one, other in zip(taken, again))
    assert any(len(a) != len(b) or (a != b).any() for a, b in zip(taken, whole.held_out(0.3, seed=1)[1]))


def test_a_run_is_judged_as_often_as_it_says_and_each_figure_has_an_interval(judged):
    run, _ = judged
    rows = run.result["evaluation"]
    assert sorted({one["round"] for one in rows}) == [2, 4, 6]
    assert {"accuracy", "mean_accuracy", "psi", "recall/0"} <= {one["metric"] for one in rows}
    for one in rows:
        assert one["low"] <= one["value"] <= one["high"]
    assert all("evaluation" in r for r in run.result["rounds"] if r["round"] % 2 == 0)


def test_the_two_accounts_pay_for_themselves_and_a_records_epsilon_is_the_larger(judged):
    run, where = judged
    with Ledger(where, readonly=True) as ledger:
        spent = ledger.epsilon()
        names = {account.client for account in ledger.accounts()}
    assert names == {one["client"] + end for one in run.privacy for end in ("", HELD)}
    for one in run.privacy[:2]:
        train, held = spent[one["client"]], spent[one["client"] + HELD]
        assert (one["training_epsilon"], one["held_epsilon"]) == (train, held)
        assert one["spent_epsilon"] == max(train, held) <= one["epsilon"]
        assert held == pytest.approx(0.8 * one["epsilon"], rel=1e-3)
        assert one["releases"][-1]["count"] == 3


def test_without_noise_the_estimate_is_what_a_plain_loop_counts():
    """Everybody is public, so what is released is the count itself."""
    everyone = clients((math.inf, math.inf))
    run = sd.train(everyone, evaluation={"every": 6, "share": 0.3}, **TRAINING)
    found = {one["metric"]: one["value"] for one in run.result["evaluation"]}
    _, taken = everyone.held_out(0.3, seed=0)
    right, total, by_site = 0, 0, []
    for part in taken:
        hits = 0
        for place in part:
            out = run.model(sd_tensor(everyone.x[place]))
            hits += int(out.argmax()) == int(everyone.y[place])
        right, total = right + hits, total + len(part)
        by_site.append(hits / len(part))
    assert found["accuracy"] == pytest.approx(right / total)
    assert found["mean_accuracy"] == pytest.approx(np.mean(by_site))


def sd_tensor(record):
    import torch

    return torch.from_numpy(np.asarray(record))[None]


def test_the_estimate_lies_around_the_truth():
    """The truth on the held-out records is inside the interval, which allows for their being a sample, too."""
    found = clients((2.0, 8.0))
    for seed in range(12):
        run = sd.train(found, evaluation={"every": 6, "share": 0.4}, seed=seed, **TRAINING)
        (one,) = [row for row in run.result["evaluation"] if row["metric"] == "accuracy"]
        places = np.concatenate(found.held_out(0.4, seed=seed)[1])
        right = [int(run.model(sd_tensor(found.x[k])).argmax()) == int(found.y[k]) for k in places]
        assert one["low"] <= np.mean(right) <= one["high"]


@pytest.mark.parametrize(("task", "metrics"), [
    ("breast-cancer", {"auc", "calibration_error", "recall/1"}),
    ("least-squares", {"mean_absolute_error", "root_mean_squared_error"}),
])  # fmt: skip
def test_two_classes_and_numbers_to_predict(task, metrics):
    run = sd.train(clients((4.0, 4.0), task), evaluation={"every": 3}, **{**TRAINING, "lr": 0.05})
    assert metrics <= {one["metric"] for one in run.result["evaluation"]}


def test_shared_noise_goes_with_it():
    run = sd.train(clients((1.0, 2.0, 4.0)), evaluation={"every": 3}, trust={"noise": "shared"}, **TRAINING)
    assert run.result["evaluation"]
    assert run.privacy[0]["held_epsilon"] > 0


def test_resumed_runs_end_as_uninterrupted_ones(tmp_path):
    options = {"evaluation": {"every": 2}, **TRAINING}
    whole = sd.train(clients(), **options)

    def stop(record):
        if record["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sd.train(clients(), out=tmp_path / "run", callbacks=[stop], **options)
    rest = sd.train(clients(), out=tmp_path / "run", resume=True, **options)
    assert rest.result["evaluation"] == whole.result["evaluation"]
    assert [one["held_epsilon"] for one in rest.privacy] == [one["held_epsilon"] for one in whole.privacy]


@pytest.mark.parametrize(("wrong", "word"), [
    ({"share": 1.0}, "evaluation.share"),
    ({"every": 0}, "evaluation.every"),
    ({"bins": 7}, "evaluation.bins"),
    ({"spend": 1.5}, "evaluation.spend"),
    ({"often": 3}, "often"),
    (5, "table"),
])  # fmt: skip
def test_what_cannot_be_meant_is_refused(wrong, word):
    with pytest.raises(BadInput, match=word):
        sd.train(clients(), evaluation=wrong, **TRAINING)


def test_a_study_says_the_same(tmp_path):
    study = tmp_path / "study.toml"
    study.write_text(
        '[study]\nrounds = 4\n[data]\nname = "digits"\nclients = 3\n[budgets]\nepsilon = 4.0\n'
        '[model]\nname = "logistic"\n'
        '[method]\nname = "dp-fedavg"\n[evaluation]\nevery = 2\nshare = 0.25\n'
    )
    from sordino.study.file import read_study

    read = read_study(study)
    run = sd.train(read.federation(), method=read.chosen_method(), **read.arguments())
    assert sorted({one["round"] for one in run.result["evaluation"]}) == [2, 4]
    assert run.result["study"]["evaluation"]["share"] == 0.25


def test_a_ledger_of_several_runs_remembers_what_is_held_out(tmp_path):
    """Otherwise a record could pay in both parts, and the larger of the two would say too little."""
    options = {"ledger": tmp_path / "ledger.db", **TRAINING, "rounds": 2}
    few = clients((8.0, 8.0))
    sd.train(few, evaluation={"every": 2, "share": 0.3, "spend": 0.3}, **options)
    for other in ({"evaluation": {"share": 0.2}}, {}, {"evaluation": {"share": 0.3}, "seed": 1}):
        with pytest.raises(BadInput, match=r"held out|held records out"):
            sd.train(few, **{**options, **other})
    late = {**options, "ledger": tmp_path / "late.db"}
    sd.train(few, **late)
    with pytest.raises(BadInput, match="none can be held out any"):
        sd.train(few, evaluation={"share": 0.3}, **late)
