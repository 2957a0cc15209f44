"""Table 6 of AdaptDP-FedAvg: what its first phase adds to the time and memory of a round."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from bench.memory import added
from papers.experiment import Entry
from sordino import methods
from sordino.data import Dataset
from sordino.errors import SordinoError
from sordino.study.prepared import Prepared
from sordino.study.run import prepare
from sordino.study.session import train_prepared

FIXED = ("DP-FedAvg", "b^C = b")
WAYS: dict[tuple[str, str], methods.Method] = {
    FIXED: methods.get("dp-fedavg"),
    ("AdaptDP-FedAvg", "b^C = b"): methods.get("adaptdp"),
    ("AdaptDP-FedAvg", "b^C = 25"): methods.get("adaptdp", {"ask": {"name": "squared-norm", "size": 25}}),
}


@dataclass(frozen=True)
class Network:
    """A network, and how often its rounds are timed: ``passes`` over all methods of ``rounds`` rounds each."""

    model: str
    rounds: int
    passes: int
    options: dict[str, Any] = field(default_factory=dict)


NETWORKS = {
    "random features, 512": Network("random-features", 8, 12, {"hidden": 512}),
    "MobileNetV2": Network("mobilenetv2-gn", 4, 1),
}


def round_costs(quick: bool) -> list[Entry]:
    """Seconds of processor time a round, median of many, methods interleaved: two clients of 1500, b = 100, K = 15.

    Processor time of the one thread that works, because a clock on the wall also counts what others do on the machine.
    """
    entries = []
    for name, network in list(NETWORKS.items())[: 1 if quick else None]:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            spent = _interleaved(network, passes=2 if quick else network.passes)
        finally:
            torch.set_num_threads(before)
        usual = {way: float(np.median(times)) for way, times in spent.items()}
        for place, (way, value) in enumerate(usual.items()):
            figures = {"seconds": value, "ratio": value / usual[FIXED]}
            if not quick:
                figures["peak_mb"] = _apart(name, place)
            entries.append(Entry((name, *way), figures))
    return entries


def _ready(network: Network, way: methods.Method, rounds: int, length: dict[str, int]) -> Prepared:
    clients = _pictures().partition("iid", 2, 0, test=0.0).with_budgets(8.0, delta=1e-4)
    training = {"rounds": rounds, "batch": 100, "lr": 0.1, "clip": 0.1, "evaluate": rounds, **length}
    return prepare(clients, network.model, way, 0, dict(network.options), training)


def _interleaved(network: Network, passes: int) -> dict[tuple[str, str], list[float]]:
    ready = {way: _ready(network, method, network.rounds, {"epochs": 1}) for way, method in WAYS.items()}
    spent: dict[tuple[str, str], list[float]] = {way: [] for way in WAYS}
    for _ in range(passes):
        for way, one in ready.items():
            moments: list[float] = []
            train_prepared(one, callbacks=[lambda record, kept=moments: kept.append(time.thread_time())])  # type: ignore[misc]
            spent[way] += np.diff(moments[:-1]).tolist()  # the first round warms up, the last looks at the model
    return spent


def _apart(network: str, way: int) -> float:
    """Peak memory of a method in a process of its own."""
    code = f"from {__name__} import peak; print(peak({network!r}, {way}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SordinoError(f"{network} failed in a process of its own: {done.stderr[-1000:]}")
    return float(done.stdout.split()[-1])


def peak(network: str, way: int) -> float:
    """MB that two rounds of two steps add to what was there before: more of them take no more."""
    torch.set_num_threads(1)
    ready = _ready(NETWORKS[network], list(WAYS.values())[way], 2, {"steps": 2})
    return added(lambda: train_prepared(ready))[0]


def _pictures(records: int = 3000) -> Dataset:
    random = np.random.default_rng(0)
    x = random.random((records, 1, 28, 28), dtype=np.float32)
    y = random.integers(0, 10, records)
    return Dataset("pictures", x, y, "classification", 10, np.ones(records, dtype=bool))
