"""Several methods and seeds from one study, side by side."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from sordino.errors import BadInput, BudgetRefused, Diverged
from sordino.study.against import named, trust_lines
from sordino.study.evaluated import best_of, estimate_of, evaluation_lines, in_words
from sordino.study.file import Study
from sordino.study.folder import check_kind, check_same
from sordino.study.many import Point, Studies, Watch, shown_by
from sordino.study.result import to_json
from sordino.study.schedule import Scheduler
from sordino.study.show import Sheet

log = logging.getLogger("sordino.study")

BASELINES = {
    "majority": "each client's majority class",
    "alone": "its own data alone at the same ε",
    "ceiling": "together without noise",
}
"""What an accuracy is compared with, in words (``study.baselines``)."""


def compare(study: Study, out: Path, watch: Watch | None = None, how: Scheduler | None = None) -> list[dict[str, Any]]:
    """Run every method with every seed; finished runs in ``out`` are taken as they are, interrupted ones go on.

    A run that diverges, or that no budget pays for, is left out with a warning; where all are, the first one's error is
    raised.
    """
    if study.sweep:
        raise BadInput(
            "this study has a [sweep]: use 'sordino run', and put methods and seeds into it as \"method.name\" and "
            '"study.seed"'
        )
    for name in study.compare.methods:
        study.chosen_method(name)
    maker = Studies(out, study.study.track)
    points = _points(study)
    _check_folder(points, maker)
    lost = []
    for ended in (how or Scheduler(study.study.device)).run(points, maker, shown_by(watch)):
        if isinstance(ended.error, (Diverged, BudgetRefused)):
            log.warning("%s, seed %s, is left out: %s", ended.job.label, ended.job.study.study.seed, ended.error)
            lost.append(ended.error)
        elif ended.error is not None:
            raise ended.error
    if len(lost) == len(points):
        raise lost[0]
    return [maker.result(point) for point in points if maker.finished(point)]


def _points(study: Study) -> list[Point]:
    """Every run that is asked for, seed by seed."""
    points = []
    for seed in study.compare.seeds or [study.study.seed]:
        about = study.study.model_copy(update={"seed": seed})
        for name in study.compare.methods or [study.method.name]:
            method = study.method.model_copy(update={"name": name})
            one = study.model_copy(update={"study": about, "method": method})
            values = {"method.name": name, "study.seed": seed}
            points.append(Point(values, one, f"{name}/seed-{seed}", name))
    return points


def _check_folder(points: Sequence[Point], maker: Studies) -> None:
    """Refuse a folder with runs of another study, or with a report of more runs than these, before anything is done."""
    out = maker.out
    if not out.exists():
        return
    check_kind(out, "comparison")
    for point in points:
        folder = out / point.name
        if (folder / "study.json").exists() or maker.finished(point):
            ready = maker.prepared(point)
            remedy = "give the same study to go on with it, or choose another --out"
            check_same(folder, ready.study, ready.seed, ready.rules, remedy)
    if (out / "report.html").exists():
        expected = {out / point.name for point in points}
        others = [file.parent for file in sorted(out.rglob("seed-*/result.json")) if file.parent not in expected]
        if others:
            told = ", ".join(str(one.relative_to(out)) for one in others[:3]) + (", …" if len(others) > 3 else "")
            raise BadInput(
                f"{out} holds a report with more runs than these ({told}), and this one would take its place: ask for "
                "them too, or choose another --out"
            )


def summary(results: list[dict[str, Any]], labels: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Per method: mean and standard deviation over seeds of the final figures, and the largest share of a budget.

    ``labels``, one per result, group them by something other than the method.
    """
    rows = []
    told = labels or [named(r) for r in results]
    for name in dict.fromkeys(told):
        runs = [r for r, label in zip(results, told) if label == name]
        row: dict[str, Any] = {"method": name, "runs": len(runs), "private": runs[0]["private"]}
        for key in ("accuracy", "worst_accuracy", "loss", "psi"):
            values = [r["final"][key] for r in runs if r["final"].get(key) is not None]
            row[key] = float(np.mean(values)) if values else None
            row[f"{key}_deviation"] = float(np.std(values, ddof=1)) if len(values) > 1 else None
        shares = [
            p["spent_epsilon"] / p["epsilon"]
            for r in runs
            for p in r["privacy"]
            if math.isfinite(p["epsilon"] or math.inf)
        ]
        for key in BASELINES:
            found = [(r.get("baselines") or {}).get(key) or {} for r in runs]
            values = [one["accuracy"] for one in found if one.get("accuracy") is not None]
            row[f"{key}_accuracy"] = float(np.mean(values)) if values else None
        row["largest_share_spent"] = max(shares) if shares and row["private"] else None
        row["seconds"] = float(np.mean([r["seconds"] for r in runs]))
        rows.append(row)
    return rows


