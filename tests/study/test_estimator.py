"""``sordino.Classifier`` and ``sordino.Regressor``: scikit-learn's interface, sordino's promises."""

from __future__ import annotations

import pickle

import numpy as np
import pandas
import pytest
import sklearn
import torch
import ward_files
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import cross_val_score
from sklearn.utils.estimator_checks import check_estimator

import sordino as sd
from sordino.errors import BadInput, BudgetRefused

QUICK = {"rounds": 15, "rate": 0.5}
PLAIN = {"epsilon": 8.0, "model": "logistic", "method": "dp-fedavg"}

NEEDS_MORE = {"check_array_api_input"}
"""scikit-learn skips it itself, unless another array library is set up."""


@pytest.fixture(scope="module")
def cancer():
    found = load_breast_cancer()
    sites = np.array(["north", "south", "west"])[np.arange(len(found.target)) % 3]
    return found.data / found.data.max(axis=0), found.target, sites


@pytest.mark.parametrize("kind", [sd.Classifier, sd.Regressor])
@pytest.mark.filterwarnings("ignore")
def test_every_check_of_scikit_learn_passes_under_a_budget(kind):
    estimator = kind(**PLAIN, training={**QUICK, "lr": 1.0 if kind is sd.Classifier else 0.3})
    found = check_estimator(estimator, on_fail=None, on_skip=None)
    assert len(found) > 40
    assert {one["check_name"] for one in found if one["status"] != "passed"} <= NEEDS_MORE
    assert {"check_classifiers_train", "check_regressors_train"} & {one["check_name"] for one in found}


def test_rows_belong_to_clients_and_everyone_keeps_its_budget(cancer):
    x, y, sites = cancer
    budgets = {"north": 0.5, "south": 8.0, "west": 2.0}
    estimator = sd.Classifier(budgets, 1e-4, model="logistic", schema={"classes": [0, 1]}, training={"rounds": 10})
    estimator.fit(x, y, clients=sites)
    assert estimator.clients_.tolist() == list(budgets)
    assert {one["client"]: one["epsilon"] for one in estimator.privacy_} == budgets
    for one in estimator.privacy_:
        assert 0 < one["spent_epsilon"] <= budgets[one["client"]] * (1 + 1e-6)
    assert estimator.score(x, y) > 0.8
    np.testing.assert_allclose(estimator.predict_proba(x).sum(axis=1), 1.0, atol=1e-6)
    np.testing.assert_array_equal(estimator.predict(x), estimator.run_.predict(x).prediction.astype(int))


def test_fit_is_train_on_the_same_clients(cancer):
    x, y, sites = cancer
    pairs = [(x[sites == name], y[sites == name]) for name in ("north", "south", "west")]
    names = ["north", "south", "west"]
    clients = sd.data.from_arrays(pairs, names, classes=[0, 1], test=0.0, seed=7, name="Classifier")
    clients = clients.with_budgets(4.0, delta=1e-4, seed=7)
    run = sd.train(clients, "logistic", "dp-fedavg", seed=7, **QUICK)
    estimator = sd.Classifier(
        4.0, 1e-4, model="logistic", method="dp-fedavg", schema={"classes": [0, 1]}, training=QUICK, random_state=7
    ).fit(x, y, clients=sites)
    assert torch.equal(run.weights, estimator.run_.weights)
    assert run.privacy == estimator.privacy_
    np.testing.assert_array_equal(estimator.predict_proba(x), run.predict(x).probabilities)


def test_a_ledger_holds_the_budget_of_all_fits(cancer, tmp_path):
    x, y, _ = cancer
    estimator = sd.Classifier(**PLAIN, training=QUICK, ledger=tmp_path / "ledger.db").fit(x, y)
    assert estimator.privacy_[0]["spent_epsilon"] <= 8.0
    with pytest.raises(BudgetRefused, match="nothing was trained"):
        clone(estimator).fit(x, y)
    free = clone(estimator).set_params(ledger=None).fit(x, y)
    assert free.privacy_[0]["run_epsilon"] == pytest.approx(estimator.privacy_[0]["run_epsilon"])


