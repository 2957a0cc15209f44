"""Many runs of one model on one device, stacked: how full-size tables are made."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from sordino.engine.checkpoint import Checkpoint
from sordino.engine.simulate import Setup
from sordino.engine.together import simulate_together
from sordino.privacy.gate import Gate
from sordino.privacy.generators import Keyed
from sordino.privacy.ledger import Ledger
from sordino.study.result import build_result
from sordino.study.run import Prepared, Run, make_setup, open_accounts, torch_device


def train_together(
    runs: Sequence[Prepared], device: str = "auto", watch: Callable[[int], None] = lambda number: None
) -> list[Run]:
    """Train prepared runs in one stack; each ends as ``sd.train`` would end it, up to rounding.

    The runs must come from one federation's records and one model; see ``engine.together``.
    """
    where = torch_device(device)
    lead = runs[0]
    setups: list[Setup] = []
    states: list[Checkpoint] = []
    books: list[Ledger] = []
    names = [uuid.uuid4().hex for _ in runs]
    with tempfile.TemporaryDirectory(prefix="sordino-") as scratch:
        for name, ready in zip(names, runs):
            private = ready.plan.method.private
            book = Ledger(Path(scratch) / f"{name}.db", durable=False)
            payable = open_accounts(book, ready.plan, name) if private else {}
            gate = Gate(book if private else None, Keyed(ready.key), name)
            held = setups[0].records if setups else None
            setup = make_setup(replace(ready, engine=lead.engine), gate, payable, where, held)
            setups.append(replace(setup, key=ready.key, work=replace(setup.work, stack=True)))
            first = ready.engine.flatten(ready.template).to(where)
            states.append(Checkpoint(0, first, first))
            books.append(book)
        for number in simulate_together(setups, states):
            watch(number)
        done = []
        for name, ready, setup, state, book in zip(names, runs, setups, states, books):
            kept = book if ready.plan.method.private else None
            result = build_result(ready.study, ready.plan, state, kept, name, ready.seed, setup.observer)
            book.close()
            done.append(Run(result, state.shown.detach().cpu(), ready.template))
    return done
