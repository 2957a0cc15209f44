"""A session: the life of one run, from its accounts and its plan to its result, alone or in a stack with others."""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sordino import methods, models
from sordino.client import gradients
from sordino.client.gradients.losses import loss_by_name
from sordino.client.recorded import Recorder
from sordino.client.rows import Records, seen_alone
from sordino.client.turn import Work
from sordino.data import Federation
from sordino.engine.checkpoint import Checkpoint
from sordino.engine.devices import repeatable, threads_for_step, torch_device
from sordino.engine.evaluate import Observer
from sordino.engine.mapped import MAPPED_BYTES, make_records
from sordino.engine.rounds import stopped
from sordino.engine.scoring import Scoring
from sordino.engine.sharded import ProcessLost, Shard, SharedGate
from sordino.engine.simulate import Setup, simulate
from sordino.engine.together import simulate_together
from sordino.errors import BadInput, BudgetRefused, CannotStack, Diverged, SordinoError
from sordino.methods import Plan
from sordino.privacy.accounting import composed_epsilon
from sordino.privacy.gate import Gate
from sordino.privacy.generators import Keyed
from sordino.privacy.held import HELD
from sordino.privacy.ledger import Ledger, LedgerPlan
from sordino.study.folder import Begun, Copies, Keeper
from sordino.study.prepared import Prepared, Run
from sordino.study.result import build_result, records_of

log = logging.getLogger("sordino.study")

SHOWN_CLIENTS = 100
"""Above this many clients the running ε is left out of the rounds: it is shown at the end, by the ledger."""

Callback = Callable[[dict[str, Any]], None]


class Session:
    """One run: its accounts are open, its plan is declared and adapted to who can pay, its first round can begin.

    Parameters
    ----------
    ready: what to run.
    book: the ledger that the run pays from; None charges nobody, to look inside a step only.
    run: the run's name in the ledger.
    state: what it goes on from, for a run that was stopped; nobody's budget is questioned again.
    gate: the kind of gate that releases pass.
    records: the records on the device, where another run has them there already.
    study: what people call the run, for the ledger's statements.
    """

    def __init__(
        self,
        ready: Prepared,
        book: Ledger | None,
        run: str,
        device: torch.device,
        state: Checkpoint | None = None,
        gate: type[Gate] = Gate,
        records: Records | None = None,
        study: str = "",
    ) -> None:
        self.book = book if ready.plan.method.private else None
        self.run = run
        shard = self.shard = Shard.now()

        def opened() -> tuple[dict[str, int], dict[str, int]]:
            if self.book is None:
                return {}, {}
            payable = open_accounts(self.book, ready.plan, run, study)
            judged = open_held_accounts(self.book, ready, run, study)
            if state is None:
                check_payable(ready.plan, payable, self.book, run)
            return payable, judged

        payable, judged = shard.of_first(opened)
        plan = methods.adapt(ready.plan, payable, ready.engine.dimension, ready.seed)
        self.ready = replace(ready, plan=plan)
        source = Keyed(ready.key)
        self.gate = gate(self.book, source, run)
        if shard.size > 1:
            self.gate = SharedGate(self.book, source, run, shard, ready.plan.method.private)
        self.setup = make_setup(self.ready, self.gate, payable, device, records)
        if plan.judging is not None and ready.held is not None:
            scoring = Scoring(plan, plan.judging, ready.held, ready.judge or ready.engine, self.gate, judged, shard)
            self.setup = replace(self.setup, scoring=scoring)
        # A module of one's own may begin elsewhere in every process: the first one's weights are the run's.
        self.state = state or shard.same(beginning(ready, device))

    def rounds(self) -> Iterator[Checkpoint]:
        """Train the rounds that are left; the state after each."""
        return simulate(self.setup, self.state)

    def result(self, name: str | None) -> Run:
        """End the run: its result, called ``name``. What was declared and not used is free again in the ledger."""
        plan, state = self.ready.plan, self.state
        early = stopped(plan, state.round, state.history)
        if early and self.shard.first:
            log.warning("%s: %s", plan.method.name, early["reason"])
        study = {**({} if name is None else {"name": name}), **self.ready.study}
        study |= {"auto": list(plan.why)} if plan.why else {}
        clients = self.ready.clients
        records = records_of(clients.schema, clients.task, clients.classes)
        result = build_result(study, self.setup, state, self.book, self.run, self.ready.seed, records)
        if self.ready.baselines is not None:
            result["baselines"] |= self.ready.baselines()
        if self.book is not None:
            self.book.close_run(self.run)
        personal = self._personal()
        return Run(self.shard.same(result), state.chosen.detach().cpu(), self.ready.template, personal)

    def collect(self) -> None:
        """Bring what clients keep at all processes to the first one, which writes it down."""
        self.shard.collect(self.state, self.setup.work.local.state, len(self.ready.plan.clients))

    def _personal(self) -> Tensor | None:
        """All clients' own models, a row each; None where there are none, or more than a run should hold."""
        own, count = self.setup.own_models(self.state), len(self.ready.plan.clients)
        if own is None or 4 * count * len(self.state.weights) > MAPPED_BYTES:
            return None
        self.collect()
        return self.shard.of_first(lambda: torch.stack([own(client).detach().cpu() for client in range(count)]))


