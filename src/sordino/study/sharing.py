"""What sharing noise brings and what it costs, before training: noise per site beside noise shared, by public facts.

All noise here is the deviation on one coordinate of a round's combined mean gradient, per unit of the clip:
√(Σ w²(zS/b)²) with noise per site at the method's own weights, and share·v·√k/Σw where k of the sites that share it
take part, their weights Σw. Rounds with different participants are averaged by their squares. What one more colluder or
lost site costs is √(h/(h − 1)): all shares together have n/h times the variance that anybody needs (``privacy.trust``).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import RenderResult
from rich.table import Table

from sordino.engine import rounds
from sordino.errors import BadInput
from sordino.methods import Plan, make_plan
from sordino.methods import sharing as sharing_of
from sordino.privacy.accounting import composed_epsilon
from sordino.privacy.trust import SHARED, Shared, Trust, honest, words
from sordino.server.columns import inverse_weights
from sordino.server.facts import ServerState
from sordino.server.select import Schedule

LOOKED_AT = 50
"""Rounds whose noise is averaged, evenly over the run."""

SHOWN = 8
"""Rows of the table of further colluders in the terminal."""

Array = NDArray[np.float64]


def describe_sharing(plan: Plan, dimension: int, seed: int = 0) -> dict[str, Any] | None:
    """How the plan shares noise, client by client and in all, beside noise per site; None where nothing is shared.

    ``own_epsilon`` is what a site's own share of the noise promises if everybody else conspires with the server.
    ``more``: h and the factor of the noise on the sum, with 1, 2, … further sites that conspire or are lost, weights
    and multipliers as planned.
    """
    sharing = plan.sharing
    if sharing is None:
        return None
    first, trust, left = sharing.releases[0], sharing.trust, sharing.honest
    alone = make_plan(plan.method, plan.training, plan.population, dimension, seed)
    weights = np.array(first.weights)
    noise = _noise_shared(plan, plan.schedule, weights, first.parts[0].level / math.sqrt(left))
    apart = _noise_per_site(alone, dimension)
    own = composed_epsilon(
        [[e.alone() for e in c.total()] for c in plan.clients], [c.budget.delta for c in plan.clients]
    )
    return {
        "against": Shared(sharing.sites, trust.colluders, trust.dropouts, 1.0, 1).words(),
        "sites": sharing.sites,
        "colluders": trust.colluders,
        "dropouts": trust.dropouts,
        "honest": left,
        "noise": noise,
        "noise_per_site": apart,
        "factor": apart / noise,
        "clients": [
            {
                "client": c.name,
                "noise_per_site": before.noise,
                "noise": c.noise,
                "weight": weight,
                "planned_epsilon": c.epsilon,
                "own_epsilon": float(cost),
            }
            for c, before, weight, cost in zip(plan.clients, alone.clients, weights.tolist(), own)
        ],
        "more": [
            {"more": count, "honest": left - count, "factor": math.sqrt(left / (left - count))}
            for count in range(1, left)
        ],
    }


def if_shared(plan: Plan, dimension: int) -> dict[str, Any] | None:
    """What sharing would bring to a plan with noise per site, half of all sites conspiring; None where it cannot be.

    The multipliers that budgets need are the plan's own, so nothing is calibrated for this.
    """
    if plan.sharing is not None or len(plan.clients) < 3 or any(c.levels for c in plan.clients):
        return None
    schedule, population = plan.schedule, plan.population
    try:
        sharing_of.check(plan.method, [c.terms.count for c in plan.clients], population)
        schedule = sharing_of.distinct(schedule)
        sites = sharing_of.fewest(schedule, population)
    except BadInput:
        return None
    if sites < 3:
        return None
    trust = Trust(SHARED, colluders=sites // 2)
    left = honest(sites, trust.colluders)
    means = np.array([_noise_on_mean(plan, place) for place in range(len(plan.clients))])
    most = np.divide(1.0, means, out=np.full(len(means), math.inf), where=means > 0)
    shares, spread = sharing_of.wanted(plan.method, population, schedule)
    ratio = sites / (left * schedule.rounds)
    weights, level = sharing_of.balanced(most, shares, spread**2 / dimension, ratio, means > 0)
    noise, apart = _noise_shared(plan, schedule, weights, level / math.sqrt(left)), _noise_per_site(plan, dimension)
    return {
        "against": words(sites, trust.colluders),
        "sites": sites,
        "colluders": trust.colluders,
        "noise": noise,
        "noise_per_site": apart,
        "factor": apart / noise,
    }


def warnings_of(plan: Plan) -> list[str]:
    """What looks wrong with a choice of trust."""
    if plan.sharing is None:
        return []
    found, left = [], plan.sharing.honest
    told = f"{plan.sharing.sites} sites, {plan.trust.colluders} colluders, {plan.trust.dropouts} dropouts"
    if left == 1:
        found.append(
            f"nothing is shared ({told}): every site adds all of its noise; trust.noise = 'per-site' promises the same "
            "and needs no masks"
        )
    elif plan.trust.colluders == 0:
        weaker = 100 * (1 - math.sqrt((left - 1) / left))
        found.append(
            "trust.colluders = 0: any site that conspires with the server breaks the promise to all others (one leaves "
            f"{weaker:.2g} % less noise than promised); set how many may"
        )
    return found


def _noise_on_mean(plan: Plan, place: int) -> float:
    """z S/b of one client's averaged gradient, per unit of the clip, as if all of z were its own."""
    client = plan.clients[place]
    return client.noise * client.terms.adjacency.sensitivity / client.terms.divisor


