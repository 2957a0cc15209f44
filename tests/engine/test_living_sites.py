"""Data that live, through a whole site: who is in batches, which accounts pay, what is told."""

from __future__ import annotations

import dp_accounting
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from federation_rig import simulated, table
from living_rig import LIVING, Cohorts, Seen, Ward

import sordino as sd
from sordino.engine.federation import attending, wire
from sordino.engine.federation.exchange import enrol
from sordino.engine.federation.wire import pack, unpack
from sordino.errors import BadInput, SordinoError
from sordino.privacy.gate import Gate
from sordino.privacy.held import HELD
from sordino.privacy.ledger import Charge, Ledger
from sordino.privacy.types import Event
from sordino.study.file import make_study
from sordino.study.survey.conduct import ask, brief_of, planned

SECOND = "north (since 2)"
COLUMNS = {"age": {"low": 0, "high": 1000, "bins": 4}, "sick": {"categories": ["no", "yes"]}}
SURVEY = {"survey": {"target": "sick", "columns": COLUMNS}, "deployment": {"sites": ["north"]}}


@pytest.fixture
def ward(tmp_path):
    return Ward(tmp_path)


@pytest.fixture
def seen(monkeypatch):
    return Seen.spy(monkeypatch)


def ledger_of(ward: Ward) -> Ledger:
    return Ledger(ward.folder / "ledger.db", readonly=True)


def by_the_book(events: list[Event], delta: float = 1e-5) -> float:
    """ε of these releases by an accountant that has nothing to do with sordino."""
    book = PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
    for one in events:
        gaussian = dp_accounting.GaussianDpEvent(one.noise)
        book.compose(dp_accounting.PoissonSampledDpEvent(one.sampling.rate, gaussian), one.count)
    return book.get_epsilon(delta)


def test_who_came_later_trains_when_those_before_have_nothing_left(ward, seen):
    ward.write(range(1, 41))
    first = ward.train("one", rounds=4)
    assert first["records"] == 40
    ward.write(range(1, 61))
    seen.patients.clear()
    second = ward.train("two", rounds=4)
    assert second["records"] == 20
    assert seen.patients <= set(range(41, 61))
    assert len(seen.patients) > 10
    with ledger_of(ward) as ledger:
        assert [one.plan.run for one in ledger.standings("north")] == ["one"]
        assert [one.plan.run for one in ledger.standings(SECOND)] == ["two"]
        assert ledger.epsilon()[SECOND] == pytest.approx(by_the_book(ledger.spent(SECOND)), abs=2e-3)
        assert ledger.epsilon()[SECOND] <= 2.0
        assert second["spent_epsilon"] == max(ledger.epsilon().values())


def test_all_who_can_pay_train_together_and_each_account_pays_for_what_it_was_in(ward, seen):
    ward.limits = "run_epsilon = 0.6"
    ward.write(range(1, 41))
    ward.train("one", rounds=4)
    ward.write(range(21, 61))  # the first twenty are gone
    seen.patients.clear()
    told = ward.train("two", rounds=4)
    assert told["records"] == 40
    assert seen.patients & set(range(21, 41))
    assert seen.patients & set(range(41, 61))
    assert seen.patients <= set(range(21, 61))
    with ledger_of(ward) as ledger:
        counts = {name: [(e.sampling.rate, e.count) for e in ledger.spent(name)] for name in ("north", SECOND)}
        assert counts == {"north": [(0.5, 4), (0.5, 4)], SECOND: [(0.5, 4)]}
        spent = ledger.epsilon()
        assert spent[SECOND] == pytest.approx(by_the_book(ledger.spent(SECOND)), abs=2e-3)
        assert by_the_book(ledger.spent("north")) < spent["north"] <= 2.0  # the filter's meter
        assert ledger.run_events("north", "two") == ledger.run_events(SECOND, "two")
        assert told["releases"] == [{"what": "gradient", "rate": 0.5, "noise": pytest.approx(
            ledger.spent(SECOND)[0].noise), "count": 4}]  # fmt: skip


