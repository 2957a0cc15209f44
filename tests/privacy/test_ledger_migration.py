"""Ledgers of version 2, in which PLD paid for every run: they open, are migrated, and never show less than before."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from sordino.errors import BadInput, BudgetRefused
from sordino.privacy.accounting import calibrate, composed_epsilon
from sordino.privacy.ledger import Charge, Ledger, Plan
from sordino.privacy.ledger_format import START, VERSION, Anchor, Entry, link, migrate, write_anchor
from sordino.privacy.statement import statement, statement_text
from sordino.privacy.types import Budget, Event, Sampling

TIME = "2025-01-01T00:00:00+00:00"
FIRST = Event("gradient", Sampling.full(), float(calibrate(1.0, 1e-5, 1.0, 100)))
SECOND = Event("gradient", Sampling.poisson(0.01), 0.8)


def plan(run: str, event: Event, turns: int) -> dict[str, Any]:
    turn = {"what": "gradient", "scheme": str(event.sampling.scheme), "rate": event.sampling.rate}
    turn |= {"noise": event.noise, "count": 1}
    body = {"turn": [turn], "turns": turns, "payable": turns, "caps": {"gradient": turns}}
    return {"kind": "plan", "client": "x", "run": run, "body": json.dumps(body)}


def charges(run: str, first: int, last: int) -> list[dict[str, Any]]:
    about = {"kind": "charge", "client": "x", "run": run, "what": "gradient", "attempt": 0, "amount": 1, "request": "r"}
    return [{**about, "key": f"round {n}", "used": n} for n in range(first, last + 1)]


def old_ledger(path: Path, entries: list[dict[str, Any]], adjacency: str = "zero-out", epsilon: float = 1.0) -> None:
    """A ledger as version 2 wrote it."""
    account = {"accountant": "pld", "adjacency": adjacency, "delta": 1e-5, "epsilon": epsilon, "simulated": False}
    first = [
        {"kind": "ledger", "body": '{"id": "two", "version": 2}'},
        {"kind": "account", "client": "x", "body": json.dumps(account)},
    ]
    db, head = sqlite3.connect(path, isolation_level=None), START
    migrate(db, 0, target=2)
    for number, fields in enumerate(first + entries, 1):
        entry = Entry(number, TIME, **fields)
        head = link(head, entry)
        db.execute(f"INSERT INTO entries VALUES ({', '.join('?' * 13)})", (*entry, head))
    db.close()
    write_anchor(path, Anchor("two", number, head))


CLOSED = {"kind": "closed", "client": "x", "run": "a"}


def test_one_run_goes_on_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    old_ledger(path, [plan("a", FIRST, 100), *charges("a", 1, 3)])
    with Ledger(path) as ledger:
        assert ledger.declare([Plan("x", "a", (FIRST,), 100)]) == {"x": 100}
        ledger.charge([Charge("x", "a", "round 4", "gradient", 1, "r")])
        told = statement(ledger, "x")
        assert told["composition"] == "declared in advance (PLD)"
        assert told["spent_epsilon"] == composed_epsilon([[FIRST.times(4)]], [1e-5])[0]
        kinds = [row[0] for row in ledger._file.db.execute("SELECT kind FROM entries ORDER BY number")]
        assert kinds == ["ledger", "account", "plan", *["charge"] * 3, "migrated", "charge"]
        assert ledger._file.db.execute("PRAGMA user_version").fetchone()[0] == VERSION
        ledger.verify()


def test_runs_that_pld_paid_for_one_after_the_other_are_shown_by_the_filter_and_end(tmp_path: Path) -> None:
    """The first run was closed early and the rest spent otherwise: no composition covers that, and it is said."""
    path = tmp_path / "l.db"
    runs = [plan("a", FIRST, 100), *charges("a", 1, 40), CLOSED, plan("b", SECOND, 10), *charges("b", 1, 4)]
    old_ledger(path, runs)
    before = composed_epsilon([[FIRST.times(40), SECOND.times(4)]], [1e-5])[0]
    assert before < 1.0
    with Ledger(path) as ledger:
        told = statement(ledger, "x")
        assert told["composition"].startswith("filter")
        assert told["spent_epsilon"] >= before
        assert ledger.overdrawn("x")
        assert "the budget is NOT guaranteed" in statement_text(told)
        assert not any(standing.open for standing in ledger.standings("x"))
        for run, event in (("a", FIRST), ("b", SECOND), ("c", FIRST)):
            turns = {"a": 100, "b": 10, "c": 1}[run]
            ledger.declare([Plan("x", run, (event,), turns)])
            with pytest.raises(BudgetRefused):
                ledger.charge([Charge("x", run, "new", "gradient", 1, "r")])
        assert told["spent_epsilon"] == ledger.epsilon()["x"]


def test_a_second_run_that_the_filter_can_pay_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    runs = [plan("a", FIRST, 20), *charges("a", 1, 20), CLOSED, plan("b", FIRST, 10), *charges("b", 1, 5)]
    old_ledger(path, runs)
    with Ledger(path) as ledger:
        ledger.charge([Charge("x", "b", "round 6", "gradient", 1, "r")])
        assert not ledger.overdrawn("x")
        before = composed_epsilon([[FIRST.times(26)]], [1e-5])[0]
        assert before <= ledger.epsilon()["x"] <= 1.0


def test_what_is_left_of_the_first_plans_needs_the_filter_too_where_a_second_run_was_charged(tmp_path: Path) -> None:
    """Both still open: their caps fitted PLD together, which covers them only as if declared at once."""
    path = tmp_path / "l.db"
    other = Event("gradient", Sampling.poisson(0.1), 3.0)
    runs = [plan("a", FIRST, 70), *charges("a", 1, 5), plan("b", other, 60), *charges("b", 1, 20)]
    old_ledger(path, runs)
    with Ledger(path) as ledger:
        turns = ledger.declare([Plan("x", "a", (FIRST,), 70)])["x"]
        assert turns < 70
        for n in range(turns - 5):
            ledger.charge([Charge("x", "a", f"again {n}", "gradient", 1, "r")])
        with pytest.raises(BudgetRefused):
            ledger.charge([Charge("x", "a", "more", "gradient", 1, "r")])
        assert ledger.epsilon()["x"] <= 1.0


def test_an_account_under_add_remove_is_shown_with_a_note_and_goes_on_as_zero_out(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    old_ledger(path, [plan("a", FIRST, 100), *charges("a", 1, 3)], adjacency="add-remove")
    with Ledger(path) as ledger:
        before = statement(ledger, "x")
        assert (before["adjacency"], before["spent_epsilon"] > 0) == ("add-remove", True)
        assert "the number of records is public all the same" in statement_text(before)
        ledger.open_account("x", Budget(1.0, 1e-5))
        assert ledger.declare([Plan("x", "a", (FIRST,), 100)]) == {"x": 100}
        ledger.charge([Charge("x", "a", "round 4", "gradient", 1, "r")])
    with Ledger(path, readonly=True) as ledger:
        after = statement(ledger, "x")
        assert (after["adjacency"], ledger.account("x").opened) == ("zero-out", Budget(1.0, 1e-5))
        assert after["spent_epsilon"] > before["spent_epsilon"]


@pytest.mark.parametrize("simulated", [True, False])
def test_a_new_account_cannot_promise_add_remove(tmp_path: Path, simulated: bool) -> None:
    with Ledger(tmp_path / "l.db") as ledger, pytest.raises(BadInput, match="use adjacency 'zero-out'"):
        ledger.open_account("x", Budget(1.0, 1e-5, "add-remove"), simulated=simulated)  # type: ignore[arg-type]


class TestBinding:
    """Whose ledger it is."""

    @staticmethod
    def commit(salt: bytes) -> str:
        return salt.hex() + "records"

    def test_it_is_tied_at_first_use_and_found_again(self, tmp_path: Path) -> None:
        with Ledger(tmp_path / "l.db") as ledger:
            assert ledger.bind("x", self.commit) == ledger.bind("x", self.commit) == "x"
            ledger.open_account("x", Budget(1.0, 1e-5))
            assert len(ledger.bindings()) == 1
            told = statement(ledger, "x")
            assert [one["site"] for one in told["bindings"]] == ["x"]
            assert ledger.bindings()[0].salt not in json.dumps({**told, "bindings": [{"site": "x"}]})
            assert "salt" not in json.dumps(told)

    def test_an_old_ledger_of_another_site_is_refused_until_an_officer_moves_it(self, tmp_path: Path) -> None:
        path = tmp_path / "l.db"
        old_ledger(path, [plan("a", FIRST, 100), *charges("a", 1, 3)])
        with Ledger(path) as ledger:
            with pytest.raises(BadInput, match=r"holds the account of 'x'.*ledger rebind"):
                ledger.bind("y", self.commit)
            with pytest.raises(BadInput, match="officer"):
                ledger.rebind("y", self.commit, "renamed", " ")
            assert ledger.rebind("y", self.commit, "renamed", "Dr. Weiss") == "x"
            assert ledger.bind("y", self.commit) == "x"
            text = statement_text(statement(ledger, "x"))
            assert "site y, records" in text
            assert "approved by Dr. Weiss: renamed" in text

    def test_other_records_are_an_officers_act(self, tmp_path: Path) -> None:
        with Ledger(tmp_path / "l.db") as ledger:
            ledger.bind("x", self.commit)
            with pytest.raises(BadInput, match="not those that"):
                ledger.bind("x", lambda salt: self.commit(salt) + " and one more")

    def test_a_simulation_needs_no_binding(self, tmp_path: Path) -> None:
        with Ledger(tmp_path / "l.db") as ledger:
            ledger.open_accounts({"x": Budget(1.0, 1e-5), "y": Budget(2.0, 1e-5)}, simulated=True)
            assert statement(ledger, "x")["bindings"] == []