def beginning(ready: Prepared, device: torch.device) -> Checkpoint:
    """The state before the first round: the weights that the model was built with."""
    shown = (ready.judge or ready.engine).flatten(ready.template).to(device)
    first = shown if ready.judge is None else ready.engine.flatten(ready.trained).to(device)
    return Checkpoint(0, first, shown)


def train_alone(
    ready: Prepared, keeper: Keeper, device: str, callbacks: Sequence[Callback] = (), name: str | None = None
) -> Run:
    """Train one run, whose state ``keeper`` keeps; ``callbacks`` hear the record of every round."""
    (found,) = _train([ready], keeper, torch_device(device), callbacks, name)
    if not isinstance(found, Run):
        raise found
    return found


def train_prepared(
    ready: Prepared, device: str = "cpu", callbacks: Sequence[Callback] = (), keep: Path | None = None
) -> Run:
    """Train a prepared run with a ledger of its own that ends with it, as ``train`` does without a folder.

    With ``keep``, a folder, its state is kept there every minute, and the same run goes on from it after a crash;
    ``callbacks`` also hear of the rounds before.
    """
    return train_alone(ready, Copies(keep, [ready.kept_as] if keep else ["alone"]), device, callbacks)


def train_together(
    runs: Sequence[Prepared],
    device: str = "auto",
    callbacks: Sequence[Callback] = (),
    keeper: Copies | None = None,
    name: str | None = None,
) -> list[Run | Diverged | BudgetRefused]:
    """Train prepared runs in one stack; each ends as ``train_alone`` would end it, up to rounding.

    A run that diverges, or that nobody can pay for, does not stop the others: in its place stands why. ``callbacks``
    hear the number of every round that is done.
    """
    for one in runs:
        if one.kinship != runs[0].kinship or not one.stackable:
            raise CannotStack(
                "runs that share a stack have one model, loss and shape of a record, take many records at a time and "
                "have them in memory: train these apart"
            )
    if Shard.now().size > 1:
        raise CannotStack("runs that several processes simulate together do not share a stack: train these apart")
    keeper = Copies(None, [""] * len(runs)) if keeper is None else keeper
    return _train(runs, keeper, torch_device(device), callbacks, name, stack=True)


def _train(
    runs: Sequence[Prepared],
    keeper: Keeper,
    device: torch.device,
    callbacks: Sequence[Callback],
    name: str | None,
    stack: bool = False,
) -> list[Run | Diverged | BudgetRefused]:
    """The sessions of one run, or of a stack, from their accounts to their results."""
    shard = Shard.now()
    sessions: dict[int, Session] = {}
    ended: dict[int, Run | Diverged | BudgetRefused] = {}
    held: dict[tuple[int, ...], Records] = {}

    def tell(record: dict[str, Any]) -> None:
        for callback in callbacks:
            callback(record)

    same_bits = repeatable(device, all(one.deterministic for one in runs))
    with tempfile.TemporaryDirectory(prefix="sordino-") as scratch, same_bits, _ending(keeper, shard):
        with ExitStack() as books:
            for place, ready in enumerate(runs):
                begin = partial(keeper.begin, place, ready.plan.method.private, Path(scratch), device)
                run, book, state = _begin(shard, begin, books, device)
                own = ready.clients
                source = tuple(id(part) for part in (own.x, own.y, own.valid, own.units))
                ready = replace(ready, engine=runs[0].engine)
                try:
                    session = Session(ready, book, run, device, state, records=held.get(source), study=name or "")
                except BudgetRefused as error:
                    if shard.first:
                        keeper.undo(place)
                    ended[place] = error
                    continue
                held[source] = session.setup.records
                sessions[place] = session
            for number in range(1, max((one.state.round for one in sessions.values()), default=0) + 1):
                if keeper.retells:
                    tell({"round": number})
            for record in (_stacked if stack else _alone)(sessions, ended):
                if keeper.keeps:
                    for one in sessions.values():
                        one.collect()
                shard.of_first(lambda: keeper.keep(*(one.state for one in sessions.values())))
                tell(record)
            ended |= {place: one.result(name) for place, one in sessions.items() if place not in ended}
        for place, done in ended.items():
            if isinstance(done, Run):
                finish = partial(keeper.finish, done.result, done.weights, place, done.personal)
                shard.of_first(finish)
    return [ended[place] for place in range(len(runs))]


