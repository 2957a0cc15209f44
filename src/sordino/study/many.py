"""Many runs of one model on one device, stacked: how full-size tables are made."""

from __future__ import annotations

import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from sordino import methods
from sordino.client.rows import Records
from sordino.engine.checkpoint import Checkpoint
from sordino.engine.devices import torch_device
from sordino.engine.simulate import Setup
from sordino.engine.together import simulate_together
from sordino.errors import BadInput, Diverged, SordinoError
from sordino.privacy.gate import Gate
from sordino.privacy.generators import Keyed
from sordino.privacy.ledger import Ledger
from sordino.study import stacked
from sordino.study.folder import Folder
from sordino.study.result import build_result
from sordino.study.run import Prepared, Run, check_payable, make_setup, open_accounts
from sordino.study.stacked import Stacked


def train_together(
    runs: Sequence[Prepared],
    device: str = "auto",
    watch: Callable[[int], None] = lambda number: None,
    folders: Sequence[Folder] | None = None,
    name: str | None = None,
    keep: Path | None = None,
) -> list[Run | Diverged]:
    """Train prepared runs in one stack; each ends as ``sd.train`` would end it, up to rounding.

    A run that diverges does not stop the others: in its place stands why.

    The runs must have one model in common and records of one shape; see ``engine.together``. With ``folders``, each
    run's result, model and ledger are put into its folder when the stack is done: whole, or not at all. ``name``
    is what to call the study in reports. With ``keep``, a folder, the stack's state is kept there every
    ``stacked.EVERY`` seconds, and the same runs go on from it after a crash.
    """
    where = torch_device(device)
    lead = runs[0]
    setups: list[Setup] = []
    states: list[Checkpoint] = []
    books: list[Ledger] = []
    held: dict[tuple[int, ...], Records] = {}
    _check(runs)
    kept = None if keep is None else Stacked.below(keep, [one.kept_as for one in runs])
    before = None if kept is None else kept.names()
    names = [uuid.uuid4().hex for _ in runs] if folders is None else [folder.run for folder in folders]
    names = before if before is not None and folders is None else names
    with tempfile.TemporaryDirectory(prefix="sordino-") as scratch:
        stopped: list[Checkpoint] = []
        if kept is not None and before == names:
            stopped = kept.restore([Path(scratch) / f"{run}.db" for run in names], where)
        for run, ready in zip(names, runs):
            private = ready.plan.method.private
            book = Ledger(Path(scratch) / f"{run}.db", durable=False)
            payable = open_accounts(book, ready.plan, run) if private else {}
            if not stopped:
                check_payable(ready.plan, payable, book, run)
            plan = methods.adapt(ready.plan, payable, lead.engine.dimension, ready.seed)
            gate = Gate(book if private else None, Keyed(ready.key), run)
            source = tuple(id(part) for part in (ready.clients.x, ready.clients.y, ready.clients.valid))
            ready = replace(ready, plan=plan, engine=lead.engine)
            setup = make_setup(ready, gate, payable, where, held.get(source))
            held[source] = setup.records
            setups.append(replace(setup, key=ready.key, work=replace(setup.work, stack=True)))
            first = ready.engine.flatten(ready.template).to(where)
            states.append(stopped[len(states)] if stopped else Checkpoint(0, first, first))
            books.append(book)
        try:
            lost = _go_on(setups, states, watch, lambda: kept.save(names, states, books) if kept else None)
        except SordinoError as error:
            if kept is not None and not isinstance(error, BadInput):  # a full disk may pass, other errors do not
                kept.drop()
            raise
        done: list[Run | Diverged] = []
        for place, (ready, setup, state, book) in enumerate(zip(runs, setups, states, books)):
            if place in lost:
                book.close()
                done.append(lost[place])
                continue
            ended = _ended(ready, setup, state, book, names[place], name)
            done.append(ended)
            if folders is not None:
                for part in Path(scratch).glob(f"{names[place]}.db*"):  # the ledger, and the anchor beside it
                    shutil.move(part, folders[place].path / part.name.replace(f"{names[place]}.db", "ledger.db"))
                folders[place].finish(ended.result, ended.weights)
    if kept is not None:
        kept.drop()
    return done


def _go_on(
    setups: Sequence[Setup], states: Sequence[Checkpoint], watch: Callable[[int], None], save: Callable[[], None]
) -> dict[int, Diverged]:
    """All rounds that are left; ``watch`` also hears of those that were done before. Returns who diverged."""
    lost: dict[int, Diverged] = {}
    for number in range(1, max(state.round for state in states) + 1):
        watch(number)
    saved = time.monotonic()
    for number in simulate_together(setups, states, lost):
        watch(number)
        if time.monotonic() - saved >= stacked.EVERY:
            save()
            saved = time.monotonic()
    return lost


def _ended(ready: Prepared, setup: Setup, state: Checkpoint, book: Ledger, run: str, name: str | None) -> Run:
    """The result of a run whose rounds are done; its ledger is closed."""
    paid = book if ready.plan.method.private else None
    study = ready.study if name is None else {"name": name, **ready.study}
    result = build_result(study, setup.plan, state, paid, run, ready.seed, setup.observer)
    if paid is not None:
        paid.close_run(run)
    book.close()
    return Run(result, state.shown.detach().cpu(), ready.template)


def _check(runs: Sequence[Prepared]) -> None:
    for one in runs:
        for key in ("model", "loss"):
            if one.study[key] != runs[0].study[key]:
                raise BadInput(
                    f"runs that share a stack have one {key}, and these have {runs[0].study[key]!r} and "
                    f"{one.study[key]!r}: train them apart"
                )
