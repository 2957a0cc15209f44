"""Sites that are slow, absent, restarted or broke, and servers that die: who answered counts, nobody pays twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from federation_rig import Rig, five_clients, table

from sordino.engine.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from sordino.engine.federation import wire
from sordino.engine.federation.exchange import offer_of
from sordino.engine.federation.wire import unpack
from sordino.methods import noises_of
from sordino.privacy.ledger import Charge, Plan
from sordino.server.facts import ServerState

STEPS = {"steps": 2, "rate": 0.2, "lr": 0.2}


@pytest.fixture(scope="module")
def clients():
    return five_clients((4.0, 8.0, 16.0))


def charges(rig: Rig) -> dict[str, int]:
    """How many releases each site's ledger has paid for."""
    return {name: sum(e.count for e in site.ledger.spent(name)) for name, site in rig.wires.sites.items()}


def lost(rig: Rig, name: str, number: int, kind: str = wire.TURN):
    """A line that loses one site's reply of one round."""

    def fault(site: str, request: bytes, reply: bytes) -> bytes | None:
        asked = unpack(request)
        gone = site == name and asked.kind == kind and asked.facts["round"] == number
        return None if gone else reply

    return fault


def test_a_round_goes_on_without_a_site_that_does_not_answer(tmp_path: Path, clients):
    with Rig(tmp_path, clients, table("dp-fedavg", clients, rounds=2, **STEPS)) as rig:
        server = rig.coordinator()
        rig.wires.fault = lost(rig, "client-01", 1)
        state = rig.first()
        states = [s.weights.clone() for s in server.run(state)]
        assert state.history[0]["participants"] == ["client-00", "client-02"]
        assert state.history[0]["absent"] == ["client-01"]
        assert state.history[1]["participants"] == ["client-00", "client-01", "client-02"]
        sent = {
            name: unpack(reply).tensors["update"][0]
            for name, request, reply in rig.wires.heard
            if unpack(request).kind == wire.TURN and unpack(request).facts["round"] == 1
        }
        sizes = {name: len(clients.train[clients.names.index(name)]) for name in sent}
        expected = sum(sizes[name] / sum(sizes.values()) * update for name, update in sent.items())
        torch.testing.assert_close(states[0], rig.ready.start + expected)
        assert charges(rig)["client-01"] == 2 * STEPS["steps"], "a lost reply stays charged"


def test_a_round_with_too_few_answers_changes_nothing(tmp_path: Path, clients):
    with Rig(tmp_path, clients, table("adaptdp", clients, rounds=1, **STEPS)) as rig:
        server = rig.coordinator(least=3)
        rig.wires.fault = lost(rig, "client-01", 1)
        state = rig.first()
        list(server.run(state))
        assert torch.equal(state.weights, rig.ready.start)
        assert state.server == ServerState()
        assert "2 answers of at least 3" in state.history[0]["note"]


