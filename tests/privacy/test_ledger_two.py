"""Several processes on one ledger: no charge is lost, and together they cannot overdraw."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from ledger_cases import GRADIENT, all_end_well, charge, plan, small_ledger

from sordino.errors import BudgetRefused
from sordino.privacy import accounting
from sordino.privacy.book import Book
from sordino.privacy.ledger import Ledger, Plan
from sordino.privacy.planning import payable
from sordino.privacy.types import Budget

CHARGES = 60


def total(path: Path, client: str = "hospital 3") -> int:
    with Ledger(path) as ledger:
        ledger.verify()
        return sum(event.count for event in ledger.spent(client))


def test_no_charge_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    small_ledger(path, turns=1000, epsilon=1e6).close()

    def hammer(name: str) -> None:
        with Ledger(path) as ledger:
            for i in range(CHARGES):
                ledger.charge([charge(f"{name} {i}", count=1)])

    assert all_end_well(partial(hammer, "one"), partial(hammer, "two"))
    assert total(path) == 2 * CHARGES


def test_the_same_key_from_two_processes_is_two_charges(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    small_ledger(path, turns=1000, epsilon=1e6).close()

    def hammer() -> None:
        with Ledger(path) as ledger:
            for i in range(20):
                ledger.charge([charge(f"round {i}", count=1)])

    assert all_end_well(hammer, hammer)
    assert total(path) == 40


def test_together_they_stop_exactly_at_the_cap(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    small_ledger(path, turns=5).close()  # 50 gradients

    def hammer(name: str) -> None:
        with Ledger(path) as ledger, suppress(BudgetRefused):
            for i in range(CHARGES):
                ledger.charge([charge(f"{name} {i}", count=1)])
            raise AssertionError("one process alone could charge everything")

    assert all_end_well(partial(hammer, "one"), partial(hammer, "two"))
    assert total(path) == 50


def test_plans_declared_at_once_fit_the_budget_together(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with Ledger(path) as ledger:
        ledger.open_account("hospital 3", Budget(2.0, 1e-5))

    def declare(run: str) -> None:
        with Ledger(path) as ledger:
            ledger.declare([plan(20, run=run)])

    assert all_end_well(*(partial(declare, run) for run in ("one", "two", "three")))
    with Ledger(path) as ledger:
        turns = sum(standing.payable for standing in ledger.standings("hospital 3"))
    assert turns == accounting.affordable([GRADIENT], Budget(2.0, 1e-5), 60)


def test_a_plan_is_measured_again_when_another_one_came_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.db"
    budget = Budget(2.0, 1e-5)
    with Ledger(path) as ledger:
        ledger.open_account("hospital 3", budget)
        measured: list[dict[str, int]] = []

        def interrupted(book: Book, plans: Sequence[Plan], run_epsilon: float | None) -> dict[str, int]:
            measured.append(payable(book, plans, run_epsilon))
            if len(measured) == 1:
                with monkeypatch.context() as patch, Ledger(path) as other:
                    patch.setattr("sordino.privacy.ledger.payable", payable)
                    assert other.declare([plan(20, run="first")]) == {"hospital 3": 20}
            return measured[-1]

        monkeypatch.setattr("sordino.privacy.ledger.payable", interrupted)
        turns = ledger.declare([plan(20, run="second")])
    assert measured[0] == {"hospital 3": 20}
    assert turns == measured[1] == {"hospital 3": accounting.affordable([GRADIENT], budget, 100) - 20}


def test_processes_that_create_it_at_once_share_one_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"

    def create(name: str) -> None:
        with Ledger(path) as ledger:
            ledger.open_account(name, Budget(2.0, 1e-5))

    assert all_end_well(*(partial(create, f"client {i}") for i in range(6)))
    with Ledger(path) as ledger:
        ledger.verify()
        assert sorted(account.client for account in ledger.accounts()) == [f"client {i}" for i in range(6)]


def test_an_open_ledger_sees_what_another_one_charged(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with small_ledger(path, turns=2) as mine:
        with Ledger(path) as theirs:
            theirs.charge([charge("round 1"), charge("round 2")])
        with pytest.raises(BudgetRefused, match="20 of at most 20"):
            mine.charge([charge("round 3")])
