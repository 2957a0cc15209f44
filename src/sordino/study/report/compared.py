"""Compared with what? The model beside each client's majority class, its own data alone, and training without noise.

A figure of a client is the mean over the seeds that have it. ``better`` is how much better the model is: accuracy less
the baseline's, or for numbers to predict the baseline's loss less its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sordino.study.report.gather import GROUPS, Group, SeedRun
from sordino.study.report.numbers import SeedMean, finite, finites, spread

NAMES = {
    "majority": "Majority",
    "mean": "Mean",
    "alone": "Alone",
    "ceiling": "No noise",
}
"""The baselines of ``result["baselines"]``, and what stands above them."""

WORDS = {
    "majority": "always answering the client's most frequent class",
    "mean": "always answering the mean of the client's targets",
    "alone": "the client's own data alone at the same ε",
    "ceiling": "everybody together without noise and clipping",
}
"""The same in words."""

PASSED = ("majority", "mean", "alone")
"""Baselines that a model should be better than."""

Figures = dict[str, list[float | None]]
"""By baseline, and under ``model``: every client's figure in one run."""


def section(groups: Sequence[Group]) -> dict[str, Any] | None:
    """What the page says of baselines; None where no simulated run has any."""
    told = [(group, [_figures(run) for run in group.runs]) for group in groups]
    told = [(group, runs) for group, runs in told if any(len(one) > 1 for one in runs)]
    if not told:
        return None
    names = [name for name in NAMES if any(name in one for _, runs in told for one in runs)]
    passed = [name for name in names if name in PASSED]
    return {
        "share": any("majority" in one for _, runs in told for one in runs),
        "heads": [f"#{NAMES[name]}" for name in names],
        "gaps": [f"#Over {NAMES[name].lower()}" for name in passed],
        "legend": "; ".join(f"{NAMES[name]}: {WORDS[name]}" for name in names),
        "asked": "alone" in names or "ceiling" in names,
        "rows": [row for group, runs in told for row in _rows(group, runs, names, passed)],
        "clients": [row for group, runs in told for row in _clients(group, runs, names)],
        "sentences": [line for group, runs in told for line in _sentences(group, runs, passed)],
        "failed": [line for group, _ in told for line in _failed(group)],
    }


def confusions(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Of two classes, by method: how many records of each were answered how, over all seeds."""
    rows = []
    for group in groups:
        seen = [run.final["confusion"] for run in group.runs if run.final.get("confusion")]
        if seen:
            rows.append({"group": group, "counts": [sum(one[i][j] for one in seen) for i in (0, 1) for j in (0, 1)]})
    return rows


def _figures(run: SeedRun) -> Figures:
    """The clients' figures by baseline and of the model, as far as the result tells them."""
    key = "client_accuracy" if run.final.get("client_accuracy") else "client_loss"
    found = {"model": list(run.final.get(key) or [])}
    for name in NAMES:
        told = run.baselines.get(name)
        values = told.get(key) if isinstance(told, Mapping) else None
        if values and len(values) == len(found["model"]):
            found[name] = [finite(value) for value in values]
    return found


def _better(model: float | None, other: float | None, share: bool) -> float | None:
    if model is None or other is None:
        return None
    return model - other if share else other - model


def _share(runs: Sequence[Figures]) -> bool:
    return any("majority" in one for one in runs)


def _rows(group: Group, runs: Sequence[Figures], names: Sequence[str], passed: Sequence[str]) -> list[dict[str, Any]]:
    """All clients, and the strictest third: the mean over clients of every figure, and how much better the model is."""
    share, rows = _share(runs), []
    for who in ("all", GROUPS[0]):
        columns: dict[str, list[float]] = defaultdict(list)
        for run, one in zip(group.runs, runs):
            places = range(len(one["model"])) if who == "all" else run.by_budget.get(who, [])
            for name, values in one.items():
                if known := finites(values[place] for place in places):
                    columns[name].append(sum(known) / len(known))
            for name in passed:
                gaps = finites(_better(one["model"][k], one[name][k], share) for k in places if name in one)
                if gaps:
                    columns[f"better {name}"].append(sum(gaps) / len(gaps))
        if columns:
            cells: list[SeedMean | None] = [spread(columns[name]) for name in ("model", *names)]
            gaps_shown = [spread(columns[f"better {name}"]) for name in passed]
            label = "all clients" if who == "all" else "strictest third by ε"
            rows.append({"group": group, "who": label, "cells": cells, "gaps": gaps_shown})
    return rows


def _by_client(group: Group, runs: Sequence[Figures]) -> dict[str, dict[str, list[float]]]:
    """By client and by baseline: the figures of all seeds."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run, one in zip(group.runs, runs):
        for client, *values in zip(run.clients, *one.values()):
            for name, value in zip(one, values):
                found[client.name][name] += finites([value])
    return found


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _clients(group: Group, runs: Sequence[Figures], names: Sequence[str]) -> list[dict[str, Any]]:
    declared: dict[str, list[float]] = defaultdict(list)
    for client, _ in group.clients:
        declared[client.name] += finites([client.declared])
    return [
        {
            "group": group,
            "client": client,
            "epsilon": _mean(declared[client]),
            "cells": [_mean(figures[name]) for name in ("model", *names)],
        }
        for client, figures in _by_client(group, runs).items()
    ]


def _sentences(group: Group, runs: Sequence[Figures], passed: Sequence[str]) -> list[str]:
    """For how many clients the model is worth it, among all and among the strictest third."""
    share, means = _share(runs), {c: {n: _mean(v) for n, v in f.items()} for c, f in _by_client(group, runs).items()}
    strict = {run.clients[place].name for run in group.runs for place in run.by_budget.get(GROUPS[0], [])}
    lines = []
    for name in passed:
        gaps = {client: _better(one.get("model"), one.get(name), share) for client, one in means.items()}
        known = {client: gap for client, gap in gaps.items() if gap is not None}
        if not known:
            continue
        inside = [gap > 0 for client, gap in known.items() if client in strict]
        better, even = sum(gap > 0 for gap in known.values()), sum(gap == 0 for gap in known.values())
        told = f"{group.label}: better than {WORDS[name]} for {better} of {len(known)} clients"
        told += f" and as good for {even}" if even else ""
        lines.append(told + (f"; better for {sum(inside)} of the {len(inside)} strictest." if inside else "."))
    return lines


def _failed(group: Group) -> list[str]:
    """Baselines that could not be trained, and why."""
    found = []
    for run in group.runs:
        for name in ("alone", "ceiling"):
            why = (run.baselines.get(name) or {}).get("failed")
            reasons = sorted(set(why.values())) if isinstance(why, Mapping) else [why] if why else []
            found += [f"{group.label}, {NAMES[name].lower()}: {reason}" for reason in reasons]
    return list(dict.fromkeys(found))
