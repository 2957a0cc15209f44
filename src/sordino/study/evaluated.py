"""Paid evaluation as a person reads it: what it will tell and cost, what it told, and which of several runs is best."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import RenderableType

from sordino.methods import Plan
from sordino.privacy.accounting import composed_epsilon
from sordino.server import choosing
from sordino.study.show import Sheet

SUPPOSED = 0.8
"""The accuracy at which a plan says how wide an interval will be."""

FEW = 10
"""With fewer held-out records than this, a site's own figures say next to nothing."""


def half_width(held: float, deviation: float, accuracy: float = SUPPOSED) -> float:
    """Expected half of a 95 % interval: 1.96 √(p(1 − p)/m + σ²/m²), at most 1; m records, noise of deviation σ."""
    return min(1.0, 1.96 * math.sqrt(accuracy * (1.0 - accuracy) / held + (deviation / held) ** 2))


def describe_evaluation(plan: Plan) -> dict[str, Any] | None:
    """What the evaluations of a planned run will tell and cost, site by site and pooled; None where there are none.

    ``noise`` is the deviation of the noise on a count, of right answers or, for a number to predict, of a bin;
    ``epsilon`` is what all evaluations cost the held-out account. Training records pay nothing for it.
    """
    judging = plan.judging
    if judging is None:
        return None
    part = "correct" if judging.cells.kind != "regression" else "scores"
    who = [(plan.clients[i], judging.terms[i], judging.held[i]) for i in judging.who]
    noises = [terms.noise(part) * terms.adjacency.sensitivity for _, terms, _ in who]
    costs = [math.inf] * len(who)
    bounded = [k for k, (client, _, _) in enumerate(who) if plan.method.private and not client.budget.is_public]
    if bounded:
        found = composed_epsilon(
            [[who[k][1].event.times(judging.times)] for k in bounded], [who[k][0].budget.delta for k in bounded]
        )
        costs = [float(found[bounded.index(k)]) if k in bounded else math.inf for k in range(len(who))]

    def width(held: float, noise: float) -> float | None:
        return half_width(held, noise) if part == "correct" else None

    total, noise = sum(held for _, _, held in who), float(np.linalg.norm(noises))
    return {
        "every": judging.settings.pace(judging.rounds),
        "times": judging.times,
        "stop": judging.settings.stop,
        "keep": judging.settings.keep,
        "sites": [
            {
                "client": client.name,
                "held": held,
                "noise": own,
                "half_width": width(held, own),
                "epsilon": cost,
                "budget": client.budget.epsilon,
            }
            for (client, _, held), own, cost in zip(who, noises, costs)
        ],
        "pooled": {"held": total, "noise": noise, "half_width": width(total, noise)},
        "training_epsilon": 0.0,
    }


def render_evaluation(found: Mapping[str, Any], shown: int) -> Iterator[RenderableType]:
    """A plan's evaluations for the terminal."""
    times = "once" if found["times"] == 1 else f"{found['times']} times"
    columns = ("site", "held out", "noise on a count", "95 % interval of accuracy", "ε of held-out account")
    table = Sheet(columns, title=f"evaluated {times}, on held-out records")
    for one in found["sites"][:shown]:
        cost = "–" if math.isinf(one["epsilon"]) else f"{one['epsilon']:.3g} of {one['budget']:.3g}"
        table.add_row(one["client"], str(one["held"]), f"{one['noise']:.3g}", _points(one["half_width"]), cost)
    pooled = found["pooled"]
    row = ("all together", str(pooled["held"]), f"{pooled['noise']:.3g}", _points(pooled["half_width"]), "")
    table.add_row(*row, style="bold")
    yield table
    if len(found["sites"]) > shown:
        yield f"and {len(found['sites']) - shown} more sites: --json lists all"
    yield (
        f"intervals are those expected at an accuracy of {100 * SUPPOSED:.0f} %; held-out records pay for evaluation "
        "from an account of their own, training records pay nothing for it, and a record's ε is that of its own account"
    )


