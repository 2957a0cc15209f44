"""Settings from public facts alone: how many rounds, how large batches, how long steps. No record is looked at.

With a Gaussian mechanism noise adds up so that only the way matters: T steps, each with the noise that T of them need,
leave as much of it as one step of their total length s would. κ is the noise on one coordinate of the weights per unit
of that way,

    κ_i = z_i S/(b_i √(K T)),   κ = √(Σ w_i² κ_i²),

for weights w at the server. R is how far an output moves per unit of the weights (``models.reach``), so s κ R is the
noise on an output at the end. On a benchmark of 24 federations (docs/tuning.md) one number of it was right for all:

    s κ R = 26.3 k^(−0.9) for k classes,  0.13 for targets in a range of width 1 (``Rule``).

Longer ways drown in noise, shorter ones have not learnt yet. In a network of several trained layers the noise on a
weight, s κ, also stays below ``DROWNED`` times the size of the first weights.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sordino.errors import BadInput
from sordino.methods.method import Method
from sordino.methods.plan import Plan, make_plan, noises_of
from sordino.methods.sharing import balanced, wanted
from sordino.methods.training import Population, Training
from sordino.privacy.accounting import calibrate
from sordino.privacy.trust import NOBODY_TRUSTED, Trust, honest
from sordino.privacy.types import Scheme
from sordino.server.projected import budget_shares
from sordino.server.rules import SPREAD
from sordino.server.spread import exchangeable

AUTO = "auto"
CHOSEN = ("rounds", "rate", "lr", "clip", "evaluate")
"""Settings of training that may be ``"auto"``."""

FEWEST, MOST = 200, 1000
"""Rounds: with fewer an average of the last models has too few; 2000 brought nothing beyond 1000 in trials."""

STRIDE = 15.0
"""The longest step of an output in one round, where MOST rounds allow it: longer ones go to and fro."""

LONGEST = 100.0
"""The longest step that is taken at all, however little noise there is."""

DROWNED = 4.0
"""Noise on a network's weights at the end, in sizes of the first ones: trials of four lengths with three small networks
on digits were best at 2 to 7. A first guess."""

RATES = (0.05, 0.1, 0.2, 0.5, 1.0)
SPARED = 1.05
"""The smallest rate is taken whose noise is within this factor of what full batches would have."""

SAME = {"learning_rate": "lr", "batch_size": "batch", "max_grad_norm": "clip", "num_rounds": "rounds"}
"""What settings are called elsewhere."""

SHOWN = 50
"""How often, at most, an automatic run is evaluated by default."""


@dataclass(frozen=True)
class Rule:
    """The fitted numbers: the noise on an output at the end of the way is noise·k^(−power), or ``regression``."""

    noise: float = 26.3
    power: float = 0.9
    regression: float = 0.13

    def target(self, classes: int | None) -> float:
        """s κ R for that many classes (None: regression)."""
        return self.regression if classes is None else self.noise * classes**-self.power


RULE = Rule()


@dataclass(frozen=True)
class Learner:
    """What is public about the model: its d trained parameters, its classes (None: regression), its reach R.

    ``weight`` is the size of a network's first weights; ∞ for a model of one trained layer.
    """

    dimension: int
    classes: int | None
    reach: float
    weight: float = math.inf


def wants_auto(method: Method, given: Mapping[str, Any]) -> bool:
    """Whether any setting is to be chosen: said so by the study, or by the method's own defaults."""
    return any(value == AUTO for value in {**method.defaults, **given}.values() if isinstance(value, str))


def settle(
    method: Method,
    given: Mapping[str, Any],
    population: Population,
    learner: Learner,
    seed: int,
    rule: Rule = RULE,
    noises: Any = None,
    trust: Trust = NOBODY_TRUSTED,
) -> Plan:
    """The plan with every ``"auto"`` among the settings chosen; ``Plan.why`` says why each was chosen as it was.

    ``given`` are the settings of a study; what they leave open the method's defaults say. ``noises``: multipliers of a
    run that goes on. Depends on n_i, ε_i, δ_i, the model's size, classes and reach, ``trust``, and on nothing else.
    """
    wanted = {**{key: value for key, value in method.defaults.items() if not _said(key, given)}, **given}
    auto = {key for key, value in wanted.items() if isinstance(value, str) and value == AUTO}
    if unknown := sorted(auto - set(CHOSEN)):
        raise BadInput(f"training.{unknown[0]} cannot be 'auto': {', '.join(CHOSEN)} can")
    known = {key: value for key, value in wanted.items() if key not in auto}
    _training(known)  # refuses what is wrong before anything is worked out from it
    why: list[str] = []
    if "clip" in auto:
        known["clip"] = 1.0
        why.append("clip 1: " + ("every gradient is brought to it" if not _radius(method) else "the usual radius"))
    if "rounds" in auto:
        known["rounds"], reason = _rounds(method, known, population, learner, rule, trust)
        why.append(reason)
    if "rate" in auto:
        known["rate"], reason = _rate(known, population)
        why.append(reason)
    if "evaluate" in auto:
        known["evaluate"] = max(1, math.ceil(known["rounds"] / SHOWN))
    training = _training({**known, "lr": 1.0} if "lr" in auto else known)
    plan = make_plan(method, training, population, learner.dimension, seed, noises, trust)
    if "lr" in auto:
        rate, reason = _step(plan, learner, rule)
        why.append(reason)
        # Schedules may depend on the step's length, noise multipliers do not.
        plan = make_plan(
            method, replace(training, lr=rate), population, learner.dimension, seed, noises or noises_of(plan), trust
        )
    return replace(plan, why=tuple(why))


