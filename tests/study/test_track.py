"""Logging to TensorBoard and MLflow: what arrives there, and what is said where the packages are missing."""

import sys

import pytest

from sordino.errors import BadInput
from sordino.study.compare import compare
from sordino.study.file import make_study
from sordino.study.sweep import sweep
from sordino.study.track import REMEDY, numbers, tracker

TABLE = {
    "study": {"name": "small", "rounds": 2, "track": "tensorboard"},
    "data": {"name": "digits", "records": 300, "partition": "iid", "clients": 3},
    "budgets": {"epsilon": [0.5, 2.0, 8.0], "delta": 1e-4},
    "model": {"name": "logistic"},
    "training": {"rate": 0.3, "lr": 0.3},
}


def study(**changes):
    return make_study({**TABLE, **changes})


@pytest.fixture
def events():
    """Reads an event folder: {tag: [(step, value)]} of its scalars, and the tags of its texts with their words."""
    pytest.importorskip("tensorboard", reason=REMEDY)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read(folder):
        found = EventAccumulator(str(folder)).Reload()
        scalars = {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
        texts = {}
        for tag in found.Tags()["tensors"]:
            texts[tag.removesuffix("/text_summary")] = found.Tensors(tag)[0].tensor_proto.string_val[0].decode()
        return scalars, texts

    return read


@pytest.mark.parametrize("stack", [False, True])
def test_tensorboard_holds_every_round_and_says_what_is_not_private(tmp_path, events, stack):
    made = study(sweep={"method.name": ["dp-fedavg", "fedavg"], "study.seed": [0, 1], "stack": stack})
    for run in sweep(made, tmp_path):
        scalars, texts = events(tmp_path / run.point.name / "tensorboard")
        rounds = run.result["rounds"]
        assert scalars["loss"] == [(r["round"], pytest.approx(r["loss"], rel=1e-6)) for r in rounds]
        assert ("NOT PRIVATE" in texts) == (run.result["method"] == "fedavg")
        assert ("NOT PRIVATE" in texts["privacy"]) == (run.result["method"] == "fedavg")
        assert ("spent_epsilon/max" in scalars) == run.result["private"]
        assert texts["training.lr"] == "0.3"


def test_a_comparison_is_tracked_as_the_study_says(tmp_path, events):
    compare(study(compare={"methods": ["dp-fedavg", "fedavg"]}), tmp_path)
    _, texts = events(tmp_path / "fedavg" / "seed-0" / "tensorboard")
    assert "NOT PRIVATE" in texts


def test_mlflow_holds_every_round_parameters_and_the_tag(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason=REMEDY)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    made = study(sweep={"method.name": ["dp-fedavg", "fedavg"]})
    made.study.track = "mlflow"
    runs = sweep(made, tmp_path)
    client = mlflow.MlflowClient(f"file:{tmp_path / 'mlruns'}")
    (experiment,) = (one for one in client.search_experiments() if one.name == "small")
    kept = {one.info.run_name: one for one in client.search_runs([experiment.experiment_id])}
    for run in runs:
        one = kept[run.point.name]
        seen = [(m.step, m.value) for m in client.get_metric_history(one.info.run_id, "loss")]
        assert seen == [(r["round"], r["loss"]) for r in run.result["rounds"]]
        assert one.data.tags["privacy"].startswith("private" if run.result["private"] else "NOT PRIVATE")
        assert one.data.params["training.lr"] == "0.3"
        assert one.data.metrics["final/accuracy"] == run.result["final"]["accuracy"]
        assert [f.path for f in client.list_artifacts(one.info.run_id)] == ["result.json"]


def test_only_finite_numbers_are_logged():
    record = {
        "round": 1,
        "loss": 0.5,
        "accuracy": None,
        "spent_epsilon": {"max": 2.0},
        "diagnostics": {"rank": 3, "converged": True, "spectrum": [1.0], "unsettled": float("inf")},
        "observer": {"noise_power": 0.25, "note": "seen in simulation"},
    }
    expected = {"loss": 0.5, "spent_epsilon/max": 2.0, "diagnostics/rank": 3.0, "observer/noise_power": 0.25}
    assert numbers(record) == expected


@pytest.mark.parametrize(("kind", "module"), [("tensorboard", "torch.utils.tensorboard"), ("mlflow", "mlflow")])
def test_a_missing_package_is_named_with_the_remedy(tmp_path, monkeypatch, kind, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BadInput, match=r"pip install 'sordino\[track\]'"):
        tracker(kind, tmp_path, study(), "run")
    assert not list(tmp_path.iterdir())


def test_an_unknown_tracker_is_refused(tmp_path):
    with pytest.raises(BadInput, match="'wandb' is unknown: use tensorboard or mlflow"):
        tracker("wandb", tmp_path, study(), "run")
    with pytest.raises(BadInput, match=r"study\.track"):
        study(study={"track": "wandb"})
