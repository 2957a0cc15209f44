"""``sordino run --processes``: one run by several processes, of which any may be killed at any moment."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_sharded import assert_alike

import sordino as sd
from sordino.errors import BadInput
from sordino.study.file import read_study
from sordino.study.processes import check_processes

ROUNDS = 60
STUDY = f"""
[study]
name = "small"
rounds = {ROUNDS}
[data]
name = "digits"
records = 600
partition = "iid"
clients = 6
[budgets]
epsilon = [0.5, 2.0, 8.0, 1.0, 1.0, 4.0]
delta = 1e-4
[model]
name = "logistic"
[method]
name = "dp-scaffold"
[training]
rate = 0.3
lr = 0.3
[evaluation]
every = 3
"""
SECONDS = 120


@pytest.fixture
def study(tmp_path):
    path = tmp_path / "study.toml"
    path.write_text(STUDY)
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nobody interrupted, by one process."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "study.toml").write_text(STUDY)
    return resumed_here(folder / "study.toml", folder / "run", resume=False)


def begun(study: Path, *words: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "sordino", "run", str(study), "--out", str(study.parent / "run"), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def resumed_here(study: Path, folder: Path, resume: bool = True):
    read = read_study(study)
    done = sd.train(read.federation(), method=read.chosen_method(), out=folder, resume=resume, **read.arguments())
    return sd.load(folder).result, done.weights, None


def wait_for(ready, child) -> None:
    until = time.monotonic() + SECONDS
    while not ready():
        assert child.poll() is None, child.communicate()[1]
        assert time.monotonic() < until
        time.sleep(0.005)


def workers_of(pid: int) -> list[int]:
    """The processes that take turns, in the order in which they were started."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(one) for one in found if b"spawn_main" in Path(f"/proc/{one}/cmdline").read_bytes()]


def rounds_in(folder: Path) -> int:
    log = folder / "log.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


def kill_one(study: Path, rank: int, chance: random.Random, *words: str) -> None:
    """Begin, or go on, with two processes and kill one of them in some later round: all end, and say how to go on."""
    folder = study.parent / "run"
    before = rounds_in(folder)
    child = begun(study, "--processes", "2", *words)
    try:
        some = before + chance.randint(1, 6)
        wait_for(lambda: rounds_in(folder) >= some, child)
        time.sleep(chance.uniform(0, 0.05))
        workers = workers_of(child.pid)
        killed = time.monotonic()
        os.kill(workers[rank], signal.SIGKILL)
        _, err = child.communicate(timeout=SECONDS)
    finally:
        child.kill()
    assert child.returncode == 1, err
    assert f"process {rank + 1} of 2 was ended by signal 9" in err
    assert "--resume" in err
    assert time.monotonic() - killed < 30  # seconds, on a busy machine
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()], "nobody is left behind"


def assert_charged_once(folder: Path, whole) -> None:
    result = json.loads((folder / "result.json").read_text())
    charged = [[one["count"] for one in client["releases"]] for client in result["privacy"]]
    assert charged == [[one["count"] for one in client["releases"]] for client in whole[0]["privacy"]]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes through /proc")
def test_two_processes_killed_and_resumed_by_two_and_by_one_end_like_one(study, whole):
    """First the second process is killed, then, after two went on, the first; one process does the rest."""
    chance = random.Random(os.urandom(4))
    kill_one(study, 1, chance)
    kill_one(study, 0, chance, "--resume")
    assert_alike(resumed_here(study, study.parent / "run"), whole)
    assert_charged_once(study.parent / "run", whole)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_killed_at_any_moment_it_goes_on_with_any_number_of_processes(study, whole, seed):
    chance = random.Random(seed)
    kill_one(study, chance.randint(0, 1), chance)
    kill_one(study, chance.randint(0, 1), chance, "--resume")
    if seed % 2:
        done = begun(study, "--resume", "--processes", "3")
        _, err = done.communicate(timeout=SECONDS)
        assert done.returncode == 0, err
        run = sd.load(study.parent / "run")
        assert_alike((run.result, run.weights, None), whole)
    else:
        assert_alike(resumed_here(study, study.parent / "run"), whole)
    assert_charged_once(study.parent / "run", whole)


def test_ctrl_c_ends_all_in_order(study, whole):
    folder = study.parent / "run"
    child = begun(study, "--processes", "2")
    try:
        wait_for(lambda: rounds_in(folder) > 1, child)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=SECONDS)
    finally:
        child.kill()
    assert child.returncode == 130, err
    assert "nothing is lost" in err
    assert "Traceback" not in err
    with sd.privacy.Ledger(folder / "ledger.db", readonly=True) as book:
        assert book.verify(), "sealed"
    assert_alike(resumed_here(study, folder), whole)
    assert_charged_once(folder, whole)


@pytest.mark.slow
def test_what_one_process_refuses_is_told_once_and_nothing_keeps_running(study):
    child = begun(study, "--processes", "2", "--set", "training.server_lr=1e60", "--set", "study.rounds=4")
    _, err = child.communicate(timeout=SECONDS)
    assert child.returncode == 1
    assert "training diverged" in err
    assert "another process" not in err


def test_a_number_of_processes_that_makes_no_sense_is_refused_or_warned_of(caplog, monkeypatch):
    with pytest.raises(BadInput, match="at least one"):
        check_processes(0, "cpu")
    check_processes(10_000, "cpu")
    assert "10000 processes on" in caplog.text
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(BadInput, match="one process keeps a GPU busy"):
        check_processes(2, "cuda")
