"""Searching alike: the same budget for all, on records that no table reports, never at an edge without saying so."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

import papers as reproduce
from papers.catalogue import EXPERIMENTS
from papers.experiment import Cell, Measure, Quick
from papers.make import Workshop
from papers.search import BEYOND, FINALISTS, FOLLOWED, TUNING_SEEDS, edges, screening, searched, searches, told
from papers.validation import REPORTED

SCORE = Measure("score", "score", 1.0, ".2f", True)
RATES = (0.5, 0.03, 0.06, 0.12, 0.25, 1.0, 2.0, 4.0)


def cell(**search):
    training = {"rounds": 40, "clip": 1.0}
    return Cell("b", "r", "c", {"name": "digits"}, "logistic", "dp-fedavg", training, search=search)


def world(short, long=None):
    """Scores are best at these values of lr (and clip), in short runs and in long ones."""

    def read(run):
        training = run.settled.training
        best = short if training["rounds"] == 10 else long or short
        score = -sum(abs(math.log(training[key] / value)) for key, value in best.items())
        return {"final": {"score": score}, "seconds": 1.0}

    return read


def at(found, stage, seed=100):
    return [one["values"] for one in found.trials if one["stage"] == stage and one["seed"] == seed]


def test_eight_settings_at_a_quarter_then_two_on_three_seeds_at_all_rounds():
    found = searched(cell(lr=RATES), SCORE, world({"lr": 0.55}))
    assert at(found, "screen") == [{"lr": rate} for rate in RATES]
    assert {one["rounds"] for one in found.trials if one["stage"] == "screen"} == {10}
    finals = [one for one in found.trials if one["stage"] == "final"]
    assert {one["rounds"] for one in finals} == {40}
    assert {one["seed"] for one in finals} == set(TUNING_SEEDS)
    assert at(found, "final")[:FINALISTS] == [{"lr": 0.5}, {"lr": 1.0}]
    assert (found.chosen, found.at_edge, found.unbracketed) == ({"lr": 0.5}, [], [])


def test_where_a_quarter_says_little_settings_are_screened_at_all_rounds():
    """Long runs like shorter steps: screened by those, the search begins where it ends."""
    found = searched(cell(lr=RATES), SCORE, world({"lr": 4.0}, {"lr": 0.13}), share=1)
    assert {one["rounds"] for one in found.trials} == {40}
    assert at(found, "screen") == [{"lr": rate} for rate in RATES]
    assert at(found, "final")[:FINALISTS] == [{"lr": 0.12}, {"lr": 0.25}]
    assert found.chosen == {"lr": 0.12}
    assert len(found.made) < len(found.trials), "the screened run of a finalist is its first final"


def test_the_number_of_rounds_may_be_searched_too_and_outwards():
    def read(run):
        training = run.settled.training
        score = -abs(math.log(training["lr"] / 0.25)) - abs(math.log(training["rounds"] / 15))
        return {"final": {"score": score}, "seconds": 1.0}

    found = searched(cell(lr=(0.12, 0.25, 0.5), rounds=(80, 40)), SCORE, read, share=1)
    assert found.chosen == {"lr": 0.25, "rounds": 20}
    assert {one["values"]["rounds"] for one in found.trials} >= {80, 40, 20, 10}


def test_the_better_finalist_is_followed_to_where_long_runs_are_best():
    found = searched(cell(lr=RATES), SCORE, world({"lr": 1.2}, {"lr": 0.4}))
    assert at(found, "final") == [{"lr": 1.0}, {"lr": 2.0}, {"lr": 0.5}, {"lr": 0.25}]
    assert (found.chosen, found.unbracketed) == ({"lr": 0.5}, [])
    far = searched(cell(lr=RATES), SCORE, world({"lr": 1.2}, {"lr": 0.03}))
    assert len(at(far, "final")) == FINALISTS + FOLLOWED
    assert (far.chosen, far.unbracketed) == ({"lr": 0.25}, ["lr"]), "no more finalists: it says so"
    assert edges({("b", "r", "c"): far}) == ["Chosen outermost of the finalists, no more of them allowed: b, r, c: lr."]


def test_a_value_at_the_edge_is_stepped_over():
    found = searched(cell(lr=RATES), SCORE, world({"lr": 8.5}))
    assert at(found, "outwards") == [{"lr": 8.0}, {"lr": 16.0}]
    assert (found.chosen, found.at_edge) == ({"lr": 8.0}, [])
    never = searched(cell(lr=RATES), SCORE, world({"lr": 1e9}))
    assert len(at(never, "outwards")) == BEYOND
    assert never.at_edge == ["lr"]
    assert "edge" in edges({("b", "r", "c"): never})[0]


def test_settings_are_searched_together_and_each_has_its_edges():
    search = {"clip": (1.0, 3.0), "lr": (0.25, 0.125, 0.5, 1.0)}
    found = searched(cell(**search), SCORE, world({"clip": 9.0, "lr": 0.3}))
    assert len(at(found, "screen")) == 8
    assert at(found, "outwards") == [{"clip": 9.0, "lr": 0.25}, {"clip": 27.0, "lr": 0.25}]
    assert found.chosen == {"clip": 9.0, "lr": 0.25}


def test_a_step_is_the_rate_times_the_clip():
    one = replace(cell(), chosen={"step": 1.2, "clip": 0.4})
    assert one.settled.training["lr"] == pytest.approx(3.0)
    assert one.settled.training["clip"] == 0.4


def test_runs_that_diverged_never_win_and_unfinished_ones_are_asked_for():
    def read(run):
        lr = run.settled.training["lr"]
        return {"final": {} if lr > 0.3 else {"score": lr}, "seconds": 1.0}

    assert searched(cell(lr=(0.5, 0.06, 0.12, 0.25)), SCORE, read).chosen == {"lr": 0.25}
    waiting = searched(cell(lr=RATES), SCORE, lambda run: None)
    assert len(waiting.missing) == 8
    assert waiting.chosen is None
    half = searched(
        cell(lr=RATES), SCORE, lambda run: world({"lr": 0.5})(run) if run.training["rounds"] == 10 else None
    )
    assert len(half.missing) == FINALISTS * len(TUNING_SEEDS)
    assert half.chosen is None


def test_every_method_of_a_table_begins_with_as_many_settings():
    for name in reproduce.names():
        experiment = reproduce.get(name)
        sizes = {}
        for one in experiment.cells():
            if one.search:
                sizes.setdefault((one.block, one.column, one.data["name"]), set()).add(len(list(one.grid())))
        assert all(len(found) == 1 for found in sizes.values()), name
        if name.split("/")[0] in ("selection", "robust-hdp", "fedfdp"):
            assert set().union(*sizes.values()) <= {8}, name


def test_no_table_reports_a_record_or_a_seed_that_chose(tmp_path):
    workshop = Workshop(tmp_path, stand_in=True)
    assert not set(TUNING_SEEDS) & set(REPORTED)
    for name in ("selection/table3", "robust-hdp/table8", "fedfdp/table4", "fedfdp/table5", "adaptdp/table2"):
        experiment = reproduce.get(name)
        assert experiment.seeds <= len(REPORTED)
        first = next(one for one in experiment.quick.scaled(experiment.cells()) if one.method != "fedavg")
        run = screening(first, {})
        clients = workshop.federation(run)
        held = np.concatenate(clients.test)
        assert len(held) >= 0.05 * clients.sizes.sum()
        assert not set(held) & set(np.concatenate(clients.train)), "nothing is trained on and chosen by"
        for seed in REPORTED:
            reported = workshop.federation(replace(first, seed=seed))
            assert not set(held) & set(np.concatenate(reported.test)), f"{name}: a record of seed {seed} chose"
            assert abs(int(reported.sizes.sum()) - int(clients.sizes.sum())) <= 0.11 * reported.sizes.sum()
        if clients.central is not None:
            np.testing.assert_array_equal(clients.central[0], clients.x[held])


def test_a_seed_has_one_partition_one_set_of_budgets_and_one_start_for_all_methods(tmp_path):
    """What makes differences paired; and another seed has another partition."""
    workshop = Workshop(tmp_path, stand_in=True)
    for name in ("selection/table3", "robust-hdp/table8", "fedfdp/table4", "adaptdp/table2"):
        experiment = reproduce.get(name)
        cells = experiment.planned(quick=True, seeds=2)
        made = {}
        for one in cells:
            ready = workshop.prepared(one)
            start = {key: value.clone() for key, value in ready.template.state_dict().items()}
            made.setdefault((one.block, one.column, one.seed), []).append((ready.clients, start))
        for runs in made.values():
            (clients, start), *others = runs
            for other, begun in others:
                assert all((a == b).all() for a, b in zip(clients.train, other.train)), name
                assert clients.budgets == other.budgets
                assert all((start[key] == begun[key]).all() for key in start)
        for (block, column, seed), runs in made.items():
            if seed == 0:
                again = made[block, column, 1][0]
                assert any(set(a) != set(b) for a, b in zip(runs[0][0].train, again[0].train)), name
                assert any((runs[0][1][key] != again[1][key]).any() for key in again[1]) or "linear" in cells[0].model


def test_what_was_searched_is_in_the_results_and_goes_on_after_a_stop(tmp_path, monkeypatch):
    base = reproduce.get("adaptdp/table2")
    quick = Quick(
        blocks=("ε = 8",), rows=("DP-FedAvg",), columns=("T1",),
        data={"options": {"records": 400}}, training={"rounds": 8, "batch": 50, "clip": 5.0}, grid=2,
    )  # fmt: skip
    monkeypatch.setitem(EXPERIMENTS, base.name, replace(base, quick=quick, screened=4))
    done = reproduce.run(base.name, tmp_path, quick=True)
    results = json.loads((tmp_path / "results.json").read_text())
    (search,) = results["searches"]
    assert search["places"] == [["ε = 8", "DP-FedAvg", "T1"]]
    assert [one["values"]["lr"] for one in search["trials"]][:2] == [0.1, 0.3]
    assert {one["rounds"] for one in search["trials"]} == {2, 8}
    assert search["chosen"] == done.entries[0].chosen
    assert done.about["tuning"] == len({(str(t["values"]), t["seed"], t["rounds"]) for t in search["trials"]})
    kept = sorted((tmp_path / "cells").glob("*.json"))
    shown = [json.loads(path.read_text())["recipe"] for path in kept]
    assert {one["seed"] for one in shown if not one.get("validation")} == {0}
    assert {one["seed"] for one in shown if one.get("validation")} == set(TUNING_SEEDS)
    for path in kept[::2]:
        path.unlink()
    again = reproduce.run(base.name, tmp_path, quick=True)
    assert again.entries[0].values == done.entries[0].values
    (found,) = json.loads((tmp_path / "results.json").read_text())["searches"]
    assert [one | {"seconds": 0} for one in found.pop("trials")] == [
        one | {"seconds": 0} for one in search.pop("trials")
    ]
    assert found == search

    other = reproduce.run(base.name, tmp_path / "other", quick=True, reuse=[tmp_path / "results.json"])
    assert other.entries[0].values == done.entries[0].values
    assert not any((tmp_path / "other" / "cells").iterdir()), "results.json tells of the searched runs too"


def test_places_that_share_a_search_are_told_together():
    experiment = reproduce.get("selection/table3")
    found = searches(experiment, experiment.planned(seeds=1), lambda run: None)
    shared = told(found)
    assert len(found) == 20
    assert len(shared) == 5
    assert all(len(one["places"]) == 4 for one in shared)
