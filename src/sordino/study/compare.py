"""Several methods and seeds from one study, side by side."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from sordino.data import Federation
from sordino.errors import BadInput, BudgetRefused, Diverged
from sordino.study.file import Study
from sordino.study.folder import check_kind, check_same, planned_noises
from sordino.study.result import read_result, to_json
from sordino.study.run import Callback, prepare, train
from sordino.study.track import tracker

log = logging.getLogger("sordino.study")

Watch = Callable[[str, int, int], Callback]
"""Given a method, a seed and the number of rounds, what to call after each round."""


def compare(study: Study, out: Path, watch: Watch | None = None) -> list[dict[str, Any]]:
    """Run every method with every seed; finished runs in ``out`` are taken as they are, interrupted ones go on.

    A run that diverges, or that no budget pays for, is left out with a warning; where all are, the first one's error is
    raised.
    """
    if study.sweep:
        raise BadInput(
            "this study has a [sweep]: use 'sordino run', and put methods and seeds into it as \"method.name\" and "
            '"study.seed"'
        )
    _check_folder(study, out)
    found = list(_runs(study, out, watch))
    lost = [one for one in found if isinstance(one, Exception)]
    if len(lost) == len(found):
        raise lost[0]
    return [one for one in found if not isinstance(one, Exception)]


def _asked(study: Study) -> Iterator[tuple[Federation, str, int, Study]]:
    """Clients, method, seed and study of every run that is asked for."""
    names = study.compare.methods or [study.method.name]
    for seed in study.compare.seeds or [study.study.seed]:
        about = study.study.model_copy(update={"seed": seed})
        clients = study.model_copy(update={"study": about}).federation()
        for name in names:
            chosen = study.method.model_copy(update={"name": name})
            yield clients, name, seed, study.model_copy(update={"study": about, "method": chosen})


def _place(out: Path, name: str, seed: int) -> Path:
    return out / name / f"seed-{seed}"


def _check_folder(study: Study, out: Path) -> None:
    """Refuse a folder with runs of another study, or with a report of more runs than these, before anything is done."""
    for key, values in (("methods", study.compare.methods), ("seeds", study.compare.seeds)):
        twice = [one for place, one in enumerate(values) if one in values[:place]]
        if twice:
            raise BadInput(f"compare.{key} lists {twice[0]!r} twice: leave out one of them")
    for name in study.compare.methods:
        study.chosen_method(name)
    if not out.exists():
        return
    check_kind(out, "comparison")
    expected = set()
    for clients, name, seed, one in _asked(study):
        folder = _place(out, name, seed)
        expected.add(folder)
        if (folder / "study.json").exists() or (folder / "result.json").exists():
            settings = one.arguments()
            model, options, key = (settings.pop(word) for word in ("model", "model_options", "seed"))
            noises = planned_noises(folder)
            ready = prepare(clients, model, one.chosen_method(), key, options, settings, noises)
            remedy = "give the same study to go on with it, or choose another --out"
            check_same(folder, ready.study, key, ready.rules, remedy)
    if (out / "report.html").exists():
        others = [file.parent for file in sorted(out.rglob("seed-*/result.json")) if file.parent not in expected]
        if others:
            told = ", ".join(str(one.relative_to(out)) for one in others[:3]) + (", …" if len(others) > 3 else "")
            raise BadInput(
                f"{out} holds a report with more runs than these ({told}), and this one would take its place: ask for "
                "them too, or choose another --out"
            )


def _runs(study: Study, out: Path, watch: Watch | None) -> Iterator[dict[str, Any] | Diverged | BudgetRefused]:
    for clients, name, seed, one in _asked(study):
        folder = _place(out, name, seed)
        if (folder / "result.json").exists():
            yield read_result(folder / "result.json")
            continue
        callbacks = [watch(name, seed, study.study.rounds)] if watch else []
        try:
            with tracker(study.study.track, folder, one, f"{name}/seed-{seed}") as tracked:
                done = train(
                    clients,
                    method=one.chosen_method(),
                    out=folder,
                    resume=(folder / "study.json").exists(),
                    device=study.study.device,
                    name=study.study.name,
                    callbacks=[*callbacks, tracked],
                    **one.arguments(),
                )
                tracked.finish(done.result)
        except (Diverged, BudgetRefused) as error:
            log.warning("%s, seed %s, is left out: %s", name, seed, error)
            yield error
            continue
        yield done.result


def summary(results: list[dict[str, Any]], labels: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Per method: mean and standard deviation over seeds of the final figures, and the largest share of a budget.

    ``labels``, one per result, group them by something other than the method.
    """
    rows = []
    told = labels or [r["method"] for r in results]
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
        row["largest_share_spent"] = max(shares) if shares and row["private"] else None
        row["seconds"] = float(np.mean([r["seconds"] for r in runs]))
        rows.append(row)
    return rows


def comparison_table(results: list[dict[str, Any]], labels: Sequence[str] | None = None) -> Table:
    """The summary as a table for the terminal."""
    rows = summary(results, labels)
    runs = max((row["runs"] for row in rows), default=1)
    title = f"mean ± deviation over {runs} seeds" if runs > 1 else "final figures"
    table = Table(title=title, header_style="bold", box=SIMPLE_HEAD)
    for column in ("method", "accuracy", "worst", "loss", "Ψ", "budget", "s"):
        name = column == "method"
        table.add_column(column, justify="left" if name else "right", no_wrap=not name or labels is None)

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
            row["method"] if row["private"] else f"{row['method']} [bold red]NOT PRIVATE[/bold red]",
            shown(row, "accuracy", True),
            shown(row, "worst_accuracy", True),
            shown(row, "loss", False),
            shown(row, "psi", False),
            "–" if share is None else f"{share * 100:.0f} %",
            f"{row['seconds']:.1f}",
        )
    return table


def plain_results(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results as JSON holds them (∞ is null), for the report."""
    return [json.loads(to_json(result)) for result in results]
