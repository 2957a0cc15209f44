"""A server that wants more than the sum: it lies about rounds, keys, sites and noise, and gets nothing for it.

The attacker is the server. It has the charter, every message, and what it made sites believe; it wants one site's
message without its masks, or a sum with less noise than was promised.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from federation_rig import Fixture, Rig, five_clients, table

from sordino.client.rows import Records
from sordino.engine.federation import wire
from sordino.engine.federation.descriptor import brief_digest
from sordino.engine.federation.exchange import farewell, offer_of
from sordino.engine.federation.limits import Policy
from sordino.engine.federation.masks import keep_key, masked, signed_key
from sordino.engine.federation.wire import Packet, pack, unpack
from sordino.privacy.generators import Turn
from sordino.privacy.types import Sampling

COLLUDERS, DROPOUTS, ROUNDS = 1, 1, 6
CLIP = 0.1

Change = Callable[[dict[str, Any]], None]


class Server:
    """The attacker: five honest sites that were enrolled in order, and packets of its own making."""

    def __init__(self, folder: Path, **more: Any) -> None:
        clients = five_clients((2.0, 2.5, 3.0, 6.0, 12.0))
        study = table("dp-fedavg", clients, ROUNDS, steps=1, rate=0.2, lr=0.5, clip=CLIP)
        study["trust"] = {"noise": "shared", "colluders": COLLUDERS, "dropouts": DROPOUTS}
        self.rig = Rig(folder, clients, study, everywhere=Policy(colluders=COLLUDERS), **more).__enter__()
        self.names = list(clients.names)
        self.coordinator = self.rig.coordinator()
        self.plan = self.coordinator.course.plan
        self.charter: dict[str, Any] = json.loads(self.rig.charter.text)
        self.weights = torch.zeros_like(self.rig.ready.start)

    def packet(
        self, name: str, participants: list[str] | None = None, change: Change = lambda facts: None, **facts: Any
    ) -> Packet:
        """A turn's request to one site."""
        client = self.plan.clients[self.names.index(name)]
        about = {
            "brief": self.coordinator.brief,
            "offer": offer_of(client),
            "charter": self.charter,
            "participants": sorted(self.names if participants is None else participants),
            "round": 1,
            "copy": 0,
            "count": 1,
            "since": 0,
            "public": {"lr": 0.5, "clip": CLIP},
            **facts,
        }
        about = copy.deepcopy(about)
        change(about)
        return Packet(wire.TURN, about, {"weights": self.weights})

    def ask(self, name: str, *args: Any, **facts: Any) -> Packet:
        return unpack(self.rig.wires.sites[name].handle(pack(self.packet(name, *args, **facts))))

    def message(self, name: str, *args: Any, **facts: Any) -> torch.Tensor:
        reply = self.ask(name, *args, **facts)
        assert reply.kind == wire.UPLOAD, reply.facts
        return reply.tensors[wire.MASKED][0]

    def sum(self, names: list[str] | None = None, **facts: Any) -> torch.Tensor:
        return torch.stack([self.message(name, names, **facts) for name in names or self.names]).sum(0)

    def charged(self, name: str) -> int:
        site = self.rig.wires.sites[name]
        return sum(event.count for event in site.ledger.spent(site.account))

    def refused(self, name: str, *args: Any, **facts: Any) -> str:
        """Why a site refuses; it must not have been charged for that."""
        before = self.charged(name)
        reply = self.ask(name, *args, **facts)
        assert reply.kind == wire.REFUSED, reply.kind
        assert self.charged(name) == before
        return str(reply.facts["reason"])

    @property
    def deviation(self) -> float:
        return float(self.charter["releases"][0]["parts"][0]["deviation"])


def is_noise_of_masks(numbers: torch.Tensor) -> bool:
    """Whether these integers are spread over all 64 bits: of uniform ones, one in a thousand is below 2⁵⁴."""
    return bool((numbers.double().abs() > 2.0**54).double().mean() > 0.98)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    made = Server(tmp_path_factory.mktemp("shared"))
    yield made
    made.rig.stack.close()


def fresh(tmp_path: Path, **more: Any) -> Server:
    return Server(tmp_path, **more)


