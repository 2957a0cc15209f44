"""Held-out accounts: which records are held out, that none ever moves, and what counting them costs."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from ledger_cases import GRADIENT, charge, plan
from scipy.stats import norm

from sordino.errors import BadInput, BudgetRefused
from sordino.privacy.gate import COUNTED, Gate, Terms
from sordino.privacy.generators import Keyed, Secret, Turn
from sordino.privacy.held import HELD, held_out, places
from sordino.privacy.ledger import Charge, Ledger, Plan
from sordino.privacy.types import Adjacency, Budget, Event, Sampling

KEY = b"k" * 32


def frozen(text: bytes):
    return lambda key: hashlib.sha256(key + text).hexdigest()


def test_the_part_of_a_record_follows_from_key_and_id_alone():
    ids = [f"patient {k}" for k in range(4000)]
    out = held_out(KEY, ids, 0.25)
    assert abs(out.mean() - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 4000)
    order = np.random.default_rng(0).permutation(len(ids))
    assert (held_out(KEY, [ids[k] for k in order], 0.25) == out[order]).all()
    assert (held_out(KEY, ids[:17], 0.25) == out[:17]).all()
    assert (held_out(b"j" * 32, ids, 0.25) != out).any()
    assert (held_out(KEY, ids, 0.5) >= out).all()  # a larger share takes more, and never gives one back
    assert held_out(KEY, places(3), 0.5).shape == (3,)


def test_equal_ids_are_in_one_part():
    ids = [f"patient {k % 50}" for k in range(500)]
    out = held_out(KEY, ids, 0.4)
    for k in range(50):
        assert len({bool(one) for one, who in zip(out, ids) if who == f"patient {k}"}) == 1


def test_records_are_parted_once_and_for_ever(tmp_path):
    with Ledger(tmp_path / "ledger.db") as ledger:
        key = ledger.split(0.2, "", frozen(b"the file"))
        assert ledger.split(0.2, "", frozen(b"the file")) == key
    with Ledger(tmp_path / "ledger.db") as ledger:
        assert ledger.split(0.2, "", frozen(b"the file")) == key
        assert ledger.parted().share == 0.2
        assert ledger.parted().ids == ""
        for share, ids, commit, word in (
            (0.3, "", frozen(b"the file"), "for ever"),
            (0.2, "patient", None, "for ever"),
            (0.2, "", frozen(b"another file"), "another one now"),
        ):
            with pytest.raises(BadInput, match=word):
                ledger.split(share, ids, commit)
        with pytest.raises(BadInput, match="may not change"):
            ledger.rebind("north", frozen(b"x"), "more patients", "an officer")
        for share in (0.0, 1.0, -1, True, "half"):
            with pytest.raises(BadInput, match="strictly between"):
                ledger.split(share, "", frozen(b""))
        with pytest.raises(BadInput, match="by their ids, or by their places"):
            ledger.split(0.2, "")


def test_another_column_of_ids_would_move_records(tmp_path):
    with Ledger(tmp_path / "ledger.db") as ledger:
        key = ledger.split(0.2, "patient")
        assert ledger.split(0.2, "patient") == key
        with pytest.raises(BadInput, match=r"their ids \(patient\)"):
            ledger.split(0.2, "visit")
        ledger.bind("north", frozen(b"a"))
        ledger.rebind("north", frozen(b"b"), "more patients", "an officer")  # ids stay, so parts stay
        assert ledger.split(0.2, "patient") == key


def test_records_that_were_trained_on_cannot_be_held_out_any_more(tmp_path):
    with Ledger(tmp_path / "ledger.db") as ledger:
        ledger.open_account("hospital 3", Budget(2.0, 1e-5))
        ledger.declare([plan(5)])
        ledger.charge([charge("round 1")])
        with pytest.raises(BadInput, match="none can be held out any"):
            ledger.split(0.2, "patient")


def test_two_accounts_under_one_budget_pay_for_themselves(tmp_path):
    budget = Budget(2.0, 1e-5)
    scores = Event("scores", Sampling.full(), 10.0, 1)
    with Ledger(tmp_path / "ledger.db") as ledger:
        ledger.bind("hospital 3", frozen(b"a"))
        for name in ("hospital 3", "hospital 3" + HELD):
            ledger.open_account(name, budget)
        with pytest.raises(BadInput, match="one account"):
            ledger.open_account("hospital 4" + HELD, budget)
        ledger.declare([plan(5), Plan("hospital 3" + HELD, "a", (scores,), 3)])
        ledger.charge([charge("round 1")])
        for number in range(3):
            ledger.charge([Charge("hospital 3" + HELD, "a", f"round {number}", "scores", 1, "ab" * 32)])
        with pytest.raises(BudgetRefused):
            ledger.charge([Charge("hospital 3" + HELD, "a", "round 4", "scores", 1, "ab" * 32)])
        spent = ledger.epsilon()
        assert spent["hospital 3"] > 0
        assert spent["hospital 3" + HELD] > 0
        z, d = 10.0 / math.sqrt(3), budget.delta  # three full-batch Gaussians are one of z/√3, exactly
        e = spent["hospital 3" + HELD]
        exact = norm.cdf(1 / (2 * z) - e * z) - math.exp(e) * norm.cdf(-1 / (2 * z) - e * z)
        assert exact == pytest.approx(d, rel=1e-3)
        assert ledger.epsilon(["hospital 3"])["hospital 3"] < budget.epsilon
        assert GRADIENT.noise == 2.0


def terms(*parts: tuple[str, float], adjacency: Adjacency = Adjacency.ZERO_OUT) -> Terms:
    return Terms(Sampling.full(), parts, 1, 1.0, adjacency)


def counted(source, parts, tables, private=True, adjacency=Adjacency.ZERO_OUT):
    class Paid:
        def charge(self, charges, **options):
            return []

    gate = Gate(Paid() if private else None, source, "run")
    permit = gate.grant([Turn("a" + HELD, 1)], [terms(*parts, adjacency=adjacency)], "request")
    return gate.count(permit, 0, tables)


def test_counts_without_noise_are_those_of_a_plain_loop():
    generator = np.random.default_rng(0)
    cells = torch.from_numpy(generator.integers(-1, 9, (500, 3)))  # −1 and 8 lie outside of a table of 8
    found = counted(Keyed("k"), (("scores", 0.0),), {"scores": (cells, 8)}, private=False)["scores"]
    expected = [sum(int(one) == cell for row in cells for one in row) for cell in range(8)]
    assert found.value.tolist() == expected
    assert not found.private


def test_a_record_moves_the_counts_by_the_root_of_how_many_questions_it_answers():
    """Whatever it holds: cells outside, huge ones, the same as everybody's."""
    others = torch.from_numpy(np.random.default_rng(1).integers(0, 6, (40, 5)))
    for odd in ([0, 0, 0, 0, 0], [-5, 99, 3, 3, 2**40], [5, 4, 3, 2, 1]):
        without = torch.cat([others, torch.full((1, 5), -1)])
        one = torch.cat([others, torch.tensor([odd])])
        # Questions of one release have cells of their own: their tables stand side by side.
        apart = torch.arange(5) * 6
        place = [torch.where((c >= 0) & (c < 6), c + apart, -1) for c in (one, without)]
        values = [counted(Keyed("k"), (("t", 0.0),), {"t": (c, 30)}, private=False)["t"].value for c in place]
        assert float(torch.linalg.vector_norm(values[0] - values[1])) <= math.sqrt(5) + 1e-12


