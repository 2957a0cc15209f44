"""Adaptive clipping at the server: the radius from released answers, projection onto a ball, the averaged iterate.

All of it is post-processing of releases. Two ways to a radius, common to all clients or (``per_client``) one each from
its own answer alone:

    root mean square   C_r = min(Ĝ, √(max(0, 2τ (Σ w_p G_p + ν̃)))), at least a floor (AdaptDP-FedAvg)
    quantile           C ← C·exp(−η_C (b − γ)), b the released share of records under C (Andrew et al. 2021)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sordino.errors import BadInput
from sordino.made import part
from sordino.server.columns import inverse_weights
from sordino.server.defend import row_norms
from sordino.server.facts import Array, Facts, Memory, Outcome, Told
from sordino.server.rule import Aggregate
from sordino.server.rules import inner_rule

WIDEST = 1e4
"""A quantile radius stays within this factor of where it started: noise alone must not carry it away."""

_WEIGHINGS: dict[str, Callable[[Facts, Array], Array]] = {
    "clients": lambda facts, spreads: np.full(len(spreads), 1.0 / len(spreads)),
    "records": lambda facts, spreads: facts.sizes / facts.sizes.sum(),
    "precision": lambda facts, spreads: inverse_weights(spreads**2),
}


@dataclass(frozen=True)
class RootMeanSquare:
    """C_r of AdaptDP-FedAvg from released mean squared norms G_p, in [floor·Ĝ, Ĝ] whatever the answers are.

    Attributes
    ----------
    tau: τ, how far above the root mean square (over √2) the radius lies.
    floor: the smallest radius, as a share of Ĝ. The paper has none, and a noisy mean may be negative.
    chance: u in ν̃ = √2 · √(Σ w_p² σ_p²) · Ĝ² · √ln(2PR/u), which keeps C_r from being too small by noise; with equal
        weights √(Σ w²σ²) = √(mean(σ²)/P).
    margin: a factor on ν̃; 0 leaves it out.
    weigh: ``clients`` (1/P each, the paper), ``records``, or ``precision`` (inverse variance of the declared noise,
        for unequal budgets).
    reach: κ, where the question's bound follows the radius: Ĝ_r = min(Ĝ, κ·C_{r−1}) in ν̃ (ours).
    per_client: every client has a radius of its own, from its own answer and its own noise.
    """

    tau: float = 1.0
    floor: float = 1e-3
    chance: float = 0.01
    margin: float = 1.0
    weigh: str = "clients"
    reach: float | None = None
    per_client: bool = False

    def __post_init__(self) -> None:
        _check(tau=self.tau, floor=self.floor, chance=self.chance)
        _check_weigh(self.weigh)
        if self.floor > 1 or self.margin < 0:
            raise BadInput(f"ask.floor = {self.floor} must be at most 1 and ask.margin = {self.margin} at least 0")

    def __call__(self, answers: Tensor, facts: Facts) -> Told:
        """The next radius from the answers of those who were asked."""
        ceiling = facts.clip
        if math.isinf(ceiling):  # not private: nothing is clipped
            return Told()
        far = self.margin * math.sqrt(2.0 * math.log(2.0 * max(1, len(answers)) * float(facts.rounds) / self.chance))

        def moved(last: Array, mean: Array, spread: Array) -> Array:
            asked = np.full_like(last, ceiling) if self.reach is None else np.minimum(ceiling, self.reach * last)
            wanted = np.sqrt(np.maximum(0.0, 2.0 * self.tau * (mean + far * spread * asked**2)))
            return np.clip(wanted, self.floor * ceiling, ceiling)

        return _moved(answers, facts, moved, "squared-norm", self.weigh, self.per_client)


@dataclass(frozen=True)
class Quantile:
    """C ← C·exp(−η_C (b − γ)), with b = ½ + Σ w_p answer_p cut to [0, 1]: the geometric update of Andrew et al. 2021.

    Attributes
    ----------
    target: γ, the quantile of the records' gradient norms that the radius tracks.
    rate: η_C; the radius moves by at most exp(η_C·max(γ, 1 − γ)) a round.
    weigh: as in ``RootMeanSquare``; ``records`` tracks the quantile of all records together.
    per_client: every client's radius tracks the quantile of its own records.
    """

    target: float = 0.5
    rate: float = 0.2
    weigh: str = "records"
    per_client: bool = False

    def __post_init__(self) -> None:
        _check(target=self.target, rate=self.rate)
        _check_weigh(self.weigh)
        if self.target >= 1:
            raise BadInput(f"ask.target = {self.target}: a quantile lies strictly between 0 and 1")

    def __call__(self, answers: Tensor, facts: Facts) -> Told:
        """The next radius from the answers of those who were asked."""
        start = facts.clip
        if math.isinf(start):
            return Told()

        def moved(last: Array, mean: Array, spread: Array) -> Array:
            under = np.clip(0.5 + mean, 0.0, 1.0)
            return np.clip(last * np.exp(-self.rate * (under - self.target)), start / WIDEST, start * WIDEST)

        return _moved(answers, facts, moved, "under-radius", self.weigh, self.per_client)


@part
def averaged(*, combine: str | Aggregate = "data-weighted") -> Aggregate:
    """Combine updates, and by the same rule (``combine``) the clients' mean iterates, which step ``ball`` uses."""
    inner = inner_rule(combine)

    def both(updates: Tensor, facts: Facts, memory: Memory) -> Outcome:
        iterates = facts.uploads.get("iterate")
        if iterates is None:
            raise BadInput("aggregate 'averaged' needs the clients' mean iterates: use it with local = 'averaged'")
        outcome = inner.combine(updates, facts, memory)
        second = inner.combine(iterates, replace(facts, norms=row_norms(iterates)), memory)
        return replace(outcome, iterate=second.delta)

    return Aggregate("averaged", both, partner="averaged", refuse_small=inner.refuse_small)


