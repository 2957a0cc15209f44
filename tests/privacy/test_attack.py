"""The attacker's view: success and true positives against exact formulas, an independent accountant, and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy.special import ndtr, ndtri

from sordino.privacy import accounting
from sordino.privacy.accounting.attack import CERTAINTY, FALSE_POSITIVES, NOTHING, best_attack, from_promise
from sordino.privacy.attacker import at_most
from sordino.privacy.ledger import Charge, Ledger, Plan
from sordino.privacy.statement import statement, statement_text
from sordino.privacy.trust import Shared
from sordino.privacy.types import Adjacency, Budget, Event, Sampling


def released(noise: float, rate: float, count: int, adjacency: Adjacency = Adjacency.ZERO_OUT, **more) -> Event:
    return Event("gradient", Sampling.poisson(rate), noise, count, adjacency, **more)


def seen(*events: Event, delta: float = 1e-5):
    return best_attack(events, float(accounting.composed_epsilon([events], [delta])[0]), delta)


def test_a_single_gaussian_is_exact_and_gives_the_golden_numbers():
    noise = accounting.calibrate(3.52, 1e-5, 1.0, 1, "full")
    found = seen(Event("gradient", Sampling.full(), noise, 1))
    assert found.success == pytest.approx(ndtr(0.5 / noise), abs=1e-12)
    assert found.true_positives == pytest.approx(ndtr(ndtri(0.01) + 1 / noise), abs=1e-12)
    assert (at_most(found.success), at_most(found.true_positives)) == ("66.1 %", "6.7 %")


def test_full_batches_by_the_lattice_agree_with_the_formula():
    """Nine full batches and one that is nearly full: the lattice's way, where the formula is known in the limit."""
    found = seen(Event("a", Sampling.full(), 4.0, 9), released(1e4, 0.999, 1))
    assert found.success == pytest.approx(ndtr(0.375), abs=1e-4)
    assert found.success >= ndtr(0.375)
    assert found.true_positives == pytest.approx(ndtr(ndtri(0.01) + 0.75), abs=1e-4)


@pytest.mark.parametrize(
    ("noise", "rate", "count"), [(2.0, 0.05, 300), (0.7, 0.1, 50), (3.0, 0.2, 2000), (0.3, 0.01, 10)]
)
def test_it_agrees_with_an_independent_accountant(noise, rate, count):
    pair = privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=rate, value_discretization_interval=1e-3
    ).self_compose(count)
    at = np.linspace(0, 8, 4001)
    ways = [np.array(one.get_delta_for_epsilon(at)) for one in (pair._pmf_remove, pair._pmf_add)]
    found = seen(released(noise, rate, count))
    assert found.success == pytest.approx((1 + max(way[0] for way in ways)) / 2, abs=2e-4)
    rates = [float(np.min(np.exp(at) * FALSE_POSITIVES + way)) for way in ways]
    assert found.true_positives == pytest.approx(max(rates), abs=2e-4)


def test_it_is_what_direct_integration_of_one_sampled_release_gives():
    noise, rate = 0.8, 0.3
    x = np.linspace(-12, 13, 400_001)
    bell = lambda centre: np.exp(-((x - centre) ** 2) / (2 * noise**2)) / (math.sqrt(2 * math.pi) * noise)  # noqa: E731
    without = bell(0.0)
    used = (1 - rate) * without + rate * bell(1.0)
    step = x[1] - x[0]
    success = (1 + 0.5 * float(np.abs(used - without).sum() * step)) / 2
    cuts = np.cumsum(without[::-1]) * step  # likelihood ratio grows with x: the best rule is a threshold
    found_used = float((np.cumsum(used[::-1]) * step)[np.searchsorted(cuts, 0.01)])
    back = np.cumsum(used) * step
    found_unused = float((np.cumsum(without) * step)[np.searchsorted(back, 0.01)])
    found = seen(released(noise, rate, 1))
    assert success - 1e-6 <= found.success <= success + 1e-4
    best = max(found_used, found_unused)
    assert best - 1e-4 <= found.true_positives <= best + 1e-4


def test_a_played_attack_does_as_well_as_is_said_and_no_better():
    """A likelihood-ratio attacker on 30 sampled releases, twenty thousand times with the record and without."""
    noise, rate, count, trials = 1.0, 0.2, 30, 20_000
    draw = np.random.default_rng(3)
    without = draw.normal(0, noise, (trials, count))
    used = draw.normal(0, noise, (trials, count)) + (draw.random((trials, count)) < rate)
    loss = lambda x: np.log1p(rate * np.expm1((x - 0.5) / noise**2)).sum(axis=1)  # noqa: E731
    score_with, score_without = loss(used), loss(without)
    success = (np.mean(score_with > 0) + np.mean(score_without <= 0)) / 2
    found = seen(released(noise, rate, count))
    assert success == pytest.approx(found.success, abs=0.01)
    tpr = np.mean(score_with > np.quantile(score_without, 0.99))
    assert tpr == pytest.approx(found.true_positives, abs=0.02)


