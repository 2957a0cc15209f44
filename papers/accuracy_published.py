"""``auto`` on the papers' own benchmarks: a linear head on fixed features, nothing searched, beside what they print.

With noise per site, which holds against everybody, and with noise shared, half of all sites conspiring with the server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from papers import fedfdp_cells, fedfdp_published, robust_hdp, robust_hdp_published, verdicts
from papers.experiment import ACCURACY, CENTRAL, RECORDS, WORST, Cell, Entry, Experiment, Measure, Place, Quick

RESULTS = Path(__file__).parent.parent / "docs" / "results"
AUTO, SHARED = "auto, noise per site", "auto, noise shared, half of all sites conspiring"
BESIDE = "best measured with the paper's network, one seed"

HDP = {"mnist": "Robust-HDP's budgets on MNIST (Table 8)", "fashion-mnist": "its budgets on Fashion-MNIST (Table 9)"}
FAIR, SPREAD, LEVELS = (
    "FedFDP at ε = 3.52 (Table IV)",
    "FedFDP at ε = 3.52 (Table V)",
    "FedFDP on FashionMNIST (Table VI)",
)
PAGES = {
    HDP["mnist"]: "robust-hdp-table8",
    HDP["fashion-mnist"]: "robust-hdp-table9",
    FAIR: "fedfdp-table4",
    SPREAD: "fedfdp-table5",
    LEVELS: "fedfdp-table6",
}
OTHERS = {column: how for column, how in fedfdp_cells.SPREAD.items() if how[1:] != (0.1, 10)}
"""Columns of Table V that are not Table IV's: data set, β, clients."""


def default_cell(place: Place, data: Mapping[str, Any], budgets: Mapping[str, Any]) -> Cell:
    """A run with nothing set: method and model are sordino's defaults."""
    return Cell(*place, data=data, model="auto", method="auto", training={"evaluate": 1000}, budgets=budgets)


