"""Levels of consent: noise and rates against an independent accountant; a level never exceeds its ε."""

import dataclasses
import time

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant

from sordino.errors import BadInput
from sordino.privacy.accounting import calibrate, composed_epsilon
from sordino.privacy.accounting.rates import at_rate, level_rates, mean_one
from sordino.privacy.levels import Consent, Level, check_levels, level_places, present, strictest
from sordino.privacy.types import Adjacency, Budget, Event, Sampling

RELATION = {
    Adjacency.ZERO_OUT: dp.NeighboringRelation.REPLACE_SPECIAL,
    Adjacency.REPLACE_ONE: dp.NeighboringRelation.REPLACE_ONE,
}
NAMES = ("strict", "standard", "generous")


def levels(epsilons=(0.5, 1.0, 4.0), sizes=(300, 500, 200), adjacency=Adjacency.ZERO_OUT):
    return [Level(n, Budget(e, 1e-5, adjacency), k) for n, e, k in zip(NAMES, epsilons, sizes)]


def independent(events, delta=1e-5, interval=1e-4):
    """ε by dp-accounting, of events with true noise."""
    adjacency = events[0].adjacency
    book = PLDAccountant(RELATION[adjacency], value_discretization_interval=interval)
    for event in events:
        inner = dp.GaussianDpEvent(event.noise * adjacency.sensitivity)
        sampled = dp.PoissonSampledDpEvent(event.sampling.rate, inner) if event.sampling.rate < 1 else inner
        book.compose(dp.SelfComposedDpEvent(sampled, event.count))
    return book.get_epsilon(delta)


def costs(template, scale, factors):
    """The events that every level pays for."""
    louder = [dataclasses.replace(event, noise=event.noise * scale) for event in template]
    return [at_rate(louder, float(factor)) for factor in factors]


@pytest.mark.parametrize(
    ("rate", "count", "adjacency"),
    [(0.1, 40, Adjacency.ZERO_OUT), (0.02, 300, Adjacency.ZERO_OUT), (0.1, 40, Adjacency.REPLACE_ONE)],
)
def test_three_levels_against_an_independent_accountant(rate, count, adjacency):
    template = [Event("gradient", Sampling.poisson(rate), 1.0, count, adjacency)]
    own = levels(adjacency=adjacency)
    ((scale, factors),) = level_rates([template], [own])
    rates = factors * rate
    assert np.all(np.diff(rates) > 0)
    assert np.all((rates > 0) & (rates <= 1))
    expected = sum(q * one.records for q, one in zip(rates, own))
    assert expected == pytest.approx(rate * 1000, rel=1e-12)
    for one, events in zip(own, costs(template, scale, factors)):
        spent = independent(events)
        assert spent <= one.budget.epsilon * (1 + 1e-3)  # its own discretisation rounds up
        assert spent >= one.budget.epsilon * 0.997
        assert composed_epsilon([events], [1e-5])[0] <= one.budget.epsilon  # what the ledger compares


def test_the_noise_is_the_least_with_which_the_mean_rate_can_be_kept():
    """A plain search: at a little less noise, the rates that every ε allows are too small on average."""
    template = [Event("gradient", Sampling.poisson(0.1), 1.0, 40)]
    own = levels()
    ((scale, _),) = level_rates([template], [own])

    def most(epsilon, noise):
        low, high = 1e-4, 1.0
        for _ in range(12):
            middle = (low * high) ** 0.5
            spent = independent([Event("g", Sampling.poisson(middle), noise, 40)], interval=1e-3)
            low, high = (middle, high) if spent <= epsilon else (low, middle)
        return low, high

    for noise, enough in ((scale * 0.985, False), (scale * 1.015, True)):
        ends = [most(one.budget.epsilon, noise) for one in own]
        mean = [sum(end[side] * one.records for end, one in zip(ends, own)) / 1000 for side in (0, 1)]
        assert (mean[0] >= 0.1) if enough else (mean[1] < 0.1)


def test_several_kinds_of_release_and_a_cap_at_every_record():
    template = [Event("gradient", Sampling.poisson(0.4), 1.0, 60), Event("loss", Sampling.poisson(0.5), 3.0, 20)]
    own = levels((0.5, 1.0, 8.0))
    ((scale, factors),) = level_rates([template], [own])
    assert factors[2] * 0.4 == pytest.approx(1.0)
    spent = [independent(events) for events in costs(template, scale, factors)]
    assert spent[:2] == pytest.approx([0.5, 1.0], rel=3e-3)
    assert spent[2] < 8.0
    assert (factors * 0.4 * [300, 500, 200]).sum() == pytest.approx(400)


def test_one_level_needs_what_one_budget_needs():
    template = [Event("gradient", Sampling.poisson(0.1), 1.0, 40)]
    ((scale, factors),) = level_rates([template], [levels()[:1]])
    assert factors.tolist() == [1.0]
    assert scale == pytest.approx(calibrate(0.5, 1e-5, 0.1, 40), rel=1e-6)


