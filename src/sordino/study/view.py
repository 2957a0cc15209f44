"""A plan as a person reads it: what every client will spend and add, what it costs, what looks wrong."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from sordino.client.gradients import LayerPlan
from sordino.data.budgets import LARGE
from sordino.methods import Plan
from sordino.privacy.trust import EVERYBODY
from sordino.privacy.types import RECORD
from sordino.study.choice import describe_choice, last_turns
from sordino.study.evaluated import describe_evaluation, evaluation_warnings, render_evaluation
from sordino.study.levels import levels_table, levels_warnings, planned_levels
from sordino.study.sharing import describe_sharing, if_shared, render_sharing, warnings_of
from sordino.study.show import Sheet, told
from sordino.study.traffic_told import render_traffic

SHADES = ".:-=+*#%@"
SHOWN = 30
"""Clients listed in a terminal; what is piped lists all."""


def _number(value: float, form: str) -> str:
    return "∞" if math.isinf(value) else f"{value:{form}}"


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "client": lambda c: c["client"],
    "n": lambda c: str(c["records"]),
    "ε": lambda c: _number(c["epsilon"], ".4g"),
    "δ": lambda c: f"{c['delta']:.3g}",
    "rate": lambda c: f"{c['rate']:.4g}",
    "steps × turns": lambda c: f"{c['steps']}×{c['turns']}",
    "last round": lambda c: str(c["last_round"] or "–"),
    "noise z": lambda c: f"{c['noise']:.3f}",
    "planned ε": lambda c: _number(c["planned_epsilon"], ".4g"),
    "noise / signal": lambda c: f"{c['noise_to_signal']:.2f}",
}
"""What the terminal shows of a client."""
SAID_ONCE = ("n", "δ", "rate", "steps × turns", "last round")
"""Columns that a line below the table can stand for."""


def _plain(value: Any) -> Any:
    """A number as people write it; anything else as it is."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _apart(columns: dict[str, list[str]]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The columns to show, and what all clients have in common: a narrow terminal has no room to say it of each."""
    alike = {name: columns[name][0] for name in SAID_ONCE if len(set(columns[name])) == 1 < len(columns[name])}
    return {name: values for name, values in columns.items() if name not in alike}, alike


