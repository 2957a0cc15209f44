"""The coordinator: asks, waits as long as it said, combines what came. It opens neither client nor data.

It sees releases and public facts. Whatever a site does not send within the bound is missing from the round, and the
method's own rules combine what is there.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sordino.engine import rounds
from sordino.engine.checkpoint import Checkpoint
from sordino.engine.federation import wire
from sordino.engine.federation.inbox import Inbox
from sordino.engine.federation.wire import Packet, pack, unpack
from sordino.engine.telling import told
from sordino.errors import BadInput
from sordino.methods import Method, Plan
from sordino.methods.plan import ClientPlan
from sordino.server.select import Round

log = logging.getLogger("sordino.coordinator")


class Transport(Protocol):
    """How packets reach sites."""

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


def exchange(
    transport: Transport, requests: Sequence[tuple[str, bytes]], seconds: float, inbox: Inbox | None, phase: str
) -> Heard:
    """One exchange with everybody asked. With an ``inbox``, replies that came before a restart are not asked for."""
    hashes = [wire.digest(data) for _, data in requests]
    raw: dict[int, bytes] = {}
    closed = None if inbox is None else inbox.closed(phase)
    if inbox is not None:
        raw = {i: kept for i, one in enumerate(hashes) if (kept := inbox.kept(phase, one)) is not None}
    if closed is not None:
        raw = {i: one for i, one in raw.items() if hashes[i] in closed}
    else:
        missing = [i for i in range(len(requests)) if i not in raw]

        def arrived(place: int, reply: bytes) -> None:
            i = missing[place]
            if inbox is not None:
                inbox.keep(phase, hashes[i], reply)
            raw[i] = reply

        if missing:
            transport.exchange([requests[i] for i in missing], seconds, arrived)
        if inbox is not None:
            inbox.close(phase, [hashes[i] for i in sorted(raw)])
    return _sort(requests, raw)


ANSWERS = {
    wire.HELLO: wire.FACTS,
    wire.OFFER: wire.ACCEPTED,
    wire.ASK: wire.ANSWER,
    wire.TURN: wire.UPLOAD,
    wire.BYE: wire.FACTS,
}
"""Which reply answers which request."""


def _sort(requests: Sequence[tuple[str, bytes]], raw: Mapping[int, bytes]) -> Heard:
    """Replies, refusals and silence. Whatever a site sends is data: nothing in it can stop the others."""
    heard = Heard()
    for i, (name, request) in enumerate(requests):
        try:
            packet = unpack(raw[i]) if i in raw else Packet(wire.UNAVAILABLE)
            asked = unpack(request)
            if packet.kind not in (wire.REFUSED, wire.UNAVAILABLE):
                _check_answers(asked, packet)
        except BadInput as error:
            packet = Packet(wire.REFUSED, {"reason": str(error), "budget": False})
        if packet.kind == wire.REFUSED:
            heard.refused[name] = str(packet.facts.get("reason", "no reason given"))
            if packet.facts.get("budget"):
                heard.broke.add(name)
        elif packet.kind == wire.UNAVAILABLE:
            heard.absent.append(name)
        else:
            heard.replies[i] = packet
    return heard


def _check_answers(asked: Packet, packet: Packet) -> None:
    """Refuse a reply to something else than was asked."""
    if packet.kind != ANSWERS[asked.kind]:
        raise BadInput(f"it answered {packet.kind!r} to {asked.kind!r}")
    if asked.kind in (wire.ASK, wire.TURN):
        for key in ("round", "copy"):
            if packet.facts.get(key) != asked.facts[key]:
                raise BadInput(f"it answered for {key} {packet.facts.get(key)!r}, not {asked.facts[key]!r}")


def enrol(
    transport: Transport, brief: dict[str, Any], sites: Sequence[str], seconds: float
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Public facts of the sites that are there and willing, in the order of ``sites``, and why others are not."""
    data = pack(Packet(wire.HELLO, {"brief": brief}))
    heard = exchange(transport, [(name, data) for name in sites], seconds, None, "hello")
    found, refused = {}, dict(heard.refused)
    for i, packet in heard.replies.items():
        name = sites[i]
        facts = dict(packet.facts)
        if facts.get("name") != name:
            refused[name] = f"it calls itself {facts.get('name')!r}"
        elif not _sensible(facts):
            refused[name] = "what it says about itself makes no sense"
        else:
            found[name] = facts
    refused |= dict.fromkeys(heard.absent, "it did not answer")
    return found, refused


