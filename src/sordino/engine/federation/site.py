"""A site: packets in, packets out. It checks its policy, charges its own ledger, and only then reads a record.

The turn itself is ``client.turn.take_turn`` with one row, the very function a simulation runs with many.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sordino.client.rows import Records, Rows
from sordino.client.turn import answer, take_turn
from sordino.engine.federation import wire
from sordino.engine.federation.job import Job, accept, canonical, safe, understand
from sordino.engine.federation.policy import Declared, Policy, Refused, check_bounds
from sordino.engine.federation.state import LocalState
from sordino.engine.federation.wire import Packet, pack, unpack
from sordino.engine.threads import threads_for_step
from sordino.errors import BadInput, BudgetRefused
from sordino.privacy.accounting import replace_one_epsilon
from sordino.privacy.gate import Gate, Permit, Terms
from sordino.privacy.generators import Secret, Source, Turn
from sordino.privacy.ledger import Ledger
from sordino.privacy.ledger import Plan as LedgerPlan
from sordino.privacy.types import Budget, Release

log = logging.getLogger("sordino.site")

RESENDABLE = 8
"""How many of a run's newest releases are kept for resending: a server may repeat the round under way."""


class Site:
    """One participant of a federation.

    Guarantees
    ----------
    (1) Nothing is read before the site's own ledger is charged, durably; (2) a refusal depends on public parameters
    only, and everything that goes wrong later is told as ``unavailable``; (3) a repeated request is answered with the
    stored bytes, a changed one is a new charge (R11); (4) batches and noise come from a secret generator (R9). Another
    ``source`` can be injected from Python at the site alone, for tests, and marks the ledger NOT PRIVATE.
    """

    def __init__(
        self,
        name: str,
        records: Records,
        declared: Declared,
        budget: Budget,
        ledger: Ledger,
        folder: Path,
        policy: Policy | None = None,
        source: Source | None = None,
    ) -> None:
        self.name = name
        self.records = records
        self.declared = declared
        self.budget = budget
        self.ledger = ledger
        self.folder = folder
        self.policy = policy or Policy()
        most = self.policy.run_epsilon
        self.offered = budget if most is None else replace(budget, epsilon=min(most, budget.epsilon))
        self.source = Secret() if source is None else source
        ledger.open_account(name, budget)
        if source is not None:
            ledger.mark_not_private(name, "a generator was injected at the site: a test, not a deployment")
        self._understood = lru_cache(maxsize=4)(lambda text: understand(text, self.policy, self.declared, self.budget))

    def handle(self, data: bytes) -> bytes:
        """Answer one packet. Never raises: what cannot be told is ``unavailable``."""
        try:
            return self._handle(data)
        except BudgetRefused as error:
            log.warning("refused: %s", error)
            return wire.refusal(str(error), budget=True)
        except BadInput as error:
            log.warning("refused: %s", error)
            return wire.refusal(str(error))
        except Exception:
            log.exception("unavailable; the server is not told why")
            return wire.unavailable()

    def _handle(self, data: bytes) -> bytes:
        packet = unpack(data)
        doing: dict[str, Callable[[Packet, str], bytes]] = {
            wire.WHO: lambda packet, request: pack(Packet(wire.FACTS, {"name": self.name})),
            wire.HELLO: self._hello,
            wire.OFFER: self._offer,
            wire.ASK: self._ask,
            wire.TURN: self._turn,
            wire.BYE: self._bye,
        }
        if packet.kind not in doing:
            raise Refused(f"{packet.kind!r} is not something a site does")
        try:
            return doing[packet.kind](packet, wire.digest(data))
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, BadInput):
                raise
            raise Refused(f"the request is not complete: {type(error).__name__}") from error

    def _hello(self, packet: Packet, request: str) -> bytes:
        """Who this is, and whether it would take part in this study."""
        brief = packet.facts["brief"]
        facts = {
            "name": self.name,
            "records": self.declared.records,
            "epsilon": self.offered.epsilon,
            "delta": self.offered.delta,
            "adjacency": str(self.offered.adjacency),
        }
        try:
            self._understood(canonical(brief))
        except BadInput as error:
            log.warning("refused: %s", error)
            return pack(Packet(wire.REFUSED, {**facts, "reason": str(error), "budget": False}))
        log.info("study %r of run %s: this site would take part", brief.get("name"), brief.get("run"))
        return pack(Packet(wire.FACTS, facts))

    def _offer(self, packet: Packet, request: str) -> bytes:
        """Declare the plan of a run in the ledger; says how many turns the budget pays."""
        job, payable = self._job(packet)
        log.info("run %s accepted: %d of %d turns can be paid", job.run, payable, job.plan.turns)
        return pack(Packet(wire.ACCEPTED, {"payable": payable}))

    def _ask(self, packet: Packet, request: str) -> bytes:
        """Answer a question from a batch of its own."""
        job, _ = self._job(packet)
        place = int(packet.facts["place"])
        questions = [one.question for one in job.method.ask if one.batch == "own"]
        if not 0 <= place < len(questions):
            raise Refused(f"method {job.method.name!r} has no question number {place}")
        question, terms = questions[place], job.asks[place]
        public, start = self._inputs(job, packet)
        check_bounds(self.policy, {question.what: _number(question.bound(public))}, job.method.private)

        def work(rows: Rows, permit: Permit, gate: Gate) -> Packet:
            found = answer(job.work, question, rows, start, public, permit, gate)
            return Packet(wire.ANSWER, _place(packet), _sealed({"answer": found}))

        return self._release(job, packet, request, terms, work)

    def _turn(self, packet: Packet, request: str) -> bytes:
        """Take a turn: the method's local steps from the weights that were sent."""
        job, _ = self._job(packet)
        count = int(packet.facts["count"])
        if not job.plan.adaptive and count != job.terms.count:
            raise Refused(f"a turn of this run has {job.terms.count} steps, not {count}")
        if not 1 <= count <= self.policy.steps:
            raise Refused(f"{count} local steps are not possible here: at most {self.policy.steps}")
        public, start = self._inputs(job, packet)
        bounds = {"gradient": job.work.clip.bound(public), **{q.what: q.bound(public) for q in job.work.also}}
        check_bounds(self.policy, {part: _number(bound) for part, bound in bounds.items()}, job.method.private)
        state = LocalState(self.folder / "runs" / job.run, job.work.local.state, job.work.engine.dimension)
        number, copy, since = (int(packet.facts[key]) for key in ("round", "copy", "since"))

        def work(rows: Rows, permit: Permit, gate: Gate) -> Packet:
            before = Release.public(state.before(number, copy, since), "state from earlier releases")
            upload, after = take_turn(job.work, rows, start, before, public, permit, gate)
            state.keep(number, copy, since, after.value)
            return Packet(wire.UPLOAD, _place(packet), _sealed(upload.parts))

        return self._release(job, packet, request, replace(job.terms, count=count), work)

    def _release(
        self,
        job: Job,
        packet: Packet,
        request: str,
        terms: Terms,
        work: Callable[[Rows, Permit, Gate], Packet],
    ) -> bytes:
        """Stored bytes for a request that was answered before; else charge → draw → store → send (R11)."""
        turn = Turn(self.name, int(packet.facts["round"]), int(packet.facts["copy"]))
        private = job.method.private
        key = f"round {turn.round} copy {turn.copy} {terms.what}"
        if private:
            stored = self.ledger.stored(self.name, job.run, key, request)
            if stored is not None:
                log.info("%s: sent again as it was", key)
                return stored
        gate = Gate(self.ledger if private else None, self.source, job.run)
        permit = gate.grant([turn], [terms], request)
        try:  # from here on records are read, and what goes wrong is nobody's business
            batches = self.source.batches(turn, terms.what, terms.sampling, self.declared.records, terms.count)
            with threads_for_step(job.work.engine.dimension, terms.divisor):
                reply = pack(work(Rows([turn], [batches], self.records), permit, gate))
        except Exception:
            log.exception("%s failed after it was charged; the server is told 'unavailable'", key)
            return wire.unavailable()
        if private:
            self.ledger.store(self.name, job.run, key, request, reply)
            self.ledger.forget(self.name, job.run, keep=RESENDABLE)
        log.info("%s: released", key)
        return reply

    def _bye(self, packet: Packet, request: str) -> bytes:
        """The run is over: what it did not use is free again. Says what this site has spent, by public counts."""
        run = str(packet.facts["run"])
        runs = {standing.plan.run for standing in self.ledger.standings(self.name)}
        LocalState(self.folder / "runs" / safe(run), (), 0).forget()
        if run not in runs:
            return pack(Packet(wire.FACTS, {"name": self.name}))
        self.ledger.close_plan(self.name, run)
        self.ledger.forget(self.name, run)
        releases = [
            {"what": e.what, "rate": e.sampling.rate, "noise": e.noise, "count": e.count}
            for e in self.ledger.run_events(self.name, run)
        ]
        spent = {
            "spent_epsilon": self.ledger.epsilon([self.name])[self.name],
            "run_epsilon": self.ledger.epsilon([self.name], run)[self.name],
            "replace_one_epsilon": float(replace_one_epsilon(self.ledger.spent(self.name), self.budget.delta)),
            "not_private": list(self.ledger.account(self.name).not_private),
        }
        log.info("run %s is over: ε %.4g of %g spent", run, spent["spent_epsilon"], self.budget.epsilon)
        return pack(Packet(wire.FACTS, {"name": self.name, "releases": releases, **spent}))

    def _inputs(self, job: Job, packet: Packet) -> tuple[dict[str, Any], Release]:
        """The broadcast and the weights, checked for their kind."""
        weights = packet.tensors["weights"]
        wide = [name for name, value in packet.tensors.items() if not _fits(name, value, job.work.engine.dimension)]
        if wide:
            raise Refused(f"{wide[0]!r} is not a float32 vector of the model's {job.work.engine.dimension} parameters")
        return wire.public_from_wire(packet), Release.public(weights, "weights from the server")

    def _job(self, packet: Packet) -> tuple[Job, int]:
        """The run behind a request, checked against the policy and declared in the ledger; turns it can pay."""
        brief, offer = packet.facts["brief"], packet.facts["offer"]
        method, work = self._understood(canonical(brief))
        plan = accept(self.name, offer, method, self.policy, self.declared, self.offered)
        job = Job(safe(str(brief["run"])), method, work, plan)
        if not method.private:
            self.ledger.mark_not_private(self.name, f"run {job.run} used {method.name}, which adds no noise")
            return job, plan.turns
        events, whole = plan.declaration()
        return job, self.ledger.declare([LedgerPlan(self.name, job.run, events, whole)])[self.name]


def _sealed(parts: Mapping[str, Release]) -> dict[str, Tensor]:
    """The values of releases, the only thing that a reply is made of."""
    for name, one in parts.items():
        if not isinstance(one, Release):
            raise TypeError(f"{name!r} did not pass the gate")
    return {name: one.value for name, one in parts.items()}


def _place(packet: Packet) -> dict[str, Any]:
    return {"round": int(packet.facts["round"]), "copy": int(packet.facts["copy"])}


def _number(bound: Tensor | float) -> float:
    return float(bound)


def _fits(name: str, value: Tensor, dimension: int) -> bool:
    if value.dtype is not torch.float32:
        return False
    if name == "public/basis":  # PFA+: k directions
        return value.dim() == 2 and len(value) == dimension
    return value.shape == (dimension,) or (name.startswith("public/") and value.shape in ((1, 1), (1, dimension)))
