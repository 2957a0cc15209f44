"""Exchanges with sites: packets out, replies in, refusals and silence told apart, and the three talks beside rounds.

Whatever a site sends is data: nothing in it can stop the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sordino.engine.federation import wire
from sordino.engine.federation.declaration import (
    check_declaration,
    check_payable,
    check_signed_key,
    check_spent,
    readable,
)
from sordino.engine.federation.descriptor import Charter
from sordino.engine.federation.inbox import Inbox
from sordino.engine.federation.wire import Packet, pack, unpack
from sordino.errors import BadInput
from sordino.methods import Plan
from sordino.methods.plan import ClientPlan

ANSWERS = {
    wire.WHO: wire.FACTS,
    wire.HELLO: wire.FACTS,
    wire.OFFER: wire.ACCEPTED,
    wire.ASK: wire.ANSWER,
    wire.TURN: wire.UPLOAD,
    wire.SURVEY: wire.ANSWER,
    wire.SCORES: wire.COUNTS,
    wire.BYE: wire.FACTS,
}
"""Which reply answers which request."""

PLACES = {wire.ASK: ("round", "copy"), wire.TURN: ("round", "copy"), wire.SCORES: ("round",)}
"""Which facts of a request its reply repeats."""


class Transport(Protocol):
    """A way for packets to reach sites, and for their replies to come back."""

    def names(self) -> set[str]:
        """The sites that are there now."""

    def exchange(
        self, requests: Sequence[tuple[str, bytes]], seconds: float, arrived: Callable[[int, bytes], None]
    ) -> None:
        """Send packets to sites; call ``arrived`` for each reply as it comes. Ends when all came or the time is up."""


@dataclass
class Heard:
    """What came of one exchange: replies by row, and why the others are missing."""

    replies: dict[int, Packet] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    broke: set[str] = field(default_factory=set)
    """Sites that refused because their budget is used up."""
    absent: list[str] = field(default_factory=list)

    def add(self, more: Heard) -> None:
        """Take over who is missing after another exchange of the same round."""
        self.refused |= more.refused
        self.broke |= more.broke
        self.absent += [name for name in more.absent if name not in self.absent]

    def missing(self) -> dict[str, Any]:
        """Who is missing and why, as a round's record shows it."""
        refused = dict(sorted(self.refused.items()))
        found = {"refused": refused, "broke": sorted(self.broke), "absent": sorted(self.absent)}
        return {key: value for key, value in found.items() if value}


def exchange(
    transport: Transport,
    requests: Sequence[tuple[str, bytes]],
    seconds: float,
    inbox: Inbox | None = None,
    phase: str = "",
) -> Heard:
    """One exchange with everybody asked. With an ``inbox``, replies that came before a restart are not asked for."""
    raw: dict[int, bytes] = {}
    if inbox is None:
        transport.exchange(requests, seconds, raw.__setitem__)
        return _sort(requests, raw)
    hashes = [wire.digest(data) for _, data in requests]
    raw = {i: kept for i, one in enumerate(hashes) if (kept := inbox.kept(phase, one)) is not None}
    closed = inbox.closed(phase)
    if closed is not None:
        return _sort(requests, {i: one for i, one in raw.items() if hashes[i] in closed})
    missing = [i for i in range(len(requests)) if i not in raw]

    def arrived(place: int, reply: bytes) -> None:
        inbox.keep(phase, hashes[missing[place]], reply)
        raw[missing[place]] = reply

    if missing:
        transport.exchange([requests[i] for i in missing], seconds, arrived)
    inbox.close(phase, [hashes[i] for i in sorted(raw)])
    return _sort(requests, raw)


def _sort(requests: Sequence[tuple[str, bytes]], raw: Mapping[int, bytes]) -> Heard:
    """Replies, refusals and silence told apart; a reply that cannot be read, or answers something else, is refused."""
    heard = Heard()
    for i, (name, request) in enumerate(requests):
        try:
            packet = unpack(raw[i]) if i in raw else Packet(wire.UNAVAILABLE)
            if packet.kind not in (wire.REFUSED, wire.UNAVAILABLE):
                _check_answers(unpack(request), packet)
        except BadInput as error:
            packet = Packet(wire.REFUSED, {"reason": str(error)})
        if packet.kind == wire.REFUSED:
            heard.refused[name] = readable(packet.facts.get("reason", "no reason given"))
            heard.broke |= {name} if packet.facts.get("budget") else set()
        elif packet.kind == wire.UNAVAILABLE:
            heard.absent.append(name)
        else:
            heard.replies[i] = packet
    return heard


