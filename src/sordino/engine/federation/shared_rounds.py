"""A coordinator whose sites share noise: it sees sums alone, and opens a sum with everybody's message or not at all.

All who take part in an attempt get the same descriptor. Where somebody does not answer, nothing of the attempt is
opened: what came says nothing without the rest. The round is repeated without those who are missing, as a new attempt
with fresh batches, noise and masks, while the plan has reserved it (``trust.dropouts``) and enough are left for the
promise to hold; else the round changes nothing, and what was paid stays paid.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from sordino.engine import rounds
from sordino.engine.checkpoint import Checkpoint
from sordino.engine.federation import wire
from sordino.engine.federation.coordinator import Coordinator
from sordino.engine.federation.descriptor import Charter
from sordino.engine.federation.exchange import Heard, present
from sordino.engine.federation.summing import Sum, add_up, bounds_of, message_of, uploads_of
from sordino.errors import BadInput, SordinoError
from sordino.server.select import Round

log = logging.getLogger("sordino.coordinator")

PATIENCE = 10.0  # seconds to wait for everybody before a round begins without those who are not needed
STUBBORN = 2  # a site that refused so often is not asked again


@dataclass
class SharedRounds(Coordinator):
    """The rounds of a run with shared noise. ``charter``: what all sites were told before the first."""

    charter: Charter = field(kw_only=True)

    def _left(self, state: Checkpoint, broke: set[str]) -> rounds.Index:
        """How many turns every site can still pay; attempts that were not opened were paid for too."""
        spent = Counter[str]()
        for record in state.history:
            spent.update(record.get("unopened", {}))
        unopened = np.array([spent[client.name] for client in self.course.plan.clients], dtype=np.int64)
        left: rounds.Index = super()._left(state, broke) - unopened
        return left

    def _round(self, state: Checkpoint, number: int, broke: set[str]) -> dict[str, Any]:
        plan, before, missing = self.course.plan, state.server, Heard()
        scheduled = plan.schedule.round(number)
        left = self._left(state, broke)
        payers = rounds.who_can_pay(plan, state.server, left, scheduled)
        dry = sorted(self._name(i) for i in scheduled.clients if left[i] <= 0)
        called = self._here(state, number, payers)
        missing.absent += [self._name(i) for i in payers.clients if i not in called.clients]
        also: dict[str, Any] = {"repeats": Counter[str](), "unopened": Counter[str]()}
        answers: dict[str, Tensor] = {}
        total, opened = None, len(called.clients) > 0
        for place, ask in enumerate(rounds.own_questions(plan), 1):
            if opened:
                sent = rounds.broadcast(plan, state.server)
                called, heard = self._summed(state, number, place, called, sent, missing, also)
                opened = heard is not None
                if heard is not None:
                    answers[ask.question.what] = heard.mean(ask.question.what).float()
                    told = answers[ask.question.what].expand(len(called.clients))
                    rounds.conclude(self.course, state, number, called, ask, told, sent)
        sent = rounds.broadcast(plan, state.server)
        if opened:
            called, total = self._summed(state, number, 0, called, sent, missing, also)
        uploads: dict[str, Any] = {}
        terms = rounds.turn_terms(plan, state.server, called)
        if total is None:
            state.server = before
        else:
            about = rounds.facts(self.course, called, number, sent, terms, state)
            uploads = uploads_of(self.course, about, total, float(sent.public["lr"]))
        all_told = {what: value.expand(len(called.clients)) for what, value in answers.items()}
        record = rounds.close_round(self.course, state, number, called, terms, sent, all_told, uploads)
        if len(payers.clients) and total is None:
            record["note"] = also.pop("why", "too few answered: nothing was opened, and the model stays as it is")
        record |= rounds.moving_clip(plan, called, sent) if uploads else {}
        record |= {key: dict(value) for key, value in also.items() if value and key != "why"}
        return record | missing.missing() | ({"cannot_pay": dry} if dry else {})

    def _summed(
        self,
        state: Checkpoint,
        number: int,
        place: int,
        called: Round,
        sent: rounds.Broadcast,
        missing: Heard,
        also: dict[str, Any],
    ) -> tuple[Round, Sum | None]:
        """One release of the round, repeated where somebody is lost: who answered last, and their sum if it opened.

        ``place`` is the release's in the charter, 0 being the turn. ``also`` takes what is to be recorded.
        """
        plan, release = self.course.plan, self.charter.releases[place]
        bounds = bounds_of(plan, place, called, sent)
        width = sum(part.width for part in release.parts)
        phase, kind = ("turns", wire.TURN) if place == 0 else (f"question {place}", wire.ASK)
        own = {"count": 1, "since": 0} if place == 0 else {"place": place - 1}
        used = sum(record.get("repeats", {}).get(phase, 0) for record in state.history)
        reserve = self.charter.dropouts - used
        for attempt in range(max(0, reserve) + 1):
            names = [self._name(i) for i in called.clients]
            asked = Round(called.clients, np.full_like(called.copies, attempt), called.weights)
            more = {**own, "charter": self.charter.plain(), "participants": sorted(names)}
            title = phase if attempt == 0 else f"{phase} attempt {attempt + 1}"
            came = self._phase(state, number, title, kind, asked, sent, [more] * len(names))
            missing.add(came)
            messages = {}
            for row, packet in sorted(came.replies.items()):
                try:
                    messages[row] = message_of(packet, width)
                except BadInput as error:
                    missing.refused[names[row]] = f"its message was refused here: {error}"
            if len(messages) == len(names):
                try:
                    return called, add_up(plan, place, called, list(messages.values()), bounds)
                except BadInput as error:
                    log.error("round %d, %s: %s", number, phase, error)
                    also["why"] = f"{error}; the model stays as it is"
                    return called, None
            called = rounds.only(called, np.array(list(messages), dtype=np.int64))
            lost = ", ".join(sorted(set(names) - {self._name(i) for i in called.clients}))
            if attempt >= reserve or len(called.clients) < self.least or not rounds.enough(plan, called.clients):
                log.warning("round %d, %s: without %s nothing can be opened", number, phase, lost)
                break
            log.warning("round %d, %s: lost %s; repeated without, as attempt %d", number, phase, lost, attempt + 2)
            also["repeats"][phase] += 1
            if place == 0:
                also["unopened"].update(self._name(i) for i in called.clients)
        return called, None

    def _here(self, state: Checkpoint, number: int, called: Round) -> Round:
        """Of those who can pay, who is there: a lost site costs everybody an attempt, so it is asked for first.

        Raises where too few are there within the bound: the run can be taken up again when they are back.
        """
        names = [self._name(i) for i in called.clients]
        away, refused = set[str](), Counter[str]()
        for record in state.history:
            refused.update(record.get("refused", {}).keys())
            away |= {*record.get("absent", ()), *record.get("refused", {})}
            away -= set(record["participants"])
        gone = {name for name in names if refused[name] >= STUBBORN}
        expected = set(names) - gone - away  # whoever was missing last time is welcome, and not waited for

        def find() -> list[str]:
            began = time.monotonic()
            while True:
                there = self.transport.names() - gone
                doubtful = sorted(away & there & set(names))
                there -= set(doubtful) - present(self.transport, doubtful, min(PATIENCE, self.seconds))
                here, waited = [name for name in names if name in there], time.monotonic() - began
                enough = rounds.enough(self.course.plan, self._places(here)) and len(here) >= self.least
                if (enough and (there >= expected or waited > PATIENCE)) or waited > self.seconds:
                    break
                time.sleep(0.5)
            if not enough:
                raise SordinoError(
                    f"round {number} cannot begin: of the sites that share noise {', '.join(here) or 'nobody'} came "
                    f"within {self.seconds:g} s, and without more of {', '.join(sorted(set(names) - set(here)))} their "
                    "promises do not hold; go on with --resume when they are back"
                )
            return here

        if not names:
            return called
        kept = set(self._places(self.inbox.settled(f"{number:06d}-here", find)).tolist())
        return rounds.only(called, np.array([int(i) in kept for i in called.clients], dtype=bool))

    def _name(self, place: int) -> str:
        return self.course.plan.clients[place].name

    def _places(self, names: list[str]) -> rounds.Index:
        known = {client.name: i for i, client in enumerate(self.course.plan.clients)}
        return np.array([known[name] for name in names if name in known], dtype=np.int64)
