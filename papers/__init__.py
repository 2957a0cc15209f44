"""Tables and figures of the four papers, and our accuracy benchmark, each from one command: ``sordino reproduce NAME``.

    import papers

    papers.names()                                     # "robust-hdp/table8", …
    papers.run("robust-hdp/table8", out="runs/table8", device="cuda", only="tight, Dist1|Dist2")

Interrupted: call it again; finished runs are taken from OUT/cells. This package and all it opens need neither pydantic
nor plotly, so that it runs on a bare GPU machine.
"""

from __future__ import annotations

import datetime
import difflib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group

from papers import tables
from papers.catalogue import EXPERIMENTS
from papers.experiment import Cell, Entry, Experiment, Exploring, Place
from papers.make import Workshop
from papers.packed import pack
from papers.pages import page_of
from papers.runner import Cells, Silent, matching, settle
from papers.search import Search, edges, searches, told
from papers.store import Store, commit, hardware
from sordino.engine.checkpoint import write_atomic
from sordino.engine.devices import torch_device
from sordino.errors import BadInput
from sordino.study.result import to_json, versions
from sordino.study.schedule import STACK_ROWS, Scheduler

__all__ = ["Cell", "Experiment", "Reproduction", "get", "names", "pack", "run"]


def names() -> list[str]:
    """Everything that can be reproduced, paper by paper."""
    return list(EXPERIMENTS)


def get(name: str) -> Experiment:
    """An experiment by name."""
    if name not in EXPERIMENTS:
        near = difflib.get_close_matches(name, EXPERIMENTS, n=3)
        near += [one for one in EXPERIMENTS if name in one and one not in near]
        hint = f"did you mean {', '.join(near[:5])}?" if near else f"known: {', '.join(EXPERIMENTS)}"
        raise BadInput(f"nothing called {name!r} can be reproduced: {hint}")
    return EXPERIMENTS[name]


@dataclass(frozen=True)
class Reproduction:
    """What is known of an experiment: its table, and what it was made with."""

    experiment: Experiment
    entries: list[Entry]
    about: dict[str, Any]
    folder: Path

    def terminal(self, width: int = 100) -> Group:
        """For a terminal of so many characters."""
        return tables.to_terminal(self.experiment, self.entries, self.about, width)


@dataclass(frozen=True)
class Options:
    """How an experiment is reproduced.

    Attributes
    ----------
    device: cpu, cuda or auto.
    quick: scaled down to under two minutes on two cores; bundled data stands in for data that is not there.
    seeds: how many, from 0 on; default: what the experiment says.
    only: the runs to make: words in their block, row, column or seed ("tight, Dist1|Dist2"), or a function of a cell.
    data: the folder of the data sets; default SORDINO_DATA, or ./data.
    reuse: folders of other reproductions, or their results.json; a run that is finished there is not made again.
    stack, rows, processes: see ``sordino.study.schedule.Scheduler``.
    minutes: begin nothing new after so long; what was begun is finished.
    precision: ``"mixed"`` lets a GPU compute activations in TF32; it is noted in results.json.
    """

    device: str = "cpu"
    quick: bool = False
    seeds: int | None = None
    only: str | Callable[[Cell], bool] | None = None
    data: str | os.PathLike[str] | None = None
    reuse: Sequence[str | os.PathLike[str]] = ()
    stack: bool | None = None
    rows: int = STACK_ROWS
    processes: int = 1
    minutes: float | None = None
    precision: str = "float32"

    def __post_init__(self) -> None:
        for key in ("seeds", "processes"):
            if (value := getattr(self, key)) is not None and value < 1:
                raise BadInput(f"{key} is {value}: at least one is needed")
        for other in self.reuse:
            if not (Path(other) / "cells").is_dir() and not _is_results(Path(other)):
                raise BadInput(
                    f"{other} is neither the folder of a reproduction, which has a folder called cells in it, nor a "
                    "results.json of one"
                )


def _is_results(path: Path) -> bool:
    """Whether a file is the results.json of a reproduction."""
    try:
        return path.is_file() and {"_meta", "runs"} <= set(json.loads(path.read_text()))
    except (json.JSONDecodeError, UnicodeDecodeError):
        return False


