"""A server that keeps to no order of messages and to nothing it said before, against every limit of SITE.toml."""

from __future__ import annotations

import dataclasses
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_rig import Rig, five_clients, table

from sordino.engine.federation import wire
from sordino.engine.federation.exchange import offer_of
from sordino.engine.federation.limits import Policy
from sordino.engine.federation.site import Purse
from sordino.engine.federation.wire import Packet, pack, unpack
from sordino.privacy.ledger import Ledger
from sordino.privacy.types import Budget

STEPS = {"steps": 2, "rate": 0.2, "lr": 0.2}


@pytest.fixture(scope="module")
def clients():
    return five_clients((4.0, 8.0, 16.0))


class Server:
    """Whatever a server could say to the first site of a rig."""

    def __init__(self, rig: Rig, **policy: Any) -> None:
        self.rig = rig
        self.plan = rig.coordinator().course.plan.clients[0]
        self.site = rig.wires.sites[rig.clients.names[0]]
        self.limit(**policy)
        for standing in self.site.ledger.standings(self.site.account):
            self.site.ledger.close_plan(self.site.account, standing.plan.run)

    def limit(self, **policy: Any) -> None:
        """The site is started again, with these limits in its file."""
        self.rig.policies[self.site.name] = Policy(**policy)
        self.site.ledger.close()
        self.site = self.rig.site(self.site.name)

    def offer(self, noise: float | None = None, **terms: Any) -> dict[str, Any]:
        found = offer_of(self.plan)
        parts = found["terms"]["parts"] if noise is None else [[name, noise] for name, _ in found["terms"]["parts"]]
        return {**found, "terms": {**found["terms"], "parts": parts, **terms}}

    def say(self, kind: str, run: str = "evil", **changed: Any) -> Packet:
        """One request, and what the site answers."""
        brief = {**self.rig.ready.brief, "run": run, **changed.pop("brief", {})}
        offer = changed.pop("offer", None) or self.offer()
        facts = {"brief": brief, "offer": offer, "round": 1, "copy": 0, "since": 0, "run": run, "place": 0}
        facts |= {"count": offer["terms"]["count"], "public": {"lr": 0.2, "clip": 1.0}}
        tensors = {"weights": changed.pop("weights", self.rig.ready.start), **changed.pop("tensors", {})}
        return unpack(self.site.handle(pack(Packet(kind, facts | changed, tensors))))

    def anew(self) -> torch.Tensor:
        """Other weights, so that no stored answer is meant."""
        return self.rig.ready.start + torch.rand(()) * 1e-3

    def spent(self, run: str | None = None) -> float:
        return self.site.ledger.epsilon([self.site.account], run)[self.site.account]


def refusal(packet: Packet) -> str:
    assert packet.kind == wire.REFUSED, packet
    return str(packet.facts["reason"])


def rig_of(tmp_path: Path, clients: Any, method: str = "dp-fedavg", rounds: int = 4, **training: Any) -> Rig:
    return Rig(tmp_path, clients, table(method, clients, rounds=rounds, **(STEPS | training)))


def test_every_limit_of_a_site_is_attacked_here() -> None:
    attacked = [
        "methods",
        "not_private",
        "models",
        "rounds",
        "steps",
        "parameters",
        "run_epsilon",
        "least_noise",
        "clip",
        "modules",
        "colluders",  # in test_shared_masks.py
        "survey",  # in tests/study/test_survey_study.py, and what else a survey has to keep
    ]
    assert [field.name for field in dataclasses.fields(Policy)] == attacked


@pytest.mark.parametrize("seed", range(6))
def test_run_epsilon_holds_in_any_order_of_messages(tmp_path: Path, clients: Any, seed: int) -> None:
    """The server asks for ε = 3.5 a run where 0.5 is allowed: turns, repeats and reopenings in random order."""
    chance = random.Random(seed)
    with rig_of(tmp_path, clients, rounds=40) as rig:
        server = Server(rig, run_epsilon=0.5)
        kinds = [wire.HELLO, wire.OFFER, wire.BYE, *[wire.TURN] * 5]
        offers = [server.offer(noise) for noise in (1.5, 6.0, 20.0)]
        runs = {f"run{seed}x{i}": chance.choice(offers) for i in range(3)}
        answers = []
        for _ in range(40):
            run = chance.choice(list(runs))
            offer = runs[run] if chance.random() < 0.9 else chance.choice(offers)
            place = {"round": chance.randint(1, 40), "copy": chance.randint(0, 2)}
            answers.append(server.say(chance.choice(kinds), run, offer=offer, weights=server.anew(), **place).kind)
            if chance.random() < 0.1:
                server.limit(run_epsilon=0.5)
        assert wire.UPLOAD in answers or all(offer is offers[0] for offer in runs.values())
        for run in runs:
            assert server.spent(run) <= 0.5


