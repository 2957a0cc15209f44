"""Blocks of docs/results/selection.md, an early page, from selection.json: a table a data set, and sentences."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from papers.pages import RESULTS
from papers.verdicts import Gap

NOISE = {"closed-form-selection": "closed form, as published", "tight": "tight"}


def _runs() -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads((RESULTS / "selection.json").read_text())["runs"]
    return runs


def shown(data: str, noise: str, rule: str) -> tuple[float, dict[int, float]]:
    """The learning rate that the tuning seed chose, and the accuracies in per cent of the others by seed."""
    own = [run for run in _runs() if (run["data"], run["calibrate"], run["rule"]) == (data, noise, rule)]
    lr = max((run for run in own if run["seed"] == 100), key=lambda run: float(run["accuracy"]))["lr"]
    return lr, {run["seed"]: 100 * run["accuracy"] for run in own if run["seed"] < 100 and run["lr"] == lr}


def table_lines(data: str) -> list[str]:
    """The table of a data set."""
    lines = ["| rule | noise | lr | accuracy %, mean ± deviation | seeds |", "|---|---|---|---|---|"]
    for noise, words in NOISE.items():
        known = {run["rule"]: None for run in _runs() if (run["data"], run["calibrate"]) == (data, noise)}
        for rule in known:
            lr, found = shown(data, noise, rule)
            values = list(found.values())
            each = ", ".join(f"{value:.1f}" for value in values)
            spread = f"{np.mean(values):.1f} ± {np.std(values, ddof=1):.1f}"
            lines.append(f"| {rule} | {words} | {lr:g} | {spread} | {each} |")
    return lines


def _gap(data: str, one: tuple[str, str], other: tuple[str, str]) -> Gap:
    here, there = (shown(data, *which)[1] for which in (one, other))
    return Gap({seed: here[seed] - there[seed] for seed in sorted(set(here) & set(there))})


def says_lines() -> list[str]:
    """What the tables say, each comparison with its interval."""
    comparisons = {
        "With the published noise, privacy-aware against unbiased": (
            ("closed-form-selection", "privacy-aware"),
            ("closed-form-selection", "unbiased"),
        ),
        "With tight noise, privacy-aware against unbiased": (("tight", "privacy-aware"), ("tight", "unbiased")),
        "Unbiased, tight noise against the published": (("tight", "unbiased"), ("closed-form-selection", "unbiased")),
        "Privacy-aware, tight noise against the published": (
            ("tight", "privacy-aware"),
            ("closed-form-selection", "privacy-aware"),
        ),
        "With tight noise, unbiased-compensated against unbiased": (
            ("tight", "unbiased-compensated"),
            ("tight", "unbiased"),
        ),
        "With tight noise, power-of-choice against uniform": (("tight", "power-of-choice"), ("tight", "uniform")),
        "With tight noise, uniform against unbiased": (("tight", "uniform"), ("tight", "unbiased")),
    }
    share = max(float(run["share"]) for run in _runs() if run["calibrate"] == "closed-form-selection")
    said = [
        f"- {words}, points: MNIST {_gap('mnist', *pair).show()}, Fashion-MNIST {_gap('fashion-mnist', *pair).show()}."
        for words, pair in comparisons.items()
    ]
    return [
        *said,
        f"- The closed form spends at most {100 * share:.1f} % of any budget when charged at its real price.",
    ]
