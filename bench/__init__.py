"""``sordino bench``: the same work, the same machine, the same minute, as ratios against peers."""

from __future__ import annotations

import datetime
import gc
import json
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench import growth as growth
from bench import peers as all_peers
from bench import workloads
from bench.meter import meter_of
from sordino import native
from sordino._version import __version__
from sordino.client.gradients import pooled
from sordino.errors import BadInput
from sordino.study.show import Sheet

Show = Callable[[str], None]

WARM = 6
"""Passes before a GPU is timed: shapes are recorded as graphs when they have come a few times."""


def bench(
    names: Sequence[str],
    peers: Sequence[str],
    repeats: int = 3,
    memory: bool = True,
    show: Show = print,
    device: str = "cpu",
    deterministic: bool = True,
) -> dict[str, Any]:
    """Time every workload with every peer, interleaved; medians, ratios over ``plain``, and peak memory.

    The first passes of each peer warm it up and are not counted: one on a CPU, more on a GPU, where kernels are
    compiled and passes recorded that come again. ``deterministic``: whether a GPU repeats sordino's rounds bit for bit.
    """
    meter = meter_of(device)
    chosen = list(dict.fromkeys(["sordino", "plain", *peers]))
    if "flower" in chosen and meter.device.type != "cpu":
        raise BadInput("flower's clients are processes on a CPU: leave it out of --peers, or use --device cpu")
    warm = 1 if meter.device.type == "cpu" else WARM
    found: dict[str, Any] = {}
    for name in names:
        task = workloads.prepare(workloads.find(name), device=str(meter.device), deterministic=deterministic)
        rounds = {peer: all_peers.find(peer)(task) for peer in chosen}
        times: dict[str, list[float]] = {peer: [] for peer in chosen}
        for repeat in range(1 - warm, repeats + 1):
            for peer, run in rounds.items():
                show(f"{name}: {peer} ({'warm-up' if repeat < 1 else f'{repeat} of {repeats}'})")
                gc.collect()
                spent = meter.seconds(run)
                if repeat > 0:
                    times[peer].append(spent)
        found[name] = _summary(task.work, times)
        if memory:
            show(f"{name}: memory")
            weighed = {peer: run for peer, run in rounds.items() if peer != "flower"}
            peaks = found[name]["peak_mb"] = {peer: meter.peak(name, peer, run) for peer, run in weighed.items()}
            found[name]["memory_ratio"] = peaks["sordino"] / peaks["plain"]
        for run in rounds.values():
            getattr(run, "stop", lambda: None)()
    found["_meta"] = about(repeats) | meter.about() | {"precision": "float32", "deterministic": deterministic}
    return found


def _summary(work: workloads.Workload, times: dict[str, list[float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"work": work.words}
    for peer, values in times.items():
        row[peer] = statistics.median(values)
    ratios = {peer: [a / b for a, b in zip(values, times["plain"])] for peer, values in times.items()}
    row["ratio"] = statistics.median(ratios["sordino"])
    row["ratios"] = {peer: {"median": statistics.median(r), "min": min(r), "max": max(r)} for peer, r in ratios.items()}
    return row


def about(repeats: int) -> dict[str, Any]:
    """Where, when and with what this was measured.

    ``load`` is the machine's average over the last minute; ``loops`` whether convolutions were compiled, or why not.
    """
    return {
        "date": datetime.date.today().isoformat(),
        "sordino": __version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "processor": platform.machine(),
        "python": platform.python_version(),
        "repeats": repeats,
        "loops": native.load("pooled", pooled.wrong).reason,
    }


def comparison(found: dict[str, Any]) -> Sheet:
    """The figures as a table: seconds, ratio over plain PyTorch with its spread, memory."""
    meta = found["_meta"]
    where = f"{meta['threads']} threads" if meta["device"] == "cpu" else meta["device"]
    title = f"one round each, median of {meta['repeats']}, {where}, torch {meta['torch']}"
    table = Sheet(("work", "peer", "seconds", "over plain", "spread", "peak MB"), left=("peer",), title=title)
    for name, row in found.items():
        for peer, ratio in row.get("ratios", {}).items():
            table.add_row(
                f"{name}: {row['work']}" if peer == "sordino" else name,
                peer,
                f"{row[peer]:.2f}",
                f"{ratio['median']:.2f}×",
                f"{ratio['min']:.2f}–{ratio['max']:.2f}",
                f"{row['peak_mb'][peer]:.0f}" if peer in row.get("peak_mb", ()) else "–",
            )
    return table


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures of ``comparison``, unrounded: a row for every workload and peer."""
    return [
        {
            "work": name,
            "peer": peer,
            "seconds": row[peer],
            **{f"ratio_{key}": ratio[key] for key in ("median", "min", "max")},
            "peak_mb": row.get("peak_mb", {}).get(peer),
        }
        for name, row in found.items()
        for peer, ratio in row.get("ratios", {}).items()
    ]


def to_text(found: dict[str, Any]) -> str:
    """The JSON that ``--json`` writes."""
    return json.dumps(found, indent=1)