def _sensible(facts: Mapping[str, Any]) -> bool:
    try:
        return int(facts["records"]) > 0 and float(facts["epsilon"]) > 0 and 0 < float(facts["delta"]) < 1
    except (KeyError, TypeError, ValueError):
        return False


def offer_of(client: ClientPlan) -> dict[str, Any]:
    """What a site is asked to declare."""
    return {
        "terms": wire.terms_to_plain(client.terms),
        "asks": [wire.terms_to_plain(one) for one in client.asks],
        "turns": client.turns,
        "queries": list(client.queries),
    }


def agree(
    transport: Transport, brief: dict[str, Any], plan: Plan, seconds: float
) -> tuple[dict[str, int], dict[str, str]]:
    """Offer every site its plan; how many turns each can pay (0 where it refused), and the refusals."""
    taking = [c for c in plan.clients if c.turns > 0 or any(c.queries)]
    requests = [(c.name, pack(Packet(wire.OFFER, {"brief": brief, "offer": offer_of(c)}))) for c in taking]
    heard = exchange(transport, requests, seconds, None, "offer")
    payable = {c.name: 0 for c in taking}
    for i, packet in heard.replies.items():
        said = packet.facts.get("payable")
        payable[taking[i].name] = max(0, said) if isinstance(said, int) else 0
    return payable, heard.refused | dict.fromkeys(heard.absent, "it did not answer the offer")


def farewell(transport: Transport, run: str, names: Sequence[str], seconds: float) -> dict[str, dict[str, Any]]:
    """Tell everyone that the run is over; what each site says it has spent."""
    data = pack(Packet(wire.BYE, {"run": run}))
    heard = exchange(transport, [(name, data) for name in names], seconds, None, "bye")
    return {names[i]: dict(packet.facts) for i, packet in heard.replies.items()}


