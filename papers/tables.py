"""Published beside measured: as Markdown, CSV, JSON and a table for the terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Group
from rich.text import Text

from papers import changes
from papers.experiment import Cell, Entry, Experiment, Measure, Place
from papers.search import SHARE, protocol
from papers.store import Store
from sordino.study.show import Sheet

Lines = list[tuple[str, list[str]]]
"""Rows of a table: what the row is, and its cells."""


def measured(experiment: Experiment, cells: Sequence[Cell], store: Store) -> list[Entry]:
    """Mean and deviation over seeds at every place that has a finished run."""
    found: dict[Place, list[tuple[Cell, dict[str, Any]]]] = {}
    for cell in cells:
        known = store.read(cell)
        if known is not None:
            found.setdefault(cell.place, []).append((cell, known))
    entries = []
    for place, runs in found.items():
        values: dict[str, float | None] = {}
        deviations: dict[str, float | None] = {}
        seeds: dict[str, dict[int, float]] = {}
        for measure in experiment.measures:
            seen = {cell.seed: known["final"].get(measure.key) for cell, known in runs}
            seeds[measure.key] = {seed: measure.scale * value for seed, value in seen.items() if value is not None}
            numbers = list(seeds[measure.key].values())
            values[measure.key] = float(np.mean(numbers)) if numbers else None
            deviations[measure.key] = float(np.std(numbers, ddof=1)) if len(numbers) > 1 else None
        entries.append(Entry(place, values, deviations, len(runs), dict(runs[0][0].chosen), seeds))
    return entries


def published(experiment: Experiment, place: Place, measure: Measure) -> float | None:
    """The paper's number, or None."""
    numbers = experiment.published.get(place)
    return None if numbers is None else numbers[experiment.measures.index(measure)]