def run(
    name: str, out: str | os.PathLike[str] | None = None, watch: Silent | None = None, **options: Any
) -> Reproduction:
    """Reproduce a table or figure, or go on with it; writes table.md, table.csv, curves.csv and results.json into out.

    Parameters
    ----------
    name: one of ``names()``.
    out: default ``runs/reproduce/NAME``, with ``-quick`` for a quick one.
    watch: is told how far it is.
    options: see ``Options``.
    """
    experiment, asked = get(name), Options(**options)
    where = torch_device(asked.device)
    folder = Path(out) if out is not None else Path("runs/reproduce") / (name + ("-quick" if asked.quick else ""))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"cannot make the folder {folder}: {error.strerror}; name another one") from None
    started = time.monotonic()
    features = folder / "features" if experiment.features else None
    workshop = Workshop(None if asked.data is None else Path(asked.data), asked.quick, asked.precision, features)
    watch = watch or Silent()
    store = Store(folder, [Path(other) for other in asked.reuse])
    about: dict[str, Any] = {
        "name": name,
        "title": experiment.title,
        "quick": asked.quick,
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(where),
        "commit": commit(),
        "versions": versions(),
        "precision": asked.precision,
    }
    computed = experiment.compute(asked.quick) if experiment.compute else []
    if experiment.explore is None:
        planned = experiment.planned(asked.quick, asked.seeds)
    else:
        told = Exploring(folder, workshop, watch, asked.quick, asked.seeds, asked.processes)
        planned = experiment.explore(told)
    about["seconds"] = time.monotonic() - started
    wanted = matching(planned, asked.only)
    deadline = None if asked.minutes is None else started + 60 * asked.minutes
    how = Scheduler(asked.device, asked.stack, asked.processes, asked.rows, deadline)
    maker = Cells(workshop, store, asked.device)
    try:
        while missing := _missing(searches(experiment, wanted, store.read)):
            if not maker.finish(missing, "choosing values", how, watch):
                break
        else:
            maker.finish(settle(wanted, searches(experiment, wanted, store.read)), "training", how, watch)
    finally:  # whatever is there becomes a table, also when a person stops it
        about["elapsed"] = time.monotonic() - started
        done = _collected(Reproduction(experiment, computed, about, folder), planned, store, workshop)
    return done


def _missing(found: Mapping[Place, Search]) -> list[Cell]:
    """The runs that searches wait for, each once."""
    return list({run.id: run for search in found.values() for run in search.missing}.values())


def _collected(begun: Reproduction, planned: tuple[Cell, ...], store: Store, workshop: Workshop) -> Reproduction:
    """The table of what was computed and of all finished runs, written."""
    experiment = begun.experiment
    found = searches(experiment, planned, store.read)
    settled = settle(planned, found)
    chose = list({name: one for search in found.values() for name, one in search.made.items()}.values())
    waited = len(_missing(found))
    shown = [(cell, one) for cell in settled if (one := store.read(cell)) is not None]
    diverged = sum(1 for _, one in shown if "diverged" in one)
    notes = [f"Instead of {name}, which was not found, this used {words}." for name, words in workshop.replaced.items()]
    if diverged:
        notes.append(f"{diverged} runs diverged and are left out of the means.")
    notes += edges(found)
    finished = chose + [one for _, one in shown]
    about = begun.about | {
        "runs": len(planned) + len(chose) + waited,
        "left": len(planned) + len(chose) + waited - len(finished),
        "trained": len(finished),
        "tuning": len(chose),
        "searched": len(found),
        "screened": experiment.screened,
        "seeds": sorted({cell.seed for cell, _ in shown}),
        "seconds": begun.about["seconds"] + sum(one["seconds"] for one in finished),
        "hardware": _words(one["hardware"] for one in finished) or begun.about["hardware"],
        "versions": _versions(finished) or begun.about["versions"],
        "notes": notes,
    }
    entries = tables.measured(experiment, settled, store) + begun.entries
    return _written(Reproduction(experiment, entries, about, begun.folder), settled, store, told(found))


def _versions(runs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What the runs were made with, which need not be what their table is written with."""
    found: dict[str, list[str]] = {}
    for one in runs:
        for name, version in one.get("versions", {}).items():
            found.setdefault(name, []).append(str(version))
    return {name: _words(each) for name, each in found.items()}


def _words(lists: Iterable[str]) -> str:
    """What several lists of words hold, each word once."""
    return ", ".join(sorted({word for one in lists for word in one.split(", ")}))


def _written(done: Reproduction, cells: list[Cell], store: Store, searched: list[dict[str, Any]]) -> Reproduction:
    experiment, entries = done.experiment, done.entries
    flat = tables.rows_of(experiment, entries)
    results = {
        "_meta": {**done.about, "differs": list(experiment.differs)},
        "conclusions": tables.conclusions(experiment, entries, done.about),
        "table": flat,
        "runs": [row for cell in cells if (row := _run_row(cell, store))],
        "searches": searched,
    }
    pages = {
        "table.csv": tables.to_csv(flat),
    }
    if experiment.gather is not None:
        results |= experiment.gather(done.folder, cells, store, done.about)
    pages["results.json"] = to_json(results, indent=1)
    pages["table.md"] = page_of(experiment, json.loads(pages["results.json"]))
    if cells:
        pages["curves.csv"] = tables.curves_csv(experiment, cells, store)
    for page, text in pages.items():
        write_atomic(done.folder / page, text.encode())
    return done


def _run_row(cell: Cell, store: Store) -> dict[str, Any] | None:
    """One finished run in results.json: where it stands and its numbers, without curves."""
    known = store.read(cell)
    if known is None:
        return None
    kept = ("final", "noise_power", "privacy", "seconds", "diverged")
    labels = {"id": cell.id, "block": cell.block, "row": cell.row, "column": cell.column, "seed": cell.seed}
    return {**labels, "chosen": dict(cell.chosen), **{key: known[key] for key in kept if known.get(key) is not None}}