def test_no_budget_is_ever_overdrawn_and_nobody_who_comes_and_goes_gets_a_fresh_one(ward, seen):
    """The same person leaves and comes back at every run, for as long as anybody can pay."""
    ward.limits, ward.epsilon = "run_epsilon = 0.5", 1.0
    for k in range(6):
        ward.write(*([7] if k % 2 else []), range(100 * k, 100 * k + 10), range(900, 905))
        ward.train(f"run{k}", rounds=2)
    with ledger_of(ward) as ledger:
        spent = ledger.epsilon()
        assert len(spent) == 6
        assert max(spent.values()) <= 1.0
        assert ledger.life().cohorts == 6
        seats = ledger.life().seats
    sat = [k for k in range(1, 6) if 1 in seats[f"run{k}", False].cohorts]
    assert 1 in sat, "there was room for a second run"
    assert 5 not in sat, "and not for a sixth"
    assert spent["north"] > 0.7


def test_who_withdrew_is_in_no_batch_whether_the_record_is_gone_or_listed(ward, seen, caplog):
    ward.limits = "run_epsilon = 0.5"
    ward.write(range(1, 21))
    ward.train("one", rounds=2)
    (ward.folder / "withdrawn.txt").write_text("p-3\n\n P-4 \nP-999\n")
    ward.data = LIVING + '\nwithdrawn = "withdrawn.txt"'
    ward.write(range(1, 20))
    seen.patients.clear()
    told = ward.train("two", rounds=30)
    assert told["records"] == 17
    assert seen.patients <= set(range(1, 20)) - {3, 4}
    assert len(seen.patients) == 17
    assert "1 of 3 ids in" in caplog.text
    with ledger_of(ward) as ledger:
        assert [(one.what, one.count) for one in ledger.life().changes] == [("joined", 20), ("withdrawn", 3)]


def test_a_run_goes_on_when_the_site_starts_again_with_other_records(ward, seen):
    """Whoever withdrew meanwhile is a null row; whoever came, or came back, waits for the next run."""
    ward.limits = "run_epsilon = 1.0"
    ward.write(range(1, 21), 99)
    with ward.site():
        pass
    ward.write(range(1, 21))  # 99 is known, and away when the run begins
    with ward.rig("one", rounds=32) as rig:
        state = rig.first()
        rounds = rig.coordinator().run(state)
        next(rounds)
        next(rounds)
        ward.write(range(3, 21), 99, range(40, 45))
        rig.wires.sites["north"] = rig.site("north")
        seen.patients.clear()
        for _ in rounds:
            pass
    assert state.round == 32
    assert seen.sizes == [20] * 32, "n stays what was declared"
    assert seen.patients == set(range(3, 21))
    seen.patients.clear()
    told = ward.train("two", rounds=30)
    assert told["records"] == 18 + 1 + 5
    assert seen.patients == {*range(3, 21), 99, *range(40, 45)}


def test_one_account_that_cannot_pay_refuses_the_turn_for_all(ward, seen):
    ward.limits = "run_epsilon = 0.6"
    ward.write(range(1, 21))
    ward.train("one")
    ward.write(range(1, 41))
    with ward.rig("two", rounds=2) as rig:
        server = rig.coordinator()
        with Ledger(ward.folder / "ledger.db") as other:  # another process spends what the second cohort has declared
            other.charge([Charge(SECOND, "two", "elsewhere", "gradient", 2, "ab" * 32)])
            before = other.run_events("north", "two")
        seen.sizes.clear()
        state = rig.first()
        list(server.run(state))
        assert seen.sizes == [], "nothing was read"
        assert rig.wires.sites["north"].ledger.run_events("north", "two") == before == []