def test_frames_with_missing_cells_and_class_names():
    rows, labels = ward_files.rows_of()
    frame = pandas.DataFrame(rows)
    schema = {key: value for key, value in ward_files.SCHEMA.items() if key != "target"}
    estimator = sd.Classifier(8.0, 1e-4, schema=schema, training={"rounds": 20}).fit(frame[:450], labels[:450])
    assert estimator.classes_.tolist() == ward_files.CLASSES
    assert estimator.score(frame[450:], labels[450:]) > 0.8
    with pytest.raises(BadInput, match=r"row 1 has no prediction: column 'radius': is missing"):
        estimator.predict(frame[450:453].assign(radius=["12.0", None, "13.0"]))
    with pytest.raises(BadInput, match=r"row 2 cannot be encoded: column 'radius'"):
        clone(estimator).fit(frame[:20].assign(radius=["12"] * 2 + [None] + ["13"] * 17), labels[:20])
    with pytest.raises(BadInput, match="none of the declared classes"):
        clone(estimator).fit(frame[:20], ["odd", *labels[1:20]])


def test_a_person_with_several_rows_is_protected_as_one():
    rows, labels = ward_files.rows_of()
    frame = pandas.DataFrame(rows[:300]).assign(patient=[f" p{k // 3}" if k % 3 else f"p{k // 3}" for k in range(300)])
    schema = {**ward_files.SCHEMA, "unit": "patient", "unit_records": 3, "unit_name": "patient"}
    estimator = sd.Classifier(8.0, 1e-4, model="logistic", schema=schema, training={"rounds": 3})
    estimator.fit(frame, labels[:300])
    assert estimator.run_.result["study"]["sizes"] == [100], "patients, not rows"
    assert estimator.predict(frame.drop(columns="patient")).shape == (300,)
    with pytest.raises(BadInput, match="nobody knows whose"):
        clone(estimator).fit(frame.assign(patient=["", *frame["patient"][1:]]), labels[:300])
    with pytest.raises(BadInput, match="no column 'patient'"):
        clone(estimator).fit(frame.drop(columns="patient"), labels[:300])


def test_a_declared_range_gives_numbers_in_their_own_unit():
    found = load_diabetes()
    schema = {"values": [-0.2, 0.2], "range": [0, 400], "scale": "signed"}
    estimator = sd.Regressor(8.0, 1e-4, schema=schema, training={"rounds": 40}).fit(found.data, found.target)
    predicted = estimator.predict(found.data)
    assert abs(predicted.mean() - found.target.mean()) < 40
    assert estimator.score(found.data, found.target) > 0.35


def test_parameters_and_copies(cancer, tmp_path):
    x, y, _ = cancer
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(x.shape[1], 2))
    before = [one.clone() for one in module.parameters()]
    estimator = sd.Classifier(**{**PLAIN, "model": module}, training=QUICK)
    assert set(estimator.get_params()) == {
        "epsilon", "delta", "model", "method", "schema", "training", "ledger", "random_state",
    }  # fmt: skip
    assert clone(estimator).set_params(epsilon=1.0).epsilon == 1.0
    with pytest.raises(NotFittedError):
        estimator.predict(x)
    estimator.fit(x, y)
    assert all(torch.equal(one, two) for one, two in zip(before, module.parameters())), "fit leaves parameters alone"
    again = pickle.loads(pickle.dumps(estimator))
    np.testing.assert_array_equal(again.predict_proba(x), estimator.predict_proba(x))
    estimator.run_.export(tmp_path / "model.pt2")
    exported = torch.export.load(tmp_path / "model.pt2").module()(torch.from_numpy(x.astype(np.float32)))
    np.testing.assert_allclose(exported.detach().numpy(), estimator.predict_proba(x), atol=1e-5)


def test_clients_are_routed_through_cross_validation(cancer):
    x, y, sites = cancer
    with sklearn.config_context(enable_metadata_routing=True):
        estimator = sd.Classifier(**PLAIN, training={**QUICK, "lr": 2.0}).set_fit_request(clients=True)
        scores = cross_val_score(estimator, x, y, cv=2, params={"clients": sites}, error_score="raise")
    assert scores.min() > 0.7


def test_what_is_not_said_is_asked_for(cancer, caplog):
    x, y, sites = cancer
    with pytest.raises(BadInput, match="epsilon is missing"):
        sd.Classifier().fit(x, y)
    with pytest.raises(BadInput, match="one name for each of the 569 rows"):
        sd.Classifier(**PLAIN).fit(x, y, clients=sites[:3])
    caplog.clear()
    sd.Classifier(**PLAIN, training={"rounds": 1}).fit(x, y)
    assert "labels were read off y" in caplog.text
    caplog.clear()
    sd.Classifier(**PLAIN, schema={"classes": 2}, training={"rounds": 1}).fit(x, y)
    assert "read off y" not in caplog.text


def test_a_method_that_is_not_private_needs_no_budget(cancer):
    x, y, _ = cancer
    estimator = sd.Classifier(model="logistic", method="fedavg", training={"rounds": 2}).fit(x, y)
    assert estimator.run_.result["private"] is False
