"""One of several processes that train runs together: ``python shared_runs.py FOLDER RANK SIZE WHAT``.

``WHAT`` is Python: a list of (name of the run, method, options of ``sd.train``). Every process leaves RANK.pt.
"""

import sys

import torch
import torch.distributed as group

import sordino as sd
import sordino.errors

SETTINGS = {"rate": 0.2, "lr": 0.3, "clip": 0.7, "rounds": 3}


def clients(source="digits"):
    found = sd.data.load(source)
    found = found.subset(600, seed=0) if source == "digits" else found
    found = found.partition("dirichlet", clients=6, beta=0.5, seed=0, minimum=30)
    return found.with_budgets([0.5, 1.0, 2.0, 4.0, 8.0, 1.0], delta=1e-4)


def trained(method, source="digits", model="logistic", rank=0, drawn=None, **options):
    """``drawn``: the seeds of a frozen network, by process, that adapters are trained beside."""
    if drawn is not None:
        torch.manual_seed(drawn[rank])
        model = sd.models.lora(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)), rank=2)
    return sd.train(clients(source), model, method, **SETTINGS | options)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, rank, size, what = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), eval(sys.argv[4])
    group.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    found = {}
    for name, method, options in what:
        try:
            done = trained(method, rank=rank, **options)
            found[name] = (done.result, done.weights, done.personal)
        except sd.errors.SordinoError as error:
            found[name] = (type(error).__name__, str(error))
    torch.save(found, f"{folder}/{rank}.pt")
    group.destroy_process_group()
