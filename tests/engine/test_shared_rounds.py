"""Simulated rounds with shared noise: equal to a plain loop, to themselves in every layout, and noisy as declared."""

import math
import time

import dp_accounting as dp
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from plain_loop import close
from plain_shared import PlainShared, plain_adaptdp, plain_descent, plain_fedfdp, plain_quantile

import sordino as sd
from sordino.data.dataset import Dataset
from sordino.engine.simulate import one_round
from sordino.errors import BadInput, BudgetRefused
from sordino.methods import get
from sordino.privacy.ledger import Charge, Ledger, LedgerPlan
from sordino.privacy.trust import Trust
from sordino.privacy.types import Event, Sampling
from sordino.server.summed import Summed
from sordino.study.run import prepare
from sordino.study.session import Session, train_prepared, train_together

KEYS = {"rounds": 3, "rate": 0.1, "lr": 0.3, "clip": 0.7}
INF = math.inf


def by_size(p):
    return p.shares


def alike(p):
    return [1 / len(p.plan.clients)] * len(p.plan.clients)


CASES = {
    "dp-fedavg": ("dp-fedavg", {}, 2, 0, plain_descent, by_size),
    "one round": ("dp-fedavg", {"rounds": 1}, 0, 0, plain_descent, by_size),
    "all others collude": ("dp-fedavg", {}, 5, 0, plain_descent, by_size),
    "lost sites": ("declared-variance", {}, 1, 2, plain_descent, by_size),
    "strictest": ("minimum-epsilon", {}, 1, 0, plain_descent, by_size),
    "fedprox": ("dp-fedprox", {}, 2, 0, plain_descent, by_size),
    "drawn": ("uniform", {"select": 4}, 1, 0, plain_descent, alike),
    "quantile": ("quantile-clipping", {}, 2, 0, plain_quantile, by_size),
    "fedfdp": ("fedfdp", {}, 2, 1, lambda p, s: plain_fedfdp(p, s, 0.1), by_size),
    "adaptdp": ("adaptdp", {"clip": 20.0, "rate": 0.4}, 1, 0, plain_adaptdp, by_size),
    "drawn, with a question beside": (
        ("quantile-clipping", {"select": "uniform"}),
        {"select": 4},
        1,
        0,
        plain_quantile,
        by_size,
    ),
    "answers with weights of their own": (
        ("fedfdp", {"clip": {"name": "fair", "weight": 0.5}, "ask": {"name": "loss", "size": 15}}),
        {},
        2,
        0,
        lambda p, s: plain_fedfdp(p, s, 0.5),
        by_size,
    ),
}


def ready_for(clients, method, colluders, dropouts=0, **more):
    return prepare(clients, "logistic", method, 0, None, {**KEYS, **more}, trust=Trust("shared", colluders, dropouts))


@pytest.mark.parametrize("case", CASES)
def test_rounds_equal_a_plain_loop(digits, case):
    named, more, colluders, dropouts, loop, shares = CASES[case]
    method = named if isinstance(named, str) else get(*named)
    ready = ready_for(digits, method, colluders, dropouts, **more)
    p = PlainShared(ready, colluders, dropouts)
    assert close(train_prepared(ready).weights, loop(p, shares(p))) < 1e-5


def test_public_sites_add_no_noise_and_count_for_their_records(digits):
    clients = digits.with_budgets([0.5, INF, 2.0, 4.0, INF, 1.0], delta=1e-4)
    ready = ready_for(clients, "dp-fedavg", 1)
    p = PlainShared(ready, 1)
    assert (p.fewest, p.share) == (4, 1 / math.sqrt(3))
    assert close(train_prepared(ready).weights, plain_descent(p, p.shares)) < 1e-5


def test_replace_one_doubles_the_noise(digits):
    clients = digits.with_budgets([0.5, 1.0, 2.0, 4.0, 8.0, 1.0], delta=1e-4, adjacency="replace-one")
    ready = ready_for(clients, "dp-fedavg", 2, rate=None, sampling="full")
    p = PlainShared(ready, 2)
    assert ready.plan.clients[0].terms.adjacency.sensitivity == 2
    assert close(train_prepared(ready).weights, plain_descent(p, p.shares)) < 1e-5


