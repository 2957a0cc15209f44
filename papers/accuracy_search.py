"""What happens on a triple before its runs: forty settings are probed on one seed, and ``auto`` is settled by a rule.

The search looks at that seed's test records, so its winner is what nobody could choose in earnest. Files in OUT:
``search/TRIPLE.json`` and ``settled/TRIPLE.json``, so that a stopped benchmark goes on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from papers import accuracy_probe as probe
from papers.accuracy_probe import Heads, Point
from papers.accuracy_triples import DELTA, Asked, Triple
from papers.make import Workshop
from papers.search import SCREENED_ON
from sordino import data, methods, models
from sordino.data import Federation
from sordino.data.partitions import generator
from sordino.engine.checkpoint import write_atomic
from sordino.methods import Learner
from sordino.methods.auto import Rule
from sordino.study.prepared import Prepared
from sordino.study.result import to_json
from sordino.study.run import prepare

SEED = SCREENED_ON
COOLDOWNS, SHARES, PULLS = (0.0, 0.5, 1.0), (0.0, 0.05, 0.1, 0.2), (0.0, 1.0)
"""Averages over no, or the last 5, 10 or 20 per cent of the rounds; pulls in units of 1/rounds."""

SPREADS = (0.2, 5.0)
NOISES, REGRESSION_NOISES = (3.0, 300.0), (0.01, 1.5)
"""Noise on an output at the end: from 3/k to 300/k for k classes; for targets in a range of width 1."""

HALVED = 1000
"""From so many features on, the probe makes its products in bfloat16, which is twice as fast; runs never do."""

ARTIFICIAL = "least-squares"
"""Stands in for School where the rule for regression must not know it: its targets divided by their range."""

ReadyFor = Callable[[int, float], Prepared]


@dataclass(frozen=True)
class Width:
    """How wide a search is: so many points for each of some (rounds, rate)."""

    groups: tuple[tuple[int, float], ...] = ((200, 0.2), (500, 0.1), (1000, 0.05), (200, 1.0))
    each: int = 10


def drawn(width: Width, name: str) -> list[tuple[Point, float]]:
    """The points of a search, the length of their steps still open, and how far each is along the range of noises."""
    random = generator(SEED, f"search {name}")
    found = []
    for rounds, rate in width.groups:
        for _ in range(width.each):
            spread = math.exp(random.uniform(*np.log(SPREADS)))
            cooldown, share = float(random.choice(COOLDOWNS)), float(random.choice(SHARES))
            pull = float(random.choice(PULLS)) / rounds
            found.append((Point(rounds, rate, 1.0, cooldown, pull, spread, share), float(random.uniform())))
    return found


def heads_of(ready: Prepared, halved: int = HALVED) -> Heads:
    """What a probe needs of a prepared run of ``auto`` whose features are there already."""
    linear = [one for one in ready.trained.modules() if isinstance(one, nn.Linear)][-1]
    x = torch.from_numpy(ready.clients.x).flatten(1)
    if x.shape[1] >= halved:
        x = x.bfloat16()
    each = [c.noise * c.terms.adjacency.sensitivity / c.terms.divisor for c in ready.plan.clients]
    start = linear.weight.detach().T
    clients = ready.clients
    return Heads(x, torch.from_numpy(clients.y), clients.train, clients.test, np.array(each), start, clients.classes)


def variance(clients: Federation) -> float:
    """Of all clients' test targets about the mean of the training targets; a client counts by its records."""
    mean = clients.y[np.concatenate(clients.train)].mean()
    each = [np.square(clients.y[test] - mean).mean() for test in clients.test]
    return float(np.average(each, weights=clients.sizes))


def scores(heads: Heads, weights: torch.Tensor, scale: float | None) -> list[float]:
    """By setting: mean accuracy over clients, or R² = 1 − MSE/variance where a ``scale`` says it, in points."""
    found = probe.losses(heads, weights)
    if scale is None:
        return [float(value) for value in 100 * (1 - found.mean(1))]
    return [float(value) for value in 100 * (1 - np.average(found, axis=1, weights=heads.sizes) / scale)]


def search(ready_for: ReadyFor, name: str, width: Width) -> list[dict[str, Any]]:
    """Every point of a search with its score; ``noise`` is s κ R, the noise on an output at the end."""
    every = drawn(width, name)
    found = []
    for rounds, rate in width.groups:
        ready = ready_for(rounds, rate)
        heads, clients = heads_of(ready), ready.clients
        scale = None if clients.classes else variance(clients)
        reach = models.reach(ready.template, tuple(ready.study["model"]["shape"]))
        low, high = REGRESSION_NOISES if clients.classes is None else (one / clients.classes for one in NOISES)
        group, noises = [], []
        for point, along in every:
            if (point.rounds, point.rate) == (rounds, rate):
                noise = math.exp(math.log(low) + along * math.log(high / low))
                kappa = heads.deviation(point.spread, rounds) / math.sqrt(rounds)
                group.append(replace(point, lr=float(f"{noise / (kappa * reach * point.paces.sum()):.3g}")))
                noises.append(noise)
        for point, noise, score in zip(group, noises, scores(heads, probe.train(heads, group, SEED), scale)):
            found.append({**asdict(point), "noise": noise, "score": score if math.isfinite(score) else -math.inf})
    return found


