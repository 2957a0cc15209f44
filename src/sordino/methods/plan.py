"""The plan: what a method will cost every client, before any record is touched.

Budgets become noise here. (q, z, count) of every release is fixed before training (R6); the ledger then checks counts
against the plan and never runs an accountant during training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sordino.errors import BadInput
from sordino.methods import sharing as sharing_of
from sordino.methods.evaluation import Judging
from sordino.methods.levels import LevelPlan, at_rates, calibrated, check_levels, in_groups, rates_of
from sordino.methods.method import Method
from sordino.methods.selection import Setting
from sordino.methods.sharing import Sharing
from sordino.methods.training import Population, Training
from sordino.privacy.accounting import calibrate_events, composed_epsilon, split
from sordino.privacy.accounting.cumulant import gaussian_epsilon, gaussian_mu
from sordino.privacy.accounting.published import wor_phase_scales
from sordino.privacy.gate import Terms
from sordino.privacy.levels import Levels, present
from sordino.privacy.trust import NOBODY_TRUSTED, Trust
from sordino.privacy.types import Budget, Event, Sampling
from sordino.server.rule import Aggregate
from sordino.server.select import Schedule, everyone, redraw, without
from sordino.server.summed import summed


@dataclass(frozen=True)
class ClientPlan:
    """What one client will do: its turns and questions, and the terms of every release.

    Attributes
    ----------
    turns: how many turns it takes in the whole run.
    terms: what the steps of one turn release: the gradient, and what is asked of the same batches.
    asks: what each question with a batch of its own releases, in the method's order; ``queries``: how often each is
        asked in the whole run.
    epsilon: ε of the whole plan, by the accountant the ledger charges with; ∞ when nothing protects.
    adaptive: whether the number of steps of a turn may vary, under the total.
    levels: where records differ in what they allow, what each level with records will spend, the strictest first;
        ``budget`` and ``epsilon`` are then the strictest one's.
    """

    name: str
    records: int
    budget: Budget
    turns: int
    terms: Terms
    asks: tuple[Terms, ...]
    queries: tuple[int, ...]
    epsilon: float
    adaptive: bool = False
    levels: tuple[LevelPlan, ...] = ()

    @property
    def budgets(self) -> dict[str, Budget]:
        """By what its accounts are called after the client's name: what may be spent from each."""
        if not self.levels:
            return {"": self.budget}
        return {one.level.suffix: one.budget for one in self.levels}

    @property
    def accounts(self) -> dict[str, Budget]:
        """By account: what may be spent from it. The client's own, or one for every level."""
        return {self.name + suffix: budget for suffix, budget in self.budgets.items()}

    @property
    def widest(self) -> tuple[Budget, float]:
        """A budget and ε of the plan that hold for every record: of the level that allows most, or the client's."""
        if not self.levels:
            return self.budget, self.epsilon
        return self.levels[-1].budget, max(one.epsilon for one in self.levels)

    @property
    def fits(self) -> bool:
        """Whether the plan costs no account more than its budget."""
        own = self.levels or (self,)
        return all(one.epsilon <= one.budget.epsilon for one in own)

    @property
    def whole(self) -> bool:
        """Whether the run is declared as one turn: questions and turns differ in number, or turns in length."""
        return self.adaptive or any(count != self.turns for count in self.queries)

    @property
    def noise(self) -> float:
        """The noise multiplier z of the gradient release."""
        return self.terms.noise("gradient")

    @property
    def declared_turns(self) -> int:
        """How many turns the ledger is told of.

        Where questions and turns differ in number (candidates), or turns in length, the whole run counts as one turn.
        """
        return 1 if self.whole else self.turns

    def declaration(self) -> dict[str, tuple[tuple[Event, ...], int]]:
        """What the ledger is told, by account: the events of one turn and the number of turns."""
        if self.whole:
            turns = {suffix: tuple(e for e in own if e.count) for suffix, own in self.totals().items()}
        else:
            each = [one.events for one in (self.terms, *self.asks)]
            turns = {suffix: tuple(one[suffix] for one in each) for suffix in self.budgets}
        return {self.name + suffix: (events, self.declared_turns) for suffix, events in turns.items()}

    def totals(self, turns: int | None = None) -> dict[str, list[Event]]:
        """Everything released in the whole run, or in so many turns of it, by ``budgets``' names of accounts."""
        taken = self.turns if turns is None else turns
        asked = self.queries if turns is None else tuple(min(q, taken) for q in self.queries)
        each = [(self.terms, self.terms.count * taken)]
        each += [(one, one.count * count) for one, count in zip(self.asks, asked)]
        return {suffix: [terms.events[suffix].times(count) for terms, count in each] for suffix in self.budgets}

    def total(self, turns: int | None = None) -> list[Event]:
        """The same of a client with one account; of one with levels, what its strictest records' account pays."""
        return next(iter(self.totals(turns).values()))