@pytest.mark.parametrize("sites", [1, 2])
@pytest.mark.parametrize("colluders", [0, 1])
def test_one_site_and_two(digits, sites, colluders):
    clients = sd.data.load("digits").subset(200, seed=0).partition("iid", clients=sites, seed=0)
    clients = clients.with_budgets([0.5, 3.0][:sites], delta=1e-4)
    ready = ready_for(clients, "dp-fedavg", colluders)
    p = PlainShared(ready, colluders)
    assert p.share == (1 / math.sqrt(2) if (sites, colluders) == (2, 0) else 1.0)
    run = train_prepared(ready)
    assert close(run.weights, plain_descent(p, p.shares)) < 1e-5
    for one in run.privacy:
        assert (one["own_epsilon"] == pytest.approx(one["spent_epsilon"])) == (p.share == 1.0)


@pytest.mark.parametrize("exact", [False, True])
def test_the_noise_of_every_row_and_of_the_sum_is_what_the_plan_says(digits, monkeypatch, exact):
    """What each row adds, and what the sum then has, over coordinates and rounds, against clean gradients."""
    seen, weights, kept = {}, [], Summed.add

    def spy(self, rows, updates):
        for row, update in zip(rows.tolist(), updates):
            seen.setdefault(row, []).append(update.detach().clone())
        weights.append(np.array(self._weights))
        kept(self, rows, updates)

    monkeypatch.setattr(Summed, "add", spy)
    rounds, colluders = 6, 2
    # No steps are taken: gradients stay those of the first weights, and batches are drawn afresh.
    ready = ready_for(digits, "dp-fedavg", colluders, rounds=rounds, rate=0.05, server_lr=1e-12, exact_noise=exact)
    train_prepared(ready)
    p = PlainShared(ready, colluders)
    clip, lr = ready.plan.training.clip, ready.plan.training.lr
    planned = np.array(ready.plan.sharing.releases[0].weights)
    noise = np.zeros((rounds, 6, len(p.start)))
    for number in range(1, rounds + 1):
        np.testing.assert_allclose(weights[number - 1], planned)
        for i in range(6):
            clean = p.mean_gradient(p.start, i, number, clip, noise=False)[0]
            noise[number - 1, i] = (-seen[i][number - 1].double() / lr - clean).numpy()
    for i, c in enumerate(ready.plan.clients):
        own = c.noise * clip / math.sqrt(6 - colluders) / c.terms.divisor
        assert noise[:, i].std() == pytest.approx(own, rel=0.06)
    together = np.einsum("i,rid->rd", planned, noise)
    declared = sum(
        (w * c.noise * clip / math.sqrt(4) / c.terms.divisor) ** 2 for w, c in zip(planned, ready.plan.clients)
    )
    assert together.std() == pytest.approx(math.sqrt(declared), rel=0.06)
    assert math.sqrt(declared) == pytest.approx(ready.plan.sharing.noise * clip)


def test_weights_of_every_round_are_the_plans(digits):
    run = sd.train(digits, "logistic", "dp-fedavg", trust={"noise": "shared", "colluders": 2}, **KEYS)
    plan = sd.plan(digits, "logistic", "dp-fedavg", trust={"noise": "shared", "colluders": 2}, **KEYS).plan
    for record in run.metrics:
        np.testing.assert_allclose(list(record["weights"].values()), plan.sharing.releases[0].weights, rtol=1e-9)


def judged(events, delta):
    book = PLDAccountant(dp.NeighboringRelation.REPLACE_SPECIAL, value_discretization_interval=1e-3)
    for rate, noise, count in events:
        book.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise)), count)
    return book.get_epsilon(delta)


@pytest.mark.parametrize(("method", "colluders", "dropouts"), [("dp-fedavg", 2, 0), ("fedfdp", 1, 2)])
def test_what_a_finished_run_cost_by_another_accountant(digits, method, colluders, dropouts):
    trust = {"noise": "shared", "colluders": colluders, "dropouts": dropouts}
    run = sd.train(digits, "logistic", method, trust=trust, **KEYS)
    plan = sd.plan(digits, "logistic", method, trust=trust, **KEYS).plan
    share = 1 / math.sqrt(6 - colluders - dropouts)
    for one, c in list(zip(run.privacy, plan.clients))[::2]:
        every = [(t.sampling.rate, t.event.noise, 3) for t in (c.terms, *c.asks)]
        assert one["spent_epsilon"] == pytest.approx(judged(every, 1e-4), rel=5e-3)
        assert one["spent_epsilon"] <= c.budget.epsilon
        assert one["own_epsilon"] == pytest.approx(judged([(q, z * share, t) for q, z, t in every], 1e-4), rel=5e-3)
        assert one["own_epsilon"] > one["spent_epsilon"]
        told = "any two" if colluders == 2 else "any one"
        assert told in one["trust"]
        assert "five other sites" in one["trust"]