def test_a_level_that_nearly_equals_another_and_one_with_few_records():
    template = [Event("gradient", Sampling.poisson(0.02), 1.0, 300)]
    own = levels((0.5, 0.500001, 6.0), (300, 500, 1))
    ((scale, factors),) = level_rates([template], [own])
    assert factors[:2] == pytest.approx([0.99, 0.99], abs=0.02)
    for one, events in zip(own, costs(template, scale, factors)):
        assert composed_epsilon([events], [1e-5])[0] <= one.budget.epsilon


def test_full_batches_leave_the_strictest_budget_to_all():
    template = [Event("gradient", Sampling.poisson(1.0), 1.0, 40)]
    ((scale, factors),) = level_rates([template], [levels()])
    assert factors.tolist() == [1.0, 1.0, 1.0]
    assert scale == pytest.approx(calibrate(0.5, 1e-5, 1.0, 40, sampling="full"), rel=1e-6)


def test_many_clients_take_seconds_and_do_not_depend_on_each_other():
    random = np.random.default_rng(0)
    many = [
        (
            [Event("g", Sampling.poisson(float(random.uniform(0.02, 0.2))), 1.0, int(random.integers(20, 400)))],
            levels(tuple(np.sort(random.uniform(0.3, 6.0, 3))), tuple(random.integers(50, 1000, 3).tolist())),
        )
        for _ in range(20)
    ]
    began = time.perf_counter()
    found = level_rates([one for one, _ in many], [own for _, own in many])
    assert time.perf_counter() - began < 10
    for place in (0, 7):
        ((scale, factors),) = level_rates([many[place][0]], [many[place][1]])
        assert scale == found[place][0]
        assert factors.tolist() == found[place][1].tolist()
    for (template, own), (scale, factors) in zip(many, found):
        spent = composed_epsilon(costs(template, scale, factors), [1e-5] * 3)
        assert all(cost <= one.budget.epsilon for cost, one in zip(spent, own))


def test_batches_that_take_all_records_alike_are_refused():
    with pytest.raises(BadInput, match="poisson"):
        level_rates([[Event("g", Sampling.full(), 1.0, 4)]], [levels()])


def test_factors_have_mean_one_under_their_cap():
    shares = np.array([0.3, 0.5, 0.2])
    for wanted in ([1.0, 2.0, 8.0], [1.0, 1.0, 1e6], [3.0, 1e-6, 1e-6]):
        found = mean_one(np.array(wanted), shares, 2.5)
        assert (found * shares).sum() == pytest.approx(1.0)
        assert found.max() <= 2.5
        assert np.array_equal(np.argsort(found, kind="stable"), np.argsort(wanted, kind="stable"))


def test_whoever_says_nothing_clear_is_of_the_strictest_level():
    given = check_levels({"generous": 4.0, "strict": 0.5, "standard": 1}, "budget.levels")
    assert list(given) == ["strict", "standard", "generous"]
    said = ["generous", " standard ", "", None, "GENEROUS", "generous, I think", "strict", 7, float("nan")]
    assert level_places(said, given).tolist() == [2, 1, 0, 0, 0, 0, 0, 0, 0]


def test_levels_of_records():
    consent = Consent.of_words(["b", "a", "b", "?"], {"b": 2.0, "a": 1.0, "c": 3.0}, "levels")
    own = consent.levels(Budget(1.0, 1e-5))
    assert [(one.name, one.budget.epsilon, one.records) for one in own] == [("a", 1.0, 2), ("b", 2.0, 2), ("c", 3.0, 0)]
    assert [one.name for one in present(own)] == ["a", "b"]
    assert strictest(own).epsilon == 1.0
    assert {name: where.tolist() for name, where in consent.members.items()} == {"a": [1, 3], "b": [0, 2], "c": []}
    assert {k: v.tolist() for k, v in consent.of(np.array([0, 3])).members.items()} == {"a": [1], "b": [0], "c": []}


def test_a_commitment_sees_that_a_record_changed_its_level():
    before = Consent.of_words(["a", "b"], {"a": 1.0, "b": 2.0}, "levels").committed(lambda salt: "file x")
    after = Consent.of_words(["b", "b"], {"a": 1.0, "b": 2.0}, "levels").committed(lambda salt: "file x")
    assert before(b"1") == before(b"1")
    assert len({before(b"1"), before(b"2"), after(b"1"), "file x"}) == 4


@pytest.mark.parametrize(
    "wrong", [{}, {"a": 0.0}, {"a": -1.0}, {"a": float("inf")}, {"a": "1"}, {"a": True}, {"": 1.0}, {"held out": 1.0}]
)
def test_levels_that_promise_nothing(wrong):
    with pytest.raises(BadInput):
        check_levels(wrong, "budget.levels")