@dataclass(frozen=True)
class Plan:
    """A run before it starts: the method, the settings, who takes part when, and what every client will release."""

    method: Method
    training: Training
    population: Population
    schedule: Schedule
    clients: tuple[ClientPlan, ...]
    why: tuple[str, ...] = ()
    """What was chosen automatically, and why (``methods.auto``)."""
    sharing: Sharing | None = None
    """How sites share noise; None where each adds all of its own."""
    judging: Judging | None = None
    """How the run is evaluated on held-out records; None where it is not."""

    @property
    def trust(self) -> Trust:
        """Whom promises are to hold against."""
        return NOBODY_TRUSTED if self.sharing is None else self.sharing.trust

    @cached_property
    def rule(self) -> Aggregate:
        """How updates are combined: by the method's own rule, or, where only their sum is seen, with fixed weights."""
        if self.sharing is None:
            return self.method.aggregate
        return summed(self.method.aggregate, np.array(self.sharing.releases[0].weights))

    @property
    def private(self) -> bool:
        """Whether anybody is promised anything: the method adds noise, and somebody's ε is finite."""
        return self.method.private and not all(client.budget.is_public for client in self.clients)

    def variances(self, clip: float | None = None) -> NDArray[np.float64]:
        """Declared variance of one coordinate of each client's update: σ_i² = K_i (η C z_i S / b_i)².

        ``clip`` is the radius of a round where a method moves it; by default ``training.clip``.
        """
        reach = self.training.lr * (self.training.clip if clip is None else clip)
        return np.array([c.terms.count * (reach * _noise_on_mean(c)) ** 2 for c in self.clients])

    def answer_noise(self, rows: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
        """By question: deviation of the noise on each row's answer, in units of the question's bound: z S / (b √K).

        K batches answer a question that is asked beside the gradient, one batch any other.
        """
        found = {}
        places = {one.question.what: i for i, one in enumerate(o for o in self.method.ask if o.batch == "own")}
        for what in (one.question.what for one in self.method.ask):
            own = places.get(what)
            terms = [self.clients[i].terms if own is None else self.clients[i].asks[own] for i in rows]
            each = [t.own_noise(what) * t.adjacency.sensitivity / (t.divisor * math.sqrt(t.count)) for t in terms]
            found[what] = np.array(each, dtype=np.float64)
        return found

    def noise_to_signal(self, dimension: int) -> NDArray[np.float64]:
        """How much larger than the largest possible signal a client's noise is: z S √d / (b √K).

        K steps move the weights by at most K η C, and the noise moves them by about √K η z S C √d / b.
        """
        return np.array([_noise_on_mean(c) * math.sqrt(dimension / c.terms.count) for c in self.clients])


def _noise_on_mean(client: ClientPlan) -> float:
    """z S / b: deviation of the noise on the averaged gradient, in units of the clip; the client's own share of it."""
    return client.terms.own_noise("gradient") * client.terms.adjacency.sensitivity / client.terms.divisor


def make_plan(
    method: Method,
    training: Training,
    population: Population,
    dimension: int,
    seed: int,
    noises: Sequence[Sequence[Sequence[float]]] | None = None,
    trust: Trust = NOBODY_TRUSTED,
) -> Plan:
    """Schedule, noise and cost of ``method`` for these clients.

    ``noises`` are the multipliers of a run that goes on, as ``noises_of`` lists them: fixed before it started (R6).

    Guarantees: every client's planned ε, counting every release of every scheduled turn, is at most its budget under
    the accountant that the ledger charges with, unless a published rule picked too little noise (the ledger then
    refuses the turns that are not paid for).
    """
    _check_adjacency(population)
    check_levels(method, training, population, trust)
    schedule = method.select.schedule(Setting(population, training, method.calibrate.accountant, dimension, seed))
    batches = training.batches(population)
    steps = training.local_steps(population.sizes, batches)
    if trust.shared:
        sharing_of.check(method, steps.tolist(), population)
        schedule = sharing_of.distinct(schedule)
    turns = _turns(schedule, method.select.headroom)
    turns = np.where(turns > 0, turns + trust.dropouts, turns)  # a round that a site is lost from is repeated
    shapes = [
        _releases(method, training, float(b), int(n), int(k), int(t), int(q), budget)
        for b, n, k, t, q, budget in zip(batches, population.sizes, steps, turns, schedule.queries, population.budgets)
    ]
    levels = [present(population.levels_of(place)) for place in range(len(shapes))]
    shapes = [[(in_groups(t, own), count) for t, count in shape] for shape, own in zip(shapes, levels)]
    widths = {"gradient": dimension, **{one.question.what: 1 for one in method.ask}}
    shares, spread = sharing_of.wanted(method, population, schedule)
    if trust.shared:
        sites = sharing_of.fewest(schedule, population)
        shapes = [[(sharing_of.template(t, trust, sites, widths), n) for t, n in shape] for shape in shapes]
    if noises is None:
        noises = _noises(method, shapes, population.budgets, levels)
        if trust.shared:
            noises = sharing_of.levelled(shapes, noises, shares, spread, widths, schedule.rounds)
    elif [len(one) for one in noises] != [len(one) for one in shapes]:
        raise BadInput(
            f"the run to go on with has noise for {len(noises)} clients, and this study has {len(shapes)}, or other "
            "questions: resume with the same study, or start afresh"
        )
    each = [[_exactly(one, z) for (one, _), z in zip(shape, own)] for shape, own in zip(shapes, noises)]
    sharing = None
    if trust.shared:
        sharing, kinds = sharing_of.settled(trust, list(zip(*each)), shares, widths)
        each = [list(one) for one in zip(*kinds)]
    clients = []
    for i, (name, n, budget) in enumerate(zip(population.names, population.sizes, population.budgets)):
        terms = each[i]
        queries = tuple(count for _, count in shapes[i][1:])
        parts = (terms[0], tuple(terms[1:]), queries)
        asked = tuple(LevelPlan(one, math.inf) for one in levels[i])
        adaptive = method.aggregate.sets_steps
        clients.append(ClientPlan(name, int(n), budget, int(turns[i]), *parts, math.inf, adaptive, asked))
    planned = tuple(_planned(method, clients))
    if method.aggregate.goes_on:
        schedule = _until_spent(method, schedule, int(steps.max()))
    return Plan(method, training, population, schedule, planned, sharing=sharing)


def _until_spent(method: Method, schedule: Schedule, steps: int) -> Schedule:
    """As many rounds as all planned steps are at one a round, which is the least that a round takes.

    Noise stays calibrated for the rounds that were asked for: every client's total of steps does not change (R6).
    """
    if schedule.probabilities is not None or schedule.caps is not None or any(one.batch == "own" for one in method.ask):
        raise BadInput(
            f"{method.aggregate.name} with whole_budget needs every client in every round and no question with a batch "
            "of its own: how often clients are drawn or asked would not be known before training"
        )
    return everyone(schedule.clients, schedule.rounds * steps)


def _turns(schedule: Schedule, headroom: float) -> NDArray[np.int64]:
    """T_i: what each client's noise is calibrated for. With headroom, also above what it may expect to be drawn."""
    if headroom <= 1 or schedule.probabilities is None:
        return schedule.counts
    expected = schedule.probabilities * schedule.rounds * schedule.select
    return np.ceil(headroom * np.maximum(expected, schedule.counts)).astype(np.int64)


def noises_of(plan: Plan) -> list[list[list[float]]]:
    """Every client's noise multipliers of each kind of release, to be kept with a run; where a client has levels, after
    them their rates.
    """
    return [[[*(z for _, z in t.parts), *rates_of(t)] for t in (c.terms, *c.asks)] for c in plan.clients]


def _releases(
    method: Method, training: Training, batch: float, records: int, steps: int, turns: int, queries: int, budget: Budget
) -> list[tuple[Terms, int]]:
    """The terms of every kind of batch with *relative* noises, and how often each kind of turn happens."""
    sampling = training.sampling_of(batch, records)
    divisor = sampling.rate * records
    own = [one for one in method.ask if one.batch == "own"]
    beside = [one for one in method.ask if one.batch == "step"]
    times = [queries if one.of == "candidates" else turns for one in own]
    shares = [1 - sum(one.share for one in own), *(one.share for one in own)]
    counts = [steps * max(1, turns), *(max(1, t) for t in times)]
    asked = [_asked_sampling(training, one.size, batch, records) for one in own]
    relative = split(shares, counts, [sampling.rate, *(one.rate for one in asked)])
    left = shares[0] - sum(one.share for one in beside)
    parts = [("gradient", float(relative[0]) / math.sqrt(left / shares[0]))]
    parts += [(one.question.what, float(relative[0]) / math.sqrt(one.share / shares[0])) for one in beside]
    found = [(Terms(sampling, tuple(parts), steps, divisor, budget.adjacency), turns)]
    for one, drawn, z, count in zip(own, asked, relative[1:], times):
        terms = Terms(drawn, ((one.question.what, float(z)),), 1, drawn.rate * records, budget.adjacency)
        found.append((terms, count))
    return found


def _asked_sampling(training: Training, size: float | str | None, batch: float, records: int) -> Sampling:
    """How a question's own batch is drawn: like a training batch, of its own size, or everything."""
    if size == "full":
        return Sampling.full()
    return training.sampling_of(batch if size is None else min(float(size), records), records)


def _noises(
    method: Method, shapes: list[list[tuple[Terms, int]]], budgets: tuple[Budget, ...], levels: list[Levels]
) -> list[list[list[float]]]:
    """Every client's relative noises times the factor that its budget needs; zero where nothing protects.

    Where a client has levels, their rates stand after the noises (``methods.levels``).
    """
    found = [[[*(0.0 for _ in t.parts), *rates_of(t)] for t, _ in shape] for shape in shapes]
    if not method.private:
        return found
    targets, least = list(budgets), min(b.epsilon for b in budgets)
    if method.calibrate.strictest:
        targets = [replace(b, epsilon=least) for b in budgets]
        levels = [tuple(replace(one, budget=replace(one.budget, epsilon=least)) for one in own) for own in levels]
    several = [i for i, own in enumerate(levels) if own]
    if several and method.calibrate.shares != "limit":
        raise BadInput("calibrate.shares = 'accountant' is not there for clients with levels of consent: leave it out")
    for i, own in zip(
        several, calibrated([shapes[i] for i in several], [levels[i] for i in several], method.calibrate.accountant)
    ):
        found[i] = own
    plain = [i for i, own in enumerate(levels) if not own]
    for i, own in zip(plain, _plain_noises(method, [shapes[i] for i in plain], [targets[i] for i in plain])):
        found[i] = own
    return found


def _plain_noises(
    method: Method, shapes: list[list[tuple[Terms, int]]], targets: list[Budget]
) -> list[list[list[float]]]:
    """The noises of clients whose records have one budget."""
    templates = [[t.event.times(t.count * max(1, count)) for t, count in shape] for shape in shapes]
    if method.calibrate.by == "wor-paper":
        return _phase_by_phase(shapes, templates, targets)
    factors = np.ones((len(templates), 1 + sum(one.batch == "own" for one in method.ask)))
    if method.calibrate.shares == "accountant":
        factors = _alone(method, templates, targets)
        templates = [
            [replace(e, noise=e.noise * f) for e, f in zip(own, f_own)] for own, f_own in zip(templates, factors)
        ]
    scales = calibrate_events(templates, targets, accountant=method.calibrate.accountant)
    return [
        [[z * f * s for _, z in t.parts] for (t, _), f in zip(shape, own)]
        for shape, own, s in zip(shapes, factors.tolist(), scales.tolist())
    ]


def _alone(method: Method, templates: list[list[Event]], targets: list[Budget]) -> NDArray[np.float64]:
    """By client and kind of release: the factor with which this kind alone costs its share of μ²; 1 where ε = ∞.

    A budget (ε, δ) is that of a Gaussian with some μ. The kind with share s alone is to cost what one with √s·μ does.
    """
    own = [one.share for one in method.ask if one.batch == "own"]
    found = np.ones((len(templates), 1 + len(own)))
    bound = [i for i, budget in enumerate(targets) if math.isfinite(budget.epsilon)]
    epsilons, deltas = (np.array([getattr(targets[i], key) for i in bound]) for key in ("epsilon", "delta"))
    mu = gaussian_mu(epsilons, deltas)
    for kind, share in enumerate((1 - sum(own), *own)):
        costs = gaussian_epsilon(math.sqrt(share) * mu, deltas)
        aims = [replace(targets[i], epsilon=float(cost)) for i, cost in zip(bound, costs)]
        each = [[templates[i][kind]] for i in bound]
        found[bound, kind] = calibrate_events(each, aims, accountant=method.calibrate.accountant)
    return found


def _phase_by_phase(
    shapes: list[list[tuple[Terms, int]]], templates: list[list[Event]], targets: list[Budget]
) -> list[list[list[float]]]:
    """Every kind of release gets the same share of ε/2, calibrated on its own (AdaptDP-FedAvg, Theorems 1 and 4).

    The other half of ε pays for δ. Shares of questions do not matter here: two phases have ε/4 each, one has ε/2.
    """
    found = []
    for shape, template, target in zip(shapes, templates, targets):
        scales = wor_phase_scales(template, target)
        found.append([[z * s for _, z in t.parts] for (t, _), s in zip(shape, scales)])
    return found


def _exactly(terms: Terms, noises: Sequence[float]) -> Terms:
    """The terms with these multipliers and, where records have levels, the rates that stand after them."""
    parts, rates = noises[: len(terms.parts)], noises[len(terms.parts) :]
    if len(parts) != len(terms.parts) or len(rates) != len(terms.groups):
        raise BadInput("the run to go on with has other questions, or other levels of consent: use the same study")
    found = replace(terms, parts=tuple((name, float(z)) for (name, _), z in zip(terms.parts, parts)))
    return at_rates(found, rates) if rates else found


def _planned(method: Method, clients: list[ClientPlan]) -> Iterator[ClientPlan]:
    """The clients, told what their plans cost every account."""
    if not method.private:
        yield from clients
        return
    rows = [(own, c.budget.delta) for c in clients for own in c.totals().values()]
    spent = iter(composed_epsilon([own for own, _ in rows], [delta for _, delta in rows]).tolist())
    for c in clients:
        costs = [next(spent) for _ in c.budgets]
        levels = tuple(replace(one, epsilon=cost) for one, cost in zip(c.levels, costs))
        yield replace(c, epsilon=costs[0], levels=levels)


def _check_adjacency(population: Population) -> None:
    kinds = {b.adjacency for b in population.budgets}
    if len(kinds) > 1:
        raise BadInput(f"budgets mix adjacencies ({', '.join(sorted(kinds))}): one run has one adjacency")


def adapt(plan: Plan, payable: Mapping[str, int], dimension: int, seed: int) -> Plan:
    """The plan with a schedule that nobody's payable turns are exceeded by.

    Rates and noise multipliers stay as they were fixed before training; only counts adapt, under caps that the noise
    was calibrated for (R6). Rounds are drawn until a client would be asked more often than it can pay; from that round
    on the rule is solved for the others and the rest of the schedule is drawn again. Depends on public facts only.

    Guarantees: every client's scheduled turns are at most its payable ones, which are at most its plan's cap.
    """
    rule = plan.method.select
    if rule.resolve is None:
        return plan
    setting = Setting(plan.population, plan.training, plan.method.calibrate.accountant, dimension, seed)
    left = np.array([payable.get(c.name, c.turns) for c in plan.clients], dtype=np.int64)
    schedule, start, alive = plan.schedule, 1, left > 0
    changed = not alive.all()
    while True:
        if not alive.any():
            schedule = without(schedule, range(schedule.clients), start)
            break
        if changed:
            schedule = redraw(schedule, rule.resolve(setting, alive), start)
        dry = _first_overdraw(schedule, left, start)
        if dry is None:
            break
        kept = schedule.asked[start - 1 : dry - 1].ravel()
        left = left - np.bincount(kept[kept >= 0], minlength=len(left))
        asked = np.bincount(schedule.asked[dry - 1][schedule.asked[dry - 1] >= 0], minlength=len(left))
        alive, start, changed = alive & (asked <= left) & (left > 0), dry, True
    return replace(plan, schedule=schedule)


def _first_overdraw(schedule: Schedule, left: np.ndarray, start: int) -> int | None:
    """The first round from ``start`` on in which some client is asked beyond what it has left."""
    taken = np.zeros_like(left)
    for number in range(start, schedule.rounds + 1):
        asked = schedule.asked[number - 1]
        np.add.at(taken, asked[asked >= 0], 1)
        if (taken > left).any():
            return number
    return None
