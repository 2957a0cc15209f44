"""``auto``'s rule, fitted to searched points: the noise at the end that costs least score over many federations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from papers.accuracy_search import NOISES, REGRESSION_NOISES
from sordino.methods.auto import RULE, Rule

Found = Mapping[str, Any]
"""What was searched on a triple: its set, its classes, and points with noise and score."""

BANDWIDTH = 0.4
"""Of the kernel, in logarithms of noise: a factor of 1.5."""

MOST = 6.0
"""Points of regret beyond which a triple counts no more, so that one cannot decide for all."""

STEPS = 60
TARGETS = np.geomspace(2.0, 200.0, STEPS)
POWERS = np.linspace(0.0, 1.5, 16)


def score_at(found: Found, noise: NDArray[np.float64]) -> NDArray[np.float64]:
    """The score to expect at these noises: a kernel regression in each (rounds, rate), then their mean.

    Points that show the last weights instead of an average are left out: ``auto`` always averages.
    """
    groups: dict[tuple[int, float], list[tuple[float, float]]] = {}
    for one in found["points"]:
        if one["share"] > 0:
            seen = (math.log(one["noise"]), _finite(one["score"]))
            groups.setdefault((one["rounds"], one["rate"]), []).append(seen)
    curves = []
    for seen_here in groups.values():
        at, score = np.array(seen_here).T
        near = np.exp(-0.5 * ((np.log(noise)[:, None] - at) / BANDWIDTH) ** 2)
        curves.append((near * score).sum(1) / near.sum(1))
    return np.asarray(np.mean(curves, 0))


def _finite(score: float | None) -> float:
    """A probe that diverged, or explains far less than nothing, counts as nothing: how far below says nothing."""
    return 0.0 if score is None else max(0.0, score)


def regrets(found: Found, noise: NDArray[np.float64]) -> NDArray[np.float64]:
    """Points below the best noise of this triple, at each of some noises; at most ``MOST``."""
    low, high = REGRESSION_NOISES if found["classes"] is None else (one / found["classes"] for one in NOISES)
    best = score_at(found, np.geomspace(low, high, STEPS)).max()
    return np.asarray(np.minimum(best - score_at(found, noise), MOST))


def fit(every: Iterable[Found]) -> tuple[Rule, float]:
    """The rule with the least mean regret, and that regret; a kind that was not searched keeps the usual number."""
    some = list(every)
    labelled, real = [one for one in some if one["classes"]], [one for one in some if not one["classes"]]
    rule, total = RULE, 0.0
    if labelled:
        grid = list(itertools.product(TARGETS, POWERS))
        noises = {k: np.array([a * k**-p for a, p in grid]) for k in {one["classes"] for one in labelled}}
        costs = np.sum([regrets(one, noises[one["classes"]]) for one in labelled], 0)
        noise, power = grid[int(costs.argmin())]
        rule, total = Rule(_short(noise), _short(power), rule.regression), total + float(costs.min())
    if real:
        targets = np.geomspace(*REGRESSION_NOISES, STEPS)
        costs = np.sum([regrets(one, targets) for one in real], 0)
        rule = Rule(rule.noise, rule.power, _short(targets[int(costs.argmin())]))
        total += float(costs.min())
    return rule, total / max(1, len(some))


def regret_of(rule: Rule, every: Sequence[Found]) -> list[float]:
    """What a rule costs on each of some triples."""
    return [float(regrets(one, np.array([rule.target(one["classes"])]))[0]) for one in every]


def _short(value: float) -> float:
    return float(f"{value:.3g}")