class Stop(Exception):
    pass


@pytest.mark.parametrize("method", ["fedfdp", "quantile-clipping", "uniform", "auto"])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(digits, tmp_path, method):
    keys = {**KEYS, "rounds": 5, "trust": {"noise": "shared", "colluders": 1, "dropouts": 1}}
    whole = sd.train(digits, "logistic", method, out=tmp_path / "whole", **keys)

    def halfway(record):
        if record["round"] == 2:
            raise Stop

    with pytest.raises(Stop):
        sd.train(digits, "logistic", method, out=tmp_path / "half", callbacks=[halfway], **keys)
    done = sd.train(digits, "logistic", method, out=tmp_path / "half", resume=True, **keys)
    assert torch.equal(done.weights, whole.weights)
    assert done.privacy == whole.privacy


@pytest.mark.parametrize("other", [None, {"noise": "shared", "colluders": 4}])
def test_a_run_does_not_go_on_under_another_choice_of_trust(digits, tmp_path, other):
    trust = {"noise": "shared", "colluders": 1}

    def halfway(record):
        raise Stop

    with pytest.raises(Stop):
        sd.train(digits, "logistic", "dp-fedavg", out=tmp_path / "run", callbacks=[halfway], trust=trust, **KEYS)
    with pytest.raises(BadInput):
        sd.train(digits, "logistic", "dp-fedavg", out=tmp_path / "run", resume=True, trust=other, **KEYS)


def test_stacked_runs_end_as_alone(digits):
    """Shared and per site in one stack, with different colluders."""
    trusts = [Trust("shared", 2), Trust("shared", 0), Trust(), Trust("shared", 1, 1), Trust("shared", 2)]
    methods = ["dp-fedavg", "dp-fedavg", "dp-fedavg", "weiavg", "quantile-clipping"]
    runs = [prepare(digits, "logistic", m, 0, None, KEYS, trust=t) for m, t in zip(methods, trusts)]
    for one, ready in zip(train_together(runs, device="cpu"), runs):
        alone = train_prepared(ready)
        assert close(one.weights, alone.weights) < 1e-5
        assert one.privacy == alone.privacy


def poorer(clients, ledger, places, turns):
    """A ledger in which these clients have paid so many turns of a run elsewhere."""
    with Ledger(ledger) as book:
        book.open_accounts(dict(zip(clients.names, clients.budgets)), simulated=True)
        for i in places:
            event = Event("elsewhere", Sampling.poisson(0.1), 1.9 / clients.budgets[i].epsilon)
            book.declare([LedgerPlan(clients.names[i], "other", (event,), turns)])
            for k in range(turns):
                book.charge([Charge(clients.names[i], "other", f"turn {k}", "elsewhere", 1, "ab" * 32)])
        book.close_run("other")


@pytest.mark.parametrize(
    ("colluders", "dropouts", "poor", "played"),
    [
        (1, 0, [0], "stops"),  # all six are needed
        (1, 1, [0], "goes on"),  # one may be missing
        (1, 1, [0, 1], "stops"),
        (1, 2, [0, 1], "goes on"),
        (5, 0, [0, 1], "goes on"),  # a share is all, so nobody needs the others
    ],
)
def test_rounds_that_too_few_can_pay_are_not_played(digits, tmp_path, colluders, dropouts, poor, played):
    ledger = tmp_path / "ledger.db"
    poorer(digits, ledger, poor, 6)
    trust = {"noise": "shared", "colluders": colluders, "dropouts": dropouts}
    run = sd.train(digits, "logistic", "dp-fedavg", ledger=ledger, trust=trust, **{**KEYS, "rounds": 8})
    there = [len(record["participants"]) for record in run.metrics]
    assert there[0] == 6
    if played == "goes on":
        assert len(there) == 8
        assert there[-1] == 6 - len(poor)
        assert "stopped" not in run.result
    else:
        assert 0 < len(there) < 8
        assert f"fewer than {6 - dropouts} clients can pay" in run.result["stopped"]["reason"]
    assert colluders == 5 or min(there) >= 6 - dropouts
    with Ledger(ledger, readonly=True) as book:
        spent = book.epsilon()
        for name, budget in zip(digits.names, digits.budgets):
            assert spent[name] <= budget.epsilon
            turns = sum(name in record["participants"] for record in run.metrics)
            assert sum(e.count for e in book.spent(name) if e.shared) == turns


