"""The server's half of a round, the same in simulation and in a deployment: whom to ask, what to send, how to combine.

Everything here follows from the plan, from releases and from public facts. It opens neither client nor data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino.engine.checkpoint import Checkpoint
from sordino.engine.telling import told
from sordino.engine.weighing import weighed
from sordino.errors import Diverged
from sordino.methods import Ask, Plan
from sordino.privacy.gate import Terms
from sordino.server.facts import Facts
from sordino.server.select import Round, choose

Index = NDArray[np.int64]
Layout = tuple[tuple[str, tuple[int, ...], int], ...]
Heard = dict[str, Tensor]
"""By question: one answer a row."""


@dataclass(frozen=True)
class Course:
    """What the server knows all through a run."""

    plan: Plan
    layout: Layout
    oracle: bool = False
    """Whether rules may see the noise that was really used: in a simulation only."""


def turns_left(plan: Plan, payable: Mapping[str, int]) -> Index:
    """The most turns each client can take in this run; a client that is not listed pays all of them."""
    most = [payable.get(c.name, 1 << 40) for c in plan.clients]
    # Where the whole run was declared as one turn, a client pays all of it or nothing.
    most = [(1 << 40 if one else 0) if c.whole else one for one, c in zip(most, plan.clients)]
    return np.array(most, dtype=np.int64)


def turns_taken(plan: Plan, history: list[dict[str, Any]]) -> Index:
    """How many turns each client took in the rounds so far."""
    place = {client.name: i for i, client in enumerate(plan.clients)}
    taken = np.zeros(len(place), dtype=np.int64)
    for record in history:
        np.add.at(taken, [place[name] for name in record["participants"]], 1)
    return taken


def is_time(plan: Plan, number: int) -> bool:
    """Whether this round is evaluated: every ``training.evaluate`` rounds, and the last."""
    return number % plan.training.evaluate == 0 or number == plan.schedule.rounds


def own_questions(plan: Plan) -> list[Ask]:
    """The questions that are asked before the step, in order."""
    return [one for one in plan.method.ask if one.batch == "own"]


def broadcast(plan: Plan, server: dict[str, Any]) -> dict[str, Any]:
    """What the server sends beside the weights: settings, and whatever the method's state holds under ``public/``."""
    training = plan.training
    public = {"lr": training.lr, "clip": training.clip if plan.method.private else float("inf")}
    kept = {k.removeprefix("public/"): v for k, v in server.items() if k.startswith("public/")}
    return public | kept


def only(called: Round, rows: Any) -> Round:
    """Some of the participations, by position or by mask."""
    return Round(called.clients[rows], called.copies[rows], called.weights[rows])


def who_can_pay(plan: Plan, server: dict[str, Any], left: Index, called: Round) -> Round:
    """Of the scheduled participations, those whose client can still pay for a turn; ``left``: turns each has left."""
    keep = called.copies < left[called.clients]
    if plan.method.adaptive:
        pace = np.array([server.get("public/steps") or c.terms.count for c in plan.clients])
        keep &= called.copies * pace[called.clients] < steps_left(plan, server)[called.clients]
    return only(called, keep)


def exhausted(plan: Plan, server: dict[str, Any], left: Index, number: int) -> bool:
    """Whether of those who are asked in this round or later nobody can pay for another turn: the run is at its end."""
    if not plan.method.private:
        return False
    asked = plan.schedule.asked[number - 1 :]
    able = left > 0
    if plan.method.adaptive:
        able = able & (steps_left(plan, server) > 0)
    return not able[np.unique(asked[asked >= 0])].any()


def stopped(plan: Plan, number: int) -> dict[str, Any] | None:
    """What a result says of a run whose rounds ended with this one, before they were all played; else None.

    ``refused``: whether budgets ended it. Where the server sets the pace, taking all planned steps early is the plan.
    """
    if number >= plan.schedule.rounds:
        return None
    why = "every planned local step was taken" if plan.method.adaptive else "no client's budget pays for another turn"
    told = f"the run stopped after round {number} of {plan.schedule.rounds}: {why}"
    return {"round": number, "of": plan.schedule.rounds, "refused": not plan.method.adaptive, "reason": told}


