"""The benchmark: the same work for every peer, ratios with their spread, memory that is really what a round adds."""

import subprocess
import sys

import pytest
import torch

import bench as benchmark
from bench import growth, peers, workloads
from sordino.errors import BadInput

TINY = workloads.Workload("tiny", 2, 2, 8, 40, "cnn-small", (1, 8, 8))


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(workloads.WORKLOADS, "tiny", TINY)
    return workloads.prepare(TINY)


def test_the_figures_have_the_documented_shape(tiny):
    peers = ["plain-channels-last", "opacus", "ghost", "vmap", "vmap-stacked", "sordino-running", "sordino-mixed"]
    found = benchmark.bench(["tiny"], peers, repeats=2, memory=False, show=id)
    row = found["tiny"]
    assert set(found) == {"tiny", "_meta"}
    assert {"sordino", "plain", *peers} < set(row)
    assert row["ratio"] == row["ratios"]["sordino"]["median"]
    assert row["ratios"]["plain"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    for spread in row["ratios"].values():
        assert spread["min"] <= spread["median"] <= spread["max"]
    assert {"date", "torch", "threads", "cores", "load", "repeats"} <= set(found["_meta"])
    assert "tiny" in benchmark.to_text(found)
    assert {key: found["_meta"][key] for key in ("device", "precision", "deterministic")} == {
        "device": "cpu",
        "precision": "float32",
        "deterministic": True,
    }
    assert benchmark.comparison(found).row_count == 9


def test_plain_takes_the_very_batches_that_sordino_draws(tiny, monkeypatch):
    drawn = []
    honest = benchmark.all_peers.find("sordino")
    from sordino.client.rows import Rows

    monkeypatch.setattr("sordino.engine.simulate.CHUNK_HELD", 0)  # a client's batches one by one, in their order
    seen = Rows.one
    monkeypatch.setattr(
        Rows, "one", lambda self, step, most: drawn.append(self.batches[0][step]) or seen(self, step, most)
    )
    honest(tiny)()
    asked = [tiny.own(client)[batch] for client in range(2) for batch in tiny.batches[client]]
    assert [one.tolist() for one in drawn] == [one.tolist() for one in asked]


def test_both_stems_have_the_parameters_they_should():
    counts = {}
    for name in ("W3", "W3-large-stem"):
        work = workloads.find(name)
        model = benchmark.workloads.models.build(work.model, work.shape, 10, 0, **work.options)
        counts[name] = sum(p.numel() for p in model.parameters())
    assert counts == {"W3": 11_173_962, "W3-large-stem": 11_181_642}


MEASURE = """
import torch
from bench.memory import added
earlier = torch.ones(40_000_000)  # a peak that is over before the work begins must not hide the work's own
del earlier
def work():
    held = torch.ones(25_000_000)
    return 7
print(*added(work))
"""


def test_peak_memory_is_what_the_work_adds():
    peaks = []
    for _ in range(3):  # a kernel short of memory takes pages of the libraries away meanwhile
        done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
        peak, answer = map(float, done.stdout.split())
        assert answer == 7
        peaks.append(peak)
    assert 95 < sorted(peaks)[1] < 110, peaks  # MB


def test_growth_points_are_measured_on_every_axis():
    import json

    before = torch.get_num_threads()
    for axis, size in (("records", 16), ("parameters", 5000)):
        found = json.loads(growth.point(axis, size))
        assert found["seconds"] > 0
        assert found["peak_mb"] >= 0
    assert torch.get_num_threads() == before
    curves = {"records": {"what": "records", "points": [{"size": 16, **found}]}}
    assert growth.growth_table(curves).row_count == 1


def test_unknown_work_and_peers_are_refused_by_name():
    with pytest.raises(BadInput, match="workload 'W9' is unknown: use one of W1"):
        workloads.find("W9")
    with pytest.raises(BadInput, match="peer 'jax' is unknown: use one of sordino"):
        peers.find("jax")


def test_flower_without_ray_says_what_to_install(tiny, monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match="needs flwr, which is not installed: use `make bench`"):
        peers.find("flower")(tiny)
