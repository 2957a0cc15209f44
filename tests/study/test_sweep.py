"""Sweeps: which runs a [sweep] makes, that they end as runs alone do, that nothing is done twice, the tidy tables."""

import itertools
import json

import pyarrow.csv
import pyarrow.parquet
import pytest

from sordino.errors import BadInput
from sordino.privacy.ledger import Ledger
from sordino.study.file import make_study
from sordino.study.run import load, train
from sordino.study.sweep import points, sweep
from sordino.study.tidy import write_tables

BASE = {
    "study": {"name": "small", "rounds": 2},
    "data": {"name": "digits", "records": 300, "partition": "iid", "clients": 3, "seed": 0},
    "budgets": {"epsilon": [0.5, 2.0, 8.0], "delta": 1e-4},
    "model": {"name": "logistic"},
    "training": {"rate": 0.3, "lr": 0.3},
}


def study(keys, **changes):
    table = json.loads(json.dumps(BASE))
    for section, values in changes.items():
        table.setdefault(section, {}).update(values)
    return make_study({**table, "sweep": keys})


def chosen(made):
    return [tuple(point.values.values()) for point in points(made)]


def test_a_grid_is_every_combination_and_the_last_key_varies_fastest():
    keys = {"training.lr": [0.1, 0.3], "method.name": ["dp-fedavg", "weiavg"], "study.seed": [0, 1, 2]}
    found = points(study(keys))
    assert chosen(study(keys)) == list(itertools.product(*keys.values()))
    last = found[-1].study
    assert (last.training.lr, last.method.name, last.study.seed) == (0.3, "weiavg", 2)
    assert last.training.rate == 0.3
    assert found[0].name == "training.lr=0.1,method.name=dp-fedavg,study.seed=0"


def test_a_list_takes_the_values_side_by_side():
    assert chosen(study({"mode": "list", "training.lr": [0.1, 0.3], "study.rounds": [20, 5]})) == [(0.1, 20), (0.3, 5)]


def test_keys_need_no_quotes_and_values_may_be_tables():
    made = study({"training": {"lr": [0.1]}, "method": {"server": ["plain", {"name": "ema", "decay": 0.5}]}})
    assert [point.study.method.server for point in points(made)] == ["plain", {"name": "ema", "decay": 0.5}]
    assert len({point.name for point in points(made)}) == 2
    assert all("/" not in point.name and " " not in point.name for point in points(made))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"training.lrr": [1]}, r"\[sweep\] unknown key training.lrr: did you mean 'lr'"),
        ({"training.lr": []}, '"training.lr" is an empty list: give it values'),
        ({"training.lr": 0.1}, "give a list of values, or put it into \\[training\\]"),
        ({"training.lr": [0.1, 0.1]}, '"training.lr" lists 0.1 twice'),
        ({"training.lr": [0.1, "fast"]}, "training.lr = 'fast'"),
        ({"method.name": ["dp-fedavg", "dp-fedavgg"]}, "did you mean 'dp-fedavg'"),
        ({"lr": [0.1]}, "write section.key"),
        ({"compare.seeds": [[1]]}, "not a key of the study"),
        ({"mode": "random", "training.lr": [0.1]}, "sweep.mode = 'random' is unknown"),
        ({"stack": "yes", "training.lr": [0.1]}, "it is true or false"),
        ({"mode": "list", "training.lr": [0.1, 0.2], "study.seed": [0]}, "training.lr has 2, study.seed has 1"),
        ({"mode": "list", "training.lr": [0.1, 0.1], "study.seed": [0, 0]}, "twice"),
        ({"stack": True}, "varies nothing"),
    ],
)
def test_what_cannot_be_swept_is_refused_with_the_key_and_the_remedy(keys, words):
    with pytest.raises(BadInput, match=words):
        points(study(keys))


def test_many_runs_are_asked_about_first(tmp_path):
    with pytest.raises(BadInput, match="makes 150 runs: say --yes"):
        sweep(study({"study.seed": list(range(150))}), tmp_path)
    assert not list(tmp_path.iterdir())


KEYS = {"method.name": ["dp-fedavg", "weiavg", "fedavg"], "training.clip": [1.0, 0.2], "study.seed": [0, 1]}


@pytest.mark.parametrize("stack", [False, True])
def test_every_run_ends_as_it_would_alone(tmp_path, stack):
    runs = sweep(study({**KEYS, "stack": stack}), tmp_path)
    assert len(runs) == 12
    for run in runs:
        one = run.point.study
        alone = train(one.federation(), method=one.chosen_method(), name="small", **one.arguments())
        for key in ("accuracy", "loss", "psi"):
            assert run.result["final"][key] == pytest.approx(alone.result["final"][key], rel=1e-4)
        assert run.result["privacy"] == alone.result["privacy"]
        assert run.result["study"] == alone.result["study"]
        kept = load(tmp_path / run.point.name)
        assert kept.weights.tolist() == pytest.approx(alone.weights.tolist(), abs=1e-5)
        if run.result["private"]:
            with Ledger(tmp_path / run.point.name / "ledger.db", readonly=True) as book:
                book.verify()
                assert book.epsilon() == {p["client"]: p["spent_epsilon"] for p in alone.privacy}


