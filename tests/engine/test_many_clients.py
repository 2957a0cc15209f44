"""Many clients: records and client state on disk, uploads added up; memory does not grow with the number of clients."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import sordino as sd
from sordino.data.dataset import Dataset
from sordino.engine import mapped
from sordino.engine.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from sordino.engine.mapped import Table
from sordino.server.facts import ServerState

SETTINGS = {"rate": 0.2, "lr": 0.3, "clip": 0.7}


def dataset(x: np.ndarray) -> Dataset:
    y = np.random.default_rng(1).integers(0, 10, len(x))
    return Dataset("random", x, y, "classification", 10, np.ones(len(x), bool))


@pytest.fixture
def on_disk(tmp_path, monkeypatch):
    """Everything larger than a few numbers goes to disk, and its pages are given back at once."""
    monkeypatch.setattr(mapped, "MAPPED_BYTES", 64)
    monkeypatch.setattr(mapped, "GIVEN_BACK", 1)
    x = np.random.default_rng(0).standard_normal((600, 20)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    return dataset(np.load(tmp_path / "x.npy", mmap_mode="r")), dataset(x)


def federation(data: Dataset):
    return data.partition("iid", clients=12).with_budgets("dist2", delta=1e-4)


@pytest.mark.parametrize("method", ["dp-fedavg", "dp-scaffold", "dp-feddyn", "robust-hdp", "fedavg"])
def test_a_run_from_disk_ends_like_a_run_in_memory(on_disk, method, monkeypatch):
    from_disk = sd.train(federation(on_disk[0]), "logistic", method, rounds=3, steps=2, **SETTINGS)
    monkeypatch.undo()
    in_memory = sd.train(federation(on_disk[1]), "logistic", method, rounds=3, steps=2, **SETTINGS)
    assert torch.equal(from_disk.weights, in_memory.weights)
    assert from_disk.result["final"]["client_loss"] == in_memory.result["final"]["client_loss"]


def test_an_interrupted_run_with_client_state_on_disk_resumes_to_the_same_weights(on_disk, tmp_path):
    class Stop(Exception):
        pass

    def stop(record):
        if record["round"] == 2:
            raise Stop

    clients = federation(on_disk[0])
    whole = sd.train(clients, "logistic", "dp-scaffold", rounds=4, out=tmp_path / "whole", **SETTINGS)
    with pytest.raises(Stop):
        sd.train(clients, "logistic", "dp-scaffold", rounds=4, out=tmp_path / "cut", callbacks=[stop], **SETTINGS)
    resumed = sd.train(clients, "logistic", "dp-scaffold", rounds=4, out=tmp_path / "cut", resume=True, **SETTINGS)
    assert torch.equal(resumed.weights, whole.weights)


def test_a_table_keeps_what_was_written_last_whether_mapped_or_not(monkeypatch):
    for limit in (1 << 28, 1):
        monkeypatch.setattr(mapped, "MAPPED_BYTES", limit)
        monkeypatch.setattr(mapped, "GIVEN_BACK", 1)
        table = Table(5, 3)
        assert table.mapped == (limit == 1)
        assert not table.values.any()
        table.write(np.array([3, 1, 3]), torch.tensor([[1.0] * 3, [2.0] * 3, [3.0] * 3]))
        assert table.read(np.array([1, 3, 0])).tolist() == [[2.0] * 3, [3.0] * 3, [0.0] * 3]


def test_a_checkpoint_holds_every_kind_of_number_and_the_clients_table(tmp_path):
    table = Table(4, 3)
    table.write(np.arange(4), torch.arange(12.0).view(4, 3))
    held = {"a": torch.arange(3), "b": torch.tensor(2.5, dtype=torch.float64), "c": 7, "d": torch.tensor([True])}
    server = ServerState(rule=held)
    weights = torch.randn(3)
    save_checkpoint(tmp_path / "c", Checkpoint(2, weights, weights * 2, server, {"control": table}, [], 1.5))
    found = load_checkpoint(tmp_path / "c", torch.device("cpu"))
    assert (found.round, found.seconds, found.server.rule["c"]) == (2, 1.5, 7)
    assert torch.equal(found.weights, weights)
    assert torch.equal(found.shown, weights * 2)
    kept = found.server.rule
    assert all(torch.equal(kept[k], held[k]) and kept[k].dtype == held[k].dtype for k in "abd")
    assert torch.equal(found.clients["control"].values, table.values)


def test_pages_of_a_private_mapping_are_never_given_back(tmp_path):
    """What a user wrote to a copy-on-write mapping exists nowhere else."""
    np.save(tmp_path / "x.npy", np.zeros((10, 4), np.float32))
    assert mapped.pages_of(np.load(tmp_path / "x.npy", mmap_mode="r")[2:]) is not None
    assert mapped.pages_of(np.load(tmp_path / "x.npy", mmap_mode="c")) is None
    assert mapped.pages_of(np.zeros(3)) is None


ROUND = """
import sys, time
from bench.growth import many_clients
from bench.memory import added
run = many_clients(int(sys.argv[1]), sys.argv[2])
started = time.perf_counter()
peak, _ = added(run)
print(peak, time.perf_counter() - started)
"""


def peak_and_seconds(clients: int, model: str) -> tuple[float, float]:
    done = subprocess.run(
        [sys.executable, "-c", ROUND, str(clients), model], capture_output=True, text=True, check=True
    )
    peak, seconds = map(float, done.stdout.split()[-2:])
    return peak, seconds


def test_memory_does_not_grow_with_the_number_of_clients():
    """Ten times the clients: 169 MB of records and 28 MB of uploads more, which must not show."""
    few, many = peak_and_seconds(100, "logistic")[0], peak_and_seconds(1000, "logistic")[0]
    assert many < few + 110  # MB; at most GIVEN_BACK of mapped pages, and the ledger


@pytest.mark.slow
def test_ten_thousand_clients_in_two_gigabytes_at_the_pace_of_a_hundred():
    peak, seconds = peak_and_seconds(10_000, "robust-hdp-cnn")
    assert peak < 2000
    assert seconds / 10_000 < 1.2 * peak_and_seconds(100, "robust-hdp-cnn")[1] / 100


WHOLE = """
import sys, numpy as np
import sordino as sd
from sordino.data import Federation
clients, folder = int(sys.argv[1]), sys.argv[2]
x = np.lib.format.open_memmap(folder + "/x.npy", "w+", np.float32, (60_000, 1, 28, 28))
x[:] = np.random.default_rng(0).standard_normal((1, 1, 28, 28), dtype=np.float32)
x = np.load(folder + "/x.npy", mmap_mode="r")
y = np.random.default_rng(0).integers(0, 10, len(x))
names, train = [f"client-{i}" for i in range(clients)], [np.arange(60) + 60 * (i % 1000) for i in range(clients)]
nothing = [np.arange(0)] * clients
found = Federation("many", x, y, np.ones(len(y), bool), names, train, nothing, None, "classification", 10)
found = found.with_budgets((1 + np.arange(clients) % 4).tolist(), delta=1e-5)
open("/proc/self/clear_refs", "w").write("5")
settings = dict(rounds=2, batch=32, steps=1, lr=0.05, clip=1.0, evaluate=2)
sd.train(found, "logistic", "dp-fedavg", out=folder + "/run", **settings)
print(next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.slow
def test_a_whole_run_of_a_hundred_thousand_clients_takes_less_than_two_gigabytes(tmp_path):
    """Plan, ledger, two rounds, evaluation, result and files; 1.4 GB where this was written."""
    command = [sys.executable, "-c", WHOLE, "100000", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=3000)
    assert float(done.stdout.split()[-1]) < 2000


@pytest.mark.slow
def test_a_round_of_a_hundred_thousand_clients_is_as_fast_a_client_as_one_of_a_thousand():
    """By the time of all cores, which others' load changes least; the CNN takes a quarter of an hour of it."""
    from bench.growth import _in_processes

    few, many = (_in_processes("clients", size, 1) for size in (1000, 100_000))
    assert many["resident_mb"] < 2000
    assert many["cpu_seconds"] / 100_000 < 1.2 * few["cpu_seconds"] / 1000
