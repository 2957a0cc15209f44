"""What the JSON files in docs/results know, for sentences that quote several of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from papers import verdicts
from papers.experiment import CENTRAL, Entry, Measure, Place
from papers.pages import RESULTS, entries_of, pages
from papers.verdicts import Gap


@cache
def results(name: str) -> dict[str, Any]:
    """The content of an experiment's JSON file."""
    return pages()[RESULTS / f"{name.replace('/', '-')}.md"][1]


@cache
def measured(name: str) -> Mapping[Place, Entry]:
    """Its numbers by place, every seed's among them."""
    experiment, content = pages()[RESULTS / f"{name.replace('/', '-')}.md"]
    return {entry.place: entry for entry in entries_of(experiment, content)}


def value(name: str, block: str, row: str, column: str, measure: Measure) -> float:
    """The mean over seeds at a place."""
    found = measured(name)[block, row, column].values[measure.key]
    if found is None:
        raise LookupError(f"{name} has no {measure.key} at {block}, {row}, {column}")
    return found


def mean_gap(name: str, measure: Measure, block: str, ours: str, other: str) -> Gap:
    """A row against another, paired by seed, on average over the columns of a block."""
    found = verdicts.average(verdicts.rows(measured(name), measure, block, ours, other).values())
    if found is None:
        raise LookupError(f"{name} cannot compare {ours} with {other} in {block}")
    return found


def seeds_of(gap: Gap) -> str:
    """How many seeds a comparison has, in words."""
    return f"{len(gap.pairs)} seeds" if len(gap.pairs) > 1 else "one seed"


def says(gap: Gap, what: str) -> str:
    """``8.7 points above X [8.6, 8.7]``, by the word that the interval has."""
    mean, low, high = gap.interval
    if gap.word == verdicts.NONE:
        return f"{mean:+.1f} points against {what} ({verdicts.NO_VERDICT})"
    if gap.word == verdicts.EVEN:
        return f"level with {what} ({mean:+.1f} [{low:+.1f}, {high:+.1f}])"
    low, high = sorted((abs(low), abs(high)))
    return f"{abs(mean):.1f} points {gap.word} {what} [{low:.1f}, {high:.1f}]"


def aware(number: int, block: str) -> Gap:
    """Privacy-aware selection against unbiased in Table III or IV."""
    return mean_gap(f"selection/table{number}", CENTRAL, block, "Privacy-aware", "Unbiased")
