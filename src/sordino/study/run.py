"""``sd.train`` and ``sd.plan``: from clients, a model and a method to a run with a result."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sordino import methods, models
from sordino.client import gradients
from sordino.client.gradients.losses import loss_by_name
from sordino.client.rows import Records
from sordino.client.turn import Work
from sordino.data import Federation
from sordino.engine import rounds as server_rounds
from sordino.engine.checkpoint import Checkpoint
from sordino.engine.devices import torch_device
from sordino.engine.evaluate import Observer
from sordino.engine.mapped import make_records, pages_of
from sordino.engine.sharded import Shard
from sordino.engine.simulate import Setup, simulate
from sordino.engine.threads import threads_for_step
from sordino.errors import BadInput, BudgetRefused, SordinoError
from sordino.methods import Method, Plan, Population, Training
from sordino.methods.identity import identities, identity
from sordino.privacy.accounting import composed_epsilon
from sordino.privacy.gate import Gate
from sordino.privacy.generators import Keyed
from sordino.privacy.ledger import Ledger
from sordino.privacy.ledger import Plan as LedgerPlan
from sordino.privacy.types import Budget
from sordino.study.folder import Folder, planned_noises
from sordino.study.result import build_result, load_run, save_run, to_json
from sordino.study.stacked import Alone, Stacked
from sordino.study.view import PlanView

log = logging.getLogger("sordino.study")

SHOWN_CLIENTS = 100
"""Above this many clients the running ε is left out of the rounds: it is shown at the end, by the ledger."""

Callback = Callable[[dict[str, Any]], None]


@dataclass
class Run:
    """A finished (or interrupted) run: the result that ``result.json`` holds, and the trained model."""

    result: dict[str, Any]
    weights: Tensor
    template: nn.Module | None

    @property
    def privacy(self) -> list[dict[str, Any]]:
        """What every client budgeted and spent."""
        return list(self.result["privacy"])

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """What was seen in every round."""
        return list(self.result["rounds"])

    @property
    def model(self) -> nn.Module:
        """The trained module."""
        if self.template is None:
            raise BadInput("this run was saved with a model of your own: build it and load run.weights into it")
        engine = gradients.build(self.template, self.result["study"]["loss"], kind="exact")
        engine.load(self.template, self.weights)
        return self.template.eval()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write result and weights into one file; ``sd.load`` reads it."""
        save_run(Path(path), self.result, self.weights)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write the report of this run: one HTML file that works offline."""
        from sordino.study.report import write

        write([json.loads(to_json(self.result))], Path(path))
        return Path(path)


def load(path: str | os.PathLike[str]) -> Run:
    """A run from the file that ``run.save`` wrote, or from a run folder."""
    result, weights = load_run(Path(path))
    about = result["study"]["model"]
    template = None
    if about["name"] in models.names() or ":" in about["name"]:
        template = models.build(
            about["name"], tuple(about["shape"]), about["classes"], result["seed"], **about["options"]
        )
    return Run(result, weights, template)


@dataclass(frozen=True)
class Prepared:
    """Arguments of ``train`` and ``plan``, checked and put together."""

    clients: Federation
    template: nn.Module
    engine: gradients.Engine
    plan: Plan
    study: dict[str, Any]
    seed: int
    trained: nn.Module
    """The model from its first trained layer on, which is what ``engine`` has."""
    fixed: nn.Module | None = None
    """What the model does to a record before its first trained layer: ``engine`` takes it as done."""

    @property
    def key(self) -> str:
        """What the run's random streams are keyed by: the seed and everything that shapes a release."""
        body = json.dumps([self.study, self.seed], sort_keys=True, default=str)
        return hashlib.sha256(body.encode()).hexdigest()

    @property
    def rules(self) -> dict[str, str]:
        """What the method's parts and the model are, beyond their names."""
        return {**identities(self.plan.method), "model": identity([repr(self.template), type(self.template).forward])}

    @property
    def kept_as(self) -> str:
        """What a run's state is found by after a crash: its key, and what its rules are."""
        return hashlib.sha256(json.dumps([self.key, self.rules], sort_keys=True).encode()).hexdigest()