def _begin(
    shard: Shard, begin: Callable[[], Begun], books: ExitStack, device: torch.device
) -> tuple[str, Ledger | None, Checkpoint | None]:
    """A run's name and the state that it goes on from, in all processes; the ledger, open, in the first."""
    found: list[Begun] = []

    def begun() -> str:
        found.append(begin())
        books.enter_context(found[0][1])
        return found[0][0]

    run = shard.of_first(begun)
    _, book, state = found[0] if found else (run, None, None)
    return run, book, shard.spread(state, device)


def _alone(sessions: Mapping[int, Session], ended: dict[int, Any]) -> Iterator[dict[str, Any]]:
    """The rounds of one session; where it diverges it is ``ended``."""
    for place, session in sessions.items():
        ready = session.ready
        if session.shard.first:
            _warn_untested(ready.clients)
        with threads_for_step(ready.engine.dimension, max(c.terms.divisor for c in ready.plan.clients)):
            try:
                for now in session.rounds():
                    yield now.history[-1]
            except Diverged as error:
                ended[place] = error


def _stacked(sessions: Mapping[int, Session], ended: dict[int, Any]) -> Iterator[dict[str, Any]]:
    """The rounds of all sessions together, of which only the number is told; who diverges is ``ended``."""
    lost: dict[int, Diverged] = {}
    setups = [
        replace(one.setup, key=one.ready.key, work=replace(one.setup.work, stack=True)) for one in sessions.values()
    ]
    if setups:
        for number in simulate_together(setups, [one.state for one in sessions.values()], lost):
            yield {"round": number}
    ended |= {list(sessions)[i]: error for i, error in lost.items()}


@contextmanager
def _ending(keeper: Keeper, shard: Shard) -> Iterator[None]:
    """Tell a keeper how its runs ended; an interruption is no end, nor is it when another process is gone."""
    try:
        yield
    except SordinoError as error:
        if shard.first and not isinstance(error, ProcessLost):
            keeper.end(error)
        raise
    if shard.first:
        keeper.end()


def _warn_untested(clients: Federation) -> None:
    bare = [name for name, test in zip(clients.names, clients.test) if not len(test)]
    if bare:
        told = ", ".join(bare[:5]) + (", …" if len(bare) > 5 else "")
        log.warning(
            "%d of %d clients have no test records (%s): accuracy and loss are those of their training records",
            len(bare),
            len(clients.names),
            told,
        )


def open_accounts(book: Ledger, plan: Plan, run: str, study: str = "") -> dict[str, int]:
    """Open an account for every client, declare the plan, and return how many turns each can pay."""
    accounts = {account: budget for client in plan.clients for account, budget in client.accounts.items()}
    owners = {account: client.name for client in plan.clients if client.levels for account in client.accounts}
    known = {account.client: account.owner for account in book.accounts()}
    mixed = [c.name for c in plan.clients if (c.name in known if c.levels else c.name in known.values())]
    if mixed:
        raise BadInput(
            f"{book.path} knows {mixed[0]!r} {'without' if mixed[0] in known else 'with'} levels of consent: what its "
            "records spent would not count; use another ledger"
        )
    book.open_accounts(accounts, simulated=True, owners=owners)
    taking = {c.name: c.declaration() for c in plan.clients if c.turns > 0 or any(c.queries)}
    plans = [LedgerPlan(account, run, *told, study) for own in taking.values() for account, told in own.items()]
    paid = book.declare(plans)
    return {name: min(paid[account] for account in own) for name, own in taking.items()}


def open_held_accounts(book: Ledger, ready: Prepared, run: str, study: str = "") -> dict[str, int]:
    """Open an account for everybody's held-out records, declare the evaluations, and return how many each can pay.

    A ledger of several runs remembers which records are held out: none may train on what another holds out.
    """
    plan = ready.plan
    if plan.judging is None:
        if book.parted() is not None:
            raise BadInput(
                f"{book.path} belongs to runs that held records out, and this one would train on them: say "
                "[evaluation] as they did, or use another ledger"
            )
        return {}
    share, told = plan.judging.settings.share, json.dumps([ready.clients.description, ready.seed], default=str)
    known = book.parted()
    try:
        book.split(share, "", lambda key: hashlib.sha256(key + told.encode()).hexdigest())
    except BadInput as error:
        if known is None:
            raise
        raise BadInput(
            f"{book.path} belongs to runs that held out other records (another seed, evaluation.share or data): a "
            "record is in one part for ever; use another ledger"
        ) from error
    judging, asked = plan.judging, [plan.clients[i] for i in plan.judging.who]
    book.open_accounts({client.name + HELD: client.budget for client in asked}, simulated=True)
    events = {plan.clients[i].name + HELD: judging.terms[i].event for i in judging.who}
    return book.declare([LedgerPlan(name, run, (event,), judging.times, study) for name, event in events.items()])


