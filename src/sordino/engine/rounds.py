"""The server's half of a round, the same in simulation and in a deployment: whom to ask, what to send, how to combine.

Everything here follows from the plan, from releases and from public facts. It opens neither client nor data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino.engine.checkpoint import Checkpoint
from sordino.engine.chosen import settled
from sordino.errors import BadInput, Diverged
from sordino.methods import Ask, Plan
from sordino.methods.selection import Candidates
from sordino.privacy.gate import Terms
from sordino.server.columns import inverse_weights
from sordino.server.facts import Array, Facts, Layout, Outcome, ServerState
from sordino.server.rule import Call
from sordino.server.select import Round
from sordino.server.summed import Summed

Index = NDArray[np.int64]
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


@dataclass(frozen=True)
class Broadcast:
    """What the server sends beside the weights: ``public`` to everyone, ``each`` a row to every client."""

    public: Mapping[str, Any]
    each: Mapping[str, Tensor]

    def told(self, clients: Index) -> dict[str, Any]:
        """What the rows of these clients are told: what is for everyone, and a row each of what is not."""
        rows = {name: value[torch.from_numpy(clients).to(value.device)] for name, value in self.each.items()}
        return {**self.public, **rows}

    def fingerprint_parts(self) -> list[Any]:
        """Its names and values in a fixed order, for the hash that tells requests apart."""
        named = {**self.public, **{f"each/{name}": value for name, value in self.each.items()}}
        return [part for item in sorted(named.items()) for part in item]


def broadcast(plan: Plan, server: ServerState) -> Broadcast:
    """What the server sends beside the weights: settings, and whatever the method's parts told it to."""
    training = plan.training
    public = {"lr": training.lr, "clip": training.clip if plan.method.private else float("inf"), **server.public}
    return Broadcast(public if server.next_steps is None else {**public, "steps": server.next_steps}, server.each)


def only(called: Round, rows: Any) -> Round:
    """Some of the participations, by position or by mask."""
    return Round(called.clients[rows], called.copies[rows], called.weights[rows])


def who_can_pay(plan: Plan, server: ServerState, left: Index, called: Round) -> Round:
    """Of the scheduled participations, those whose client can still pay for a turn; ``left``: turns each has left."""
    keep = called.copies < left[called.clients]
    if plan.method.aggregate.sets_steps:
        pace = np.array([server.next_steps or c.terms.count for c in plan.clients])
        keep &= called.copies * pace[called.clients] < steps_left(plan, server)[called.clients]
    return only(called, keep if enough(plan, called.clients[keep]) else np.zeros(0, dtype=np.int64))


def enough(plan: Plan, clients: Index) -> bool:
    """Whether so many take part that the promise of shared noise holds; always where noise is everybody's own."""
    if plan.sharing is None:
        return True
    noisy = {int(i) for i in clients if not plan.clients[i].budget.is_public}
    return len(noisy) >= plan.sharing.needed


def exhausted(plan: Plan, server: ServerState, left: Index, number: int) -> bool:
    """Whether of those who are asked in this round or later nobody can pay for another turn: the run is at its end."""
    if not plan.method.private:
        return False
    asked = plan.schedule.asked[number - 1 :]
    able = left > 0
    if plan.method.aggregate.sets_steps:
        able = able & (steps_left(plan, server) > 0)
    there = np.unique(asked[asked >= 0])
    return not able[there].any() or not enough(plan, there[able[there]])


def stopped(plan: Plan, number: int, history: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any] | None:
    """What a result says of a run whose rounds ended with this one, before they were all played; else None.

    ``refused``: whether budgets ended it. Where the server sets the pace, taking all planned steps early is the plan,
    and where estimates say that the model gets no better, so is ending.
    """
    if number >= plan.schedule.rounds:
        return None
    paced = plan.method.aggregate.sets_steps
    if plan.judging is not None and settled(plan, history):
        why = f"{plan.judging.settings.stop} evaluations in a row were no better than the best before them"
        told = f"the run stopped after round {number} of {plan.schedule.rounds}: {why} (evaluation.stop)"
        return {"round": number, "of": plan.schedule.rounds, "refused": False, "reason": told}
    why = "every planned local step was taken" if paced else "no client's budget pays for another turn"
    if plan.sharing is not None:
        why = f"fewer than {plan.sharing.needed} clients can pay for another turn, whom shared noise needs"
    told = f"the run stopped after round {number} of {plan.schedule.rounds}: {why}"
    return {
        "round": number,
        "of": plan.schedule.rounds,
        "refused": not paced,
        "reason": told,
    }


