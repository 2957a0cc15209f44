"""Many runs: shared by processes, stacked, killed and called again, with runs among them that fail."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from sordino.errors import BadInput, CannotStack
from sordino.study import many
from sordino.study.compare import compare
from sordino.study.file import make_study
from sordino.study.many import Studies
from sordino.study.schedule import Scheduler
from sordino.study.sweep import points, sweep

BASE = {
    "study": {"name": "small", "rounds": 3},
    "data": {"name": "digits", "records": 300, "partition": "iid", "clients": 3, "seed": 0},
    "budgets": {"epsilon": [0.5, 2.0, 8.0], "delta": 1e-4},
    "model": {"name": "logistic"},
    "training": {"rate": 0.3, "lr": 0.3},
}
METHODS = ["dp-fedavg", "dp-scaffold", "fedavg", "adaptdp"]


def study(**changes):
    return make_study(json.loads(json.dumps({**BASE, **changes})))


def compared(**changes):
    return study(compare={"methods": METHODS, "seeds": [0, 1]}, **changes)


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory):
    return compare(compared(), tmp_path_factory.mktemp("alone") / "out")


def timeless(result):
    return {key: value for key, value in result.items() if key != "seconds"}


def assert_near(found, expected):
    assert [(one["method"], one["seed"]) for one in found] == [(one["method"], one["seed"]) for one in expected]
    for one, other in zip(found, expected):
        assert one["privacy"] == other["privacy"]
        assert one["study"] == other["study"]
        assert one["final"]["loss"] == pytest.approx(other["final"]["loss"], rel=1e-4)


def test_two_processes_compare_as_one_does(one_by_one, tmp_path):
    heard = []

    def watch(label, seed, rounds):
        return lambda record: heard.append((label, seed, record["round"]))

    found = compare(compared(), tmp_path / "out", watch, Scheduler(processes=2))
    assert list(map(timeless, found)) == list(map(timeless, one_by_one)), "to the last bit"
    assert sorted(heard) == sorted((name, seed, n) for name in METHODS for seed in (0, 1) for n in (1, 2, 3))


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stacked_comparison_compares_as_single_runs_do(one_by_one, tmp_path, processes, monkeypatch):
    sizes = []
    real = many.train_together
    monkeypatch.setattr(many, "train_together", lambda runs, *rest: sizes.append(len(runs)) or real(runs, *rest))
    assert_near(compare(compared(), tmp_path / "out", None, Scheduler("cpu", True, processes)), one_by_one)
    assert sizes == ([8] if processes == 1 else []), "methods, private or not, with state or a pace of their own"
    assert not (tmp_path / "out" / "stacks").exists()


def test_what_cannot_share_a_stack_is_trained_beside_it(tmp_path, monkeypatch):
    sizes = []
    real = many.train_together
    monkeypatch.setattr(many, "train_together", lambda runs, *rest: sizes.append(len(runs)) or real(runs, *rest))
    keys = {"model.name": ["logistic", "mlp"], "study.seed": [0, 1], "training.exact_noise": [False, True]}
    runs = sweep(study(sweep={**keys, "stack": True}), tmp_path)
    assert len(runs) == 8
    assert all(run.result for run in runs)
    assert sizes == [2, 2], "exact noise takes one record at a time, and a stack has one model"


def test_a_stack_that_fails_is_trained_run_by_run(one_by_one, tmp_path, monkeypatch, caplog):
    def refuse(*given):
        raise CannotStack("not these")

    monkeypatch.setattr(many, "train_together", refuse)
    found = compare(compared(), tmp_path / "out", None, Scheduler(stack=True))
    assert list(map(timeless, found)) == list(map(timeless, one_by_one))
    assert "8 runs are trained one by one, for in a stack: not these" in caplog.text


@pytest.mark.parametrize(
    "how", [Scheduler(), Scheduler(stack=True), Scheduler(processes=2)], ids=["alone", "stack", "two"]
)
def test_runs_that_diverge_or_do_not_fit_stop_no_other(tmp_path, how):
    values = {"training.server_lr": [1.0, 1e60, 0.5], "training.rate": [0.3, 0.3, 0.2]}
    runs = sweep(study(sweep={"mode": "list", **values}), tmp_path, how=how)
    assert [run.failed is None for run in runs] == [True, False, True]
    assert "training diverged" in runs[1].failed
    again = sweep(study(sweep={"mode": "list", **values}), tmp_path, how=how)
    assert [timeless(run.result) if run.result else run.failed for run in again] == [
        timeless(run.result) if run.result else run.failed for run in runs
    ]


def test_a_run_that_nobody_can_pay_for_drops_out_of_its_stack(tmp_path, monkeypatch):
    from sordino.study import session

    real = session.open_accounts

    def poor(book, plan, run, study):
        found = real(book, plan, run, study)
        return dict.fromkeys(found, 0) if plan.training.lr == 0.1 else found

    monkeypatch.setattr(session, "open_accounts", poor)
    runs = sweep(study(sweep={"training.lr": [0.3, 0.1, 0.2], "stack": True}), tmp_path)
    assert [run.failed is None for run in runs] == [True, False, True]
    assert "nobody's budget pays" in runs[1].failed
    assert not (tmp_path / runs[1].point.name / "study.json").exists()


def test_a_run_that_was_stopped_alone_goes_on_alone(tmp_path, monkeypatch):
    made = study(sweep={"training.lr": [0.3, 0.1, 0.2]})

    def watch(label, seed, rounds):
        def stop(record):
            if record["round"] == 2:
                raise KeyboardInterrupt

        return stop

    with pytest.raises(KeyboardInterrupt):
        sweep(made, tmp_path, watch)
    assert [Studies(tmp_path).begun(point) for point in points(made)] == [True, False, False]
    sizes = []
    real = many.train_together
    monkeypatch.setattr(many, "train_together", lambda runs, *rest: sizes.append(len(runs)) or real(runs, *rest))
    runs = sweep(made, tmp_path, how=Scheduler(stack=True))
    assert sizes == [2]
    assert_near([run.result for run in runs], [run.result for run in sweep(made, tmp_path / "whole")])


def test_no_processes_are_refused(tmp_path):
    with pytest.raises(BadInput, match="processes is 0"):
        compare(compared(), tmp_path / "out", None, Scheduler(processes=0))


COMMAND = """
from sordino.study import folder
folder.EVERY = 0  # in every process
if __name__ == "__main__":
    from sordino.cli import main
    main()
