"""The filter: divergences of one order, what fits a budget, and what an account that rests on it promises."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy.integrate import quad

from sordino.errors import BadInput
from sordino.privacy import planning
from sordino.privacy.accounting import composed_epsilon, epsilon, filters, rdp
from sordino.privacy.ledger import Charge, Ledger, Plan
from sordino.privacy.types import Adjacency, Budget, Event, Sampling

GRADIENT = Event("gradient", Sampling.poisson(0.05), 2.0, 10)


EXCHANGES = [(0.05, 2, 3.5), (0.5, 3, 2), (0.3, 1, 5), (0.9, 1.5, 20), (0.01, 4, 50), (0.05, 1, 12)]


@pytest.mark.parametrize(("rate", "sigma", "order"), EXCHANGES)
def test_the_divergence_of_an_exchange_is_its_integral(rate: float, sigma: float, order: float) -> None:
    """D_α of P = (1−q)·N(0, σ²) + q·N(1, σ²) and Q = (1−q)·N(0, σ²) + q·N(−1, σ²), both ways, by quadrature."""

    def log_height(x: float, sign: float) -> float:
        here, there = (
            np.logaddexp(math.log1p(-rate), math.log(rate) + (side * x - 0.5) / sigma**2) for side in (sign, -sign)
        )
        return float(order * here + (1 - order) * there - x**2 / (2 * sigma**2))

    (found,) = rdp.exchanged(np.array([rate]), np.array([sigma]), [order])[0]
    for sign in (1.0, -1.0):
        ends = sorted((-sign * 12 * sigma, sign * (2 * order + 12 * sigma)))
        peak = max(log_height(x, sign) for x in np.linspace(*ends, 4001))
        points = np.linspace(*ends, 60)[1:-1]
        total, _ = quad(
            lambda x, s=sign, top=peak: math.exp(log_height(x, s) - top), *ends, points=points, limit=2000, epsrel=1e-11
        )
        direct = (math.log(total) + peak - 0.5 * math.log(2 * math.pi * sigma**2)) / (order - 1)
        assert found == pytest.approx(direct, rel=1e-8, abs=1e-13)


def test_an_exchange_at_rate_one_is_a_gaussian_of_twice_the_distance() -> None:
    found = rdp.exchanged(np.array([1 - 1e-13]), np.array([3.0]), [2.0, 7.5, 40.0])[0]
    assert found == pytest.approx(np.array([2.0, 7.5, 40.0]) * 2 / 9)


@pytest.mark.parametrize(("rate", "noise", "steps"), [(0.05, 1.0, 268), (0.3, 3.0, 20), (0.01, 0.6, 1000)])
def test_renyi_under_replace_one_is_a_little_above_the_tight_figure(rate: float, noise: float, steps: int) -> None:
    tight = epsilon(noise, 1e-5, rate, steps, adjacency="replace-one")
    loose = epsilon(noise, 1e-5, rate, steps, accountant="rdp", adjacency="replace-one")
    assert tight < loose < 1.35 * tight


@pytest.mark.parametrize("event", [
    GRADIENT,
    Event("g", Sampling.full(), 9.0, 3),
    Event("g", Sampling.fixed(5, 100), 3.0, 20, Adjacency.REPLACE_ONE),
    Event("g", Sampling.poisson(0.1), 3.0, 20, Adjacency.REPLACE_ONE),
])  # fmt: skip
def test_what_fits_the_filter_fits_the_accountant(event: Event) -> None:
    """One order is never better than the best of them, nor Rényi than PLD: the meter is never below either."""
    budget = Budget(2.0, 1e-5, event.adjacency)
    turns = filters.turns_within([event], budget, 100_000, (), None)
    order = filters.order_for([event.times(event.count * turns)], budget)
    events = [event.times(event.count * turns)]
    assert turns > 0
    shown = filters.odometer(events, order, budget.delta)
    assert composed_epsilon([events], [1e-5])[0] <= shown * (1 + 1e-9) <= 2.0
    assert filters.share([event.times(event.count * (turns + 1))], budget) > 1.0


def test_the_orders_are_frozen() -> None:
    """An old account's order follows from its first plans: another list of orders would change its promise."""
    assert (len(filters.ORDERS), filters.ORDERS[0], filters.ORDERS[-1]) == (251, 1.01, 95816.0)
    assert sum(filters.ORDERS) == pytest.approx(1295269.08, rel=1e-9)
    assert list(filters.ORDERS) == sorted(set(filters.ORDERS))


