"""Sites that share noise: a deployed run equals its simulation, loses sites, and never opens half a sum."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_rig import Rig, five_clients, simulated, table
from federation_spy import check_wire

from sordino.engine.federation import wire
from sordino.engine.federation.exchange import farewell
from sordino.engine.federation.limits import Policy
from sordino.engine.federation.peers import Peers
from sordino.engine.federation.wire import unpack
from sordino.errors import SordinoError
from sordino.study.conduct import conduct, set_up
from sordino.study.file import make_study

TRAINING = {"steps": 1, "rate": 0.2, "lr": 0.5}


def shared(method: str, clients: Any, rounds: int = 3, colluders: int = 1, dropouts: int = 1, **training: Any) -> dict:
    study = table(method, clients, rounds, **{**TRAINING, **training})
    study["trust"] = {"noise": "shared", "colluders": colluders, "dropouts": dropouts}
    return study


@pytest.mark.parametrize("method", ["dp-fedavg", "fedfdp", "quantile-clipping", "adaptdp", "dp-fedprox", "uniform"])
def test_a_deployed_run_equals_its_simulation(method: str, tmp_path: Path) -> None:
    clients = five_clients()
    study = shared(method, clients, **({"select": 4} if method == "uniform" else {}))
    alone = simulated(clients, study, tmp_path / "simulated")
    with Rig(tmp_path, clients, study, alone.key, alone.noises) as rig:
        state = rig.train()
        assert not rig.refused
    taking = [len(record["participants"]) for record in state.history]
    assert taking == [3, 4, 4] if method == "uniform" else [5, 5, 5]
    torch.testing.assert_close(state.shown, alone.weights, atol=1e-5, rtol=0)


def turns_of(data: bytes) -> tuple[int, int] | None:
    """Round and attempt of a turn's request."""
    packet = unpack(data)
    return (packet.facts["round"], packet.facts["copy"]) if packet.kind == wire.TURN else None


def silent(lost: dict[tuple[int, int], set[str]]):
    """A fault that swallows these sites' replies, by round and attempt."""
    return lambda name, data, reply: None if name in lost.get(turns_of(data) or (0, 0), ()) else reply


@pytest.fixture
def clients():
    return five_clients()


def spent(rig: Rig, name: str) -> int:
    return sum(event.count for event in rig.wires.sites[name].ledger.spent(rig.wires.sites[name].account))


def test_a_lost_site_costs_one_attempt_and_the_round_is_repeated_without_it(clients, tmp_path: Path):
    lost, *others = clients.names
    with Rig(tmp_path, clients, shared("dp-fedavg", clients)) as rig:
        rig.wires.fault = silent({(2, 0): {lost}})
        state = rig.train()
        second = state.history[1]
        assert (second["participants"], second["absent"], second["repeats"]) == (others, [lost], {"turns": 1})
        assert state.history[2]["participants"] == list(clients.names), "it is back, and was asked first"
        assert [spent(rig, name) for name in clients.names] == [3, 4, 4, 4, 4], "all but the lost one paid again"
        for name, budget in zip(clients.names, clients.budgets):
            assert rig.wires.sites[name].ledger.epsilon()[name] <= budget.epsilon


@pytest.mark.parametrize(
    "lost",
    [
        {(2, 0): {"client-00", "client-03"}},  # more than the plan allows at once
        {(2, 0): {"client-00"}, (2, 1): {"client-01"}},  # one after the other
    ],
)
def test_without_a_whole_sum_nothing_is_opened(clients, tmp_path: Path, lost):
    with Rig(tmp_path, clients, shared("dp-fedavg", clients)) as rig:
        rig.wires.fault = silent(lost)
        state, kept = rig.first(), []
        for now in rig.coordinator().run(state):
            kept.append(now.weights.clone())
        torch.testing.assert_close(kept[1], kept[0], atol=0, rtol=0)
        assert not torch.equal(kept[2], kept[1])
        assert "nothing was opened" in state.history[1]["note"]