def _said(key: str, given: Mapping[str, Any]) -> bool:
    """Whether a study speaks of a setting: a batch size is a rate in other words."""
    return given.get(key) is not None or (key == "rate" and given.get("batch") is not None)


def _training(known: Mapping[str, Any]) -> Training:
    fields = list(Training.__dataclass_fields__)
    if unknown := [key for key in known if key not in fields]:
        near = difflib.get_close_matches(unknown[0], fields, n=1) or [SAME.get(unknown[0], "")]
        hint = f"did you mean {near[0]!r}? " if near[0] else ""
        raise BadInput(f"training.{unknown[0]} is unknown: {hint}known: {', '.join(fields)}")
    return Training(**known)


def _radius(method: Method) -> bool:
    return not method.clip.name.startswith("automatic")


def _least_noise(population: Population, rate: float = 1.0, steps: int = 1) -> NDArray[np.float64]:
    """κ_i of clients that take ``steps`` steps at a rate; full batches have the least, however many steps."""
    sampling = Scheme.FULL if rate >= 1.0 else Scheme.POISSON
    kinds = {(b.epsilon, b.delta, b.adjacency) for b in population.budgets}
    found = {
        kind: float(
            np.asarray(calibrate(kind[0], kind[1], rate, steps, sampling=sampling.value, adjacency=kind[2].value))
        )
        for kind in kinds
    }
    each = np.array([found[b.epsilon, b.delta, b.adjacency] * b.adjacency.sensitivity for b in population.budgets])
    return np.asarray(each / (rate * population.sizes * math.sqrt(steps)))


def _shares(population: Population) -> NDArray[np.float64]:
    return np.asarray(population.sizes / population.sizes.sum())


def _together(
    method: Method, population: Population, noise: NDArray[np.float64], dimension: int, trust: Trust
) -> float:
    """κ of the combined update, by the weights that the method's rule aims at; v√(n/h) where noise is shared."""
    if trust.shared:
        private = noise > 0
        sites, (shares, spread) = int(private.sum()), wanted(method, population, None)
        ratio = sites / honest(sites, trust.colluders, trust.dropouts)
        most = np.divide(1.0, noise, out=np.full(len(noise), np.inf), where=private)
        return balanced(most, shares, spread**2 / dimension, ratio, private)[1] * math.sqrt(ratio)
    weights = exchangeable(noise**2, SPREAD**2 / dimension, _shares(population))
    if method.aggregate.aims == "size":
        weights = _shares(population)
    elif method.aggregate.aims == "budget":
        weights = budget_shares(np.array([b.epsilon for b in population.budgets]))
    return math.sqrt(float((weights**2 * noise**2).sum()))


def _rounds(
    method: Method, known: Mapping[str, Any], population: Population, learner: Learner, rule: Rule, trust: Trust
) -> tuple[int, str]:
    """T: as many as it takes that no round moves an output by more than STRIDE, between FEWEST and MOST."""
    steps = int(known.get("steps") or 1)
    each = _least_noise(population)
    noise = _together(method, population, each, learner.dimension, trust) if method.private else 0.0
    way = rule.target(learner.classes) / noise if noise > 0 else math.inf
    wanted = way / STRIDE / steps
    found = int(min(MOST, max(FEWEST, 50 * math.ceil(min(wanted, MOST) / 50))))
    told = "endless" if math.isinf(way) else f"{way:.3g}"
    return found, f"rounds {found}: outputs may go a way of {told} before noise takes over, at most {STRIDE:g} a round"


def _rate(known: Mapping[str, Any], population: Population) -> tuple[float, str]:
    """q: the smallest of RATES whose noise is close to that of full batches; smaller batches cost less time."""
    steps = int(known["rounds"]) * int(known.get("steps") or 1)
    least = _least_noise(population)
    for rate in RATES:
        if (_least_noise(population, rate, steps) <= SPARED * least).all():
            break
    return rate, f"rate {rate:g}: larger batches would spare less than {SPARED - 1:.0%} of anybody's noise"


def _step(plan: Plan, learner: Learner, rule: Rule) -> tuple[float, str]:
    """η, from the plan's own noise: the way s of all steps, divided by their number and by how they get shorter."""
    training, clients = plan.training, plan.clients
    rounds, steps = plan.schedule.rounds, np.array([c.terms.count for c in clients], dtype=np.float64)
    each = np.array([c.noise * c.terms.adjacency.sensitivity / c.terms.divisor for c in clients])
    if plan.sharing is not None:
        noise = plan.sharing.noise / math.sqrt(rounds)
    else:
        noise = _together(plan.method, plan.population, each / np.sqrt(steps * rounds), learner.dimension, plan.trust)
    if plan.method.select.draws and plan.schedule.select:  # fewer updates are averaged
        fewer = max(1.0, len(clients) / plan.schedule.select)
        noise *= fewer if plan.sharing is not None else math.sqrt(fewer)
    lengths = sum(training.server_rate(number, rounds) for number in range(1, rounds + 1))
    number = float((_shares(plan.population) * steps).sum()) * lengths
    target = rule.target(learner.classes)
    way = (min(target / noise, LONGEST * rounds) if noise > 0 else STRIDE * rounds) / learner.reach
    way = min(way, DROWNED * learner.weight / noise) if noise > 0 else way
    found = float(f"{way / (training.clip * number):.3g}")
    told = f"noise {noise * way * learner.reach:.2g} on an output at the end" if noise > 0 else "no noise"
    return (
        found,
        f"lr {found:g}: {told} (κ = {noise:.2e} a unit of the way, outputs move by {learner.reach:.3g} per unit)",
    )
