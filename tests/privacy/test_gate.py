"""The gate: nothing leaves without a charge, and what leaves is bounded, noised as charged, divided by a constant."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.errors import BudgetRefused, SordinoError
from sordino.privacy.gate import Gate, Piece, Terms, bounded, fingerprint
from sordino.privacy.generators import Keyed, Turn
from sordino.privacy.ledger import Ledger, Plan
from sordino.privacy.types import Adjacency, Budget, NotReleased, Release, Sampling, derive

TERMS = Terms(Sampling.poisson(0.1), (("gradient", 2.0),), count=3, divisor=10.0)


def piece(gradients: torch.Tensor, factors: torch.Tensor | None = None) -> dict[str, Piece]:
    """One row's records as explicit gradients [records, d]."""
    norms = torch.linalg.vector_norm(gradients, dim=1)[None]
    ones = torch.ones_like(norms) if factors is None else factors[None]

    def pull(a: torch.Tensor) -> torch.Tensor:
        safe = torch.where(torch.isfinite(gradients), gradients, torch.zeros_like(gradients))
        return a @ safe

    return {"gradient": Piece(norms, ones, pull, lambda v: v[:, None])}


class Silence:
    """A source without noise, to look at sums."""

    simulated = True

    def normal(self, turns, what, step, out, scale=None):
        return out.zero_() if scale is None else out


@pytest.fixture
def book(tmp_path):
    with Ledger(tmp_path / "ledger.db") as ledger:
        ledger.open_account("a", Budget(3.0, 1e-5), simulated=True)
        ledger.declare([Plan("a", "run", (TERMS.event,), 4)])
        yield ledger


def test_a_release_is_charged_before_it_is_made_and_only_as_often_as_charged(book):
    gate = Gate(book, Keyed("k"), "run")
    permit = gate.grant([Turn("a", 1)], [TERMS], "request")
    assert [(e.what, e.count, e.noise) for e in book.spent("a")] == [("gradient", 3, 2.0)]
    bound = {"gradient": torch.ones(1)}
    for step in range(3):
        gate.release(permit, step, [piece(torch.randn(5, 4))], bound, 4)
    for step in (0, 3, -1):
        with pytest.raises(SordinoError, match="not charged, or was released already"):
            gate.release(permit, step, [piece(torch.randn(5, 4))], bound, 4)


def test_an_overdraw_is_refused_before_any_record_is_read(book):
    gate = Gate(book, Keyed("k"), "run")
    for number in range(1, 5):
        gate.grant([Turn("a", number)], [TERMS], "request")
    with pytest.raises(BudgetRefused, match="a"):
        gate.grant([Turn("a", 5)], [TERMS], "request")
    assert sum(e.count for e in book.spent("a")) == 12


def test_noise_used_is_noise_charged(book):
    """Standard deviation of a release of nothing = z·C/divisor, for the z that the ledger holds."""
    terms = Terms(Sampling.poisson(0.1), (("gradient", 2.0),), count=1, divisor=10.0)
    permit = Gate(book, Keyed("k"), "run").grant([Turn("a", 1)], [TERMS], "request")
    released = Gate(book, Keyed("k"), "run").release(permit, 0, [], {"gradient": torch.tensor([3.0])}, 40_000)
    charged = book.spent("a")[0].noise
    assert released["gradient"].value.std().item() == pytest.approx(charged * 3.0 / terms.divisor, rel=0.02)


def test_replace_one_doubles_the_noise_at_the_same_multiplier(tmp_path):
    deviations = []
    for adjacency in (Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE):
        terms = Terms(Sampling.poisson(0.1), (("gradient", 2.0),), 1, 1.0, adjacency)
        with Ledger(tmp_path / f"{adjacency}.db") as ledger:
            ledger.open_account("a", Budget(9.0, 1e-5, adjacency), simulated=True)
            ledger.declare([Plan("a", "run", (terms.event,), 1)])
            gate = Gate(ledger, Keyed("k"), "run")
            permit = gate.grant([Turn("a", 1)], [terms], "r")
            deviations.append(gate.release(permit, 0, [], {"gradient": torch.ones(1)}, 10_000)["gradient"].value.std())
    assert deviations[1] / deviations[0] == pytest.approx(2.0, rel=1e-5)


def test_an_empty_batch_is_released_like_any_other(book):
    gate = Gate(book, Keyed("k"), "run")
    permit = gate.grant([Turn("a", 1)], [TERMS], "request")
    value = gate.release(permit, 0, [], {"gradient": torch.ones(1)}, 7)["gradient"].value
    assert value.shape == (1, 7)
    assert (value != 0).all()


def test_the_divisor_is_public_and_does_not_depend_on_the_batch():
    gate = Gate(None, Silence(), "run")
    for records in (1, 5, 50):
        permit = gate.grant([Turn("a", 1)], [TERMS], "request")
        value = gate.release(permit, 0, [piece(torch.ones(records, 1))], {"gradient": torch.ones(1)}, 1)
        assert value["gradient"].value.item() == pytest.approx(records / TERMS.divisor)


EXTREME = st.sampled_from([0.0, 1e-45, 1e-20, 1.0, 1e10, 3e38, math.inf, -math.inf, math.nan, -5.0])