"""
DRILLS = {
    "compare": ("compare", "study.toml"),
    "compare, stacked": ("compare", "study.toml", "--stack"),
    "compare, two processes": ("compare", "study.toml", "--processes", "2"),
    "sweep, stacked by two processes": ("run", "sweep.toml", "--stack", "--processes", "2"),
}


@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=() if "stack" in one else pytest.mark.slow) for one in DRILLS]
)
def test_killed_and_called_again_it_goes_on(tmp_path, case):
    """kill -9 as soon as some state was kept; nobody is left behind, and every round is charged once."""
    rounds, base = 40, dict(BASE)
    text = "[study]\nname = 'small'\nrounds = 40\n"
    for section in ("data", "budgets", "model", "training"):
        lines = [f"{key} = {json.dumps(value)}" for key, value in base[section].items()]
        text += f"[{section}]\n" + "\n".join(lines) + "\n"
    named = json.dumps(["dp-fedavg", "weiavg", "fedavg", "dp-scaffold"])
    (tmp_path / "study.toml").write_text(f"{text}[compare]\nmethods = {named}\n")
    (tmp_path / "sweep.toml").write_text(text + "[sweep]\ntraining.lr = [0.1, 0.2, 0.3, 0.4]\n")
    (tmp_path / "drill.py").write_text(COMMAND)
    command = [sys.executable, "drill.py", "-q", *DRILLS[case], "--out", "out"]
    begun = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while not list(tmp_path.glob("out/stacks/*/stack.json")) + list(tmp_path.glob("out/**/checkpoint.safetensors")):
        assert begun.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)
    os.kill(begun.pid, signal.SIGKILL)
    begun.wait()
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    results = sorted((tmp_path / "out").rglob("result.json"))
    assert len(results) == 4
    for file in results:
        result = json.loads(file.read_text())
        assert len(result["rounds"]) == rounds
        for one in result["privacy"] if result["private"] else ():
            assert sum(release["count"] for release in one["releases"]) == rounds
            assert one["spent_epsilon"] <= one["epsilon"]
    assert not (tmp_path / "out" / "stacks").exists(), "what has ended is forgotten"
