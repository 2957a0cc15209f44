"""Signs of life: a file that a running server or site touches, by which others see that it is there, or since when not.

The lock that a server holds says whether its process is there; this file says when it last did something, and, once it
is gone, whether it ended in order. Its age is that of its modification time, so that a beat costs no write.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from sordino.engine.checkpoint import write_atomic
from sordino.errors import BadInput

ALIVE = "alive.json"
"""The file, in the folder of a run or of a site."""

EVERY = 5.0  # seconds between two beats
LATE = 180.0  # seconds without one after which something is wrong; Flower's own commands may take sixty


class Heart:
    """Beats for a process that works in a folder; use it as a context manager, and call ``beat`` often."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / ALIVE
        self._about: dict[str, Any] = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.time()}
        self._last = time.monotonic()

    def __enter__(self) -> Self:
        self.note()
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(BadInput):  # nothing that goes wrong here hides what ended the process
            self.note(ended=time.time())

    def note(self, **about: Any) -> None:
        """Write something down beside the signs of life; it stays until it is written anew."""
        self._about |= about
        write_atomic(self.file, json.dumps(self._about).encode())
        self._last = time.monotonic()

    def beat(self) -> None:
        """A sign of life, where the last one is a while ago."""
        if time.monotonic() - self._last >= EVERY:
            self._last = time.monotonic()
            with contextlib.suppress(OSError):  # a full disk, or a file that somebody removed: others see it grow old
                os.utime(self.file)


@dataclass(frozen=True)
class Life:
    """What a folder tells of the process that works in it, or did."""

    last: float
    """When it gave its last sign of life, in seconds since 1970."""
    ended: float | None
    """When it ended in order; None where it did not."""
    host: str

    @classmethod
    def read(cls, folder: Path) -> Life | None:
        """The life in a folder; None where nobody ever wrote one, or what is there cannot be read."""
        try:
            said = json.loads((folder / ALIVE).read_text())
            ended = said.get("ended")
            return cls((folder / ALIVE).stat().st_mtime, None if ended is None else float(ended), str(said["host"]))
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return None

    @property
    def age(self) -> float:
        """Seconds since the last sign of life."""
        return time.time() - self.last

    @property
    def elsewhere(self) -> bool:
        """Whether another machine wrote it a moment ago: its locks need not be seen from here."""
        return self.ended is None and self.host != socket.gethostname() and self.age < 3 * EVERY


def moment(when: float) -> str:
    """A moment in words: the time of day and how long ago; with the date where that is not today."""
    form = "%H:%M:%S" if time.strftime("%F", time.localtime(when)) == time.strftime("%F") else "%Y-%m-%d %H:%M:%S"
    return f"{time.strftime(form, time.localtime(when))}, {span(time.time() - when)} ago"


def span(seconds: float) -> str:
    """A duration in words, to two figures or so: 40 s, 12 min, 3.5 h, 12 days."""
    for size, word in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {word}" if seconds < 10 * size else f"{seconds / size:.0f} {word}"
    return f"{max(0.0, seconds):.0f} s"
