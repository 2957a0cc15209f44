"""How good is it, by what was paid for: estimates from held-out records with their intervals, and both accounts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sordino.server.choosing import DECIDING
from sordino.study.evaluated import estimate_of, in_words
from sordino.study.report.figures import Chart, Trace, safe, trace
from sordino.study.report.gather import Group, SeedRun, curve
from sordino.study.report.numbers import MISSING, short, upward

NAMES = {
    "accuracy": "accuracy, of all held-out records",
    "mean_accuracy": "accuracy, mean over clients",
    "balanced_accuracy": "balanced accuracy",
    "auc": "AUC",
    "calibration_error": "calibration error",
    "psi": "Ψ of clients' error rates",
    "mean_absolute_error": "mean absolute error",
    "root_mean_squared_error": "root mean squared error",
    "median_absolute_error": "median absolute error",
}
"""What the page calls a metric; recalls are named with their class."""

SHARES = ("accuracy", "recall", "auc", "calibration")
"""Beginnings and ends of metrics that are shares."""


def section(groups: Sequence[Group]) -> dict[str, Any] | None:
    """What the page says of paid evaluation; None where no run has any. Of several seeds the first is shown."""
    judged = [group for group in groups if group.runs[0].evaluation]
    if not judged:
        return None
    return {
        "all": len(judged) == len(groups),
        "several": sum(len(group.runs) for group in groups) > 1,
        "seeds": any(len(group.runs) > 1 for group in judged),
        "estimates": [row for group in judged for row in _estimates(group)],
        "accounts": [row for group in judged for row in _accounts(group)],
        "chosen": [told for group in judged for told in _chosen(group)],
        "best": _best(groups, judged),
        "tuned": [group.runs[0].tuned for group in judged if group.runs[0].tuned],
    }


def chart(groups: Sequence[Group]) -> Chart | None:
    """The estimate that decides by round, with a band for its interval, and in a simulation what an observer saw."""
    traces: list[Trace] = []
    told = []
    share = True
    for group in groups:
        rows = [row for row in group.runs[0].evaluation if row["metric"] in DECIDING]
        if not rows:
            continue
        rounds = [row["round"] for row in rows]
        share = rows[-1]["metric"] == "accuracy"
        edge = [*(row["high"] for row in rows), *(row["low"] for row in reversed(rows))]
        band = {"name": safe(f"{group.label}: 95 % interval"), "meta": "band"}
        traces.append(trace(group, "band", [*rounds, *reversed(rounds)], [short(one, 4) for one in edge], **band))
        words: dict[str, Any] = {"name": safe(f"{group.label}: evaluated"), "text": [in_words(row) for row in rows]}
        values = [short(row["value"], 4) for row in rows]
        if len(rows) == 1:  # a band needs two rounds
            reach = [[abs(row[key] - row["value"]) for row in rows] for key in ("high", "low")]
            words |= {"error_y": {"type": "data", "array": reach[0], "arrayminus": reach[1], "thickness": 1.5}}
        traces.append(trace(group, "judged", rounds, values, hovertemplate="%{text}", **words))
        seen = curve(group, "accuracy") if share else None
        if seen is not None and group.runs[0].simulated:
            name = {"name": safe(f"{group.label}: observer"), "hovertemplate": "%{y:.1%}"}
            traces.append(trace(group, "observer", seen.rounds, [short(one) for one in seen.mean], **name))
        told.append(f"{group.label} {in_words(rows[-1])}")
    if not traces:
        return None
    quantity = "accuracy" if share else "mean absolute error"
    return Chart(
        id="evaluated",
        summary=f"Evaluated {quantity} by round with 95 % intervals. In the last evaluation: {'; '.join(told)}.",
        traces=traces,
        x={"title": "round"},
        y={"title": quantity, **({"tickformat": ".0%"} if share else {})},
        layout={"hovermode": "closest"},
    )


def _named(metric: str) -> str:
    kind, _, label = metric.partition("/")
    return f"recall of class {label}" if kind == "recall" else NAMES.get(metric, metric.replace("_", " "))


def _figure(metric: str, value: float) -> str:
    share = metric.startswith(SHARES) or metric.endswith(SHARES)
    return f"{100 * value:.1f} %" if share else f"{value:.3g}"


def _estimates(group: Group) -> list[dict[str, Any]]:
    """The metrics of the model that is handed out, over all sites; those of single sites stand with their accounts."""
    found = []
    for row in _last(group.runs[0]):
        if row["metric"].startswith("accuracy/"):
            continue
        value, low, high = (_figure(row["metric"], row[key]) for key in ("value", "low", "high"))
        says = low != "0.0 %" or high != "100.0 %"
        found.append(
            {
                "group": group,
                "round": row["round"],
                "metric": _named(row["metric"]),
                "value": value if says else MISSING,
                "interval": f"{low} to {high}" if says else "too noisy to tell",
                "sort": row["value"] if says else None,
            }
        )
    return found


def _last(run: SeedRun) -> list[Mapping[str, Any]]:
    """The estimates of the round whose model is handed out."""
    number = run.evaluation[-1]["round"] if run.kept is None else run.kept["round"]
    return [row for row in run.evaluation if row["round"] == number]


def _accounts(group: Group) -> list[dict[str, Any]]:
    """Client by client: what training and evaluation have spent, and what evaluation says of it."""
    run = group.runs[0]
    last = {row["metric"]: row for row in _last(run)}
    found = []
    for client in run.clients:
        row = last.get(f"accuracy/{client.name}")
        found.append(
            {
                "group": group,
                "client": client.name,
                "budget": client.epsilon,
                "training": _spent(client.training),
                "held": _spent(client.held),
                "larger": _spent(client.spent),
                "accuracy": MISSING if row is None else in_words({**row, "metric": "accuracy"}),
                "sort": None if row is None else row["value"],
            }
        )
    return found


def _spent(value: float | None) -> float | None:
    return value if value is None or math.isinf(value) else upward(value)


def _chosen(group: Group) -> list[str]:
    """What a run chose by its estimates, in sentences."""
    run, told = group.runs[0], []
    if run.kept:
        by = f"{run.kept['by']['metric'].replace('_', ' ')} {in_words(run.kept['by'])}"
        told.append(f"{group.label} hands out the model of round {run.kept['round']} of {run.kept['of']}: {by}.")
    if run.threshold:
        found, false = (_share(run.threshold[key]) for key in ("recall/1", "false_positive_rate"))
        told.append(
            f"{group.label}: class 1 is best answered from P = {run.threshold['edge']:.3g} on; of its records {found} "
            f"are found, and of the others {false} are taken for one."
        )
    return told


def _share(row: Mapping[str, Any]) -> str:
    return in_words({**row, "metric": "accuracy"})


def _best(groups: Sequence[Group], judged: Sequence[Group]) -> str | None:
    """The best of several methods by paid estimates, where each was evaluated and paid for it."""
    if len(judged) < len(groups) or len(groups) < 2 or not all(group.private for group in groups):
        return None
    rows = [estimate_of({"evaluation": group.runs[0].evaluation, "kept": group.runs[0].kept}) for group in groups]
    known = [(group.label, row) for group, row in zip(groups, rows) if row is not None]
    label, row = max(known, key=lambda pair: DECIDING[pair[1]["metric"]] * pair[1]["value"])
    return f"{label}, {in_words(row)}"
