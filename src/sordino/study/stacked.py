"""What a stack of runs, or one alone, leaves behind while it trains, so that it goes on where it was stopped."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sordino.engine.checkpoint import Checkpoint, load_checkpoint, save_checkpoint, write_atomic
from sordino.privacy.ledger import Ledger

EVERY = 60.0
"""Seconds of training that a crash may cost."""


@dataclass(frozen=True)
class Stacked:
    """A folder with the state and the ledger of every run of one stack, as of the same round.

    There are two copies, ``a`` and ``b``, written in turn; ``stack.json`` names the one that is whole. ``keys`` are the
    runs' random keys, in order: another stack finds nothing here.
    """

    folder: Path
    keys: tuple[str, ...]

    @staticmethod
    def below(folder: Path, keys: Sequence[str]) -> Stacked:
        """The place of these runs among those of other stacks."""
        return Stacked(folder / hashlib.sha256("\n".join(keys).encode()).hexdigest()[:12], tuple(keys))

    @property
    def _about(self) -> dict[str, Any]:
        try:
            about: dict[str, Any] = json.loads((self.folder / "stack.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return about if about.get("keys") == list(self.keys) else {}

    def names(self) -> list[str] | None:
        """What the runs of the stack that was stopped are called in their ledgers; None where there was none."""
        return self._about.get("names")

    def restore(self, ledgers: Sequence[Path], device: torch.device) -> list[Checkpoint]:
        """Put every run's ledger where it is wanted, and return every run's state."""
        whole = self.folder / self._about["copy"]
        for place, path in enumerate(ledgers):
            for part in whole.glob(f"{place}.db*"):  # the ledger, and the anchor that lies beside it
                shutil.copyfile(part, path.with_name(path.name + part.name.removeprefix(f"{place}.db")))
        return [load_checkpoint(whole / f"{place}.safetensors", device) for place in range(len(ledgers))]

    def save(self, names: Sequence[str], states: Sequence[Checkpoint], books: Sequence[Ledger]) -> None:
        """Keep the stack as it is between two rounds. A crash meanwhile leaves what was kept before."""
        copy = "b" if self._about.get("copy") == "a" else "a"
        target = self.folder / copy
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for place, (state, book) in enumerate(zip(states, books)):
            save_checkpoint(target / f"{place}.safetensors", state)
            book.copy(target / f"{place}.db")
        about = {"keys": list(self.keys), "names": list(names), "copy": copy}
        write_atomic(self.folder / "stack.json", json.dumps(about).encode())

    def drop(self) -> None:
        """Forget the stack: it has ended."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # other stacks are kept beside it
            self.folder.parent.rmdir()


@dataclass
class Alone:
    """A stack of one as training knows a run folder: its name, the state to go on from, and where to keep the next."""

    stack: Stacked
    book: Ledger
    states: list[Checkpoint]
    """What was left when it was stopped; empty for a run that begins."""
    saved: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        names = self.stack.names() if self.states else None
        self.run = names[0] if names else uuid.uuid4().hex

    def checkpoint(self, device: torch.device) -> Checkpoint | None:
        """The state to go on from, or None for a run that begins."""
        return self.states[0] if self.states else None

    def keep(self, state: Checkpoint) -> None:
        """Write the state, when it is time."""
        if time.monotonic() - self.saved >= EVERY:
            self.stack.save([self.run], [state], [self.book])
            self.saved = time.monotonic()

    def finish(self, result: dict[str, Any], weights: Tensor) -> None:
        """Forget the run: it has ended."""
        self.stack.drop()
