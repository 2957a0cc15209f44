"""What a site does with a packet: charges before it reads, refuses by public parameters, resends byte for byte."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from federation_rig import Rig, five_clients, table

from sordino.engine.federation import wire
from sordino.engine.federation.exchange import offer_of
from sordino.engine.federation.limits import Policy
from sordino.engine.federation.release_log import log_of
from sordino.engine.federation.wire import Packet, pack, unpack
from sordino.privacy.generators import Secret
from sordino.privacy.words import epsilon_in_words

STEPS = {"steps": 2, "rate": 0.2, "lr": 0.2}


@pytest.fixture(scope="module")
def clients():
    return five_clients((4.0, 8.0, 16.0))


@pytest.fixture
def rig(tmp_path: Path, clients):
    with Rig(tmp_path, clients, table("dp-fedavg", clients, rounds=4, **STEPS)) as made:
        made.server = made.coordinator()
        yield made


def turn(rig: Rig, number: int = 1, **changed) -> bytes:
    """The request for a turn of the first site, as the coordinator would write it, or changed."""
    client = rig.server.course.plan.clients[0]
    facts = {
        "brief": rig.ready.brief,
        "offer": offer_of(client),
        "round": number,
        "copy": 0,
        "count": client.terms.count,
        "since": 0,
        "public": {"lr": 0.2, "clip": 1.0},
    }
    weights = changed.pop("weights", rig.ready.start)
    return pack(Packet(wire.TURN, facts | changed, {"weights": weights}))


def first(rig: Rig):
    return rig.wires.sites[rig.clients.names[0]]


def used(rig: Rig) -> int:
    """How often the first site's ledger has been charged for a gradient."""
    site = first(rig)
    return sum(event.count for event in site.ledger.spent(site.name))


def reason(reply: bytes) -> str:
    packet = unpack(reply)
    assert packet.kind == wire.REFUSED, packet
    return str(packet.facts["reason"])


def test_a_fixed_batch_that_is_not_a_whole_number_of_records_is_refused_by_a_site(tmp_path: Path):
    """Rounding up would draw more than is charged: 1.5 of 100 records as 2."""
    clients = five_clients((4.0, 8.0)).with_budgets([4.0, 8.0], 1e-5, adjacency="replace-one")
    study = table("dp-fedavg", clients, rounds=2, sampling="fixed", batch=10)
    study["budgets"] = {"adjacency": "replace-one"}
    with Rig(tmp_path, clients, study) as made:
        made.server = made.coordinator()
        assert unpack(first(made).handle(turn(made))).kind == wire.UPLOAD
        offer = offer_of(made.server.course.plan.clients[0])
        records = len(clients.train[0])
        terms = offer["terms"] | {"sampling": ["fixed", 1.5 / records], "divisor": 1.5}
        assert "whole number of records" in reason(first(made).handle(turn(made, offer=offer | {"terms": terms})))


