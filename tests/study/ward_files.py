"""Breast cancer records of three sites as raw CSV files: names for classes, a text column, missing cells."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer

NUMBERS = {"radius": 0, "texture": 1, "smoothness": 4, "concavity": 6}
CLASSES = ["malignant", "benign"]
SITES = {"north": 8.0, "south": 4.0, "west": 16.0}

SCHEMA = {
    "target": "diagnosis",
    "classes": CLASSES,
    "numeric": {"radius": [0, 40], "texture": [0, 50], "smoothness": [0, 0.25, "log"], "concavity": [0, 0.5]},
    "categorical": {"ward": ["a", "b"]},
    "fill": {"texture": 20, "concavity": 0.1},
}

STUDY = """
[study]
name = "wards"
rounds = 20

[data]
name = "wards"

[data.schema]
target = "diagnosis"
classes = ["malignant", "benign"]

[data.schema.numeric]
radius = [0, 40]
texture = [0, 50]
smoothness = [0, 0.25, "log"]
concavity = [0, 0.5]

[data.schema.categorical]
ward = ["a", "b"]

[data.schema.fill]
texture = 20
concavity = 0.1

[budgets]
epsilon = { north = 8, south = 4, west = 16 }
delta = 1e-4
"""


def rows_of(seed: int = 0) -> tuple[list[dict[str, str]], list[str]]:
    """All records as text, a tenth of the cells that may be missing are; and what each is."""
    found, random = load_breast_cancer(), np.random.default_rng(seed)
    order = random.permutation(len(found.target))
    rows = []
    for k in order:
        row = {name: f"{found.data[k, place]:.4f}" for name, place in NUMBERS.items()}
        row |= {name: random.choice(["", "NA"]) for name in ("texture", "concavity") if random.random() < 0.1}
        rows.append({"patient": f"p{k}", "ward": random.choice(["a", "b", "c", ""]), **row})
    return rows, [CLASSES[k] for k in found.target[order]]


def write(path: Path, rows: list[dict[str, str]], labels: list[str] | None = None) -> Path:
    """A CSV file, with the target where there are labels."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *(["diagnosis"] if labels else [])])
        writer.writeheader()
        writer.writerows(row if labels is None else {**row, "diagnosis": labels[k]} for k, row in enumerate(rows))
    return path


def write_sites(folder: Path, new: int = 69) -> tuple[list[dict[str, str]], list[str]]:
    """A file per site below ``folder``; returns the records that no site has, and what they are."""
    rows, labels = rows_of()
    folder.mkdir(parents=True)
    for k, name in enumerate(SITES):
        write(folder / f"{name}.csv", rows[new + k :: 3], labels[new + k :: 3])
    return rows[:new], labels[:new]
