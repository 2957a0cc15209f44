"""Levels of consent in a run: simulated and deployed alike, every level paid by its own account, none overdrawn."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation_rig import Rig, simulated, table

import sordino as sd
from sordino.engine.federation import wire
from sordino.engine.federation.exchange import offer_of
from sordino.engine.federation.limits import Policy
from sordino.engine.federation.site import Purse
from sordino.engine.federation.wire import Packet, pack, unpack
from sordino.errors import BadInput, BudgetRefused
from sordino.privacy.generators import Turn
from sordino.privacy.ledger import Ledger
from sordino.study.deployed import privacy_of

LEVELS = {"strict": 0.5, "standard": 1.0, "generous": 4.0}
RATE = {"rate": 0.1, "lr": 0.2}


def consenting(levels: dict[str, float] = LEVELS, clients: int = 3) -> sd.data.Federation:
    """Digits, whose people were asked: some said nothing."""
    digits = sd.data.load("digits").partition("dirichlet", clients=clients, beta=2.0, seed=1)
    said = np.random.default_rng(5).choice(["strict", "standard", "generous", "", None], len(digits.x))
    return digits.with_levels(levels, said.tolist())


@pytest.fixture(scope="module")
def clients() -> sd.data.Federation:
    return consenting()


def test_every_level_is_promised_and_pays_its_own(clients: Any, tmp_path: Path) -> None:
    run = sd.train(clients, model="logistic", method="dp-fedavg", rounds=5, ledger=tmp_path / "l.db", **RATE)
    with Ledger(tmp_path / "l.db", readonly=True) as book:
        accounts = {account.client: account.budget.epsilon for account in book.accounts()}
        spent = book.epsilon()
    for one, own in zip(run.privacy, clients.levels):
        name = one["client"]
        assert {level["level"]: level["records"] for level in one["levels"]} == {l.name: l.records for l in own}
        rates = [level["rate"] for level in one["levels"]]
        assert rates == sorted(rates)
        for level in one["levels"]:
            account = f"{name} ({level['level']})"
            assert accounts[account] == level["epsilon"] == LEVELS[level["level"]]
            assert level["spent_epsilon"] == spent[account] <= level["epsilon"]
            assert level["spent_epsilon"] >= 0.995 * level["epsilon"]
        # What is said of the client holds for each of its records.
        assert one["epsilon"] == 4.0
        assert one["spent_epsilon"] == max(level["spent_epsilon"] for level in one["levels"])
        assert len({release["noise"] for release in one["releases"]}) == 1
        with Ledger(tmp_path / "l.db", readonly=True) as book:
            views = book.attack([f"{name} ({level['level']})" for level in one["levels"]]).values()
        assert one["attack"]["success"] == max(view.success for view in views)
        assert one["attack"]["true_positives"] == max(view.true_positives for view in views)
    assert not {one["client"] for one in run.privacy} & set(accounts)


def test_repeated_runs_never_overdraw_any_level(clients: Any, tmp_path: Path) -> None:
    arguments = {"model": "logistic", "method": "dp-fedavg", "ledger": tmp_path / "l.db", **RATE}
    sd.train(clients, rounds=3, **arguments)
    for seed in (1, 2):
        with pytest.raises(BudgetRefused):
            sd.train(clients, rounds=3, seed=seed, **arguments)
    with Ledger(tmp_path / "l.db", readonly=True) as book:
        for account in book.accounts():
            assert book.epsilon([account.client])[account.client] <= account.budget.epsilon


def test_batches_follow_the_rates_of_the_levels(clients: Any) -> None:
    from sordino.privacy.gate import Gate
    from sordino.privacy.generators import Keyed
    from sordino.study.run import prepare
    from sordino.study.session import make_setup

    ready = prepare(clients, "logistic", "dp-fedavg", 0, None, {"rounds": 5, **RATE})
    setup = make_setup(ready, Gate(None, Keyed("k"), "r"), {}, torch.device("cpu"))
    client, terms = 1, dataclasses.replace(ready.plan.clients[1].terms, count=3000)
    drawn = setup.batches(client, Turn("x", 1), terms)
    times = np.bincount(drawn.positions, minlength=len(clients.x))
    assert set(np.flatnonzero(times)) <= set(clients.train[client].tolist())
    for group in terms.groups:
        own = times[clients.train[client][clients.members[client][group.name]]]
        assert own.mean() / 3000 == pytest.approx(group.rate, rel=0.05)
    assert len(drawn.positions) / 3000 == pytest.approx(terms.divisor, rel=0.02)


def test_one_level_trains_exactly_as_one_budget_would_plan(clients: Any) -> None:
    one = consenting({"all": 1.0})
    plain = one.with_budgets(1.0)
    noises = [[c.noise for c in sd.plan(f, "logistic", "dp-fedavg", 5, **RATE).plan.clients] for f in (one, plain)]
    assert noises[0] == pytest.approx(noises[1], rel=1e-6)


@pytest.mark.parametrize("method", ["dp-fedavg", "fedfdp", "power-of-choice"])
def test_a_deployed_run_ends_with_the_simulations_weights(method: str, clients: Any, tmp_path: Path) -> None:
    more = {"select": 2} if method == "power-of-choice" else {}
    study = table(method, clients, rounds=3, **RATE, **more)
    alone = simulated(clients, study, tmp_path / "simulated")
    with Rig(tmp_path, clients, study, alone.key, alone.noises) as rig:
        state = rig.train()
        torch.testing.assert_close(state.shown, alone.weights, atol=1e-5, rtol=0)
        plan = rig.ready.plan(rig.facts, alone.noises)
        said = {}
        for name, site in rig.wires.sites.items():
            for account, budget in site.trained.items():
                assert site.ledger.epsilon([account])[account] <= budget.epsilon
            said[name] = unpack(site.handle(pack(Packet(wire.BYE, {"run": "run1"})))).facts
        from sordino.engine.federation.declaration import check_spent

        told = privacy_of(plan, state, {name: check_spent(facts) for name, facts in said.items()})
        silent = privacy_of(plan, state, {})
    for one, own, least in zip(alone.result["privacy"], told, silent):
        levels = {level["level"]: level["spent_epsilon"] for level in one["levels"]}
        assert {level["level"]: level["spent_epsilon"] for level in own["levels"]} == pytest.approx(levels)
        assert own["epsilon"] == one["epsilon"]
        assert [level["level"] for level in least["levels"]] == list(levels)
        assert all(level["spent_epsilon"] <= levels[level["level"]] * (1 + 1e-9) for level in least["levels"])


def test_evaluations_of_held_out_records_are_paid_for_by_the_strictest(clients: Any, tmp_path: Path) -> None:
    study = {**table("dp-fedavg", clients, rounds=2, **RATE), "evaluation": {"every": 1}}
    alone = simulated(clients, study, tmp_path / "simulated")
    with Rig(tmp_path, clients, study, alone.key, alone.noises) as rig:
        state = rig.train()
        torch.testing.assert_close(state.shown, alone.weights, atol=1e-5, rtol=0)
        for site in rig.wires.sites.values():
            held = f"{site.account} (held out)"
            assert site.ledger.account(held).budget.epsilon == 0.5
            assert 0 < site.ledger.epsilon([held])[held] <= 0.5
    assert all(one["held_epsilon"] <= 0.5 for one in alone.result["privacy"])


class Server:
    """Whatever a server could say to the first site."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.plan = rig.coordinator().course.plan.clients[0]
        self.site = rig.wires.sites[rig.clients.names[0]]

    def say(self, kind: str, offer: dict[str, Any], run: str = "evil", number: int = 1) -> Packet:
        brief = {**self.rig.ready.brief, "run": run}
        facts = {"brief": brief, "offer": offer, "round": number, "copy": 0, "since": 0, "run": run}
        facts |= {"count": offer["terms"]["count"], "public": {"lr": 0.2, "clip": 1.0}}
        weights = self.rig.ready.start + torch.rand(()) * 1e-3
        return unpack(self.site.handle(pack(Packet(kind, facts, {"weights": weights}))))


