"""What the report says, checked without a browser: verdicts, statements, figures over seeds, size, safety."""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import re
import subprocess
import sys
from decimal import Decimal
from html import unescape

import pytest
import report_fixture as fixture

from sordino.errors import BadInput
from sordino.study import report
from sordino.study.report.gather import curve, grouped
from sordino.study.report.numbers import MAX_POINTS, as_epsilon, plain, spread, thin, upward
from sordino.study.report.promises import statement
from sordino.study.result import to_json
from sordino.study.run import train


def page_of(results) -> str:
    """The page without the chart library, as the tests read it."""
    page = report.render(results)
    before, rest = page.split('<script type="application/json" id="report-data">')
    data, after = rest.split("</script>", 1)
    return f"{before}<data>{data}</data>{after.rpartition('<script>')[2]}"


def data_of(results) -> dict:
    return json.loads(page_of(results).split("<data>")[1].split("</data>")[0])


def first_screen(results) -> str:
    page = page_of(results)
    return unescape(
        re.sub(r"<[^>]+>", " ", page[page.index('<div class="verdicts">') : page.index('<dl class="tiles">')])
    )


def chart(results, identity: str) -> dict:
    return next(one for one in data_of(results)["charts"] if one["id"] == identity)


def shown_client(results, place: int = 0):
    return grouped(results)[0].runs[0].clients[place]


def with_privacy(result: dict, **changes) -> dict:
    changed = copy.deepcopy(result)
    changed["privacy"][0].update(changes)
    return changed


# ---- is it private ----


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


# ---- is it good, is it fair ----


def test_curves_are_mean_and_deviation_over_the_seeds_that_evaluated_a_round():
    runs = fixture.comparison(("dp-fedavg",), (0, 1, 2), rounds=20, evaluate_every=5)
    runs[2]["rounds"][4]["accuracy"] = None
    found = curve(grouped(runs)[0], "accuracy")
    assert found.rounds == [5, 10, 15, 20]
    for place, number in enumerate(found.rounds):
        values = [run["rounds"][number - 1]["accuracy"] for run in runs]
        values = [value for value in values if value is not None]
        mean = sum(values) / len(values)
        deviation = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5
        assert found.mean[place] == pytest.approx(mean)
        assert found.deviation[place] == pytest.approx(deviation)


def test_the_band_goes_out_along_the_upper_edge_and_back_along_the_lower():
    runs = fixture.comparison(("dp-fedavg",), (0, 1), rounds=10)
    band, line = chart(runs, "accuracy")["traces"]
    found = curve(grouped(runs)[0], "accuracy")
    expected = [m + s for m, s in zip(found.mean, found.deviation)]
    expected += [m - s for m, s in zip(reversed(found.mean), reversed(found.deviation))]
    assert band["y"] == pytest.approx(expected, rel=1e-3)
    assert line["y"] == pytest.approx(found.mean, rel=1e-4)


def test_a_run_that_diverged_is_named_where_the_model_is_judged(digits):
    wild = train(digits, "mlp", "dp-fedavg", rounds=2, rate=0.2, server_lr=1e30).result
    good = train(digits, "mlp", "fedavg", rounds=2, rate=0.2).result
    results = [json.loads(to_json(one)) for one in (wild, good)]
    page = page_of(results)
    told = page[page.index("Training diverged") :].partition("</p>")[0]
    assert page.index("Is it good?") < page.index("Training diverged") < page.index("Is it fair?")
    assert "dp-fedavg (1 of 1)" in told
    assert "training.lr" in told
    assert "Training diverged" not in page_of(results[1:])


def test_a_level_share_is_drawn_between_nought_and_one_and_rounds_are_whole():
    result = fixture.result(rounds=8)
    for record in result["rounds"]:
        record["accuracy"] = 0.1
    drawn = chart([result], "accuracy")
    assert drawn["y"]["range"] == [0, 1]
    assert drawn["x"]["dtick"] == 1
    usual = chart([fixture.result(rounds=30)], "accuracy")
    assert "range" not in usual["y"]
    assert "dtick" not in usual["x"]