def test_what_an_honest_server_gets(server: Server):
    total = server.sum(round=1)
    assert total.double().abs().max() < 100 * server.deviation * np.sqrt(5) + 2.0**50
    assert not is_noise_of_masks(total)


def test_one_message_alone_is_uniform(server: Server):
    """Two models that could not differ more, one message each: the bytes of both are as even as chance."""
    for number, scale in ((2, 0.0), (3, 1e3)):
        server.weights = torch.full_like(server.weights, scale)
        try:
            one = server.message("client-02", round=number)
        finally:
            server.weights = torch.zeros_like(server.weights)
        counts = np.bincount(one.numpy().view(np.uint8), minlength=256)
        statistic = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
        assert 255 - 6 * np.sqrt(510) < statistic < 255 + 6 * np.sqrt(510)
        assert is_noise_of_masks(one)


@pytest.mark.parametrize("missing", [1, 2, 4])
def test_any_but_all_messages_are_uniform_together(tmp_path: Path, missing: int):
    server = fresh(tmp_path)
    sent = [server.message(name) for name in server.names]
    assert is_noise_of_masks(torch.stack(sent[missing:]).sum(0))


def _other_weights(facts: dict[str, Any]) -> None:
    first, second, *rest = facts["charter"]["releases"][0]["weights"]
    facts["charter"]["releases"][0]["weights"] = [first * 0.999, second + first * 0.001, *rest]


def _part(key: str, factor: float) -> Change:
    def change(facts: dict[str, Any]) -> None:
        facts["charter"]["releases"][0]["parts"][0][key] *= factor

    return change


EQUIVOCATIONS: dict[str, dict[str, Any]] = {
    "another clip, so another γ": {"public": {"lr": 0.5, "clip": CLIP * 1.01}},
    "another learning rate": {"public": {"lr": 0.6, "clip": CLIP}},
    "another v": {"change": _part("level", 1.001)},
    "more noise": {"change": _part("deviation", 1.001)},
    "other weights": {"change": _other_weights},
    "another attempt": {"copy": 1},
    "another round": {"round": 2},
}


@pytest.mark.parametrize("told", EQUIVOCATIONS)
def test_sites_that_were_told_different_things_add_up_to_nothing(tmp_path: Path, told: str):
    """One site is told something else, which by itself it may accept: the sum is uniform."""
    server = fresh(tmp_path)
    odd = "client-04"  # it has noise to spare, so that it accepts most of it
    sent = [server.message(name) for name in server.names if name != odd]
    reply = server.ask(odd, **EQUIVOCATIONS[told])
    if reply.kind == wire.UPLOAD:
        assert is_noise_of_masks(torch.stack([*sent, reply.tensors[wire.MASKED][0]]).sum(0))
    else:
        assert told == "more noise", reply.facts
        assert "another plan" in reply.facts["reason"]


def test_other_model_weights_for_one_site_add_up_to_nothing(tmp_path: Path):
    server = fresh(tmp_path)
    sent = [server.message(name) for name in server.names[1:]]
    server.weights[0] = 1e-30
    assert is_noise_of_masks(torch.stack([*sent, server.message(server.names[0])]).sum(0))


def test_two_participant_sets_of_one_round_never_share_masks_or_noise(tmp_path: Path):
    """A false loss: all answer, then the server says that one was lost. Their difference hides behind all the noise.

    If noise or batch were drawn once for both, the difference would be one payload under one share of noise.
    """
    server = fresh(tmp_path)
    others = server.names[1:]
    everybody = [server.message(name) for name in server.names]
    without = [server.message(name, others, copy=1) for name in others]
    whole, part = torch.stack(everybody).sum(0), torch.stack(without).sum(0)
    assert not is_noise_of_masks(whole)
    assert not is_noise_of_masks(part)
    spread = float((whole - part).double().std())
    assert spread > 0.9 * server.deviation * np.sqrt(5 + 4), "noise of nine draws"
    assert [server.charged(name) for name in server.names] == [1, 2, 2, 2, 2], "and both were paid"
    for mixed in range(1, 4):  # messages of both attempts do not fit together
        assert is_noise_of_masks(torch.stack(without[:mixed] + everybody[1 + mixed :]).sum(0))
        assert is_noise_of_masks(torch.stack(everybody[:1] + without[:mixed] + everybody[1 + mixed :]).sum(0))


