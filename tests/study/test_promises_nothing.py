"""Budgets that promise nothing are not called private."""

from __future__ import annotations

import math

import pytest

import sordino as sd


@pytest.mark.parametrize(("epsilons", "private"), [([math.inf, math.inf], False), ([math.inf, 2.0], True)])
def test_infinite_budgets_for_all_are_not_private(epsilons: list[float], private: bool) -> None:
    clients = sd.data.load("digits", records=100).partition("iid", clients=2).with_budgets(epsilons, delta=1e-4)
    view = sd.plan(clients, "logistic", "dp-fedavg", rounds=1, rate=0.5)
    assert view.to_dict()["private"] is private
    assert any("NOT PRIVATE" in warning for warning in view.warnings) is not private
    done = sd.train(clients, "logistic", "dp-fedavg", rounds=1, rate=0.5)
    assert done.result["private"] is private


def test_a_delta_above_one_over_n_is_told(caplog: pytest.LogCaptureFixture) -> None:
    sd.data.load("digits", records=100).partition("iid", clients=2).with_budgets(2.0, delta=0.02)
    assert "budgets.delta above 1/records" not in caplog.text
    sd.data.load("digits", records=100).partition("iid", clients=2).with_budgets(2.0, delta=0.03)
    assert "budgets.delta above 1/records allows" in caplog.text
    assert "client-00 (0.03, 40 records)" in caplog.text


def test_a_plan_warns_of_a_budget_of_a_million() -> None:
    clients = sd.data.load("digits", records=100).partition("iid", clients=2).with_budgets([1e6, 2.0], delta=1e-4)
    told = [one for one in sd.plan(clients, "logistic", rounds=1, rate=0.5).warnings if "next to nothing" in one]
    assert len(told) == 1
    assert told[0].startswith("client-00's ε=1e+06")