def test_a_turn_without_an_offer_and_one_after_the_end_cost_no_more_than_the_limit(
    tmp_path: Path, clients: Any
) -> None:
    """``run_epsilon = 0.1`` let a run spend 3.5: the limit was told to the server and never checked."""
    with rig_of(tmp_path, clients) as rig:
        server = Server(rig, run_epsilon=0.1)
        for n in range(1, 5):
            assert "would overdraw" in refusal(server.say(wire.TURN, offer=server.offer(1.5), round=n))
        server.say(wire.BYE)
        assert "would overdraw" in refusal(server.say(wire.TURN, offer=server.offer(1.5)))
        assert server.spent() == 0.0


def test_a_limit_that_was_lowered_holds_for_a_run_under_way(tmp_path: Path, clients: Any) -> None:
    with rig_of(tmp_path, clients) as rig:
        server = Server(rig)
        assert server.say(wire.TURN).kind == wire.UPLOAD
        cost = server.spent()
        server.limit(run_epsilon=1.01 * cost)
        assert "would overdraw" in refusal(server.say(wire.TURN, round=2))
        assert server.spent() == cost
        server.limit(run_epsilon=0.5 * cost)
        assert "would overdraw" in refusal(server.say(wire.TURN, round=3))


def test_public_data_keep_the_limit_of_a_run_too(tmp_path: Path, clients: Any) -> None:
    open_data = dataclasses.replace(clients, budgets=(Budget(math.inf, 1e-5), *clients.budgets[1:]))
    with rig_of(tmp_path, open_data) as rig:
        server = Server(rig, run_epsilon=0.5)
        assert "noise" in refusal(server.say(wire.TURN, "bare", offer=server.offer(0.0)))
        assert "would overdraw" in refusal(server.say(wire.TURN, "loud", offer=server.offer(1.5)))
        assert server.say(wire.TURN, "quiet", offer=server.offer(20.0)).kind == wire.UPLOAD


def test_many_runs_together_stay_within_the_budget(tmp_path: Path, clients: Any) -> None:
    """A limit is one run's, and a server can call anything a run: what holds over all of them is the budget."""
    with rig_of(tmp_path, clients) as rig:
        server = Server(rig, run_epsilon=1.5)
        kinds = [server.say(wire.TURN, f"run{i}", offer=server.offer(2.5 + 0.01 * i)).kind for i in range(40)]
        assert kinds.count(wire.UPLOAD) > 1
        assert kinds[-1] == wire.REFUSED
        assert server.spent() <= server.site.budget.epsilon