def test_dropping_one_at_a_time_gives_no_site_away(tmp_path: Path):
    """Selective drops: with everybody but one in turn, differences are never one site's alone."""
    server = fresh(tmp_path)
    sums = []
    for attempt, lost in enumerate(server.names[:3]):
        sums.append(server.sum([name for name in server.names if name != lost], copy=attempt))
    for first in sums:
        for second in sums:
            if first is not second:
                assert float((first - second).double().std()) > 0.9 * server.deviation * np.sqrt(8)


def test_the_same_request_is_the_same_message_also_after_a_restart(tmp_path: Path):
    server = fresh(tmp_path)
    name = server.names[1]
    first = server.message(name)
    assert torch.equal(first, server.message(name))
    server.rig.wires.sites[name] = server.rig.site(name)
    assert torch.equal(first, server.message(name))
    assert server.charged(name) == 1


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("forgotten", [False, True])
def test_one_descriptor_masks_one_payload_ever(tmp_path: Path, restart: bool, forgotten: bool):
    """The same descriptor in another request, or when the stored copy is gone: refused, not drawn again."""
    server = fresh(tmp_path)
    name = server.names[1]
    server.message(name)
    site = server.rig.wires.sites[name]
    if forgotten:
        site.ledger.forget(site.account, "run1")
    if restart:
        server.rig.wires.sites[name] = server.rig.site(name)
    if forgotten:
        assert "new attempt" in server.refused(name)

    # Another request under the same descriptor: the offer of more turns is no part of it.
    def more_turns(facts: dict[str, Any]) -> None:
        facts["offer"]["extra"] = 1

    assert "new attempt" in server.refused(name, change=more_turns)


def test_nor_after_the_run_was_ended_and_begun_again(tmp_path: Path):
    server = fresh(tmp_path)
    name = server.names[1]
    server.message(name)
    key = (tmp_path / name / "runs" / "run1" / "mask.key").read_bytes()
    farewell(server.rig.wires, "run1", [name], 5.0)
    assert "no key of this run" in server.refused(name)
    (tmp_path / name / "runs" / "run1" / "mask.key").write_bytes(key)  # somebody brought it back
    assert "new attempt" in server.refused(name)


def test_too_few_that_are_known_here_are_refused_before_anything_is_charged(server: Server):
    for few in (server.names[:2], server.names[:3]):
        assert "would have noise" in server.refused(few[0], few, round=4)
    assert "not a participant" in server.refused(server.names[0], server.names[1:], round=4)


def test_names_that_a_site_did_not_pin_do_not_count(tmp_path: Path):
    keys = {name: ec.generate_private_key(ec.SECP256R1()).public_key() for name in ("client-01",)}
    server = fresh(tmp_path, pinned={"client-00": keys})
    assert "client-00" in server.rig.refused
    assert "not signed for this run" in server.rig.refused["client-00"]


def test_one_key_under_several_names_counts_once(tmp_path: Path):
    """A colluder with several names, or somebody's virtual copies: pinned, and still one site."""
    server = fresh(tmp_path)
    name = server.names[0]
    site = server.rig.wires.sites[name]
    twin = server.rig.keys["client-01"]
    for other in ("client-02", "client-03"):  # both are client-01 in truth
        key = keep_key(tmp_path / other / "runs" / "run1" / "mask.key")
        seat = server.charter["seats"][server.names.index(other)]
        seat["key"] = signed_key(twin, other, "run1", key)
    pinned = dict(site.peers.pinned) | dict.fromkeys(("client-02", "client-03"), twin.public_key())
    site.peers = type(site.peers)(name, site.peers.private, pinned)
    assert "would have noise" in server.refused(name, round=5)


def test_a_participant_cannot_be_listed_twice(server: Server):
    twice = sorted([*server.names, server.names[3]])
    assert "each once" in server.refused(server.names[0], change=lambda facts: facts.update(participants=twice))


def _seat(facts: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in facts["charter"]["seats"] if one["name"] == name)
    return found