def with_rates(offer: dict[str, Any], rates: list[float]) -> dict[str, Any]:
    """An offer with other rates of the levels, and the divisor and mean rate that they have."""
    groups = [[name, rate, count] for (name, _, count), rate in zip(offer["terms"]["groups"], rates)]
    expected = sum(rate * count for _, rate, count in groups)
    mean = expected / sum(count for _, _, count in groups)
    terms = {**offer["terms"], "groups": groups, "divisor": expected, "sampling": ["poisson", mean]}
    return {**offer, "terms": terms}


def test_a_server_that_asks_for_a_rate_above_a_levels_is_paid_for_fewer_turns(clients: Any, tmp_path: Path) -> None:
    with Rig(tmp_path, clients, table("dp-fedavg", clients, rounds=4, **RATE)) as rig:
        server = Server(rig)
        for account in server.site.trained:
            server.site.ledger.close_plan(account, "run1")
        fair = offer_of(server.plan)
        rates = [rate for _, rate, _ in fair["terms"]["groups"]]
        greedy = with_rates(fair, [rates[2], rates[1], rates[2]])  # the strict ones as often as the generous
        payable = server.say(wire.OFFER, greedy).facts["payable"]
        assert payable < 4
        answers = [server.say(wire.TURN, greedy, number=number) for number in range(1, 5)]
        assert [one.kind for one in answers] == [wire.UPLOAD] * payable + [wire.REFUSED] * (4 - payable)
        assert all(one.facts["budget"] for one in answers[payable:])
        for account, budget in server.site.trained.items():
            assert server.site.ledger.epsilon([account])[account] <= budget.epsilon


