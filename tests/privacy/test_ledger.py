"""The ledger: budgets, plans, charges, retries. What a client may rely on."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pytest
from ledger_cases import GRADIENT, LOSS, OTHER_REQUEST, REQUEST, charge, ended_well, forked, plan, small_ledger

from sordino.errors import BadInput, BudgetRefused, SordinoError
from sordino.privacy import accounting, planning
from sordino.privacy.accounting import filters
from sordino.privacy.ledger import Ledger, Plan
from sordino.privacy.statement import statement
from sordino.privacy.types import Adjacency, Budget, Event, Sampling

BUDGET = Budget(2.0, 1e-5)


def cost(*events: Event) -> float:
    return float(accounting.composed_epsilon([list(events)], [1e-5])[0])


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.db")


def used(ledger: Ledger, client: str = "hospital 3") -> dict[str, int]:
    counts: dict[str, int] = {}
    for event in ledger.spent(client):
        counts[event.what] = counts.get(event.what, 0) + event.count
    return counts


def left(ledger: Ledger, client: str) -> dict[str, int | None]:
    """How often each release of run a may still happen (None: no limit)."""
    (one,) = [standing for standing in ledger.standings(client) if standing.plan.run == "a"]
    caps = {e.what: one.cap(e.what) for e in one.plan.turn}
    return {w: None if cap is None else (cap - one.used.get(w, 0) if one.open else 0) for w, cap in caps.items()}


class TestAccounts:
    def test_opening_twice_changes_nothing(self, ledger: Ledger) -> None:
        ledger.open_account("hospital 3", BUDGET)
        before = ledger.head
        ledger.open_account("hospital 3", BUDGET)
        assert ledger.head == before
        assert [a.client for a in ledger.accounts()] == ["hospital 3"]

    @pytest.mark.parametrize("other", [Budget(3.0, 1e-5), Budget(2.0, 1e-6), Budget(2.0, 1e-5, Adjacency.REPLACE_ONE)])
    def test_another_budget_is_refused_and_names_the_remedy(self, ledger: Ledger, other: Budget) -> None:
        ledger.open_account("hospital 3", BUDGET)
        with pytest.raises(BadInput, match="top_up"):
            ledger.open_account("hospital 3", other)

    def test_simulation_and_deployment_do_not_mix(self, ledger: Ledger) -> None:
        ledger.open_account("hospital 3", BUDGET, simulated=True)
        with pytest.raises(BadInput, match="simulated"):
            ledger.open_account("hospital 3", BUDGET, simulated=False)

    def test_another_accountant_is_refused(self, ledger: Ledger) -> None:
        ledger.open_account("hospital 3", BUDGET)
        with pytest.raises(BadInput, match="'pld', not 'rdp'"):
            ledger.open_account("hospital 3", BUDGET, accountant="rdp")

    def test_a_formula_that_only_picks_noise_cannot_keep_a_ledger(self, ledger: Ledger) -> None:
        with pytest.raises(BadInput, match="closed-form-selection"):
            ledger.open_account("hospital 3", BUDGET, accountant="closed-form-selection")

    def test_a_ledger_that_does_not_wait_for_the_disk_takes_simulated_accounts_only(self, tmp_path: Path) -> None:
        with Ledger(tmp_path / "fast.db", durable=False) as fast:
            fast.open_account("a", BUDGET, simulated=True)
            with pytest.raises(BadInput, match="durable"):
                fast.open_account("b", BUDGET)

    def test_top_up_raises_the_budget_and_is_kept_with_reason_and_officer(self, ledger: Ledger) -> None:
        ledger.open_account("hospital 3", BUDGET)
        ledger.top_up("hospital 3", 0.5, "second study approved", "Dr. Weiss")
        account = ledger.account("hospital 3")
        assert account.budget.epsilon == 2.5
        assert account.opened.epsilon == 2.0
        assert [(t.epsilon, t.reason, t.officer) for t in account.top_ups] == [
            (0.5, "second study approved", "Dr. Weiss")
        ]
        ledger.open_account("hospital 3", BUDGET)  # the study's file still says 2.0

    @pytest.mark.parametrize("amount", [0.0, -1.0, math.inf, math.nan])
    def test_a_top_up_is_a_positive_finite_number(self, ledger: Ledger, amount: float) -> None:
        ledger.open_account("hospital 3", BUDGET)
        with pytest.raises(BadInput, match="positive finite"):
            ledger.top_up("hospital 3", amount, "why", "who")


class TestPlans:
    def test_a_plan_is_paid_up_to_the_last_turn_that_fits(self, ledger: Ledger) -> None:
        ledger.open_account("hospital 3", BUDGET)
        turns = ledger.declare([plan(1000)])["hospital 3"]
        assert cost(GRADIENT.times(10 * turns)) <= 2.0 < cost(GRADIENT.times(10 * (turns + 1)))

    def test_a_second_run_gets_what_the_first_left(self, ledger: Ledger) -> None:
        """Both are declared before anything is released, so they compose like one: by the accountant."""
        ledger.open_account("hospital 3", BUDGET)
        ledger.declare([plan(8, run="a")])
        second = ledger.declare([plan(1000, run="b", turn=(GRADIENT, LOSS))])["hospital 3"]

        def both(turns: int) -> float:
            return cost(GRADIENT.times(80), GRADIENT.times(10 * turns), LOSS.times(turns))

        assert both(second) <= 2.0 < both(second + 1)

    def test_what_a_plan_did_not_use_is_free_after_it_is_closed(self, ledger: Ledger) -> None:
        """For releases of the same rate and noise: those were declared before the first release, under another name."""
        ledger.open_account("hospital 3", BUDGET)
        most = ledger.declare([plan(1000, run="a")])["hospital 3"]
        ledger.charge([charge("round 1", run="a")])
        assert ledger.declare([plan(1000, run="b")]) == {"hospital 3": 0}
        ledger.close_plan("hospital 3", "a")
        assert ledger.declare([plan(1000, run="c")]) == {"hospital 3": most - 1}

    def test_closing_a_run_closes_every_clients_plan(self, ledger: Ledger) -> None:
        ledger.open_accounts({"x": BUDGET, "y": BUDGET})
        ledger.declare([plan(3, client="x"), plan(3, client="y")])
        ledger.close_run("a")
        for client in ("x", "y"):
            with pytest.raises(BudgetRefused, match="closed"):
                ledger.charge([charge("round 1", client=client)])
            assert left(ledger, client) == {"gradient": 0}

    def test_the_same_plan_again_stands_as_it_was(self, ledger: Ledger) -> None:
        ledger.open_account("hospital 3", BUDGET)
        first = ledger.declare([plan(1000)])
        ledger.charge([charge("round 1")])
        before = ledger.head
        assert ledger.declare([plan(1000)]) == first
        assert ledger.head == before

    def test_another_plan_under_the_same_run_is_refused(self, ledger: Ledger) -> None:
        ledger.open_account("hospital 3", BUDGET)
        ledger.declare([plan(3)])
        for other in (plan(4), plan(3, turn=(GRADIENT, LOSS))):
            with pytest.raises(BadInput, match="new run name"):
                ledger.declare([other])

    def test_a_plan_that_was_cut_short_grows_after_a_top_up(self, ledger: Ledger) -> None:
        ledger.open_account("hospital 3", BUDGET)
        short = ledger.declare([plan(1000)])["hospital 3"]
        ledger.charge([charge("round 1")])
        ledger.top_up("hospital 3", 1.0, "more rounds", "Dr. Weiss")
        longer = ledger.declare([plan(1000)])["hospital 3"]
        assert longer > short
        order = planning.order_of(ledger._file.book, "hospital 3")
        rooms = [filters.divergence([GRADIENT.times(10 * (longer + k))], order) for k in (0, 1)]
        assert rooms[0] <= filters.room(Budget(3.0, 1e-5), order) < rooms[1]  # what grew later is the filter's
        assert left(ledger, "hospital 3") == {"gradient": 10 * longer - 10}

    def test_a_closed_plan_declared_again_goes_on_where_it_was(self, ledger: Ledger) -> None:
        ledger.open_account("hospital 3", BUDGET)
        ledger.declare([plan(5)])
        ledger.charge([charge("round 1"), charge("round 2")])
        ledger.close_plan("hospital 3", "a")
        assert ledger.declare([plan(5)]) == {"hospital 3": 5}
        assert left(ledger, "hospital 3") == {"gradient": 30}

    def test_a_reopened_plan_cannot_take_back_what_another_run_was_promised(self, ledger: Ledger) -> None:
        ledger.open_account("hospital 3", BUDGET)
        turn = (GRADIENT, Event("loss", Sampling.full(), 8.0))
        assert ledger.declare([plan(1000, run="a", turn=turn)])["hospital 3"] > 3
        ledger.charge([charge(f"round {i}", run="a") for i in range(3)])  # three turns of gradients, no loss
        ledger.close_plan("hospital 3", "a")
        ledger.declare([plan(1000, run="b")])
        again = ledger.declare([plan(1000, run="a", turn=turn)])["hospital 3"]
        assert again == 3  # the gradients that were declared first and that run b is not to make: those it made
        standings = ledger.standings("hospital 3")
        assert [s.caps for s in standings if s.plan.run == "a"] == [{"gradient": 30, "loss": 3}]
        assert cost(*(e.times(s.caps[e.what]) for s in standings for e in s.plan.turn if s.caps)) <= 2.0

    def test_noise_zero_on_a_finite_budget_is_refused(self, ledger: Ledger) -> None:
        ledger.open_account("hospital 3", BUDGET)
        with pytest.raises(BudgetRefused, match="no noise"):
            ledger.declare([plan(1, turn=(Event("gradient", Sampling.full(), 0.0),))])

    def test_an_event_of_another_adjacency_is_refused(self, ledger: Ledger) -> None:
        ledger.open_account("hospital 3", BUDGET)
        foreign = Event("gradient", Sampling.fixed(5, 100), 2.0, 1, Adjacency.REPLACE_ONE)
        with pytest.raises(BadInput, match="adjacency"):
            ledger.declare([plan(1, turn=(foreign,))])

    def test_public_data_may_release_anything_any_number_of_times(self, ledger: Ledger) -> None:
        ledger.open_account("open data", Budget(math.inf, 1e-5))
        bare = Event("gradient", Sampling.full(), 0.0)
        assert ledger.declare([Plan("open data", "a", (bare,), 2)]) == {"open data": 2}
        ledger.charge([charge("round 1", client="open data", count=500)])
        assert left(ledger, "open data") == {"gradient": None}
        assert ledger.epsilon() == {"open data": math.inf}
        assert used(ledger, "open data") == {"gradient": 500}

    @pytest.mark.parametrize(
        ("bad", "word"),
        [
            (plan(-1), "turns"),
            (plan(1, turn=()), "release"),
            (plan(1, turn=(GRADIENT, GRADIENT)), "twice"),
            (plan(1, turn=(GRADIENT.times(0),)), "count"),
            (plan(1, run=""), "run name"),
            (plan(1, client="nobody"), "open_account"),
        ],
    )
    def test_senseless_plans_are_refused(self, ledger: Ledger, bad: Plan, word: str) -> None:
        ledger.open_account("hospital 3", BUDGET)
        with pytest.raises(BadInput, match=word):
            ledger.declare([bad])

    def test_one_plan_per_client_and_call(self, ledger: Ledger) -> None:
        ledger.open_account("hospital 3", BUDGET)
        with pytest.raises(BadInput, match="one plan per client"):
            ledger.declare([plan(1, run="a"), plan(1, run="b")])


class TestCharges:
    def test_exactly_the_planned_number_of_turns_can_be_charged(self, tmp_path: Path) -> None:
        with small_ledger(tmp_path / "l.db", turns=5) as ledger:
            for i in range(5):
                ledger.charge([charge(f"round {i}")])
            with pytest.raises(BudgetRefused, match=r"'hospital 3'.*'gradient'.*50 of at most 50.*top_up"):
                ledger.charge([charge("round 5")])
            assert used(ledger) == {"gradient": 50}

    def test_one_refused_row_refuses_the_whole_round(self, ledger: Ledger) -> None:
        ledger.open_accounts({"x": BUDGET, "y": BUDGET})
        ledger.declare([plan(2, client="x"), plan(1, client="y")])
        ledger.charge([charge("round 1", client="x"), charge("round 1", client="y")])
        before = ledger.head
        with pytest.raises(BudgetRefused, match="'y'"):
            ledger.charge([charge("round 2", client="x"), charge("round 2", client="y")])
        assert ledger.head == before
        assert used(ledger, "x") == {"gradient": 10}

    def test_copies_of_one_client_in_a_round_add_up(self, tmp_path: Path) -> None:
        with small_ledger(tmp_path / "l.db", turns=3) as ledger:
            recorded = ledger.charge([charge(f"round 1 copy {i}") for i in range(3)])
            assert [entry.used for entry in recorded] == [10, 20, 30]
            assert ledger.standings("hospital 3")[0].cap("gradient") == 30
            with pytest.raises(BudgetRefused):
                ledger.charge([charge("round 2 copy 0", count=1)])

    def test_copies_that_overdraw_only_together_are_refused(self, tmp_path: Path) -> None:
        with small_ledger(tmp_path / "l.db", turns=2) as ledger, pytest.raises(BudgetRefused):
            ledger.charge([charge(f"round 1 copy {i}") for i in range(3)])

    def test_at_a_site_a_repeated_key_is_a_new_charge(self, tmp_path: Path) -> None:
        with small_ledger(tmp_path / "l.db", turns=3) as ledger:
            attempts = [ledger.charge([charge("round 1")])[0].attempt for _ in range(3)]
            assert attempts == [0, 1, 2]
            assert used(ledger) == {"gradient": 30}
            with pytest.raises(BudgetRefused):
                ledger.charge([charge("round 1")])

    def test_in_simulation_the_same_draw_is_not_charged_again(self, tmp_path: Path) -> None:
        with small_ledger(tmp_path / "l.db", turns=1, simulated=True) as ledger:
            first = ledger.charge([charge("round 1")], replay=True)
            again = ledger.charge([charge("round 1")], replay=True)
            assert first == again
            assert ledger.head[0] == first[0].number, "nothing was recorded the second time"
            assert used(ledger) == {"gradient": 10}

    @pytest.mark.parametrize("other", [charge("round 1", request=OTHER_REQUEST), charge("round 1", count=9)])
    def test_in_simulation_a_draw_cannot_answer_another_request(self, tmp_path: Path, other: object) -> None:
        with small_ledger(tmp_path / "l.db", simulated=True) as ledger:
            ledger.charge([charge("round 1")], replay=True)
            with pytest.raises(BadInput, match="another request"):
                ledger.charge([other], replay=True)  # type: ignore[list-item]

    def test_what_is_used_once_is_not_charged_again(self, tmp_path: Path) -> None:
        """Not with the same request, not after a restart, not when the copies are forgotten or the plan is closed."""
        once = charge("round 1 masks 7f3a")
        with small_ledger(tmp_path / "l.db", turns=5) as ledger:
            ledger.charge([once], once=True)
            ledger.store(once.client, once.run, once.key, once.request, b"masked")
        with Ledger(tmp_path / "l.db") as ledger:
            for request in (once.request, OTHER_REQUEST):
                with pytest.raises(BadInput, match="new attempt"):
                    ledger.charge([charge(once.key, request=request)], once=True)
            assert ledger.stored(once.client, once.run, once.key, once.request) == b"masked"
            ledger.forget(once.client, once.run)
            ledger.close_plan(once.client, once.run)
            ledger.declare([plan(turns=5)])
            with pytest.raises(BadInput, match="new attempt"):
                ledger.charge([once], once=True)
            ledger.charge([charge("round 1 masks 99b0")], once=True)
            assert used(ledger) == {"gradient": 20}

    def test_a_site_cannot_replay(self, tmp_path: Path) -> None:
        with small_ledger(tmp_path / "l.db") as ledger, pytest.raises(BadInput, match="not simulated"):
            ledger.charge([charge("round 1")], replay=True)

    @pytest.mark.parametrize(
        ("bad", "word"),
        [
            (charge("k", client="nobody"), "open_account"),
            (charge("k", run="b"), "declare"),
            (charge("k", what="loss"), "has no 'loss'"),
            (charge("k", count=0), "count"),
            (charge(" "), "key"),
            (charge("k", request=""), "request"),
        ],
    )
    def test_charges_outside_a_plan_are_refused(self, tmp_path: Path, bad: object, word: str) -> None:
        with small_ledger(tmp_path / "l.db") as ledger, pytest.raises(BadInput, match=word):
            ledger.charge([charge("good"), bad])  # type: ignore[list-item]

    def test_two_rows_of_a_call_cannot_share_a_key(self, tmp_path: Path) -> None:
        with small_ledger(tmp_path / "l.db") as ledger, pytest.raises(BadInput, match="same client, run and key"):
            ledger.charge([charge("round 1"), charge("round 1")])

    def test_a_round_of_a_thousand_clients_is_quick_and_asks_no_accountant(
        self, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names = [f"client {i}" for i in range(1000)]
        ledger.open_accounts(dict.fromkeys(names, BUDGET))
        ledger.declare([plan(5, client=name) for name in names])
        monkeypatch.setattr(accounting, "composed_epsilon", None)
        monkeypatch.setattr(accounting, "affordable", None)
        seconds = []
        for i in range(5):
            start = time.process_time()
            recorded = ledger.charge([charge(f"round {i}", client=name) for name in names])
            seconds.append(time.process_time() - start)
        assert len(recorded) == 1000
        assert min(seconds) < 0.15  # typically 0.02; processor time, because other programs may use the disk

    def test_names_in_any_script_are_kept(self, ledger: Ledger) -> None:
        name = 'Klinik "Süd" \\ 病院 🏥'
        ledger.open_account(name, BUDGET)
        ledger.declare([plan(1, client=name)])
        ledger.charge([charge("round 1", client=name)])
        ledger.verify()
        assert used(ledger, name) == {"gradient": 10}


class TestSpending:
    def test_epsilon_is_cumulative_over_rounds_runs_and_restarts(self, tmp_path: Path) -> None:
        """The second run was declared after releases of the first, so the total is what the filter's meter shows."""
        path = tmp_path / "l.db"
        with small_ledger(path, turns=4) as ledger:
            ledger.charge([charge("round 1")])
        with Ledger(path) as ledger:
            assert ledger.declare([plan(4)]) == {"hospital 3": 4}
            ledger.charge([charge("round 2")])
            ledger.close_plan("hospital 3", "a")
            ledger.declare([plan(2, run="b", turn=(LOSS,))])
            ledger.charge([charge("round 1", run="b", what="loss", count=1)])
        with Ledger(path, readonly=True) as ledger:
            total = cost(GRADIENT.times(20), LOSS.times(1))
            order = planning.order_of(ledger._file.book, "hospital 3")
            shown = ledger.epsilon()["hospital 3"]
            assert shown == filters.odometer([GRADIENT.times(20), LOSS.times(1)], order, 1e-5)
            assert total < shown <= 2.0
            assert ledger.epsilon(["hospital 3"], run="a")["hospital 3"] == pytest.approx(cost(GRADIENT.times(20)))
            assert ledger.run_events("hospital 3", "b") == [LOSS]
            assert statement(ledger, "hospital 3")["left_epsilon"] == pytest.approx(2.0 - shown)

    def test_each_account_is_measured_by_its_own_accountant_and_delta(self, ledger: Ledger) -> None:
        ledger.open_account("x", Budget(5.0, 1e-5), accountant="rdp")
        ledger.open_account("y", Budget(5.0, 1e-6), accountant="pld")
        ledger.declare([plan(2, client="x"), plan(2, client="y")])
        ledger.charge([charge("round 1", client="x"), charge("round 1", client="y")])
        events = [GRADIENT.times(10)]
        assert ledger.epsilon() == {
            "x": pytest.approx(float(accounting.composed_epsilon([events], [1e-5], "rdp")[0])),
            "y": pytest.approx(float(accounting.composed_epsilon([events], [1e-6], "pld")[0])),
        }

    def test_an_account_without_charges_has_spent_nothing(self, ledger: Ledger) -> None:
        ledger.open_account("hospital 3", BUDGET)
        assert ledger.epsilon() == {"hospital 3": 0.0}
        assert statement(ledger, "hospital 3")["left_epsilon"] == 2.0