def who_trains(plan: Plan, called: Round, heard: Heard, taken: Index, number: int) -> tuple[Round, Heard]:
    """Who trains after the questions, with their answers: where candidates were asked, those that the rule chooses.

    Whatever it chooses, nobody trains beyond the cap that its noise was calibrated for.
    """
    rule, schedule = plan.method.select, plan.schedule
    if rule.choose is None or not heard:
        return called, heard
    answers = {what: _entries(values) for what, values in heard.items()}
    asked = Candidates(called.clients.copy(), answers, taken.copy(), schedule, number)
    chosen: Any = np.asarray(rule.choose(asked))
    places = set(range(len(called.clients)))
    whole = chosen.ndim == 1 and (chosen.dtype.kind in "iu" or not chosen.size)
    if not whole or len(chosen) > len(set(chosen.tolist()) & places):
        raise BadInput(
            f"select {rule.name!r} chose {chosen.tolist()!r} of {len(places)} candidates: it has to give whole numbers "
            "from 0, each once: their places"
        )
    rows = chosen.astype(np.int64)
    if schedule.caps is not None:
        rows = rows[taken[called.clients[rows]] < schedule.caps[called.clients[rows]]]
    kept = called.clients[rows]
    their = torch.from_numpy(rows)
    answers_of = {what: values[their.to(values.device)] for what, values in heard.items()}
    return Round(kept, np.zeros_like(kept), np.ones(len(kept))), answers_of


def _entries(answers: Tensor) -> Array:
    """Released answers as numbers, an entry a row."""
    return answers.detach().double().reshape(-1).cpu().numpy()


def steps_left(plan: Plan, server: ServerState) -> Index:
    """Local steps that each client's plan has left, where the server sets the pace."""
    total = _step_budgets(plan)
    return total if server.steps_used is None else total - server.steps_used.cpu().numpy()


def turn_terms(plan: Plan, server: ServerState, called: Round) -> list[Terms]:
    """The terms of everyone's turn; where the server sets the pace, so many steps of what the plan has left (R6)."""
    planned = [plan.clients[i].terms for i in called.clients]
    if not plan.method.aggregate.sets_steps:
        return planned
    left, pace = steps_left(plan, server), server.next_steps
    counts = []
    for i, one in zip(called.clients, planned):
        counts.append(int(min(pace or one.count, left[i])))
        left[i] -= counts[-1]
    return [replace(one, count=count) for one, count in zip(planned, counts)]


def conclude(
    course: Course, state: Checkpoint, number: int, called: Round, ask: Ask, answers: Tensor, sent: Broadcast
) -> None:
    """What the server makes of the answers to a question that was asked before the step."""
    about = facts(course, called, number, sent)
    state.server = state.server.told(ask.conclude(*pooled(course.plan, ask, answers, about)))


def pooled(plan: Plan, ask: Ask, answers: Tensor, about: Facts) -> tuple[Tensor, Facts]:
    """Answers and facts as the server sees them: where noise is shared, one row for all with the weighted mean."""
    if plan.sharing is None or not len(about.clients):
        return answers, about
    own = own_questions(plan)
    weights = np.array(plan.sharing.releases[1 + own.index(ask) if ask in own else 0].weights)[about.clients]
    weights = weights / weights.sum()
    mean = torch.as_tensor(weights, dtype=answers.dtype, device=answers.device) @ answers
    noise = {what: np.sqrt([(weights**2 * each**2).sum()]) for what, each in about.answer_noise.items()}
    unseen = replace(about, answers={}, uploads={})  # single answers, which no server has
    one = replace(unseen.only(np.zeros(1, dtype=np.int64)), sizes=about.sizes.sum(keepdims=True), selection=np.ones(1))
    return mean[None], replace(one, answer_noise=noise)


def summed_up(course: Course, about: Facts) -> Summed | None:
    """What a round's updates are added up in where the server sees their sum alone; None where it sees each."""
    sharing = course.plan.sharing
    if sharing is None:
        return None
    width = sum(math.prod(shape) for _, shape, _ in course.layout)
    return Summed(about, np.array(sharing.releases[0].weights)[about.clients], width)


def close_round(
    course: Course,
    state: Checkpoint,
    number: int,
    called: Round,
    terms: list[Terms],
    sent: Broadcast,
    heard: Heard,
    uploads: dict[str, Any],
) -> dict[str, Any]:
    """Combine the uploads of those who answered, step, and say what to show of the round. Changes ``state``."""
    got = receive(course, state, number, called, terms, sent, heard, uploads)
    return advance(got, state, None if got.call is None else course.plan.rule(*got.call))


@dataclass(frozen=True)
class Received:
    """A round whose uploads are there: what its rule is called with, None where nobody sent any."""

    course: Course
    number: int
    called: Round
    call: Call | None


