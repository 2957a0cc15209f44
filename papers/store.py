"""What is kept of every finished run, in one small file each, so that an interrupted reproduction goes on."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from papers.experiment import Cell
from sordino.engine.checkpoint import write_atomic
from sordino.study.result import to_json

CURVES = ("accuracy", "worst_accuracy", "central_accuracy", "loss", "psi", "clip")
"""Per-round figures that are kept."""


class Store:
    """OUT/cells: a JSON file for every finished run. ``reuse`` names other reproductions whose runs count too: their
    folders, or their results.json, which has every run's numbers but not its curves."""

    def __init__(self, out: Path, reuse: Sequence[Path] = ()) -> None:
        self.folder = out / "cells"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.stacks = out / "stacks"
        """Where runs that are being trained keep their state."""
        self.places = (self.folder, *(other / "cells" for other in reuse if other.is_dir()))
        self._known: dict[str, dict[str, Any]] = {}
        for other in reuse:
            if not other.is_dir():
                self._known |= told(json.loads(other.read_text()))

    def read(self, cell: Cell) -> dict[str, Any] | None:
        """What is known of a run, or None while it is not finished."""
        name = cell.id
        for place in self.places:
            if name in self._known:
                break
            try:
                self._known[name] = json.loads((place / f"{name}.json").read_text())
            except (FileNotFoundError, json.JSONDecodeError):  # half a file is no result: the run is made again
                continue
        return self._known.get(name)

    def write(self, cell: Cell, figures: Mapping[str, Any]) -> None:
        """Keep a finished run; all of it or nothing reaches the disk."""
        body = {"id": cell.id, "recipe": cell.recipe, **figures}
        write_atomic(self.folder / f"{cell.id}.json", to_json(body, indent=1).encode())


def told(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By id, the runs that a results.json tells of, those that chose values among them."""
    made = {key: results["_meta"][key] for key in ("hardware", "versions", "commit")}
    found = {one["id"]: made | one for one in results["runs"] if "id" in one}
    for search in results.get("searches", ()):
        for trial in search["trials"]:
            if "id" in trial:
                scored = {key: value for key, value in trial.items() if key not in TRIAL}
                found.setdefault(trial["id"], {**made, "seconds": trial.get("seconds", 0.0), "final": scored})
    return found


TRIAL = ("id", "stage", "values", "seed", "rounds", "seconds")
"""What a searched run says in results.json beside what it scored."""


def figures(result: Mapping[str, Any], seconds: float, hardware: str) -> dict[str, Any]:
    """The numbers of a run that tables and curves are made of."""
    final = {key: value for key, value in result["final"].items() if isinstance(value, (int, float))}
    rounds = [one for one in result["rounds"] if one.get("loss") is not None]
    for key in ("accuracy", "central_accuracy"):
        seen = [one[key] for one in rounds if one.get(key) is not None]
        if seen:
            final[f"best_{key}"] = max(seen)
    by_client = result["final"].get("client_accuracy")
    if by_client and None not in by_client:  # test sets are as large as training sets, client by client
        final["record_accuracy"] = float(np.average(by_client, weights=result["study"]["sizes"]))
    if rounds:
        final["least_loss"] = min(one["loss"] for one in rounds)
    final |= _clipping(result["rounds"])
    final |= {name: values[-1] for name, values in _observed(rounds).items() if values[-1] is not None}
    return {
        "final": final,
        "client_accuracy": result["final"].get("client_accuracy"),
        "client_sizes": result["study"]["sizes"],
        "curves": {
            "round": [one["round"] for one in rounds],
            **{key: [one.get(key) for one in rounds] for key in CURVES if any(key in one for one in rounds)},
            **_observed(rounds),
        },
        "noise_power": _mean_diagnostic(result["rounds"], "noise_power"),
        "private": result["private"],
        "privacy": _privacy(result) if result["private"] else None,
        "parameters": result["study"]["model"]["parameters"],
        "method": result["study"]["method"],
        "seconds": seconds,
        "hardware": hardware,
        "commit": commit(),
        "versions": result["versions"],
    }


def diverged(seconds: float, hardware: str, why: str) -> dict[str, Any]:
    """What is kept of a run whose model did not stay finite: no numbers, and the reason."""
    return {"final": {}, "curves": {}, "diverged": why, "seconds": seconds, "hardware": hardware}


def _privacy(result: Mapping[str, Any]) -> dict[str, Any]:
    """Largest spent ε, largest share of a budget, and the range of noise multipliers."""
    bounded = [one for one in result["privacy"] if one["epsilon"] and math.isfinite(one["epsilon"])]
    noises = [release["noise"] for one in bounded for release in one["releases"] if release["what"] != "loss"]
    return {
        "most_spent_epsilon": max((one["run_epsilon"] for one in bounded), default=0.0),
        "largest_share": max((one["run_epsilon"] / one["epsilon"] for one in bounded), default=0.0),
        "most_replace_one_epsilon": max((one["replace_one_epsilon"] for one in bounded), default=0.0),
        "least_noise": min(noises, default=None),
        "most_noise": max(noises, default=None),
        "releases": max(sum(release["count"] for release in one["releases"]) for one in bounded) if bounded else 0,
    }


def _mean_diagnostic(rounds: list[dict[str, Any]], key: str) -> float | None:
    seen = [one["diagnostics"][key] for one in rounds if key in one.get("diagnostics", {})]
    return float(np.mean(seen)) if seen else None


def _clipping(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """First and last radius where a method moves it."""
    moved = [one["clip"] for one in rounds if one.get("clip") is not None]
    return {"first_radius": moved[0], "last_radius": moved[-1]} if moved else {}


def _observed(rounds: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """What an observer saw of clipping, by name; τ_q as ``tau_q``."""
    seen: list[dict[str, Any]] = []
    for one in rounds:
        told = one.get("observer", {})
        ratios = {f"tau_{q}": value for q, value in told.get("tau", {}).items()}
        seen.append(ratios | {key: value for key, value in told.items() if isinstance(value, (int, float))})
    return {name: [one.get(name) for one in seen] for name in dict.fromkeys(name for one in seen for name in one)}


def hardware(device: torch.device) -> str:
    """What the runs were made on, in words."""
    if device.type == "cuda":
        return f"one {torch.cuda.get_device_name(device)}"
    return f"{os.cpu_count()} CPU cores ({platform.machine()})"


def commit() -> str | None:
    """The commit of the source, if it lies in a repository and git is there; ``SORDINO_COMMIT`` names it elsewhere."""
    named = os.environ.get("SORDINO_COMMIT")
    if named:
        return named
    try:
        found = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", ".")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{found} with changes" if changed else found


def _git(*words: str) -> str:
    asked = ["git", "-C", str(Path(__file__).parent), *words]
    return subprocess.run(asked, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