def test_finished_runs_are_not_redone_and_new_values_are_added(tmp_path):
    sweep(study({"training.lr": [0.1, 0.3]}), tmp_path)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/result.json")}
    assert len(files) == 2
    next(iter(files)).unlink()
    (next(iter(files)).parent / "checkpoint.safetensors").unlink()
    runs = sweep(study({"training.lr": [0.1, 0.3, 0.5]}), tmp_path)
    assert [run.result["study"]["training"]["lr"] for run in runs] == [0.1, 0.3, 0.5]
    same = [path for path, before in files.items() if path.stat().st_mtime_ns == before]
    assert same == list(files)[1:]


@pytest.mark.parametrize("stack", [False, True])
def test_an_interrupted_sweep_goes_on(tmp_path, stack):
    class Stopped(Exception):
        pass

    def watch(name, seed, rounds):
        def stop(record):
            if record["round"] == 2:
                raise Stopped

        return stop

    made = study({"method.name": ["dp-fedavg", "weiavg"], "stack": stack})
    with pytest.raises(Stopped):
        sweep(made, tmp_path, watch)
    whole = sweep(made, tmp_path)
    fresh = sweep(made, tmp_path / "other")
    assert [r.result["privacy"] for r in whole] == [r.result["privacy"] for r in fresh]
    for one, other in zip(whole, fresh):
        assert one.result["final"]["loss"] == pytest.approx(other.result["final"]["loss"], rel=1e-5)


def test_a_folder_with_runs_of_another_study_is_refused(tmp_path):
    sweep(study({"training.lr": [0.1]}), tmp_path)
    with pytest.raises(BadInput, match=r"another budgets.delta, training.rate: choose another --out"):
        sweep(study({"training.lr": [0.1]}, training={"rate": 0.2}, budgets={"delta": 1e-5}), tmp_path)


@pytest.mark.parametrize("stack", [False, True])
def test_a_run_that_fails_is_named_and_does_not_stop_the_others(tmp_path, stack):
    keys = {"training.batch": [900, 30, 40], "stack": stack}
    runs = sweep(study(keys, training={"rate": None}), tmp_path)
    assert [run.result is None for run in runs] == [True, False, False]
    assert "900 is larger than client" in runs[0].failed
    table = pyarrow.parquet.read_table(write_tables(runs, tmp_path)[0]).to_pylist()
    assert [row["failed"] is None for row in table] == [False, True, True]
    with pytest.raises(BadInput, match=r"every run of the sweep failed; .*is larger than client"):
        sweep(study({"training.batch": [900, 901]}, training={"rate": None}), tmp_path / "none")


def test_the_tables_are_tidy(tmp_path):
    made = study({"method.name": ["dp-fedavg", "fedavg"], "training.lr": [1, 0.3]}, training={"evaluate": 2})
    runs = sweep(made, tmp_path)
    paths = {path.name: path for path in write_tables(runs, tmp_path)}
    table = pyarrow.parquet.read_table(paths["runs.parquet"])
    assert table.column_names[:5] == ["run", "method.name", "training.lr", "method", "seed"]
    assert str(table.schema.field("training.lr").type) == "double"
    for row, run in zip(table.to_pylist(), runs):
        assert row["accuracy"] == run.result["final"]["accuracy"]
        assert row["train_psi"] == run.result["final"]["train_psi"]
        spent = [p["spent_epsilon"] for p in run.result["privacy"]]
        if row["private"]:
            assert (row["spent_epsilon_min"], row["spent_epsilon_max"]) == (min(spent), max(spent))
            assert (row["budget_epsilon_median"], row["budgets_ended"]) == (2.0, 3)
            assert row["largest_share_spent"] <= 1.0
        else:
            assert row["spent_epsilon_max"] is None
    rounds = pyarrow.parquet.read_table(paths["rounds.parquet"]).to_pylist()
    assert [(row["run"], row["round"]) for row in rounds] == [(r.point.name, n) for r in runs for n in (1, 2)]
    assert [row["accuracy"] is None for row in rounds] == [True, False] * 4
    assert rounds[1]["noise_power"] > 0
    read = pyarrow.csv.read_csv(paths["runs.csv"])
    assert read.column_names == table.column_names
    assert read.column("loss").to_pylist() == pytest.approx(table.column("loss").to_pylist())
