"""What a coordinator has heard in the round under way, on disk, so that a killed one asks nobody to pay twice."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from sordino.engine.checkpoint import write_atomic


class Inbox:
    """What a coordinator has heard in the round under way, on disk, so that a killed one asks nobody to pay twice.

    A *phase* is one exchange of a round: a question, or the turns. Replies are written as they come; when a phase is
    closed, whose replies counted is written too, and a coordinator that starts again takes exactly those.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def kept(self, phase: str, request: str) -> bytes | None:
        """The reply to exactly this request, if it came before."""
        file = self.folder / f"{phase}-{request}"
        return file.read_bytes() if file.exists() else None

    def keep(self, phase: str, request: str, reply: bytes) -> None:
        """Write a reply down before it counts."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.folder / f"{phase}-{request}", reply)

    def closed(self, phase: str) -> list[str] | None:
        """The requests whose replies counted when the phase was closed; None while it is open."""
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            return list(json.loads((self.folder / f"{phase}.json").read_text()))
        return None

    def close(self, phase: str, requests: list[str]) -> None:
        """Write down whose replies counted: nothing that comes later does."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.folder / f"{phase}.json", json.dumps(requests).encode())

    def settled(self, what: str, find: Callable[[], list[str]]) -> list[str]:
        """What was found once in this round and is written down: a coordinator that starts again does the same."""
        file = self.folder / f"{what}.json"
        if not file.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomic(file, json.dumps(find()).encode())
        return list(json.loads(file.read_text()))

    def empty(self) -> None:
        """Forget everything, once the round is in the checkpoint."""
        shutil.rmtree(self.folder, ignore_errors=True)