class TestKeys:
    """Between two sites stands the server: it tries to put its own key in somebody's place."""

    mine = X25519PrivateKey.generate()

    def test_a_key_of_its_own_with_the_old_signature(self, server: Server):
        def change(facts: dict[str, Any]) -> None:
            _seat(facts, "client-02")["key"]["public"] = self.mine.public_key().public_bytes_raw().hex()

        assert "not signed" in server.refused("client-00", change=change)

    def test_a_key_of_its_own_that_it_signed_itself(self, server: Server):
        forged = signed_key(ec.generate_private_key(ec.SECP256R1()), "client-02", "run1", self.mine)
        told = server.refused("client-00", change=lambda facts: _seat(facts, "client-02").update(key=forged))
        assert "not signed" in told

    def test_a_key_that_the_site_signed_for_another_run(self, server: Server):
        old = signed_key(server.rig.keys["client-02"], "client-02", "run0", self.mine)
        told = server.refused("client-00", change=lambda facts: _seat(facts, "client-02").update(key=old))
        assert "not signed" in told

    def test_a_key_that_another_site_signed(self, server: Server):
        other = signed_key(server.rig.keys["client-03"], "client-03", "run1", self.mine)
        told = server.refused("client-00", change=lambda facts: _seat(facts, "client-02").update(key=other))
        assert "not signed" in told

    def test_no_signature(self, server: Server):
        told = server.refused("client-00", change=lambda facts: _seat(facts, "client-02")["key"].update(signature="00"))
        assert "not signed" in told

    def test_one_key_for_two_sites(self, server: Server):
        def change(facts: dict[str, Any]) -> None:
            _seat(facts, "client-02")["key"] = _seat(facts, "client-03")["key"]

        assert "two sites one key" in server.refused("client-00", change=change)

    def test_another_key_for_the_site_itself(self, server: Server):
        forged = signed_key(server.rig.keys["client-00"], "client-00", "run1", self.mine)
        told = server.refused("client-00", change=lambda facts: _seat(facts, "client-00").update(key=forged))
        assert "did not say of itself" in told


def with_seat(name: str, key: X25519PrivateKey, sites: int) -> Change:
    """A site that the server invented: it has a seat, a weight and a key."""

    def change(facts: dict[str, Any]) -> None:
        charter = facts["charter"]
        forged = signed_key(ec.generate_private_key(ec.SECP256R1()), name, "run1", key)
        charter["seats"].append({"name": name, "records": 500, "public": False, "rates": [0.2], "key": forged})
        for one in charter["releases"]:
            one["weights"] = [0.999 * w for w in one["weights"]] + [0.001]
        charter["sites"] = sites
        facts["participants"] = sorted([*facts["participants"], name])

    return change


def test_an_invented_site_brings_no_noise(tmp_path: Path):
    """Counted as one more with noise, it would let everybody add less: the sites know nobody of that name."""
    server = fresh(tmp_path)
    made = with_seat("mallory", X25519PrivateKey.generate(), 6)

    def change(facts: dict[str, Any]) -> None:
        made(facts)
        part = facts["charter"]["releases"][0]["parts"][0]
        part["deviation"] *= np.sqrt(3 / 4)  # h would be 6 − 1 − 1 and not 5 − 1 − 1

    assert "would have noise" in server.refused("client-00", change=change)


def test_with_an_invented_site_the_server_takes_off_its_masks_and_no_others(tmp_path: Path):
    """A seat that counts for nothing changes nothing: the server can take its masks off the sum, not off a message."""
    server, key = fresh(tmp_path), X25519PrivateKey.generate()
    told: dict[str, Any] = {}

    def change(facts: dict[str, Any]) -> None:
        if not told:
            with_seat("mallory", key, 5)(facts)
            told.update(charter=facts["charter"], participants=facts["participants"])
        facts.update(told)

    replies = [server.ask(name, change=change) for name in server.names]
    sent = [one.tensors[wire.MASKED][0] for one in replies]
    seats = {one["name"]: bytes.fromhex(one["key"]["public"]) for one in told["charter"]["seats"]}
    seats.pop("mallory")
    digest = bytes.fromhex(replies[0].facts["descriptor"])
    own = torch.from_numpy(masked(np.zeros(len(sent[0]), dtype=np.int64), "mallory", key, seats, digest))
    assert is_noise_of_masks(torch.stack(sent).sum(0))
    assert not is_noise_of_masks(torch.stack([*sent, own]).sum(0)), "the sum of all, which it was to have"
    for count in range(1, 5):
        assert is_noise_of_masks(torch.stack([*sent[:count], own]).sum(0))


