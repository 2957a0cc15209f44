"""Several processes that simulate one run together end it with the result of one process."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from shared_runs import trained

import sordino as sd
from sordino.methods import get, names

SHARED = {"noise": "shared", "colluders": 2}
EXTRA = [
    ("one row", "uniform", {"select": 1}),  # a process without any
    ("the sum alone", "weiavg", {"trust": SHARED}),
    ("and that of answers", "fedfdp", {"trust": SHARED}),
    ("drawn and shared", "unbiased", {"select": 2, "trust": {"noise": "shared"}}),
    ("evaluated", "dp-fedavg", {"evaluation": {"every": 1, "keep": "best"}}),
    ("two classes", "dp-fedavg", {"source": "breast-cancer", "evaluation": {"every": 2}}),
    ("models of their own", "mr-mtl", {"source": "breast-cancer", "evaluation": {"every": 2}}),
    ("compared", "dp-fedavg", {"baselines": True}),
    ("adapters", "dp-scaffold", {"model": "mlp", "model_options": {"hidden": 8, "lora": 2}}),
    ("beside a network of one's own", "dp-fedavg", {"drawn": [3, 3]}),
]
EVERY = [(name, name, {"steps": 1}) for name in names() if get(name).private] + EXTRA
LOST = ("lost", "dp-fedavg", {"server_lr": 1e60})
TORN = ("torn", "dp-fedavg", {"drawn": [3, 4]})  # another frozen network in every process
FEW = ["dp-fedavg", "robust-hdp", "dp-scaffold", "mr-mtl", "adaptdp", "power-of-choice", "least-squares"]
SOME = [(name, name, {"steps": 1}) for name in FEW] + [EXTRA[0], EXTRA[2], EXTRA[6], *EXTRA[-2:]]


def together(folder: Path, runs, size=2):
    """What every process found of these runs, which they trained together."""
    script = str(Path(__file__).with_name("shared_runs.py"))
    children = [
        subprocess.Popen([sys.executable, script, str(folder), str(rank), str(size), repr(runs)])
        for rank in range(size)
    ]
    try:
        assert [child.wait(200) for child in children] == [0] * size
    finally:
        for child in children:
            child.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def assert_same(found, expected, where="result"):
    """Equal, numbers to 1e-5; what was spent and released but for the order in which ε was added up."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            if key not in ("seconds", "checksum", "versions"):
                assert_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for place, (a, b) in enumerate(zip(found, expected)):
            assert_same(a, b, f"{where}[{place}]")
    elif isinstance(expected, float):
        near = 1e-5 if where.endswith("unsettled") else 1e-7  # the rest of an iteration that stops at 1e-5 or so
        close = (
            pytest.approx(expected, rel=1e-13) if ".privacy" in where else pytest.approx(expected, rel=1e-5, abs=near)
        )
        assert found == close, where
    else:
        assert found == expected, where


def assert_alike(run, other):
    """The same result, weights and models of clients' own, to 1e-5."""
    (result, weights, personal), (expected, ours, own) = run, other
    assert_same(result, expected)
    assert torch.linalg.vector_norm(weights - ours) <= 1e-5 * torch.linalg.vector_norm(ours)
    assert (personal is None) == (own is None)
    if own is not None:
        assert torch.allclose(personal, own, rtol=1e-5, atol=1e-6)


def check(runs, folder):
    """Two processes against one; returns nothing but what it asserts."""
    first, second = together(folder, [*runs, LOST, TORN, ("and on", "dp-fedavg", {})])
    assert first["lost"] == second["lost"]
    assert first["lost"][0] == "Diverged"
    assert first["torn"] == second["torn"]
    assert "a model with other frozen weights: they have to be the same everywhere" in first["torn"][1]
    assert "and on" in second, "an error is everybody's, and nobody waits for a process that had another"
    for name, method, options in runs:
        done = trained(method, **{key: value for key, value in options.items() if key != "out"})
        assert_alike(first[name], (done.result, done.weights, done.personal))
        assert_same(second[name][0], first[name][0])
        assert torch.equal(second[name][1], first[name][1])


def test_two_processes_write_the_result_of_one(tmp_path):
    kept = tmp_path / "out"
    check([*SOME, ("kept", "dp-feddyn", {"out": str(kept), "steps": 2})], tmp_path)
    with sd.privacy.Ledger(kept / "ledger.db", readonly=True) as book:
        assert all(sum(event.count for event in book.spent(one.client)) == 6 for one in book.accounts())
    assert sd.load(kept).result == torch.load(tmp_path / "1.pt", weights_only=False)["kept"][0]


@pytest.mark.slow
def test_two_processes_write_the_result_of_one_for_every_private_method(tmp_path):
    check(EVERY, tmp_path)