def test_no_noise_fits_no_filter_and_nothing_fits_any() -> None:
    bare = Event("bare", Sampling.full(), 0.0)
    assert filters.divergence([bare], 3.0) == filters.share([bare], Budget(2.0, 1e-5)) == math.inf
    assert filters.divergence([], 3.0) == filters.odometer([], 3.0, 1e-5) == 0.0


class TestAccounts:
    def test_a_filter_account_pays_for_any_sequence_of_runs(self, tmp_path: Path) -> None:
        """Whatever follows from whatever: Σ ρ_α stays within the room, and the meter within the budget."""
        budget, rng = Budget(2.0, 1e-5), np.random.default_rng(0)
        with Ledger(tmp_path / "l.db") as ledger:
            ledger.open_account("x", budget, composition="filter")
            for n in range(25):
                rate, noise = float(rng.uniform(0.01, 0.3)), float(rng.uniform(0.8, 6.0))
                run, event = f"run {n}", Event("gradient", Sampling.poisson(rate), noise, 5)
                for k in range(min(3, ledger.declare([Plan("x", run, (event,), 8)])["x"])):
                    ledger.charge([Charge("x", run, f"round {k}", "gradient", 5, "r")])
                if rng.random() < 0.7:
                    ledger.close_plan("x", run)
            order = planning.order_of(ledger._file.book, "x")
            assert len(ledger.spent("x")) > 3
            assert filters.divergence(ledger.spent("x"), order) <= filters.room(budget, order)
            assert 1.5 < ledger.epsilon()["x"] <= 2.0
            assert ledger.composition("x") == f"filter (Rényi, order {order:g})"

    def test_the_order_does_not_move_after_the_first_charge(self, tmp_path: Path) -> None:
        with Ledger(tmp_path / "l.db") as ledger:
            ledger.open_account("x", Budget(2.0, 1e-5))
            ledger.declare([Plan("x", "a", (GRADIENT,), 3)])
            ledger.charge([Charge("x", "a", "k", "gradient", 10, "r")])
            orders = [planning.order_of(ledger._file.book, "x")]
            ledger.declare([Plan("x", "b", (Event("loss", Sampling.full(), 30.0),), 3)])
            orders.append(planning.order_of(ledger._file.book, "x"))
            ledger.top_up("x", 5.0, "more", "Dr. Weiss")
            ledger.declare([Plan("x", "c", (Event("loss", Sampling.full(), 10.0),), 3)])
            orders.append(planning.order_of(ledger._file.book, "x"))
        with Ledger(tmp_path / "l.db", readonly=True) as ledger:
            orders.append(planning.order_of(ledger._file.book, "x"))
        assert len(set(orders)) == 1

    def test_a_plan_measured_before_the_first_charge_is_measured_again_after_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Between measuring and writing another process charged for the first time: the plan is a later one now."""
        from sordino.privacy import ledger as module

        path, measure, calls = tmp_path / "l.db", module.payable, []
        with Ledger(path) as ledger:
            ledger.open_account("x", Budget(2.0, 1e-5))
            most = ledger.declare([Plan("x", "a", (GRADIENT,), 1000)])["x"]
            ledger.close_plan("x", "a")
            ledger.declare([Plan("x", "a", (GRADIENT,), 1000)])

            def interrupted(*arguments: object) -> dict[str, int]:
                calls.append(measure(*arguments))  # type: ignore[arg-type]
                if len(calls) == 1:
                    with Ledger(path) as other:
                        other.charge([Charge("x", "a", "k", "gradient", 10, "r")])
                return calls[-1]

            monkeypatch.setattr(module, "payable", interrupted)
            assert ledger.declare([Plan("x", "b", (Event("g", Sampling.poisson(0.01), 9.0),), 1)]) == {"x": 0}
            assert len(calls) == 2
            assert most > 0

    def test_an_unknown_or_another_composition_is_refused(self, tmp_path: Path) -> None:
        with Ledger(tmp_path / "l.db") as ledger:
            with pytest.raises(BadInput, match="declared, filter"):
                ledger.open_account("x", Budget(2.0, 1e-5), composition="pld")
            ledger.open_account("x", Budget(2.0, 1e-5), composition="filter")
            ledger.open_account("x", Budget(2.0, 1e-5))
            with pytest.raises(BadInput, match="fixed when the account is opened"):
                ledger.open_account("x", Budget(2.0, 1e-5), composition="declared")
