"""What travels between coordinator and site: packets of plain facts and tensors, the same bytes for the same content.

A request says everything its answer depends on (study, terms, round, weights, broadcasts), so that its hash is what a
resend is compared by (R11). A reply holds releases and public facts, or a refusal.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from sordino.errors import BadInput
from sordino.privacy.gate import Terms
from sordino.privacy.groups import Group
from sordino.privacy.types import Adjacency, Sampling, Scheme

VERSION = 1

WHO, HELLO, OFFER, ASK, TURN, BYE = "who", "hello", "offer", "ask", "turn", "bye"
SURVEY, SCORES = "survey", "scores"
"""Requests: what is your name? – would this study suit you? – would you do this much of it? – answer a question –
take a turn – the run is over; of held-out records: what do your columns hold? – judge this model."""

FACTS, ACCEPTED, ANSWER, UPLOAD, COUNTS = "facts", "accepted", "answer", "upload", "counts"
REFUSED, UNAVAILABLE = "refused", "unavailable"
"""Replies. ``unavailable`` says nothing else: whatever it hides may depend on records."""

MASKED = "masked"
"""What an answer or an upload under masks is called in its packet."""


@dataclass(frozen=True)
class Packet:
    """One message: its kind (one of the names above), plain facts, and tensors by name."""

    kind: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


def pack(packet: Packet) -> bytes:
    """A packet as bytes: safetensors, with the facts as JSON in its header. Equal packets give equal bytes."""
    about = {"sordino": VERSION, "kind": packet.kind, "facts": packet.facts}
    header = json.dumps(about, sort_keys=True, separators=(",", ":"))
    tensors = {name: value.detach().cpu().contiguous() for name, value in sorted(packet.tensors.items())}
    return save(tensors, {"packet": header})


def unpack(data: bytes) -> Packet:
    """The packet in these bytes; refuses anything that ``pack`` did not write."""
    try:
        size = int.from_bytes(data[:8], "little")
        about = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["packet"])
        if about["sordino"] != VERSION:
            raise BadInput(
                f"the other side speaks version {about['sordino']} of the protocol, this one {VERSION}: "
                "install the same sordino on both"
            )
        return Packet(str(about["kind"]), dict(about["facts"]), load(data))
    except BadInput:
        raise
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError):
        raise BadInput("these bytes are no packet of sordino") from None


def digest(data: bytes) -> str:
    """The SHA-256 of a complete request."""
    return hashlib.sha256(data).hexdigest()


def refusal(reason: str, budget: bool = False) -> bytes:
    """A reply that says no, and why; ``budget``: because there is nothing left to pay with."""
    return pack(Packet(REFUSED, {"reason": reason, "budget": budget}))


def unavailable() -> bytes:
    """A reply that says only that there is no answer."""
    return pack(Packet(UNAVAILABLE))


def terms_to_plain(terms: Terms) -> dict[str, Any]:
    """The terms of a release as JSON holds them."""
    return {
        "sampling": [str(terms.sampling.scheme), terms.sampling.rate],
        "parts": [[name, z] for name, z in terms.parts],
        "count": terms.count,
        "divisor": terms.divisor,
        "adjacency": str(terms.adjacency),
        **({"groups": [[one.name, one.rate, one.records] for one in terms.groups]} if terms.groups else {}),
    }


def terms_from_plain(plain: Mapping[str, Any]) -> Terms:
    """The terms of a release from JSON that somebody else wrote: every field is checked."""
    try:
        scheme, rate = plain["sampling"]
        parts = tuple((str(name), float(z)) for name, z in plain["parts"])
        sampling, adjacency = Sampling(Scheme.parse(scheme), float(rate)), Adjacency.parse(plain["adjacency"])
        count, divisor = int(plain["count"]), float(plain["divisor"])
        groups = tuple(_group(*one) for one in plain.get("groups", ()))
        found = Terms(sampling, parts, count, divisor, adjacency, groups=groups)
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"the terms of a release make no sense: {error}") from None
    finite = all(math.isfinite(z) and z >= 0 for _, z in parts)
    if not parts or len(dict(parts)) != len(parts) or count < 1 or not finite:
        raise BadInput(f"the terms of a release make no sense: parts {parts}, count {count}")
    return found


def _group(name: Any, rate: Any, records: Any) -> Group:
    if not isinstance(name, str) or type(records) is not int:
        raise TypeError("a group of records has a name and a whole number of records")
    return Group(name, float(rate), records)


def whole(packet: Packet, key: str) -> int:
    """A whole number among a packet's facts; a truth value is none, nor is 3.0 or "3"."""
    value = packet.facts[key]
    if type(value) is not int:
        raise BadInput(f"{key!r} is {value!r}: a whole number was expected")
    return value


def public_to_wire(public: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A broadcast, split into what a packet holds as plain facts and as tensors."""
    plain = {name: value for name, value in public.items() if not isinstance(value, Tensor)}
    return plain, {f"public/{name}": value for name, value in public.items() if isinstance(value, Tensor)}


def public_from_wire(packet: Packet) -> dict[str, Any]:
    """The broadcast in a request; refuses a plain value that is no number."""
    found: dict[str, Any] = dict(packet.facts["public"])
    for name, value in found.items():
        numbers = value if isinstance(value, list) else [value]
        if not all(isinstance(one, (int, float)) and not math.isnan(one) for one in numbers):
            raise BadInput(f"the broadcast {name!r} is {value!r}: a number was expected")
    tensors = {n.removeprefix("public/"): t for n, t in packet.tensors.items() if n.startswith("public/")}
    return {**found, **tensors}


def to_records(packet: bytes) -> Any:
    """A Flower message's content that holds this packet as one array of bytes; Flower cuts large ones into pieces."""
    from flwr.app import Array, ArrayRecord, RecordDict

    return RecordDict({"packet": ArrayRecord({"bytes": Array(np.frombuffer(packet, dtype=np.uint8))})})


def from_records(content: Any) -> bytes:
    """The packet in a message's content; refuses any other content. Flower's arrays are read without pickle."""
    found = None
    with contextlib.suppress(Exception):  # whatever somebody else wrote there: Flower's classes fail in many ways
        found = content["packet"]["bytes"].numpy()
    if not isinstance(found, np.ndarray) or found.dtype != np.uint8 or found.ndim != 1:
        raise BadInput("the message holds no packet of sordino")
    return bytes(found.tobytes())
