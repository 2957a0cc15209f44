"""What canaries cannot see: reused randomness, uncharged releases, clients that are asked in special ways."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

import sordino as sd
from sordino.errors import BadInput, SordinoError
from sordino.methods import adapt, get, names
from sordino.privacy.gate import Gate, Piece, Terms
from sordino.privacy.generators import Keyed, Turn
from sordino.privacy.ledger import Charge, Ledger, Plan
from sordino.privacy.types import Event, Sampling

PRIVATE = [name for name in names() if get(name).private]
DRAWN = ["uniform", "unbiased", "unbiased-compensated", "privacy-aware", "power-of-choice"]
SETTINGS = {"rate": 0.2, "lr": 0.3, "clip": 0.7, "evaluate": 100}


def settings(method: str) -> dict:
    return {**SETTINGS, **({"select": 2} if method in DRAWN else {})}


@pytest.mark.parametrize("method", PRIVATE)
def test_every_method_trains_within_every_budget_and_never_reuses_randomness(digits, method, monkeypatch):
    """No stream is drawn from twice: not across rounds, copies, steps, kinds of release, nor for sampling and noise."""
    keys = Counter()
    honest = Keyed._key

    def spy(self, *parts):
        key = honest(self, *parts)
        keys[key.tobytes()] += 1
        return key

    monkeypatch.setattr(Keyed, "_key", spy)
    done = sd.train(digits, "logistic", method, rounds=4, steps=2, **settings(method))
    assert torch.isfinite(done.weights).all()
    assert max(keys.values()) == 1
    for one in done.privacy:
        assert one["spent_epsilon"] <= one["epsilon"] * (1 + 1e-9)
        assert (one["spent_epsilon"] > 0) == bool(one["releases"])


@pytest.mark.parametrize("method", [n for n in names() if not get(n).private])
def test_every_method_without_privacy_trains_and_says_so(digits, method):
    done = sd.train(digits, "logistic", method, rounds=3, steps=2, **settings(method))
    assert done.result["private"] is False
    assert torch.isfinite(done.weights).all()


def test_a_part_that_was_not_charged_cannot_be_released():
    gate = Gate(None, Keyed("k"), "run")
    permit = gate.grant([Turn("a", 1)], [Terms(Sampling.full(), (("gradient", 1.0),), 1, 1.0)], "r")
    loss = Piece(torch.ones(1, 3), torch.ones(1, 3), lambda a: a.sum(1, keepdim=True), lambda v: v[:, None])
    with pytest.raises(SordinoError, match="not charged"):
        gate.release(permit, 0, [{"loss": loss}], {"loss": torch.ones(1)}, 1)


def test_a_client_drawn_twice_pays_twice_with_its_own_noise(digits):
    """One client makes up most of the draw, so it appears twice in a round."""
    alone = digits.train[0][:40], digits.train[1][:40]
    clients = sd.data.from_arrays([(digits.x[one], digits.y[one]) for one in alone], classes=10, test=0.2).with_budgets(
        4.0, delta=1e-4
    )
    done = sd.train(clients, "logistic", "uniform", rounds=3, select=4, **SETTINGS)
    for record in done.metrics:
        assert len(record["participants"]) == 4
        assert max(Counter(record["participants"]).values()) >= 2
    counts = Counter(name for record in done.metrics for name in record["participants"])
    for one in done.privacy:
        assert one["releases"][0]["count"] == counts[one["client"]]


def test_power_of_choice_charges_losses_of_all_candidates_and_gradients_of_the_chosen(digits):
    done = sd.train(digits, "logistic", "power-of-choice", rounds=5, select=2, **SETTINGS)
    took = Counter(name for record in done.metrics for name in record["participants"])
    for one in done.privacy:
        counts = {release["what"]: release["count"] for release in one["releases"]}
        assert counts.get("gradient", 0) == took[one["client"]]
        assert counts.get("loss", 0) >= counts.get("gradient", 0)
    assert sum(r["count"] for one in done.privacy for r in one["releases"] if r["what"] == "loss") == 5 * 4


def test_a_public_client_adds_no_noise_and_is_drawn_more_often(digits):
    budgets = [0.1, 0.1, 0.1, 0.1, 0.1, math.inf]
    clients = digits.with_budgets(budgets, delta=1e-4)
    plan = sd.plan(clients, "logistic", "privacy-aware", rounds=50, select=2, rate=0.2).plan
    assert plan.clients[5].noise == 0
    probabilities = plan.schedule.probabilities
    assert probabilities[5] > clients.sizes[5] / clients.sizes.sum()
    done = sd.train(clients, "logistic", "privacy-aware", rounds=3, select=2, **SETTINGS)
    assert done.privacy[5]["epsilon"] == math.inf


def test_the_noise_of_a_drawn_client_fits_the_rounds_it_was_drawn_for(digits):
    plan = sd.plan(digits, "logistic", "unbiased", rounds=30, select=3, rate=0.2).plan
    counts = np.bincount(plan.schedule.asked.ravel(), minlength=6)
    for client, count in zip(plan.clients, counts):
        assert client.turns == count
        if count:
            spent = sd.privacy.epsilon(client.noise, client.budget.delta, 0.2, int(count))
            assert 0.995 * client.budget.epsilon < spent <= client.budget.epsilon * (1 + 1e-6)


def test_published_noise_is_larger_and_charged_at_its_real_price(digits):
    tight = sd.plan(digits, "logistic", "unbiased", rounds=30, select=3, rate=0.2)
    method = get("unbiased", {"calibrate": "closed-form-selection"})
    published = sd.plan(digits, "logistic", method, rounds=30, select=3, rate=0.2)
    for a, b in zip(tight.plan.clients, published.plan.clients):
        if a.turns:
            assert b.noise > 1.5 * a.noise
            assert b.epsilon < a.epsilon


def test_select_is_refused_where_everyone_takes_part(digits):
    with pytest.raises(BadInput, match="asks everyone"):
        sd.train(digits, "logistic", "dp-fedavg", rounds=1, select=2)


def test_the_plan_shows_what_a_selection_rule_does(digits):
    view = sd.plan(digits, "logistic", "privacy-aware", rounds=30, select=2, rate=0.2)
    found = view.to_dict()["selection"]
    assert sum(found["probabilities"]) == pytest.approx(1.0)
    assert found["noise"] < found["noise_unbiased"]
    assert found["ranking"][0]["rule"] == "privacy-aware"
    assert sd.plan(digits, "logistic", "dp-fedavg", rounds=3).to_dict()["selection"] is None


def test_adaptive_selection_gives_the_turns_of_a_dry_client_to_others_within_their_caps(digits, tmp_path):
    """One generous client has nothing left from an earlier run; the rule is solved again and nobody is overdrawn."""
    rich = digits.names[4]
    with Ledger(tmp_path / "l.db") as book:
        budget = digits.budgets[4]
        book.open_account(rich, budget, simulated=True)
        event = Event("gradient", Sampling.full(), sd.privacy.calibrate(0.999 * budget.epsilon, budget.delta, 1.0, 1))
        book.declare([Plan(rich, "earlier", (event,), 1)])
        book.charge([Charge(rich, "earlier", "once", "gradient", 1, "r")])
    adaptive = get("privacy-aware", {"select": {"name": "privacy-aware", "headroom": 2.0}})
    done = sd.train(digits, "logistic", adaptive, rounds=10, select=2, ledger=tmp_path / "l.db", **SETTINGS)
    took = Counter(name for record in done.metrics for name in record["participants"])
    assert took[rich] == 0
    assert sum(took.values()) == 20
    plan = sd.plan(digits, "logistic", adaptive, rounds=10, select=2, rate=0.2, lr=0.3, clip=0.7).plan
    for client, one in zip(plan.clients, done.privacy):
        assert took[client.name] <= client.turns
        assert one["spent_epsilon"] <= one["epsilon"] * (1 + 1e-9)
    fixed = sd.train(digits, "logistic", "privacy-aware", rounds=10, select=2, ledger=tmp_path / "l2.db", **SETTINGS)
    assert sum(len(record["participants"]) for record in fixed.metrics) == 20


def test_adaptive_selection_stops_when_nobody_can_pay(digits):
    adaptive = get("privacy-aware", {"select": {"name": "privacy-aware", "headroom": 1.5}})
    plan = sd.plan(digits, "logistic", adaptive, rounds=10, select=2, rate=0.2).plan
    none = adapt(plan, dict.fromkeys(digits.names, 0), 650, 0)
    assert (none.schedule.asked == -1).all()
    few = adapt(plan, dict.fromkeys(digits.names, 2), 650, 0)
    assert few.schedule.counts.max() <= 2
    assert 9 <= few.schedule.counts.sum() <= 12  # a client with one turn left that is asked twice is passed over
