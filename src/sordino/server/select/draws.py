"""Drawing schedules: with replacement from a distribution, everyone, or candidate sets for power-of-choice."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from sordino.errors import BadInput, BudgetRefused
from sordino.server.select.checks import Index, allowances, distribution, importance_weights, whole
from sordino.server.select.rules import unbiased
from sordino.server.select.schedule import NOBODY, Schedule, generator
from sordino.server.select.turns import within


def draw(
    probabilities: ArrayLike,
    rounds: int,
    select: int,
    seed: int,
    rule: str = "custom",
    importance: ArrayLike | None = None,
    turns: ArrayLike | None = None,
) -> Schedule:
    """Draw ``select`` clients a round from ``probabilities``, with replacement, for all rounds at once.

    Parameters
    ----------
    importance : c_k of ``compensation``, what one participation of each client counts; 1 if left out.
    turns : the most participations each client's budget pays for. Refused when they cannot fill the schedule; a place
        whose client has none left is drawn again among those who have.
    """
    chosen = distribution(probabilities)
    length, places = whole(rounds, "rounds"), whole(select, "select")
    counted = importance_weights(importance, chosen.size)
    asked = generator(seed).choice(chosen.size, size=(length, places), p=chosen).astype(np.int64)
    schedule = Schedule(rule, chosen.size, asked, counted[asked], places, int(seed), chosen, counted)
    if turns is None:
        return schedule
    allowed = allowances(turns, chosen.size)
    payable = float(allowed[chosen > 0.0].sum())
    if payable < length * places:
        raise BudgetRefused(
            f"select={places} over {length} rounds asks for {length * places} participations, but the clients' budgets "
            f"pay for {payable:.0f}: select fewer clients, train fewer rounds, or add more noise per turn"
        )
    return within(schedule, allowed)


def everyone(clients: int, rounds: int) -> Schedule:
    """All N clients in every round."""
    count, length = whole(clients, "clients"), whole(rounds, "rounds")
    asked = np.broadcast_to(np.arange(count, dtype=np.int64), (length, count))
    return Schedule("everyone", count, asked, np.broadcast_to(np.ones(count), asked.shape), count, 0)


def power_of_choice(
    sizes: ArrayLike,
    rounds: int,
    candidates: int,
    select: int,
    seed: int,
    headroom: float = 2.0,
    turns: ArrayLike | None = None,
) -> Schedule:
    """Candidate sets of power-of-choice: each round d different clients ∝ n_k; the m with the largest loss train.

    The sets are drawn now, which fixes the loss queries Q_k. Trainings follow the losses, so they are capped: at
    T_k = min(Q_k, ⌈h Q_k m/d⌉), h times a candidate's fair share. Noise is calibrated for Q_k queries and T_k
    trainings together; a larger ``headroom`` h lets the rule insist on the same clients, and costs them √h in noise.

    Parameters
    ----------
    candidates, select : d ≥ m.
    turns : the most trainings each client's budget pays for; a client with none is no candidate.
    """
    shares = unbiased(sizes)
    length, pool, places = whole(rounds, "rounds"), whole(candidates, "candidates"), whole(select, "select")
    allowed = allowances(np.inf if turns is None else turns, shares.size)
    ready = np.flatnonzero(allowed >= 1.0)
    if pool < places:
        raise BadInput(f"candidates={pool} is below select={places}: ask at least as many losses as clients train")
    if ready.size < pool:
        raise BudgetRefused(
            f"candidates={pool} different clients are asked a round, but only {ready.size} can pay a turn"
        )
    if not headroom >= 1.0:
        raise BadInput(f"headroom is {headroom!r}: caps are this many times a candidate's fair share, 1 or more")
    # The d smallest of independent Exp(u_k) times are d draws ∝ u_k without replacement.
    times = generator(seed).exponential(size=(length, ready.size)) / shares[ready]
    asked = ready[np.argsort(times, axis=1)[:, :pool]].astype(np.int64)
    queries = np.bincount(asked.ravel(), minlength=shares.size)
    caps = np.minimum(np.minimum(queries, np.ceil(headroom * places * queries / pool)), allowed).astype(np.int64)
    ones = np.ones(asked.shape)
    return Schedule("power-of-choice", shares.size, asked, ones, places, int(seed), shares, caps=caps)


def choose(candidates: ArrayLike, losses: ArrayLike, select: int, used: ArrayLike, caps: ArrayLike) -> Index:
    """Who trains: the ``select`` candidates with the largest released loss whose trainings are below their cap.

    Parameters
    ----------
    candidates : this round's candidate set.
    losses : their *released* (charged, noisy) losses at w; NaN for one that did not answer.
    used, caps : per client of the study, trainings so far and T_k.

    Returns
    -------
    At most ``select`` clients, largest loss first, ties in the order of the set; fewer when caps are reached.
    """
    asked = np.asarray(candidates, dtype=np.int64)
    told = np.asarray(losses, dtype=np.float64)
    if asked.ndim != 1 or told.shape != asked.shape:
        raise BadInput(f"{told.size} losses for {asked.size} candidates: give one released loss per candidate")
    taken, most = np.asarray(used, dtype=np.int64), np.asarray(caps, dtype=np.int64)
    if taken.shape != most.shape or (asked >= taken.size).any():
        raise BadInput(f"used and caps need one entry for each client of the study, not {taken.size} and {most.size}")
    may = (asked != NOBODY) & ~np.isnan(told) & (taken[asked] < most[asked])
    ranked = np.flatnonzero(may)[np.argsort(-told[may], kind="stable")]
    return np.asarray(asked[ranked[: whole(select, "select")]], dtype=np.int64)
