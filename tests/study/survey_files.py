"""Four CSV files that nobody may look at: breast cancer records with missing cells, text categories, other ranges."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer

SITES = {"north": 4.0, "east": 6.0, "south": 3.0, "west": 8.0}
NUMBERS = {"radius": 0, "texture": 1, "smoothness": 4, "concavity": 6}
SITE = """\
[site]
name = "{name}"
server = "127.0.0.1:{port}"
folder = "{name}"
[data]
path = "files/{name}.csv"
{more}
[budget]
epsilon = {epsilon}
delta = 1e-5
ledger = "{name}/ledger.db"
"""


def study(folder: Path, **more: Any) -> dict[str, Any]:
    """The survey's study, as a file would say it."""
    return {
        "study": {"name": "wards", "seed": 1},
        "data": {"folder": str(folder / "files")},
        "budgets": {"epsilon": dict(SITES), "delta": 1e-5},
        "survey": {
            "target": "diagnosis",
            "columns": {
                "radius": {"low": 0, "high": 50},
                "texture": {"low": 0, "high": 100},
                "smoothness": {"low": 0, "high": 0.5},
                "concavity": {"low": 0, "high": 1, "bins": 16},
                "ward": {"categories": ["a", "b", "c", "nowhere"]},
                "diagnosis": {"categories": ["benign", "malignant"]},
            },
            **more,
        },
        "deployment": {"sites": list(SITES), "enrol": 5.0, "timeout": 30.0},
    }


def write_files(folder: Path, times: int = 10) -> dict[str, list[list[str]]]:
    """The files; every record of the data set appears so often, a little different. Returns the rows."""
    found, random = load_breast_cancer(), np.random.default_rng(0)
    x = np.tile(found.data[:, list(NUMBERS.values())], (times, 1))
    x *= 1 + 0.03 * random.standard_normal(x.shape)
    y = np.tile(found.target, times)
    order = random.permutation(len(y))
    (folder / "files").mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[list[str]]] = {}
    for k, name in enumerate(SITES):
        rows[name] = []
        for i in order[k::4]:
            cells = [f"{v:.4g}" if random.random() > 0.06 else str(random.choice(["NA", ""])) for v in x[i]]
            ward = "abc"[int(x[i, 0] > 14) + int(random.random() < 0.3)] if random.random() > 0.05 else "unknown ward"
            rows[name].append([*cells, ward, "benign" if y[i] else "malignant"])
        with open(folder / "files" / f"{name}.csv", "w", newline="") as opened:
            writer = csv.writer(opened, delimiter=";" if name == "south" else ",", lineterminator="\n")
            writer.writerows([[*NUMBERS, "ward", "diagnosis"], *rows[name]])
    return rows


def write_sites(folder: Path, more: str = "", port: int = 9092) -> dict[str, Path]:
    """A SITE.toml for every file; ``more`` stands in [data]."""
    paths = {name: folder / f"{name}.toml" for name in SITES}
    for name, path in paths.items():
        path.write_text(SITE.format(name=name, epsilon=SITES[name], more=more, port=port))
    return paths