@pytest.mark.parametrize(("method", "more"), [("ali-dpfl", {}), ("fedavg", {"not_private": True})])
def test_rounds_are_counted_by_the_site(tmp_path: Path, clients: Any, method: str, more: dict[str, Any]) -> None:
    """Shorter turns, other copies, repeats, another round number: a run has three turns here, noise or not."""
    with rig_of(tmp_path, clients, method, rounds=3) as rig:
        server = Server(rig, rounds=3, **more)
        count = 1 if method == "ali-dpfl" else server.plan.terms.count
        answers = []
        for n in range(12):
            place = {"round": 1 + n % 3, "copy": n // 6, "count": count, "weights": server.anew()}
            answers.append(server.say(wire.TURN, **place).kind)
            if n % 4 == 1:
                server.say(wire.BYE)
                server.limit(rounds=3, **more)
        assert answers.count(wire.UPLOAD) == 3
        assert "allows 3 turns" in refusal(server.say(wire.TURN, count=count, weights=server.anew()))


@pytest.mark.parametrize(
    ("place", "word"),
    [
        ({"round": 0}, "round 0 cannot follow"),
        ({"round": 5}, "there is no round 5"),
        ({"round": 10**9}, "there is no round"),
        ({"round": True}, "a whole number was expected"),
        ({"round": "1"}, "a whole number was expected"),
        ({"copy": -1}, "there is no virtual copy -1"),
        ({"copy": 10**6}, "there is no virtual copy"),
        ({"since": 1}, "cannot follow"),
        ({"since": -1}, "cannot follow"),
        ({"count": 3}, "has 2 steps, not 3"),
        ({"count": 2.0}, "a whole number was expected"),
    ],
)
def test_a_place_that_the_run_does_not_have_is_refused_and_free(
    tmp_path: Path, clients: Any, place: dict[str, Any], word: str
) -> None:
    with rig_of(tmp_path, clients) as rig:
        server = Server(rig)
        assert word in refusal(server.say(wire.TURN, **place))
        assert server.spent() == 0.0


def test_steps_of_a_turn(tmp_path: Path, clients: Any) -> None:
    """Where the server sets the pace it stays under the limit; a plan of longer turns is refused; questions are one."""
    with rig_of(tmp_path, clients, "ali-dpfl") as rig:
        server = Server(rig, steps=3)
        assert "at most 3" in refusal(server.say(wire.TURN, count=4))
        assert "at most 3" in refusal(server.say(wire.TURN, count=0))
        assert "too many" in refusal(server.say(wire.TURN, offer=server.offer(count=4)))
        assert "between 1 and 3" in refusal(server.say(wire.TURN, public={"lr": 0.2, "clip": 1.0, "steps": 4}))
        assert server.spent() == 0.0
    with rig_of(tmp_path / "asked", clients, "adaptdp") as rig:
        server = Server(rig)
        offer = server.offer()
        offer["asks"] = [{**one, "count": 1000} for one in offer["asks"]]
        assert "answered from one batch" in refusal(server.say(wire.ASK, offer=offer))
        assert server.spent() == 0.0


def test_least_noise_of_every_part_in_every_request(tmp_path: Path, clients: Any) -> None:
    with rig_of(tmp_path, clients, "adaptdp") as rig:
        server = Server(rig, least_noise=2.0)
        quiet = server.offer()
        quiet["asks"] = [{**one, "parts": [[n, 50.0] for n, _ in one["parts"]]} for one in quiet["asks"]]
        quiet["terms"]["parts"] = [["gradient", 50.0]]
        loud = {**quiet, "asks": [{**one, "parts": [[n, 1.9] for n, _ in one["parts"]]} for one in quiet["asks"]]}
        assert server.say(wire.ASK, offer=quiet).kind == wire.ANSWER
        for kind in (wire.OFFER, wire.ASK, wire.TURN):
            assert "adds at least 2" in refusal(server.say(kind, offer=loud))
            assert "adds at least 2" in refusal(server.say(kind, "another", offer=loud))


def test_clip_is_the_radius_that_is_used_wherever_it_comes_from(tmp_path: Path, clients: Any) -> None:
    with rig_of(tmp_path, clients, "quantile-clipping") as rig:
        server = Server(rig, clip=(0.1, 10.0))
        assert server.say(wire.TURN, public={"lr": 0.2, "clip": 1.0, "radius": 0.5}).kind == wire.UPLOAD
        before = server.spent()
        for radius in (0.09, 11.0, 0.0, -1.0, float("inf")):
            told = {"lr": 0.2, "clip": 1.0, "radius": radius}
            assert "'radius'" in refusal(server.say(wire.TURN, public=told, round=2))
            each = {"public/radius": torch.tensor([[radius]])}
            assert "'radius'" in refusal(server.say(wire.TURN, tensors=each, round=2))
        assert "the bound of 'gradient' is 11" in refusal(server.say(wire.TURN, public={"lr": 0.2, "clip": 11.0}))
        assert server.spent() == before


def test_what_a_run_is_may_not_change_into_what_is_not_allowed(tmp_path: Path, clients: Any) -> None:
    """methods, models, parameters, not_private: checked with every request, not with the first of a run."""
    with rig_of(tmp_path, clients) as rig:
        server = Server(rig, methods=("dp-fedavg", "fedavg"), models=("logistic",), parameters=700)
        assert server.say(wire.OFFER).kind == wire.ACCEPTED
        assert server.say(wire.TURN).kind == wire.UPLOAD
        before = server.spent()
        changes = {
            "method 'fedprox' is not allowed": {"method": {"name": "fedprox"}},
            "NOT PRIVATE": {"method": {"name": "fedavg"}},
            "exchanges its local": {"method": {"name": "dp-fedavg", "local": "fedprox"}},
            "model 'mlp' is not allowed": {"model": {"name": "mlp", "options": {}}},
            "too large here: at most 700": {"parameters": 701},
            "rounds are too many": {"rounds": 10**6},
        }
        for word, brief in changes.items():
            for kind in (wire.OFFER, wire.TURN, wire.ASK):
                assert word in refusal(server.say(kind, brief=brief, round=2, weights=server.anew()))
        quieter = server.offer(5.0)
        assert "declared with another plan" in refusal(server.say(wire.TURN, offer=quieter, round=2))
        longer = {**server.offer(), "turns": server.plan.turns + 1}
        assert "declared with another plan" in refusal(server.say(wire.OFFER, offer=longer))
        assert server.spent() == before
        assert server.site.ledger.account(server.site.account).not_private == ()


@pytest.mark.parametrize("listed", [(), ("evil",), ("evil_methods.more", "evil_methods:method")])
def test_a_module_that_the_site_did_not_list_is_not_imported(
    tmp_path: Path, clients: Any, listed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even one that is installed there: a study names it as its method, or as a part of one."""
    (tmp_path / "evil_methods.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with rig_of(tmp_path / "sites", clients) as rig:
        server = Server(rig, modules=listed)
        named = [{"name": "evil_methods:method"}, {"name": "evil_methods"}]
        parts = ("clip", "local", "ask", "aggregate", "select", "server", "calibrate")
        named += [{"name": "dp-fedavg", part: "evil_methods:part"} for part in parts]
        for method in named:
            for kind in (wire.HELLO, wire.OFFER, wire.TURN):
                assert refusal(server.say(kind, brief={"method": method}, weights=server.anew()))
        assert "evil_methods" not in sys.modules
        assert server.spent() == 0.0


def test_negative_numbers_of_turns_are_refused(tmp_path: Path, clients: Any) -> None:
    with rig_of(tmp_path, clients) as rig:
        server = Server(rig)
        assert "make no sense" in refusal(server.say(wire.OFFER, offer={**server.offer(), "turns": -1}))


def test_the_same_ledger_under_another_name_is_no_fresh_budget(tmp_path: Path, clients: Any) -> None:
    """Another name, or other records, and only an officer's recorded act moves what was spent along."""
    with rig_of(tmp_path, clients) as rig:
        server = Server(rig)
        assert server.say(wire.TURN).kind == wire.UPLOAD
        spent, site = server.spent(), server.site
        site.ledger.close()
        arguments = {"declared": site.declared, "folder": site.folder}
        with Ledger(site.ledger.path) as ledger:
            with pytest.raises(ValueError, match=r"belongs to site 'client-00'.*sordino ledger rebind"):
                type(site)("another", site.records, purse=Purse(site.budget, ledger), **arguments)
            other = dataclasses.replace(site.records, x=site.records.x + 1)
            with pytest.raises(ValueError, match=r"not those that .* was kept for.*sordino ledger rebind"):
                type(site)(site.name, other, purse=Purse(site.budget, ledger), **arguments)
            with pytest.raises(ValueError, match="has one account"):
                ledger.open_account("another", site.budget)
            assert [account.client for account in ledger.accounts()] == ["client-00"]
            from sordino.engine.federation.state import commitment

            ledger.rebind("another", lambda salt: commitment(other, salt), "the clinic was renamed", "Dr. Weiss")
            moved = type(site)("another", other, purse=Purse(site.budget, ledger), **arguments)
            assert (moved.name, moved.account) == ("another", "client-00")
            assert ledger.epsilon() == {"client-00": spent}
            assert [(b.site, b.officer) for b in ledger.bindings()] == [("client-00", ""), ("another", "Dr. Weiss")]
