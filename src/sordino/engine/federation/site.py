"""A site: packets in, packets out. It checks its policy, charges its own ledger, and only then reads a record.

The turn itself is ``client.turn.take_turn`` with one row, the very function a simulation runs with many.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sordino.client.rows import Records, Rows, seen_alone
from sordino.client.turn import answer, take_turn
from sordino.engine.devices import threads_for_step
from sordino.engine.federation import wire
from sordino.engine.federation.attending import Attendance, Party, Roll, check_living
from sordino.engine.federation.consent import commitment_of, levels_to_plain, offered_levels, trained_levels
from sordino.engine.federation.held import parted
from sordino.engine.federation.job import Job, Understood, accept, canonical, safe, understand
from sordino.engine.federation.judged import Task, accept_task, check_request, own_weights, verdict
from sordino.engine.federation.limits import Declared, Policy, Refused
from sordino.engine.federation.masks import erase_key, keep_key, load_key, signed_key
from sordino.engine.federation.pact import Member, Pact, check_willing, shared_trust
from sordino.engine.federation.paid import Till, sealed, told_spent
from sordino.engine.federation.peers import Peers
from sordino.engine.federation.policy import check_bounds, check_place
from sordino.engine.federation.state import LocalState, commitment
from sordino.engine.federation.surveying import Raw, answer_survey, check_survey
from sordino.engine.federation.taking_part import TakingPart
from sordino.engine.federation.wire import Packet, pack, unpack, whole
from sordino.errors import BadInput, BudgetRefused, SordinoError
from sordino.methods import Method
from sordino.privacy.drawing import draw_batches
from sordino.privacy.gate import Gate, Permit, Terms
from sordino.privacy.generators import Secret, Source, Turn
from sordino.privacy.held import HELD
from sordino.privacy.ledger import Commit, Ledger, LedgerPlan
from sordino.privacy.levels import Consent, present
from sordino.privacy.types import Budget, Release
from sordino.server.broadcast import Frame, check_broadcast

log = logging.getLogger("sordino.site")


@dataclass(frozen=True)
class Purse:
    """What a site may spend in all, the ledger that keeps count, and how runs compose in it (None: as it was).

    ``consent``: where records have levels of their own, which of them has which; ``budget`` is then the strictest's.
    """

    budget: Budget
    ledger: Ledger
    composition: str | None = None
    consent: Consent | None = None


class Site:
    """One participant of a federation.

    Guarantees
    ----------
    (1) Nothing is read before the site's own ledger is charged, durably; (2) a refusal depends on public parameters
    only, and everything that goes wrong later is told as ``unavailable``; (3) a repeated request is answered with the
    stored bytes, a changed one is a new charge (R11); (4) batches and noise come from a secret generator (R9). Another
    ``source`` can be injected from Python at the site alone, for tests, and marks the ledger NOT PRIVATE; (5) every
    limit of the policy is checked with every request, against the site's own ledger, whatever came before it; (6) the
    ledger is this site's, and was kept for these records; (7) where noise is shared, a message leaves under masks, one
    for a descriptor ever, and only if the noise of those whom this site knows is worth what it is charged for.
    """

    def __init__(
        self,
        name: str,
        records: Records,
        declared: Declared,
        purse: Purse,
        folder: Path,
        policy: Policy | None = None,
        source: Source | None = None,
        peers: Peers | None = None,
        held: NDArray[np.bool_] | None = None,
        raw: Raw | None = None,
        commit: Commit | None = None,
        roll: Roll | None = None,
    ) -> None:
        budget, ledger = purse.budget, purse.ledger
        check_living(ledger, roll is not None)
        self.name = name
        self.peers = peers
        self.records, self.held = parted(records, held, ledger)
        self.declared = (
            declared if held is None else replace(declared, records=int((~held).sum()), held=int(held.sum()))
        )
        self.budget = budget
        self.ledger = ledger
        self.folder = folder
        self.policy = policy or Policy()
        most = self.policy.run_epsilon
        self.offered = budget if most is None else replace(budget, epsilon=min(most, budget.epsilon))
        self.source = Secret() if source is None else source
        self.raw = raw
        if roll is not None and purse.consent is not None:
            raise BadInput(
                "levels of consent and living data do not go together yet: leave budget.levels or data.living"
            )
        own = commit or (lambda salt: commitment(records, salt))
        self.account = ledger.bind(name, commitment_of(ledger, purse.consent, own))
        levels, self.members = trained_levels(purse.consent, budget, held)
        self.declared = replace(self.declared, levels=offered_levels(levels, most))
        self.attendance = Attendance.of(ledger, self.account, len(records), held, roll)
        self.levelled = {self.account + one.suffix: one.budget for one in present(levels)}
        for one in (one for part in self.accounts for one in part):
            owner = self.account if one in self.levelled else ""
            ledger.open_account(one, self.levelled.get(one, budget), composition=purse.composition, owner=owner)
            if source is not None:
                ledger.mark_not_private(one, "a generator was injected at the site: a test, not a deployment")
        self._seen: list[tuple[nn.Module, Records, Records]] = []
        self._accepted = lru_cache(maxsize=4)(Pact.accept)
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
            wire.SURVEY: lambda packet, request: answer_survey(self, packet, request),
            wire.SCORES: self._scores,
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
        declared = self.declared_in(safe(str(brief.get("run"))))
        facts = {
            "name": self.name,
            "records": declared.records,
            "epsilon": self.offered.epsilon,
            "delta": self.offered.delta,
            "adjacency": str(self.offered.adjacency),
            **({} if self.held is None else {"held": declared.held}),
            **({"levels": levels_to_plain(declared.levels)} if declared.levels else {}),
        }
        try:
            trust = None
            if "survey" in brief:
                check_survey(self.policy, brief, declared, self.raw, self.budget)
            else:
                method = self._understood(canonical(brief)).method
                trust = shared_trust(brief)
            if trust is not None:
                peers = check_willing(trust, method, self.policy, self.peers, self.offered.is_public)
                run = str(brief["run"])
                facts["key"] = signed_key(peers.private, self.name, run, keep_key(self._key_file(run)))
        except BadInput as error:
            log.warning("refused: %s", error)
            return pack(Packet(wire.REFUSED, {**facts, "reason": str(error), "budget": False}))
        log.info("study %r of run %s: this site would take part", brief.get("name"), brief.get("run"))
        return pack(Packet(wire.FACTS, facts))

    @property
    def accounts(self) -> list[list[str]]:
        """The accounts of training records, and those of held-out ones where there are some."""
        return [list(self.trained), *self.attendance.accounts[1:]]

    @property
    def trained(self) -> dict[str, Budget]:
        """The accounts of training records, by level of consent or by cohort, and what each was opened with."""
        return self.levelled or dict.fromkeys(self.attendance.accounts[0], self.budget)

    def declared_in(self, run: str) -> Declared:
        """What this site says about its records in a run; where they come and go, of those who take part in it."""
        return self.attendance.declared(run, self.declared, self.offered.epsilon)

    def party(self, run: str, held: bool = False) -> Party:
        """Who takes part in a run, of training or of held-out records."""
        return self.attendance.party(run, held, self.offered.epsilon)

    def _offer(self, packet: Packet, request: str) -> bytes:
        """Declare the plan of a run in the ledger; says how many turns the budget pays."""
        job, payable = self._job(packet)
        log.info("run %s accepted: %d of %d turns can be paid", job.run, payable, job.plan.turns)
        found = {"payable": payable}
        if "judging" in packet.facts:
            _, task, found["evaluations"] = self._task(packet.facts["brief"], packet.facts["judging"])
            log.info("run %s: %d of %d evaluations can be paid", job.run, found["evaluations"], task.times)
        return pack(Packet(wire.ACCEPTED, found))

    def _ask(self, packet: Packet, request: str) -> bytes:
        """Answer a question from a batch of its own."""
        job, _ = self._job(packet)
        place = whole(packet, "place")
        questions = [one.question for one in job.method.ask if one.batch == "own"]
        if not 0 <= place < len(questions):
            raise Refused(f"method {job.method.name!r} has no question number {place}")
        question, terms = questions[place], job.asks[place]
        if job.pact is not None:
            return self._masked(job, job.pact, packet, request, 1 + place)
        public, start = self._inputs(job, packet)
        check_bounds(self.policy, {question.what: _number(question.bound(public))}, job.method.private)

        def work(rows: Rows, permit: Permit, gate: Gate) -> Packet:
            found = answer(job.work, question, rows, start, public, permit, gate)
            return Packet(wire.ANSWER, _place(packet), sealed({"answer": found}))

        return self._release(job, packet, request, terms, work)

    def _turn(self, packet: Packet, request: str) -> bytes:
        """Take a turn: the method's local steps from the weights that were sent."""
        job, _ = self._job(packet)
        count = whole(packet, "count")
        if not job.plan.adaptive and count != job.terms.count:
            raise Refused(f"a turn of this run has {job.terms.count} steps, not {count}")
        if not 1 <= count <= self.policy.steps:
            raise Refused(f"{count} local steps are not possible here: at most {self.policy.steps}")
        if job.pact is not None:
            return self._masked(job, job.pact, packet, request, 0)
        public, start = self._inputs(job, packet)
        bounds = {"gradient": job.work.clip.bound(public), **{q.what: q.bound(public) for q in job.work.also}}
        check_bounds(self.policy, {part: _number(bound) for part, bound in bounds.items()}, job.method.private)
        state = LocalState(self.folder / "runs" / job.run, job.work.local.state, job.work.engine.dimension)
        number, copy, since = (whole(packet, key) for key in ("round", "copy", "since"))
        if not 0 <= since < number:
            raise Refused(f"round {number} cannot follow round {since}")

        def work(rows: Rows, permit: Permit, gate: Gate) -> Packet:
            before = Release.public(state.before(number, copy, since), "state from earlier releases")
            upload, after = take_turn(job.work, rows, start, before, public, permit, gate)
            state.keep(number, copy, since, after.value)
            if job.work.local.begin is not None:
                own = job.work.local.begin(start.value[None], after.value)[0][0]
                state.keep_model({slot.name: slot.view(own) for slot in job.work.engine.layout})
            return Packet(wire.UPLOAD, _place(packet), sealed(upload.parts))

        return self._release(job, packet, request, replace(job.terms, count=count), work)

    def _masked(self, job: Job, pact: Pact, packet: Packet, request: str, place: int) -> bytes:
        """Take part in a sum: the turn (``place`` 0) or a question, as integers under masks that cancel in it."""
        public, start = self._inputs(job, packet)
        part = TakingPart.of(job, pact, packet, place, public)
        check_bounds(self.policy, part.bounds, private=True)
        key = load_key(self._key_file(job.run))

        def work(rows: Rows, permit: Permit, gate: Gate) -> Packet:
            sent = part.message(rows, start, public, permit, gate, key)
            kind, about = wire.ANSWER if place else wire.UPLOAD, {"descriptor": part.digest}
            return Packet(kind, _place(packet) | about, sealed({wire.MASKED: sent}))

        return self._release(job, packet, request, part.terms, work, part.digest)

    def _key_file(self, run: str) -> Path:
        """Where the run's own key lies, from the first hello to the farewell."""
        return self.folder / "runs" / safe(run) / "mask.key"

    def _release(
        self,
        job: Job,
        packet: Packet,
        request: str,
        terms: Terms,
        work: Callable[[Rows, Permit, Gate], Packet],
        masks: str = "",
    ) -> bytes:
        """Pay for a turn or a question, then read its batch; see ``paid``.

        ``masks``: the digest that a message is masked under, which is used for one message ever.
        """
        turn = Turn(self.account, whole(packet, "round"), whole(packet, "copy"))
        check_place(self.policy, job.rounds, turn.round, turn.copy, max((job.plan.turns, *job.plan.queries)))
        party = self.party(job.run)

        def make(permit: Permit, gate: Gate) -> Packet:
            records = self.attendance.records(False, party, self.records)
            batches = draw_batches(self.source, turn, terms, party.count, self.members)
            with threads_for_step(job.work.engine.dimension, terms.divisor):
                return work(Rows([turn], [batches], self._mapped(job.fixed, records)), permit, gate)

        return self._till(job.run, job.method, self.policy.rounds).release(turn, terms, request, make, masks)

    def _till(self, run: str, method: Method, most: int, suffix: str = "") -> Till:
        """Where a run pays: for training records, or with the suffix ``HELD`` for held-out ones."""
        return Till(self.ledger, self.source, self.account + suffix, run, method.private, most)

    def _mapped(self, fixed: nn.Module | None, records: Records) -> Records:
        """Records as a run's first trained layer sees them: each mapped by itself, once for all turns."""
        if fixed is None:
            return records
        for by, of, found in self._seen:
            if by is fixed and of is records:
                return found
        found = seen_alone(fixed, records)
        self._seen = [(fixed, records, found), *self._seen[: 1 if self.held is not None else 0]]
        return found

    def _scores(self, packet: Packet, request: str) -> bytes:
        """Judge a model on the held-out records, and on no others: counts with noise, paid by their own account."""
        brief = packet.facts["brief"]
        understood, task, _ = self._task(brief, packet.facts["terms"])
        weights = check_request(packet, understood)
        number, since = whole(packet, "round"), whole(packet, "since")
        task.check_round(number, since)
        turn = Turn(self.account + HELD, number)

        def make(permit: Permit, gate: Gate) -> Packet:
            assert self.held is not None  # or the task was refused
            records = self.attendance.records(True, self.party(task.run, held=True), self.held)
            shown = own_weights(understood, weights, self.folder / "runs" / task.run, number, since)
            found = verdict(understood, shown, self._mapped(understood.fixed, records), task, permit, gate)
            return Packet(wire.COUNTS, {"round": number}, sealed(found))

        till = self._till(task.run, understood.method, min(task.times, self.policy.rounds), HELD)
        return till.release(turn, task.terms, request, make)

    def _task(self, brief: dict[str, Any], terms: dict[str, Any]) -> tuple[Understood, Task, int]:
        """The evaluations of a run, checked and declared to the held-out account; how many of them it can pay."""
        understood = self._understood(canonical(brief))
        method, declared = understood.method, self.declared_in(safe(str(brief["run"])))
        task = accept_task(brief, terms, self.policy, declared, self.offered, method.private)
        plan = task.declaration(self.account + HELD, str(brief.get("name", "")))
        party, payable = self.agree([plan], held=True, not_private=_without_noise(method, task.run))
        return understood, replace(task, terms=replace(task.terms, payers=party.payers)), payable

    def agree(self, plans: Sequence[LedgerPlan], held: bool = False, not_private: str = "") -> tuple[Party, int]:
        """Declare a run to the accounts of all who would take part; who does, and how many turns they can pay.

        ``plans``: of one run, for the site's own accounts; each cohort that takes part has one of every such account.
        ``not_private``: of a run without noise, why nothing is declared and the accounts are marked instead.
        """
        run, most = plans[0].run, min(plan.turns for plan in plans)
        party = self.party(run, held)
        if not party.payers:
            raise Refused("nobody's records take part here at present: all of them are withdrawn")
        accounts = {payer: [plan.client + payer for plan in plans] for payer in party.payers}
        payable = dict.fromkeys(accounts, most)
        if not_private:
            for account in (one for own in accounts.values() for one in own):
                self.ledger.mark_not_private(account, not_private)
        else:
            every = [replace(plan, client=plan.client + payer) for payer in accounts for plan in plans]
            turns = self.ledger.declare(every, self.policy.run_epsilon)
            payable = {payer: min(turns[one] for one in own) for payer, own in accounts.items()}
        return self.attendance.settle(run, held, party, payable)

    def _bye(self, packet: Packet, request: str) -> bytes:
        """The run is over: what it did not use is free again. Says what this site has spent, by public counts."""
        run = safe(str(packet.facts["run"]))
        LocalState(self.folder / "runs" / run, (), 0).forget()
        erase_key(self._key_file(run))
        self._accepted.cache_clear()  # it holds the key too
        known = {one.client for one in self.ledger.accounts()}  # another process may just have noted a cohort
        trained, *held = [[one for one in part if one in known] for part in self.accounts]
        own = [one for part in (trained, *held) for one in part]
        declared = [one for one in own if any(standing.plan.run == run for standing in self.ledger.standings(one))]
        if not declared:
            return pack(Packet(wire.FACTS, {"name": self.name}))
        for one in declared:
            self.ledger.close_plan(one, run)
            self.ledger.forget(one, run)
        said = {one: one.removeprefix(self.account) if one in self.levelled else "" for one in trained}
        spent = told_spent(self.ledger, run, said, *held)
        most_of_all = max(budget.epsilon for budget in self.trained.values())
        log.info("run %s is over: ε %.4g of %g spent", run, spent["spent_epsilon"], most_of_all)
        return pack(Packet(wire.FACTS, {"name": self.name, **spent}))

    def _inputs(self, job: Job, packet: Packet) -> tuple[dict[str, Any], Release]:
        """The broadcast and the weights, checked for their kind; weights may be any float32 numbers."""
        dimension, weights = job.work.engine.dimension, packet.tensors["weights"]
        if weights.dtype is not torch.float32 or weights.shape != (dimension,):
            raise Refused(f"'weights' is not a float32 vector of the model's {dimension} parameters")
        strange = [name for name in packet.tensors if name != "weights" and not name.startswith("public/")]
        if strange or any(f"public/{name}" in packet.tensors for name in packet.facts["public"]):
            raise Refused("the request holds tensors that nothing asks for")
        public = wire.public_from_wire(packet)
        frame = Frame(job.lengths, self.policy.clip, self.policy.steps, job.method.private, public)
        check_broadcast(job.method.broadcasts, frame)
        return public, Release.public(weights, "weights from the server")

    def _job(self, packet: Packet) -> tuple[Job, int]:
        """The run behind a request, checked against the policy and declared in the ledger; turns it can pay."""
        brief, offer = packet.facts["brief"], packet.facts["offer"]
        understood = self._understood(canonical(brief))
        method, work = understood.method, understood.work
        run = safe(str(brief["run"]))
        declared = self.declared_in(run)
        plan = accept(self.account, offer, method, self.policy, declared, self.offered)
        if self.attendance.lives and any(one.groups for one in (plan.terms, *plan.asks)):
            raise Refused("records that come and go are sampled alike here: a request cannot name groups of them")
        pact = self._pact(packet, method, declared)
        if pact is not None:
            widths = {"gradient": work.engine.dimension, **{one.question.what: 1 for one in method.ask}}
            terms, *asks = pact.told([plan.terms, *plan.asks], widths)
            plan = replace(plan, terms=terms, asks=tuple(asks))
            pact.check_offer([terms, *asks])
        study = str(brief.get("name", ""))
        plans = [LedgerPlan(account, run, *told, study) for account, told in plan.declaration().items()]
        party, payable = self.agree(plans, not_private=_without_noise(method, run))
        terms, *asks = (replace(one, payers=party.payers) for one in (plan.terms, *plan.asks))
        plan = replace(plan, terms=terms, asks=tuple(asks))
        job = Job(run, method, work, plan, int(brief["rounds"]), understood.fixed, pact)
        return job, payable if method.private else plan.turns

    def _pact(self, packet: Packet, method: Method, declared: Declared) -> Pact | None:
        """What the sites of a run agreed on, checked anew with every request; None where each adds its own noise."""
        brief = packet.facts["brief"]
        trust = shared_trust(brief)
        if trust is None:
            return None
        if self.declared.levels:
            raise Refused("this site's records have levels of consent, and its noise is its own: it shares none yet")
        public, run = self.offered.is_public, str(brief["run"])
        peers = check_willing(trust, method, self.policy, self.peers, public)
        try:
            key = load_key(self._key_file(run)).private_bytes_raw()
        except SordinoError:
            raise Refused("this site has no key of this run, or not any more: begin a new run") from None
        own = Member(self.name, declared.records, public, key)
        return self._accepted(canonical(packet.facts["charter"]), canonical(brief), own, peers)


def _without_noise(method: Method, run: str) -> str:
    """Why a run's accounts are marked NOT PRIVATE; empty where they need not be."""
    return "" if method.private else f"run {run} used {method.name}, which adds no noise"


def _place(packet: Packet) -> dict[str, Any]:
    return {"round": packet.facts["round"], "copy": packet.facts["copy"]}


def _number(bound: Tensor | float) -> float:
    return float(bound)
