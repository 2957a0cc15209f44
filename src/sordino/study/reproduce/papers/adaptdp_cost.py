"""Table 6 of AdaptDP-FedAvg: what its first phase adds to the time of a round."""

from __future__ import annotations

import time

import numpy as np
import torch

from sordino import methods
from sordino.data import Dataset
from sordino.study.reproduce.experiment import Entry
from sordino.study.run import prepare, train_prepared


def round_costs(quick: bool) -> list[Entry]:
    """Seconds of processor time a round, median of many, methods interleaved: two clients of 1500, b = 100, K = 15.

    Processor time of the one thread that works, because a clock on the wall also counts what others do on the machine.
    """
    ways = {
        ("DP-FedAvg", "b^C = b"): methods.get("dp-fedavg"),
        ("AdaptDP-FedAvg", "b^C = b"): methods.get("adaptdp"),
        ("AdaptDP-FedAvg", "b^C = 25"): methods.get("adaptdp", {"ask": {"name": "squared-norm", "size": 25}}),
    }
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        spent = _interleaved(ways, repeats=2 if quick else 12)
    finally:
        torch.set_num_threads(before)
    usual = {way: float(np.median(times)) for way, times in spent.items()}
    base = usual[("DP-FedAvg", "b^C = b")]
    return [Entry(("", *way), {"seconds": value, "ratio": value / base}) for way, value in usual.items()]


def _interleaved(
    ways: dict[tuple[str, str], methods.Method], repeats: int, rounds: int = 8
) -> dict[tuple[str, str], list[float]]:
    clients = _pictures().partition("iid", 2, 0, test=0.0).with_budgets(8.0, delta=1e-4)
    training = {"rounds": rounds, "epochs": 1, "batch": 100, "lr": 0.1, "clip": 0.1, "evaluate": rounds}
    ready = {
        way: prepare(clients, "random-features", method, 0, {"hidden": 512}, training) for way, method in ways.items()
    }
    spent: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    for repeat in range(repeats + 1):
        for way, one in ready.items():
            moments: list[float] = []
            train_prepared(one, callbacks=[lambda record, kept=moments: kept.append(time.thread_time())])  # type: ignore[misc]
            if repeat:  # the first pass warms up
                spent[way] += np.diff(moments[:-1]).tolist()  # the last round also looks at the model
    return spent


def _pictures(records: int = 3000) -> Dataset:
    random = np.random.default_rng(0)
    x = random.random((records, 1, 28, 28), dtype=np.float32)
    y = random.integers(0, 10, records)
    return Dataset("pictures", x, y, "classification", 10, np.ones(records, dtype=bool))