def who_trains(plan: Plan, called: Round, heard: Heard, taken: Index) -> tuple[Round, Heard]:
    """Who trains after the questions, with their answers: where candidates were asked, those with the largest loss."""
    if plan.schedule.caps is None or not heard:
        return called, heard
    losses = heard[own_questions(plan)[0].question.what].double().cpu().numpy()
    kept = np.sort(choose(called.clients, losses, plan.schedule.select, taken, plan.schedule.caps))
    rows = torch.from_numpy(np.array([int(np.flatnonzero(called.clients == one)[0]) for one in kept], dtype=np.int64))
    chosen = Round(kept, np.zeros_like(kept), np.ones(len(kept)))
    return chosen, {what: values[rows.to(values.device)] for what, values in heard.items()}


def steps_left(plan: Plan, server: dict[str, Any]) -> Index:
    """Local steps that each client's plan has left, where the server sets the pace."""
    total = np.array([c.turns * c.terms.count for c in plan.clients], dtype=np.int64)
    used = server.get("steps_used")
    return total if used is None else total - used.cpu().numpy()


def turn_terms(plan: Plan, server: dict[str, Any], called: Round) -> list[Terms]:
    """The terms of everyone's turn; where the server sets the pace, so many steps of what the plan has left (R6)."""
    planned = [plan.clients[i].terms for i in called.clients]
    if not plan.method.adaptive:
        return planned
    left, pace = steps_left(plan, server), server.get("public/steps")
    counts = []
    for i, one in zip(called.clients, planned):
        counts.append(int(min(pace or one.count, left[i])))
        left[i] -= counts[-1]
    return [replace(one, count=count) for one, count in zip(planned, counts)]


def conclude(
    course: Course, state: Checkpoint, number: int, called: Round, ask: Ask, answers: Tensor, public: dict[str, Any]
) -> None:
    """What the server makes of the answers to a question that was asked before the step."""
    state.server = ask.conclude(answers, facts(course, called, number, public, {}), state.server)


def close_round(
    course: Course,
    state: Checkpoint,
    number: int,
    called: Round,
    terms: list[Terms],
    public: dict[str, Any],
    heard: Heard,
    uploads: dict[str, Any],
) -> dict[str, Any]:
    """Combine the uploads of those who answered, step, and say what to show of the round. Changes ``state``."""
    plan = course.plan
    record: dict[str, Any] = {"round": number, "participants": [plan.clients[i].name for i in called.clients]}
    if not uploads:
        return record | {"note": "no client could pay for this round"}
    known = {**heard, **uploads, **_pace(plan, state, called, terms)}
    about = facts(course, called, number, public, known, terms)
    for ask in plan.method.ask:
        if ask.batch == "step":
            state.server = ask.conclude(uploads[ask.question.what][:, 0], about, state.server)
    if "update" not in uploads:  # nobody sent a whole one
        uploads = {**uploads, "update": state.weights.new_zeros(len(called.clients), len(state.weights))}
    outcome = plan.method.aggregate(uploads["update"], about, state.server)
    delta, kept = _steered(plan, state.weights, outcome.delta, number, outcome.state)
    state.weights, state.shown, state.server = plan.method.server(state.weights, delta, kept)
    if not all_finite(state.weights):
        raise diverged(number)
    if outcome.weights is not None:
        counted = np.bincount(called.clients, outcome.weights, minlength=len(plan.clients))
        record["weights"] = {plan.clients[i].name: float(counted[i]) for i in dict.fromkeys(called.clients.tolist())}
        if course.oracle and is_time(plan, number):
            record |= weighed(about, outcome.weights, [c.name for c in plan.clients], {})
    return record | ({"diagnostics": outcome.diagnostics} if outcome.diagnostics else {})