def prepare(
    clients: Federation,
    model: str | nn.Module,
    method: str | Method,
    seed: int,
    model_options: dict[str, Any] | None,
    training: dict[str, Any],
    noises: Sequence[Sequence[Sequence[float]]] | None = None,
    precision: str = "float32",
) -> Prepared:
    """Check the arguments against each other, build the model, make the plan. Touches no record."""
    chosen = methods.get(method)
    if clients.budgets is None and chosen.private:
        raise BadInput(f"method {chosen.name!r} is private, but the clients have no budgets: call .with_budgets(…)")
    budgets = clients.budgets or tuple(Budget(math.inf, 1e-5) for _ in clients.names)
    batches = None if clients.batch_sizes is None else np.asarray(clients.batch_sizes, dtype=np.float64)
    population = Population(tuple(clients.names), clients.sizes, budgets, batches)
    try:
        settings = Training(**training)
    except TypeError as error:
        raise BadInput(f"training settings: {error}; known: {', '.join(Training.__dataclass_fields__)}") from None
    options = dict(model_options or {})
    template = models.build(model, clients.shape, clients.classes, seed, **options)
    models.check(template, clients.shape, clients.classes)
    loss = "cross-entropy" if clients.task == "classification" else "half-squared-error"
    if precision not in {"float32", "mixed"}:
        raise BadInput(f"precision {precision!r} is unknown: use float32 or mixed")
    # A map of every record by itself is applied once, not at every step; a mapped file is too large for that.
    fixed, trained = (None, template) if pages_of(clients.x) is not None else models.split_fixed(template)
    engine = gradients.build(trained, loss, mixed=precision == "mixed")
    plan = methods.make_plan(chosen, settings, population, engine.dimension, seed, noises)
    study = {
        "data": clients.description,
        "budgets": [None if math.isinf(b.epsilon) else b.epsilon for b in budgets],
        "sizes": clients.sizes.tolist(),
        "model": {
            "name": model if isinstance(model, str) else type(model).__name__,
            "options": options,
            "shape": list(clients.shape),
            "classes": clients.classes,
            "parameters": engine.dimension,
        },
        "loss": loss,
        "method": {"name": chosen.name, **chosen.describe()},
        # Only where it is asked for: random streams are keyed by all of this, and old runs are to repeat.
        "training": {k: v for k, v in asdict(settings).items() if k != "exact_noise" or v},
        "precision": precision,
    }
    return Prepared(clients, template, engine, plan, json.loads(to_json(study)), seed, trained, fixed)


def plan(
    clients: Federation,
    model: str | nn.Module = "cnn-small",
    method: str | Method = "dp-fedavg",
    rounds: int = 40,
    seed: int = 0,
    *,
    model_options: dict[str, Any] | None = None,
    **training: Any,
) -> PlanView:
    """What ``train`` with these arguments would do: noise per client, schedule, cost, warnings. No training."""
    ready = prepare(clients, model, method, seed, model_options, {"rounds": rounds, **training})
    return PlanView(ready.plan, ready.engine.dimension, ready.engine.describe(), seed)


