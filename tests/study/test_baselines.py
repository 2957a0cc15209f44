"""What accuracy is compared with: the majority class, every client's data alone, training without noise."""

import json
import math

import numpy as np
import pytest
import torch
from sklearn import metrics as theirs

import sordino as sd
from sordino import methods
from sordino.errors import BadInput
from sordino.study.baselines import by_itself
from sordino.study.report import render
from sordino.study.result import to_json

SETTINGS = {"rounds": 4, "rate": 0.4, "lr": 0.5, "clip": 1.0}


@pytest.fixture(scope="module")
def clients():
    made = sd.data.load("breast-cancer").partition("dirichlet", clients=4, beta=0.5, seed=0, minimum=40)
    return made.with_budgets([0.5, 1.0, 4.0, math.inf], delta=1e-4)


@pytest.fixture(scope="module")
def done(clients):
    return sd.train(clients, "logistic", "dp-fedavg", baselines=True, **SETTINGS)


def test_the_majority_class_is_that_of_training_and_judged_on_test_records(clients):
    found = sd.train(clients, "logistic", "dp-fedavg", **SETTINGS).result["baselines"]
    assert set(found) == {"covered", "majority"}
    assert found["covered"] is False
    for train, test, told in zip(clients.train, clients.test, found["majority"]["client_accuracy"]):
        usual = np.bincount(clients.y[train]).argmax()
        assert told == pytest.approx((clients.y[test] == usual).mean())
    assert found["majority"]["accuracy"] == pytest.approx(np.mean(found["majority"]["client_accuracy"]))


def test_asking_for_baselines_changes_nothing_of_the_run(clients, done):
    plain = sd.train(clients, "logistic", "dp-fedavg", **SETTINGS).result
    assert plain["checksum"] == done.result["checksum"]
    assert plain["privacy"] == done.result["privacy"]


def test_alone_is_a_federation_of_one_at_its_own_budget(clients, done):
    told = done.result["baselines"]["alone"]["client_accuracy"]
    for place, accuracy in enumerate(told):
        one = sd.train(clients.only(place), "logistic", by_itself(methods.get("dp-fedavg")), evaluate=4, **SETTINGS)
        assert one.result["final"]["accuracy"] == pytest.approx(accuracy)
        promised, own = one.privacy[0], clients.budgets[place]
        assert promised["epsilon"] == own.epsilon
        assert math.isinf(own.epsilon) or 0.9 * own.epsilon < promised["spent_epsilon"] <= own.epsilon


def test_the_ceiling_is_the_same_training_without_noise(clients, done):
    told = done.result["baselines"]["ceiling"]
    free = sd.train(clients, "logistic", "fedavg", **SETTINGS).result["final"]
    assert len(told["client_accuracy"]) == 4
    assert told["loss"] == pytest.approx(free["loss"], rel=0.1), "fedavg draws other batches"
    assert told["loss"] < done.result["final"]["loss"]


def test_what_is_automatic_is_chosen_anew_for_a_client_by_itself(clients):
    found = sd.train(clients, "logistic", "auto", rounds=20, baselines=True).result
    assert len(found["baselines"]["alone"]["client_accuracy"]) == 4
    assert found["baselines"]["ceiling"]["accuracy"] > found["baselines"]["majority"]["accuracy"]
    alone = sd.plan(clients.only(0), "logistic", by_itself(methods.get("auto")), rounds=20)
    together = sd.plan(clients, "logistic", "auto", rounds=20)
    assert alone.plan.training.lr < together.plan.training.lr, "the strictest client alone takes shorter steps"


def test_a_client_by_itself_keeps_its_records_its_units_and_its_budget(clients):
    one = clients.only(2)
    assert one.names == [clients.names[2]]
    assert np.array_equal(one.x[one.train[0]], clients.x[clients.train[2]])
    assert np.array_equal(one.y[one.test[0]], clients.y[clients.test[2]])
    assert len(one.y) == len(clients.train[2]) + len(clients.test[2])
    people = np.array([[k, k + 1, -1] for k in range(0, 20, 2)])
    whole = type(clients)(
        "units", clients.x[:20], clients.y[:20], clients.valid[:20], ["a", "b"], [np.arange(5), np.arange(5, 8)],
        [np.arange(0), np.arange(16, 20)], None, "classification", 2, units=people, unit_name="patient",
    )  # fmt: skip
    last = whole.only(1)
    assert np.array_equal(last.x[last.records_of(last.train[0])], whole.x[whole.records_of(whole.train[1])])
    assert np.array_equal(last.y[last.test[0]], whole.y[whole.test[1]])
    assert (last.units[:, 2] == -1).all()