class TestPromises:
    """The server asks for less noise than was promised, in every way that a charter can say it."""

    def test_less_noise_than_planned(self, server: Server):
        assert "would have noise" in server.refused("client-00", change=_part("deviation", 0.99))

    def test_noise_to_spare_does_not_stand_in_for_sites(self, tmp_path: Path):
        """ε for fewer colluders is told by counting sites, so a run of few with much noise each is refused too."""
        server = fresh(tmp_path)
        pinned = {name: server.rig.keys[name].public_key() for name in server.names[1:3]}
        site = server.rig.wires.sites["client-00"]
        site.peers = type(site.peers)("client-00", site.peers.private, pinned)
        assert "known here by their keys" in server.refused("client-00", change=_part("deviation", 10.0))

    def test_a_coarser_lattice_brings_more_rounding_and_no_less_noise(self, server: Server):
        """γ larger with s smaller: the same noise, and rounding that a record moves the sum by."""

        def change(facts: dict[str, Any]) -> None:
            part = facts["charter"]["releases"][0]["parts"][0]
            part["grain"], part["deviation"] = part["grain"] * 2**18, part["deviation"] / 2**18

        assert "would have noise" in server.refused("client-00", change=change)

    @pytest.mark.parametrize("finer", [2**22, 2**30])
    def test_a_lattice_so_fine_that_large_batches_do_not_fit_tells_no_sizes(self, server: Server, finer: int):
        """Refused for what the charter says, before a batch is drawn: else "unavailable" would tell large batches."""

        def change(facts: dict[str, Any]) -> None:
            part = facts["charter"]["releases"][0]["parts"][0]
            part["grain"], part["deviation"] = part["grain"] / finer, min(2.0**44, part["deviation"] * finer)

        assert "do not fit exact sums" in server.refused("client-00", change=change)

    def test_a_larger_weight_for_one_site(self, server: Server):
        def change(facts: dict[str, Any]) -> None:
            one = facts["charter"]["releases"][0]
            rest = [0.5 * w / (1 - one["weights"][0]) for w in one["weights"][1:]]
            one["weights"] = [0.5, *rest]

        assert "would have noise" in server.refused("client-00", change=change)

    @pytest.mark.parametrize("key", ["colluders", "dropouts"])
    def test_fewer_colluders_than_the_study_says(self, server: Server, key: str):
        told = server.refused("client-00", change=lambda facts: facts["charter"].update({key: 0}))
        assert "other colluders" in told

    def test_fewer_colluders_than_the_site_asks_for(self, server: Server):
        def change(facts: dict[str, Any]) -> None:
            facts["brief"]["trust"]["colluders"] = facts["charter"]["colluders"] = 0
            facts["charter"]["brief"] = brief_digest(facts["brief"])

        assert "limits.colluders" in server.refused("client-00", change=change)

    def test_another_study_under_the_same_charter(self, server: Server):
        told = server.refused("client-00", change=lambda facts: facts["brief"].update(name="another"))
        assert "another study" in told

    @pytest.mark.parametrize(("key", "value"), [("records", 10**6), ("public", True)])
    def test_what_the_site_did_not_declare(self, server: Server, key: str, value: Any):
        told = server.refused("client-00", change=lambda facts: _seat(facts, "client-00").update({key: value}))
        assert "did not say of itself" in told

    def test_others_who_are_public_do_not_count(self, server: Server):
        def change(facts: dict[str, Any]) -> None:
            for name in ("client-02", "client-03"):
                _seat(facts, name)["public"] = True

        assert "would have noise" in server.refused("client-00", change=change)

    @pytest.mark.parametrize("rate", [0.1, 0.4])
    def test_another_rate_than_the_plans(self, server: Server, rate: float):
        told = server.refused("client-00", change=lambda facts: _seat(facts, "client-00").update(rates=[rate]))
        assert "rate" in told

    def test_a_turn_without_the_charter_is_no_turn(self, server: Server):
        assert server.refused("client-00", change=lambda facts: facts.pop("charter"))

    def test_a_study_that_forgets_its_trust_is_charged_for_all_noise(self, server: Server):
        """Without ``trust`` in the brief it is a run with noise per site, and the plan's noise is added in full."""
        plain = server.packet("client-00", change=lambda facts: facts["brief"].pop("trust"), round=6)
        reply = unpack(server.rig.wires.sites["client-00"].handle(pack(plain)))
        assert reply.kind in (wire.UPLOAD, wire.REFUSED)
        assert wire.MASKED not in reply.tensors


