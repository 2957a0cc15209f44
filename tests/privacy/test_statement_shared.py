"""Statements of clients that shared noise: whom figures hold against, the two kinds of promise apart."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from ledger_cases import GRADIENT, charge, plan

from sordino.privacy import accounting
from sordino.privacy.ledger import Ledger
from sordino.privacy.statement import export, statement, statement_text
from sordino.privacy.trust import EVERYBODY, Against, Shared
from sordino.privacy.types import Budget, Event, Sampling

SITES = 10
RATE, COUNT, DELTA = 0.05, 10, 1e-5


def shared(sites: int = SITES, colluders: int = 2, dropouts: int = 1) -> Shared:
    return Shared(sites, colluders, dropouts, deviation=1e9, width=100)


def ledger_with(path: Path, *kinds: Shared | None, noise: float = 2.0) -> Ledger:
    """A ledger with a run of one turn for each of these ways to share noise."""
    ledger = Ledger(path)
    ledger.open_account("hospital 3", Budget(50.0, DELTA))
    for place, kind in enumerate(kinds):
        ledger.declare([plan(1, run=f"run {place}", turn=(replace(GRADIENT, noise=noise, shared=kind),))])
    ledger.charge([charge("all", run=f"run {place}", count=COUNT) for place in range(len(kinds))])
    return ledger


def cost(*noises: float) -> float:
    """ε of a turn with each of these multipliers, by an accountant that knows nothing of sharing."""
    events = [Event("gradient", Sampling.poisson(RATE), z, COUNT) for z in noises]
    return float(accounting.composed_epsilon([events], [DELTA])[0])


def left_over(colluders: int, sites: int = SITES, lost: int = 1, promised: int = 2) -> float:
    """z with so many colluders over z as promised, by adding up the shares one by one."""
    share = 1.0 / math.sqrt(max(1, sites - promised - lost))
    known = sorted([share] * sites, reverse=True)
    still_there = known[: max(1, sites - colluders - lost)]
    return math.sqrt(sum(one**2 for one in still_there))


# ---- whom figures hold against ----


@pytest.mark.parametrize(
    ("kinds", "told"),
    [
        ([None], EVERYBODY),
        ([shared()], "against the server and any two of the nine other sites"),
        ([shared(), None], "against the server and any two of the nine other sites"),
        ([shared(10, 4), shared(10, 2)], "against the server and any two of the nine other sites"),
        ([shared(20, 1), shared(3, 1, 0)], "against the server and any one other site"),
        ([shared(20, 9), shared(6, 2)], "against the server and any two other sites"),
        ([shared(20, 9), shared(6, 0)], "against the server, while no other site conspires with it"),
        ([shared(6, 0)], "against the server, while none of the five other sites conspires with it"),
        ([shared(3, 2, 0)], EVERYBODY),
        ([shared(4, 1, 2)], EVERYBODY),
        ([shared(4, 1, 2), shared(10, 3)], "against the server and any three of the nine other sites"),
    ],
)
def test_the_weakest_promise_counts(kinds, told):
    assert Against.weakest(kinds).words() == told


def test_the_total_holds_against_the_fewest_colluders_of_any_run(tmp_path):
    """ε composed at each run's own c is at least ε composed at c*, which is what is claimed."""
    with ledger_with(tmp_path / "l.db", shared(10, 4), shared(20, 2), None) as ledger:
        fewest = ledger.against("hospital 3").colluders
        assert fewest == 2
        assert ledger.epsilon_against(fewest)["hospital 3"] <= ledger.epsilon()["hospital 3"]
        assert ledger.trust("hospital 3") == "against the server and any two other sites"


@pytest.mark.parametrize("colluders", [0, 1, 2, 3, 6, 8, 9, 50])
def test_epsilon_against_another_number_of_colluders(tmp_path, colluders):
    with ledger_with(tmp_path / "l.db", shared()) as ledger:
        expected = cost(2.0 * left_over(colluders))
        assert ledger.epsilon_against(colluders)["hospital 3"] == pytest.approx(expected, rel=1e-6)


def test_noise_of_its_own_does_not_depend_on_anybody(tmp_path):
    with ledger_with(tmp_path / "l.db", None, None) as ledger:
        spent = ledger.epsilon()
        assert ledger.epsilon_against(7) == ledger.epsilon_against(None) == ledger.own_epsilon() == spent


def test_what_everybody_else_together_leaves(tmp_path):
    with ledger_with(tmp_path / "l.db", shared(), None) as ledger:
        assert ledger.own_epsilon()["hospital 3"] == pytest.approx(cost(2.0 / math.sqrt(7), 2.0), rel=1e-6)