def test_the_table_of_methods_has_mean_and_deviation_of_the_final_round():
    runs = fixture.comparison(seeds=(0, 1, 2))
    page = page_of(runs)
    for method in ("fedavg", "dp-fedavg", "minimum-epsilon"):
        values = [100 * run["final"]["accuracy"] for run in runs if run["method"] == method]
        mean = sum(values) / 3
        deviation = (sum((value - mean) ** 2 for value in values) / 2) ** 0.5
        assert f"{mean:.1f} ± {deviation:.1f} %" in page


def test_one_seed_has_no_deviation_and_no_band():
    results = fixture.comparison(seeds=(0,))
    assert "±" not in re.search(r'id="t-good".*?</table>', page_of(results), re.S)[0]
    assert [trace["name"] for trace in chart(results, "accuracy")["traces"]] == [
        "fedavg",
        "dp-fedavg",
        "minimum-epsilon",
    ]


def test_a_method_that_is_not_private_is_drawn_at_the_budgets_its_clients_declared():
    results = fixture.comparison(seeds=(0,))
    traces = {trace["name"]: trace for trace in chart(results, "accuracy-budget")["traces"]}
    assert traces["fedavg"]["x"] == traces["dp-fedavg"]["x"] == pytest.approx(fixture.budgets(12), rel=1e-3)
    alone = fixture.result("fedavg")
    del alone["study"]["budgets"]
    assert "accuracy-budget" not in [one["id"] for one in data_of([alone])["charts"]]


def test_sizes_come_from_the_study_or_from_the_privacy_entries():
    result = fixture.result()
    assert [client.size for client in grouped([result])[0].runs[0].clients] == result["study"]["sizes"]
    for place, entry in enumerate(result["privacy"]):
        entry["n"] = 100 + place
    assert [client.size for client in grouped([result])[0].runs[0].clients] == list(range(100, 112))


def test_clients_are_ordered_from_the_strictest_budget():
    results = [fixture.result()]
    names = chart(results, "accuracy-by-client")["x"]["ticktext"]
    budgets = {entry["client"]: entry["epsilon"] for entry in results[0]["privacy"]}
    assert names == sorted(budgets, key=budgets.get)


def test_fairness_is_told_on_test_and_training_sets_with_the_tenths_and_the_variance():
    results = [fixture.result("dp-fedavg")]
    told = re.search(r'id="t-fair".*?</table>', page_of(results), re.S)[0]
    final = results[0]["final"]
    cells = re.findall(r"<td class=num[^>]*>([^<]*)</td>", told)
    assert cells[:2] == [plain(final["psi"]), plain(final["train_psi"])]
    assert cells[2:5] == [f"{100 * final[key]:.1f} %" for key in ("worst_accuracy", "worst_decile", "best_decile")]
    assert cells[5] == "31"  # 0.0031, in points²


def test_accuracy_is_grouped_by_budget_and_the_gap_is_named():
    result = fixture.result(clients=6)
    budgets, accuracy = [0.1, 5.0, 0.2, 1.0, 9.0, 1.1], [0.2, 0.9, 0.4, 0.5, 0.7, 0.7]
    for entry, epsilon in zip(result["privacy"], budgets):
        entry["epsilon"] = epsilon
    result["final"]["client_accuracy"] = accuracy
    told = re.search(r'id="t-budgets".*?</table>', page_of([result]), re.S)[0]
    assert re.findall(r"<td class=num[^>]*>([^<]*)</td>", told) == ["30.0 %", "60.0 %", "80.0 %", "+50.0 points"]
    assert "strictest: ε 0.1 to 0.2" in told
    for entry in result["privacy"]:
        entry["epsilon"] = 1.0
    assert 'id="t-budgets"' not in page_of([result])


