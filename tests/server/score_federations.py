"""Federations whose truth is known: what sites would release about a model, and how often intervals contain the truth.

``python tests/server/score_federations.py`` prints the tables of docs/evaluation-intervals.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

import sordino as sd
from sordino.privacy.cells import Cells
from sordino.server.scores import Scores, estimates

Array = NDArray[np.float64]

FINE = 400
"""Parts of every bin in which the truth is computed."""

EPSILONS, RECORDS, SITES = (0.3, 1.0, 3.0, 8.0), (50, 600, 5000), (1, 4, 10)


@dataclass(frozen=True)
class World:
    """Populations of sites: chances[site, cell], and what is true of them mixed in equal parts."""

    cells: Cells
    chances: Array
    truth: dict[str, float]


def two_classes(
    sites: int, prevalence: float = 0.06, differ: float = 0.8, distance: float = 2.2, bins: int = 10
) -> World:
    """Scores of two classes: logit ~ N(±distance + the site's shift, 1.5); class 1 is the rare one."""
    cells = Cells("binary", bins)
    edges = np.linspace(0, 1, cells.size * FINE + 1)[1:-1]
    shifts = differ * (np.linspace(-1, 1, sites) if sites > 1 else np.zeros(1))
    fine = (
        np.array(
            [
                [
                    np.diff(ndtr((np.log(edges / (1 - edges)) - m - s) / 1.5), prepend=0, append=1)
                    for m in (-distance, distance)
                ]
                for s in shifts
            ]
        )
        * np.array([1 - prevalence, prevalence])[:, None]
    )
    chances = fine.reshape(sites, 2, cells.size, FINE).sum(3)
    pooled, right = chances.mean(0), cells.rows(cells.right)
    accuracy = (chances * right).sum((1, 2))
    recalls = (pooled * right).sum(1) / pooled.sum(1)
    auc = sum(
        pooled[1, j] * pooled[0, l] * (1.0 if j > l else 0.5 if j == l else 0.0)
        for j in range(bins)
        for l in range(bins)
    ) / (prevalence * (1 - prevalence))
    middles = (np.arange(cells.size * FINE) + 0.5) / (cells.size * FINE)
    gaps = (fine.mean(0)[1] * (1 - middles) - fine.mean(0)[0] * middles).reshape(cells.size, FINE).sum(1)
    truth = {"accuracy": accuracy.mean(), "mean_accuracy": accuracy.mean(), "accuracy/0": accuracy[0]}
    truth |= {"recall/0": recalls[0], "recall/1": recalls[1], "balanced_accuracy": recalls.mean(), "auc": auc}
    truth |= {"calibration_error": np.abs(gaps).sum(), "psi": accuracy.var()}
    return World(cells, chances.reshape(sites, -1), truth)


def four_classes(sites: int) -> World:
    """Four classes with shares 3, 12, 25 and 60 %, recalls from 50 to 95 % that differ between sites."""
    cells, shares = Cells("classes", 4), np.array([0.03, 0.12, 0.25, 0.60])
    recalls = np.array([0.5, 0.7, 0.85, 0.95]) - (0.2 * np.arange(sites) / max(sites, 1))[:, None]
    matrix = np.eye(4) * recalls[:, None] + (1 - np.eye(4)) * (1 - recalls[:, :, None]) / 3
    chances = matrix * shares[:, None]
    pooled = recalls.mean(0)
    accuracy = recalls @ shares
    truth = {"accuracy": accuracy.mean(), "balanced_accuracy": pooled.mean(), "psi": accuracy.var()}
    return World(cells, chances.reshape(sites, -1), truth | {f"recall/{c}": pooled[c] for c in range(4)})


def a_number(sites: int) -> World:
    """Residuals ~ N(the site's bias, 9 % of the range) in forty bins of a range of width 50."""
    cells = Cells("regression", 40, width=50.0)
    edges = np.linspace(-1, 1, cells.size * FINE + 1)
    biases = 0.05 * (np.linspace(-1, 1, sites) if sites > 1 else np.zeros(1))
    fine = np.array([np.diff(ndtr((edges[1:-1] - bias) / 0.09), prepend=0, append=1) for bias in biases])
    size, weight = np.abs(edges[1:] + edges[:-1]) / 2, fine.mean(0)
    order = np.argsort(size)
    median = size[order][np.searchsorted(weight[order].cumsum(), 0.5)]
    truth = {"mean_absolute_error": size @ weight, "root_mean_squared_error": np.sqrt(size**2 @ weight)}
    truth["median_absolute_error"] = median
    chances = fine.reshape(sites, cells.size, FINE).sum(2)
    return World(cells, chances, {name: 50.0 * value for name, value in truth.items()})


WORLDS: dict[str, tuple[Callable[[int], World], tuple[str, ...]]] = {
    "two classes, one of 6 %": (
        two_classes,
        ("accuracy", "accuracy/0", "recall/1", "recall/0", "balanced_accuracy", "auc", "calibration_error", "psi"),
    ),
    "two classes, nearly all right, sites alike": (
        lambda sites: two_classes(sites, 0.3, 0.0, 3.3),
        ("accuracy", "recall/1", "auc", "psi"),
    ),
    "four classes": (four_classes, ("balanced_accuracy", "recall/0", "recall/3", "psi")),
    "a number": (a_number, ("mean_absolute_error", "root_mean_squared_error", "median_absolute_error")),
}


def noise(epsilon: float) -> float:
    """The deviation of each of the two parts when a run of ten releases costs ε: z√2, in counts."""
    return float(sd.privacy.calibrate(epsilon, 1e-5, 1.0, 10, sampling="full")) * 2**0.5


def released(
    world: World, records: Iterable[int], deviations: Iterable[float], rng: np.random.Generator
) -> list[Scores]:
    """One draw of held-out records at every site, and of the noise."""
    found = []
    for site, (chances, count, deviation) in enumerate(zip(world.chances, records, deviations)):
        drawn = rng.multinomial(count, np.append(chances, max(0.0, 1.0 - chances.sum())))[:-1].astype(float)
        correct = drawn[world.cells.right].sum() + deviation * rng.standard_normal()
        table = drawn + deviation * rng.standard_normal(len(drawn))
        found.append(Scores(str(site), table, correct, count, deviation, deviation))
    return found


def coverage(
    world: World,
    metrics: tuple[str, ...],
    records: list[int],
    deviations: list[float],
    runs: int,
    seed: int | list[int],
) -> dict[str, tuple[int, float]]:
    """Per metric: in how many runs the interval contains the truth, and its median width."""
    rng = np.random.default_rng(seed)
    hits, widths = dict.fromkeys(metrics, 0), {metric: [] for metric in metrics}
    for run in range(runs):
        found = {one.metric: one for one in estimates(released(world, records, deviations, rng), world.cells, seed=run)}
        for metric in metrics:
            one, truth = found[metric], world.truth[metric]
            assert one.low <= one.value <= one.high, one
            hits[metric] += one.low - 1e-12 <= truth <= one.high + 1e-12
            widths[metric].append(one.high - one.low)
    return {metric: (hits[metric], float(np.median(widths[metric]))) for metric in metrics}


def cell(name: str, epsilon: float, records: int, sites: int, runs: int) -> dict[str, tuple[int, float]]:
    """Coverage in one cell of the design: equal sites, ten releases of two parts at ε."""
    make, metrics = WORLDS[name]
    seed = [tuple(WORLDS).index(name), int(10 * epsilon), records, sites]
    return coverage(make(sites), metrics, [records] * sites, [noise(epsilon)] * sites, runs, seed)


def page(runs: int = 400, names: Iterable[str] = tuple(WORLDS)) -> str:
    """The documentation's tables: median width and coverage in per cent, by metric, ε, sites × records a site."""
    lines = []
    for name in names:
        metrics = WORLDS[name][1]
        head = [f"{sites} × {records}" for sites in SITES for records in RECORDS]
        lines += [f"\n### {name[0].upper()}{name[1:]}\n", "| metric | ε | " + " | ".join(head) + " |"]
        lines.append("|---|---|" + "---|" * len(head))
        found = {(e, s, m): cell(name, e, m, s, runs) for e in EPSILONS for s in SITES for m in RECORDS}
        for metric in metrics:
            for epsilon in EPSILONS:
                shown = [found[epsilon, s, m][metric] for s in SITES for m in RECORDS]
                texts = [f"{width:.3g} ({100 * hits / runs:.1f})" for hits, width in shown]
                lines.append(f"| `{metric}` | {epsilon:g} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(page())