def _some_rounds(schedule: Schedule) -> list[int]:
    found = np.linspace(1, schedule.rounds, min(LOOKED_AT, schedule.rounds))
    return [int(one) for one in np.unique(found.round())]


def _noise_per_site(plan: Plan, dimension: int) -> float:
    """√(mean over rounds of Σ w²(zS/b)²), w by the method's own rule."""
    rule, course = plan.method.aggregate, rounds.Course(plan, (("weights", (dimension,), 0),))
    sent, found = rounds.broadcast(plan, ServerState()), []
    each = np.array([_noise_on_mean(plan, place) for place in range(len(plan.clients))])
    for number in _some_rounds(plan.schedule):
        about = rounds.facts(course, plan.schedule.round(number), number, sent)
        weights = inverse_weights(about.variances) if rule.weights is None else rule.weights(about)
        found.append(float(((weights / weights.sum() * each[about.clients]) ** 2).sum()))
    return math.sqrt(float(np.mean(found)))


def _noise_shared(plan: Plan, schedule: Schedule, weights: Array, own: float) -> float:
    """√(mean over rounds of k own²/(Σw)²): ``own`` is one site's noise, k of them take part, their weights Σw."""
    private = np.array([not c.budget.is_public for c in plan.clients])
    found = []
    for number in _some_rounds(schedule):
        here = schedule.round(number).clients
        found.append(float(private[here].sum()) * own**2 / float(weights[here].sum()) ** 2)
    return math.sqrt(float(np.mean(found)))


# ---- in the terminal ----


def render_sharing(found: dict[str, Any], shown: int) -> RenderResult:
    """Noise per site beside noise shared, and what further colluders cost; of the clients, the first ``shown``."""
    yield (
        f"[bold]shared noise[/bold] on one coordinate of the mean gradient, per unit of clip: "
        f"{found['noise_per_site']:.3g} with noise per site, {found['noise']:.3g} shared, "
        f"[bold]{found['factor']:.3g} times less[/bold]"
    )
    table = Table(box=SIMPLE_HEAD, header_style="bold")
    table.add_column("client", overflow="fold")
    for column in ("z\nper site", "z\nof the sum", "weight", "planned ε", "own ε"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in found["clients"][:shown]:
        table.add_row(
            one["client"],
            f"{one['noise_per_site']:.3f}",
            f"{one['noise']:.3f}",
            f"{100 * one['weight']:.1f} %",
            _epsilon(one["planned_epsilon"]),
            _epsilon(one["own_epsilon"]),
        )
    yield table
    yield "own ε: what a site's own share of the noise promises if all others conspire with the server"
    yield from _more(found)


def _more(found: dict[str, Any]) -> RenderResult:
    """What one more colluder or lost site costs, and two, and so on: a few rows, the last one always."""
    rows = found["more"]
    if not rows:
        return
    places = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), SHOWN)).round().astype(int))
    yield f"each further site that conspires (planned: {found['colluders']}) or is lost ({found['dropouts']}) costs:"
    table = Table(box=SIMPLE_HEAD, header_style="bold")
    for column in ("sites more", "shares that count", "noise on the sum"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in (rows[place] for place in places):
        table.add_row(f"+{one['more']}", str(one["honest"]), f"× {one['factor']:.3f}")
    yield table


def _epsilon(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:.4g}"
