"""Ids that come and go: who is in which cohort, that it is for ever, and that nobody's account gets fresh again."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
from pathlib import Path

import pytest
from ledger_cases import GRADIENT, all_end_well, charge, ended_well, forked

from sordino.errors import BadInput, LedgerDamaged
from sordino.privacy import rolls
from sordino.privacy.held import HELD
from sordino.privacy.ledger import Ledger, Plan
from sordino.privacy.ledger_format import read_anchor, write_anchor
from sordino.privacy.living import canonical, cohort_of, is_held, marks_of, since, twin
from sordino.privacy.types import Budget

BUDGET = Budget(2.0, 1e-5)


def commit(salt: bytes) -> str:
    return "records as they were"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def start(ledger: Ledger, ids: list[str], withdrawn: list[str] | None = None) -> list[int]:
    """What a site does when it starts; the cohort of every id, 0 for those who are away."""
    known = ledger.call_roll("patient", ids, withdrawn or [])
    account = ledger.bind("north", commit)
    ledger.open_accounts({account + since(k + 1): BUDGET for k in range(ledger.life().cohorts)})
    return [0 if one.away else one.cohort for one in known]


def spend(ledger: Ledger, run: str, *cohorts: int) -> None:
    """A run of one turn that these cohorts pay for."""
    names = ["north" + since(k) for k in cohorts]
    ledger.declare([Plan(name, run, (GRADIENT,), 1) for name in names])
    ledger.charge([charge("round 1", name, run) for name in names])
    ledger.close_run(run)


def changes(ledger: Ledger) -> list[tuple[str, int, int]]:
    return [(one.what, one.cohort, one.count) for one in ledger.life().changes]


def test_accounts_are_named_by_cohort_and_part():
    assert [since(1), since(2)] == ["", " (since 2)"]
    names = ["north", "north (since 2)", "north" + HELD, "north" + HELD + since(12)]
    assert [cohort_of(one) for one in names] == [1, 2, 1, 12]
    assert [is_held(one) for one in names] == [False, False, True, True]
    assert [twin(one) for one in names] == [
        "north" + HELD, "north" + HELD + " (since 2)", "north", "north (since 12)",
    ]  # fmt: skip


def test_who_comes_later_has_an_unspent_account_and_who_was_there_has_not(path: Path):
    with Ledger(path) as ledger:
        assert start(ledger, ["a", "b", "c"]) == [1, 1, 1]
        spend(ledger, "one", 1)
    with Ledger(path) as ledger:
        assert start(ledger, ["b", "d", "a", "c"]) == [1, 2, 1, 1], "by ids, in whichever order"
        before = ledger.epsilon()
        assert before["north"] > 0
        assert before["north (since 2)"] == 0
        spend(ledger, "two", 1, 2)
        assert changes(ledger) == [("joined", 1, 3), ("joined", 2, 1)]
    with Ledger(path) as ledger:
        after = ledger.epsilon()
        assert after["north"] > after["north (since 2)"] == pytest.approx(before["north"])
        assert ledger.verify()


def test_newcomers_join_the_newest_cohort_until_something_is_asked_of_it(path: Path):
    with Ledger(path) as ledger:
        start(ledger, ["a"])
        assert start(ledger, ["a", "b"]) == [1, 1]
        ledger.declare([Plan("north", "one", (GRADIENT,), 1)])  # declared is enough: a charge may follow any moment
        assert start(ledger, ["a", "b", "c"]) == [1, 1, 2]
        assert start(ledger, ["a", "b", "c", "d"]) == [1, 1, 2, 2]
        ledger.mark_not_private("north (since 2)", "a method without noise")
        assert start(ledger, ["a", "b", "c", "d", "e"]) == [1, 1, 2, 2, 3]


def test_going_and_coming_back_resets_nothing(path: Path):
    """Add and remove the same person every run: the account is the old one, each time more spent."""
    spent = []
    with Ledger(path) as ledger:
        for run in ("one", "two", "three"):
            assert start(ledger, ["a", "b"]) == [1, 1]
            spend(ledger, run, 1)
            spent.append(ledger.epsilon()["north"])
            assert start(ledger, ["b"]) == [1]
        assert spent == sorted(set(spent))
        assert len(ledger.accounts()) == 1
        assert changes(ledger) == [("joined", 1, 2)] + [("withdrawn", 1, 1), ("returned", 1, 1)] * 2 + [
            ("withdrawn", 1, 1)
        ]


def test_whoever_withdrew_is_out_although_the_record_is_there(path: Path):
    with Ledger(path) as ledger:
        start(ledger, ["a", "b"])
        spend(ledger, "one", 1)
        assert start(ledger, ["a", "b", "c"], ["B", "nobody", "c"]) == [1, 0, 0]
        assert changes(ledger) == [("joined", 1, 2), ("withdrawn", 1, 1)], "c never was there, and is not noted"
        assert start(ledger, ["a", "b", "c"], ["c"]) == [1, 1, 0]
        assert start(ledger, ["a", "b", "c"]) == [1, 1, 2]


@pytest.mark.parametrize("other", ["Patient 7", " patient  7 ", "PATIENT\t7", "ｐａｔｉｅｎｔ 7"])
def test_another_spelling_is_nobody_new(path: Path, other: str):
    assert canonical(other) == canonical("patient 7")
    with Ledger(path) as ledger:
        start(ledger, ["patient 7", "patient 8"])
        spend(ledger, "one", 1)
        assert start(ledger, [other, "patient 8"]) == [1, 1]
        assert start(ledger, [other, "patient 7", "patient 8"]) == [1, 1, 1], "twice the same person is one"
        assert changes(ledger) == [("joined", 1, 2)]


def test_ids_do_not_lie_in_the_ledger_and_the_key_is_its_own(path: Path, tmp_path: Path):
    ids = [f"patient number {k}" for k in range(20)]
    keys = []
    for where in (path, tmp_path / "another.db"):
        with Ledger(where) as ledger:
            start(ledger, ids)
            keys.append(bytes.fromhex(ledger.life().key))
        assert b"patient number" not in where.read_bytes()
    assert set(marks_of(keys[0], ids)).isdisjoint(marks_of(keys[1], ids))
    assert len(set(marks_of(keys[0], ids))) == 20


def test_records_that_were_charged_before_their_ids_were_known_are_the_first_cohort(path: Path):
    with Ledger(path) as ledger:
        ledger.bind("north", commit)
        ledger.open_account("north", BUDGET)
        spend(ledger, "one", 1)
        assert start(ledger, ["a", "b", "c"], ["c"]) == [1, 1, 0]
        assert start(ledger, ["a", "b", "c", "d"]) == [1, 1, 1, 2], "c may have been among those who were charged"


def test_a_ledger_that_changed_hands_cannot_begin_to_know_ids(path: Path):
    """Who was among earlier records is not known: whoever comes back would look new."""
    with Ledger(path) as ledger:
        ledger.bind("north", commit)
        ledger.open_account("north", BUDGET)
        ledger.rebind("north", lambda salt: "other records", "moved", "Dr. Weiss")
        spend(ledger, "one", 1)
        with pytest.raises(BadInput, match="who was among the earlier records is not known"):
            ledger.call_roll("patient", ["a"])
        assert ledger.life() is None


def test_people_are_known_by_one_column(path: Path):
    with Ledger(path) as ledger:
        start(ledger, ["a"])
        with pytest.raises(BadInput, match="by the column 'patient', not by 'case'"):
            ledger.call_roll("case", ["1"])
        assert changes(ledger) == [("joined", 1, 1)]


def test_an_older_copy_of_ledger_or_ids_is_noticed(path: Path, tmp_path: Path):
    with Ledger(path) as ledger:
        start(ledger, ["a", "b"])
    shutil.copy(path, tmp_path / "old.db")
    with Ledger(path) as ledger:
        spend(ledger, "one", 1)
        start(ledger, ["a", "b", "c"])
    shutil.copy(tmp_path / "old.db", path)
    with pytest.raises(LedgerDamaged, match="replaced by an older copy"):
        Ledger(path)
    path.unlink()
    with pytest.raises(LedgerDamaged, match="is gone"):
        Ledger(path)


@pytest.mark.parametrize("how", ["DELETE FROM releases", "exchanged"])
def test_ids_that_were_taken_out_or_exchanged_are_noticed(path: Path, how: str):
    """Forget who was there, and they would be new: the entries say which ids belong to them."""
    with Ledger(path) as ledger:
        start(ledger, ["a", "b"])
        spend(ledger, "one", 1)
        other = marks_of(bytes.fromhex(ledger.life().key), ["x", "y"])
    with sqlite3.connect(path) as db:
        if how == "exchanged":
            (number,) = db.execute("SELECT number FROM releases").fetchone()
            db.execute("DELETE FROM releases")
            db.execute("INSERT INTO releases VALUES (?, ?)", (number, b"".join(sorted(other))))
        else:
            db.execute(how)
    db.close()
    with pytest.raises(LedgerDamaged, match="changed outside sordino"):
        Ledger(path)  # by the seal
    unsealed(path)
    with pytest.raises(LedgerDamaged, match=r"ids of entry|stored release of entry"), Ledger(path) as ledger:
        ledger.call_roll("patient", ["a", "b"])


def unsealed(path: Path) -> None:
    """An anchor without a seal, as a killed process leaves it: the chain alone has to notice."""
    write_anchor(path, read_anchor(path)._replace(seal=None))


def test_verify_notices_ids_that_are_gone(path: Path):
    with Ledger(path) as ledger:
        start(ledger, ["a", "b"])
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM releases")
    db.close()
    unsealed(path)
    with pytest.raises(LedgerDamaged, match="ids of entry 3"), Ledger(path, readonly=True) as ledger:
        ledger.verify()


def test_two_processes_call_one_roll(path: Path):
    def one() -> None:
        with Ledger(path) as ledger:
            assert start(ledger, ["a", "b", "c"]) == [1, 1, 1]

    assert all_end_well(one, one, one)
    with Ledger(path) as ledger:
        assert changes(ledger) == [("joined", 1, 3)]
        spend(ledger, "one", 1)

    def two() -> None:
        with Ledger(path) as ledger:
            assert start(ledger, ["a", "b", "c", "d"]) == [1, 1, 1, 2]

    assert all_end_well(two, two, two)
    with Ledger(path) as ledger:
        assert changes(ledger) == [("joined", 1, 3), ("joined", 2, 1)]


def test_killed_while_the_roll_is_called_it_is_called_again(path: Path, monkeypatch: pytest.MonkeyPatch):
    with Ledger(path) as ledger:
        start(ledger, ["a"])
        spend(ledger, "one", 1)
    noted = rolls._note

    def deadly(*given: object) -> object:
        noted(*given)
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    def dies() -> None:
        monkeypatch.setattr(rolls, "_note", deadly)
        with Ledger(path) as ledger:
            ledger.call_roll("patient", ["a", "b"])

    assert not ended_well(forked(dies))
    with Ledger(path) as ledger:
        assert changes(ledger) == [("joined", 1, 1)]
        assert start(ledger, ["a", "b"]) == [1, 2]
        assert ledger.epsilon()["north (since 2)"] == 0
    with Ledger(path) as ledger:  # and one that died between the roll and the first charge begins where it was
        assert start(ledger, ["a", "b"]) == [1, 2]
        assert ledger.epsilon()["north (since 2)"] == 0


def test_who_takes_part_in_a_run_is_settled_once(path: Path):
    with Ledger(path) as ledger:
        start(ledger, ["a"])
        spend(ledger, "one", 1)
        start(ledger, ["a", "b"])
        seats = ledger.settle("two", False, [2, 1], 2)
        assert (seats.cohorts, seats.count) == ((1, 2), 2)
        assert ledger.settle("two", False, [2], 1) == seats
        assert ledger.settle("two", True, [2], 1).cohorts == (2,), "held-out records are settled by themselves"
    with Ledger(path) as ledger:
        assert ledger.settle("two", False, [2], 1) == seats
        assert ledger.life().seats["two", False] == seats


def test_what_is_left_for_another_run_is_what_was_not_charged(path: Path):
    with Ledger(path) as ledger:
        start(ledger, ["a"])
        ledger.declare([Plan("north", "one", (GRADIENT,), 3)])
        assert ledger.left(["north"]) == {"north": 2.0}, "several runs may be declared before the first charge"
        ledger.charge([charge("round 1", "north", "one")])
        assert ledger.left(["north"])["north"] == 2.0 - ledger.epsilon()["north"]
        ledger.open_account("north (since 2)", Budget(float("inf"), 1e-5))
        assert ledger.left(["north (since 2)"]) == {"north (since 2)": float("inf")}


def test_an_account_whose_first_plan_leaves_no_room_for_a_filter_has_nothing_left_for_other_runs(path: Path):
    with Ledger(path) as ledger:
        start(ledger, ["a"])
        most = ledger.declare([Plan("north", "one", (GRADIENT,), 10_000)])["north"]
        ledger.charge([charge("round 1", "north", "one")])
        ledger.close_run("one")
        assert most > 1
        assert ledger.left(["north"]) == {"north": 0.0}