def test_a_cohort_that_was_counted_in_and_cannot_pay_is_null_rows(ward, seen, monkeypatch):
    """A measure of what is left may promise more than a filter admits: then n stays, and nobody unpaid is read."""
    ward.write(range(1, 21))
    ward.train("one", rounds=2)
    ward.write(range(1, 31))
    monkeypatch.setattr(attending, "takes_part", lambda left, epsilon: tuple(left))
    seen.patients.clear()
    told = ward.train("two", rounds=8)
    assert told["records"] == 30
    assert seen.patients <= set(range(21, 31))
    assert seen.sizes[-1] == 30
    with ledger_of(ward) as ledger:
        assert ledger.life().seats["two", False].cohorts == (2,)
        assert ledger.run_events("north", "two") == []


def test_where_nobody_has_enough_those_with_most_pay_what_they_can(ward):
    ward.write(range(1, 21))
    assert ward.train("one", rounds=2)["records"] == 20
    with ward.rig("two", rounds=2) as rig:
        rig.coordinator()
        assert rig.facts["north"]["records"] == 20
        assert rig.payable == {"north": 0}


def test_where_everybody_withdrew_the_site_says_so(ward):
    ward.write(range(1, 3))
    (ward.folder / "withdrawn.txt").write_text("P-1\nP-2\n")
    ward.data = LIVING + '\nwithdrawn = "withdrawn.txt"'
    with ward.rig("one") as rig:
        facts, refused, odd = enrol(rig.wires, rig.ready.brief, ["north"], 5.0)
        assert not facts
        assert "records = 0" in (refused | odd)["north"]


def test_evaluation_and_survey_charge_the_cohorts_held_out_accounts(ward, monkeypatch):
    ward.data, ward.limits = LIVING + "\nheld_out = 0.4", "run_epsilon = 0.6"
    ward.more = {"evaluation": {"every": 1}}
    ward.write(range(1, 41))
    first = ward.train("one", rounds=2)
    with ledger_of(ward) as ledger:
        count = ledger.life().seats["one", True].count
    assert first["records"] + first["held"] == 40
    assert first["held"] == count
    ward.write(range(21, 81))
    told = ward.train("two", rounds=2)
    assert told["records"] + told["held"] == 60
    with ledger_of(ward) as ledger:
        spent = ledger.epsilon()
        assert set(spent) == {"north", SECOND, "north" + HELD, "north" + HELD + " (since 2)"}
        assert 0 < spent["north" + HELD + " (since 2)"] < spent["north" + HELD] <= 2.0
        assert told["held_epsilon"] == spent["north" + HELD]
        assert told["training_epsilon"] == spent["north"]
    asked = make_study(SURVEY)
    ward.write(range(21, 101))
    with ward.rig("three") as rig:
        brief = brief_of(asked, "three")
        facts, _, _ = enrol(rig.wires, brief, ["north"], 5.0)
        counted, count = [], Gate.count
        monkeypatch.setattr(Gate, "count", lambda *given: counted.append(given[3]) or count(*given))
        ask(rig.wires, brief, planned(asked, facts), 5.0)
        ledger = rig.wires.sites["north"].ledger
        who = ledger.life().seats["three", True]
        assert who.count == facts["north"]["held"]
        payers = [name for name in ledger.epsilon() if ledger.run_events(name, "three")]
        assert payers == ["north" + HELD + attending.since(k) for k in who.cohorts]
        assert 3 in who.cohorts
    (cells, _width) = counted[0]["survey"]
    assert len(cells) == who.count, "each of their records, and no other"


def test_a_survey_does_not_read_a_file_that_was_exchanged_since_the_site_started(ward, caplog):
    ward.data = LIVING + "\nheld_out = 0.5"
    ward.write(range(1, 41))
    asked = make_study(SURVEY)
    with ward.rig("one") as rig:
        brief = brief_of(asked, "one")
        facts, _, _ = enrol(rig.wires, brief, ["north"], 5.0)
        ward.write(range(1, 40), 77)
        with pytest.raises(SordinoError, match="nobody answered"):
            ask(rig.wires, brief, planned(asked, facts), 5.0)
    assert "other people's records than when this site started" in caplog.text


