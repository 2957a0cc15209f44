"""The door between Flower's processes and the site's own: a socket in a folder that only this user may enter.

Flower starts a new process for every message. It loads neither torch nor records: it pushes the packet through the
door and waits for the answer.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sordino.errors import SordinoError

LONGEST = 6 * 3600.0
"""Seconds after which a process gives up waiting for the site: the server stopped waiting long before."""

MOST = 1 << 34
"""Bytes of the largest packet."""


def to_records(packet: bytes) -> Any:
    """A packet as Flower carries it: one array of bytes, which Flower cuts into pieces where it is large."""
    import numpy as np
    from flwr.app import Array, ArrayRecord, RecordDict

    return RecordDict({"packet": ArrayRecord({"bytes": Array(np.frombuffer(packet, dtype=np.uint8))})})


def from_records(content: Any) -> bytes:
    """The packet in a message's content."""
    return bytes(content["packet"]["bytes"].numpy().tobytes())


def forward(message: Any, context: Any) -> Any:
    """Flower's ClientApp: what came in goes through the door, what comes back goes out."""
    from flwr.app import Message

    answer = knock(Path(str(context.node_config["door"])), from_records(message.content))
    return Message(to_records(answer), reply_to=message)


def knock(door: Path, packet: bytes) -> bytes:
    """Send one packet through the door and return the answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(LONGEST)
        try:
            line.connect(str(door))
            _send(line, packet)
            return _receive(line)
        except OSError:
            # Says nothing about records: the site's process is not there, or went away.
            raise SordinoError("unavailable: the site's process does not answer") from None


class Door:
    """The site's side: one packet after the other, so that records and ledger are used by one thread only."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sordino-door-"))  # mkdtemp: mode 0700
        self.path = self.folder / "door"
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(str(self.path))
        self._listening.listen(16)

    def serve_one(self, answer: Callable[[bytes], bytes], wait: float) -> bool:
        """Wait so many seconds for a packet and answer it; whether there was one."""
        self._listening.settimeout(wait)
        try:
            line, _ = self._listening.accept()
        except TimeoutError:
            return False
        with line:
            line.settimeout(LONGEST)
            with contextlib.suppress(OSError):  # whoever asked may have gone: the answer is stored, and can be resent
                _send(line, answer(_receive(line)))
        return True

    def close(self) -> None:
        """Shut the door for good."""
        self._listening.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def open_door() -> Iterator[Door]:
    """A door that is shut in the end."""
    door = Door()
    try:
        yield door
    finally:
        door.close()


def _send(line: socket.socket, packet: bytes) -> None:
    line.sendall(struct.pack(">Q", len(packet)))
    line.sendall(packet)


def _receive(line: socket.socket) -> bytes:
    (size,) = struct.unpack(">Q", _exactly(line, 8))
    if size > MOST:
        raise OSError(f"a packet of {size} bytes is too large")
    return _exactly(line, size)


def _exactly(line: socket.socket, size: int) -> bytes:
    parts, left = [], size
    while left:
        part = line.recv(min(left, 1 << 20))
        if not part:
            raise OSError("the other side went away")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
