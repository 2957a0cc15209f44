"""A page of docs/results from its JSON file: words from the code, numbers from the file, so that neither can drift.

``python -m papers.check`` compares all of them with their files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from papers import changes, tables
from papers.catalogue import EXPERIMENTS
from papers.experiment import Entry, Experiment, Place

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"


def entries_of(experiment: Experiment, results: Mapping[str, Any]) -> list[Entry]:
    """The numbers of a table, as results.json holds them."""
    found: dict[Place, dict[str, Mapping[str, Any]]] = {}
    for one in results["table"]:
        place = (one["block"], one[experiment.axes[0]], one[experiment.axes[1]])
        found.setdefault(place, {})[one["measure"]] = one
    seeds = _seeds(experiment, results["runs"])
    entries = []
    for place, rows in found.items():
        first = next(iter(rows.values()))
        values = {key: row["measured"] for key, row in rows.items()}
        deviations = {key: row["deviation"] for key, row in rows.items()}
        entries.append(Entry(place, values, deviations, first["runs"], first["chosen"], seeds.get(place, {})))
    return entries


def _seeds(experiment: Experiment, runs: Sequence[Mapping[str, Any]]) -> dict[Place, dict[str, dict[int, float]]]:
    """By place and measure, every seed's number."""
    found: dict[Place, dict[str, dict[int, float]]] = {}
    for run in runs:
        at = found.setdefault((run["block"], run["row"], run["column"]), {})
        for measure in experiment.measures:
            if (value := run["final"].get(measure.key)) is not None:
                at.setdefault(measure.key, {})[run["seed"]] = measure.scale * value
    return found


def page_of(experiment: Experiment, results: Mapping[str, Any]) -> str:
    """The Markdown page of a results.json."""
    lines = None if experiment.lines is None else experiment.lines(results)
    changed = [] if results["_meta"]["quick"] else changes.of(experiment.name, results)
    return tables.to_markdown(experiment, entries_of(experiment, results), results["_meta"], lines, changed)


def pages() -> dict[Path, tuple[Experiment, dict[str, Any]]]:
    """By path of its page, every experiment that has a JSON file in docs/results, with its content."""
    found = {}
    for name, experiment in EXPERIMENTS.items():
        path = RESULTS / f"{name.replace('/', '-')}.json"
        if path.exists():
            found[path.with_suffix(".md")] = (experiment, json.loads(path.read_text()))
    return found
