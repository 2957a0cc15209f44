"""Groups of records: every group is drawn at its own rate, and charged to its own account, or nothing is."""

import numpy as np
import pytest
from scipy import stats

from sordino.engine.federation.wire import terms_from_plain, terms_to_plain
from sordino.errors import BadInput, BudgetRefused, SordinoError
from sordino.privacy.drawing import draw_batches, draws_of, joined_batches
from sordino.privacy.gate import Gate, Terms
from sordino.privacy.generators import Batches, Keyed, Secret, Turn
from sordino.privacy.groups import Group, is_account_of
from sordino.privacy.ledger import Ledger, LedgerPlan
from sordino.privacy.types import Budget, Sampling

GROUPS = (Group("strict", 0.05, 200), Group("standard", 0.1, 300), Group("generous", 0.4, 100))
PLACE = np.arange(600) % 6
MEMBERS = {
    name: np.flatnonzero(np.isin(PLACE, own))
    for name, own in {"strict": [0, 1], "standard": [2, 3, 4], "generous": [5]}.items()
}


def terms(groups=GROUPS, count=3, noise=2.0):
    expected = sum(one.rate * one.records for one in groups)
    rate = Sampling.poisson(expected / sum(one.records for one in groups))
    return Terms(rate, (("gradient", noise),), count, expected, groups=groups)


@pytest.mark.parametrize("source", [Keyed("run"), Secret()], ids=["keyed", "secret"])
def test_every_group_is_drawn_at_its_own_rate(source):
    drawn = draw_batches(source, Turn("a", 1), terms(count=4000), 600, MEMBERS)
    times = np.bincount(drawn.positions, minlength=600)
    for one in GROUPS:
        own = times[MEMBERS[one.name]]
        assert own.sum() == pytest.approx(4000 * one.expected, abs=5 * np.sqrt(4000 * one.expected))
        # Each record by a coin of its own: how often it was drawn is binomial.
        spread = own.var() / (4000 * one.rate * (1 - one.rate))
        assert 0.6 < spread < 1.5
    sizes = np.diff(drawn.ends, prepend=0)
    assert sizes.mean() == pytest.approx(terms().divisor, rel=0.02)
    assert all(np.all(np.diff(batch) > 0) for batch in drawn)  # nobody twice, and in order


def test_groups_have_streams_of_their_own():
    alike = (Group("one", 0.2, 50), Group("two", 0.2, 50))
    first, second = (Keyed("run").batches(*one) for one in draws_of(Turn("a", 1), terms(alike, 40), 100))
    assert not np.array_equal(first.positions, second.positions)
    coins = [np.array([np.isin(np.arange(50), batch) for batch in part], float).ravel() for part in (first, second)]
    assert stats.pearsonr(*coins).pvalue > 1e-4


def test_a_client_without_groups_draws_what_it_always_drew():
    plain = Terms(Sampling.poisson(0.1), (("gradient", 2.0),), 3, 60.0)
    usual = Keyed("run").batches(Turn("a", 1), "gradient", Sampling.poisson(0.1), 600, 3)
    again = draw_batches(Keyed("run"), Turn("a", 1), plain, 600)
    assert np.array_equal(usual.positions, again.positions)
    assert np.array_equal(usual.ends, again.ends)


def test_batches_are_joined_step_by_step():
    one = Batches(np.array([4, 0, 2]), np.array([1, 1, 3]))
    two = Batches(np.array([3, 5, 1]), np.array([2, 3, 3]))
    assert [batch.tolist() for batch in joined_batches([one, two])] == [[3, 4, 5], [1], [0, 2]]


def test_nothing_is_drawn_from_other_records_than_the_terms_say():
    fewer = {**MEMBERS, "generous": MEMBERS["generous"][:-1]}
    with pytest.raises(ValueError, match="generous"):
        draw_batches(Keyed("run"), Turn("a", 1), terms(), 600, fewer)


