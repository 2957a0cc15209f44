"""What a plan's schedule and budgets do, before training: who is drawn how often, until when, and with what noise.

``explore`` says what another ε of one client would do: noise is calibrated on a grid of budgets for every client that
differs in anything that matters, so that a page can interpolate between them. Everything here comes from public facts;
no record is touched.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sordino.errors import BadInput
from sordino.methods import Plan, make_plan
from sordino.methods.plan import ClientPlan
from sordino.methods.selection import Setting, noise_factors
from sordino.methods.sharing import wanted
from sordino.privacy.accounting import calibrate_events
from sordino.privacy.trust import words
from sordino.privacy.types import Budget
from sordino.server import bounds, select
from sordino.study.choice import _steps
from sordino.study.sharing import describe_sharing

POINTS = 21
"""Budgets on the grid, evenly spaced in ln ε."""

EXPLORED = 60
"""Most clients with a slider; of more, evenly many by budget."""

Array = NDArray[np.float64]


def explore(plan: Plan, dimension: int, seed: int = 0) -> dict[str, Any]:
    """The grid, every client as planned, and for the explored ones z(ε) on the grid (and p(ε), bound(ε) where drawn).

    The grid goes from a third of the strictest budget (at most 0.1) to three times the loosest (at least 10).
    ``deviation`` is the noise of one coordinate of a client's update, ``ratio`` that noise over the largest signal,
    z S √d/(b √K), and ``factor`` is V_k = (z S/b)²/(T_k K) = ratio²/(d T_k), with T_k at least 1.
    """
    finite = [c.budget.epsilon for c in plan.clients if not c.budget.is_public] or [1.0]
    grid = np.geomspace(min(0.1, min(finite) / 3), max(10.0, 3 * max(finite)), POINTS)
    places = _explored(plan)
    asked = _as_asked(plan, dimension, seed)
    shapes, accountant = _noises(asked, places, grid)
    curves = {place: _with_own(asked, place, grid, noises) for place, noises in shapes.items()}
    deviations, ratios = np.sqrt(plan.variances()), plan.noise_to_signal(dimension)
    return {
        "range": [float(grid[0]), float(grid[-1])],
        "accountant": accountant,
        "strictest": plan.method.calibrate.strictest,
        "follows": _weighting(plan),
        "rounds": plan.training.rounds,
        "iterations": plan.training.rounds * _steps(plan),
        "dimension": dimension,
        "unit": plan.clients[0].budget.unit,
        "clients": [
            {
                "name": c.name,
                "records": c.records,
                "epsilon": None if c.budget.is_public else c.budget.epsilon,
                "noise": c.noise,
                "deviation": float(deviations[place]),
                "ratio": float(ratios[place]),
                "factor": float(ratios[place]) ** 2 / (dimension * max(1, c.turns)),
                "turns": c.turns,
                **dict(zip(("grid", "noises"), curves.get(place, (None, None)))),
            }
            for place, c in enumerate(plan.clients)
        ],
        "drawn": None if plan.sharing is not None else _drawn(plan, dimension, seed, curves),
        "sharing": _sharing(plan, dimension, seed, asked),
    }


def _as_asked(plan: Plan, dimension: int, seed: int) -> Plan:
    """The plan with the noise that every budget asks for: shared noise may give more, for one level protects all.

    Turns stay those of the plan, repeated ones included.
    """
    if plan.sharing is None:
        return plan
    alone = make_plan(plan.method, plan.training, plan.population, dimension, seed)
    pairs = zip(alone.clients, plan.clients, strict=True)
    clients = tuple(replace(own, turns=c.turns, queries=c.queries) for own, c in pairs)
    targets = [_target(plan, c) for c in clients]
    by = "pld" if plan.method.calibrate.accountant == "wor-paper" else plan.method.calibrate.accountant
    scales = calibrate_events([c.total(max(1, c.turns)) for c in clients], targets, accountant=by).tolist()
    return replace(alone, clients=tuple(_louder(c, scale) for c, scale in zip(clients, scales)))


def _target(plan: Plan, client: ClientPlan) -> Budget:
    """The budget that a client's noise is calibrated for: its own, or the strictest of all."""
    least = min(c.budget.epsilon for c in plan.clients) if plan.method.calibrate.strictest else math.inf
    return Budget(min(least, client.budget.epsilon), client.budget.delta, client.budget.adjacency)


def _louder(client: ClientPlan, scale: float) -> ClientPlan:
    """The client with every multiplier so many times as large."""
    terms = [replace(t, parts=tuple((name, z * scale) for name, z in t.parts)) for t in (client.terms, *client.asks)]
    return replace(client, terms=terms[0], asks=tuple(terms[1:]))


def _sharing(plan: Plan, dimension: int, seed: int, asked: Plan) -> dict[str, Any] | None:
    """What the page needs to solve for weights and noise again, with other colluders, dropouts or budgets.

    ``reach`` is b_i/S: a_i = reach_i/z_i is the largest weight per unit of v. ``stretch``: how much more noise a round
    of the schedule has than one in which everybody takes part.
    """
    found, sharing = describe_sharing(plan, dimension, seed), plan.sharing
    if found is None or sharing is None:
        return None
    shares, spread = wanted(plan.method, plan.population, plan.schedule)
    return {
        **{key: found[key] for key in ("sites", "colluders", "dropouts", "noise_per_site")},
        "words": [words(sharing.sites, count) for count in range(sharing.sites)],
        "needs": [None if c.budget.is_public else c.noise for c in asked.clients],
        "reach": [c.terms.divisor / c.terms.adjacency.sensitivity for c in plan.clients],
        "shares": shares.tolist(),
        "spread": spread**2 / dimension,
        "rounds": plan.schedule.rounds,
        "stretch": found["noise"] / sharing.noise,
        "scale": plan.training.lr * plan.training.clip,
    }