def searched(workshop: Workshop, triple: Triple, folder: Path, width: Width) -> dict[str, Any]:
    """The search on a triple, from its file where it is finished."""

    def ready_for(rounds: int, rate: float) -> Prepared:
        settings = {"rounds": rounds, "rate": rate, "lr": 1.0, "clip": 1.0, "evaluate": rounds}
        return workshop.prepared(triple.cell(Asked("", "auto", settings), SEED))

    def make() -> dict[str, Any]:
        classes = workshop.federation(triple.cell(Asked("", "auto", {}), SEED)).classes
        about = {"set": triple.name, "federation": triple.federation, "classes": classes}
        return {**about, "points": search(ready_for, triple.key, width)}

    asked = {**asdict(width), "data": triple.data, "epsilons": triple.epsilons(SEED)}
    return kept(folder / "search" / f"{triple.key}.json", asked, make)


def artificial(folder: Path, epsilon: float, width: Width) -> dict[str, Any]:
    """The same on ten alike clients of an artificial regression set, targets in a range of width 1."""
    whole = data.load(ARTIFICIAL)
    scaled = np.asarray(whole.y, dtype=np.float32) / np.float32(np.ptp(whole.y))
    dealt = replace(whole, y=scaled, test_x=None, test_y=None).partition("iid", clients=10, seed=SEED)
    clients = dealt.with_budgets(epsilon, delta=DELTA)

    def ready_for(rounds: int, rate: float) -> Prepared:
        settings = {"rounds": rounds, "rate": rate, "lr": 1.0, "clip": 1.0, "evaluate": rounds}
        ready = prepare(clients, "auto", "auto", SEED, None, settings)
        if ready.fixed is None:
            return ready
        features = models.apply_fixed(ready.fixed, torch.from_numpy(clients.x)).numpy()
        return replace(ready, clients=replace(clients, x=features))

    def make() -> dict[str, Any]:
        points = search(ready_for, f"{ARTIFICIAL} {epsilon:g}", width)
        return {"set": ARTIFICIAL, "federation": 0, "classes": None, "points": points}

    return kept(folder / "search" / f"{ARTIFICIAL}-{epsilon:g}.json", asdict(width), make)


def settled(workshop: Workshop, triple: Triple, folder: Path, rule: Rule, seeds: Sequence[int]) -> dict[str, Any]:
    """By seed, what ``auto`` chooses by a rule, and the variance that a regression is judged by."""

    def make() -> dict[str, Any]:
        return {str(seed): _settled(workshop, triple, rule, seed) for seed in seeds}

    asked = {"rule": asdict(rule), "data": triple.data, "epsilons": [triple.epsilons(seed) for seed in seeds]}
    return kept(folder / "settled" / f"{triple.key}.json", asked, make)


def _settled(workshop: Workshop, triple: Triple, rule: Rule, seed: int) -> dict[str, Any]:
    clients = workshop.federation(triple.cell(Asked("", "auto", {}), seed))
    assert clients.budgets is not None
    name, options = models.usual(clients.shape, clients.ranged, {})
    template = models.build(name, clients.shape, clients.classes, seed, **options)
    trained = models.split_fixed(template)[1]
    learner = Learner(
        sum(one.numel() for one in trained.parameters()), clients.classes, models.reach(template, clients.shape)
    )
    who = methods.Population(tuple(clients.names), clients.sizes, clients.budgets)
    plan = methods.settle(methods.get("auto"), {}, who, learner, seed, rule)
    training = {key: getattr(plan.training, key) for key in ("rounds", "rate", "lr", "clip", "cooldown")}
    scale = None if clients.classes else variance(clients)
    return {"training": training, "why": plan.why, "variance": scale}


def kept(path: Path, asked: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a file holds where it answers the same question; else it is made, and written whole or not at all."""
    wanted = json.loads(to_json(asked))
    if path.exists():
        held: dict[str, Any] = json.loads(path.read_text())
        if held["asked"] == wanted:
            return dict(held["found"])
    path.parent.mkdir(parents=True, exist_ok=True)
    found = make()
    write_atomic(path, to_json({"asked": wanted, "found": found}, indent=1).encode())
    return dict(json.loads(path.read_text())["found"])