def receive(
    course: Course,
    state: Checkpoint,
    number: int,
    called: Round,
    terms: list[Terms],
    sent: Broadcast,
    heard: Heard,
    uploads: dict[str, Any],
) -> Received:
    """Take what came: steps are booked, and questions of the step concluded. Changes ``state``."""
    plan, method = course.plan, course.plan.method
    if not uploads:
        return Received(course, number, called, None)
    asked = {one.question.what for one in method.ask}
    if "update" not in uploads:  # nobody sent a whole one
        uploads = {**uploads, "update": state.weights.new_zeros(len(called.clients), len(state.weights))}
    width = uploads["update"].shape[1]
    if width != len(state.weights):
        raise BadInput(f"local {method.local.name!r} uploads {width} numbers, and the model has {len(state.weights)}")
    book_steps(plan, state, called, terms)
    about = replace(
        facts(course, called, number, sent, terms, state),
        answers={what: _entries(values) for what, values in {**heard, **uploads}.items() if what in asked},
        uploads={name: values for name, values in uploads.items() if name != "update" and name not in asked},
    )
    for ask in method.ask:
        if ask.batch == "step":
            heard_of = pooled(plan, ask, uploads[ask.question.what][:, 0], about)
            state.server = state.server.told(ask.conclude(*heard_of))
    rule = plan.rule
    updates = uploads["update"] if rule.receive is None else rule.receive(uploads, about)
    total = summed_up(course, about)
    if total is not None and isinstance(updates, Tensor):
        total.add(np.arange(len(updates)), updates)
        updates = total
    return Received(course, number, called, Call(updates, about, state.server.rule))


def advance(got: Received, state: Checkpoint, outcome: Outcome | None) -> dict[str, Any]:
    """Step by what the rule made of the round, and say what to show of it. Changes ``state``."""
    course, number, called = got.course, got.number, got.called
    plan, method = course.plan, course.plan.method
    record: dict[str, Any] = {"round": number, "participants": [plan.clients[i].name for i in called.clients]}
    if got.call is None or outcome is None:
        few = "no client" if plan.sharing is None else f"fewer clients than the {plan.sharing.needed} that share noise"
        return record | {"note": f"{few} could pay for this round"}
    steps = state.server.next_steps if outcome.next_steps is None else outcome.next_steps
    state.server = replace(state.server.told(outcome.told), rule=outcome.memory, next_steps=steps)
    delta = _steered(plan, state, outcome.delta, number)
    state.weights, state.shown, kept = method.server.take(
        state.weights, replace(outcome, delta=delta), state.server.step
    )
    state.shown = state.shown if outcome.shown is None else outcome.shown
    state.server = replace(state.server, step=kept)
    if not all_finite(state.weights):
        raise diverged(number)
    if outcome.weights is not None:
        counted = np.bincount(called.clients, outcome.weights, minlength=len(plan.clients))
        record["weights"] = {plan.clients[i].name: float(counted[i]) for i in dict.fromkeys(called.clients.tolist())}
        if course.oracle and is_time(plan, number):
            record |= weighed(got.call.facts, outcome.weights, [c.name for c in plan.clients], {})
    return record | ({"diagnostics": outcome.diagnostics} if outcome.diagnostics else {})


def _steered(plan: Plan, state: Checkpoint, delta: Tensor, number: int) -> Tensor:
    """η_s Δ − ρ(w − w_0), shorter in the last rounds where there is a cooldown. Remembers w_0 in ``state``."""
    training, rounds = plan.training, plan.schedule.rounds
    rate, pull = training.server_rate(number, rounds), training.pull * training.pace(number, rounds)
    delta = delta if rate == 1 else delta * rate
    if not pull:
        return delta
    start = state.weights.clone() if state.server.start is None else state.server.start
    state.server = replace(state.server, start=start)
    return delta - pull * (state.weights - start)


def diverged(number: int) -> Diverged:
    """What to say of a run whose model a round has taken out of the numbers."""
    return Diverged(f"the model is no longer finite after round {number}: training diverged; use a smaller training.lr")


def all_finite(weights: Tensor) -> bool:
    """Whether every entry is a finite number. A sum tells in one pass without a copy, unless it overflows."""
    return bool(torch.isfinite(weights.sum())) or bool(torch.isfinite(weights).all())


def radii(plan: Plan, called: Round, sent: Broadcast) -> NDArray[np.float64]:
    """The clipping radius C of every participation."""
    bound = plan.method.clip.bound(sent.told(called.clients))
    values = bound.detach().cpu().double().reshape(-1).numpy() if isinstance(bound, Tensor) else np.float64(bound)
    return np.broadcast_to(values, (len(called.clients),)).copy()