@dataclass
class Coordinator:
    """A run's server: the plan, the sites, and how long it waits for them.

    ``seconds``: the longest wait for one exchange. ``least``: with fewer answers than this the round changes nothing.
    """

    course: rounds.Course
    brief: dict[str, Any]
    transport: Transport
    inbox: Inbox
    payable: dict[str, int]
    seconds: float = 600.0
    least: int = 1
    notice: Callable[[dict[str, Any]], None] = lambda what: None
    """Told what is going on: which round, which phase, who is asked."""

    def run(self, state: Checkpoint) -> Iterator[Checkpoint]:
        """The rounds that are left; yields the state after each, to be kept before the next begins."""
        plan = self.course.plan
        broke = {name for record in state.history for name in record.get("broke", ())}
        for number in range(state.round + 1, plan.schedule.rounds + 1):
            record = self._round(state, number, broke)
            broke |= set(record.get("broke", ()))
            state.round = number
            state.history.append(record | {"accuracy": None, "loss": None, "psi": None})
            yield state
            self.inbox.empty()

    def _round(self, state: Checkpoint, number: int, broke: set[str]) -> dict[str, Any]:
        plan = self.course.plan
        before = dict(state.server)
        taken = rounds.turns_taken(plan, state.history)
        left = rounds.turns_left(plan, self.payable) - taken
        left[[i for i, c in enumerate(plan.clients) if c.name in broke]] = 0
        scheduled = plan.schedule.round(number)
        called = rounds.who_can_pay(plan, state.server, left, scheduled)
        dry = sorted({plan.clients[i].name for i in set(scheduled.clients) - set(called.clients)})
        missing = Heard()
        heard: dict[str, Tensor] = {}
        for place, ask in enumerate(rounds.own_questions(plan)):
            if not len(called.clients):
                break
            public = rounds.broadcast(plan, state.server)
            about = [{"place": place}] * len(called.clients)
            answers = self._phase(state, number, f"question {place + 1}", wire.ASK, called, public, about)
            called, heard, values = self._answers(called, heard, answers, missing)
            if values is not None:
                heard[ask.question.what] = values
                rounds.conclude(self.course, state, number, called, ask, values, public)
        called, heard = rounds.who_trains(plan, called, heard, taken)
        public = rounds.broadcast(plan, state.server)
        terms = rounds.turn_terms(plan, state.server, called)
        uploads: dict[str, Tensor] = {}
        if len(called.clients):
            uploads, rows = self._turns(state, number, called, terms, public, missing)
            kept = np.array(rows, dtype=np.int64)
            silent = [i for i in range(len(terms)) if plan.clients[called.clients[i]].name in missing.absent]
            # A turn that nobody heard of may have been taken, and then it was charged.
            rounds.book_steps(
                plan, state, rounds.only(called, np.array(silent, dtype=np.int64)), [terms[i] for i in silent]
            )
            called, terms = rounds.only(called, kept), [terms[i] for i in rows]
            heard = {what: values[torch.from_numpy(kept)] for what, values in heard.items()}
        if len(called.clients) < self.least:
            # Nothing was learnt that others confirm: the model stays as it is, what was paid stays paid.
            state.server, uploads = before, {}
        record = rounds.close_round(self.course, state, number, called, terms, public, heard, uploads)
        if not uploads and (missing.absent or missing.refused):
            record["note"] = f"{len(called.clients)} answers of at least {self.least}: the model stays as it is"
        record |= rounds.moving_clip(plan, called, public) if uploads else {}
        return record | _missing(missing) | ({"cannot_pay": dry} if dry else {})

    def _turns(
        self,
        state: Checkpoint,
        number: int,
        called: Round,
        terms: list[Any],
        public: dict[str, Any],
        missing: Heard,
    ) -> tuple[dict[str, Tensor], list[int]]:
        """Everybody's turn: the uploads by name, a row each, and which of those asked they belong to."""
        plan = self.course.plan
        last = _last_rounds(state.history)
        more = [
            {"count": one.count, "since": last.get(plan.clients[i].name, 0)} for i, one in zip(called.clients, terms)
        ]
        came = self._phase(state, number, "turns", wire.TURN, called, public, more)
        short = _sends_coefficients(public, called)
        numbers = public["basis"].shape[1] * len(self.course.layout) if short.any() else 0
        _merge(missing, came)
        found: dict[int, dict[str, Tensor]] = {}
        for row, packet in sorted(came.replies.items()):
            try:
                found[row] = self._upload(packet, bool(short[row]), numbers)
            except BadInput as error:
                missing.refused[plan.clients[called.clients[row]].name] = f"its upload was refused here: {error}"
        alike = _alike(found)
        for row in set(found) - set(alike):
            missing.refused[plan.clients[called.clients[row]].name] = "its upload has other parts than the others'"
        names = sorted(found[alike[0]]) if alike else []
        return {name: torch.stack([found[row][name] for row in alike]) for name in names}, alike

    def _upload(self, packet: Packet, short: bool, numbers: int) -> dict[str, Tensor]:
        """One site's upload as rows of their proper shape.

        ``short``: it was to send so many ``numbers`` (coefficients) in place of an update; the other of the two is zero
        then, in every row of a round in which somebody sends coefficients.
        """
        parts = {name: value[0] for name, value in packet.tensors.items() if value.dim() == 2 and len(value) == 1}
        dimension = sum(math.prod(shape) for _, shape, _ in self.course.layout)
        sent, instead = ("coefficients", "update") if short else ("update", "coefficients")
        sizes = {"update": dimension, "coefficients": numbers}
        wanted = {one.question.what: 1 for one in self.course.plan.method.ask if one.batch == "step"}
        for name, size in {sent: sizes[sent], **wanted}.items():
            if name not in parts or parts[name].shape != (size,) or parts[name].dtype != torch.float32:
                raise BadInput(f"{name!r} is missing or has a wrong shape")
        if numbers:
            parts[instead] = torch.zeros(sizes[instead])
        return parts

    def _phase(
        self,
        state: Checkpoint,
        number: int,
        phase: str,
        kind: str,
        called: Round,
        public: dict[str, Any],
        more: Sequence[Mapping[str, Any]],
    ) -> Heard:
        """One exchange of the round: to everyone the broadcast and its own part of it, each with its own terms."""
        plan = self.course.plan
        requests = []
        for row, (i, copy) in enumerate(zip(called.clients, called.copies)):
            client = plan.clients[i]
            about = {"brief": self.brief, "offer": offer_of(client), "round": number, "copy": int(copy)}
            plain, tensors = wire.public_to_wire(told(public, called.clients[[row]]))
            sent = {"weights": state.weights, **tensors}
            requests.append((client.name, pack(Packet(kind, {**about, "public": plain, **more[row]}, sent))))
        self.notice({"round": number, "phase": phase, "asked": [name for name, _ in requests]})
        name = f"{number:06d}-{phase.replace(' ', '-')}"
        began = time.monotonic()
        heard = exchange(self.transport, requests, self.seconds, self.inbox, name)
        took = time.monotonic() - began
        log.info("round %d, %s: %d of %d answered in %.1f s", number, phase, len(heard.replies), len(requests), took)
        for who, why in heard.refused.items():
            log.warning("round %d, %s: %s refused: %s", number, phase, who, why)
        if heard.absent:
            log.warning("round %d, %s: no answer from %s", number, phase, ", ".join(heard.absent))
        return heard

    def _answers(
        self, called: Round, heard: dict[str, Tensor], came: Heard, missing: Heard
    ) -> tuple[Round, dict[str, Tensor], Tensor | None]:
        """Those who answered, what they had answered before, and their answers."""
        _merge(missing, came)
        values = {}
        for row, packet in sorted(came.replies.items()):
            sent = packet.tensors.get("answer")
            if sent is not None and sent.shape == (1, 1) and sent.dtype is torch.float32:
                values[row] = sent[0, 0]
            else:
                name = self.course.plan.clients[called.clients[row]].name
                missing.refused[name] = "its answer was refused here: it is not one number"
        rows = np.array(list(values), dtype=np.int64)
        before = {what: one[torch.from_numpy(rows)] for what, one in heard.items()}
        return rounds.only(called, rows), before, torch.stack(list(values.values())) if values else None


