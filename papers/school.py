"""MR-MTL on School (Liu et al. 2022): personal models against training alone and one model for all, at the same ε.

139 schools, a linear model, ε = 6, δ = 1e-3, 200 rounds of one full-batch step, clip 1; a quarter of every school's
pupils is for testing. ``python -m papers.school`` prints test errors (mean squared, of scores divided by 70).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

import sordino as sd
from sordino import methods
from sordino.methods import Method
from sordino.study.prepared import Run
from sordino.study.run import prepare
from sordino.study.session import train_together

SETTINGS = {"rounds": 200, "lr": 0.03, "clip": 1.0, "sampling": "full", "evaluate": 200}
"""A first look at one seed with lr = 0.01, 0.03, 0.1 and 0.3 chose lr: the one at which training alone is best."""

PULLS = (0.0, 0.3, 1.0, 3.0)


def rivals() -> dict[str, Method]:
    """FedAvg, MR-MTL with several λ (0 is training alone), and a common model that every school tunes alone."""
    pulled = {f"mr-mtl, λ = {w:g}": methods.get("mr-mtl", {"local": {"name": "mr-mtl", "weight": w}}) for w in PULLS}
    return {"dp-fedavg": methods.get("dp-fedavg"), **pulled, "fine-tuned": methods.get("fine-tuned")}


def errors_of(seeds: Sequence[int], folder: Path | None = None, **training: object) -> dict[str, list[float]]:
    """By method, the test error Σ p_k MSE_k of every seed; p_k is a school's share of the pupils."""
    source = sd.data.load("school", folder)
    found: dict[str, list[float]] = {name: [] for name in rivals()}
    for seed in seeds:
        clients = source.partition("natural", seed=seed, test=0.25).with_budgets(6.0, delta=1e-3)
        ready = [prepare(clients, "linear", one, seed, None, {**SETTINGS, **training}) for one in rivals().values()]
        for name, run in zip(found, train_together(ready, device="cpu")):
            assert isinstance(run, Run)
            found[name].append(2 * run.result["final"]["loss"])  # the loss is half of the squared error
    return found


def table(errors: Mapping[str, Sequence[float]]) -> str:
    """The errors as Markdown: mean over seeds, and the standard error of it."""
    lines = ["| method | test MSE | ± |", "|---|---|---|"]
    for name, each in errors.items():
        spread = np.std(each, ddof=1) / np.sqrt(len(each)) if len(each) > 1 else 0.0
        lines.append(f"| {name} | {np.mean(each):.5f} | {spread:.5f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(errors_of(range(5))))
