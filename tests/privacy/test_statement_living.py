"""Statements where data live: cohorts and what each has spent, who went when, and what cannot be taken back."""

from __future__ import annotations

import json

import pytest
from ledger_cases import GRADIENT, charge

from sordino.privacy.held import HELD
from sordino.privacy.ledger import Ledger, Plan
from sordino.privacy.living import since
from sordino.privacy.statement import export, statement, statement_text
from sordino.privacy.types import Budget

BUDGET = Budget(3.0, 1e-5)


@pytest.fixture
def book(tmp_path):
    """A run of the first cohort; one of three goes and another comes; a run of both; the one is back."""
    with Ledger(tmp_path / "ledger.db") as ledger:
        for run, ids, cohorts in (("one", "abc", (1,)), ("two", "bcd", (1, 2)), ("", "abcd", ())):
            ledger.call_roll("patient", list(ids))
            account = ledger.bind("north", lambda salt: "records")
            for part in ("", HELD):
                names = [account + part + since(k + 1) for k in range(ledger.life().cohorts)]
                ledger.open_accounts(dict.fromkeys(names, BUDGET))
            own = ["north" + since(k) for k in cohorts]
            if own:
                ledger.settle(run, False, cohorts, len(ids))
                ledger.declare([Plan(name, run, (GRADIENT,), 2) for name in own])
                ledger.charge([charge("round 1", name, run) for name in own])
                ledger.close_run(run)
        yield ledger


def test_each_cohort_has_its_figures_and_its_history(book: Ledger):
    spent = book.epsilon()
    told = statement(book, "north")["living"]
    assert (told["by"], told["cohort"]) == ("patient", 1)
    assert [(one["cohort"], one["joined"], one["away"], one["spent_epsilon"]) for one in told["cohorts"]] == [
        (1, 3, 0, spent["north"]),
        (2, 1, 0, spent["north (since 2)"]),
    ]
    assert [(one["what"], one["count"]) for one in told["changes"]] == [
        ("joined", 3),
        ("withdrawn", 1),
        ("returned", 1),
    ]
    assert told["runs"] == [{"run": "one", "count": 3}, {"run": "two", "count": 3}]
    later = statement(book, "north (since 2)")["living"]
    assert [(one["what"], one["count"]) for one in later["changes"]] == [("joined", 1)]
    assert later["runs"] == [{"run": "two", "count": 3}]
    held = statement(book, "north" + HELD + since(2))
    assert held["living"]["runs"] == []
    assert held["held_out"]["part"] == "held out"
    assert held["held_out"]["training_epsilon"] == spent["north (since 2)"]


def test_whoever_went_is_covered_by_what_was_spent_by_then(book: Ledger):
    change = statement(book, "north")["living"]["changes"][1]
    first = book.epsilon(["north"], "one")["north"]
    assert change["epsilon"] == pytest.approx(first)
    assert change["epsilon"] < book.epsilon()["north"]
    book.mark_not_private("north", "somebody saw the noise")
    assert statement(book, "north")["living"]["changes"][1]["epsilon"] is None


def test_it_is_said_in_plain_words(book: Ledger):
    text = statement_text(statement(book, "north (since 2)"))
    assert "Privacy statement of client north (since 2), training records" in text
    assert "cohort 1, since" in text
    assert "3 records, 0 of them away" in text
    assert "(this account)" in text
    assert "What cannot be taken back" in text
    assert "not unlearnt" in text
    first = statement_text(statement(book, "north"))
    assert "1 withdrawn, when epsilon" in first
    assert "Privacy statement of client north (since 2), held-out records" in statement_text(
        statement(book, "north" + HELD + since(2))
    )


def test_neither_ids_nor_their_key_are_told(book: Ledger):
    everything = json.dumps(export(book)) + "".join(statement_text(statement(book, a.client)) for a in book.accounts())
    assert book.life().key not in everything


def test_where_data_do_not_live_nothing_is_said(tmp_path):
    with Ledger(tmp_path / "ledger.db") as ledger:
        ledger.open_account("north", BUDGET)
        told = statement(ledger, "north")
    assert told["living"] is None
    assert "taken back" not in statement_text(told)
