"""What travels between coordinator and site: packets of plain facts and tensors, the same bytes for the same content.

A request says everything its answer depends on (study, terms, round, weights, broadcasts), so that its hash is what a
resend is compared by (R11). A reply holds releases and public facts, or a refusal.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from sordino.errors import BadInput
from sordino.privacy.gate import Terms
from sordino.privacy.types import Adjacency, Sampling, Scheme

VERSION = 1

WHO, HELLO, OFFER, ASK, TURN, BYE = "who", "hello", "offer", "ask", "turn", "bye"
"""Requests: what is your name? – would this study suit you? – would you do this much of it? – answer a question –
take a turn – the run is over."""

FACTS, ACCEPTED, ANSWER, UPLOAD, REFUSED, UNAVAILABLE = (
    "facts",
    "accepted",
    "answer",
    "upload",
    "refused",
    "unavailable",
)
"""Replies. ``unavailable`` says nothing else: whatever it hides may depend on records."""


@dataclass(frozen=True)
class Packet:
    """One message: what kind, plain facts, tensors."""

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
        header = json.loads(data[8 : 8 + size])["__metadata__"]["packet"]
        about = json.loads(header)
        if about["sordino"] != VERSION:
            raise BadInput(
                f"the other side speaks version {about['sordino']} of the protocol, this one {VERSION}: "
                "install the same sordino on both"
            )
        return Packet(str(about["kind"]), dict(about["facts"]), load(data))
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput("these bytes are no packet of sordino") from None


def digest(data: bytes) -> str:
    """The hash of a complete request."""
    return hashlib.sha256(data).hexdigest()


def refusal(reason: str, budget: bool = False) -> bytes:
    """A reply that says no, and why; ``budget``: because there is nothing left to pay with."""
    return pack(Packet(REFUSED, {"reason": reason, "budget": budget}))


def unavailable() -> bytes:
    """A reply that says nothing."""
    return pack(Packet(UNAVAILABLE))


def terms_to_plain(terms: Terms) -> dict[str, Any]:
    """Terms as JSON holds them."""
    return {
        "sampling": [str(terms.sampling.scheme), terms.sampling.rate],
        "parts": [[name, z] for name, z in terms.parts],
        "count": terms.count,
        "divisor": terms.divisor,
        "adjacency": str(terms.adjacency),
    }


def terms_from_plain(plain: Mapping[str, Any]) -> Terms:
    """Terms from JSON that somebody else wrote: every field is checked."""
    try:
        scheme, rate = plain["sampling"]
        parts = tuple((str(name), float(z)) for name, z in plain["parts"])
        count = int(plain["count"])
        found = Terms(
            Sampling(Scheme.parse(scheme), float(rate)),
            parts,
            count,
            float(plain["divisor"]),
            Adjacency.parse(plain["adjacency"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"the terms of a release make no sense: {error}") from None
    finite = all(math.isfinite(z) and z >= 0 for _, z in parts)
    if not parts or len(dict(parts)) != len(parts) or count < 1 or not finite:
        raise BadInput(f"the terms of a release make no sense: parts {parts}, count {count}")
    return found


def public_to_wire(public: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A broadcast as facts and tensors."""
    plain = {name: value for name, value in public.items() if not isinstance(value, Tensor)}
    return plain, {f"public/{name}": value for name, value in public.items() if isinstance(value, Tensor)}


def public_from_wire(packet: Packet) -> dict[str, Any]:
    """The broadcast in a request."""
    found: dict[str, Any] = dict(packet.facts["public"])
    for name, value in found.items():
        numbers = value if isinstance(value, list) else [value]
        if not all(isinstance(one, (int, float)) and not math.isnan(one) for one in numbers):
            raise BadInput(f"the broadcast {name!r} is {value!r}: a number was expected")
    tensors = {n.removeprefix("public/"): t for n, t in packet.tensors.items() if n.startswith("public/")}
    return {**found, **tensors}