def _alike(found: Mapping[int, Mapping[str, Tensor]]) -> list[int]:
    """The rows whose uploads have the same parts, names, shapes and kinds of numbers as most of them."""
    looks = {
        row: tuple((n, tuple(v.shape), str(v.dtype)) for n, v in sorted(one.items())) for row, one in found.items()
    }
    if not looks:
        return []
    usual, _ = Counter(looks.values()).most_common(1)[0]
    return [row for row, look in looks.items() if look == usual]


def _sends_coefficients(public: Mapping[str, Any], called: Round) -> Any:
    """Which rows were told to send coefficients in the basis that was broadcast (PFA+)."""
    private = told(public, called.clients).get("private")
    if private is None or "basis" not in public:
        return np.zeros(len(called.clients), dtype=bool)
    return private.cpu().numpy()[:, 0] > 0


def _last_rounds(history: list[dict[str, Any]]) -> dict[str, int]:
    """The last round in which each site's answer counted."""
    return {name: record["round"] for record in history for name in record["participants"]}


def _merge(into: Heard, more: Heard) -> None:
    into.refused |= more.refused
    into.broke |= more.broke
    into.absent += [name for name in more.absent if name not in into.absent]


def _missing(heard: Heard) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if heard.refused:
        found["refused"] = dict(sorted(heard.refused.items()))
    if heard.broke:
        found["broke"] = sorted(heard.broke)
    if heard.absent:
        found["absent"] = sorted(heard.absent)
    return found


def check_deployable(method: Method) -> None:
    """Refuse what only a simulation can do."""
    if "optimum" in method.describe()["aggregate"]:
        raise BadInput(
            "optimum is an oracle: it weighs by the noise a simulation really drew, which no server can know; "
            "use robust-hdp, factor-hdp or declared-variance"
        )