@dataclass(frozen=True)
class PlanView:
    """What ``sd.plan`` returns: the plan, and ways to look at it."""

    plan: Plan
    dimension: int
    layers: list[LayerPlan]
    seed: int = 0
    tuning: dict[str, Any] | None = None
    """What it costs to try several settings (``[tune]``), as ``Search.describe`` tells it; None where one is tried."""
    deployment: dict[str, Any] | None = None
    """Bytes and hours of a deployed run, as ``describe_traffic`` tells it; None where the study names no sites."""

    @cached_property
    def clients(self) -> list[dict[str, Any]]:
        """Per client: records, budget, rate, steps, turns, noise, planned ε, noise over the largest signal.

        ``last_round`` is the last round whose turn the budget pays for: after it the client is not asked again. Where
        records have levels of consent, ``levels`` says all this of each, and ε is what holds for every record.
        """
        ratios = self.plan.noise_to_signal(self.dimension)
        return [
            {
                "client": c.name,
                "records": c.records,
                "epsilon": c.widest[0].epsilon,
                "delta": c.budget.delta,
                "rate": c.terms.sampling.rate,
                "batch": c.terms.divisor,
                "steps": c.terms.count,
                "turns": c.turns,
                "noise": c.noise,
                "planned_epsilon": c.widest[1],
                "noise_to_signal": float(r),
                "last_round": last,
                **({"levels": planned_levels(c)} if c.levels else {}),
            }
            for c, r, last in zip(self.plan.clients, ratios, last_turns(self.plan))
        ]

    @property
    def noise_on_aggregate(self) -> float:
        """Standard deviation of the noise on one coordinate of the size-weighted mean update of a full round.

        Where noise is shared, of the weighted sum that the server sees.
        """
        if self.sharing is not None:
            return float(self.plan.training.lr * self.plan.training.clip * self.sharing["noise"])
        sizes = self.plan.population.sizes / self.plan.population.sizes.sum()
        return float(np.sqrt((sizes**2 * self.plan.variances()).sum()))

    @property
    def gradients(self) -> float:
        """Expected number of per-record gradients of the whole run."""
        return float(sum(c.turns * c.terms.count * c.terms.divisor for c in self.plan.clients))

    @property
    def unit(self) -> str:
        """What is protected as one: a record, or somebody with several."""
        return self.plan.clients[0].budget.unit if self.plan.clients else RECORD

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of training that were settled: given, the method's own, chosen automatically, or defaults.

        Without those that the table of clients shows (batches, rates, steps) and those that are off.
        """
        shown = dataclasses.asdict(self.plan.training)
        off = {key for key in ("select", "exact_noise", "augment") if not shown[key]}
        left = {"batch", "rate", "steps", "epochs"} | off
        return {key: _plain(value) for key, value in shown.items() if key not in left}

    @property
    def why(self) -> tuple[str, ...]:
        """What was chosen automatically, and why."""
        return self.plan.why

    @property
    def _sets_steps(self) -> bool:
        """Whether steps were chosen automatically: they are then as long as the noise of all rounds allows."""
        return any(line.startswith("lr ") for line in self.why)

    @property
    def warnings(self) -> list[str]:
        """What looks wrong: promises that mean little, updates that are mostly noise, clients that are never asked."""
        found, method, select = [], self.plan.method, self.plan.training.select
        if not method.private:
            found.append(f"NOT PRIVATE: {method.name} adds no noise and spends no budget; budgets are ignored")
        elif not self.plan.private:
            found.append("NOT PRIVATE: every client's ε is infinite, so nobody's records are protected")
        found += warnings_of(self.plan) + evaluation_warnings(self.evaluation) + levels_warnings(self.plan)
        for c in self.clients:
            who, epsilon = c["client"], c["epsilon"]
            if LARGE < epsilon < math.inf:
                found.append(f"{who}'s ε={epsilon:g} promises next to nothing: about 0.1 to 10 mean something")
            if c["noise_to_signal"] > 10 and not self._sets_steps and self.plan.sharing is None:
                found.append(
                    f"{who}'s update will be {c['noise_to_signal']:.0f} times more noise than signal "
                    f"(ε={epsilon:g}, batch {c['batch']:g}): a larger batch or more steps help"
                )
            if method.private and c["planned_epsilon"] > epsilon * (1 + 1e-9):
                found.append(
                    f"{who}'s noise was picked by {method.calibrate.by!r} and would spend "
                    f"ε={c['planned_epsilon']:.3g} of {epsilon:g}: its ledger will refuse the later rounds"
                )
            if c["delta"] > 1 / c["records"]:
                found.append(f"{who}'s δ={c['delta']:g} is above 1/n=1/{c['records']}: one {self.unit} may leak whole")
        if (select or 0) > len(self.clients):
            found.append(f"select={select} of {len(self.clients)}: some have two turns a round")
        idle = [c["client"] for c in self.clients if c["turns"] == 0]
        if idle:
            found.append(f"never asked under this schedule: {', '.join(idle)}")
        return found

    @cached_property
    def selection(self) -> dict[str, Any] | None:
        """What the selection rule does, as ``describe_choice`` tells it; None where everyone takes part."""
        return describe_choice(self.plan, self.dimension, self.seed)

    @cached_property
    def sharing(self) -> dict[str, Any] | None:
        """Noise per site beside noise shared, as ``describe_sharing`` tells it; None where every site adds its own."""
        return describe_sharing(self.plan, self.dimension, self.seed)

    @cached_property
    def evaluation(self) -> dict[str, Any] | None:
        """What paid evaluations will tell and cost, as ``describe_evaluation`` tells it; None where there are none."""
        return describe_evaluation(self.plan)

    @cached_property
    def if_shared(self) -> dict[str, Any] | None:
        """What sharing noise would bring, where it is not shared and could be."""
        return if_shared(self.plan, self.dimension)

    @property
    def trust(self) -> str | None:
        """Whom planned ε holds against, in words; None where nothing is promised."""
        if not self.plan.private:
            return None
        return EVERYBODY if self.sharing is None else str(self.sharing["against"])

    @property
    def engine(self) -> str:
        """The ways to per-record gradients, by kind of layer."""
        return ", ".join(sorted({f"{layer.kind}: {layer.method}" for layer in self.layers}))

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values."""
        return {
            "method": {"name": self.plan.method.name, **self.plan.method.describe()},
            "private": self.plan.private,
            "unit": self.unit,
            "rounds": self.plan.training.rounds,
            "parameters": self.dimension,
            "clients": self.clients,
            "noise_on_aggregate": self.noise_on_aggregate,
            "trust": self.trust,
            "sharing": self.sharing,
            "if_shared": self.if_shared,
            "evaluation": self.evaluation,
            "tuning": self.tuning,
            "deployment": self.deployment,
            "gradients": self.gradients,
            "layers": [layer._asdict() for layer in self.layers],
            "selection": self.selection,
            "training": dataclasses.asdict(self.plan.training),
            "auto": list(self.why),
            "warnings": self.warnings,
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        plan, shown = self.plan, SHOWN if console.is_terminal else len(self.clients)
        yield told(plan.method.summary or "a method of your own", "bold", f"{plan.method.name}:")
        parts = plan.method.describe().items()
        yield Text("  ") + Text(", ").join(Text(f"{part} ").append(name, "cyan") for part, name in parts)
        columns, common = _apart({name: [form(c) for c in self.clients] for name, form in COLUMNS.items()})
        table = Sheet(tuple(columns), title=f"{len(plan.clients)} clients, {plan.training.rounds} rounds")
        for row in itertools.islice(zip(*columns.values()), shown):
            table.add_row(*row)
        yield table
        if self.unit != RECORD:
            yield (
                f"n counts [bold]{self.unit}s[/bold]: each is drawn, clipped and protected as one, with all of its "
                "records at a client"
            )
        if (levels := levels_table(self.clients, SHOWN)) is not None:
            yield levels
        if self.trust is not None:
            yield f"planned ε holds [bold]{self.trust}[/bold]" + ("" if self.sharing is None else ": noise is shared")
        yield "settings: " + ", ".join(f"{key} {value}" for key, value in self.settings.items())
        for line in self.why:
            yield told(line, "bold", "auto")
        if common:
            yield told("every client: " + ", ".join(f"{name} {value}" for name, value in common.items()))
        if len(self.clients) > shown:
            yield f"and {len(self.clients) - shown} more clients: --json and --csv list all"
        yield (
            f"noise on one coordinate of the aggregate: {self.noise_on_aggregate:.2e} a round; "
            f"{self.gradients:,.0f} per-{self.unit} gradients of {self.dimension:,} parameters"
        )
        if self.sharing is not None:
            yield from render_sharing(self.sharing, shown)
        elif self.if_shared is not None:
            yield (
                f"[dim]if the server saw only the sum of updates, {self.if_shared['factor']:.2g} times less noise "
                f'would do with half of all sites conspiring: \\[trust] noise = "shared", '
                f"colluders = {self.if_shared['colluders']}[/dim]"
            )
        yield from _choice(plan, self.selection) if self.selection else ()
        yield from render_evaluation(self.evaluation, shown) if self.evaluation else ()
        yield from render_traffic(self.deployment, shown) if self.deployment else ()
        yield f"gradient engine: {self.engine}"
        for warning in self.warnings[:12]:
            yield told(warning, "yellow", "warning")
        if len(self.warnings) > 12:
            yield told(f"and {len(self.warnings) - 12} more warnings: --json lists all", "yellow")


def _choice(plan: Plan, found: dict[str, Any]) -> RenderResult:
    """Who is drawn: a scatter of p against size and ε (Figure 3 of the paper), and the rules ranked by their bound."""
    ratio = math.sqrt(found["noise_unbiased"] / found["noise"]) if found["noise"] > 0 else math.inf
    yield (
        f"[bold]selection[/bold] {found['rule']}: ‖p−u‖₁ = {found['distance']:.3f}; the noise on the aggregate is "
        f"{ratio:.2f} times smaller (deviation) than with p = u"
    )
    epsilons = np.array([c.budget.epsilon for c in plan.clients])
    finite = np.isfinite(epsilons)
    if finite.any():
        chance = np.array(found["probabilities"]) / np.array(found["unbiased"])
        yield _scatter(epsilons[finite], plan.population.sizes[finite], chance[finite])
    title = "rules by the bound of Theorem 2 (before training)"
    table = Sheet(("rule", "bound", "bias ‖q−u‖₁", "noise variance"), title=title)
    for row in found["ranking"]:
        table.add_row(row["rule"], f"{row['bound']:.3g}", f"{row['bias']:.3f}", f"{row['noise']:.3g}")
    yield table


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
