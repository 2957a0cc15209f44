"""What a selection rule does, before training: who is drawn how often, what it biases, how much noise it spares."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from sordino.methods import Plan
from sordino.methods.plan import ClientPlan
from sordino.methods.selection import Setting, aware_probabilities, noise_factors
from sordino.privacy.accounting import affordable
from sordino.server import bounds, select

SHADES = ".:-=+*#%@"


def describe_choice(plan: Plan, dimension: int, seed: int = 0) -> dict[str, Any] | None:
    """Probabilities, ‖p−u‖₁, noise on the aggregate against p = u, and all rules ranked by Theorem 2's bound.

    None where everyone takes part. The ranking uses public facts only.
    """
    schedule = plan.schedule
    if schedule.probabilities is None or not plan.method.private:
        return None
    setting = Setting(plan.population, plan.training, plan.method.calibration.accountant, dimension, seed)
    sizes, factors = plan.population.sizes, noise_factors(setting)
    steps = int(np.median([c.terms.count for c in plan.clients]))
    iterations = plan.training.rounds * steps
    shares = select.unbiased(sizes)
    aware = aware_probabilities(setting, None)
    rules: dict[str, Any] = {
        "uniform": select.uniform(len(sizes)),
        "unbiased": shares,
        "unbiased-compensated": (aware, select.compensation(aware, sizes)),
        "privacy-aware": aware,
    }
    ranked = bounds.rank(rules, sizes, factors, dimension, iterations, clip=plan.training.clip)
    clip = plan.training.clip
    return {
        "rule": schedule.rule,
        "probabilities": np.asarray(schedule.probabilities).tolist(),
        "unbiased": shares.tolist(),
        "distance": float(np.abs(schedule.probabilities - shares).sum()),
        "noise": bounds.aggregate_noise(schedule.probabilities, factors, iterations, clip, schedule.importance),
        "noise_unbiased": bounds.aggregate_noise(shares, factors, iterations, clip),
        "last_rounds": select.last_rounds(schedule).tolist(),
        "ranking": [{"rule": r.rule, "bound": r.bound, "bias": r.bias, "noise": r.noise} for r in ranked],
    }


def last_turns(plan: Plan) -> list[int]:
    """By client: the last round whose turn its whole budget pays for under this schedule; 0: never asked, or none.

    Without privacy, and for public data, that is simply the last round in which the client is asked.
    """
    schedule = plan.schedule
    paid = np.array([_paid(c) if plan.method.private else c.turns for c in plan.clients])
    places = schedule.asked.ravel()
    order = np.argsort(places, kind="stable")  # by client, and by round within a client
    first, end = (np.searchsorted(places[order], np.arange(len(paid)), side) for side in ("left", "right"))
    at = np.minimum(first + paid, end) - 1
    found = order[np.maximum(at, 0)] // schedule.asked.shape[1] + 1
    return [int(one) for one in np.where(at >= first, found, 0)]


def _paid(client: ClientPlan) -> int:
    """How many of its planned turns a client's budget pays: all of them unless a published rule picked the noise."""
    if client.budget.is_public or client.epsilon <= client.budget.epsilon:
        return client.turns
    events, times = client.declaration()
    paid = affordable(events, client.budget, times)
    return client.turns * paid if client.whole else paid


def show_choice(plan: Plan, found: dict[str, Any]) -> list[Table | Text | str]:
    """The same for the terminal: a scatter of p against size and ε (Figure 3 of the paper), and the ranking."""
    ratio = math.sqrt(found["noise_unbiased"] / found["noise"]) if found["noise"] > 0 else math.inf
    lines: list[Table | Text | str] = [
        f"[bold]selection[/bold] {found['rule']}: ‖p−u‖₁ = {found['distance']:.3f}; the noise on the aggregate is "
        f"{ratio:.2f} times smaller (deviation) than with p = u"
    ]
    epsilons = np.array([c.budget.epsilon for c in plan.clients])
    finite = np.isfinite(epsilons)
    if finite.any():
        chance = np.array(found["probabilities"]) / np.array(found["unbiased"])
        lines.append(_scatter(epsilons[finite], plan.population.sizes[finite], chance[finite]))
    table = Table(title="rules by the bound of Theorem 2 (before training)", box=SIMPLE_HEAD, header_style="bold")
    for column in ("rule", "bound", "bias ‖q−u‖₁", "noise variance"):
        table.add_column(column, justify="left" if column == "rule" else "right")
    for row in found["ranking"]:
        table.add_row(row["rule"], f"{row['bound']:.3g}", f"{row['bias']:.3f}", f"{row['noise']:.3g}")
    return [*lines, table]


def _scatter(x: NDArray[np.float64], y: NDArray[np.int64], value: NDArray[np.float64]) -> Text:
    """Clients as characters, darker where p/u is larger: ε to the right, records upwards."""
    width, height = 60, 12
    grid = [[" "] * width for _ in range(height)]
    columns = _place(x.astype(np.float64), width)
    rows = height - 1 - _place(y.astype(np.float64), height)
    shade = _place(np.log(np.maximum(value, 1e-6)), len(SHADES))
    for order in np.argsort(value):
        grid[rows[order]][columns[order]] = SHADES[shade[order]]
    body = "\n".join("  │" + "".join(row) for row in grid)
    low, high = value.min(), value.max()
    legend = f"  └{'─' * width} ε {x.min():.2g} … {x.max():.2g}\n  records {y.min()} … {y.max()} upwards; "
    return Text(f"{body}\n{legend}{SHADES[0]} p = {low:.2g}·u … {SHADES[-1]} p = {high:.2g}·u")


def _place(values: NDArray[np.float64], cells: int) -> NDArray[np.int64]:
    span = values.max() - values.min()
    share = (values - values.min()) / span if span > 0 else np.full(len(values), 0.5)
    return np.minimum((share * cells).astype(np.int64), cells - 1)
