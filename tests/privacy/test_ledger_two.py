"""Several processes on one ledger: no charge is lost, and together they cannot overdraw."""

from __future__ import annotations

from pathlib import Path

import pytest
from ledger_cases import charge, ended_well, forked, plan, small_ledger

from sordino.errors import BudgetRefused
from sordino.privacy import accounting
from sordino.privacy.ledger import Ledger
from sordino.privacy.types import Budget, Event, Sampling

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

    children = [forked(lambda name=name: hammer(name)) for name in ("one", "two")]  # type: ignore[misc]
    assert all([ended_well(child) for child in children])
    assert total(path) == 2 * CHARGES


def test_the_same_key_from_two_processes_is_two_charges(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    small_ledger(path, turns=1000, epsilon=1e6).close()

    def hammer() -> None:
        with Ledger(path) as ledger:
            for i in range(20):
                ledger.charge([charge(f"round {i}", count=1)])

    children = [forked(hammer), forked(hammer)]
    assert all([ended_well(child) for child in children])
    assert total(path) == 40


def test_together_they_stop_exactly_at_the_cap(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    small_ledger(path, turns=5).close()  # 50 gradients

    def hammer(name: str) -> None:
        with Ledger(path) as ledger:
            with pytest.raises(BudgetRefused):
                for i in range(CHARGES):
                    ledger.charge([charge(f"{name} {i}", count=1)])

    children = [forked(lambda name=name: hammer(name)) for name in ("one", "two")]  # type: ignore[misc]
    assert all([ended_well(child) for child in children])
    assert total(path) == 50


def test_plans_declared_at_once_fit_the_budget_together(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    event = Event("gradient", Sampling.poisson(0.05), 2.0, 10)
    with Ledger(path) as ledger:
        ledger.open_account("hospital 3", Budget(2.0, 1e-5))

    def declare(run: str) -> None:
        with Ledger(path) as ledger:
            ledger.declare([plan(20, run=run)])

    children = [forked(lambda run=run: declare(run)) for run in ("one", "two", "three")]  # type: ignore[misc]
    assert all([ended_well(child) for child in children])
    with Ledger(path) as ledger:
        turns = sum(standing.payable for standing in ledger.standings("hospital 3"))
    assert turns == accounting.affordable([event], Budget(2.0, 1e-5), 60)


def test_processes_that_create_it_at_once_share_one_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"

    def create(name: str) -> None:
        with Ledger(path) as ledger:
            ledger.open_account(name, Budget(2.0, 1e-5))

    children = [forked(lambda i=i: create(f"client {i}")) for i in range(6)]  # type: ignore[misc]
    assert all([ended_well(child) for child in children])
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
