"""Reproductions as they run: resumed after a stop, the same in stacks, honest about what they used."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest

import papers as reproduce
from papers import packed
from papers.catalogue import EXPERIMENTS
from papers.runner import Silent, matching
from sordino import data
from sordino.errors import BadInput

SMALL = "adaptdp/table2"
"""Quick: six runs of three rounds."""


def numbers(done):
    return {entry.place: dict(entry.values) for entry in done.entries}


def files(folder):
    return {file.name: file.stat().st_mtime_ns for file in (folder / "cells").glob("*.json")}


class StopAfter(Silent):
    """Presses Ctrl-C after so many rounds."""

    def __init__(self, rounds):
        self.left = [rounds]

    def advance(self, rounds):
        self.left[0] -= rounds
        if self.left[0] < 0:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A reproduction that nobody interrupted, with bundled data in MNIST's place."""
    folder = tmp_path_factory.mktemp("whole")
    return reproduce.run(SMALL, folder, quick=True, data=folder)


def test_a_stopped_reproduction_goes_on_where_it_was(whole, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        reproduce.run(SMALL, tmp_path, quick=True, data=tmp_path, watch=StopAfter(7))
    kept = files(tmp_path)
    assert len(kept) == 2, "three rounds a run: two were finished, the third was not"
    half = json.loads((tmp_path / "results.json").read_text())
    assert len(half["runs"]) == 2
    assert half["_meta"]["left"] == 4
    assert "4 of 6 runs are still to be made" in (tmp_path / "table.md").read_text()

    done = reproduce.run(SMALL, tmp_path, quick=True, data=tmp_path)
    assert {name: files(tmp_path)[name] for name in kept} == kept, "what was finished is not made again"
    assert numbers(done) == numbers(whole)
    assert done.about["left"] == 0


def test_half_a_file_counts_as_not_finished(whole, tmp_path):
    first = next((whole.folder / "cells").glob("*mnist*.json"))
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / first.name).write_bytes(first.read_bytes()[:100])
    done = reproduce.run(SMALL, tmp_path, quick=True, data=tmp_path, reuse=[whole.folder])
    assert numbers(done) == numbers(whole)


def test_runs_of_another_reproduction_are_reused(whole, tmp_path):
    done = reproduce.run(SMALL, tmp_path, quick=True, data=tmp_path, reuse=[whole.folder])
    assert files(tmp_path) == {}
    assert numbers(done) == numbers(whole)


def test_a_results_file_is_enough_to_go_on_from(whole, tmp_path):
    """Folders are thrown away; the results.json in docs/results stays, and further seeds are added to it."""
    kept = json.loads((whole.folder / "results.json").read_text())
    left_out = kept["runs"].pop()
    (tmp_path / "results.json").write_text(json.dumps(kept))
    done = reproduce.run(SMALL, tmp_path / "out", quick=True, data=tmp_path, reuse=[tmp_path / "results.json"])
    assert [name.removesuffix(".json") for name in files(tmp_path / "out")] == [left_out["id"]]
    assert numbers(done) == numbers(whole)
    again = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [run | {"seconds": 0} for run in again["runs"]] == [
        run | {"seconds": 0} for run in [*kept["runs"], left_out]
    ]
    assert again["_meta"]["hardware"] == kept["_meta"]["hardware"]
    assert again["_meta"]["versions"] == kept["_meta"]["versions"]


def test_stacked_runs_give_the_same_table(whole, tmp_path):
    done = reproduce.run(SMALL, tmp_path, quick=True, data=tmp_path, stack=True)
    for place, values in numbers(whole).items():
        for key, value in values.items():
            assert numbers(done)[place][key] == (value if value is None else pytest.approx(value, rel=1e-3, abs=0.5))


def test_a_stack_holds_no_more_rows_than_allowed(tmp_path):
    begun = []

    class Rounds(Silent):
        def advance(self, rounds):
            begun.append(rounds)

    reproduce.run(SMALL, tmp_path, quick=True, data=tmp_path, stack=True, rows=2, only="T1", watch=Rounds())
    assert set(begun) == {1}, "runs of two clients fill a stack of two rows"