@settings(max_examples=200, deadline=None)
@given(
    others=st.lists(st.lists(EXTREME, min_size=3, max_size=3), max_size=4),
    victim=st.lists(EXTREME, min_size=3, max_size=3),
    factor=st.sampled_from([1.0, 0.0, -3.0, 1e30, math.inf, math.nan, -math.inf]),
    bound=st.sampled_from([1e-3, 1.0, 50.0]),
)
def test_erasing_one_record_moves_the_sum_by_at_most_the_bound(others, victim, factor, bound):
    """Adversarial gradients and factors: zero, denormal, huge, infinite, NaN, negative."""

    def total(rows: list[list[float]]) -> torch.Tensor:
        gate = Gate(None, Silence(), "run")
        permit = gate.grant([Turn("a", 1)], [Terms(Sampling.full(), (("gradient", 1.0),), 1, 1.0)], "r")
        gradients = torch.tensor(rows).reshape(-1, 3)
        pieces = [piece(gradients, torch.full((len(rows),), factor))] if rows else []
        return gate.release(permit, 0, pieces, {"gradient": torch.tensor([bound])}, 3)["gradient"].value.double()

    moved = torch.linalg.vector_norm(total([*others, victim]) - total(others)).item()
    rounding = 1e-6 * bound * (len(others) + 1)
    assert moved <= bound + rounding


def test_a_bound_of_zero_lets_nothing_through_and_one_that_is_no_number_is_seen():
    factors, norms = torch.tensor([0.0, 1.0, 2.0, 1.0]), torch.tensor([0.0, 0.0, 3.0, 5.0])
    assert (bounded(factors, norms, 0.0) * norms == 0).all()
    assert torch.isfinite(bounded(factors, norms, 0.0)).all()
    assert torch.isnan(bounded(factors, norms, float("nan"))[1:]).all(), "never a record at its full length"


def test_bounding_equals_the_formula_record_by_record():
    factors, norms = torch.tensor([1.0, 1.0, 2.0, -2.0, 0.5]), torch.tensor([0.5, 4.0, 1.0, 1.0, 10.0])
    expected = [a * min(1.0, 1.5 / (abs(a) * n)) for a, n in zip(factors.tolist(), norms.tolist())]
    assert bounded(factors, norms, 1.5).tolist() == pytest.approx(expected)


def test_only_the_gate_makes_releases_and_only_releases_are_derived_from():
    with pytest.raises(NotReleased, match="did not pass the gate"):
        Release(torch.ones(1), "gradient", True, object())  # type: ignore[arg-type]
    with pytest.raises(NotReleased, match="did not pass the gate"):
        derive("mean", lambda v: v, torch.ones(1))  # type: ignore[arg-type]
    open_gate = Gate(None, Silence(), "run")
    permit = open_gate.grant([Turn("a", 1)], [TERMS], "r")
    exposed = open_gate.release(permit, 0, [], {"gradient": torch.ones(1)}, 2)["gradient"]
    assert not derive("sum", lambda a, b: a + b, exposed, Release.public(1.0, "one")).private


def test_parts_of_one_batch_are_one_event_and_each_gets_its_own_noise(tmp_path):
    terms = Terms(Sampling.poisson(0.05), (("gradient", 2.0), ("loss", 5.0)), count=1, divisor=4.0)
    assert terms.event.what == "gradient+loss"
    assert terms.event.noise == pytest.approx((2.0**-2 + 5.0**-2) ** -0.5)
    with Ledger(tmp_path / "l.db") as ledger:
        ledger.open_account("a", Budget(5.0, 1e-5), simulated=True)
        ledger.declare([Plan("a", "run", (terms.event,), 2)])
        gate = Gate(ledger, Keyed("k"), "run")
        permit = gate.grant([Turn("a", 1)], [terms], "r")
        bounds = {"gradient": torch.ones(1), "loss": torch.full((1,), 2.5)}
        out = gate.release(permit, 0, [], bounds, 20_000)
    assert out["gradient"].value.std().item() == pytest.approx(2.0 / 4.0, rel=0.03)
    assert out["loss"].value.shape == (1, 1)


def test_two_events_of_one_turn_draw_different_noise_for_a_part_of_the_same_name(tmp_path):
    """A loss beside the gradient and a loss asked for on its own, in one turn: two sums, two noises."""
    beside = Terms(Sampling.poisson(0.05), (("gradient", 2.0), ("loss", 2.0)), count=1, divisor=4.0)
    alone = Terms(Sampling.poisson(0.05), (("loss", 2.0),), count=1, divisor=4.0)
    with Ledger(tmp_path / "l.db") as ledger:
        ledger.open_account("a", Budget(5.0, 1e-5), simulated=True)
        ledger.declare([Plan("a", "run", (beside.event, alone.event), 1)])
        gate = Gate(ledger, Keyed("k"), "run")
        both = gate.grant([Turn("a", 1)] * 2, [beside, alone], "r")
        out = [
            gate.release(both.split([row]), 0, [], {"loss": torch.ones(1)}, 1)["loss"].value.item() for row in (0, 1)
        ]
        assert out[0] != out[1]
        with pytest.raises(SordinoError, match=r"gradient\+loss and loss is split"):
            gate.release(both, 0, [], {"loss": torch.ones(2)}, 1)


def test_a_fingerprint_tells_every_part_of_a_request_and_not_the_number_of_threads():
    weights = torch.randn(3_000_000, generator=torch.Generator().manual_seed(0))
    other = weights.clone()
    other[-1] += 1
    whole, before = fingerprint(weights, 1, "clip", 0.5), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert fingerprint(weights, 1, "clip", 0.5) == whole
    finally:
        torch.set_num_threads(before)
    told = {
        fingerprint(other, 1, "clip", 0.5),
        fingerprint(weights, 2, "clip", 0.5),
        fingerprint(weights, 1, "clip", 1),
    }
    told |= {fingerprint(weights[:-1], 1, "clip", 0.5), fingerprint(weights.double(), 1, "clip", 0.5)}
    assert len(told | {whole}) == 6