def test_a_packet_comes_out_as_it_went_in_and_equal_packets_are_equal_bytes():
    tensors = {"b": torch.randn(3), "a": torch.randn(2, 2)}
    packet = Packet("turn", {"z": 1, "a": float("inf"), "list": [1.5, "ε"]}, tensors)
    data = pack(packet)
    assert data == pack(Packet("turn", dict(reversed(packet.facts.items())), dict(reversed(tensors.items()))))
    back = unpack(data)
    assert (back.kind, back.facts) == ("turn", packet.facts)
    assert all(torch.equal(back.tensors[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("bytes_", [b"", b"hello", b"\x00" * 64, b"\xff" * 4096, pack(Packet("turn"))[:-1]], ids=len)
def test_bytes_that_are_no_packet_are_refused(rig: Rig, bytes_: bytes):
    assert "no packet of sordino" in reason(first(rig).handle(bytes_))
    assert used(rig) == 0


def test_a_turn_is_charged_before_records_are_read(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    site, seen = first(rig), []
    whole = type(site.records).at

    def watched(self, where):
        seen.append(used(rig))
        return whole(self, where)

    monkeypatch.setattr(type(site.records), "at", watched)
    assert unpack(site.handle(turn(rig))).kind == wire.UPLOAD
    assert seen
    assert set(seen) == {STEPS["steps"]}


def test_a_repeated_request_gets_the_same_bytes_and_no_new_charge(rig: Rig, tmp_path: Path):
    once = first(rig).handle(turn(rig))
    assert first(rig).handle(turn(rig)) == once
    assert used(rig) == STEPS["steps"]


def test_the_same_bytes_come_from_a_site_that_was_started_again(rig: Rig):
    once = first(rig).handle(turn(rig))
    first(rig).ledger.close()
    assert rig.site(rig.clients.names[0]).handle(turn(rig)) == once


def test_the_same_round_with_other_weights_is_a_new_draw_and_a_new_charge(rig: Rig):
    once = first(rig).handle(turn(rig))
    again = first(rig).handle(turn(rig, weights=rig.ready.start + 1e-3))
    assert again != once
    assert used(rig) == 2 * STEPS["steps"]


def test_a_failure_on_records_is_charged_and_told_as_unavailable(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    site = first(rig)

    def broken(*_):
        raise ValueError("record 17 has diagnosis 'flu'")

    monkeypatch.setattr("sordino.engine.federation.site.take_turn", broken)
    reply = site.handle(turn(rig))
    assert unpack(reply) == Packet(wire.UNAVAILABLE)
    assert b"flu" not in reply
    assert used(rig) == STEPS["steps"]
    monkeypatch.undo()
    assert unpack(site.handle(turn(rig))).kind == wire.UPLOAD
    assert used(rig) == 2 * STEPS["steps"], "nothing was stored, so a new draw is a new charge"


def test_records_that_raise_add_nothing_and_the_release_goes_out_all_the_same(rig: Rig, monkeypatch):
    site = first(rig)

    def broken(self, where):
        raise ValueError("record 17 has diagnosis 'flu'")

    monkeypatch.setattr(type(site.records), "at", broken)
    reply = site.handle(turn(rig))
    assert unpack(reply).kind == wire.UPLOAD
    assert b"flu" not in reply


def test_a_site_draws_from_its_own_secret_generator(rig: Rig, tmp_path: Path):
    assert isinstance(first(rig).source, Secret)
    site = first(rig)
    assert site.ledger.account(site.name).not_private == ()
    with Rig(tmp_path / "other", rig.clients, rig.study, key="known to all") as rehearsed:
        ledger = rehearsed.wires.sites[site.name].ledger
        assert "injected" in ledger.account(site.name).not_private[0]


@pytest.mark.parametrize(
    ("policy", "word"),
    [
        (Policy(methods=("robust-hdp",)), "method 'dp-fedavg' is not allowed here: this site allows robust-hdp"),
        (Policy(models=("mlp",)), "model 'logistic' is not allowed here"),
        (Policy(rounds=3), "4 rounds are too many for this site: it allows 3 a run"),
        (Policy(parameters=10), "too large here: at most 10"),
    ],
)
def test_what_the_policy_forbids_is_refused_with_a_reason(rig: Rig, policy: Policy, word: str):
    site = first(rig)
    site.policy = policy
    site._understood.cache_clear()
    for request in (pack(Packet(wire.HELLO, {"brief": rig.ready.brief})), turn(rig)):
        assert word in reason(site.handle(request))
    assert used(rig) == 0


def test_a_server_that_understates_its_model_is_refused_before_memory_is_taken(rig: Rig):
    brief = {**rig.ready.brief, "model": {"name": "mlp", "options": {"hidden": 10**12}}}
    said = reason(first(rig).handle(pack(Packet(wire.HELLO, {"brief": brief}))))
    assert "is too large here: at most 200000000" in said
    assert used(rig) == 0


def test_an_allowed_name_does_not_open_the_door_for_other_parts(tmp_path: Path, clients):
    """λ of FedFDP may be tuned; a loss that DP-FedAvg does not release may not be asked for under its name."""

    def answer_to(allowed: str, **parts) -> Packet:
        study = table(allowed, clients, **STEPS)
        study["method"] |= parts
        where = tmp_path / f"{allowed}-{len(list(tmp_path.iterdir()))}"
        with Rig(where, clients, study, everywhere=Policy(methods=(allowed,))) as rig:
            return unpack(first(rig).handle(pack(Packet(wire.HELLO, {"brief": rig.ready.brief}))))

    assert answer_to("fedfdp", clip={"name": "fair", "weight": 0.3}).kind == wire.FACTS
    assert answer_to("dp-fedavg", aggregate="uniform").kind == wire.FACTS
    other = answer_to("dp-fedavg", clip={"name": "fair", "weight": 0.3}, ask={"name": "loss"})
    assert "this study exchanges its clip for 'fair(weight=0.3)'" in other.facts["reason"]
    other = answer_to("dp-fedavg", local="scaffold", aggregate="scaffold")
    assert "exchanges its local for 'scaffold'" in other.facts["reason"]


@pytest.mark.parametrize(
    ("policy", "word"),
    [
        (Policy(least_noise=1e3), "this site adds at least 1000"),
        (Policy(steps=1), "2 local steps a turn are too many"),
        (Policy(clip=(0.1, 0.5)), "the bound of 'gradient' is 1: this site allows 0.1 to 0.5"),
    ],
)
def test_terms_outside_the_limits_are_refused(rig: Rig, policy: Policy, word: str):
    first(rig).policy = policy
    assert word in reason(first(rig).handle(turn(rig)))
    assert used(rig) == 0


def test_a_study_without_noise_is_refused_unless_the_site_says_otherwise(tmp_path: Path, clients):
    study = table("fedavg", clients, **STEPS)
    with Rig(tmp_path, clients, study, everywhere=Policy()) as rig:
        hello = pack(Packet(wire.HELLO, {"brief": rig.ready.brief}))
        assert "does not allow methods that are NOT PRIVATE" in reason(first(rig).handle(hello))


def test_another_schema_or_model_is_refused_with_a_reason(rig: Rig):
    site, brief = first(rig), rig.ready.brief

    def answer_to(**changed) -> str:
        return reason(site.handle(pack(Packet(wire.HELLO, {"brief": {**brief, **changed}}))))

    assert "shape (3, 32, 32) and 10 classes" in answer_to(shape=[3, 32, 32])
    assert "7 classes, this site's have shape (1, 8, 8) and 10 classes" in answer_to(classes=7)
    assert "the study's feature schema" in answer_to(schema="0" * 64)
    assert "under replace-one" in answer_to(adjacency="replace-one")
    assert "has other tensors here than at the server" in answer_to(layout=[["weight", [10, 65], 0]])
    assert "model 'os:system' is not allowed here" in answer_to(model={"name": "os:system", "options": {}})


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"count": 5}, "a turn of this run has 2 steps, not 5"),
        ({"public": {"lr": 0.2, "clip": 1e-5}}, "the bound of 'gradient' is 1e-05"),
        ({"public": {"lr": 0.2, "clip": float("nan")}}, "a number was expected"),
        ({"public": {"lr": 0.2, "clip": "all of it"}}, "a number was expected"),
        ({"weights": torch.zeros(3)}, "is not a float32 vector of the model's 650 parameters"),
        ({"weights": torch.zeros(650, dtype=torch.float64)}, "is not a float32 vector"),
        ({"offer": None}, "the request is not complete"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_and_not_charged(rig: Rig, change: dict, word: str):
    assert word in reason(first(rig).handle(turn(rig, **change)))
    assert used(rig) == 0


def test_releases_that_the_method_does_not_make_are_refused(rig: Rig):
    offer = offer_of(rig.server.course.plan.clients[0])
    more = {**offer, "terms": {**offer["terms"], "parts": [["gradient", 5.0], ["loss", 5.0]]}}
    assert "does not release gradient+loss" in reason(first(rig).handle(turn(rig, offer=more)))
    smaller = {**offer, "terms": {**offer["terms"], "divisor": 1.0}}
    assert "would be divided by 1" in reason(first(rig).handle(turn(rig, offer=smaller)))


def test_less_noise_under_the_name_of_a_declared_run_is_refused(rig: Rig):
    first(rig).handle(turn(rig))
    offer = offer_of(rig.server.course.plan.clients[0])
    quieter = {**offer, "terms": {**offer["terms"], "parts": [["gradient", 0.5]]}}
    assert "declared with another plan" in reason(first(rig).handle(turn(rig, 2, offer=quieter)))


def test_a_server_cannot_spend_more_than_the_budget_under_new_names(rig: Rig):
    """Every run is another plan in the same ledger: together they fit the budget, whatever they are called."""
    site = first(rig)
    answers = [
        unpack(site.handle(turn(rig, n, brief={**rig.ready.brief, "run": f"run{n}"}))).kind for n in range(1, 12)
    ]
    assert answers[0] == wire.UPLOAD
    assert answers[-1] == wire.REFUSED
    assert site.ledger.epsilon()[site.name] <= site.budget.epsilon


def test_a_runs_name_does_not_lead_out_of_the_sites_folder(tmp_path: Path, clients):
    study = table("dp-scaffold", clients, rounds=4, **STEPS)
    with Rig(tmp_path / "a" / "b", clients, study) as rig:
        rig.server = rig.coordinator()
        first(rig).ledger.close_run("run1")
        reply = first(rig).handle(turn(rig, brief={**rig.ready.brief, "run": "../../../out"}))
        assert unpack(reply).kind == wire.UPLOAD
    assert [one.name for one in tmp_path.iterdir()] == ["a"]


def test_one_run_is_offered_part_of_the_budget(tmp_path: Path, clients):
    with Rig(tmp_path, clients, table("dp-fedavg", clients, **STEPS), everywhere=Policy(run_epsilon=0.5)) as rig:
        hello = unpack(first(rig).handle(pack(Packet(wire.HELLO, {"brief": rig.ready.brief}))))
        assert hello.facts["epsilon"] == 0.5
        assert rig.train().round == 2
        site = first(rig)
        assert 0.4 < site.ledger.epsilon()[site.name] <= 0.5


def test_the_end_of_a_run_frees_what_was_not_used(rig: Rig):
    first(rig).handle(turn(rig))
    site = first(rig)
    bye = unpack(site.handle(pack(Packet(wire.BYE, {"run": "run1"}))))
    assert bye.facts["releases"][0]["count"] == STEPS["steps"]
    assert bye.facts["run_epsilon"] == pytest.approx(site.ledger.epsilon()[site.name])
    assert not site.ledger.standings(site.name)[0].open


def test_null_rows_count_in_n_and_answer_nothing(tmp_path: Path, clients):
    """R8: a site whose records are all null sends noise of the planned size, and declares the same n."""
    study = table("dp-fedavg", clients, **STEPS)
    with Rig(tmp_path, clients, study) as rig:
        site = first(rig)
        site.records = replace(site.records, valid=torch.zeros(len(site.records.y), dtype=torch.bool))
        rig.server = rig.coordinator()
        sent = unpack(site.handle(turn(rig))).tensors["update"]
        terms = rig.server.course.plan.clients[0].terms
        size = np.sqrt(terms.count) * 0.2 * terms.noise("gradient") / terms.divisor
        assert float(sent.std()) == pytest.approx(size, rel=0.15)


def test_every_release_leaves_a_dated_line_beside_the_ledger_and_a_repeat_none(rig, monkeypatch):
    site = first(rig)
    request = turn(rig)
    assert site.handle(request) == site.handle(request)  # the second is stored bytes
    site.handle(turn(rig, number=2))
    lines = log_of(site.ledger).read_text().splitlines()
    assert len(lines) == 2
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00  ", line) for line in lines)
    assert "study study: gradient, 2 times so far; in all epsilon " in lines[0]
    spent = epsilon_in_words(site.ledger.epsilon([site.account])[site.account])
    assert lines[1].endswith(f"gradient, 4 times so far; in all epsilon {spent} of 4 at delta 1e-05")
    log_of(site.ledger).unlink()
    log_of(site.ledger).mkdir()  # cannot be written any more
    assert unpack(site.handle(turn(rig, number=3))).kind == wire.UPLOAD


def test_a_server_cannot_forge_a_line_of_the_log_by_the_studys_name(rig):
    site, brief = first(rig), {**rig.ready.brief, "name": "x\n2020-01-01T00:00:00+00:00  nothing was released"}
    site.handle(turn(rig, brief=brief))
    assert len(log_of(site.ledger).read_text().splitlines()) == 1