def comparison_table(results: list[dict[str, Any]], labels: Sequence[str] | None = None) -> Sheet:
    """The summary as a table for the terminal."""
    rows = summary(results, labels)
    runs = max((row["runs"] for row in rows), default=1)
    title = f"mean ± deviation over {runs} seeds" if runs > 1 else "final figures"
    told = trust_lines(results, labels) + _evaluated(results, labels) + _compared(rows)
    columns = ("method", "accuracy", "worst", "loss", "Ψ", "budget", "s")
    table = Sheet(columns, prose=() if labels is None else ("method",), title=title, notes=told)

    def shown(row: dict[str, Any], key: str, percent: bool) -> str:
        if row[key] is None:
            return "–"
        scale, form, unit = (100, ".1f", " %") if percent else (1, ".3g", "")
        text = f"{row[key] * scale:{form}}"
        deviation = row[f"{key}_deviation"]
        return (text if deviation is None else f"{text} ± {deviation * scale:{form}}") + unit

    for row in rows:
        share = row["largest_share_spent"]
        table.add_row(
            Text(row["method"]) if row["private"] else Text(f"{row['method']} ").append("NOT PRIVATE", "bold red"),
            shown(row, "accuracy", True),
            shown(row, "worst_accuracy", True),
            shown(row, "loss", False),
            shown(row, "psi", False),
            "–" if share is None else f"{share * 100:.0f} %",
            f"{row['seconds']:.1f}" if row["seconds"] >= 1 else f"{row['seconds']:#.2g}",
        )
    return table


def _compared(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What accuracies are compared with, by an observer: once where it is the same for all rows."""
    lines = {}
    for row in rows:
        known = [
            (words, row[f"{key}_accuracy"]) for key, words in BASELINES.items() if row[f"{key}_accuracy"] is not None
        ]
        lines[row["method"]] = ", ".join(f"{words} {100 * value:.1f} %" for words, value in known)
    if len(set(lines.values())) == 1:
        return [f"compare with: {line}" for line in set(lines.values()) if line]
    return [f"compare {name} with: {line}" for name, line in lines.items() if line]


def _evaluated(results: list[dict[str, Any]], labels: Sequence[str] | None) -> list[str]:
    """What was paid for to judge these runs; which of several is best by it, where each paid for its estimate."""
    if len(results) == 1:
        return evaluation_lines(results[0])
    names = labels or [named(one) for one in results]
    rows = [(f"{name}, seed {one['seed']}", estimate_of(one)) for name, one in zip(names, results)]
    lines = [f"{name}: evaluated {in_words(row)}" for name, row in rows if row is not None]
    first = best_of(results)
    if first is not None:
        lines[first] += "  ← best by paid evaluation"
        lines.append(
            "every run has a ledger of its own, so together they cost more than any of them says; "
            "[tune] tries settings under one budget"
        )
    return [*(["95 % intervals:"] if lines else []), *lines]


def plain_results(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results as JSON holds them (∞ is null), for the report."""
    return [json.loads(to_json(result)) for result in results]