def test_the_groups_of_a_real_run_are_those_of_its_result(digits):
    done = train(digits, "logistic", rounds=2, rate=0.2)
    told = re.search(r'id="t-budgets".*?</table>', page_of([json.loads(to_json(done.result))]), re.S)[0]
    expected = [f"{100 * one['accuracy']:.1f} %" for one in done.result["final"]["by_budget"]]
    assert re.findall(r"<td class=num[^>]*>([^<]*)</td>", told)[:3] == expected


def test_group_curves_are_means_over_clients_and_seeds():
    runs = fixture.comparison(("dp-fedavg",), (0, 1), clients=6, rounds=4)
    for run, shift in zip(runs, (0.0, 0.1)):
        for entry, epsilon in zip(run["privacy"], [1, 1, 2, 2, 3, 3]):
            entry["epsilon"] = epsilon
        for row in run["rounds"]:
            row["client_accuracy"] = [shift + one for one in (0.1, 0.3, 0.4, 0.4, 0.8, 0.6)]
    runs[1]["rounds"][0]["client_accuracy"][5] = None
    curves = chart(runs, "client-curves")["curves"][0]
    assert [values[0] for _, values in curves["groups"]] == [250, 450, 800]  # of (0.8, 0.6) and 0.9 alone
    assert [one[3][0] for one in curves["clients"]] == [100, 300, 400, 400, 800, 600]


def test_hundreds_of_clients_are_thinned_by_budget():
    curves = chart([fixture.result(clients=400, rounds=100)], "client-curves")["curves"][0]
    assert 75 <= len(curves["clients"]) <= 150
    assert len(curves["rounds"]) == 40


# ---- who contributed ----


def test_noise_power_is_held_against_the_least_possible():
    result = fixture.result("robust-hdp", rounds=2)
    result["rounds"][-1]["observer"] |= {"noise_power": 0.6, "least_noise_power": 0.4}
    told = re.search(r'id="t-combined".*?</table>', page_of([result]), re.S)[0]
    assert ">1.5 ×</td>" in told
    assert "as drawn" in told
    result["rounds"][-1]["declared_weights"] = dict.fromkeys(result["rounds"][-1]["weights"], 1 / 12)
    assert "off by up to" in page_of([result])
    assert "t-combined" not in page_of([fixture.result("fedavg")])


def test_spectra_of_updates_and_of_their_low_rank_part_are_drawn():
    result = fixture.result("robust-hdp", rounds=3)
    updates, low = chart([result], "spectrum")["traces"]
    assert updates["y"] == pytest.approx(result["rounds"][-1]["diagnostics"]["update_singular_values"], rel=1e-3)
    assert low["y"] == pytest.approx([4.0, 1.0, 3.03])


def test_participation_counts_virtual_copies_and_understands_positions():
    result = fixture.result(clients=3, rounds=2)
    result["rounds"][0] |= {"participants": [0, 0, 2], "weights": {"client-00": 0.75, "client-02": 0.25}}
    result["rounds"][1] |= {"participants": ["client-02"], "weights": {"client-02": 1.0}}
    clients = grouped([result])[0].runs[0].clients
    assert [client.participation for client in clients] == [1.0, 0.0, 1.0]
    assert [client.weight for client in clients] == [0.75, None, 0.625]


def test_equal_participation_is_a_sentence_instead_of_a_chart():
    results = [fixture.result()]
    assert "Every client took part once in every round." in page_of(results)
    assert "participation" not in [one["id"] for one in data_of(results)["charts"]]
    results[0]["rounds"][0]["participants"] = ["client-00"]
    assert "participation" in [one["id"] for one in data_of(results)["charts"]]


def test_diagnostics_are_drawn_or_named():
    result = fixture.result(rounds=3)
    for row in result["rounds"]:
        row["diagnostics"] = {f"number {n}": n * row["round"] for n in range(6)} | {"words": "no"}
    assert chart([result], "diagnostics-number-3")["traces"][0]["y"] == [3, 6, 9]
    assert "Recorded but not drawn: number 4 and number 5." in page_of([result])