def test_batches_of_a_fixed_size_and_exchanged_records(ward, seen):
    ward.adjacency, ward.limits = "replace-one", "run_epsilon = 0.8"
    ward.training = {"steps": 1, "rate": 0.5, "lr": 0.1, "sampling": "fixed"}
    ward.write(range(1, 21))
    ward.train("one")
    ward.write(range(1, 41))
    assert ward.train("two")["records"] == 40
    with ledger_of(ward) as ledger:
        assert ledger.run_events("north", "two") == ledger.run_events(SECOND, "two")


def test_corrected_reordered_and_respelt_records_change_nothing(ward, seen):
    ward.limits = "run_epsilon = 0.5"
    ward.write(range(1, 11))
    ward.train("one")
    ward.write(*range(10, 1, -1), 500, names={500: " p-1", 3: "P-3 "})  # patient 1 is 500 years old now
    assert ward.train("two", rounds=30)["records"] == 10
    assert 500 in seen.patients
    with ledger_of(ward) as ledger:
        assert len(ledger.accounts()) == 1
        assert len(ledger.life().changes) == 1


def test_the_same_person_twice_is_one_cohort(ward):
    ward.limits = "run_epsilon = 0.5"
    ward.write(range(1, 11))
    ward.train("one")
    ward.write(range(1, 21), names=dict.fromkeys(range(11, 21), "P-1"))
    assert ward.train("two")["records"] == 20
    with ledger_of(ward) as ledger:
        assert len(ledger.accounts()) == 1


def test_more_records_of_the_same_people_wait_for_the_next_run(ward):
    ward.limits = "run_epsilon = 0.5"
    ward.write(range(1, 11))
    with ward.rig("one", rounds=2) as rig:
        rounds = rig.coordinator().run(rig.first())
        next(rounds)
        ward.write(range(1, 12), names={11: "P-1"})
        site = rig.site("north")
        with pytest.raises(BadInput, match="they have more records than then"):
            site.attendance.members(False, site.party("one").seats)


@pytest.mark.parametrize("second", ["one", "two"])
def test_what_a_run_was_told_holds_after_a_restart(ward, second):
    """HELLO again, of the same run and of another: the one is as it was settled, the other by what is left now."""
    ward.write(range(1, 21))
    ward.train("one", rounds=2)
    ward.write(range(1, 31))
    with ward.site() as site:
        assert site.declared_in(second).records == (20 if second == "one" else 10)


def visits(*patients: int) -> dict[int, str]:
    """Three visits of each of these patients, of the ages 3k, 3k + 1 and 3k + 2."""
    return {3 * k + visit: f"P-{k}" for k in patients for visit in range(3)}