def test_the_table_is_written_in_every_form(whole):
    page = (whole.folder / "table.md").read_text()
    assert "| AdaptDP-FedAvg |" in page
    assert "Instead of mnist, which was not found, this used the bundled 8 × 8 digits" in page
    assert "scaled-down" in page
    result = json.loads((whole.folder / "results.json").read_text())
    about = result["_meta"]
    for key in ("date", "hardware", "commit", "seeds", "seconds", "versions", "differs", "quick"):
        assert key in about
    assert about["seeds"] == [0]
    with (whole.folder / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    measured = {(r["block"], r["method"], r["task"], r["measure"]): r["measured"] for r in rows}
    place = ("ε = 8", "DP-FedAvg", "T3")
    assert float(measured[(*place, "train_loss")]) == numbers(whole)[place]["train_loss"]
    assert measured[("ε = 8", "DP-FedAvg", "T1", "central_accuracy")] == "", "regression has no accuracy"
    curves = (whole.folder / "curves.csv").read_text().splitlines()
    assert curves[0] == "block,method,task,seed,round,figure,value"
    assert any(",clip," in line for line in curves)


def test_no_run_exceeds_its_budget(whole):
    for run in json.loads((whole.folder / "results.json").read_text())["runs"]:
        assert 0 < run["privacy"]["largest_share"] <= 1 + 1e-9


@pytest.mark.parametrize(("server_lr", "model"), [(1e60, "logistic"), (1e30, "mlp"), (1e12, "mlp")])
def test_a_run_that_diverges_is_noted_and_spoils_no_other(server_lr, model, tmp_path, monkeypatch):
    base = reproduce.get("fedfdp/table2")
    quick = replace(base.quick, rows=("FedAvg", "FedProx"))
    wild = tuple(
        replace(cell, training={**cell.training, "server_lr": server_lr}, search={}) if cell.row == "FedProx" else cell
        for cell in base.cells()
    )
    # a server's step of 1e60 leaves the range of float32, one of 1e30 makes the next layer leave it, 1e12 does neither
    plain = tuple(replace(cell, model=model, model_options={}) for cell in wild)
    monkeypatch.setitem(EXPERIMENTS, base.name, replace(base, cells=lambda: plain, quick=quick))
    said = []

    class Told(Silent):
        def say(self, line):
            said.append(line)

    for stack in (False, True):
        folder = tmp_path / str(stack)
        done = reproduce.run(base.name, folder, quick=True, data=tmp_path, stack=stack, watch=Told())
        assert done.about["left"] == 0
        values = {place[1]: entry["record_accuracy"] for place, entry in numbers(done).items()}
        assert values["FedAvg"] > 0
        assert "1 runs diverged" in (folder / "table.md").read_text()
    assert len(said) == 2
    assert all("training diverged" in line for line in said)


def test_only_chooses_runs_by_their_labels(tmp_path):
    planned = reproduce.get("robust-hdp/table8").planned()
    chosen = matching(planned, "tight, weiavg|factor, Dist1|Dist9, seed 0")
    assert sorted((cell.row, cell.column) for cell in chosen) == [
        ("WeiAvg", "Dist1"), ("WeiAvg", "Dist9"), ("factor-hdp", "Dist1"), ("factor-hdp", "Dist9"),
    ]  # fmt: skip
    rows = {cell.row for cell in matching(reproduce.get("adaptdp/table2").planned(), "DP-FedAvg")}
    assert rows == {"DP-FedAvg"}, "a whole label is not a part of another"
    with pytest.raises(BadInput, match="rows are DP-FedAvg"):
        reproduce.run(SMALL, tmp_path, quick=True, only="nobody")


def test_folders_that_cannot_be_used_are_said_to_be_so(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(BadInput, match="cannot make the folder"):
        reproduce.run(SMALL, tmp_path / "file" / "out", quick=True)
    with pytest.raises(BadInput, match="neither the folder of a reproduction"):
        reproduce.run(SMALL, tmp_path / "out", quick=True, reuse=[tmp_path / "nothing"])
    with pytest.raises(BadInput, match="neither the folder of a reproduction"):
        reproduce.run(SMALL, tmp_path / "out", quick=True, reuse=[tmp_path / "file"])


def test_full_size_never_uses_other_data(tmp_path):
    with pytest.raises(BadInput, match="sordino data get mnist"):
        reproduce.run("robust-hdp/table8", tmp_path, data=tmp_path, only="WeiAvg, Dist1")


def test_a_packed_data_set_is_the_data_set(tmp_path):
    """Where pyarrow is missing, ready arrays stand for the original files."""
    reproduce.pack("breast-cancer", None, tmp_path)
    original = data.load("breast-cancer", records=300)
    found = packed.load("breast-cancer", tmp_path, {"records": 300})
    for key in ("x", "y", "valid"):
        np.testing.assert_array_equal(getattr(found, key), getattr(original, key))
    assert (found.name, found.task, found.classes) == (original.name, original.task, original.classes)


# What the default suite reproduces, cut down; the quick versions of everything are slow tests.


def test_table_10_of_robust_hdp(tmp_path):
    done = reproduce.run("robust-hdp/table10", tmp_path, quick=True)
    for (_, row, dist), values in numbers(done).items():
        published = done.experiment.published.get(("", row, dist))
        if published:
            assert values["noise_power"] == pytest.approx(published[0], rel=0.015), (row, dist)
    assert any("within 2 % of the published number on 3 of 3" in line for line in done.experiment.conclude(
        {entry.place: entry for entry in done.entries}, done.experiment.published))  # fmt: skip


def test_table_3_of_the_selection_paper_tiny(tmp_path):
    done = reproduce.run("selection/table3", tmp_path, quick=True, data=tmp_path, only="tight, Privacy-aware|Unbiased")
    found = {place[1]: values["central_accuracy"] for place, values in numbers(done).items()}
    assert set(found) == {"Privacy-aware", "Unbiased"}
    shows = "shows" if found["Privacy-aware"] > found["Unbiased"] else "does not show"
    page = (tmp_path / "table.md").read_text()
    assert f"The paper's direction (Privacy-aware better than Unbiased) {shows} here" in page


def test_the_round_budgets_of_fedfdp_figure_5(tmp_path):
    """Golden numbers: what ε = 2 pays for, as settled for this project."""
    entries = reproduce.get("fedfdp/figure5").compute(False)
    counts = {(entry.place[2], entry.place[1]): entry.values["rounds"] for entry in entries}
    noises = [f"σ = {z:g}" for z in (1, 1.5, 2, 2.5, 3)]
    assert [counts[("gradient only, Rényi", z)] for z in noises] == [6, 114, 268, 463, 702]
    assert [counts[("with the loss, Rényi", z)] for z in noises] == [6, 108, 237, 379, 525]


@pytest.mark.slow
@pytest.mark.parametrize("name", reproduce.names())
def test_quick_versions_take_under_two_minutes(name, tmp_path):
    done = reproduce.run(name, tmp_path, quick=True, data=tmp_path)
    assert done.about["left"] == 0
    assert done.about["seconds"] < 120
    assert done.entries
    assert any(value is not None for entry in done.entries for value in entry.values.values())