def moving_clip(plan: Plan, called: Round, sent: Broadcast) -> dict[str, Any]:
    """The round's radius where it moves: the mean over rows, and everyone's where they differ."""
    if not plan.method.clip.moves or not plan.method.private or not len(called.clients):
        return {}
    each = radii(plan, called, sent)
    found: dict[str, Any] = {"clip": float(each.mean())}
    if len(set(each.tolist())) > 1:
        found["clips"] = {plan.clients[i].name: c for i, c in zip(called.clients, each.tolist())}
    return found


def _step_budgets(plan: Plan) -> Index:
    """The local steps of every client's whole plan."""
    return np.array([c.turns * c.terms.count for c in plan.clients], dtype=np.int64)


def book_steps(plan: Plan, state: Checkpoint, called: Round, terms: list[Terms]) -> None:
    """Remember how many steps of their plans these participations took, where the server sets their number."""
    if plan.method.aggregate.sets_steps:
        used = _step_budgets(plan) - steps_left(plan, state.server)
        np.add.at(used, called.clients, [one.count for one in terms])
        state.server = replace(state.server, steps_used=torch.from_numpy(used))


def facts(
    course: Course,
    called: Round,
    number: int,
    sent: Broadcast,
    terms: list[Terms] | None = None,
    state: Checkpoint | None = None,
) -> Facts:
    """What is public about these participations, an entry a row; ``state`` where steps that are left count."""
    plan = course.plan
    clients = [plan.clients[i] for i in called.clients]
    steps = np.array([one.count for one in terms or [c.terms for c in clients]], dtype=np.float64)
    variances = plan.variances(1.0 if plan.method.private else None)[called.clients]
    variances = variances * (radii(plan, called, sent) ** 2 if plan.method.private else 1.0)
    variances = variances * steps / np.array([c.terms.count for c in clients])
    paced = plan.method.aggregate.sets_steps and state is not None
    return Facts(
        clients=called.clients,
        sizes=np.array([c.records for c in clients], dtype=np.float64),
        epsilons=np.array([c.budget.epsilon for c in clients]),
        batches=np.array([c.terms.divisor for c in clients]),
        noises=np.array([c.noise for c in clients]),
        steps=steps,
        variances=variances,
        selection=called.weights,
        true_variances=variances if course.oracle else None,
        steps_left=steps_left(plan, state.server)[called.clients] if paced and state else None,
        step_budget=_step_budgets(plan)[called.clients] if paced else None,
        answer_noise=plan.answer_noise(called.clients),
        public=sent.public,
        each=sent.each,
        layout=course.layout,
        round=number,
        rounds=plan.training.rounds if plan.method.aggregate.goes_on else plan.schedule.rounds,
        population=len(plan.clients),
        records=int(plan.population.sizes.sum()),
        lr=plan.training.lr,
        server_lr=plan.training.server_rate(number, plan.schedule.rounds),
        clip=float(sent.public["clip"]),
    )


def weighed(facts: Facts, weights: Array, names: Sequence[str], seen: Mapping[str, Any]) -> dict[str, Any]:
    """What to record of a round's combination beside its weights; nothing where nobody adds noise.

    ``declared_weights``: 1/σ_i² by declared variances, sum 1. Under ``observer``: ``optimum_weights``, the same by the
    variances that the noise really had, and the noise power Σ w_i²σ_i²/η² of the combination with those variances
    (Table 10 of Robust-HDP, per coordinate: its σ² is d times ours), beside the least that any weights could reach.
    Virtual copies of a client are added up. ``seen`` is what the observer noted before; it is kept.
    """
    truth = facts.variances if facts.true_variances is None else facts.true_variances
    if not (facts.variances > 0).any():
        return {}
    quiet = bool((truth == 0).any())
    found = {
        "optimum_weights": _by_client(inverse_weights(truth), facts, names),
        "noise_power": float((weights**2 * truth).sum()) / facts.lr**2,
        "least_noise_power": 0.0 if quiet else 1.0 / float((1.0 / truth).sum()) / facts.lr**2,
        "note": "seen in simulation, not released",
    }
    declared = _by_client(inverse_weights(facts.variances), facts, names)
    return {"declared_weights": declared, "observer": {**seen, **found}}


def _by_client(weights: Array, facts: Facts, names: Sequence[str]) -> dict[str, float]:
    total = np.bincount(facts.clients, weights, minlength=len(names))
    return {names[i]: float(f"{total[i]:.6g}") for i in dict.fromkeys(facts.clients.tolist())}
