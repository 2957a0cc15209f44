"""Choosing by paid estimates: when a run ends, whose model it ends with, the edge between two classes."""

import itertools

import numpy as np
import pytest
import torch

import sordino as sd
from sordino.engine.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from sordino.engine.chosen import evaluations
from sordino.errors import BadInput
from sordino.server.choosing import best, stalled


def rows(values, metric="accuracy"):
    other = {"metric": "psi", "value": 7.0}
    return [
        row
        for number, value in enumerate(values, start=1)
        for row in ({"round": number, **other}, {"round": number, "metric": metric, "value": value})
    ]


def stalls_by_hand(values, patience):
    """Walk along: count evaluations since the best one."""
    since, top = 0, None
    for value in values:
        if top is None or value > top:
            since, top = 0, value
        else:
            since += 1
    return since >= patience


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_stalling_is_so_many_evaluations_since_the_best(patience):
    for values in itertools.product([0.1, 0.2, 0.3], repeat=4):
        for length in range(5):
            some = values[:length]
            assert stalled(rows(some), patience) == stalls_by_hand(some, patience)


def test_the_best_round_is_the_first_of_the_best_and_errors_are_better_when_small():
    assert best(rows([0.2, 0.6, 0.6, 0.1]))["round"] == 2
    assert best(rows([3.0, 1.0, 2.0], "mean_absolute_error"))["round"] == 2
    assert not stalled(rows([3.0, 2.0, 1.0], "mean_absolute_error"), 1)
    assert best([]) is None
    assert not stalled([], 1)


@pytest.fixture(scope="module")
def digits():
    return sd.data.load("digits").partition("iid", clients=4, seed=0).with_budgets(4.0, delta=1e-4, seed=0)


def trained(clients, **evaluation):
    return sd.train(clients, "logistic", "dp-fedavg", rounds=8, lr=2.0, evaluation={"every": 1, **evaluation})


def test_the_best_round_is_kept_judged_and_goes_through_a_checkpoint(digits, tmp_path):
    run = trained(digits, keep="best")
    decided = [row for row in run.result["evaluation"] if row["metric"] == "accuracy"]
    place = int(np.argmax([row["value"] for row in decided]))
    kept = run.result["kept"]
    assert kept["round"] == decided[place]["round"]
    assert kept["by"] == decided[place]
    assert kept["of"] == 8
    # The observer's figures are those of the kept model.
    assert run.result["final"]["accuracy"] == pytest.approx(run.metrics[kept["round"] - 1]["accuracy"], abs=1e-6)
    last = trained(digits)
    assert "kept" not in last.result
    assert last.result["final"]["accuracy"] == pytest.approx(last.metrics[-1]["accuracy"], abs=1e-6)

    folder = tmp_path / "run"
    stop = {"at": 6}

    def interrupt(record):
        if record["round"] == stop["at"]:
            raise KeyboardInterrupt

    keys = {"rounds": 8, "lr": 2.0, "evaluation": {"every": 1, "keep": "best"}, "out": folder}
    with pytest.raises(KeyboardInterrupt):
        sd.train(digits, "logistic", "dp-fedavg", callbacks=[interrupt], **keys)
    again = sd.train(digits, "logistic", "dp-fedavg", resume=True, **keys)
    assert again.result["kept"] == kept
    assert torch.equal(again.weights, run.weights)


def test_a_checkpoint_carries_the_best_weights(tmp_path):
    file = tmp_path / "state"
    save_checkpoint(file, Checkpoint(3, torch.ones(2), torch.ones(2), best=torch.zeros(2)))
    assert torch.equal(load_checkpoint(file, torch.device("cpu")).chosen, torch.zeros(2))
    save_checkpoint(file, Checkpoint(3, torch.ones(2), torch.ones(2)))
    assert torch.equal(load_checkpoint(file, torch.device("cpu")).chosen, torch.ones(2))


def test_a_run_ends_when_its_estimates_do_not_improve_and_is_not_refused(digits):
    run = sd.train(digits, "logistic", "dp-fedavg", rounds=30, lr=1e-6, evaluation={"every": 2, "stop": 2})
    values = [row["value"] for row in run.result["evaluation"] if row["metric"] == "accuracy"]
    assert stalls_by_hand(values, 2)
    assert not stalls_by_hand(values[:-1], 2)
    assert run.result["stopped"]["refused"] is False
    assert "evaluation.stop" in run.result["stopped"]["reason"]
    assert len(run.metrics) == 2 * len(values) < 30
    # What was not asked was not paid for.
    counts = {one["what"]: one["count"] for one in run.privacy[0]["releases"]}
    assert counts["gradient"] == len(run.metrics)


def test_two_classes_get_an_edge_whose_recall_is_told_with_its_interval():
    clients = sd.data.load("breast-cancer").partition("iid", clients=2, seed=0).with_budgets(20.0, delta=1e-3, seed=0)
    run = sd.train(clients, "logistic", "dp-fedavg", rounds=6, lr=1.0, evaluation={"every": 3, "share": 0.4})
    found = run.result["threshold"]
    assert found["round"] == 6
    assert found["edge"] * 10 == pytest.approx(round(found["edge"] * 10))
    for metric in ("recall/1", "false_positive_rate"):
        assert found[metric]["low"] <= found[metric]["value"] <= found[metric]["high"]
    assert {row["round"] for row in evaluations(run.metrics)} == {3, 6}


def test_settings_that_say_nothing_sensible_are_refused(digits):
    with pytest.raises(BadInput, match="stop = 0"):
        trained(digits, stop=0)
    with pytest.raises(BadInput, match="use 'last' or 'best'"):
        trained(digits, keep="first")
    with pytest.raises(BadInput, match="one per client"):
        sd.train(digits, "logistic", "mr-mtl", rounds=2, evaluation={"keep": "best"})


def test_where_a_round_is_chosen_the_intervals_of_all_rounds_hold_at_once(digits):
    levels = [
        sd.plan(digits, "logistic", "dp-fedavg", rounds=8, evaluation={"every": 2, **keys}).plan.judging.level
        for keys in ({}, {"keep": "best"}, {"stop": 2})
    ]
    assert levels == pytest.approx([0.95, 1 - 0.05 / 4, 1 - 0.05 / 4])
