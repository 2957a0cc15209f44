"""How values that a paper does not give are searched: one budget for all methods, on records that no table reports.

1. *Screen.* Every combination of the values to begin with, eight in most tables, at a quarter of the rounds on one
   tuning seed.
2. *Outwards.* While the best setting has a value at the edge of those tried, the next value in that direction is tried
   too (as far from the edge as its neighbour is, in ratio), the other values staying: at most ``BEYOND`` settings more.
3. *Finals.* The two best, at all rounds, on three tuning seeds: the better mean is taken.

What was searched is worked out from the finished runs alone, so an interrupted search goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from papers.experiment import Cell, Experiment, Measure, Place

SCREENED_ON = 100
TUNING_SEEDS = (100, 101, 102)
"""Seeds that no table shows."""

SHARE, FINALISTS, BEYOND = 4, 2, 6
"""A quarter of the rounds; two finalists; at most so many settings outside of those to begin with."""

Values = dict[str, Any]
Read = Callable[[Cell], Mapping[str, Any] | None]
"""What is known of a run, or None while it is not finished."""


@dataclass
class Search:
    """One search, as far as it is.

    Attributes
    ----------
    trials: every run in its order: its stage ("screen", "outwards", "final"), values, seed, rounds and score.
    made: what is known of these runs, by their ids: places may share them.
    missing: the runs that have to be made before it can go on.
    chosen: the values it came to; None while it is not finished.
    at_edge: the settings whose chosen value is still the least or the largest that was tried.
    """

    trials: list[dict[str, Any]] = field(default_factory=list)
    made: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    missing: list[Cell] = field(default_factory=list)
    chosen: Values | None = None
    at_edge: list[str] = field(default_factory=list)


def searches(experiment: Experiment, cells: Sequence[Cell], read: Read) -> dict[Place, Search]:
    """The search of every place that has one."""
    measure = experiment.choose or experiment.measures[0]
    found: dict[Place, Search] = {}
    for cell in cells:
        if cell.search and cell.place not in found:
            found[cell.place] = searched(cell, measure, read)
    return found


def searched(cell: Cell, measure: Measure, read: Read) -> Search:
    """The search for one cell, worked out from the runs that are finished."""
    found = Search()
    scores: list[tuple[Values, float]] = []

    def screen(stage: str, settings: Sequence[Values]) -> bool:
        for values in settings:
            score = _score(found, stage, screening(cell, values), measure, read)
            if score is not None:
                scores.append((values, score))
        return not found.missing

    if not screen("screen", list(cell.grid())):
        return found
    left = BEYOND
    while left and (further := list(_outwards(cell, scores))[:left]):
        left -= len(further)
        if not screen("outwards", further):
            return found
    best = sorted(scores, key=lambda one: -one[1])[:FINALISTS]
    means = []
    for values, _ in best:
        each = [_score(found, "final", final(cell, values, seed), measure, read) for seed in TUNING_SEEDS]
        means.append(float(np.mean([-np.inf if one is None else one for one in each])))
    if found.missing:
        return found
    found.chosen = best[int(np.argmax(means))][0]
    found.at_edge = [key for key, _ in _edges(cell, found.chosen, [values for values, _ in scores])]
    return found


def _score(found: Search, stage: str, run: Cell, measure: Measure, read: Read) -> float | None:
    """What a run scores, more being better; −∞ where it diverged; None while it is not finished."""
    known = read(run)
    if known is None:
        found.missing.append(run)
        return None
    value = known["final"].get(measure.key)
    rounds = run.training.get("rounds")
    trial = {"stage": stage, "values": dict(run.chosen), "seed": run.seed, "rounds": rounds, measure.key: value}
    found.trials.append(trial)
    found.made[run.id] = known
    if value is None:
        return -np.inf
    return float(value) if measure.more_is_better else -float(value)


def screening(cell: Cell, values: Values) -> Cell:
    """The run that a setting is screened by: a quarter of the rounds, each with the noise that so few need."""
    run = final(cell, values, SCREENED_ON)
    rounds = run.training.get("rounds")
    if not isinstance(rounds, int):  # it sets them itself
        return run
    return replace(run, training={**run.training, "rounds": max(1, round(rounds / SHARE))})


def final(cell: Cell, values: Values, seed: int) -> Cell:
    """The run that a finalist is judged by."""
    return replace(cell.reference, seed=seed, chosen={**cell.chosen, **values}, validation=True, search={})


def _edges(cell: Cell, values: Values, tried: Sequence[Values]) -> Iterator[tuple[str, Any]]:
    """The settings that have the least or largest value tried, and the value beyond it."""
    for key, begun in cell.search.items():
        if len(begun) < 2 or not all(isinstance(value, int | float) for value in begun):
            continue
        known = sorted({one[key] for one in tried})
        for edge, inside in ((known[0], known[1]), (known[-1], known[-2])):
            if values[key] == edge:
                beyond = float(f"{edge * edge / inside:.3g}")
                yield key, round(beyond) if isinstance(edge, int) else beyond


def _outwards(cell: Cell, scores: Sequence[tuple[Values, float]]) -> Iterator[Values]:
    best = max(scores, key=lambda one: one[1])
    if np.isfinite(best[1]):
        for key, beyond in _edges(cell, best[0], [values for values, _ in scores]):
            yield {**best[0], key: beyond}


def told(found: Mapping[Place, Search]) -> list[dict[str, Any]]:
    """Searches as results.json has them: every run that chose, and what it came to; places that share one, together."""
    alike: dict[tuple[str, ...], tuple[Search, list[Place]]] = {}
    for place, search in found.items():
        alike.setdefault((*search.made, *(run.id for run in search.missing)), (search, []))[1].append(place)
    return [
        {"places": places, "chosen": search.chosen, "at_edge": search.at_edge, "trials": search.trials}
        for search, places in alike.values()
    ]