def _steered(
    plan: Plan, weights: Tensor, delta: Tensor, number: int, server: dict[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """η_s Δ − ρ(w − w_0), shorter in the last rounds where there is a cooldown; and where w_0 is remembered."""
    training, rounds = plan.training, plan.schedule.rounds
    rate, pull = training.server_rate(number, rounds), training.pull * training.pace(number, rounds)
    delta = delta if rate == 1 else delta * rate
    if not pull:
        return delta, server
    server = server if "pull_start" in server else {**server, "pull_start": weights.clone()}
    return delta - pull * (weights - server["pull_start"]), server


def diverged(number: int) -> Diverged:
    """What to say of a run whose model a round has taken out of the numbers."""
    return Diverged(f"the model is no longer finite after round {number}: training diverged; use a smaller training.lr")


def all_finite(weights: Tensor) -> bool:
    """Whether every entry is a finite number. A sum tells in one pass without a copy, unless it overflows."""
    return bool(torch.isfinite(weights.sum())) or bool(torch.isfinite(weights).all())


def radii(plan: Plan, called: Round, public: dict[str, Any]) -> NDArray[np.float64]:
    """C of every row."""
    bound = plan.method.clip.bound(told(public, called.clients))
    values = bound.detach().cpu().double().reshape(-1).numpy() if isinstance(bound, Tensor) else np.float64(bound)
    return np.broadcast_to(values, (len(called.clients),)).copy()


def moving_clip(plan: Plan, called: Round, public: dict[str, Any]) -> dict[str, Any]:
    """The round's radius where it moves: the mean over rows, and everyone's where they differ."""
    if not plan.method.clip.moves or not plan.method.private or not len(called.clients):
        return {}
    each = radii(plan, called, public)
    found: dict[str, Any] = {"clip": float(each.mean())}
    if len(set(each.tolist())) > 1:
        found["clips"] = {plan.clients[i].name: c for i, c in zip(called.clients, each.tolist())}
    return found


def _pace(plan: Plan, state: Checkpoint, called: Round, terms: list[Terms]) -> dict[str, Any]:
    """Book the steps of this round where the server sets the pace; what a rule needs to know to set the next."""
    if not plan.method.adaptive:
        return {}
    book_steps(plan, state, called, terms)
    total = np.array([c.turns * c.terms.count for c in plan.clients], dtype=np.int64)[called.clients]
    return {"steps_left": steps_left(plan, state.server)[called.clients], "step_budget": total}


def book_steps(plan: Plan, state: Checkpoint, called: Round, terms: list[Terms]) -> None:
    """Remember how many steps of their plans these participations took, where the server sets the pace."""
    if plan.method.adaptive:
        total = np.array([c.turns * c.terms.count for c in plan.clients], dtype=np.int64)
        used = total - steps_left(plan, state.server)
        np.add.at(used, called.clients, [one.count for one in terms])
        state.server = {**state.server, "steps_used": torch.from_numpy(used)}


def facts(
    course: Course,
    called: Round,
    number: int,
    public: dict[str, Any],
    heard: dict[str, Any],
    terms: list[Terms] | None = None,
) -> Facts:
    """Public metadata of these participations, a row each, and what was released beside the updates."""
    plan = course.plan
    clients = [plan.clients[i] for i in called.clients]
    steps = np.array([one.count for one in terms or [c.terms for c in clients]], dtype=np.float64)
    variances = plan.variances(1.0 if plan.method.private else None)[called.clients]
    variances = variances * (radii(plan, called, public) ** 2 if plan.method.private else 1.0)
    variances = variances * steps / np.array([c.terms.count for c in clients])
    known = {"lr": plan.training.lr, "clients": len(plan.clients), "clip": public["clip"]}
    known |= {"rounds": plan.schedule.rounds, "server_lr": plan.training.server_rate(number, plan.schedule.rounds)}
    known["records"] = int(plan.population.sizes.sum())
    known["answer_noise"] = plan.answer_noise(called.clients)
    if course.oracle:
        known["oracle_variances"] = variances
    return Facts(
        clients=called.clients,
        sizes=np.array([c.records for c in clients], dtype=np.float64),
        epsilons=np.array([c.budget.epsilon for c in clients]),
        batches=np.array([c.terms.divisor for c in clients]),
        noises=np.array([c.noise for c in clients]),
        steps=steps,
        variances=variances,
        selection=called.weights,
        layout=course.layout,
        round=number,
        extra={**known, **{name: value for name, value in heard.items() if name != "update"}},
    )