def test_rounds_that_need_somebody_who_cannot_pay_are_left_out_and_say_so(digits, tmp_path):
    """Drawn clients: rounds without the poor one are played as planned."""
    ledger, trust = tmp_path / "ledger.db", {"noise": "shared", "colluders": 1}
    keys = {**KEYS, "rounds": 12, "select": 3}
    poorer(digits, ledger, [0], 36)
    plan = sd.plan(digits, "logistic", "uniform", trust=trust, **keys).plan
    run = sd.train(digits, "logistic", "uniform", ledger=ledger, trust=trust, **keys)
    left_out = 0
    for record, row in zip(run.metrics, plan.schedule.asked):
        able = {digits.names[i] for i in row[row > 0]}
        if len(able) < plan.sharing.needed:
            left_out += 1
            assert record["participants"] == []
            assert f"fewer clients than the {plan.sharing.needed}" in record["note"]
        else:
            assert set(record["participants"]) == able
    assert 0 < left_out < len(run.metrics)


def test_public_sites_do_not_stand_in_for_those_who_cannot_pay(digits, tmp_path):
    clients = digits.with_budgets([0.5, INF, 2.0, 4.0, INF, 1.0], delta=1e-4)
    poorer(clients, tmp_path / "ledger.db", [0], 6)
    keys = {**KEYS, "rounds": 8, "trust": {"noise": "shared", "colluders": 1}}
    run = sd.train(clients, "logistic", "dp-fedavg", ledger=tmp_path / "ledger.db", **keys)
    assert 0 < len(run.metrics) < 8
    assert "fewer than 4 clients can pay" in run.result["stopped"]["reason"]


def test_a_run_whose_first_round_too_few_can_pay_is_refused_and_charges_nobody(digits, tmp_path):
    ledger, trust = tmp_path / "ledger.db", {"noise": "shared", "colluders": 1}
    poorer(digits, ledger, [0], 36)
    with pytest.raises(BudgetRefused, match=r"5 of 6 clients.*6 are needed.*nothing was trained or charged"):
        sd.train(digits, "logistic", "dp-fedavg", ledger=ledger, trust=trust, out=tmp_path / "run", **KEYS)
    with Ledger(ledger, readonly=True) as book:
        assert [book.epsilon()[name] for name in digits.names[1:]] == [0.0] * 5


@pytest.mark.slow
def test_a_round_with_shared_noise_takes_no_longer(tmp_path):
    """20 sites × 28,938 parameters: medians of seven rounds in turns, in seconds of the processor."""
    source = np.random.default_rng(0)
    x, y = source.random((6000, 1, 28, 28), dtype=np.float32), source.integers(0, 10, 6000)
    records = Dataset("noise", x, y, "classification", 10, np.ones(6000, bool))
    clients = records.partition("iid", clients=20, seed=0, test=0.0).with_budgets(np.linspace(0.5, 4, 20), delta=1e-4)
    keys = {"rounds": 9, "batch": 64, "lr": 0.1, "clip": 1.0, "evaluate": 9}
    spent, sessions = {}, {}
    for trust in (Trust(), Trust("shared", 10)):
        ready = prepare(clients, "robust-hdp-cnn", "dp-fedavg", 0, None, keys, trust=trust)
        assert ready.engine.dimension == 28_938
        book = Ledger(tmp_path / f"{trust.noise}.db", durable=False)
        sessions[trust.noise], spent[trust.noise] = Session(ready, book, "run", torch.device("cpu")), []
    for number in range(1, 9):
        for noise, session in sorted(sessions.items(), reverse=bool(number % 2)):
            started = time.process_time()
            one_round(session.setup, session.state, number, np.zeros(20, dtype=np.int64))
            spent[noise].append(time.process_time() - started)
    assert np.median(spent["shared"][1:]) < 1.15 * np.median(spent["per-site"][1:])
