"""The same run ends in the same bits: run again, interrupted and gone on with, with two threads, in another process."""

import subprocess
import sys

import pytest
import torch

import sordino as sd
from sordino import methods

PRIVATE = [name for name in methods.names() if methods.get(name).private]
OWN_SETTINGS = {"auto": {"rounds": 3}, "least-squares": {}}
"""Methods that set themselves, for a linear model."""


@pytest.fixture(scope="module")
def clients():
    found = sd.data.load("digits").subset(200, 0).partition("iid", clients=5, seed=0)
    return found.with_budgets([1.0, 2.0, 3.0, 4.0, 8.0], delta=1e-4)


def arguments(method: str) -> dict:
    if method in OWN_SETTINGS:
        return {"model": "logistic", "method": method, **OWN_SETTINGS[method]}
    return {"model": "cnn-small", "method": method, "rounds": 2, "rate": 0.3, "steps": 2}


class Stopped(Exception):
    pass


def stop(record) -> None:
    raise Stopped


@pytest.mark.parametrize("method", PRIVATE)
def test_a_run_that_was_stopped_ends_in_the_same_bits(clients, tmp_path, method):
    given = arguments(method)
    whole = sd.train(clients, **given)
    with pytest.raises(Stopped):
        sd.train(clients, **given, out=tmp_path / "run", callbacks=[stop])
    again = sd.train(clients, **given, out=tmp_path / "run", resume=True)
    assert again.result["checksum"] == whole.result["checksum"]
    if whole.personal is not None:
        assert torch.equal(again.personal, whole.personal)


def test_another_seed_and_a_changed_weight_have_another_checksum(clients):
    from sordino.study.result import checksum

    run = sd.train(clients, **arguments("dp-fedavg"))
    other = sd.train(clients, **arguments("dp-fedavg"), seed=1)
    assert other.result["checksum"] != run.result["checksum"]
    changed = run.weights.clone()
    changed[7] = torch.nextafter(changed[7], torch.tensor(torch.inf))
    assert checksum(run.weights) == run.result["checksum"]
    assert checksum(changed) != run.result["checksum"]


LARGE = """
import sordino as sd, torch
torch.set_num_threads(2)
clients = sd.data.load("digits").subset(400, 0).partition("iid", clients=3, seed=0).with_budgets(2.0, delta=1e-4)
run = sd.train(clients, "mlp", "dp-fedavg", rounds=1, rate=0.5, model_options={"hidden": 4096})
print(run.result["checksum"])
"""


def test_two_threads_and_two_processes_agree_in_every_bit():
    """A model large enough that products and noise are shared among threads."""
    before, told = torch.get_num_threads(), []
    try:
        exec(LARGE, {"print": told.append})
    finally:
        torch.set_num_threads(before)
    apart = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=True)
    assert apart.stdout.split() == told


def test_runs_of_a_stack_end_in_the_same_bits_and_its_first_round_is_stacked_like_the_others(clients, monkeypatch):
    """What a record takes is known before the first round: a resumed run cuts its stacks as an uninterrupted one."""
    from sordino.engine import simulate, together
    from sordino.study.run import prepare
    from sordino.study.session import train_together

    given = {"rounds": 3, "rate": 0.3, "steps": 2}
    sizes = []

    def counted(work, terms):
        for rows in simulate.chunks(work, terms):
            sizes.append(len(rows))
            yield rows

    monkeypatch.setattr(together, "chunks", counted)
    # Room for a few rows by what a record really takes, for all of them by what is guessed before the first batch.
    monkeypatch.setattr(simulate, "STACK_HELD", 1 << 21)
    found = []
    for _ in range(2):
        sizes.clear()
        runs = [prepare(clients, "cnn-small", name, 0, None, given) for name in ("dp-fedavg", "robust-hdp")]
        found.append([run.result["checksum"] for run in train_together(runs, "cpu")])
        each = len(sizes) // 3
        assert sizes[:each] == sizes[each : 2 * each] == sizes[2 * each :]
        assert len(set(sizes)) > 1 or max(sizes) < 10, "the room does bind"
    assert found[0] == found[1]