def _weighting(plan: Plan) -> str | None:
    """Which of the page's weightings the plan follows: "shared", or its rule's "size", "budget", "least", or None."""
    if plan.sharing is not None:
        return "shared"
    aims = plan.method.aggregate.aims
    return aims if aims in ("size", "budget", "least") else None


def _explored(plan: Plan) -> list[int]:
    """Clients with one finite budget and noise to calibrate, strictest first; evenly thinned where there are many."""
    if not plan.method.private:
        return []
    able = [place for place, c in enumerate(plan.clients) if not c.budget.is_public and c.noise > 0 and not c.levels]
    able.sort(key=lambda place: plan.clients[place].budget.epsilon)
    return [able[i] for i in np.unique(np.linspace(0, len(able) - 1, min(len(able), EXPLORED)).round().astype(int))]


def _noises(plan: Plan, places: list[int], grid: Array) -> tuple[dict[int, list[float]], str]:
    """z(ε) of the explored clients, by the plan's way to pick noise where that reaches the grid, else by PLD."""
    distinct: dict[Any, int] = {}
    for place in places:
        distinct.setdefault(_shape(plan.clients[place]), place)
    leads = [plan.clients[place] for place in distinct.values()]
    templates = [lead.total(max(1, lead.turns)) for lead in leads for _ in grid]
    targets = [Budget(float(e), lead.budget.delta, lead.budget.adjacency) for lead in leads for e in grid]
    by = "pld" if plan.method.calibrate.accountant == "wor-paper" else plan.method.calibrate.accountant
    if not leads:
        return {}, by
    try:
        scales = calibrate_events(templates, targets, accountant=by)
    except BadInput:
        by, scales = "pld", calibrate_events(templates, targets)
    table = scales.reshape(len(leads), len(grid)) * np.array([[lead.noise] for lead in leads])
    rows = dict(zip(distinct, table.tolist()))
    return {place: rows[_shape(plan.clients[place])] for place in places}, by


def _with_own(plan: Plan, place: int, grid: Array, noises: list[float]) -> tuple[list[float], list[float]]:
    """The grid with the budget that the plan calibrated for among its points, so that the page agrees with the plan."""
    client = plan.clients[place]
    own = _target(plan, client).epsilon
    near = math.exp(float(np.interp(math.log(own), np.log(grid), np.log(noises))))
    if abs(client.noise / near - 1) > 0.03:  # picked by a rule that the grid does not follow
        return grid.tolist(), noises
    pairs = {**dict(zip(grid.tolist(), noises)), own: client.noise}
    return sorted(pairs), [pairs[epsilon] for epsilon in sorted(pairs)]


def _shape(client: ClientPlan) -> tuple[Any, ...]:
    """What noise depends on beside ε: the events with their relative noises, δ, adjacency."""
    events = client.total(max(1, client.turns))
    relative = tuple((e.what, e.sampling, e.count, round(e.noise / client.noise, 12)) for e in events)
    return (relative, client.budget.delta, client.budget.adjacency)


def _drawn(
    plan: Plan, dimension: int, seed: int, curves: dict[int, tuple[list[float], list[float]]]
) -> dict[str, Any] | None:
    """Where clients are drawn: p, and for each explored client p_k(ε), the bound and the noise's deviation on its grid.

    Privacy-aware probabilities are solved again at every point, where the rule is the one with the default weight.
    """
    schedule = plan.schedule
    if schedule.probabilities is None or schedule.caps is not None or not plan.method.private:
        return None
    setting = Setting(plan.population, plan.training, plan.method.calibrate.accountant, dimension, seed)
    sizes, iterations = plan.population.sizes, plan.training.rounds * _steps(plan)
    weight = select.default_weight(dimension, plan.training.rounds, _steps(plan))
    factors = noise_factors(setting)
    planned = np.asarray(schedule.probabilities)
    solved = schedule.rule in ("privacy-aware", "unbiased-compensated")
    solved = solved and bool(np.allclose(select.privacy_aware(sizes, factors, weight), planned, atol=1e-6))

    def figures(noise: Array, place: int) -> tuple[float, float, float]:
        p = select.privacy_aware(sizes, noise, weight) if solved else planned
        rule: Any = (p, select.compensation(p, sizes)) if schedule.rule == "unbiased-compensated" else p
        (one,) = bounds.rank({"": rule}, sizes, noise, dimension, iterations, clip=plan.training.clip)
        return float(p[place]), one.bound, math.sqrt(one.noise)

    found: dict[str, list[list[float]]] = {}
    for place, (_, noises) in curves.items():
        changed = np.tile(factors, (len(noises), 1))
        changed[:, place] *= (np.array(noises) / plan.clients[place].noise) ** 2
        found[str(place)] = [list(column) for column in zip(*(figures(row, place) for row in changed))]
    return {
        "rule": schedule.rule,
        "select": setting.select,
        "solved": solved,
        "figures": found,
    }