# ---- what was run ----


def test_runs_versions_and_settings_are_listed():
    page = unescape(page_of(fixture.comparison()))
    for words in ("training.lr", "2.13.0", '"fedavg" | "dp-fedavg" | "minimum-epsilon"', "0 | 1"):
        assert words in page


def test_a_sweep_is_told_apart_by_what_differs():
    results = [fixture.result(seed=seed) for seed in (0, 1)] * 2
    results = [copy.deepcopy(result) for result in results]
    for result in results[2:]:
        result["study"]["training"]["lr"] = 0.1
    groups = grouped(results)
    assert [group.label for group in groups] == ["dp-fedavg lr=0.5", "dp-fedavg lr=0.1"]
    assert [len(group.runs) for group in groups] == [2, 2]


def test_what_a_seed_decides_does_not_split_a_method():
    results = fixture.comparison(("dp-fedavg",), (0, 1))
    results[1]["study"]["budgets"] = results[1]["study"]["budgets"][::-1]
    results[1]["study"]["sizes"] = results[1]["study"]["sizes"][::-1]
    assert [(group.label, len(group.runs)) for group in grouped(results)] == [("dp-fedavg", 2)]


def test_seeds_that_charged_differently_have_their_own_client_tables():
    results = fixture.comparison(("dp-fedavg",), (0, 1, 2))
    results[1] = with_privacy(results[1], epsilon=7.0)
    labels = [sheet["label"] for sheet in data_of(results)["clients"]["sheets"]]
    assert labels == ["dp-fedavg, seeds 0, 2", "dp-fedavg, seed 1"]


def test_the_same_run_given_twice_is_not_two_seeds():
    groups = grouped([fixture.result(), fixture.result()])
    assert [group.label for group in groups] == ["dp-fedavg", "dp-fedavg (2)"]


# ---- everything is optional, nothing is trusted ----


def test_every_field_but_the_method_may_be_missing():
    whole = fixture.result(rounds=3)
    for key in whole:
        if key != "method":
            assert "dp-fedavg" in page_of([{name: value for name, value in whole.items() if name != key}]), key
    for place, key in itertools.product(("rounds", "privacy"), set(whole["rounds"][0]) | set(whole["privacy"][0])):
        less = copy.deepcopy(whole)
        for row in less[place]:
            row.pop(key, None)
        assert "dp-fedavg" in page_of([less]), (place, key)
    assert "NOT PRIVATE" in first_screen([{"method": "dp-fedavg"}]), "what does not say that it is private is not"


def test_a_regression_has_no_accuracy_anywhere():
    result = fixture.result(rounds=3)
    for row in [*result["rounds"], result["final"]]:
        row["accuracy"] = None
    result["final"] |= {"client_accuracy": [None] * 12, "worst_accuracy": None, "central_accuracy": None}
    identities = [one["id"] for one in data_of([result])["charts"]]
    assert "loss" in identities
    assert not [one for one in identities if "accuracy" in one]


def test_an_unfinished_run_shows_its_last_evaluated_round():
    result = fixture.result(rounds=7, evaluate_every=3)
    del result["final"]
    result["rounds"][-1]["accuracy"] = None
    assert grouped([result])[0].over_seeds("accuracy").mean == result["rounds"][5]["accuracy"]


def test_infinities_and_nans_of_python_are_understood():
    result = fixture.result(public=1)
    for entry in result["privacy"]:
        entry |= {key: math.inf for key, value in entry.items() if value is None}
    result["rounds"][0]["loss"] = math.nan
    assert "Declared public" in first_screen([result])
    assert chart([result], "loss")["traces"][0]["x"][0] == 2