def evaluation_warnings(found: Mapping[str, Any] | None) -> list[str]:
    """Sites whose figures will say next to nothing, and a pooled one that says little."""
    if found is None:
        return []
    told = [
        f"{one['client']} has {one['held']} held-out records: its own figures will say next to nothing"
        for one in found["sites"]
        if one["held"] < FEW
    ]
    wide = found["pooled"]["half_width"]
    if wide is not None and wide > 0.15:
        told.append(
            f"the evaluated accuracy will be known to {_points(wide)} only: evaluate less often (evaluation.every) or "
            "hold more records out (evaluation.share)"
        )
    return told


def _points(width: float | None) -> str:
    return "–" if width is None else f"± {100 * width:.1f} points"


def estimate_of(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """The paid estimate of the model that a result hands out, by the metric that decides; None where there is none."""
    rows = choosing.deciding(result.get("evaluation") or [])
    kept = result.get("kept")
    chosen = [row for row in rows if kept is None or row["round"] == kept["round"]]
    return dict(chosen[-1]) if chosen else None


def best_of(results: Sequence[Mapping[str, Any] | None]) -> int | None:
    """The place of the best of several runs by paid estimates; None unless each was evaluated and paid for it."""
    rows = [None if one is None or not one["private"] else estimate_of(one) for one in results]
    known = [row for row in rows if row is not None]
    if len(known) < len(rows) or len(rows) < 2:
        return None
    return max(range(len(rows)), key=lambda place: choosing.merit(known[place]))


def in_words(row: Mapping[str, Any]) -> str:
    """An estimate with its interval: ``84.5 % [70.8, 97.4]``, or an error in the target's unit."""
    if row["metric"] == "accuracy":
        return f"{100 * row['value']:.1f} % [{100 * row['low']:.1f}, {100 * row['high']:.1f}]"
    return f"{row['value']:.3g} [{row['low']:.3g}, {row['high']:.3g}]"


def evaluation_lines(result: Mapping[str, Any]) -> list[str]:
    """What a summary says of a run's paid evaluation, in a line each."""
    row = estimate_of(result)
    if row is None:
        return []
    metric = row["metric"].replace("_", " ")
    paid = "" if row["epsilon"] is None else f", paid by held-out records: ε up to {row['epsilon']:.3g}"
    lines = [f"evaluated {metric}: {in_words(row)}, 95 % interval{paid}"]
    if kept := result.get("kept"):
        lines.append(f"the model is that of round {kept['round']} of {kept['of']}, the best by paid evaluation")
    if edge := result.get("threshold"):
        caught, false = (in_words({**edge[key], "metric": "accuracy"}) for key in ("recall/1", "false_positive_rate"))
        lines.append(
            f"two classes: answer class 1 from P = {edge['edge']:.3g} on; of its records {caught} are found, "
            f"and of the others {false} are taken for one"
        )
    return lines


def search_table(result: Mapping[str, Any]) -> Sheet:
    """The candidates of a search with their estimates and intervals, the winner marked."""
    tuned = result["tuned"]
    columns = ("settings", "evaluated", "all intervals hold with 95 %", "")
    table = Sheet(columns, prose=("settings", ""), title="tried, each charged in full")
    for place, one in enumerate(tuned["tried"]):
        told = ("–", "–") if one["estimate"] is None else tuple(in_words(one["estimate"]).split(" [", 1))
        mark = "best by paid evaluation" if place == tuned["winner"] else "failed" if "failed" in one else ""
        table.add_row(one["label"], told[0], told[1].rstrip("]").replace(", ", " to "), mark)
    return table


def told_apart(result: Mapping[str, Any]) -> bool:
    """Whether the winner's interval lies beyond all the others'; if not, chance may have chosen it."""
    tuned = result["tuned"]
    rows = [one["estimate"] for one in tuned["tried"]]
    winner = rows[tuned["winner"]]
    others = [row for place, row in enumerate(rows) if row is not None and place != tuned["winner"]]
    if choosing.DECIDING[winner["metric"]] > 0:
        return all(winner["low"] > row["high"] for row in others)
    return all(winner["high"] < row["low"] for row in others)