def check_payable(plan: Plan, payable: dict[str, int], book: Ledger, run: str) -> None:
    """Refuse a run in which nobody can pay for a turn, before it begins; where some cannot, say who sits out."""
    dry = [name for name, turns in payable.items() if turns == 0]
    if not dry:
        return
    told = ", ".join(dry[:10]) + (f" and {len(dry) - 10} more" if len(dry) > 10 else "")
    if len(dry) == len(payable):
        book.close_run(run)
        raise BudgetRefused(
            f"nobody's budget pays for a single turn of this plan ({told}): nothing was trained or charged; top the "
            "ledger up, plan fewer rounds, or use another ledger"
        )
    able = sum(payable.get(c.name, 0) > 0 for c in plan.clients if not c.budget.is_public)
    if plan.sharing is not None and able < plan.sharing.needed:
        book.close_run(run)
        raise BudgetRefused(
            f"{able} of {len(payable)} clients can pay for a turn of this plan, and {plan.sharing.needed} are needed "
            f"to share noise ({told} cannot): nothing was trained or charged; top the ledger up, leave those clients "
            "out, or plan for as many trust.dropouts"
        )
    log.warning("%d of %d clients sit out, for their budgets pay for no turn: %s", len(dry), len(plan.clients), told)


def make_setup(
    ready: Prepared, gate: Gate, payable: dict[str, int], device: torch.device, records: Records | None = None
) -> Setup:
    """Put data, engine, gate and observer together; ``records`` where another run has them on the device already."""
    clients, plan = ready.clients, ready.plan
    judge = ready.judge or ready.engine
    for engine in {judge, ready.engine}:
        engine.module.to(device)  # what it holds fixed; weights come with every call

    def after_fixed(found: Records) -> Records:
        """Records as the first trained layer sees them."""
        if ready.fixed is None:
            return found
        if plan.training.exact_noise:
            return seen_alone(ready.fixed, found)
        return replace(found, x=models.apply_fixed(ready.fixed, found.x))

    if records is None:
        records = after_fixed(make_records(clients.x, clients.y, clients.valid, device, clients.units))
    central = None
    if clients.central is not None:
        every = np.ones(len(clients.central[1]), bool)
        central = after_fixed(make_records(*clients.central, every, device))
    trained = [clients.records_of(part) for part in clients.train]
    held = [test if len(test) else train for test, train in zip(clients.test, trained)]
    also = tuple(one.question for one in plan.method.ask if one.batch == "step")
    recorder = Recorder() if device.type == "cuda" else None
    work = Work(ready.engine, plan.method.clip, plan.method.local, also, stack=device.type == "cuda")
    work = replace(work, augment=plan.training.augmented, unit_records=clients.unit_records, recorder=recorder)
    if plan.training.exact_noise:
        graded = ready.graded_loss or ready.study["loss"]
        if device.type != "cpu":
            raise BadInput('training.exact_noise computes as a site does, on a CPU: use device = "cpu"')
        work = replace(work, alone=gradients.Alone(ready.trained, loss_by_name(graded), copies=work.copies))
    loss = loss_by_name(ready.study["loss"]).values
    classes = clients.task == "classification"
    shard = Shard.now()
    observer = Observer(judge, loss, records, held, clients.sizes, central, classes, trained, shard)
    return Setup(
        plan,
        work,
        gate,
        records,
        clients.train,
        observer,
        payable=payable,
        spending=lambda turns: spending(plan, turns),
        members=clients.members,
        shard=shard,
    )


def spending(plan: Plan, turns: np.ndarray) -> dict[str, float] | None:
    """Min, median and max over private clients' accounts of the ε that this run has spent after these turns."""
    bounded = [c for c in plan.clients if not c.budget.is_public]
    if not plan.method.private or not 0 < len(bounded) <= SHOWN_CLIENTS:
        return None
    taken = dict(zip((c.name for c in plan.clients), turns.tolist()))
    rows = [(own, c.budget.delta) for c in bounded for own in c.totals(taken[c.name]).values()]
    spent = composed_epsilon([own for own, _ in rows], [delta for _, delta in rows])
    return {"min": float(spent.min()), "median": float(np.median(spent)), "max": float(spent.max())}
