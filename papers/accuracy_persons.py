"""What it costs to protect a person and not a record, and what it brings to ask everybody how much they allow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from papers.accuracy_page import scores_in
from papers.experiment import ACCURACY, Cell, Experiment, Quick
from papers.verdicts import interval

PERSONS, LEVELS = "a person against a record, at equal ε", "levels of consent against everybody as strict"
PERSON, RECORD = "every student protected, with all ratings at a department", "every rating protected"
BY_LEVEL, STRICTEST = "each level at its own ε", "everybody at the strictest ε"
FIRST = {PERSONS: PERSON, LEVELS: BY_LEVEL}
"""By block the row that the other is compared with."""

DELTA = 1e-5
CONSENT = {"strict": 0.5, "standard": 1.0, "generous": 4.0}
CHOSEN = {"strict": 0.3, "standard": 0.4, "generous": 0.3}
EPSILONS = (1.0, 4.0)


def _rating(row: str, by: str, epsilon: float) -> Cell:
    """InstEval's departments; both rows train on the same ratings and are judged by the same ones."""
    return Cell(
        PERSONS,
        row,
        f"InstEval, ε = {epsilon:g}",
        {"name": "insteval", "kind": "natural", "by": by},
        "logistic",
        "dp-fedavg",
        {"rounds": 500, "rate": 0.1, "steps": 1, "clip": 1.0, "evaluate": 500},
        {"spec": epsilon, "delta": DELTA},
        search={"lr": (0.8, 1.6, 3.2, 6.4, 12.8, 25.6)},
    )


def _consent(row: str, budgets: Mapping[str, Any], clients: int) -> Cell:
    """Digits dealt to clients whose records have levels at random, or all the strictest."""
    return Cell(
        LEVELS,
        row,
        f"digits, {clients} clients",
        {"name": "digits", "kind": "dirichlet", "clients": clients, "beta": 1.0, "minimum": 30},
        "logistic",
        "dp-fedavg",
        {"rounds": 100, "rate": 0.1, "steps": 1, "clip": 1.0, "evaluate": 100},
        budgets,
        search={"lr": (0.2, 0.4, 0.8, 1.6, 3.2, 6.4)},
    )


def cells() -> tuple[Cell, ...]:
    """Every run of the page: ratings by student and by rating, digits by level of consent and all at the strictest."""
    by_level = {"levels": CONSENT, "shares": CHOSEN, "delta": DELTA}
    strictest = {"spec": min(CONSENT.values()), "delta": DELTA}
    found = [_rating(row, by, epsilon) for epsilon in EPSILONS for row, by in ((PERSON, "student"), (RECORD, "record"))]
    for clients in (4, 12):
        found += [_consent(BY_LEVEL, by_level, clients), _consent(STRICTEST, strictest, clients)]
    return tuple(found)


def lines(results: Mapping[str, Any]) -> list[str]:
    """Accuracies of both rows of a comparison, and their paired difference with a 95 % interval."""
    scores = scores_in(results)
    rates = {(one["block"], one["row"], one["column"]): one["chosen"]["lr"] for one in results["runs"]}
    made: list[str] = []
    for block, first in FIRST.items():
        there = [place for place in scores if place[0] == block]
        others = list(dict.fromkeys(place[1] for place in there if place[1] != first))
        if not others:
            continue
        made += [f"## {block[0].upper()}{block[1:]}", "", f"| | {first} | {others[0]} | difference, points |"]
        made += ["|---|---|---|---|"]
        for column in dict.fromkeys(place[2] for place in there):
            one, two = scores.get((block, first, column), {}), scores.get((block, others[0], column), {})
            seeds = sorted(set(one) & set(two))
            gap = interval([one[seed] - two[seed] for seed in seeds])
            shown = [
                f"{np.mean([found[seed] for seed in seeds]):.1f} (lr {rates[block, row, column]:g})"
                for row, found in ((first, one), (others[0], two))
            ]
            limits = f" [{gap[1]:+.1f}, {gap[2]:+.1f}]" if len(seeds) > 1 else ""
            made.append(f"| {column} | {shown[0]} | {shown[1]} | {gap[0]:+.1f}{limits} |")
        made.append("")
    told = "Mean accuracy over clients, %; differences with 95 % t-intervals over paired seeds."
    return [told, "", *made]


SETTING = (
    "InstEval: a student's ratings at a department, at most 16, count as one. The row of ratings trains on the "
    "same ratings and is judged by the same ones, so that only what is protected differs. Always answering "
    "'not high' is right for 55 %.",
    f"Levels: ε = {', '.join(f'{e:g} ({name})' for name, e in CONSENT.items())}, chosen by "
    f"{', '.join(f'{100 * share:.0f} %' for share in CHOSEN.values())} of the records at random, so that a "
    "level says nothing about a record.",
)
EXPERIMENTS = (
    Experiment(
        name="accuracy/persons",
        title="a person protected against a record, and levels of consent against everybody as strict",
        cost="20 runs on 73,421 ratings of 1,147 columns, 20 on digits, 120 or more to choose; half an hour on a core",
        measures=(ACCURACY,),
        published={},
        differs=("A table of our own, no paper's. Every row searches one learning rate; the rest is alike.", *SETTING),
        cells=cells,
        seeds=5,
        quick=Quick(columns=("digits, 4 clients",), training={"rounds": 5, "evaluate": 5}),
        lines=lines,
        axes=("protected", "federation"),
    ),
)