def test_one_level_without_budget_refuses_the_turn_for_all(clients: Any, tmp_path: Path) -> None:
    with Rig(tmp_path, clients, table("dp-fedavg", clients, rounds=2, **RATE)) as rig:
        server = Server(rig)
        offer = offer_of(server.plan)
        first = server.say(wire.TURN, offer, run="run1")
        assert first.kind == wire.UPLOAD
        strict = next(iter(server.site.trained))
        used = {account: server.site.ledger.epsilon([account])[account] for account in server.site.trained}
        server.site.ledger.close_plan(strict, "run1")
        # Another run may not take what is left of the others alone.
        refused = server.say(wire.TURN, with_rates(offer, [0.3, 0.3, 0.3]), run="evil")
        assert refused.kind == wire.REFUSED
        assert refused.facts["budget"]
        assert used == {account: server.site.ledger.epsilon([account])[account] for account in used}


def test_offers_that_are_not_by_this_sites_levels_are_refused(clients: Any, tmp_path: Path) -> None:
    with Rig(tmp_path, clients, table("dp-fedavg", clients, rounds=2, **RATE)) as rig:
        server = Server(rig)
        fair = offer_of(server.plan)
        groups = fair["terms"]["groups"]
        without = {**fair, "terms": {key: value for key, value in fair["terms"].items() if key != "groups"}}
        renamed = [[f"x{name}", rate, count] for name, rate, count in groups]
        moved = [[groups[0][0], groups[0][1], groups[0][2] - 1], groups[1], [*groups[2][:2], groups[2][2] + 1]]
        for other in (renamed, moved, groups[::-1]):
            changed = with_rates({**fair, "terms": {**fair["terms"], "groups": other}}, [one[1] for one in other])
            assert server.say(wire.OFFER, changed).kind == wire.REFUSED
        assert server.say(wire.OFFER, without).kind == wire.REFUSED
        assert all(not server.site.ledger.charges(account, "evil", "gradient") for account in server.site.trained)


