"""The coordinator: asks, waits as long as it said, combines what came. It opens neither client nor data.

It sees releases and public facts. Whatever a site does not send within the bound is missing from the round, and the
method's own rules combine what is there.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sordino.engine import rounds
from sordino.engine.checkpoint import Checkpoint
from sordino.engine.chosen import keep_best, settled
from sordino.engine.federation import wire
from sordino.engine.federation.declaration import readable
from sordino.engine.federation.exchange import Heard, Transport, exchange, offer_of
from sordino.engine.federation.inbox import Inbox
from sordino.engine.federation.verdicts import Question, ask_scores
from sordino.engine.federation.wire import Packet, pack
from sordino.errors import BadInput
from sordino.methods import Method
from sordino.server.select import Round

log = logging.getLogger("sordino.coordinator")


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
    evaluations: dict[str, int] = field(default_factory=dict)
    """By site: how many evaluations of the run its held-out records can pay."""

    def run(self, state: Checkpoint) -> Iterator[Checkpoint]:
        """The rounds that are left; yields the state after each, to be kept before the next begins.

        It ends early when nobody can pay for another turn.
        """
        plan = self.course.plan
        broke = {name for record in state.history for name in record.get("broke", ())}
        for number in range(state.round + 1, plan.schedule.rounds + 1):
            if settled(plan, state.history):
                return
            if rounds.exhausted(plan, state.server, self._left(state, broke), number):
                return
            record = self._round(state, number, broke)
            broke |= set(record.get("broke", ()))
            record |= self._judge(state, record)
            state.round = number
            state.history.append(record | {"accuracy": None, "loss": None, "psi": None})
            keep_best(plan, state)
            yield state
            self.inbox.empty()

    def _round(self, state: Checkpoint, number: int, broke: set[str]) -> dict[str, Any]:
        plan = self.course.plan
        before = state.server
        taken = rounds.turns_taken(plan, state.history)
        left = self._left(state, broke)
        scheduled = plan.schedule.round(number)
        called = rounds.who_can_pay(plan, state.server, left, scheduled)
        dry = sorted({plan.clients[i].name for i in set(scheduled.clients) - set(called.clients)})
        missing = Heard()
        heard: dict[str, Tensor] = {}
        own = rounds.own_questions(plan)
        for place, ask in enumerate(own):
            if ask.of == "participants" and (place == 0 or own[place - 1].of == "candidates"):
                called, heard = rounds.who_trains(plan, called, heard, taken, number)
            if not len(called.clients):
                break
            sent = rounds.broadcast(plan, state.server)
            about = [{"place": place}] * len(called.clients)
            answers = self._phase(state, number, f"question {place + 1}", wire.ASK, called, sent, about)
            called, heard, values = self._answers(called, heard, answers, missing)
            if values is not None:
                heard[ask.question.what] = values
                rounds.conclude(self.course, state, number, called, ask, values, sent)
        if not own or own[-1].of == "candidates":
            called, heard = rounds.who_trains(plan, called, heard, taken, number)
        sent = rounds.broadcast(plan, state.server)
        terms = rounds.turn_terms(plan, state.server, called)
        uploads: dict[str, Tensor] = {}
        if len(called.clients):
            uploads, rows = self._turns(state, number, called, terms, sent, missing)
            kept = np.array(rows, dtype=np.int64)
            # A turn that nobody heard of may have been taken, and then it was charged.
            silent = np.flatnonzero([plan.clients[i].name in missing.absent for i in called.clients])
            rounds.book_steps(plan, state, rounds.only(called, silent), [terms[i] for i in silent])
            called, terms = rounds.only(called, kept), [terms[i] for i in rows]
            heard = {what: values[torch.from_numpy(kept)] for what, values in heard.items()}
        if len(called.clients) < self.least:
            # Nothing was learnt that others confirm: the model stays as it is, what was paid stays paid.
            state.server, uploads = before, {}
        record = rounds.close_round(self.course, state, number, called, terms, sent, heard, uploads)
        if not uploads and (missing.absent or missing.refused):
            record["note"] = f"{len(called.clients)} answers of at least {self.least}: the model stays as it is"
        record |= rounds.moving_clip(plan, called, sent) if uploads else {}
        return record | missing.missing() | ({"cannot_pay": dry} if dry else {})

    def _judge(self, state: Checkpoint, record: dict[str, Any]) -> dict[str, Any]:
        """What sites' held-out records say of the model after a round, where it is time to ask; else nothing.

        Where clients have models of their own, each judges the one that it makes from the server's weights.
        """
        plan, number, history = self.course.plan, int(record["round"]), [*state.history, record]
        if plan.judging is None or not plan.judging.is_time(number):
            return {}
        done = sum("evaluation" in one for one in state.history)
        broke = {name for one in state.history for name in one.get("not_judged", {}).get("broke", ())}
        names = [client.name for client in plan.clients]
        who = [i for i in plan.judging.who if self.evaluations.get(names[i], 0) > done and names[i] not in broke]
        weights = state.shown if plan.method.local.begin is None else state.weights
        self.notice({"round": number, "phase": "evaluation", "asked": [names[i] for i in who]})
        question = Question(weights, number, done + 1, _last_rounds(history))
        return ask_scores(plan, self.brief, who, question, self.transport, self.seconds, self.inbox).record()

    def _left(self, state: Checkpoint, broke: set[str]) -> rounds.Index:
        """How many turns every site can still pay; none where it said that its budget is used up."""
        plan = self.course.plan
        left = rounds.turns_left(plan, self.payable) - rounds.turns_taken(plan, state.history)
        left[[i for i, c in enumerate(plan.clients) if c.name in broke]] = 0
        return left

    def _turns(
        self,
        state: Checkpoint,
        number: int,
        called: Round,
        terms: list[Any],
        sent: rounds.Broadcast,
        missing: Heard,
    ) -> tuple[dict[str, Tensor], list[int]]:
        """Everybody's turn: the uploads by name, a row each, and which of those asked they belong to.

        What a row was not to send is zero where others did send it.
        """
        plan, method = self.course.plan, self.course.plan.method
        last = _last_rounds(state.history)
        more = [
            {"count": one.count, "since": last.get(plan.clients[i].name, 0)} for i, one in zip(called.clients, terms)
        ]
        came = self._phase(state, number, "turns", wire.TURN, called, sent, more)
        missing.add(came)
        lengths = tuple(math.prod(shape) for _, shape, _ in self.course.layout)
        beside = {one.question.what: 1 for one in method.ask if one.batch == "step"}
        found: dict[int, dict[str, Tensor]] = {}
        for row, packet in sorted(came.replies.items()):
            wanted = {**method.local.sends(sent.told(called.clients[[row]]), lengths), **beside}
            try:
                if more_parts := sorted(set(packet.tensors) - set(wanted)):
                    raise BadInput(f"nobody asked for {readable(more_parts[0])!r}")
                found[row] = {name: _upload(packet, name, width) for name, width in wanted.items()}
            except BadInput as error:
                missing.refused[plan.clients[called.clients[row]].name] = f"its upload was refused here: {error}"
        widths = {name: len(value) for one in found.values() for name, value in one.items()}
        uploads = {
            name: torch.stack([one.get(name, torch.zeros(width)) for one in found.values()])
            for name, width in sorted(widths.items())
        }
        return uploads, list(found)

    def _phase(
        self,
        state: Checkpoint,
        number: int,
        phase: str,
        kind: str,
        called: Round,
        sent: rounds.Broadcast,
        more: Sequence[Mapping[str, Any]],
    ) -> Heard:
        """One exchange of the round: to everyone the broadcast and its own part of it, each with its own terms."""
        plan = self.course.plan
        requests = []
        for row, (i, copy) in enumerate(zip(called.clients, called.copies)):
            client = plan.clients[i]
            about = {"brief": self.brief, "offer": offer_of(client), "round": number, "copy": int(copy)}
            plain, tensors = wire.public_to_wire(sent.told(called.clients[[row]]))
            held = {"weights": state.weights, **tensors}
            requests.append((client.name, pack(Packet(kind, {**about, "public": plain, **more[row]}, held))))
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
        missing.add(came)
        values = {}
        for row, packet in sorted(came.replies.items()):
            sent = packet.tensors.get("answer")
            if sent is not None and sent.shape == (1, 1) and sent.dtype is torch.float32 and sent.isfinite().all():
                values[row] = sent[0, 0]
            else:
                name = self.course.plan.clients[called.clients[row]].name
                missing.refused[name] = "its answer was refused here: it is not one finite number"
        rows = np.array(list(values), dtype=np.int64)
        before = {what: one[torch.from_numpy(rows)] for what, one in heard.items()}
        return rounds.only(called, rows), before, torch.stack(list(values.values())) if values else None


def _upload(packet: Packet, name: str, width: int) -> Tensor:
    """One part of a site's upload, refused unless it is a row of so many finite numbers."""
    value = packet.tensors.get(name)
    if value is None or value.shape != (1, width) or value.dtype != torch.float32:
        raise BadInput(f"{name!r} is missing or has a wrong shape")
    if not torch.isfinite(value).all():
        raise BadInput(f"{name!r} holds numbers that are not finite")
    return value[0]


def _last_rounds(history: list[dict[str, Any]]) -> dict[str, int]:
    """The last round in which each site's answer counted."""
    return {name: record["round"] for record in history for name in record["participants"]}


def check_deployable(method: Method) -> None:
    """Refuse what only a simulation can do."""
    if method.aggregate.simulation_only:
        raise BadInput(method.aggregate.simulation_only)