def test_names_cannot_break_out_of_the_page():
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>&amp;{{plotly}}"
    result = fixture.result(rounds=2)
    result["method"] = evil
    result["study"]["name"] = evil
    result["privacy"][0]["client"] = evil
    page = page_of([result])
    assert "<img" not in page
    assert "alert(1)</script>" not in page
    assert data_of([result])["clients"]["sheets"][0]["rows"][0][0] == evil


@pytest.mark.parametrize(
    ("results", "words"),
    [([], "no result"), ([{"rounds": []}], "names no method"), ([{"method": "x", "schema": 7}], "schema 7")],
)
def test_what_is_not_a_result_is_refused(results, words):
    with pytest.raises(BadInput, match=words):
        report.render(results)


# ---- the file ----


def test_the_five_questions_stand_in_their_order():
    page = page_of(fixture.comparison())
    places = [page.index(f'<section id="{name}"') for name in ("private", "good", "fair", "contributed", "run")]
    assert places == sorted(places)


def test_nothing_on_the_page_points_outside():
    page = page_of(fixture.comparison())
    assert not re.findall(r"""(?:src|href|url|import)\s*[=(]\s*["']?(?:https?:)?//""", page)


def test_a_large_comparison_stays_under_six_megabytes_with_short_series():
    methods = ("fedavg", *fixture.PRIVATE[:4])
    results = fixture.comparison(methods, (0, 1, 2), clients=100, rounds=500)
    for seed, result in enumerate(results):  # no two runs alike: nothing can be shared between seeds
        for entry in result["privacy"]:
            entry["delta"] = 1e-5 * (1 + seed / 100)
    page = report.render(results)
    assert len(page.encode()) < 6_000_000
    data = json.loads(page.split('id="report-data">')[1].split("</script>", 1)[0], parse_float=Decimal)
    assert len(data["clients"]["sheets"]) == 15
    (curves,) = (one for one in data["charts"] if one["id"] == "client-curves")
    assert all(len(client[3]) == 40 for method in curves["curves"] for client in method["clients"])
    for one in data["charts"]:
        if one is curves:
            continue
        if one["x"]["title"] == "round":
            assert max(len(trace["x"]) for trace in one["traces"]) <= 2 * MAX_POINTS  # a band goes out and back
        assert max(digits(y) for trace in one["traces"] for y in trace["y"]) <= 5


def digits(value: Decimal | int) -> int:
    return len(Decimal(value).normalize().as_tuple().digits)


def test_thinning_keeps_the_ends_and_the_limit():
    for count in (1, 2, 199, 200, 201, 500, 12_345):
        kept = thin(count)
        assert kept[0] == 0
        assert kept[-1] == count - 1
        assert len(kept) <= MAX_POINTS
        assert kept == sorted(set(kept))


def test_writing_replaces_the_file_whole_or_not_at_all(tmp_path, monkeypatch):
    target = tmp_path / "new" / "report.html"
    assert report.write([fixture.result(rounds=2)], target) == target
    whole = target.read_text()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BadInput, match="No space left on device"):
        report.write([fixture.result("fedavg", rounds=2)], target)
    assert target.read_text() == whole
    assert os.listdir(target.parent) == ["report.html"]


def test_a_place_that_cannot_be_written_is_bad_input(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written"):
        report.write([fixture.result(rounds=2)], tmp_path / "file" / "report.html")


def test_the_package_does_not_import_plotly():
    check = "import sys, sordino.study.report; sys.exit('plotly' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_numbers_for_people():
    shown = [plain(value) for value in (None, math.nan, math.inf, 0, 0.00012345, 0.1, 2.5, 1234.5, 1e-5, 3.2e9, -0.25)]
    assert shown == ["–", "–", "∞", "0", "0.000123", "0.1", "2.5", "1,234", "1e−5", "3.2e9", "−0.25"]
    assert spread([1.0, None, 3.0]).deviation == pytest.approx(2**0.5)
    assert spread([None]) is None
