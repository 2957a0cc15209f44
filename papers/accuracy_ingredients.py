"""What each ingredient of ``auto`` is worth: the same runs without it, on paired seeds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from papers.accuracy_page import scores_in
from papers.experiment import ACCURACY, Cell, Experiment, Quick
from papers.verdicts import interval

WHOLE = "auto"
BINNED = {"name": "binned"}
FEDERATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "digits, 12 clients, Dist2": (
        {"name": "digits", "kind": "dirichlet", "clients": 12, "beta": 0.3, "minimum": 30},
        {"spec": "dist2", "delta": 1e-5},
    ),
    "adult, 20 clients, Dist6": (
        {
            "name": "adult",
            "options": {"records": 6_000},
            "kind": "dirichlet",
            "clients": 20,
            "beta": 1.0,
            "minimum": 30,
        },
        {"spec": "dist6", "delta": 1e-5},
    ),
}
TABLES = ("adult",)


def _without(table: bool) -> dict[str, dict[str, Any]]:
    """What is put over a cell of ``auto``, by what it is then without."""
    features: Any = {**BINNED, "columns": 6} if table else "scatter"
    return {
        WHOLE: {},
        "records as they are, no features": {"model": "logistic"},
        "an intercept of the head's own": {"model": "logistic", "model_options": {"features": features}},
        "weights by size": {"parts": {"aggregate": "data-weighted"}},
        "the last model, no average": {"parts": {"server": "plain"}},
        "steps of one length, no cooldown": {"training": {"cooldown": 0.0}},
        "flat clipping at 1": {"parts": {"clip": "flat"}},
        "40 rounds": {"training": {"rounds": 40}},
        "a pull of 1/T": {"training": {"pull": 0.005}},
        "twelve local steps, a twelfth of the rounds": {"training": {"rounds": 20, "steps": 12}},
    }


def cells() -> tuple[Cell, ...]:
    """Every federation with ``auto`` whole, and without one thing at a time."""
    found = []
    for column, (data, budgets) in FEDERATIONS.items():
        for row, change in _without(data["name"] in TABLES).items():
            training = {"evaluate": 1000, **change.get("training", {})}
            found.append(
                Cell(
                    "",
                    row,
                    column,
                    data,
                    change.get("model", "auto"),
                    "auto",
                    training,
                    budgets,
                    change.get("parts", {}),
                    change.get("model_options", {}),
                )
            )
    return tuple(found)


def _worth(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Paired differences with 95 % intervals: how far auto is ahead of the same run without something."""
    scores = scores_in(results)
    rows = []
    for (_, row, column), other in scores.items():
        whole = scores.get(("", WHOLE, column), {})
        if row != WHOLE and (seeds := sorted(set(whole) & set(other))):
            gap = interval([whole[seed] - other[seed] for seed in seeds])
            rows.append({"without": row, "federation": column, "worth": gap, "seeds": seeds})
    return rows


def lines(results: Mapping[str, Any]) -> list[str]:
    """A table of paired differences with 95 % intervals."""
    scores = scores_in(results)
    worth = {(one["without"], one["federation"]): one for one in _worth(results)}
    columns = [column for column in FEDERATIONS if ("", WHOLE, column) in scores]
    made = [f"| | {' | '.join(columns)} |", "|" + "---|" * (len(columns) + 1)]
    for row in dict.fromkeys(place[1] for place in scores):
        shown = []
        for column in columns:
            if row == WHOLE:
                values = list(scores["", WHOLE, column].values())
                spread = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
                shown.append(f"{np.mean(values):.1f}{spread}")
            elif found := worth.get((row, column)):
                gap, several = found["worth"], len(found["seeds"]) > 1
                shown.append(f"{gap[0]:+.1f}" + (f" [{gap[1]:+.1f}, {gap[2]:+.1f}]" if several else ""))
            else:
                shown.append("–")
        label = "auto, accuracy %" if row == WHOLE else row
        made.append(f"| {label} | {' | '.join(shown)} |")
    told = ["Points that auto is ahead of the same run with that change; 95 % t-intervals over paired seeds.", ""]
    return [*told, *made, ""]


EXPERIMENTS = (
    Experiment(
        name="accuracy/ingredients",
        title="what each ingredient of auto is worth: the same runs without it, paired seeds",
        cost="100 runs of linear models, 200 to 1000 rounds; some minutes on two cores",
        measures=(ACCURACY,),
        published={},
        differs=(
            "A table of our own, no paper's. Whatever is changed, the rest of auto follows it: with another model, "
            "clipping or number of rounds it sets its steps anew.",
            "Another partition for every seed, and budgets drawn anew.",
        ),
        cells=cells,
        seeds=5,
        features=True,
        quick=Quick(columns=("digits, 12 clients, Dist2",), training={"rounds": 5}),
        lines=lines,
        axes=("ingredient", "federation"),
    ),
)