@pytest.mark.parametrize(
    "change",
    [
        lambda charter: charter.update(more=1),
        lambda charter: charter.pop("sites"),
        lambda charter: charter.update(sites=True),
        lambda charter: charter.update(colluders=-1),
        lambda charter: charter.update(seats=[]),
        lambda charter: charter.update(seats="client-00"),
        lambda charter: charter["seats"].append(charter["seats"][0]),
        lambda charter: charter["seats"][0].update(records=0),
        lambda charter: charter["seats"][0].update(rates=[]),
        lambda charter: charter["seats"][0].update(rates=[2.0]),
        lambda charter: charter["seats"][1]["key"].update(public="00"),
        lambda charter: charter["seats"][1].update(key=None),
        lambda charter: charter["releases"][0].update(weights=[1.0]),
        lambda charter: charter["releases"][0].update(weights=[0.3] * 5),
        lambda charter: charter["releases"][0]["parts"].clear(),
        lambda charter: charter["releases"][0]["parts"][0].update(width=7),
        lambda charter: charter["releases"][0]["parts"][0].update(name="loss"),
        lambda charter: charter["releases"][0]["parts"][0].update(deviation=1.0),
        lambda charter: charter["releases"][0]["parts"][0].update(deviation=2.0**60),
        lambda charter: charter["releases"][0]["parts"][0].update(grain=0.0),
        lambda charter: charter["releases"].append(charter["releases"][0]),
        lambda charter: charter["releases"].clear(),
    ],
)
def test_a_charter_that_makes_no_sense_is_refused(server: Server, change: Change):
    assert server.refused("client-00", change=lambda facts: change(facts["charter"]))


@pytest.mark.parametrize("scale", [1.0, 1e20])
def test_one_record_moves_an_unmasked_message_by_its_declared_steps_at_most(tmp_path: Path, scale: float):
    """Twice the same turn with the same draws, once without a record: what is under the masks differs by its term."""
    found = []
    for place in ("with", "without"):
        server = Server(tmp_path / place, key="foreseen")
        name, site = server.names[0], server.rig.wires.sites[server.names[0]]
        where = Fixture("foreseen").batches(
            Turn(site.account, 1), "gradient", Sampling.poisson(0.2), len(site.records.y), 1
        )
        odd = int(where[0][0])
        site.records.x[odd] *= scale
        if place == "without":
            valid = torch.ones(len(site.records.y), dtype=torch.bool)
            valid[odd] = False
            site.records = Records(site.records.x, site.records.y, valid)
        reply = server.ask(name)
        key = keep_key(tmp_path / place / name / "runs" / "run1" / "mask.key")
        keys = {one["name"]: bytes.fromhex(one["key"]["public"]) for one in server.charter["seats"]}
        keys.pop(name)
        digest = bytes.fromhex(reply.facts["descriptor"])
        own = torch.from_numpy(masked(np.zeros(len(server.weights), dtype=np.int64), name, key, keys, digest))
        found.append(reply.tensors[wire.MASKED][0] - own)
        assert not is_noise_of_masks(found[-1])
    moved = float((found[0] - found[1]).double().norm())
    lattice = server.plan.clients[0].terms.common[0].lattice(CLIP, len(server.weights))
    assert 0 < moved <= lattice.sensitivity / lattice.step
