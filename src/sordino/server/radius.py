"""Adaptive clipping at the server: the radius from released answers, projection onto a ball, the averaged iterate.

All of it is post-processing of releases. Two ways to a radius, common to all clients or (``per_client``) one each from
its own answer alone:

    root mean square   C_r = min(Ĝ, √(max(0, 2τ (Σ w_p G_p + ν̃)))), at least a floor (AdaptDP-FedAvg)
    quantile           C ← C·exp(−η_C (b − γ)), b the released share of records under C (Andrew et al. 2021)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from sordino.errors import BadInput
from sordino.server.columns import inverse_weights
from sordino.server.facts import Array, Facts, Outcome, State
from sordino.server.fair import about
from sordino.server.rules import RULES

PUBLIC = "public/radius"
"""Where the radius lies in the server's state: broadcast with the next request."""

EACH = "public/each/radius"
"""The same for a radius a client, [clients, 1]: every client is told its own."""

WIDEST = 1e4
"""A quantile radius stays within this factor of where it started: noise alone must not carry it away."""

_WEIGHINGS: dict[str, Callable[[Facts, Array], Array]] = {
    "clients": lambda facts, spreads: np.full(len(spreads), 1.0 / len(spreads)),
    "records": lambda facts, spreads: facts.sizes / facts.sizes.sum(),
    "precision": lambda facts, spreads: inverse_weights(spreads**2),
}


def root_mean_square(
    answers: Tensor,
    facts: Facts,
    state: State,
    *,
    tau: float = 1.0,
    floor: float = 1e-3,
    chance: float = 0.01,
    margin: float = 1.0,
    weigh: str = "clients",
    reach: float | None = None,
    per_client: bool = False,
) -> State:
    """C_r of AdaptDP-FedAvg from released mean squared norms G_p, in [floor·Ĝ, Ĝ] whatever the answers are.

    Parameters
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
    _check(tau=tau, floor=floor, chance=chance)
    if floor > 1 or margin < 0:
        raise BadInput(f"ask.floor = {floor} must be at most 1 and ask.margin = {margin} at least 0")
    ceiling = float(facts.extra["clip"])
    if math.isinf(ceiling):  # not private: nothing is clipped
        return state
    far = margin * math.sqrt(2.0 * math.log(2.0 * max(1, len(answers)) * float(facts.extra["rounds"]) / chance))

    def moved(last: Array, mean: Array, spread: Array) -> Array:
        asked = np.full_like(last, ceiling) if reach is None else np.minimum(ceiling, reach * last)
        wanted = np.sqrt(np.maximum(0.0, 2.0 * tau * (mean + far * spread * asked**2)))
        return np.clip(wanted, floor * ceiling, ceiling)

    return _moved(answers, facts, state, moved, "squared-norm", weigh, per_client)


def quantile(
    answers: Tensor,
    facts: Facts,
    state: State,
    *,
    target: float = 0.5,
    rate: float = 0.2,
    weigh: str = "records",
    per_client: bool = False,
) -> State:
    """C ← C·exp(−η_C (b − γ)), with b = ½ + Σ w_p answer_p cut to [0, 1]: the geometric update of Andrew et al. 2021.

    Parameters
    ----------
    target: γ, the quantile of the records' gradient norms that the radius tracks.
    rate: η_C; the radius moves by at most exp(η_C·max(γ, 1 − γ)) a round.
    weigh: as in ``root_mean_square``; ``records`` tracks the quantile of all records together.
    per_client: every client's radius tracks the quantile of its own records.
    """
    _check(target=target, rate=rate)
    if target >= 1:
        raise BadInput(f"ask.target = {target}: a quantile lies strictly between 0 and 1")
    start = float(facts.extra["clip"])
    if math.isinf(start):
        return state

    def moved(last: Array, mean: Array, spread: Array) -> Array:
        under = np.clip(0.5 + mean, 0.0, 1.0)
        return np.clip(last * np.exp(-rate * (under - target)), start / WIDEST, start * WIDEST)

    return _moved(answers, facts, state, moved, "under-radius", weigh, per_client)


@about(partner="averaged")
def averaged(updates: Tensor, facts: Facts, state: State, *, combine: str = "data-weighted") -> Outcome:
    """Combine updates, and by the same rule (``combine``) the clients' mean iterates: ``iterate`` in the state.

    Screened like updates: a client that sends a broken iterate is refused or bounded.
    """
    if combine not in RULES:
        raise BadInput(f"aggregate.combine = {combine!r} is unknown: use one of {', '.join(RULES)}")
    iterates = facts.extra.get("iterate")
    if iterates is None:
        raise BadInput("aggregate 'averaged' needs the clients' mean iterates: use it with local = 'averaged'")
    outcome = RULES[combine](updates, facts, state)
    second = RULES[combine](iterates, facts, state)
    kept = {**outcome.state, "iterate": second.delta}
    return Outcome(outcome.delta, outcome.weights, kept, outcome.diagnostics)


def ball(
    weights: Tensor, delta: Tensor, state: State, *, bound: float | None = None, lr: float = 1.0
) -> tuple[Tensor, Tensor, State]:
    """w ← Clip(w + η_s Δ, B), with ``bound`` = B (none: no projection).

    Shows w itself; where the combination carries clients' mean iterates (``averaged``), shows
    x^(out) = (1/R) Σ_r x_r^(out) with x_r^(out) = w_{r−1} + Σ w_p (x̄_p − w_{r−1}).
    """
    if bound is not None:
        _check(bound=bound)
    stepped = weights + lr * delta
    if bound is not None:
        stepped = stepped * min(1.0, bound / max(float(torch.linalg.vector_norm(stepped)), 1e-30))
    if "iterate" not in state:
        return stepped, stepped, state
    left = {name: value for name, value in state.items() if name != "iterate"}
    seen = weights + state["iterate"]
    count = int(state.get("out_count", 0)) + 1
    shown = torch.lerp(state["out"], seen, 1.0 / count) if count > 1 else seen
    return stepped, shown, {**left, "out": shown, "out_count": count}


def _moved(
    answers: Tensor,
    facts: Facts,
    state: State,
    moved: Callable[[Array, Array, Array], Array],
    what: str,
    weigh: str,
    per_client: bool,
) -> State:
    """The state with the next radius: ``moved(last radius, answer, deviation of its noise)``, common or for each."""
    start = float(facts.extra["clip"])
    if not per_client:
        mean, spread, rows = _combined(answers, facts, what, weigh)
        if rows == 0:
            return state
        last = np.array(float(state.get(PUBLIC, start)))
        return {**state, PUBLIC: float(moved(last, np.array(mean), np.array(spread)))}
    heard = answers.detach().double().cpu().numpy()
    usable = np.isfinite(heard)
    clients, count = facts.clients[usable], int(facts.extra["clients"])
    radii = state[EACH].cpu().numpy()[:, 0].astype(np.float64) if EACH in state else np.full(count, start)
    radii[clients] = moved(radii[clients], heard[usable], np.asarray(facts.extra["answer_noise"][what])[usable])
    return {**state, EACH: torch.from_numpy(radii[:, None]).to(answers)}


def _combined(answers: Tensor, facts: Facts, what: str, weigh: str) -> tuple[float, float, int]:
    """Σ w_p answer_p, the deviation of its noise in units of the question's bound, and how many rows answered."""
    if weigh not in _WEIGHINGS:
        raise BadInput(f"ask.weigh = {weigh!r} is unknown: use one of {', '.join(_WEIGHINGS)}")
    heard = answers.detach().double().cpu().numpy()
    spreads = np.asarray(facts.extra["answer_noise"][what], dtype=np.float64)
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