def test_where_a_filter_holds_its_meter_is_shown_for_every_number_of_colluders(tmp_path):
    """A later run that may follow from an earlier one: no figure is below what the filter's meter says."""
    with ledger_with(tmp_path / "l.db", shared()) as ledger:
        ledger.declare([plan(1, run="later", turn=(replace(GRADIENT, shared=shared()),))])
        ledger.charge([charge("all", run="later", count=COUNT)])
        assert ledger.rests_on_filter("hospital 3")
        counts = [ledger.epsilon_against(count)["hospital 3"] for count in (0, 2, 5)]
        assert counts[1] == pytest.approx(ledger.epsilon()["hospital 3"])
        assert counts[1] > cost(2.0, 2.0)
        assert counts == sorted(counts)


# ---- the statement ----


def test_both_kinds_of_promise_are_told_apart(tmp_path):
    with ledger_with(tmp_path / "l.db", shared(), None) as ledger:
        told = statement(ledger, "hospital 3")
    kinds = told["shared_noise"]
    assert told["trust"] == "against the server and any two of the nine other sites"
    assert kinds["own_noise_epsilon"] == pytest.approx(cost(2.0), rel=1e-6)
    assert kinds["shared_noise_epsilon"] == pytest.approx(cost(2.0), rel=1e-6)
    assert told["spent_epsilon"] == pytest.approx(cost(2.0, 2.0), rel=1e-6)
    assert kinds["own_epsilon"] == pytest.approx(cost(2.0 / math.sqrt(7), 2.0), rel=1e-6)
    assert [one["colluders"] for one in kinds["against"]] == [0, 2, 4, 6, 8]
    for one in kinds["against"]:
        assert one["epsilon"] == pytest.approx(cost(2.0 * left_over(one["colluders"]), 2.0), rel=1e-6)
    assert [one.get("shared", {}).get("colluders") for one in told["releases"]] == [2, None]


def test_an_officer_reads_both(tmp_path):
    with ledger_with(tmp_path / "l.db", shared(), None) as ledger:
        text = statement_text(statement(ledger, "hospital 3"))
    trust = "against the server and any two of the nine other sites"
    for words in (
        f"that holds {trust}",
        "Two kinds of promise:",
        f", {EVERYBODY}",
        f"both together:     epsilon {cost(2.0, 2.0):.2f}"[:-1],
        "If other sites conspire with the server:",
        "none of them       epsilon ",
        "(as promised)",
        "all of them        epsilon ",
        f"(shared by 10 sites, {trust})",
        "1/z = 1/z_1 + 1/z_2",
        "as strong as the ciphers",
        "one site can spoil it unseen",
    ):
        assert words in text
    assert text.count("(as promised)") == 1
    assert text.index("all of them") > text.index("(as promised)")


def test_a_client_that_never_shared_reads_nothing_of_it(tmp_path):
    with ledger_with(tmp_path / "l.db", None) as ledger:
        told = statement(ledger, "hospital 3")
    text = statement_text(told)
    assert told["shared_noise"] is None
    assert f"that holds {EVERYBODY}" in text
    assert "conspire" not in text
    assert "mask" not in text


def test_shares_alone_release_nothing_of_its_own(tmp_path):
    with ledger_with(tmp_path / "l.db", shared()) as ledger:
        text = statement_text(statement(ledger, "hospital 3"))
    assert "noise of its own:  nothing released\n" in text


def test_a_run_of_many_sites_lists_few_numbers_with_the_promised_one(tmp_path):
    with ledger_with(tmp_path / "l.db", shared(50, 23, 2)) as ledger:
        kinds = statement(ledger, "hospital 3")["shared_noise"]
    counts = [one["colluders"] for one in kinds["against"]]
    assert {0, 23, 48} <= set(counts)
    assert len(counts) <= 11
    epsilons = [one["epsilon"] for one in kinds["against"]] + [kinds["own_epsilon"]]
    assert epsilons == sorted(epsilons)


def test_an_account_that_is_not_private_promises_nothing_of_either_kind(tmp_path):
    with ledger_with(tmp_path / "l.db", shared()) as ledger:
        ledger.mark_not_private("hospital 3", "an injected generator")
        told = statement(ledger, "hospital 3")
    assert told["shared_noise"]["own_epsilon"] is None
    assert told["shared_noise"]["against"] == []
    assert "infinite" in statement_text(told)


def test_public_data_is_promised_nothing(tmp_path):
    with Ledger(tmp_path / "l.db") as ledger:
        ledger.open_account("hospital 3", Budget(math.inf, DELTA))
        ledger.declare([plan(1, turn=(replace(GRADIENT, noise=0.0, shared=shared()),))])
        ledger.charge([charge("all", count=COUNT)])
        text = statement_text(statement(ledger, "hospital 3"))
    assert "that holds" not in text
    assert "Two kinds of promise" not in text


def test_the_export_is_plain_json(tmp_path):
    with ledger_with(tmp_path / "l.db", shared(), None) as ledger:
        told = export(ledger)
    assert json.loads(json.dumps(told)) == told