def test_every_group_has_an_event_and_there_is_no_common_one():
    events = terms().events
    assert {suffix: event.sampling.rate for suffix, event in events.items()} == {
        " (strict)": 0.05,
        " (standard)": 0.1,
        " (generous)": 0.4,
    }
    assert {event.noise for event in events.values()} == {2.0}
    with pytest.raises(SordinoError, match="every group"):
        terms().event  # noqa: B018
    plain = Terms(Sampling.poisson(0.1), (("gradient", 2.0),), 3, 60.0)
    assert plain.events == {"": plain.event}


def opened(path, turns):
    """A ledger in which every group's account has the plan of so many turns."""
    ledger = Ledger(path)
    ledger.open_accounts({f"a ({name})": Budget(50.0, 1e-5) for name in turns}, simulated=True)
    events = terms().events
    ledger.declare([LedgerPlan(f"a ({n})", "r", (events[f" ({n})"],), count) for n, count in turns.items()])
    return ledger


def test_one_turn_is_charged_to_every_group(tmp_path):
    with opened(tmp_path / "l.db", {"strict": 2, "standard": 2, "generous": 2}) as ledger:
        Gate(ledger, Keyed("run"), "r").grant([Turn("a", 1)], [terms()], "request")
        for one in GROUPS:
            (spent,) = ledger.spent(f"a ({one.name})")
            assert (spent.sampling.rate, spent.count, spent.noise) == (one.rate, 3, 2.0)


def test_one_empty_account_refuses_the_whole_turn(tmp_path):
    with opened(tmp_path / "l.db", {"strict": 1, "standard": 2, "generous": 2}) as ledger:
        gate = Gate(ledger, Keyed("run"), "r")
        gate.grant([Turn("a", 1)], [terms()], "request")
        before = ledger.head
        with pytest.raises(BudgetRefused, match="strict"):
            gate.grant([Turn("a", 2)], [terms()], "request")
        assert ledger.head == before
        assert {len(ledger.spent(f"a ({one.name})")) for one in GROUPS} == {1}
        assert all(ledger.spent(f"a ({one.name})")[0].count == 3 for one in GROUPS)


def test_groups_that_cannot_be(tmp_path):
    good = terms()
    with pytest.raises(BadInput, match="twice"):
        terms((GROUPS[0], GROUPS[0]))
    with pytest.raises(BadInput, match="divisor"):
        Terms(good.sampling, good.parts, 3, good.divisor * 1.01, groups=GROUPS)
    with pytest.raises(BadInput, match="rate"):
        Terms(Sampling.poisson(0.2), good.parts, 3, good.divisor, groups=GROUPS)
    with pytest.raises(BadInput, match="full batch"):
        Terms(Sampling.full(), good.parts, 1, good.divisor, groups=GROUPS)
    with pytest.raises(BadInput, match="fixed size"):
        Terms(Sampling.fixed(60, 600), good.parts, 1, good.divisor, groups=GROUPS)
    for name in ("held out", "a (b)", " a", "a\n", "x" * 61):
        with pytest.raises(BadInput, match="cannot be called"):
            Group(name, 0.1, 10)
    with pytest.raises(BadInput, match="rate"):
        Group("a", 1.1, 10)
    with pytest.raises(BadInput, match="records"):
        Group("a", 0.1, 0)


def test_groups_travel():
    assert terms_from_plain(terms_to_plain(terms())) == terms()
    assert "groups" not in terms_to_plain(Terms(Sampling.poisson(0.1), (("gradient", 2.0),), 3, 60.0))
    for wrong in ([["strict", 0.05]], [["strict", 2.0, 200]], [[1, 0.05, 200]], [["strict", 0.05, True]], 3):
        with pytest.raises(BadInput):
            terms_from_plain({**terms_to_plain(terms()), "groups": wrong})


def test_accounts_of_a_client():
    assert is_account_of("north", "north")
    assert is_account_of("north (strict)", "north")
    assert is_account_of("north (held out)", "north")
    assert not is_account_of("north pole", "north")
    assert not is_account_of("northern (strict)", "north")
