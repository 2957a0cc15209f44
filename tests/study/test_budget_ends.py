"""When each client's budget ends: what the plan expects, and what the result records."""

import numpy as np
import pytest

import sordino as sd
from sordino.errors import BadInput, BudgetRefused
from sordino.privacy.accounting import composed_epsilon
from sordino.study.choice import last_turns


@pytest.fixture
def clients():
    source = sd.data.load("digits").partition("iid", clients=5, seed=0)
    return source.with_budgets([0.5, 1.0, 2.0, 4.0, 8.0], delta=1e-4)


def test_under_tight_noise_every_budget_ends_with_the_last_turn(clients):
    done = sd.train(clients, "logistic", rounds=4, rate=0.2)
    assert [one["budget_ends"] for one in done.privacy] == [4] * 5
    assert [one["last_round"] for one in sd.plan(clients, "logistic", rounds=4, rate=0.2).clients] == [4] * 5


def test_a_budget_that_could_pay_for_more_outlasts_the_run(clients):
    done = sd.train(clients, "logistic", "minimum-epsilon", rounds=3, rate=0.2)
    assert [one["budget_ends"] for one in done.privacy] == [3, None, None, None, None]


def test_a_second_run_on_the_same_ledger_ends_before_it_begins(clients, tmp_path):
    done = sd.train(clients, "logistic", rounds=3, rate=0.2, ledger=tmp_path / "ledger.db")
    assert {one["budget_ends"] for one in done.privacy} == {3}
    with pytest.raises(BudgetRefused, match="nothing was trained or charged"):
        sd.train(clients, "logistic", rounds=3, rate=0.2, ledger=tmp_path / "ledger.db", out=tmp_path / "run")
    assert not (tmp_path / "run" / "study.json").exists(), "the same command can be given again"
    with sd.privacy.Ledger(tmp_path / "ledger.db") as book:
        book.top_up("client-04", 8.0, "a second study", "officer")
    again = sd.train(clients, "logistic", rounds=3, rate=0.2, ledger=tmp_path / "ledger.db", out=tmp_path / "run")
    assert [row["participants"] for row in again.metrics] == [["client-04"]] * len(again.metrics)
    assert [one["budget_ends"] for one in again.privacy][:4] == [0] * 4


def test_noise_picked_too_small_ends_a_budget_early_and_the_plan_knows_when():
    clients = sd.data.load("digits").partition("iid", clients=3, seed=0).with_budgets([2.0, 400.0, 800.0], delta=1e-4)
    method = sd.methods.get("dp-fedavg", {"calibrate": "closed-form-selection"})
    settings = {"rounds": 8, "batch": 200, "lr": 0.01}
    plan = sd.plan(clients, "logistic", method, **settings)
    done = sd.train(clients, "logistic", method, evaluate=8, **settings)
    taken = [sum(c["client"] in row["participants"] for row in done.metrics) for c in plan.clients]
    assert [c["last_round"] for c in plan.clients] == taken
    assert taken[0] == 8 > taken[1] > taken[2] > 0
    assert [one["budget_ends"] for one in done.privacy] == [None, *taken[1:]]
    for one, client in zip(done.privacy[1:], plan.plan.clients[1:]):
        within, beyond = (composed_epsilon([client.total(one["budget_ends"] + k)], [1e-4])[0] for k in (0, 1))
        assert within <= one["epsilon"] < beyond


def test_a_drawn_client_is_asked_for_the_last_time_where_the_schedule_says(clients):
    plan = sd.plan(clients, "logistic", "unbiased", rounds=12, rate=0.2, select=2)
    asked = plan.plan.schedule.asked
    expected = [max((r + 1 for r in range(12) if c in asked[r]), default=0) for c in range(5)]
    assert last_turns(plan.plan) == [c["last_round"] for c in plan.clients] == expected
    done = sd.train(clients, "logistic", "unbiased", rounds=12, rate=0.2, select=2, evaluate=12)
    ends = [one["budget_ends"] for one in done.privacy]
    assert ends == [last or None for last in expected]
    assert np.unique(ends).size > 1


def test_public_data_never_ends():
    clients = sd.data.load("digits").partition("iid", clients=2, seed=0)
    clients = clients.with_budgets([1.0, np.inf], delta=1e-4)
    done = sd.train(clients, "logistic", rounds=2, rate=0.2)
    assert [one["budget_ends"] for one in done.privacy] == [2, None]


@pytest.mark.parametrize(
    ("sampling", "adjacency", "used"),
    [("poisson", "zero-out", "pld"), ("full", "zero-out", "gaussian-exact"), ("fixed", "replace-one", "rdp-tightened")],
)
def test_the_result_names_the_accountant_that_was_used(sampling, adjacency, used):
    clients = sd.data.load("digits").partition("iid", clients=2, seed=0)
    clients = clients.with_budgets(4.0, delta=1e-4, adjacency=adjacency)
    size = {} if sampling == "full" else {"batch": 100}
    done = sd.train(clients, "logistic", rounds=2, sampling=sampling, **size)
    assert {one["accountant"] for one in done.privacy} == {used}


@pytest.mark.parametrize(
    ("part", "choice", "words"),
    [
        ("aggregate", {"name": "robust-hdp", "evry": 2}, "no option 'evry': did you mean 'every'"),
        ("aggregate", {"name": "uniform", "every": 2}, "no option 'every': it has none"),
        ("server", {"name": "ema", "half_life": 2}, "no option 'half_life': use decay, beta, lr"),
        ("calibrate", {"name": "rdp", "loosest": True}, "no option 'loosest': use name, strictest"),
    ],
)
def test_an_option_that_a_part_does_not_have_is_refused_before_training(part, choice, words):
    with pytest.raises(BadInput, match=words):
        sd.methods.get("dp-fedavg", {part: choice})


def test_a_calibration_may_be_a_table_like_any_part():
    method = sd.methods.get("dp-fedavg", {"calibrate": {"name": "rdp", "strictest": True}})
    assert method.describe()["calibrate"] == "rdp, strictest budget"
