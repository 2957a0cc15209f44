"""[tune] with sites: all is declared before the first charge; totals against independent accountants; going on."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from federation_rig import Rig, table
from test_tune import DELTA, gaussian_oracle, oracle

import sordino as sd
from sordino.engine.federation import wire
from sordino.engine.federation.limits import Policy
from sordino.engine.federation.wire import unpack
from sordino.errors import BadInput, BudgetRefused, SordinoError
from sordino.privacy.held import HELD
from sordino.privacy.ledger import LedgerPlan
from sordino.privacy.types import Event, Sampling
from sordino.study import tune_sites as tuning
from sordino.study.conduct import conduct, set_up
from sordino.study.evaluated import estimate_of
from sordino.study.file import make_study
from sordino.study.folder import TUNED, check_kind
from sordino.study.result import read_result
from sordino.study.status import look
from sordino.study.tune import search
from sordino.study.tune_sites import check_search, tune_sites

EPSILONS = (2.0, 4.0, 8.0)
RATES, ROUNDS = (0.2, 0.4), 3


@pytest.fixture(scope="module")
def clients():
    digits = sd.data.load("digits", records=600).partition("iid", clients=3, seed=1)
    return digits.with_budgets(list(EPSILONS), DELTA)


def study_of(clients: Any, **more: Any) -> dict[str, Any]:
    found = table("dp-fedavg", clients, rounds=ROUNDS, lr=0.5) | {"evaluation": {"share": 0.4}}
    found["deployment"] |= {"enrol": 0.1, "timeout": 5.0}
    return found | {"tune": {"training.rate": list(RATES)}} | more


def begin(folder: Path, study: dict[str, Any], resume: bool = False) -> Path:
    made = make_study(study)
    check_search(made)
    set_up(folder, made, resume, kind=TUNED)
    return folder


@pytest.fixture(scope="module")
def tuned(clients, tmp_path_factory):
    """A search, what passed over the wires, and what the ledgers of the sites say."""
    home, study = tmp_path_factory.mktemp("tuned"), study_of(clients)
    with Rig(home / "sites", clients, study) as rig:
        result = conduct(begin(home / "out", study), rig.wires, tune_sites)
        books = {}
        for name, site in rig.wires.sites.items():
            book = site.ledger
            training = [(e.sampling.rate, e.noise, e.count) for e in book.spent(name)]
            looks = [e.noise for e in book.spent(name + HELD) for _ in range(e.count)]
            closed = not any(s.open for one in (name, name + HELD) for s in book.standings(one))
            books[name] = training, looks, book.composition(name), closed
        heard = [(name, unpack(data), unpack(reply)) for name, data, reply in rig.wires.heard]
    return home / "out", result, heard, books


def test_totals_are_what_independent_accountants_say_and_within_every_budget(clients, tuned):
    _, result, _, books = tuned
    for one, budget in zip(result["privacy"], EPSILONS):
        training, looks, composition, closed = books[one["client"]]
        assert {round(rate, 3): count for rate, _, count in training} == dict.fromkeys(RATES, ROUNDS)
        expected = oracle(training)
        assert one["training_epsilon"] == pytest.approx(expected, rel=2e-3)
        assert 0.99 * budget < expected <= budget * 1.002
        assert len(looks) == 2, "each candidate's last model, once"
        assert one["held_epsilon"] == pytest.approx(gaussian_oracle(looks), rel=1e-4)
        assert one["held_epsilon"] == pytest.approx(0.8 * budget, rel=1e-4)
        assert one["spent_epsilon"] == max(one["training_epsilon"], one["held_epsilon"]) <= budget
        assert one["run_epsilon"] == pytest.approx(one["spent_epsilon"], rel=1e-6), "nothing else was ever charged"
        assert one["told_by"] == "site"
        assert sum(release["count"] for release in one["releases"]) == 2 * ROUNDS + 2
        assert "declared in advance" in composition
        assert closed


def test_every_site_has_declared_everything_before_it_is_asked_for_anything(clients, tuned):
    _, _, heard, _ = tuned
    kinds = [packet.kind for _, packet, _ in heard]
    offers = [place for place, kind in enumerate(kinds) if kind == wire.OFFER]
    assert kinds.count(wire.HELLO) == 3
    assert len(offers) == 2 * 3
    assert max(offers) < kinds.index(wire.TURN)
    assert kinds.count(wire.TURN) == 2 * 3 * ROUNDS
    assert kinds.count(wire.SCORES) == 2 * 3
    # A farewell to one candidate does not end the other, which trains after it.
    assert kinds.index(wire.BYE) < kinds.index(wire.TURN, kinds.index(wire.BYE))


def test_the_noise_is_that_of_a_simulation_of_the_same_search(clients, tuned, tmp_path, monkeypatch):
    out, _, _, _ = tuned
    there = {"data": {"name": "digits", "clients": 3}, "budgets": {"epsilon": list(EPSILONS), "delta": DELTA}}
    study = make_study(study_of(clients) | there)
    monkeypatch.setattr("sordino.study.many.Studies.clients", lambda maker, study: clients)
    found = search(study, tmp_path)
    kept = json.loads((out / "search.json").read_text())
    assert kept["looking"] == pytest.approx(found.looking.tolist())
    assert kept["cost"]["candidates"] == found.describe()["candidates"]
    for one, ready in zip(kept["runs"], found.ready):
        planned = [client.noise for client in ready.plan.clients]
        assert [own[0][0] for own in one["noises"]] == pytest.approx(planned, rel=1e-6)


def test_the_winner_is_the_best_by_paid_estimates_and_its_model_is_handed_out(tuned):
    out, result, _, _ = tuned
    tried = result["tuned"]["tried"]
    estimates = [estimate_of(read_result(out / one["folder"] / "result.json")) for one in tried]
    assert [one["estimate"] for one in tried] == estimates
    values = [one["value"] for one in estimates]
    winner = result["tuned"]["winner"]
    assert winner == values.index(max(values))
    best = sd.load(out / tried[winner]["folder"])
    assert sd.load(out).result["checksum"] == best.result["checksum"]
    assert read_result(out / "result.json") == result
    assert look(out)["state"] == "finished"
    assert look(out)["round"] == ROUNDS
    with pytest.raises(BadInput, match="holds a deployed tuning"):
        check_kind(out, "tuning")


def test_intervals_hold_for_all_candidates_at_once(tuned):
    out, _, _, _ = tuned
    about = json.loads((out / "training.rate=0.2" / "serve.json").read_text())
    ready = tuning.prepare(make_study(about["study"]), "")
    facts = tuning.facts_of(json.loads((out / "enrolled.json").read_text()))
    plan = ready.plan(facts, about["noises"], about["looking"])
    assert plan.judging.level == pytest.approx(1 - 0.05 / 2)
    assert plan.judging.times == 1


@pytest.mark.parametrize(("candidate", "number"), [(0, 2), (1, 1)])
def test_a_coordinator_that_dies_is_taken_up_again_and_nobody_pays_twice(clients, tmp_path, candidate, number):
    study = study_of(clients)
    with Rig(tmp_path / "sites", clients, study) as rig:
        seen = []

        def dies(name: str, data: bytes, reply: bytes) -> bytes:
            packet = unpack(data)
            if packet.kind == wire.TURN:
                seen.append(packet.facts["brief"]["run"])
                if len(set(seen)) == candidate + 1 and packet.facts["round"] == number:
                    raise KeyboardInterrupt
            return reply

        rig.wires.fault = dies
        folder = begin(tmp_path / "out", study)
        with pytest.raises(KeyboardInterrupt):
            conduct(folder, rig.wires, tune_sites)
        rig.wires.fault = lambda name, data, reply: reply
        rig.wires.sites[clients.names[0]] = rig.site(clients.names[0])  # and a site starts again as well
        result = conduct(begin(folder, study, resume=True), rig.wires, tune_sites)
        for one, budget in zip(result["privacy"], EPSILONS):
            book = rig.wires.sites[one["client"]].ledger
            assert sum(e.count for e in book.spent(one["client"])) == 2 * ROUNDS  # what was paid is sent again (R11)
            assert sum(e.count for e in book.spent(one["client"] + HELD)) == 2
            assert book.epsilon([one["client"]])[one["client"]] <= budget
            assert one["spent_epsilon"] <= budget
        heads = {name: site.ledger.head for name, site in rig.wires.sites.items()}
        (folder / "result.json").unlink()  # it died before it had chosen
        again = conduct(begin(folder, study, resume=True), rig.wires, tune_sites)
        assert heads == {name: site.ledger.head for name, site in rig.wires.sites.items()}
    assert again == result
    assert result["tuned"]["tried"][0]["estimate"] is not None


def test_a_coordinator_that_dies_between_offers_makes_the_same_ones_again(clients, tmp_path):
    study, offers = study_of(clients), []

    def dies(name: str, data: bytes, reply: bytes) -> bytes:
        offers.extend([data] if unpack(data).kind == wire.OFFER else [])
        if len(offers) == 4:
            raise KeyboardInterrupt
        return reply

    with Rig(tmp_path / "sites", clients, study) as rig:
        rig.wires.fault = dies
        with pytest.raises(KeyboardInterrupt):
            conduct(begin(tmp_path / "out", study), rig.wires, tune_sites)
        result = conduct(begin(tmp_path / "out", study, resume=True), rig.wires, tune_sites)
        runs = {s.plan.run for site in rig.wires.sites.values() for s in site.ledger.standings(site.account)}
    assert offers[4:8] == offers[:4]
    assert len(runs) == 2
    assert all(0.99 * budget < one["spent_epsilon"] <= budget for one, budget in zip(result["privacy"], EPSILONS))


def test_who_cannot_pay_for_all_of_it_stops_it_before_anybody_is_charged(clients, tmp_path):
    study = study_of(clients)
    with Rig(tmp_path / "sites", clients, study) as rig:
        poor = clients.names[1]
        book = rig.wires.sites[poor].ledger
        event = Event("gradient", Sampling.poisson(0.2), 3.0, 1)  # an open plan of somebody else's
        assert book.declare([LedgerPlan(poor, "other", (event,), 20)])[poor] == 20
        folder = begin(tmp_path / "out", study)
        with pytest.raises(BudgetRefused, match=f"by {poor}: nothing was trained or charged"):
            conduct(folder, rig.wires, tune_sites)
        for name, site in rig.wires.sites.items():
            for account in (name, name + HELD):
                assert site.ledger.spent(account) == []
                assert [s.plan.run for s in site.ledger.standings(account) if s.open] == ["other"] * (account == poor)
        assert wire.TURN not in {unpack(data).kind for _, data, _ in rig.wires.heard}
        # When the other plan is gone, the same command goes on from the beginning.
        book.close_plan(poor, "other")
        result = conduct(begin(folder, study, resume=True), rig.wires, tune_sites)
    assert all(one["spent_epsilon"] <= budget for one, budget in zip(result["privacy"], EPSILONS))


def test_a_site_whose_limits_forbid_one_candidate_stops_it_before_anybody_is_charged(clients, tmp_path):
    study = study_of(clients, tune={"study.rounds": [2, 5]})
    strict = Policy(not_private=True, colluders=0, rounds=3)
    with Rig(tmp_path / "sites", clients, study, policies={clients.names[0]: strict}) as rig:
        with pytest.raises(SordinoError, match=r"not every site trains every candidate.*5 rounds"):
            conduct(begin(tmp_path / "out", study), rig.wires, tune_sites)
        assert all(site.ledger.spent(name) == [] for name, site in rig.wires.sites.items())


def test_a_candidate_that_diverges_is_charged_and_loses_and_a_silent_site_is_counted_by_its_answers(clients, tmp_path):
    study = study_of(clients, tune={"training.server_lr": [1e39, 1.0]})
    with Rig(tmp_path / "sites", clients, study) as rig:
        silent, byes = clients.names[2], []

        def gone(name: str, data: bytes, reply: bytes) -> bytes | None:
            if unpack(data).kind == wire.BYE and name == silent:
                byes.append(name)
                return None if len(byes) > 1 else reply  # it says what the first candidate cost, and no more
            return reply

        rig.wires.fault = gone
        result = conduct(begin(tmp_path / "out", study), rig.wires, tune_sites)
        spent = {name: site.ledger.epsilon([name])[name] for name, site in rig.wires.sites.items()}
    tuned = result["tuned"]
    assert tuned["winner"] == 1
    assert tuned["tried"][0]["estimate"] is None
    assert "diverged" in tuned["tried"][0]["failed"]
    for one in result["privacy"]:
        assert one["told_by"] == ("server" if one["client"] == silent else "site")
        assert one["training_epsilon"] == pytest.approx(spent[one["client"]], rel=1e-3)


def test_what_cannot_be_tried_with_sites_is_refused_before_they_are_asked(clients):
    for more, words in (
        ({"tune": {"method.name": ["dp-fedavg", "fedavg"]}}, "not private"),
        ({"trust": {"noise": "shared", "colluders": 1}}, "shared"),
        ({"tune": {"training.lr": [0.1]}}, "one candidate"),
    ):
        with pytest.raises(BadInput, match=words):
            check_search(make_study(study_of(clients, **more)))


@pytest.mark.parametrize("rounds", [2, pytest.param("auto", marks=pytest.mark.slow)])
def test_public_records_and_settings_that_are_chosen_automatically_go_with_it(tmp_path, rounds):
    digits = sd.data.load("digits", records=600).partition("iid", clients=3, seed=1)
    clients = digits.with_budgets([2.0, 4.0, math.inf], DELTA)
    study = study_of(clients, tune={"training.lr": [0.3, "auto"]})
    study["study"]["rounds"] = rounds
    with Rig(tmp_path / "sites", clients, study) as rig:
        result = conduct(begin(tmp_path / "out", study), rig.wires, tune_sites)
    assert [one["spent_epsilon"] <= one["epsilon"] for one in result["privacy"]] == [True] * 3
    assert [one["training_epsilon"] for one in result["privacy"]][2] == math.inf
    assert read_result(tmp_path / "out" / "result.json") == result
    assert all(one["estimate"] is not None for one in result["tuned"]["tried"])


def test_the_command_refuses_what_does_not_go_with_sites(clients, tmp_path, in_folder):
    lines = []
    for section, values in study_of(clients).items():
        lines.append(f"[{section}]")
        lines += [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in values.items()]
    (tmp_path / "study.toml").write_text("\n".join(lines))
    for words, why in (
        (("--sites", "--ledger", "all.db"), "a ledger of its own"),
        (("--resume",), "--resume goes with --sites"),
        (("--sites", "--set", "method.name=fedavg"), "not private"),
    ):
        code, _, err = in_folder("tune", "study.toml", *words)
        assert code == 2
        assert why in err
    assert not (tmp_path / "runs").exists()
