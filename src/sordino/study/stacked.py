"""What a stack of runs leaves behind while it trains, so that one that was stopped goes on where it was."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sordino.engine.checkpoint import Checkpoint, load_checkpoint, save_checkpoint, write_atomic
from sordino.privacy.ledger import Ledger


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