def _check_answers(asked: Packet, packet: Packet) -> None:
    """Refuse a reply to something else than was asked."""
    if packet.kind != ANSWERS[asked.kind]:
        raise BadInput(f"it answered {packet.kind!r} to {asked.kind!r}")
    for key in PLACES.get(asked.kind, ()):
        if packet.facts.get(key) != asked.facts[key]:
            raise BadInput(f"it answered for {key} {packet.facts.get(key)!r}, not {asked.facts[key]!r}")


def enrol(
    transport: Transport, brief: dict[str, Any], sites: Sequence[str], seconds: float
) -> tuple[dict[str, dict[str, Any]], dict[str, str], dict[str, str]]:
    """Public facts of the sites that are there and willing, in the order of ``sites``; why others are not.

    Last, apart: who came and was willing, and declared what no site can mean.
    """
    data = pack(Packet(wire.HELLO, {"brief": brief}))
    heard = exchange(transport, [(name, data) for name in sites], seconds)
    found, refused, odd = {}, dict(heard.refused), {}
    for i, packet in heard.replies.items():
        name, said = sites[i], packet.facts.get("name")
        if said != name:
            refused[name] = f"it calls itself {readable(said)!r}"
            continue
        try:
            found[name] = check_declaration(packet.facts, name, str(brief["adjacency"]))
            if "trust" in brief:
                found[name]["key"] = check_signed_key(packet.facts.get("key"))
        except BadInput as error:
            odd[name] = str(error)
            found.pop(name, None)
    return found, refused | dict.fromkeys(heard.absent, "it did not answer"), odd


def offer_of(client: ClientPlan) -> dict[str, Any]:
    """What a site is asked to declare: terms of a turn and of questions, and how many of each."""
    return {
        "terms": wire.terms_to_plain(client.terms),
        "asks": [wire.terms_to_plain(one) for one in client.asks],
        "turns": client.turns,
        "queries": list(client.queries),
    }


@dataclass
class Agreed:
    """How many turns, and how many evaluations, each site can pay (0 where it refused), and the refusals."""

    payable: dict[str, int]
    evaluations: dict[str, int]
    refused: dict[str, str]


def agree(
    transport: Transport, brief: dict[str, Any], plan: Plan, seconds: float, charter: Charter | None = None
) -> Agreed:
    """Offer every site its plan. ``charter``: how the sites share noise, where they do."""
    trains = [c for c in plan.clients if c.turns > 0 or any(c.queries)]
    judges = {} if plan.judging is None else {plan.clients[i].name: plan.judging.terms[i] for i in plan.judging.who}
    names = {c.name for c in trains} | judges.keys()
    taking = [c for c in plan.clients if c.name in names]
    requests = []
    for c in taking:
        facts: dict[str, Any] = {"brief": brief, "offer": offer_of(c)}
        facts |= {} if charter is None else {"charter": charter.plain()}
        facts |= {"judging": wire.terms_to_plain(judges[c.name])} if c.name in judges else {}
        requests.append((c.name, pack(Packet(wire.OFFER, facts))))
    heard = exchange(transport, requests, seconds)
    found = Agreed({c.name: 0 for c in trains}, dict.fromkeys(judges, 0), dict(heard.refused))
    for i, packet in heard.replies.items():
        client, said = taking[i], packet.facts
        try:
            most = max((client.turns, client.declared_turns, *client.queries))
            turns = check_payable(said.get("payable"), most)
            if client.name in judges and plan.judging is not None:
                found.evaluations[client.name] = check_payable(said.get("evaluations"), plan.judging.times)
            found.payable |= {client.name: turns} if client.name in found.payable else {}
        except BadInput as error:
            found.refused[client.name] = str(error)
    found.refused |= dict.fromkeys(heard.absent, "it did not answer the offer")
    return found


def present(transport: Transport, names: Sequence[str], seconds: float) -> set[str]:
    """Who of these is there and answers; nobody is charged for that."""
    asked = [name for name in names if name in transport.names()]
    if not asked:
        return set()
    heard = exchange(transport, [(name, pack(Packet(wire.WHO))) for name in asked], seconds)
    return {asked[i] for i in heard.replies}


def farewell(transport: Transport, run: str, names: Sequence[str], seconds: float) -> dict[str, dict[str, Any]]:
    """Tell everyone that the run is over; what each site says it has spent, where that can be understood."""
    data = pack(Packet(wire.BYE, {"run": run}))
    heard = exchange(transport, [(name, data) for name in names], seconds)
    found = {}
    for i, packet in heard.replies.items():
        with contextlib.suppress(BadInput):
            found[names[i]] = check_spent(packet.facts)
    return found