def _moved(
    answers: Tensor,
    facts: Facts,
    moved: Callable[[Array, Array, Array], Array],
    what: str,
    weigh: str,
    per_client: bool,
) -> Told:
    """The next radius: ``moved(last radius, answer, deviation of its noise)``, common to all or one for each."""
    if not per_client:
        mean, spread, rows = _combined(answers, facts, what, weigh)
        if rows == 0:
            return Told()
        last = np.array(float(facts.public.get("radius", facts.clip)))
        return Told({"radius": float(moved(last, np.array(mean), np.array(spread)))})
    heard = answers.detach().double().cpu().numpy()
    usable = np.isfinite(heard)
    clients, before = facts.clients[usable], facts.each.get("radius")
    radii = np.full(facts.population, facts.clip) if before is None else before.cpu().numpy()[:, 0].astype(np.float64)
    radii[clients] = moved(radii[clients], heard[usable], np.asarray(facts.answer_noise[what])[usable])
    return Told(each={"radius": torch.from_numpy(radii[:, None]).to(answers)})


def _combined(answers: Tensor, facts: Facts, what: str, weigh: str) -> tuple[float, float, int]:
    """Σ w_p answer_p, the deviation of its noise in units of the question's bound, and how many rows answered."""
    heard = answers.detach().double().cpu().numpy()
    spreads = np.asarray(facts.answer_noise[what], dtype=np.float64)
    weights = np.where(np.isfinite(heard), _WEIGHINGS[weigh](facts, spreads), 0.0)
    if not weights.sum() > 0:
        return 0.0, 0.0, 0
    weights = weights / weights.sum()
    used = weights > 0
    mean = float((weights[used] * heard[used]).sum())
    return mean, float(np.sqrt(((weights[used] * spreads[used]) ** 2).sum())), int(used.sum())


def _check(**positive: float) -> None:
    for name, value in positive.items():
        if not (math.isfinite(value) and value > 0):
            raise BadInput(f"{name} = {value!r} must be a positive number")


def _check_weigh(weigh: str) -> None:
    if weigh not in _WEIGHINGS:
        raise BadInput(f"ask.weigh = {weigh!r} is unknown: use one of {', '.join(_WEIGHINGS)}")
