"""Where runs keep their state while they train, so that they go on where they were stopped.

A run folder holds one run: every round, with a ledger that is durable. Copies hold one run or a whole stack, once a
minute, with ledgers that nobody's budget depends on.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sordino.engine.checkpoint import Checkpoint, load_checkpoint, save_checkpoint, write_atomic
from sordino.errors import BadInput, SordinoError
from sordino.privacy.ledger import Ledger
from sordino.study.folder import Folder

EVERY = 60.0
"""Seconds of training that a crash may cost where copies are kept."""


class Keeper:
    """Keeps nothing: the run has a name of its own and pays from ``ledger``, or from a scratch one that ends with it.

    Runs that train together have one keeper; each is known to it by its place among them.
    """

    retells = False
    """Whether callbacks also hear of the rounds that were done before the runs were stopped."""

    def __init__(self, ledger: Path | None = None) -> None:
        self.ledger = ledger

    def open(self, place: int, private: bool, scratch: Path, device: torch.device) -> tuple[str, Ledger, Any]:
        """A run's name, its open ledger, and the ``Checkpoint`` that it goes on from (None for one that begins)."""
        return uuid.uuid4().hex, Ledger(self.ledger or scratch / f"{place}.db", durable=self.ledger is not None), None

    def keep(self, states: Mapping[int, Checkpoint]) -> None:
        """A round is done: keep the states of all runs that are still there."""

    def finish(self, place: int, result: dict[str, Any], weights: Tensor) -> None:
        """A run is done and its ledger closed: keep its result."""

    def undo(self, place: int) -> None:
        """A run was refused before it began: leave nothing of it behind."""

    def end(self, error: SordinoError | None = None) -> None:
        """All runs are done, or an error ended them."""


class InFolder(Keeper):
    """Keeps one run in its folder. ``fresh``: the folder was made for it."""

    def __init__(self, folder: Folder, fresh: bool) -> None:
        super().__init__(folder.ledger)
        self.folder, self.fresh = folder, fresh

    def open(self, place: int, private: bool, scratch: Path, device: torch.device) -> tuple[str, Ledger, Any]:
        """The run as its folder has it; a ledger that does not know the rounds which were paid for is refused."""
        try:
            book = Ledger(self.folder.ledger)
        except SordinoError:
            if self.fresh:
                self.folder.undo()
            raise
        with ExitStack() as closing:
            closing.enter_context(book)
            if private:
                self.folder.check_paid(book)
            state = self.folder.checkpoint(device)
            closing.pop_all()
        return self.folder.run, book, state

    def keep(self, states: Mapping[int, Checkpoint]) -> None:
        """Write the log line and the checkpoint."""
        self.folder.keep(states[0])

    def finish(self, place: int, result: dict[str, Any], weights: Tensor) -> None:
        """Write result.json and the model."""
        self.folder.finish(result, weights)

    def undo(self, place: int) -> None:
        """Take the folder back, so that the same command can be given again."""
        self.folder.undo()


class Copies(Keeper):
    """A folder below ``below`` with the state and the ledger of every run of one stack, as of the same round.

    There are two copies, ``a`` and ``b``, written in turn; ``stack.json`` names the one that is whole. ``keys`` say
    what the runs are, in order: another stack finds nothing here. Where ``below`` is None nothing is kept. Each run of
    ``folders`` gets its result, model and ledger when the stack is done: whole, or not at all.
    """

    retells = True

    def __init__(self, below: Path | None, keys: Sequence[str], folders: Sequence[Folder] | None = None) -> None:
        super().__init__()
        self.keys, self.folders = list(keys), folders
        mark = hashlib.sha256("\n".join(keys).encode()).hexdigest()[:12]
        self.home = None if below is None else below / mark
        self.runs = [uuid.uuid4().hex for _ in keys] if folders is None else [one.run for one in folders]
        self.copy: Path | None = None
        """The copy that is whole."""
        about = self._about()
        if self.home and about and (folders is None or about["names"] == self.runs):
            self.runs, self.copy = about["names"], self.home / about["copy"]
        self.books: dict[int, Ledger] = {}
        self.scratch = Path()
        self.saved = time.monotonic()

    def _about(self) -> dict[str, Any]:
        try:
            about: dict[str, Any] = json.loads((self.home / "stack.json").read_text()) if self.home else {}
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return about if about.get("keys") == self.keys else {}

    def open(self, place: int, private: bool, scratch: Path, device: torch.device) -> tuple[str, Ledger, Any]:
        """The run as it was kept, or a new one."""
        self.scratch, state = scratch, None
        if self.copy:
            for part in self.copy.glob(f"{place}.db*"):  # the ledger, and the anchor that lies beside it
                shutil.copyfile(part, scratch / part.name)
            kept = self.copy / f"{place}.safetensors"
            state = load_checkpoint(kept, device) if kept.exists() else None
        self.books[place] = Ledger(scratch / f"{place}.db", durable=False)
        return self.runs[place], self.books[place], state

    def keep(self, states: Mapping[int, Checkpoint]) -> None:
        """Once a minute, write the copy that is not whole. A crash meanwhile leaves what was kept before."""
        if self.home is None or time.monotonic() - self.saved < EVERY:
            return
        target = self.home / ("b" if self.copy and self.copy.name == "a" else "a")
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for place, state in states.items():
            save_checkpoint(target / f"{place}.safetensors", state)
            self.books[place].copy(target / f"{place}.db")
        about = {"keys": self.keys, "names": self.runs, "copy": target.name}
        write_atomic(self.home / "stack.json", json.dumps(about).encode())
        self.copy, self.saved = target, time.monotonic()

    def finish(self, place: int, result: dict[str, Any], weights: Tensor) -> None:
        """Put ledger, result and model into the run's folder, where it has one."""
        if self.folders is not None:
            for part in self.scratch.glob(f"{place}.db*"):
                shutil.move(part, self.folders[place].path / part.name.replace(f"{place}.db", "ledger.db"))
            self.folders[place].finish(result, weights)

    def undo(self, place: int) -> None:
        """Take the run's folder back, where it has one."""
        if self.folders is not None:
            self.folders[place].undo()

    def end(self, error: SordinoError | None = None) -> None:
        """Forget the stack. After bad input it stays: a full disk may pass, other errors do not."""
        if self.home is not None and not isinstance(error, BadInput):
            shutil.rmtree(self.home, ignore_errors=True)
            with suppress(OSError):  # other stacks are kept beside it
                self.home.parent.rmdir()