def test_repeats_end_with_what_was_reserved(clients, tmp_path: Path):
    with Rig(tmp_path, clients, shared("dp-fedavg", clients)) as rig:
        rig.wires.fault = silent({(1, 0): {"client-00"}, (2, 0): {"client-04"}})
        state = rig.train()
        assert [record.get("repeats") for record in state.history] == [{"turns": 1}, None, None]
        assert ["note" in record for record in state.history] == [False, True, False]
        assert all(spent(rig, name) <= 4 for name in clients.names)


def test_too_few_sites_stop_the_run_with_a_remedy_and_it_goes_on_later(clients, tmp_path: Path):
    with Rig(tmp_path, clients, shared("dp-fedavg", clients)) as rig:
        coordinator, state = rig.coordinator(), rig.first()
        gone = {name: rig.wires.sites.pop(name) for name in clients.names[:2]}
        with pytest.raises(SordinoError, match=r"round 1 cannot begin.*client-00, client-01.*--resume"):
            next(coordinator.run(state))
        assert all(spent(rig, name) == 0 for name in clients.names[2:])
        rig.wires.sites |= gone
        rig.wires.sites = {name: rig.wires.sites[name] for name in clients.names}
        assert [len(now.history[-1]["participants"]) for now in coordinator.run(state)] == [5, 5, 5]


def test_a_site_that_is_away_is_left_out_and_nobody_pays_for_it(clients, tmp_path: Path):
    with Rig(tmp_path, clients, shared("dp-fedavg", clients)) as rig:
        coordinator, state = rig.coordinator(), rig.first()
        rig.wires.sites.pop("client-02")
        for _ in coordinator.run(state):
            pass
        assert [len(record["participants"]) for record in state.history] == [4, 4, 4]
        assert [spent(rig, name) for name in rig.wires.sites] == [3, 3, 3, 3]


def test_a_coordinator_that_was_killed_goes_on_with_what_came(clients, tmp_path: Path):
    """Killed after three of five messages: the others are asked, nobody pays twice, and the sum is whole."""
    study = shared("dp-fedavg", clients, rounds=1)
    alone = simulated(clients, study, tmp_path / "simulated")
    with Rig(tmp_path, clients, study, alone.key, alone.noises) as rig:
        state, coordinator = rig.first(), rig.coordinator()
        came = []

        def killed(name: str, data: bytes, reply: bytes) -> bytes:
            if turns_of(data):
                came.append(name)
                if len(came) == 4:
                    raise KeyboardInterrupt
            return reply

        rig.wires.fault = killed
        with pytest.raises(KeyboardInterrupt):
            next(coordinator.run(state))
        rig.wires.fault = lambda name, data, reply: reply
        again = rig.first()
        for _ in coordinator.run(again):
            pass
        assert all(spent(rig, name) == 1 for name in clients.names)
    torch.testing.assert_close(again.shown, alone.weights, atol=1e-5, rtol=0)


def test_a_site_that_died_after_the_charge_refuses_that_descriptor_for_ever(clients, tmp_path: Path, monkeypatch):
    with Rig(tmp_path, clients, shared("dp-fedavg", clients, rounds=2)) as rig:
        dying, coordinator, state = rig.wires.sites["client-03"], rig.coordinator(), rig.first()
        asked: list[bytes] = []

        def store(*args: Any) -> None:
            raise OSError("power failure")

        with monkeypatch.context() as patch:
            patch.setattr(dying.ledger, "store", store)
            rig.wires.fault = lambda name, data, reply: asked.append(data) or reply if name == dying.name else reply
            next(coordinator.run(state))
        assert "client-03" not in state.history[0]["participants"]
        reply = unpack(rig.site("client-03").handle(next(data for data in asked if turns_of(data) == (1, 0))))
        assert reply.kind == wire.REFUSED
        assert "new attempt" in reply.facts["reason"]