class TestResending:
    def test_a_stored_release_comes_back_byte_for_byte_for_the_same_request_only(self, tmp_path: Path) -> None:
        payload = os.urandom(5000)
        with small_ledger(tmp_path / "l.db") as ledger:
            ledger.charge([charge("round 1")])
            ledger.store("hospital 3", "a", "round 1", REQUEST, payload)
        with Ledger(tmp_path / "l.db") as ledger:
            assert ledger.stored("hospital 3", "a", "round 1", REQUEST) == payload
            assert ledger.stored("hospital 3", "a", "round 1", OTHER_REQUEST) is None
            assert ledger.stored("hospital 3", "a", "round 2", REQUEST) is None

    def test_nothing_can_be_stored_that_was_not_charged(self, tmp_path: Path) -> None:
        with small_ledger(tmp_path / "l.db") as ledger:
            ledger.charge([charge("round 1")])
            with pytest.raises(BadInput, match="charge first"):
                ledger.store("hospital 3", "a", "round 1", OTHER_REQUEST, b"x")

    def test_one_charge_stores_one_release(self, tmp_path: Path) -> None:
        with small_ledger(tmp_path / "l.db") as ledger:
            ledger.charge([charge("round 1")])
            ledger.store("hospital 3", "a", "round 1", REQUEST, b"first draw")
            ledger.store("hospital 3", "a", "round 1", REQUEST, b"first draw")
            with pytest.raises(BadInput, match="charge a new draw"):
                ledger.store("hospital 3", "a", "round 1", REQUEST, b"second draw")
            ledger.charge([charge("round 1")])
            ledger.store("hospital 3", "a", "round 1", REQUEST, b"second draw")
            assert ledger.stored("hospital 3", "a", "round 1", REQUEST) == b"second draw"

    def test_forgotten_copies_are_gone_and_their_charges_stay(self, tmp_path: Path) -> None:
        with small_ledger(tmp_path / "l.db") as ledger:
            for i in range(3):
                ledger.charge([charge(f"round {i}")])
                ledger.store("hospital 3", "a", f"round {i}", REQUEST, bytes([i]) * 100_000)
            assert ledger.forget("hospital 3", "a", keep=1) == 2
            found = [ledger.stored("hospital 3", "a", f"round {i}", REQUEST) for i in range(3)]
            assert found == [None, None, bytes([2]) * 100_000]
            assert used(ledger) == {"gradient": 30}
        with Ledger(tmp_path / "l.db") as ledger:
            ledger.verify()