BROKEN = {
    "bytes": b"not a packet",
    "wrong shape": {"update": torch.zeros(1, 3)},
    "wrong numbers": {"update": torch.zeros(1, 650, dtype=torch.float64)},
    "nothing in it": {},
    "more than others": {"update": torch.zeros(1, 650), "extra": torch.zeros(1, 2)},
    "not finite": {"update": torch.full((1, 650), float("nan"))},
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_upload_is_left_out_and_named(tmp_path: Path, clients, kind: str):
    """The model ends as if the site had been absent."""
    broken = BROKEN[kind]

    def fault(name: str, request: bytes, reply: bytes) -> bytes:
        if name != "client-00" or unpack(request).kind != wire.TURN:
            return reply
        if isinstance(broken, bytes):
            return broken
        return wire.pack(wire.Packet(wire.UPLOAD, {"round": 1, "copy": 0}, broken))

    ends = []
    for place, how in enumerate((fault, lost(None, "client-00", 1))):
        study = table("dp-fedavg", clients, rounds=1, **STEPS)
        with Rig(tmp_path / str(place), clients, study, key="the same draws") as rig:
            server = rig.coordinator()
            rig.wires.fault = how
            state = rig.first()
            list(server.run(state))
            ends.append(state)
    torch.testing.assert_close(ends[0].weights, ends[1].weights)
    record = ends[0].history[0]
    assert "client-00" in record.get("refused", {}) or record["weights"]["client-00"] == 0.0


@pytest.mark.parametrize("kind", [wire.HELLO, wire.OFFER, wire.ASK, wire.TURN])
def test_a_site_that_answers_nonsense_does_not_stop_the_others(tmp_path: Path, clients, kind: str):
    """Whatever it sends, of whatever kind, in whatever exchange."""
    facts = [{}, {"payable": "many", "round": "x"}, {"records": "all", "epsilon": None, "name": "client-00"}]
    tensors = [{}, {"answer": torch.zeros(2)}, {"answer": torch.zeros(1, 1, dtype=torch.float64)}]
    nonsense = [
        wire.pack(wire.Packet(kinds, fact, tensor))
        for kinds in (wire.FACTS, wire.ACCEPTED, wire.ANSWER, wire.UPLOAD, "turn", "?")
        for fact in facts
        for tensor in tensors
    ]
    study = table("adaptdp", clients, rounds=1, **STEPS)
    with Rig(tmp_path, clients, study) as rig:
        noises = None
        for one in nonsense:
            rig.wires.fault = lambda name, request, reply, one=one: (
                one if name == "client-00" and unpack(request).kind == kind else reply
            )
            rig.noises = noises if kind != wire.HELLO else None
            server = rig.coordinator()
            state = rig.first()
            list(server.run(state))
            noises = noises_of(server.course.plan)
            assert {"client-01", "client-02"} <= set(state.history[0]["participants"])
            rig.wires.heard.clear()


def test_a_site_with_budget_for_three_rounds_of_five_stops_after_three(tmp_path: Path, clients):
    """It owes two turns of the same kind to another run, declared first: three are left, and the others finish."""
    with Rig(tmp_path, clients, table("dp-fedavg", clients, rounds=5, **STEPS)) as rig:
        client = rig.ready.plan(rig.coordinator_facts()).clients[0]
        site = rig.wires.sites["client-00"]
        site.ledger.declare([Plan("client-00", "earlier", (client.terms.event,), 2)])
        server, state = rig.coordinator(), rig.first()
        for n in range(2):
            site.ledger.charge([Charge("client-00", "earlier", f"round {n}", "gradient", STEPS["steps"], "x")])
        for _ in server.run(state):
            pass
        took_part = [name for record in state.history for name in record["participants"]]
        assert took_part.count("client-00") == 3
        assert took_part.count("client-01") == took_part.count("client-02") == 5
        assert [record.get("cannot_pay") for record in state.history] == [
            None,
            None,
            None,
            ["client-00"],
            ["client-00"],
        ]
        assert site.ledger.epsilon()["client-00"] <= site.budget.epsilon


def test_a_site_that_paid_twice_sits_out_its_last_round(tmp_path: Path, clients):
    """Its answer was drawn again for a changed request: the ledger has one turn less, and says so when asked."""
    with Rig(tmp_path, clients, table("dp-fedavg", clients, rounds=3, **STEPS)) as rig:
        server = rig.coordinator()
        client = server.course.plan.clients[0]
        facts = {"brief": rig.ready.brief, "offer": offer_of(client), "round": 1, "copy": 0, "since": 0}
        facts |= {"count": client.terms.count, "public": {"lr": 0.2, "clip": 1.0}}
        other = wire.pack(wire.Packet(wire.TURN, facts, {"weights": rig.ready.start + 1.0}))
        assert unpack(rig.wires.sites["client-00"].handle(other)).kind == wire.UPLOAD
        state = rig.first()
        list(server.run(state))
        assert [("client-00" in record["participants"]) for record in state.history] == [True, True, False]
        assert "would overdraw" in state.history[2]["refused"]["client-00"]


class Killed(Exception):
    """The server's process is gone."""


@pytest.mark.parametrize("method", ["dp-fedavg", "adaptdp", "dp-scaffold"])
def test_a_killed_server_goes_on_and_nobody_pays_twice(tmp_path: Path, clients, method: str):
    """Killed in every exchange in turn, after the first reply came; compared with a run that was left in peace."""
    study = table(method, clients, rounds=3, **STEPS)
    with Rig(tmp_path / "peace", clients, study, key="the same draws") as rig:
        calm, quiet = rig.train(), charges(rig)
    with Rig(tmp_path / "killed", clients, study, key="the same draws") as rig:
        server, file = rig.coordinator(), tmp_path / "checkpoint"
        save_checkpoint(file, rig.first())
        killed: set[tuple[int, str]] = set()

        def kill_once(name: str, request: bytes, reply: bytes) -> bytes:
            place = (unpack(request).facts["round"], unpack(request).kind)
            if name == "client-01" and place not in killed:
                killed.add(place)
                raise Killed
            return reply

        rig.wires.fault = kill_once
        state = rig.first()
        while state.round < 3:
            try:
                for now in server.run(state):
                    save_checkpoint(file, now)
            except Killed:
                state = load_checkpoint(file, torch.device("cpu"))
        assert len(killed) == (6 if method == "adaptdp" else 3)
        torch.testing.assert_close(state.weights, calm.weights, atol=1e-6, rtol=0)
        assert charges(rig) == quiet


def test_what_came_before_the_server_died_decides_who_counts(tmp_path: Path, clients):
    """A phase that was closed without a site stays closed without it, so that the next request is the same."""
    with Rig(tmp_path, clients, table("adaptdp", clients, rounds=1, **STEPS)) as rig:
        server = rig.coordinator()

        def fault(name: str, request: bytes, reply: bytes) -> bytes | None:
            if unpack(request).kind == wire.TURN:
                raise Killed
            return None if name == "client-02" else reply

        rig.wires.fault = fault
        with pytest.raises(Killed):
            list(server.run(rig.first()))
        rig.wires.fault = lambda name, request, reply: reply
        state = rig.first()
        list(server.run(state))
        assert state.history[0]["participants"] == ["client-00", "client-01"]
        assert charges(rig)["client-00"] == STEPS["steps"] + 1


def test_control_variates_stay_true_when_a_reply_is_lost(tmp_path: Path, clients):
    """SCAFFOLD's c = Σ (n_i/n) c_i holds over what the server heard: a turn it never saw does not count at the site."""
    with Rig(tmp_path, clients, table("dp-scaffold", clients, rounds=3, **STEPS)) as rig:
        server = rig.coordinator()
        rig.wires.fault = lost(rig, "client-01", 2)
        state = rig.first()
        list(server.run(state))
        own = []
        for name, site in rig.wires.sites.items():
            newest = max((site.folder / "runs" / "run1").glob("*.safetensors"))
            assert newest.name.startswith("00000003"), name
            own.append(wire.load(newest.read_bytes())["control"][0])
        shares = clients.sizes / clients.sizes.sum()
        expected = sum(float(share) * control for share, control in zip(shares, own))
        torch.testing.assert_close(state.server.public["control"], expected, atol=1e-5, rtol=1e-4)


def test_private_sites_of_pfa_plus_upload_coefficients_after_the_first_round(tmp_path: Path):
    clients = five_clients((0.5, 1.0, 1.5, 20.0, 30.0))
    with Rig(tmp_path, clients, table("pfa-plus", clients, rounds=2, **STEPS)) as rig:
        state = rig.train()
        sent = {
            (name, unpack(request).facts["round"]): unpack(reply).tensors
            for name, request, reply in rig.wires.heard
            if unpack(request).kind == wire.TURN
        }
    public = {clients.names[i] for i in state.history[1]["diagnostics"]["public"]}
    assert 0 < len(public) < 5
    for name in clients.names:
        assert set(sent[name, 1]) == {"update"}
        short = {"update"} if name in public else {"coefficients"}
        assert set(sent[name, 2]) == short
        if name not in public:
            assert sent[name, 2]["coefficients"].shape == (1, 2), "one number for each of two tensors"


def test_steps_that_were_lost_are_counted_where_the_server_sets_the_pace(tmp_path: Path, clients):
    """ALI-DPFL: the site was charged for them, so the server must not ask for more than its plan has left."""
    with Rig(tmp_path, clients, table("ali-dpfl", clients, rounds=4, **STEPS)) as rig:
        server = rig.coordinator()
        rig.wires.fault = lost(rig, "client-01", 2)
        state = rig.first()
        list(server.run(state))
        assert state.server.steps_used.tolist() == list(charges(rig).values())
        assert not any("refused" in record for record in state.history)


def test_nobody_at_all(tmp_path: Path, clients):
    with Rig(tmp_path, clients, table("dp-fedavg", clients, rounds=2, **STEPS)) as rig:
        server = rig.coordinator()
        rig.wires.sites.clear()
        state: Checkpoint = rig.first()
        list(server.run(state))
        assert torch.equal(state.weights, rig.ready.start)
        assert np.all([record["absent"] == clients.names for record in state.history])
