"""What the report says of the model, of fairness, contributions and runs, checked without a browser."""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
from html import unescape

import pytest
import report_fixture as fixture
from report_page import chart, data_of, first_screen, page_of, with_privacy

from sordino.errors import BadInput
from sordino.study import report
from sordino.study.report.gather import curve, grouped
from sordino.study.report.numbers import plain
from sordino.study.result import to_json
from sordino.study.run import train

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


def test_what_was_chosen_automatically_does_not_split_a_method_nor_its_label():
    """Steps follow from sizes and noise, so they differ by seed, and where noise is shared."""
    study = {"training": {"lr": 1.0, "rounds": 200, "clip": 1.0}, "auto": ["lr 1: no noise", "rounds 200: enough"]}
    other = {**study, "training": {"lr": 2.0, "rounds": 250, "clip": 1.0}, "auto": ["lr 2: less", "rounds 250: more"]}
    shared = {**other, "trust": {"noise": "shared", "colluders": 6}}
    runs = [{"method": "auto", "seed": seed, "study": one} for seed, one in enumerate((study, other, shared))]
    labels = [(group.label, len(group.runs)) for group in grouped(runs)]
    assert labels == [("auto", 2), ("auto with shared noise (6 conspiring)", 1)]
    by_hand = [{**one, "study": {"training": one["study"]["training"]}} for one in runs[:2]]
    assert [group.label for group in grouped(by_hand)] == ["auto lr=1.0 rounds=200", "auto lr=2.0 rounds=250"]


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


def test_a_name_with_a_script_stays_text_wherever_it_is_written():
    evil = '<script>alert("x")</script>{{ 7 * 7 }}'
    results = fixture.comparison(seeds=(0,))
    for result in results:
        result["privacy"][0]["client"] = evil
        result["study"]["name"] = evil
    results[1]["privacy"][0] |= {"epsilon": 1.0, "spent_epsilon": 9.0}  # names the client on the first screen
    page = page_of(results)
    assert "<script>alert" not in page
    assert "49" not in re.search(r"<h1>(.*?)</h1>", page)[1]
    assert unescape(re.search(r"<h1>(.*?)</h1>", page)[1]).startswith(evil)
    assert evil in first_screen(results)


def test_schema_two_adds_keys_that_the_report_can_do_without():
    first = fixture.result(rounds=2)
    second = copy.deepcopy(first) | {"schema": 2, "checksum": None, "evaluation": None, "trust": None}
    for entry in second["privacy"]:
        entry["own_epsilon"] = None
    assert page_of([second]) == page_of([first])


@pytest.mark.parametrize(
    ("results", "words"),
    [([], "no result"), ([{"rounds": []}], "names no method"), ([{"method": "x", "schema": 7}], "schema 7")],
)
def test_what_is_not_a_result_is_refused(results, words):
    with pytest.raises(BadInput, match=words):
        report.render(results)


def compared(page: str, table: str) -> list[list[str]]:
    body = re.search(rf'id="{table}".*?<tbody>(.*?)</tbody>', page, re.S)[1]
    rows = re.findall(r"<tr>(.*?)</tr>", body, re.S)
    return [[unescape(re.sub("<.*?>", "", cell)) for cell in re.findall(r"<td.*?</td>", row, re.S)] for row in rows]


def test_the_model_is_compared_with_its_baselines_for_all_and_for_the_strictest_third():
    result = fixture.with_baselines(fixture.result("dp-fedavg", clients=6))
    accuracy = result["final"]["client_accuracy"] = [0.5, 0.9, 0.6, 0.8, 0.7, 0.9]
    result["study"]["budgets"] = [3.0, 0.1, 2.0, 0.2, 4.0, 5.0]
    for entry, epsilon in zip(result["privacy"], result["study"]["budgets"]):
        entry["epsilon"] = epsilon
    found = result["baselines"]
    found["majority"]["client_accuracy"] = [0.5, 0.8, 0.7, 0.7, 0.1, 0.2]
    found["alone"]["client_accuracy"] = [0.4, 0.95, 0.5, 0.7, 0.6, 0.8]
    page = page_of([result])
    everyone, strict = compared(page, "t-compared")
    assert everyone[1:] == ["all clients", "73.3 %", "50.0 %", "65.8 %", "90.0 %", "+23.3 points", "+7.5 points"]
    assert strict[1:] == ["strictest third by ε", "85.0 %", "75.0 %", "82.5 %", "90.0 %", "+10.0 points", "+2.5 points"]
    rows = compared(page, "t-compared-clients")
    assert [row[3] for row in rows] == [f"{100 * one:.1f} %" for one in accuracy]
    assert rows[1][2:] == ["0.1", "90.0 %", "80.0 %", "95.0 %", "90.0 %"]
    told = unescape(page)
    assert "most frequent class for 4 of 6 clients and as good for 1; better for 2 of the 2 strictest." in told
    assert "own data alone at the same ε for 5 of 6 clients; better for 1 of the 2 strictest." in told


def test_only_the_majority_class_points_to_the_command_that_trains_the_others():
    result = fixture.with_baselines(fixture.result("dp-fedavg"))
    del result["baselines"]["alone"], result["baselines"]["ceiling"]
    assert "sordino run --baselines" in page_of([result])
    assert "Compared with what?" not in page_of([fixture.result("dp-fedavg")])
    result["baselines"]["ceiling"] = {"failed": "training <diverged>"}
    assert "No noise" not in page_of([result])
    assert "training &lt;diverged&gt;" in page_of([result])


def test_two_classes_and_numbers_have_their_own_figures():
    result = fixture.result("dp-fedavg")
    result["final"] |= {"auc": 0.91, "sensitivity": 0.75, "specificity": 0.5, "confusion": [[5, 5], [2, 6]]}
    page = page_of([result, {**result, "seed": 1}])
    assert compared(page, "t-confusion")[0][1:] == ["10", "10", "4", "12"]
    assert {"0.91 ± 0", "75.0 ± 0.0 %", "50.0 ± 0.0 %"} <= set(compared(page, "t-good")[0])
    result["final"] = {"accuracy": None, "loss": 0.1, "rmse": 12.5, "r2": 0.8}
    assert {"12.5", "0.8"} <= set(compared(page_of([result]), "t-good")[0])