def test_two_classes_have_auc_and_confusion_over_all_test_records(clients, done):
    final, rows = done.result["final"], np.concatenate(clients.test)
    with torch.no_grad():
        outputs = done.model(torch.from_numpy(clients.x[rows])).double().numpy()
    labels = clients.y[rows]
    assert final["judged_on"] == "clients"
    assert final["auc"] == pytest.approx(theirs.roc_auc_score(labels, outputs[:, 1] - outputs[:, 0]), abs=1e-6)
    assert final["confusion"] == theirs.confusion_matrix(labels, outputs.argmax(1)).tolist()
    assert final["sensitivity"] == pytest.approx(final["confusion"][1][1] / sum(final["confusion"][1]))


def test_numbers_are_judged_in_the_scale_of_the_file(tmp_path):
    draw = np.random.default_rng(0)
    for site in ("north", "south"):
        x = draw.random(80)
        rows = [f"{a:.4f},{100 + 300 * a:.3f}" for a in x]
        (tmp_path / f"{site}.csv").write_text("\n".join(["a,cost", *rows]) + "\n")
    schema = {"target": "cost", "task": "regression", "range": [0, 500], "numeric": {"a": [0, 1]}}
    made = sd.data.from_folder(tmp_path, schema=schema).with_budgets(8.0, delta=1e-3)
    run = sd.train(made, "logistic", "dp-fedavg", **SETTINGS, baselines=True).result
    final, found = run["final"], run["baselines"]
    assert final["scale"] == "cost"
    pooled = np.average(final["client_loss"], weights=[len(one) for one in made.test])
    assert final["rmse"] == pytest.approx(500 * math.sqrt(2 * pooled), rel=1e-4)
    assert final["r2"] < 1.0
    for train, test, told in zip(made.train, made.test, found["mean"]["client_loss"]):
        assert told == pytest.approx(0.5 * ((made.y[test] - made.y[train].mean()) ** 2).mean(), rel=1e-5)
    assert len(found["alone"]["client_loss"]) == 2
    assert "accuracy" in found["alone"]
    assert "Compared with what?" in render([json.loads(to_json(run))])


@pytest.mark.slow
@pytest.mark.parametrize("name", methods.names())
def test_every_method_has_its_baselines(clients, name):
    draws = name in ("uniform", "unbiased", "unbiased-compensated", "privacy-aware", "power-of-choice")
    settings = {"rounds": 3, "rate": 0.4, **({"select": 2} if draws else {}), **({} if name == "auto" else {"lr": 0.3})}
    found = sd.train(clients, "logistic", name, baselines=True, **settings).result["baselines"]
    for key in ("alone", "ceiling"):
        assert "failed" not in found[key]
        assert len(found[key]["client_accuracy"]) == 4


def test_a_baseline_that_cannot_be_trained_says_why(clients, monkeypatch):
    def broken(*_, **__):
        raise BadInput("no such thing")

    monkeypatch.setattr("sordino.study.baselines.train_prepared", broken)
    found = sd.train(clients, "logistic", "dp-fedavg", baselines=True, **SETTINGS).result["baselines"]
    assert found["ceiling"] == {"failed": "no such thing"}
    assert found["alone"]["failed"] == dict.fromkeys(clients.names, "no such thing")
    assert found["alone"]["client_accuracy"] is None


def test_baselines_are_asked_for_in_a_study_or_by_an_option(in_folder, tmp_path):
    (tmp_path / "study.toml").write_text(
        '[study]\nname = "b"\nrounds = 2\nbaselines = true\n[data]\nname = "digits"\nrecords = 300\nclients = 2\n'
        '[budgets]\nepsilon = 2.0\n[model]\nname = "logistic"\n[method]\nname = "dp-fedavg"\n'
    )
    assert in_folder("run", "study.toml", "--out", "one")[0] == 0
    off = ("--set", "study.baselines=false")
    assert in_folder("run", "study.toml", *off, "--baselines", "--out", "two")[0] == 0
    assert in_folder("run", "study.toml", *off, "--out", "three")[0] == 0
    found = [json.loads((tmp_path / name / "result.json").read_text())["baselines"] for name in ("one", "two", "three")]
    assert [set(one) - {"covered"} for one in found] == [{"majority", "alone", "ceiling"}] * 2 + [{"majority"}]
    assert in_folder("run", "study.toml", *off, "--out", "three", "--resume", "--baselines")[0] == 0
    later = json.loads((tmp_path / "three" / "result.json").read_text())
    first = json.loads((tmp_path / "one" / "result.json").read_text())
    assert later["baselines"] == found[0], "a finished run gets them later"
    assert later["checksum"] == first["checksum"]
    assert later["privacy"] == first["privacy"]