def test_a_site_without_levels_takes_no_groups(tmp_path: Path) -> None:
    plain = consenting().with_budgets(2.0)
    with Rig(tmp_path, plain, table("dp-fedavg", plain, rounds=2, **RATE)) as rig:
        server = Server(rig)
        fair = offer_of(server.plan)
        groups = {**fair["terms"], "groups": [["strict", fair["terms"]["sampling"][1], server.plan.records]]}
        assert server.say(wire.OFFER, {**fair, "terms": groups}).kind == wire.REFUSED


def test_a_limit_on_a_run_holds_for_every_level(clients: Any, tmp_path: Path) -> None:
    study = table("dp-fedavg", clients, rounds=2, **RATE)
    with Rig(tmp_path, clients, study, everywhere=Policy(run_epsilon=0.8)) as rig:
        rig.train()
        assert [one[1] for one in next(iter(rig.facts.values()))["levels"]] == [0.5, 0.8, 0.8]
        for site in rig.wires.sites.values():
            spent = site.ledger.epsilon(list(site.trained), "run1")
            assert max(spent.values()) <= 0.8
            assert spent[f"{site.account} (strict)"] <= 0.5


def test_a_level_is_for_life(clients: Any, tmp_path: Path) -> None:
    with Rig(tmp_path, clients, table("dp-fedavg", clients, rounds=2, **RATE)) as rig:
        rig.train()
        site = next(iter(rig.wires.sites.values()))
        arguments = {"declared": site.declared, "folder": tmp_path / "again"}
        consent = clients.consent.of(clients.train[0])
        places = consent.places.copy()
        places[np.flatnonzero(places == 0)[0]] = 2  # one strict record would be generous
        site.ledger.close()
        with Ledger(site.ledger.path) as ledger:
            for other, told in ((dataclasses.replace(consent, places=places), "not those"), (None, "with levels")):
                purse = Purse(site.budget, ledger, consent=other)
                with pytest.raises(BadInput, match=told):
                    type(site)(site.name, site.records, purse=purse, **arguments)
            with pytest.raises(BadInput, match="bound anew"):
                ledger.rebind(site.name, lambda salt: "new", "moved", "officer")
            type(site)(site.name, site.records, purse=Purse(site.budget, ledger, consent=consent), **arguments)


def test_a_ledger_without_levels_is_none_for_records_with_some(clients: Any, tmp_path: Path) -> None:
    plain = clients.with_budgets(0.5)
    with Rig(tmp_path, plain, table("dp-fedavg", plain, rounds=2, **RATE)) as rig:
        site = next(iter(rig.wires.sites.values()))
        consent = clients.consent.of(clients.train[0])
        purse = Purse(site.budget, site.ledger, consent=consent)
        with pytest.raises(BadInput, match="without levels"):
            type(site)(site.name, site.records, site.declared, purse, tmp_path / "again")


def test_what_cannot_sample_by_level_is_refused(clients: Any) -> None:
    for method, more, told in (
        ("dp-fedavg", {"sampling": "full"}, "poisson"),
        ("dp-fedavg", {"rate": 0.1, "trust": {"noise": "shared"}}, "shared"),
        (sd.methods.get("adaptdp", {"ask": {"name": "squared-norm", "size": "full"}}), RATE, "all records"),
        (sd.methods.get("dp-fedavg", {"calibrate": "closed-form-selection"}), RATE, "one budget a client"),
    ):
        with pytest.raises(BadInput, match=told):
            sd.plan(clients, "logistic", method, 3, **more)


def test_a_run_with_levels_goes_on_with_the_rates_it_began_with(clients: Any, tmp_path: Path) -> None:
    arguments = {"model": "logistic", "method": "dp-fedavg", "rounds": 4, **RATE}
    whole = sd.train(clients, out=tmp_path / "whole", **arguments)

    def stop(record: dict[str, Any]) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sd.train(clients, out=tmp_path / "cut", callbacks=[stop], **arguments)
    done = sd.train(clients, out=tmp_path / "cut", resume=True, **arguments)
    assert torch.equal(done.weights, whole.weights)
    assert done.privacy == whole.privacy
