"""Statements where records are held out: two accounts under one budget, told apart, and how records were parted."""

import json

import pytest

from sordino.privacy.held import HELD
from sordino.privacy.ledger import Charge, Ledger, LedgerPlan
from sordino.privacy.statement import export, statement, statement_text
from sordino.privacy.types import Budget, Event, Sampling

BUDGET = Budget(3.0, 1e-5)


def paid(book, simulated, counts=(4, 2)):
    for name, what, sampling, count in zip(
        ("north", "north" + HELD), ("gradient", "scores"), (Sampling.poisson(0.1), Sampling.full()), counts
    ):
        book.open_account(name, BUDGET, simulated=simulated)
        book.declare([LedgerPlan(name, "run", (Event(what, sampling, 3.0, 1, BUDGET.adjacency),), 5)])
        for step in range(count):
            book.charge([Charge(name, "run", f"step {step}", what, 1, "asked")])


@pytest.mark.parametrize(("ids", "words"), [("patient", "by their ids, column patient"), ("", "by their places")])
def test_a_site_reads_both_accounts_the_larger_and_how_records_were_parted(tmp_path, ids, words):
    with Ledger(tmp_path / "ledger.db") as book:
        key = book.split(0.25, ids, None if ids else lambda salt: "f" * 64)
        paid(book, simulated=False)
        costs = book.epsilon()
        told = {name: statement(book, name) for name in ("north", "north" + HELD)}
        everything = json.dumps(export(book))
    for part, name in (("training", "north"), ("held out", "north" + HELD)):
        parts = told[name]["held_out"]
        assert parts["part"] == part
        assert parts["training_epsilon"] == costs["north"]
        assert parts["held_epsilon"] == costs["north" + HELD]
        assert parts["larger_epsilon"] == max(costs.values())
        text = statement_text(told[name])
        assert f"Privacy statement of client north, {part.replace(' ', '-')} records" in text
        assert "Two accounts under one budget" in text
        assert "a share of 0.25" in text
        assert words in text
        assert key.hex() not in text
    assert key.hex() not in everything


def test_choosing_by_paid_estimates_leaves_the_list_of_what_is_not_covered(tmp_path):
    with Ledger(tmp_path / "ledger.db") as book:
        paid(book, simulated=True)
        book.open_account("south", BUDGET, simulated=True)
        held, plain = statement(book, "north"), statement(book, "south")
    assert len(held["not_covered"]) == len(plain["not_covered"])
    assert any(one.startswith("tuning") for one in plain["not_covered"])
    assert not any(one.startswith("tuning") for one in held["not_covered"])
    assert any("by those it is covered" in one for one in held["not_covered"])
    assert plain["held_out"] is None
    assert "Two accounts" not in statement_text(plain)
    assert "by the seed of the simulation" in statement_text(held)


def test_an_account_that_is_not_private_claims_nothing_for_its_part(tmp_path):
    with Ledger(tmp_path / "ledger.db") as book:
        paid(book, simulated=True)
        book.mark_not_private("north" + HELD, "noise was not secret")
        told = statement(book, "north")
    assert told["held_out"]["held_epsilon"] is None
    assert told["held_out"]["larger_epsilon"] is None
    assert "held-out records:  epsilon infinite" in statement_text(told)
