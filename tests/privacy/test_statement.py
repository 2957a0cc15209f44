"""A privacy statement: the figures an officer needs, in plain words, and nothing that looks better than it is."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from ledger_cases import GRADIENT, LOSS, charge, plan, small_ledger

from sordino.privacy import accounting
from sordino.privacy.ledger import Ledger, Plan
from sordino.privacy.statement import export, statement, statement_text
from sordino.privacy.types import Adjacency, Budget, Event, Sampling


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.db")


def test_the_figures_are_those_of_the_accountant(ledger: Ledger) -> None:
    # q = 0.05, z = 2, T = 268, delta = 1e-5: 1.82 under zero-out, 3.48 under replace-one
    ledger.open_account("hospital 3", Budget(2.0, 1e-5))
    ledger.declare([plan(268, turn=(GRADIENT.times(1),))])
    ledger.charge([charge("all", count=268)])
    told = statement(ledger, "hospital 3")
    assert told["spent_epsilon"] == pytest.approx(1.82, abs=0.01)
    assert told["replace_one_epsilon"] == pytest.approx(3.48, abs=0.01)
    assert told["left_epsilon"] == pytest.approx(2.0 - told["spent_epsilon"])
    assert (told["unit"], told["adjacency"], told["sampling"]) == ("one record of this client", "zero-out", ["poisson"])
    assert told["releases"] == [
        {"run": "a", "what": "gradient", "sampling": "poisson", "rate": 0.05, "noise": 2.0, "count": 268}
    ]
    assert told["accountant_in_words"] == accounting.label("pld", "poisson")


def test_the_text_says_what_was_released_how_often_and_what_it_cost(ledger: Ledger) -> None:
    ledger.open_account("hospital 3", Budget(2.0, 1e-5))
    ledger.declare([plan(4, turn=(GRADIENT, LOSS))])
    ledger.charge([charge("round 1"), charge("round 1 loss", what="loss", count=1)])
    ledger.top_up("hospital 3", 0.5, "second study approved", "Dr. Weiss")
    told = statement(ledger, "hospital 3")
    text = statement_text(told)
    for words in (
        "client hospital 3",
        "one record of this client",
        "zero-out (one record's contribution is erased; the number of records is public)",
        accounting.label("pld"),
        "run a: gradient, 10 times, each record drawn with probability 0.05, noise 2 times the sensitivity",
        "run a: loss, 1 times, all records used, noise 20 times the sensitivity",
        "4 of 4 turns can be paid; used: gradient 10 of at most 40, loss 1 of at most 4",
        "by 0.5, approved by Dr. Weiss: second study approved",
        "epsilon 2.5, delta 1e-05",
        "choosing settings, a round, a seed or a method",
        "metrics that an observer computes",
    ):
        assert words in text
    assert "NOT PRIVATE" not in text
    assert "simulation: keyed streams" not in text


@pytest.mark.parametrize("count", [1, 7, 33, 150])
def test_printed_figures_never_look_better_than_they_are(ledger: Ledger, count: int) -> None:
    ledger.open_account("hospital 3", Budget(3.0, 1e-5))
    ledger.declare([plan(200, turn=(GRADIENT.times(1),))])
    ledger.charge([charge("some", count=count)])
    told = statement(ledger, "hospital 3")
    spent, replaced, left = (
        float(x) for x in re.findall(r"(?:Spent|replace-one|Left):? +epsilon (\S+)", statement_text(told))
    )
    assert told["spent_epsilon"] <= spent <= told["spent_epsilon"] * 1.001
    assert told["replace_one_epsilon"] <= replaced <= told["replace_one_epsilon"] * 1.001
    assert told["left_epsilon"] - 1.1e-4 <= left <= told["left_epsilon"]


def test_a_simulation_says_so(tmp_path: Path) -> None:
    with small_ledger(tmp_path / "l.db", simulated=True) as ledger:
        told = statement(ledger, "hospital 3")
        assert told["simulated"] is True
        assert "simulation: keyed streams, no secret noise" in statement_text(told)


def test_a_marked_account_claims_no_epsilon(tmp_path: Path) -> None:
    with small_ledger(tmp_path / "l.db") as ledger:
        ledger.charge([charge("round 1")])
        ledger.mark_not_private("hospital 3", "deterministic generator injected for a test")
        told = statement(ledger, "hospital 3")
        assert told["private"] is False
        assert (told["spent_epsilon"], told["replace_one_epsilon"], told["left_epsilon"]) == (None, None, 0.0)
        assert told["nominal_epsilon"] == ledger.epsilon()["hospital 3"]
        text = statement_text(told)
        assert "NOT PRIVATE: deterministic generator injected for a test" in text
        assert re.search(r"Spent: +epsilon infinite", text)


def test_public_data_without_noise(ledger: Ledger) -> None:
    ledger.open_account("open data", Budget(math.inf, 1e-5))
    ledger.declare([Plan("open data", "a", (Event("gradient", Sampling.full(), 0.0),), 3)])
    ledger.charge([charge("round 1", client="open data", count=1)])
    told = statement(ledger, "open data")
    assert (told["epsilon"], told["spent_epsilon"], told["left_epsilon"], told["public"]) == (None, None, None, True)
    text = statement_text(told)
    assert "the data are public" in text
    assert "without noise" in text
    assert "no limit" in text


def test_under_replace_one_both_figures_are_the_same(ledger: Ledger) -> None:
    adjacency = Adjacency.REPLACE_ONE
    ledger.open_account("bank", Budget(8.0, 1e-5, adjacency))
    event = Event("gradient", Sampling.fixed(100, 3000), 3.0, 5, adjacency)
    ledger.declare([Plan("bank", "a", (event,), 2)])
    ledger.charge([charge("round 1", client="bank", count=5)])
    told = statement(ledger, "bank")
    assert told["spent_epsilon"] == told["replace_one_epsilon"] > 0
    assert told["accountant_in_words"] == accounting.label("pld", "fixed")
    assert "drawn without replacement" in statement_text(told)


def test_an_account_that_released_nothing(ledger: Ledger) -> None:
    ledger.open_account("hospital 3", Budget(2.0, 1e-5))
    told = statement(ledger, "hospital 3")
    assert (told["spent_epsilon"], told["replace_one_epsilon"], told["left_epsilon"]) == (0.0, 0.0, 2.0)
    assert "nothing" in statement_text(told)


def test_the_export_is_json_and_holds_every_client_and_the_head(ledger: Ledger) -> None:
    ledger.open_accounts({"x": Budget(2.0, 1e-5), "y": Budget(math.inf, 1e-6)})
    ledger.declare([plan(2, client="x")])
    ledger.charge([charge("round 1", client="x")])
    told = export(ledger)
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert [s["client"] for s in told["statements"]] == ["x", "y"]
    assert told["statements"][0] == statement(ledger, "x")
    assert (told["ledger"]["entries"], told["ledger"]["head"]) == ledger.head
    assert [s["client"] for s in export(ledger, ["y"])["statements"]] == ["y"]
