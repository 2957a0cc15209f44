"""What the report says about privacy: verdicts on the first screen, statements of clients, who is over its budget."""

from __future__ import annotations

import math

import pytest
import report_fixture as fixture
from report_page import data_of, first_screen, page_of, shown_client, with_privacy

from sordino.study.report.numbers import as_epsilon, upward
from sordino.study.report.promises import promise_to, statement


def test_a_private_run_says_so_and_says_it_is_a_simulation():
    told = first_screen([fixture.result("dp-fedavg")])
    assert "Private" in told
    assert "NOT PRIVATE" not in told
    assert "This was a simulation." in told
    assert "zero-out adjacency, poisson sampling, pld accountant" in told


def test_a_run_that_is_not_private_says_so_before_anything_else():
    told = first_screen([fixture.result("fedavg")])
    assert told.split()[:3] == ["NOT", "PRIVATE", "fedavg"]
    assert "stayed within" not in told


def test_a_comparison_names_what_is_and_what_is_not_private():
    told = " ".join(first_screen(fixture.comparison()).split())
    assert "NOT PRIVATE fedavg Trained" in told
    assert "Private dp-fedavg, minimum-epsilon Every client stayed within" in told


def test_a_result_that_does_not_say_private_is_not_private():
    result = fixture.result("dp-fedavg")
    del result["private"]
    assert "NOT PRIVATE" in first_screen([result])


@pytest.mark.parametrize("spent", [9.0, None])
def test_a_client_over_its_budget_is_named_on_the_first_screen(spent):
    result = with_privacy(fixture.result(), epsilon=1.0, spent_epsilon=spent)
    told = first_screen([result])
    assert "BUDGET EXCEEDED" in told
    assert "client-00" in told
    assert "stayed within" not in told
    assert "does not hold" in statement(shown_client([result]), True)


def test_spending_that_is_not_recorded_is_not_taken_for_kept():
    result = fixture.result()
    for key in ("spent_epsilon", "run_epsilon"):
        del result["privacy"][3][key]
    assert "NOT SHOWN TO BE PRIVATE" in first_screen([result])
    result["privacy"] = []
    assert "NOT SHOWN TO BE PRIVATE" in first_screen([result])


def test_public_clients_are_named_and_do_not_spoil_the_others():
    told = first_screen([fixture.result(public=2)])
    assert "Declared public, without protection: client-00 and client-01." in told
    assert "Every client stayed within" in told
    everyone = fixture.result()
    for entry in everyone["privacy"]:
        entry |= {"epsilon": None, "spent_epsilon": None}
    assert "NOT PRIVATE" in first_screen([everyone])


def test_exactly_the_budget_is_within_the_budget():
    assert "EXCEEDED" not in first_screen([with_privacy(fixture.result(), epsilon=1.0, spent_epsilon=1.0)])


def test_a_statement_gives_budget_spending_releases_certainty_and_replace_one():
    entry = {
        "epsilon": 2.0,
        "delta": 1e-5,
        "spent_epsilon": 1.9986,
        "run_epsilon": 1.9986,
        "replace_one_epsilon": 3.48,
        "releases": [
            {"what": "gradient", "rate": 0.05, "noise": 2.0, "count": 268},
            {"what": "loss", "rate": 0.05, "noise": 5.0, "count": 268},
        ],
    }
    told = statement(shown_client([with_privacy(fixture.result(), **entry)]), True).replace("\u00a0", " ")
    assert "allowed ε = 2 at δ = 1e−5 and has spent ε = 1.999 (99.9 % of it)" in told
    assert "268 × gradient (rate 0.05, noise 2); 268 × loss (rate 0.05, noise 5)" in told
    assert f"at most {100 * math.e**1.9986 / (1 + math.e**1.9986):.1f} % sure" in told
    assert f"(replace-one): ε = 3.48, at most {100 * math.e**3.48 / (1 + math.e**3.48):.1f} % sure" in told


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        (17, "After round 17 its budget pays for no further turn."),
        (None, "at least one more turn"),
        (0, "not pay for a"),
    ],
)
def test_a_statement_says_when_the_budget_ends(ends, words):
    result = with_privacy(fixture.result(), budget_ends=ends)
    assert words in statement(shown_client([result]), True)
    assert data_of([result])["clients"]["sheets"][0]["rows"][0][10] == ("outlasts the run" if ends is None else ends)
    del result["privacy"][0]["budget_ends"]
    assert words not in statement(shown_client([result]), True)


def test_a_cumulative_ledger_is_told_apart_from_this_run():
    result = with_privacy(fixture.result(), epsilon=3.0, spent_epsilon=2.5, run_epsilon=1.25)
    told = statement(shown_client([result]), True).replace("\u00a0", " ")
    assert "spent ε = 2.5 " in told
    assert "This run accounts for ε = 1.25; the rest was spent by earlier runs" in told
    idle = with_privacy(result, run_epsilon=0.0)
    assert "This run accounts for ε\u00a0=\u00a00; the rest" in statement(shown_client([idle]), True)


def test_a_weak_promise_is_called_weak():
    result = with_privacy(fixture.result(), epsilon=30.0, spent_epsilon=29.0, replace_one_epsilon=60.0)
    assert "all but certain" in statement(shown_client([result]), True)
    assert "weak promise" in statement(shown_client([result]), True)
    assert "ε above 10 rules out little; that concerns client-00" in first_screen([result])


def test_what_the_guarantee_does_not_cover_is_said():
    page = page_of([fixture.result()])
    for words in ("tuning and choosing", "the observer's metrics", "Public by declaration", "the best round"):
        assert words in page


def test_a_deployment_is_not_called_a_simulation():
    page = page_of([fixture.result() | {"simulated": False}])
    assert '<span class="badge">Deployment</span>' in page
    assert "This was a simulation." not in page


def test_displayed_epsilon_never_looks_smaller_than_it_is():
    values = [0.33301, 1.00001, 5.5304, 10.7299, 123.456, 2.0, 1e-4, 0.1 + 0.2]
    for value in values:
        assert upward(value) >= value * (1 - 1e-8)
        assert upward(value) <= value * 1.001
    assert as_epsilon(1.00001) == "1.001"
    assert as_epsilon(2.0) == "2"
    assert as_epsilon(math.inf) == "∞"


def levels(**spent):
    allowed = {"strict": 0.5, "generous": 4.0}
    told = [{"level": name, "epsilon": allowed[name], "spent_epsilon": one} for name, one in spent.items()]
    return with_privacy(fixture.result("dp-fedavg"), epsilon=4.0, spent_epsilon=3.9, levels=told)


def test_levels_of_consent_are_told_and_each_is_held_against_its_own():
    kept, broken = (shown_client([levels(strict=spent, generous=3.9)]) for spent in (0.49, 0.6))
    told = statement(kept, True)
    assert promise_to(kept, True) == "within budget"
    assert "By level of consent: strict ε\u00a0=\u00a00.49 of 0.5, generous ε\u00a0=\u00a03.9 of 4" in told
    assert promise_to(broken, True) == "EXCEEDED"
    assert "records of a level of consent that spent more than it allowed" in statement(broken, True)
    assert "EXCEEDED" in first_screen([levels(strict=0.6, generous=3.9)])
