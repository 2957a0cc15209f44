"""Selection as a part of a method: who takes part in which round, settled before training (R6)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sordino.errors import BadInput
from sordino.made import Made, part
from sordino.methods.training import Population, Training
from sordino.privacy.accounting import calibrate
from sordino.server import select
from sordino.server.select import Schedule


@dataclass(frozen=True)
class Setting:
    """What a selection rule may look at: public facts and settings, never records."""

    population: Population
    training: Training
    accountant: str
    dimension: int
    seed: int

    @property
    def select(self) -> int:
        """N_select: participations a round. Default: a tenth of the clients."""
        return self.training.select or max(1, len(self.population.names) // 10)

    def only(self, some: NDArray[np.bool_]) -> Setting:
        """The same setting, as if only some of the clients were there."""
        return replace(self, population=self.population.only(some), training=self.training.only(some))


@dataclass(frozen=True)
class Candidates:
    """What a selection rule may look at in a round, once its candidates have answered.

    ``clients``: the index of each candidate; ``answers``: their released answers by question, an entry a candidate;
    ``taken``: how many turns every client of the study has taken so far; ``schedule``: the whole schedule.
    """

    clients: NDArray[np.int64]
    answers: Mapping[str, NDArray[np.float64]]
    taken: NDArray[np.int64]
    schedule: Schedule
    round: int


@dataclass(frozen=True)
class Selection:
    """A selection rule: who takes part in which round.

    Attributes
    ----------
    name: what plans and reports call it.
    schedule: setting → who is asked in which round, settled before training.
    headroom: how many more turns than scheduled each client's noise is calibrated for, so that counts may adapt.
    resolve: new probabilities for the clients that can still pay; None: the schedule stays as drawn.
    choose: for a rule that picks participants by released answers: candidates → the places, among them, of those who
        train. The schedule then asks candidates and caps their turns (``Schedule.caps``).
    needs: the questions that ``choose`` uses, which candidates must be asked first.
    draws: whether it draws ``training.select`` clients a round.
    made: the factory and options that made it, set by ``sordino.made.Factory``.
    """

    name: str
    schedule: Callable[[Setting], Schedule]
    headroom: float = 1.0
    resolve: Callable[[Setting, NDArray[np.bool_]], NDArray[np.float64]] | None = None
    choose: Callable[[Candidates], NDArray[np.int64]] | None = None
    needs: tuple[str, ...] = ()
    draws: bool = True
    made: Made | None = None


@part
def everyone() -> Selection:
    """Every client takes part in every round."""

    def schedule(s: Setting) -> Schedule:
        if s.training.select is not None:
            raise BadInput(
                "training.select does not go with a method that asks everyone: drop it, or choose a method "
                "that draws clients, such as 'unbiased' or 'privacy-aware'"
            )
        return select.everyone(len(s.population.names), s.training.rounds)

    return Selection("everyone", schedule, draws=False)


@part
def uniform() -> Selection:
    """N_select clients a round, with replacement, all equally likely."""
    return Selection("uniform", lambda s: _draw(s, "uniform", select.uniform(len(s.population.names))))


@part
def unbiased() -> Selection:
    """N_select clients a round, with replacement, p ∝ n."""
    return Selection("unbiased", lambda s: _draw(s, "unbiased", select.unbiased(s.population.sizes)))


@part
def privacy_aware(weight: float | None = None, headroom: float = 1.0) -> Selection:
    """p minimises ‖p−u‖₁ + √(‖p−u‖₁² + η Σ p² V) (Problem 1); η is ``weight``, or follows ``default_weight``.

    ``headroom`` above 1 makes it adaptive: when clients run dry the problem is solved again for the others, who may
    then take up to so many times the turns they were drawn for; their noise is calibrated for that, and is √headroom
    larger.
    """
    if not (1.0 <= headroom < math.inf):
        raise BadInput(f"select.headroom = {headroom!r}: it is a number from 1 (nothing adapts) upwards")

    def resolve(s: Setting, alive: NDArray[np.bool_]) -> NDArray[np.float64]:
        found = np.zeros(len(alive))
        found[alive] = aware_probabilities(s.only(alive), weight)
        return found

    def schedule(s: Setting) -> Schedule:
        return _draw(s, "privacy-aware", aware_probabilities(s, weight))

    return Selection("privacy-aware", schedule, headroom, resolve if headroom > 1 else None)


@part
def compensated(weight: float | None = None) -> Selection:
    """The probabilities of ``privacy_aware`` with importance weights u/p, so that the objective stays unbiased."""

    def schedule(s: Setting) -> Schedule:
        p = aware_probabilities(s, weight)
        return _draw(s, "unbiased-compensated", p, select.compensation(p, s.population.sizes))

    return Selection("unbiased-compensated", schedule)


@part
def power_of_choice(candidates: int | None = None, headroom: float = 2.0) -> Selection:
    """Of ``candidates`` clients drawn ∝ n, the N_select with the largest released loss (Cho et al. 2022)."""

    def schedule(s: Setting) -> Schedule:
        count = candidates or min(len(s.population.names), 2 * s.select)
        rounds = s.training.rounds
        return select.power_of_choice(s.population.sizes, rounds, count, s.select, s.seed, headroom=headroom)

    def choose(asked: Candidates) -> NDArray[np.int64]:
        drawn, caps = asked.schedule, np.asarray(asked.schedule.caps)
        kept = select.choose(asked.clients, asked.answers["loss"], drawn.select, asked.taken, caps)
        places = [int(np.flatnonzero(asked.clients == one)[0]) for one in np.sort(kept)]
        return np.array(places, dtype=np.int64)

    return Selection("power-of-choice", schedule, choose=choose, needs=("loss",))


def noise_factors(s: Setting) -> NDArray[np.float64]:
    """V_k at a nominal participation of T·N_select/N rounds: (z_k S/b_k)²/(T_k K), or the closed form of eq. 7."""
    population, training = s.population, s.training
    batches = training.batches(population)
    steps = training.local_steps(population.sizes, batches)
    epsilons = np.array([b.epsilon for b in population.budgets])
    deltas = np.array([b.delta for b in population.budgets])
    adjacency = str(population.budgets[0].adjacency)
    if s.accountant == "closed-form-selection":
        return select.closed_form_factors(population.sizes, batches, epsilons, deltas, adjacency)
    turns = np.full(len(steps), max(1, round(training.rounds * s.select / len(steps))))
    rates = batches / population.sizes
    noises = calibrate(epsilons, deltas, rates, turns * steps, training.sampling, s.accountant, adjacency)
    return select.noise_factors(np.asarray(noises), batches, turns * steps, 1, adjacency)


def aware_probabilities(s: Setting, weight: float | None) -> NDArray[np.float64]:
    """The solution of Problem 1 for these clients."""
    steps = s.training.local_steps(s.population.sizes, s.training.batches(s.population))
    chosen = weight
    if chosen is None:
        chosen = select.default_weight(s.dimension, s.training.rounds, int(np.median(steps)))
    return select.privacy_aware(s.population.sizes, noise_factors(s), chosen)


def _draw(s: Setting, rule: str, probabilities: Any, importance: Any = None) -> Schedule:
    return select.draw(probabilities, s.training.rounds, s.select, s.seed, rule=rule, importance=importance)