def test_fixed_batches_and_filters_have_the_bound_of_epsilon_and_delta_alone():
    event = Event("gradient", Sampling.fixed(10, 100), 2.0, 20, Adjacency.REPLACE_ONE)
    found = seen(event)
    assert not found.exact
    assert found == from_promise(float(accounting.composed_epsilon([[event]], [1e-5])[0]), 1e-5)
    own = seen(released(2.0, 0.1, 20))
    bound = best_attack([released(2.0, 0.1, 20)], 2.0, 1e-5, declared=False)
    assert own.success < bound.success
    assert own.true_positives < bound.true_positives


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0, 8.0])
def test_the_bound_is_that_of_randomised_response(epsilon):
    """ε alone: a coin that tells the truth with odds e^ε is the worst there is."""
    most = math.exp(epsilon)
    found = from_promise(epsilon, 0.0)
    assert found.success == pytest.approx(most / (1 + most))
    assert found.true_positives == pytest.approx(min(most * 0.01, 1 - 0.99 / most))


def test_more_noise_less_sampling_and_fewer_releases_help_less_noise_never():
    order = [seen(released(z, q, t)) for z, q, t in [(4, 0.05, 100), (2, 0.05, 100), (2, 0.1, 100), (2, 0.1, 400)]]
    assert [one.success for one in order] == sorted(one.success for one in order)
    assert [one.true_positives for one in order] == sorted(one.true_positives for one in order)


def test_replace_one_is_more_and_shared_noise_is_a_little_more():
    own = seen(released(2.0, 0.1, 100))
    exchanged = seen(released(1.0, 0.1, 100, Adjacency.REPLACE_ONE))
    assert exchanged.success > own.success
    shared = Shared(sites=5, colluders=1, dropouts=0, width=100, deviation=2e4)
    together = seen(released(2.0, 0.1, 100, shared=shared))
    assert own.success <= together.success <= own.success + 1e-3
    assert own.true_positives <= together.true_positives <= own.true_positives + 1e-3


def test_nothing_released_and_nothing_protected():
    assert best_attack([], 0.0, 1e-5) == NOTHING
    assert best_attack([released(0.0, 0.1, 1)], math.inf, 1e-5) == CERTAINTY


def test_figures_are_rounded_up():
    assert at_most(0.66046) == "66.1 %"
    assert at_most(0.5) == "50 %"
    assert at_most(0.9999) == "100 %"


def test_a_statement_has_the_attackers_view_beside_epsilon_and_none_for_what_is_not_private(tmp_path):
    gradient = Event("gradient", Sampling.poisson(0.05), 2.0, 10)
    with Ledger(tmp_path / "site.db") as ledger:
        for client in ("north", "south"):
            ledger.open_account(client, Budget(3.0, 1e-5))
            ledger.declare([Plan(client, "study-7", (gradient,), 30)])
        ledger.charge([Charge("north", "study-7", "round 1", "gradient", 300, "r")])
        ledger.mark_not_private("south", "a test")
        told = statement(ledger, "north")
        direct = seen(gradient.times(300))
        assert told["attack"] == {**direct.told(), "false_positives": 0.01, "from": "releases"}
        words = statement_text(told)
        assert f"right at most {at_most(direct.success)} of the time" in words
        assert f"finds at most {at_most(direct.true_positives)} of those" in words
        assert statement(ledger, "south")["attack"] is None
        assert "Attacker's view" not in statement_text(statement(ledger, "south"))


def test_an_account_that_rests_on_its_filter_is_bounded_by_its_budget(tmp_path):
    gradient = Event("gradient", Sampling.poisson(0.05), 4.0, 1)
    with Ledger(tmp_path / "site.db") as ledger:
        ledger.open_account("north", Budget(2.0, 1e-5), composition="filter")
        ledger.declare([Plan("north", "a", (gradient,), 20)])
        ledger.charge([Charge("north", "a", "round 1", "gradient", 20, "r")])
        assert ledger.rests_on_filter("north")
        assert ledger.attack(["north"])["north"] == from_promise(2.0, 1e-5)
        assert "(from epsilon and delta alone)" in statement_text(statement(ledger, "north"))