def test_a_person_with_several_records_comes_and_goes_as_one(ward, seen):
    ward.data, ward.schema = "living = true\nheld_out = 0.3", 'unit = "patient"'
    ward.limits, ward.more = "run_epsilon = 0.6", {"evaluation": {"every": 1}}
    people = range(1, 31)
    ward.write(*visits(*people), names=visits(*people))
    first = ward.train("one", rounds=2)
    assert first["records"] + first["held"] == 30
    people = range(11, 51)
    ward.write(*visits(*people), 150, names={**visits(*people), 150: "P-11"})  # and a fourth visit of somebody known
    with ward.rig("two", rounds=32) as rig:
        rounds = rig.coordinator().run(rig.first())
        next(rounds)
        told = rig.facts["north"]
        assert told["records"] + told["held"] == 40
        ward.write(*visits(*range(21, 51)), names=visits(*range(21, 51)))  # ten withdraw while the run is under way
        rig.wires.sites["north"] = site = rig.site("north")
        seen.patients.clear()
        for _ in rounds:
            pass
        assert seen.sizes[-1] == told["records"]
        units = {one // 3 for one in seen.patients}
        assert units <= set(range(21, 51))
        assert seen.patients == {3 * k + visit for k in units for visit in range(3)}
        assert len(units) == int((site.attendance.parts[0].roll.cohorts > 0).sum())
        assert site.ledger.account(SECOND).budget.unit == "person"
        counted = [(one.what, one.cohort, one.count) for one in site.ledger.life().changes]
        assert counted == [("joined", 1, 30), ("joined", 2, 20), ("withdrawn", 1, 10), ("withdrawn", 1, 10)]


def test_a_survey_counts_the_people_who_take_part(ward, monkeypatch):
    ward.data, ward.schema = "living = true\nheld_out = 0.5", 'unit = "patient"'
    asked, counted, count = make_study(SURVEY), [], Gate.count
    monkeypatch.setattr(Gate, "count", lambda *given: counted.append(given[3:]) or count(*given))
    for run, people, there in (("one", range(1, 31), range(1, 31)), ("two", range(21, 61), range(31, 61))):
        ward.write(*visits(*people), names=visits(*people))
        with ward.rig(run) as rig:
            brief = brief_of(asked, run)
            facts, _, _ = enrol(rig.wires, brief, ["north"], 5.0)
            ask(rig.wires, brief, planned(asked, facts), 5.0)
            (tables, whose), held = counted.pop(), facts["north"]["held"]
            assert len(tables["survey"][0]) == len(whose) == 3 * held
            assert whose.unique().tolist() == list(range(held))
            assert 0 < held < len(there)


def test_runs_that_are_offered_before_the_first_charge_have_the_same_people(ward, seen):
    """As a search over settings does: what the first candidate declared does not change who is in the second."""
    ward.limits = "run_epsilon = 0.6"
    ward.write(range(1, 21))
    ward.train("one")
    ward.write(range(1, 31))
    with ward.rig("two", rounds=1) as first, ward.rig("three", rounds=1) as second:
        for rig in (first, second):
            rig.coordinator()
            assert rig.facts["north"]["records"] == 30
            assert rig.payable == {"north": 1}
        seats = second.wires.sites["north"].ledger.life().seats
        assert seats["two", False].cohorts == seats["three", False].cohorts == (1, 2)


def test_a_server_cannot_say_which_accounts_pay(ward, seen):
    """Groups in an offer would be accounts: the second cohort's alone for everybody's records, say."""
    ward.limits = "run_epsilon = 0.6"
    ward.write(range(1, 21))
    ward.train("one")
    ward.write(range(1, 31))
    with ward.rig("two") as rig:
        rig.coordinator()
        (asked,) = [unpack(data) for _, data, _ in rig.wires.heard if unpack(data).kind == wire.OFFER]
        terms = asked.facts["offer"]["terms"]
        terms["groups"] = [["since 2", 0.5, 30]]
        site = rig.wires.sites["north"]
        answered = unpack(site.handle(pack(asked)))
        assert answered.kind == wire.REFUSED
        assert "cannot name groups" in answered.facts["reason"] or "levels of consent" in answered.facts["reason"]
        del terms["groups"]
        terms["payers"] = [" (since 2)"]
        assert unpack(site.handle(pack(asked))).kind == wire.ACCEPTED
        assert site.ledger.life().seats["two", False].cohorts == (1, 2), "a word that means nothing"


@pytest.mark.parametrize("trust", [{}, {"noise": "shared"}])
def test_two_cohorts_train_as_one_set_of_records(trust, tmp_path):
    """As a simulation of the same records does, to the last digits that sums leave; both accounts pay the same."""
    clients = (
        sd.data.load("digits", records=300).partition("iid", clients=3, seed=1).with_budgets([2.0, 4.0, 8.0], 1e-5)
    )
    study = table("dp-fedavg", clients, steps=1, rate=0.2, lr=0.5) | {"trust": trust}
    alone = simulated(clients, study, tmp_path / "simulated")
    with Cohorts(tmp_path, clients, study, alone.key, alone.noises) as rig:
        state = rig.train()
        for name, site in rig.wires.sites.items():
            own, later = (site.ledger.run_events(one, "run1") for one in (name, name + " (since 2)"))
            assert own == later
            assert [event.count for event in own] == [2]
    torch.testing.assert_close(state.shown, alone.weights, atol=1e-5, rtol=0)
