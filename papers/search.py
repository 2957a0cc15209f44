"""How values that a paper does not give are searched: one budget for all methods, on records that no table reports.

1. *Screen.* Every combination of the values to begin with, eight in most tables, at a quarter of the rounds on one
   tuning seed; at all rounds in tables where a quarter says little of the whole (``Experiment.screened``).
2. *Outwards.* While the best setting has a value at the edge of those tried, the next value in that direction is tried
   too (as far from the edge as its neighbour is, in ratio), the other values staying: at most ``BEYOND`` settings more.
3. *Finals.* The two best, at all rounds, on three tuning seeds. Short runs like longer steps than long ones do, so the
   better one is followed: its neighbour on the far side of the other is a finalist too, at most ``FOLLOWED`` times. The
   best mean is taken.

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

SHARE, FINALISTS, BEYOND, FOLLOWED = 4, 2, 6, 2
"""A quarter of the rounds; two finalists; at most so many settings outside of those to begin with, and so many more
finalists."""


def protocol(share: int) -> str:
    """What a page says about it; ``share``: screening takes one in so many of the rounds."""
    long = "all rounds" if share == 1 else "a quarter of the rounds" if share == SHARE else f"1/{share} of the rounds"
    return (
        f"Values that the paper does not give are searched for all methods alike: the settings to begin with at {long} "
        f"on seed {SCREENED_ON}, then at most {BEYOND} more, outwards while the best is at an edge of what was tried, "
        f"then the two best at all rounds on seeds {', '.join(map(str, TUNING_SEEDS))}, and at most {FOLLOWED} more on "
        "the better one's side. Judged by a tenth of every client's training records, which no seed of the table tests "
        "on; results.json has every searched run."
    )


Values = dict[str, Any]
Read = Callable[[Cell], Mapping[str, Any] | None]
"""What is known of a run, or None while it is not finished."""


@dataclass
class Search:
    """One search, as far as it is.

    Attributes
    ----------
    trials: every run in its order: its id, stage ("screen", "outwards", "final"), values, seed, rounds, seconds, score.
    made: what is known of these runs, by their ids: places may share them.
    missing: the runs that have to be made before it can go on.
    chosen: the values it came to; None while it is not finished.
    at_edge: the settings whose chosen value is still the least or the largest that was tried.
    unbracketed: the settings whose chosen value is the outermost of the finalists', with no finalist left to follow it.
    """

    trials: list[dict[str, Any]] = field(default_factory=list)
    made: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    missing: list[Cell] = field(default_factory=list)
    chosen: Values | None = None
    at_edge: list[str] = field(default_factory=list)
    unbracketed: list[str] = field(default_factory=list)


def searches(experiment: Experiment, cells: Sequence[Cell], read: Read) -> dict[Place, Search]:
    """The search of every place that has one."""
    measure = experiment.choose or experiment.measures[0]
    found: dict[Place, Search] = {}
    for cell in cells:
        if cell.search and cell.place not in found:
            found[cell.place] = searched(cell, measure, read, experiment.screened)
    return found


def searched(cell: Cell, measure: Measure, read: Read, share: int = SHARE) -> Search:
    """The search for one cell, worked out from the runs that are finished; one in ``share`` rounds to screen by."""
    found = Search()
    scores: list[tuple[Values, float]] = []

    def screen(stage: str, settings: Sequence[Values]) -> bool:
        for values in settings:
            score = _score(found, stage, screening(cell, values, share), measure, read)
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
    finalists = [values for values, _ in sorted(scores, key=lambda one: -one[1])[:FINALISTS]]
    means: list[float] = []
    while len(means) < len(finalists):
        for values in finalists[len(means) :]:
            each = [_score(found, "final", final(cell, values, seed), measure, read) for seed in TUNING_SEEDS]
            means.append(float(np.mean([-np.inf if one is None else one for one in each])))
        if found.missing:
            return found
        best, tried = finalists[int(np.argmax(means))], [values for values, _ in scores] + finalists
        further = list(_followed(cell, best, finalists, tried)) if np.isfinite(max(means)) else []
        if len(finalists) < FINALISTS + FOLLOWED:
            finalists += further[:1]
    found.chosen = best
    found.at_edge = [key for key, _ in _edges(cell, best, tried)]
    found.unbracketed = [key for values in further for key in values if values[key] != best[key]]
    return found


def _score(found: Search, stage: str, run: Cell, measure: Measure, read: Read) -> float | None:
    """What a run scores, more being better; −∞ where it diverged; None while it is not finished."""
    known = read(run)
    if known is None:
        found.missing.append(run)
        return None
    value = known["final"].get(measure.key)
    trial = {"id": run.id, "stage": stage, "values": dict(run.chosen), "seed": run.seed}
    trial |= {"rounds": run.settled.training.get("rounds"), "seconds": known["seconds"], measure.key: value}
    found.trials.append(trial)
    found.made[run.id] = known
    if value is None:
        return -np.inf
    return float(value) if measure.more_is_better else -float(value)


def screening(cell: Cell, values: Values, share: int = SHARE) -> Cell:
    """The run that a setting is screened by: one in ``share`` rounds, each with the noise that so few need."""
    run = final(cell, values, SCREENED_ON)
    rounds = run.training.get("rounds")
    if share == 1 or not isinstance(rounds, int):  # not an int: it sets them itself
        return run
    return replace(run, training={**run.training, "rounds": max(1, round(rounds / share))})


def final(cell: Cell, values: Values, seed: int) -> Cell:
    """The run that a finalist is judged by."""
    return replace(cell.reference, seed=seed, chosen={**cell.chosen, **values}, validation=True, search={})


def _edges(cell: Cell, values: Values, tried: Sequence[Values]) -> Iterator[tuple[str, Any]]:
    """The settings that have the least or largest value tried, and the value beyond it."""
    for key in _axes(cell):
        known = sorted({one[key] for one in tried})
        for edge, inside in ((known[0], known[1]), (known[-1], known[-2])):
            if values[key] == edge:
                yield key, _next(edge, inside)


def _axes(cell: Cell) -> list[str]:
    """The settings that have more than one value, all of them numbers."""
    numbers = {key: [value for value in begun if isinstance(value, int | float)] for key, begun in cell.search.items()}
    return [key for key, begun in cell.search.items() if len(begun) > 1 and len(numbers[key]) == len(begun)]


def _next(edge: float, inside: float) -> float:
    """The value as far outside of the edge as ``inside`` is inside, in ratio."""
    beyond = float(f"{edge * edge / inside:.3g}")
    return round(beyond) if isinstance(edge, int) else beyond


def _followed(cell: Cell, best: Values, finalists: Sequence[Values], tried: Sequence[Values]) -> Iterator[Values]:
    """The best finalist's neighbours away from the others, setting by setting, as far as they were no finalists."""
    for key in _axes(cell):
        ends = sorted({one[key] for one in finalists})
        if len(ends) < 2 or best[key] not in (ends[0], ends[-1]):
            continue
        downwards = best[key] == ends[0]
        known = sorted({one[key] for one in tried}, reverse=downwards)
        place = known.index(best[key])
        value = known[place + 1] if place + 1 < len(known) else _next(known[-1], known[-2])
        if {**best, key: value} not in finalists:
            yield {**best, key: value}


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
        {
            "places": places,
            "chosen": search.chosen,
            "at_edge": search.at_edge,
            "unbracketed": search.unbracketed,
            "trials": search.trials,
        }
        for search, places in alike.values()
    ]


def edges(found: Mapping[Place, Search]) -> list[str]:
    """What a page says of searches that ended before the best value had worse ones on both sides."""
    said = []
    for key, words in (
        ("at_edge", "Chosen at the edge of what was tried, with no step left or taken outwards from there"),
        ("unbracketed", "Chosen outermost of the finalists, no more of them allowed"),
    ):
        named = [
            f"{', '.join(p for p in place if p)}: {', '.join(one)}"
            for place, s in found.items()
            if (one := getattr(s, key))
        ]
        if named:
            said.append(f"{words}: {'; '.join(named)}.")
    return said
