"""Raw files of four hospitals in the folder ``raw-files``: no header, ? and −9 for missing, a stage from 0 to 4.

Measurements and diagnoses are scikit-learn's breast cancer records; codes, stages and gaps are made up.
"""

import gzip
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer

HOSPITALS = ("cleveland.csv", "hungary.CSV", "long-beach.csv.gz", "zurich.csv")


def rows(hospital: int) -> list[list[str]]:
    """The cells of one hospital's records: radius, texture, smoothness, two codes, the stage."""
    found, random = load_breast_cancer(), np.random.default_rng(hospital)
    made = []
    for j in range(hospital, len(found.data), len(HOSPITALS)):
        radius, texture = (f"{value:.4g}" if random.random() > 0.1 else "?" for value in found.data[j, :2])
        side, code = f"{random.integers(0, 2)}.0", "-9" if random.random() < 0.1 else str(random.integers(1, 4))
        stage = 0 if found.target[j] else random.integers(1, 5)
        made.append([radius, texture, f"{found.data[j, 4]:.3f}", side, code, str(stage)])
    return made


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for k, name in enumerate(HOSPITALS):
        content = "".join(",".join(row) + "\n" for row in rows(k)).encode()
        (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)


if __name__ == "__main__":
    write(Path("raw-files"))