@pytest.mark.parametrize("source", [Keyed("k"), Secret()])
@pytest.mark.parametrize("adjacency", [Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE])
def test_noise_on_counts_is_what_was_charged(source, adjacency):
    cells = torch.zeros(10, 3, dtype=torch.int64)
    found = counted(source, (("survey", 2.5), ("correct", 4.0)), {
        "survey": (cells, 20_000), "correct": (cells[:, :1], 1),
    }, adjacency=adjacency)  # fmt: skip
    noise = found["survey"].value.numpy().copy()
    noise[0] -= 30
    wanted = 2.5 * math.sqrt(3) * adjacency.sensitivity
    assert noise.std() == pytest.approx(wanted, rel=0.03)
    assert abs(noise.mean()) < 5 * wanted / math.sqrt(20_000)
    steps = noise / COUNTED
    assert (steps == np.rint(steps)).all()
    assert set(found) == {"survey", "correct"}
    assert found["correct"].value.shape == (1,)


def test_a_permit_counts_once():
    gate = Gate(None, Keyed("k"), "run")
    permit = gate.grant([Turn("a", 1)], [terms(("scores", 0.0))], "")
    table = {"scores": (torch.zeros(3, 1, dtype=torch.int64), 4)}
    gate.count(permit, 0, table)
    with pytest.raises(Exception, match="released already"):
        gate.count(permit, 0, table)