def test_the_runs_key_is_erased_when_the_run_is_over(clients, tmp_path: Path):
    with Rig(tmp_path, clients, shared("dp-fedavg", clients, rounds=1)) as rig:
        rig.train()
        files = [tmp_path / name / "runs" / "run1" / "mask.key" for name in clients.names]
        assert all(file.exists() for file in files)
        said = farewell(rig.wires, "run1", list(clients.names), 5.0)
        assert not any(file.exists() for file in files)
        assert all(one["releases"][0]["count"] == 1 for one in said.values())
        request = next(data for _, data, _ in rig.wires.heard if turns_of(data))
        assert "no key of this run" in unpack(rig.wires.sites[clients.names[0]].handle(request)).facts["reason"]


@pytest.mark.parametrize(
    ("policy", "peers", "reason"),
    [
        (Policy(), "all", "limits.colluders"),
        (Policy(colluders=0), "none", "trust.peers"),
        (Policy(colluders=2), "all", "raise trust.colluders"),
        (Policy(colluders=1), "missing", "keys.private"),
    ],
)
def test_a_site_says_what_it_needs_before_it_shares_noise(clients, tmp_path: Path, policy, peers, reason):
    name = clients.names[0]
    with Rig(tmp_path, clients, shared("dp-fedavg", clients), policies={name: policy}) as rig:
        if peers != "all":
            rig.wires.sites[name].peers = Peers(name, rig.keys[name]) if peers == "none" else None
        rig.coordinator_facts()
        assert reason in rig.turned_away[name]
        assert list(rig.facts) == list(clients.names[1:])
        assert not (tmp_path / name / "runs").exists(), "and makes no key"


def test_a_public_site_adds_no_noise_and_protects_nobody(tmp_path: Path):
    """Its records are everybody's anyway; the others' promises do not rest on it."""
    clients = five_clients((math.inf, 1.5, 3.0, 6.0, 12.0))
    study = shared("dp-fedavg", clients, rounds=2)
    alone = simulated(clients, study, tmp_path / "simulated")
    with Rig(tmp_path, clients, study, alone.key, alone.noises, policies={clients.names[0]: Policy()}) as rig:
        state = rig.train()
        assert rig.charter.sites == 4
        assert rig.charter.seats[0].public
    torch.testing.assert_close(state.shown, alone.weights, atol=1e-5, rtol=0)


def test_what_is_sent_was_charged_and_says_whom_it_holds_against(clients, tmp_path: Path):
    with Rig(tmp_path, clients, shared("adaptdp", clients, rounds=2)) as rig:
        rig.train()
        said = farewell(rig.wires, "run1", list(clients.names), 5.0)
        for name in clients.names:
            replies = [reply for who, _, reply in rig.wires.heard if who == name]
            assert check_wire(replies, tmp_path / f"{name}.db") == 4
            assert said[name]["against"].words() == "against the server and any one of the four other sites"
            assert said[name]["own_epsilon"] > said[name]["spent_epsilon"]


def test_a_run_in_which_too_few_would_share_noise_does_not_begin(clients, tmp_path: Path):
    study = shared("dp-fedavg", clients, dropouts=0)
    study["deployment"] |= {"enrol": 0.1, "timeout": 2.0}
    with Rig(tmp_path, clients, study) as rig:
        site = rig.wires.sites["client-02"]
        known = {name: key for name, key in site.peers.pinned.items() if name < "client-02"}
        site.peers = Peers(site.name, site.peers.private, known)
        set_up(tmp_path / "run", make_study(study), resume=False)
        with pytest.raises(SordinoError, match=r"4 sites would share noise, too few.*client-02: 'gradient' would have"):
            conduct(tmp_path / "run", rig.wires)
        assert all(spent(rig, name) == 0 for name in clients.names)
        assert not list(tmp_path.glob("*/runs/*/mask.key")), "and the keys are erased"
