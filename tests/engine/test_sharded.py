"""Several processes that simulate one run together end it with the weights of one process."""

import subprocess
import sys

import torch

import sordino as sd

SETTINGS = {"rate": 0.2, "lr": 0.3, "clip": 0.7, "rounds": 3}
RUNS = {
    "dp-fedavg": {"steps": 2},  # a sum, added up in every process
    "robust-hdp": {"steps": 1},  # a rule that needs the matrix
    "dp-scaffold": {"steps": 2},  # state at clients
    "adaptdp": {"steps": 1},  # a question before the step
    "uniform": {"select": 1},  # one row: a process without any
    "weiavg": {"trust": {"noise": "shared", "colluders": 2}},  # the server sees the sum alone
    "fedfdp": {"trust": {"noise": "shared", "colluders": 2}},  # and that of the answers
    "unbiased": {"select": 2, "trust": {"noise": "shared"}},
}

SCRIPT = """
import sys, torch
import torch.distributed as group
import sordino as sd
torch.set_num_threads(1)
folder, rank, runs, settings = sys.argv[1], int(sys.argv[2]), eval(sys.argv[3]), eval(sys.argv[4])
group.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
clients = sd.data.load("digits").subset(600, seed=0).partition("dirichlet", clients=6, beta=0.5, seed=0, minimum=30)
clients = clients.with_budgets([0.5, 1.0, 2.0, 4.0, 8.0, 1.0], delta=1e-4)
found = {}
for method, options in runs.items():
    out = f"{folder}/out" if method == "dp-fedavg" else None
    done = sd.train(clients, "logistic", method, out=out, **settings, **options)
    found[method] = (done.weights, done.result["rounds"][-1]["loss"])
torch.save(found, f"{folder}/{rank}.pt")
group.destroy_process_group()
"""


def test_two_processes_give_the_weights_of_one(digits, tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    children = [subprocess.Popen([*command, str(rank), repr(RUNS), repr(SETTINGS)]) for rank in (0, 1)]
    try:
        assert [child.wait(120) for child in children] == [0, 0]
    finally:
        for child in children:
            child.kill()
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for method, options in RUNS.items():
        alone = sd.train(digits, "logistic", method, **SETTINGS, **options).weights
        for weights, _ in (first[method], second[method]):
            assert torch.linalg.vector_norm(weights - alone) <= 1e-5 * torch.linalg.vector_norm(alone), method
        assert first[method][1] == second[method][1]
    with sd.privacy.Ledger(tmp_path / "out" / "ledger.db", readonly=True) as book:
        assert all(sum(event.count for event in book.spent(name)) == 6 for name in digits.names)