def with_shared_noise(cell: Cell) -> Cell:
    """The same run with shared noise, where half of all sites may conspire with the server."""
    return replace(cell, row=SHARED, trust={"noise": "shared", "colluders": cell.data["clients"] // 2})


def cells() -> tuple[Cell, ...]:
    """Runs of ``auto`` at its defaults for every federation that the tables name, for both kinds of trust."""
    alone = _alone()
    return (*alone, *map(with_shared_noise, alone))


def _alone() -> tuple[Cell, ...]:
    found = []
    for data, block in HDP.items():
        for place, dist in enumerate(robust_hdp.DISTS):
            budgets = {"spec": f"dist{place + 1}-published", "delta": robust_hdp.DELTA}
            found.append(default_cell((block, AUTO, dist), {"name": data, **robust_hdp.CLIENTS}, budgets))
    fixed = {"spec": fedfdp_cells.EPSILON, "delta": fedfdp_cells.DELTA}
    for column in fedfdp_cells.DATA:
        found.append(default_cell((FAIR, AUTO, column), fedfdp_cells.dealt(column), fixed))
    for column, how in OTHERS.items():
        found.append(default_cell((SPREAD, AUTO, column), fedfdp_cells.dealt(*how), fixed))
    for column, (epsilon, _) in fedfdp_cells.BUDGETS.items():
        budgets = {"spec": epsilon, "delta": fedfdp_cells.DELTA}
        found.append(default_cell((LEVELS, AUTO, column), fedfdp_cells.dealt("FashionMNIST"), budgets))
    return tuple(found)


def printed() -> dict[Place, tuple[float | None, ...]]:
    """The best that each paper prints for a federation, beside the measure that it speaks of."""
    found: dict[Place, tuple[float | None, ...]] = {}
    for data, block in HDP.items():
        for place, dist in enumerate(robust_hdp.DISTS):
            best = max(values[place] for values in robust_hdp_published.TABLES[data].values())
            found[block, AUTO, dist] = found[block, SHARED, dist] = (best, None, None)
    for block, table, columns, shown in (
        (FAIR, fedfdp_published.TABLE_4, fedfdp_cells.DATA, fedfdp_cells.DATA),
        (SPREAD, fedfdp_published.TABLE_5, fedfdp_cells.SPREAD, OTHERS),
        (LEVELS, fedfdp_published.TABLE_6, fedfdp_cells.BUDGETS, fedfdp_cells.BUDGETS),
    ):
        for k, column in enumerate(columns):
            if column in shown:
                best = max(values[2 * k] for values in table.values())
                for row in (AUTO, SHARED):
                    found[block, row, column] = (None, best, None)
    return found


def beside(quick: bool) -> list[Entry]:
    """The best private method with the paper's own network, as the pages of docs/results have it."""
    found = []
    for block, page in PAGES.items():
        path = RESULTS / f"{page}.json"
        if quick or not path.exists():
            continue
        best: dict[str, dict[str, float]] = {}
        for row in json.loads(path.read_text())["table"]:
            key, value = row["measure"], row["measured"]
            if key in ("accuracy", "record_accuracy") and value is not None:
                column = best.setdefault(row.get("setting") or row["distribution"], {})
                column[key] = max(value, column.get(key, value))
        wanted = {place[2] for place in printed() if place[0] == block}
        found += [Entry((block, BESIDE, column), values) for column, values in best.items() if column in wanted]
    return found


def measure_of(block: str) -> Measure:
    """What the paper of a block speaks of: the mean over clients, all their test records, or one common test set."""
    if block in HDP.values():
        return ACCURACY
    return RECORDS if block in (FAIR, SPREAD, LEVELS) else CENTRAL


def says(measured: Mapping[Place, Entry], there: Mapping[Place, tuple[float | None, ...]]) -> list[str]:
    """By block: the mean of ``auto``, and where it stands to the best printed number by its own interval."""
    said = []
    for block, row in dict.fromkeys(place[:2] for place in measured if place[1] != BESIDE):
        measure = measure_of(block)
        own = {p: e for p, e in measured.items() if p[:2] == (block, row) and e.values.get(measure.key) is not None}
        gaps = [
            gap
            for place, entry in own.items()
            if (best := next((value for value in there.get(place, ()) if value is not None), None)) is not None
            and (gap := verdicts.against(entry, best, measure, place[2]))
        ]
        if gaps:
            mean = np.mean([entry.values[measure.key] for entry in own.values()])
            said.append(
                f"{block}: {row}: {mean:.1f} on average over {len(own)} columns; against the best printed number "
                f"{verdicts.count(gaps)}."
            )
    return said


EXPERIMENTS = (
    Experiment(
        name="accuracy/published",
        title="auto, with nothing searched, on the benchmarks of Robust-HDP and FedFDP, beside the best printed",
        cost="290 runs of a linear head on scattering features, up to 94,090 parameters; five hours on two cores",
        measures=(ACCURACY, RECORDS, WORST),
        published=printed(),
        differs=(
            "Not a table of any paper: the same federations and budgets, each at the papers' δ, with the method and "
            "the model that sordino takes by default, every release counted by the tight accountant. The network is "
            "ours, a linear head on fixed scattering features, and what is printed beside it is the best of all "
            "methods of the paper in that column, whatever network they have.",
            "Noise per site holds against the server and all other sites together. Shared noise holds against the "
            "server and any half of all sites: the server sees the sum of all messages alone. The same budgets, "
            "another trust; the papers' numbers are with noise per site.",
            "Nothing is searched: rounds, batches and steps follow from sizes, budgets and the model (docs/tuning.md).",
            "Another partition for every seed. The row beside is the best of all private methods that this project ran "
            "with the paper's network, each with values searched for it, on one seed.",
        ),
        cells=cells,
        compute=beside,
        seeds=5,
        features=True,
        quick=Quick(
            columns=("Dist2", "MNIST"), data={"options": {"records": 2000}}, training={"rounds": 10, "evaluate": 10}
        ),
        conclude=says,
        axes=("method", "federation"),
    ),
)
