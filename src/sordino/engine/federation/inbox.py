"""What a coordinator has heard in the round under way, on disk, so that a killed one asks nobody to pay twice.

A *phase* is one exchange of a round: a question, or the turns. Replies are written as they come; when a phase is
closed, whose replies counted is written too, and a coordinator that starts again takes exactly those.
"""

from __future__ import annotations

import json
from pathlib import Path

from sordino.engine.checkpoint import write_atomic


class Inbox:
    """The replies of the round under way."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def kept(self, phase: str, request: str) -> bytes | None:
        """The reply to exactly this request, if it came before."""
        try:
            return (self.folder / f"{phase}-{request}").read_bytes()
        except FileNotFoundError:
            return None

    def keep(self, phase: str, request: str, reply: bytes) -> None:
        """Write a reply down before it counts."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.folder / f"{phase}-{request}", reply)

    def closed(self, phase: str) -> list[str] | None:
        """The requests whose replies counted when the phase was closed; None while it is open."""
        try:
            return list(json.loads((self.folder / f"{phase}.json").read_text()))
        except (FileNotFoundError, json.JSONDecodeError):
            return None

    def close(self, phase: str, requests: list[str]) -> None:
        """Nothing that comes later counts."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.folder / f"{phase}.json", json.dumps(requests).encode())

    def empty(self) -> None:
        """The round is in the checkpoint: forget it."""
        if self.folder.exists():
            for one in self.folder.iterdir():
                one.unlink(missing_ok=True)
