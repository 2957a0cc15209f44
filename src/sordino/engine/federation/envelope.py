"""A packet as Flower carries it: one array of bytes in a message, which Flower cuts into pieces where it is large."""

from __future__ import annotations

from typing import Any

from sordino.errors import BadInput


def to_records(packet: bytes) -> Any:
    """A message's content that holds this packet."""
    import numpy as np
    from flwr.app import Array, ArrayRecord, RecordDict

    return RecordDict({"packet": ArrayRecord({"bytes": Array(np.frombuffer(packet, dtype=np.uint8))})})


def from_records(content: Any) -> bytes:
    """The packet in a message's content; refuses any other content. Flower's arrays are read without pickle."""
    import numpy as np

    try:
        found = content["packet"]["bytes"].numpy()
    except Exception:  # whatever somebody else wrote there: Flower's classes fail in many ways
        raise BadInput("the message holds no packet of sordino") from None
    if not isinstance(found, np.ndarray) or found.dtype != np.uint8 or found.ndim != 1:
        raise BadInput("the message holds no packet of sordino")
    return bytes(found.tobytes())