class TestUse:
    def test_a_ledger_opened_before_a_fork_is_refused_in_the_child(self, tmp_path: Path) -> None:
        with small_ledger(tmp_path / "l.db") as ledger:

            def child() -> None:
                with pytest.raises(SordinoError, match="fork"):
                    ledger.charge([charge("round 1")])

            assert ended_well(forked(child))
            ledger.charge([charge("round 1")])
            assert used(ledger) == {"gradient": 10}

    def test_a_closed_ledger_says_so(self, tmp_path: Path) -> None:
        ledger = small_ledger(tmp_path / "l.db")
        ledger.close()
        ledger.close()
        with pytest.raises(SordinoError, match="is closed"):
            ledger.charge([charge("round 1")])

    def test_a_read_only_ledger_tells_and_does_not_write(self, tmp_path: Path) -> None:
        small_ledger(tmp_path / "l.db").close()
        before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
        with Ledger(tmp_path / "l.db", readonly=True) as ledger:
            assert statement(ledger, "hospital 3")["left_epsilon"] == 2.0
            ledger.verify()
            with pytest.raises(BadInput, match="read-only"):
                ledger.charge([charge("round 1")])
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before

    def test_a_mark_of_not_private_stays(self, tmp_path: Path) -> None:
        with small_ledger(tmp_path / "l.db") as ledger:
            ledger.mark_not_private("hospital 3", "deterministic generator")
            ledger.mark_not_private("hospital 3", "deterministic generator")
        with Ledger(tmp_path / "l.db") as ledger:
            assert ledger.account("hospital 3").not_private == ("deterministic generator",)