def rows_of(experiment: Experiment, entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """One flat row for every number: what CSV and JSON hold."""
    return [
        {
            "block": entry.place[0],
            experiment.axes[0]: entry.place[1],
            experiment.axes[1]: entry.place[2],
            "measure": measure.key,
            "published": (there := published(experiment, entry.place, measure)),
            "measured": (here := entry.values.get(measure.key)),
            "deviation": entry.deviations.get(measure.key),
            "difference": None if there is None or here is None else here - there,
            "runs": entry.runs,
            "chosen": dict(entry.chosen),
        }
        for entry in entries
        for measure in experiment.measures
    ]


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """The flat rows as CSV; what is not there is empty."""
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            chosen = "; ".join(f"{key}={value}" for key, value in row["chosen"].items())
            writer.writerow({key: "" if value is None else value for key, value in row.items()} | {"chosen": chosen})
    return text.getvalue()


def curves_csv(experiment: Experiment, cells: Sequence[Cell], store: Store) -> str:
    """Every kept per-round figure of every finished run, one a line: ready for plotting."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["block", *experiment.axes, "seed", "round", "figure", "value"])
    for cell in cells:
        known = store.read(cell) or {}
        curves = known.get("curves", {})
        for name, values in curves.items():
            if name == "round":
                continue
            for number, value in zip(curves["round"], values):
                if value is not None:
                    writer.writerow([*cell.place, cell.seed, number, name, f"{value:.6g}"])
    return text.getvalue()


def grids(experiment: Experiment, entries: Sequence[Entry]) -> list[tuple[str, list[str], Lines]]:
    """For every block and measure: a heading, the columns, and lines of published, measured and difference."""
    found = []
    table = {entry.place: entry for entry in entries}
    for block in dict.fromkeys(entry.place[0] for entry in entries):
        inside = [entry for entry in entries if entry.place[0] == block]
        columns = list(dict.fromkeys(entry.place[2] for entry in inside))
        for measure in experiment.measures:
            numbers = [v for e in inside for v in (e.values.get(measure.key), published(experiment, e.place, measure))]
            if all(value is None for value in numbers):
                continue
            heading = f"{block}: {measure.label}" if block else measure.label
            if all(len(one) == 1 for entry in inside for one in entry.seeds.values()) and any(e.seeds for e in inside):
                heading += ", one seed"
            lines: Lines = []
            for row in dict.fromkeys(entry.place[1] for entry in inside):
                places = [(block, row, column) for column in columns]
                lines += _lines(experiment, measure, row, [(place, table.get(place)) for place in places])
            first = heading[0].upper() if heading[0].isascii() else heading[0]
            found.append((first + heading[1:], columns, lines))
    return found


def _lines(experiment: Experiment, measure: Measure, row: str, cells: list[tuple[Place, Entry | None]]) -> Lines:
    there = [published(experiment, place, measure) for place, _ in cells]
    here = [None if entry is None else entry.values.get(measure.key) for _, entry in cells]
    spread = [None if entry is None else entry.deviations.get(measure.key) for _, entry in cells]
    shown = [measure.show(v) + (f" ± {measure.show(d)}" if d is not None else "") for v, d in zip(here, spread)]
    if all(value is None for value in there):
        return [(row, shown)]
    if all(value is None for value in here):
        return [(f"{row}, published", [measure.show(value) for value in there])]
    lines = [(f"{row}, published", [measure.show(value) for value in there]), (f"{row}, measured", shown)]
    if measure.scale == 100.0 or measure.more_is_better:
        gaps = [None if t is None or h is None else h - t for t, h in zip(there, here)]
        lines.append((f"{row}, difference", ["–" if g is None else f"{g:+{measure.form[0:]}}" for g in gaps]))
    return lines


def conclusions(experiment: Experiment, entries: Sequence[Entry], about: Mapping[str, Any]) -> list[str]:
    """Sentences that the numbers make; scaled-down training says nothing about the paper."""
    if experiment.conclude is None or not entries or (about["quick"] and about["trained"]):
        return []
    return experiment.conclude({entry.place: entry for entry in entries}, experiment.published)


def differences(experiment: Experiment, about: Mapping[str, Any]) -> list[str]:
    """What differs from the paper: sentences of the code, those that fit how the page's values were searched."""
    if about["date"] < changes.DATE or (about.get("tuning") and not searched_as_now(experiment, about)):
        return [*(experiment.formerly or experiment.differs), *about["notes"]]
    return [*experiment.differs, *([protocol(experiment.screened)] if about.get("tuning") else []), *about["notes"]]


def searched_as_now(experiment: Experiment, about: Mapping[str, Any]) -> bool:
    """Whether a page's values were searched as the experiment says now."""
    return "searched" in about and bool(about.get("screened", SHARE) == experiment.screened)


def direction(experiment: Experiment, entries: Sequence[Entry], about: Mapping[str, Any]) -> list[str]:
    """Of a quick version: whether what the paper claims shows in it, place by place; nothing where it was not run."""
    if not about["quick"] or experiment.claim is None:
        return []
    first, second = experiment.claim
    measure, table = experiment.measures[0], {entry.place: entry.values for entry in entries}
    said = []
    for block, row, column in table:
        here, there = (table.get((block, one, column), {}).get(measure.key) for one in experiment.claim)
        if row == first and here is not None and there is not None:
            shows = "shows" if (here > there) == measure.more_is_better and here != there else "does not show"
            said.append(
                f"The paper's direction ({first} better than {second}) {shows} here: {measure.show(here)} against "
                f"{measure.show(there)} ({', '.join(word for word in (block, column) if word)}; one seed, no verdict)."
            )
    return said


def chosen_lines(entries: Sequence[Entry]) -> list[str]:
    """Which values were searched and chosen."""
    return [
        f"{', '.join(word for word in entry.place if word)}: "
        + ", ".join(f"{key} = {value}" for key, value in entry.chosen.items())
        for entry in entries
        if entry.chosen
    ]


def to_markdown(
    experiment: Experiment,
    entries: Sequence[Entry],
    about: Mapping[str, Any],
    own: Sequence[str] | None = None,
    changed: Sequence[str] = (),
) -> str:
    """The page of an experiment; ``own`` lines stand in the place of its grids, ``changed``: what was corrected."""
    lines = [f"# {experiment.name}: {experiment.title}", "", _about(about), ""]
    if about["left"]:
        lines += [f"**Not finished:** {about['left']} of {about['runs']} runs are still to be made.", ""]
    if about["quick"]:
        lines += ["**A quick, scaled-down version:** its numbers show that it runs, not what the paper claims.", ""]
        lines += [line for sentence in direction(experiment, entries, about) for line in (sentence, "")]
    lines += own or []
    for heading, columns, rows in grids(experiment, entries) if own is None else ():
        lines += [f"## {heading}", "", f"| {' | '.join([experiment.axes[0], *columns])} |"]
        lines += [f"|{'---|' * (len(columns) + 1)}"]
        lines += [f"| {' | '.join([name, *cells])} |" for name, cells in rows] + [""]
    sections = (
        ("What this says", conclusions(experiment, entries, about)),
        ("What differs from the paper" if own is None else "How it was made", differences(experiment, about)),
        ("What changed", changed),
        ("Chosen values", chosen_lines(entries)),
    )
    for title, sentences in sections:
        if sentences:
            lines += [f"## {title}", "", *(f"- {sentence}" for sentence in sentences), ""]
    if about["trained"]:
        lines += [
            "Privacy statements cover each run's own releases; choosing among runs, and what an observer sees in "
            "simulation, are not covered.",
            "",
        ]
    return "\n".join(lines)


def _about(about: Mapping[str, Any]) -> str:
    words = [f"Date {about['date']}", str(about["hardware"])]
    if about["trained"]:
        words.append(f"{about['trained']} runs ({about['tuning']} of them to choose values)")
        words.append(f"seeds {', '.join(map(str, about['seeds']))}")
    words.append(f"{about['seconds']:.0f} s")
    words.append(f"sordino {about['versions']['sordino']}" + (f", commit {about['commit']}" if about["commit"] else ""))
    words.append(f"torch {about['versions']['torch']}")
    if about.get("precision", "float32") != "float32":
        words.append(f"{about['precision']} precision")
    return "; ".join(words) + "."


def to_terminal(experiment: Experiment, entries: Sequence[Entry], about: Mapping[str, Any], width: int = 100) -> Group:
    """The same for a terminal of so many characters: a table that is too wide is continued below."""
    parts: list[Any] = [Text(f"{experiment.name}: {experiment.title}", style="bold")]
    for heading, columns, rows in grids(experiment, entries):
        for some in _fitting(experiment.axes[0], columns, rows, width):
            parts.append(Text(f"\n{heading}", style="italic"))
            table = Sheet((experiment.axes[0], *(columns[k] for k in some)))
            for name, cells in rows:
                table.add_row(name, *(cells[k] for k in some), style="dim" if name.endswith(", published") else "")
            parts.append(table)
    said = conclusions(experiment, entries, about)
    parts += [Text(f"• {sentence}") for sentence in said]
    parts += [Text(f"differs: {sentence}", style="dim") for sentence in differences(experiment, about)]
    parts += [Text(f"chosen: {sentence}", style="dim") for sentence in chosen_lines(entries)]
    if about["quick"]:
        parts.append(Text("quick: scaled down; the numbers show that it runs, not what the paper claims"))
        parts += [Text(f"quick: {sentence}") for sentence in direction(experiment, entries, about)]
    return Group(*parts)


def _fitting(first: str, columns: list[str], rows: Lines, width: int) -> list[list[int]]:
    """Which columns stand side by side, so that nothing is cut off."""
    left = max(len(name) for name in (first, *(name for name, _ in rows))) + 3
    groups: list[list[int]] = [[]]
    used = left
    for k, column in enumerate(columns):
        needed = max(len(column), *(len(cells[k]) for _, cells in rows)) + 3
        if groups[-1] and used + needed > width:
            groups.append([])
            used = left
        groups[-1].append(k)
        used += needed
    return groups