def train(
    clients: Federation,
    model: str | nn.Module = "cnn-small",
    method: str | Method = "dp-fedavg",
    rounds: int = 40,
    seed: int = 0,
    *,
    out: str | os.PathLike[str] | None = None,
    ledger: str | os.PathLike[str] | None = None,
    resume: bool = False,
    device: str = "cpu",
    callbacks: Sequence[Callback] = (),
    model_options: dict[str, Any] | None = None,
    name: str | None = None,
    precision: str = "float32",
    **training: Any,
) -> Run:
    """Train one model together, every client under its own budget.

    Parameters
    ----------
    clients: a federation with budgets: ``sd.data.load(…).partition(…).with_budgets(…)``.
    model: a name, ``"module:factory"``, or an ``nn.Module``.
    method: a registered name, or ``sd.Method(…)``.
    out: a run folder (result.json, ledger, checkpoint, log); ``resume=True`` goes on where it stopped.
    ledger: a ledger file that is cumulative over runs; default: a fresh one in the run folder. A run that goes on
        remembers its own, and refuses another.
    callbacks: called with each round's record.
    name: what to call the study in reports.
    precision: ``"mixed"`` lets a GPU compute activations in TF32; gradients of parameters and norms never are.
    training: keys of ``Training``: batch or rate, steps or epochs, lr, clip, sampling, select, ….

    Guarantees
    ----------
    Every release is charged to the ledger before its noise is drawn; no client's spent ε exceeds its budget.
    """
    shard = Shard.now()
    if shard is not None and resume:
        raise BadInput("a run over several processes cannot be resumed: resume it in one, or start it afresh")
    if shard is not None and not shard.first:
        out = ledger = None
    if resume and out is None:
        raise BadInput("resume=True needs out=, the folder of the run to go on with")
    noises = planned_noises(Path(out)) if out is not None and resume else None
    ready = prepare(clients, model, method, seed, model_options, {"rounds": rounds, **training}, noises, precision)
    shared, on = None if ledger is None else Path(ledger), torch_device(device)
    folder = None
    if out is not None:
        folder = Folder.open(Path(out), ready.study, ready.plan, seed, resume, ledger=shared, rules=ready.rules)
    with tempfile.TemporaryDirectory(prefix="sordino-") as scratch:
        where = folder.ledger if folder else shared or Path(scratch) / "ledger.db"
        try:
            opened = Ledger(where, durable=bool(shared or folder))
        except SordinoError:
            if folder and not resume:
                folder.undo()
            raise
        with opened as book:
            if folder and ready.plan.method.private:
                folder.check_paid(book)
            return _train(ready, book, folder, on, callbacks, name)


def train_prepared(
    ready: Prepared, device: str = "cpu", callbacks: Sequence[Callback] = (), keep: Path | None = None
) -> Run:
    """Train a prepared run with a ledger of its own that ends with it, as ``train`` does without a folder.

    With ``keep``, a folder, its state is kept there every minute, and the same run goes on from it after a crash;
    ``callbacks`` also hear of the rounds before.
    """
    where = torch_device(device)
    stack = None if keep is None else Stacked.below(keep, [ready.kept_as])
    with tempfile.TemporaryDirectory(prefix="sordino-") as scratch:
        path = Path(scratch) / "ledger.db"
        stopped = stack.restore([path], where) if stack and stack.names() else []
        for record in [record for state in stopped for record in state.history]:
            for callback in callbacks:
                callback(record)
        with Ledger(path, durable=False) as book:
            alone = None if stack is None else Alone(stack, book, stopped)
            try:
                return _train(ready, book, alone, where, callbacks, None)
            except SordinoError as error:
                if stack is not None and not isinstance(error, BadInput):  # a full disk may pass, divergence not
                    stack.drop()
                raise


def _train(
    ready: Prepared,
    book: Ledger,
    folder: Folder | Alone | None,
    device: torch.device,
    callbacks: Sequence[Callback],
    name: str | None,
) -> Run:
    private = ready.plan.method.private
    run = folder.run if folder else uuid.uuid4().hex
    payable = open_accounts(book, ready.plan, run) if private else {}
    shard = Shard.now()
    payable = payable if shard is None else shard.same(payable)
    if not (isinstance(folder, Folder) and folder.begun):
        try:
            check_payable(ready.plan, payable, book, run)
        except BudgetRefused:
            if isinstance(folder, Folder):
                folder.undo()
            raise
    plan = methods.adapt(ready.plan, payable, ready.engine.dimension, ready.seed)
    ready = replace(ready, plan=plan)
    gate = Gate(book if private else None, Keyed(ready.key), run)
    setup = replace(make_setup(ready, gate, payable, device), shard=shard)
    if shard is not None and folder is not None and setup.work.local.state:
        raise BadInput(
            f"{plan.method.name!r} keeps state at clients, which a checkpoint of one process of several lacks"
        )
    _warn_untested(ready.clients)
    state = folder.checkpoint(device) if folder else None
    if state is None:
        first = ready.engine.flatten(ready.template).to(device)
        state = Checkpoint(0, first, first)
    with threads_for(plan, ready.engine.dimension):
        for now in simulate(setup, state):
            if folder:
                folder.keep(now)
            for callback in callbacks:
                callback(now.history[-1])
    early = server_rounds.stopped(plan, state.round)
    if early:
        log.warning("%s: %s", plan.method.name, early["reason"])
    study = ready.study if name is None else {"name": name, **ready.study}
    result = build_result(study, plan, state, book if private else None, run, ready.seed, setup.observer)
    if private:
        book.close_run(run)  # what was declared and not used is free again
    done = Run(result, state.shown.detach().cpu(), ready.template)
    if folder:
        folder.finish(result, done.weights)
    return done


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


def threads_for(plan: Plan, dimension: int) -> AbstractContextManager[None]:
    """As many threads as the largest step of a plan is worth."""
    return threads_for_step(dimension, max(c.terms.divisor for c in plan.clients))


def open_accounts(book: Ledger, plan: Plan, run: str) -> dict[str, int]:
    """Open an account for every client, declare the plan, and return how many turns each can pay."""
    book.open_accounts({client.name: client.budget for client in plan.clients}, simulated=True)
    taking = [c for c in plan.clients if c.turns > 0 or any(c.queries)]
    return book.declare([LedgerPlan(c.name, run, *c.declaration()) for c in taking])


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
    log.warning("%d of %d clients sit out, for their budgets pay for no turn: %s", len(dry), len(plan.clients), told)


def make_setup(
    ready: Prepared, gate: Gate, payable: dict[str, int], device: torch.device, records: Records | None = None
) -> Setup:
    """Put data, engine, gate and observer together; ``records`` where another run has them on the device already."""
    clients, plan = ready.clients, ready.plan
    ready.engine.module.to(device)  # what it holds fixed; weights come with every call
    if records is None:
        records = _after_fixed(ready, make_records(clients.x, clients.y, clients.valid, device))
    central = None
    if clients.central is not None:
        every = np.ones(len(clients.central[1]), bool)
        central = _after_fixed(ready, make_records(*clients.central, every, device))
    held = [test if len(test) else train for test, train in zip(clients.test, clients.train)]
    also = tuple(one.question for one in plan.method.ask if one.batch == "step")
    work = Work(ready.engine, plan.method.clip, plan.method.local, also, stack=device.type == "cuda")
    if plan.training.exact_noise:
        if device.type != "cpu":
            raise BadInput('training.exact_noise computes as a site does, on a CPU: use device = "cpu"')
        work = replace(work, alone=gradients.Alone(ready.trained, loss_by_name(ready.study["loss"])))
    loss = loss_by_name(ready.study["loss"]).values
    classes = clients.task == "classification"
    observer = Observer(ready.engine, loss, records, held, clients.sizes, central, classes, clients.train)
    return Setup(
        plan,
        work,
        gate,
        records,
        clients.train,
        observer,
        payable=payable,
        spending=lambda turns: spending(plan, turns),
    )


def _after_fixed(ready: Prepared, records: Records) -> Records:
    """Records as the first trained layer sees them."""
    return records if ready.fixed is None else replace(records, x=models.apply_fixed(ready.fixed, records.x))


def spending(plan: Plan, turns: np.ndarray) -> dict[str, float] | None:
    """Min, median and max over private clients of the ε that this run has spent after these turns."""
    bounded = [c for c in plan.clients if not c.budget.is_public]
    if not plan.method.private or not 0 < len(bounded) <= SHOWN_CLIENTS:
        return None
    taken = dict(zip((c.name for c in plan.clients), turns.tolist()))
    spent = composed_epsilon([c.total(taken[c.name]) for c in bounded], [c.budget.delta for c in bounded])
    return {"min": float(spent.min()), "median": float(np.median(spent)), "max": float(spent.max())}
