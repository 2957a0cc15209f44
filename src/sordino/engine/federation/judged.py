"""A site judges a model on its held-out records: what a server may ask for, and how the answer is computed.

There is no way to ask this of training records: the request names none, and the code below is handed the held-out ones.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sordino import models
from sordino.client.gradients.types import Trainable
from sordino.client.rows import Records
from sordino.client.score import score
from sordino.engine.federation import wire
from sordino.engine.federation.job import Understood, safe
from sordino.engine.federation.limits import Declared, Policy, Refused
from sordino.engine.federation.state import LocalState
from sordino.engine.federation.wire import Packet
from sordino.methods.evaluation import Evaluation, cells_of, parts_of
from sordino.privacy.cells import Cells
from sordino.privacy.gate import Gate, Permit, Terms
from sordino.privacy.ledger import LedgerPlan
from sordino.privacy.threads import one_thread
from sordino.privacy.types import Budget, Release, Scheme

FACTS = {"brief", "terms", "round", "since"}
"""What a request for scores says, beside the weights. Anything more is refused: it would have to mean something."""


@dataclass(frozen=True)
class Task:
    """The evaluations of one run, as this site accepted them: what one releases, and how many there are."""

    run: str
    terms: Terms
    settings: Evaluation
    rounds: int
    cells: Cells

    @property
    def times(self) -> int:
        """How often the run is evaluated."""
        return self.settings.times(self.rounds)

    def declaration(self, account: str, study: str = "") -> LedgerPlan:
        """What the account of the held-out records is told: so many times one release, and no more."""
        return LedgerPlan(account, self.run, (self.terms.event,), self.times, study)

    def check_round(self, number: int, since: int) -> None:
        """Refuse to judge after a round in which the study does not ask for it."""
        if not 1 <= number <= self.rounds or not self.settings.is_time(number, self.rounds):
            raise Refused(f"round {number} is none of the {self.times} that this study evaluates")
        if not 0 <= since <= number:
            raise Refused(f"round {since} cannot have counted before round {number} ends")


def accept_task(
    brief: Mapping[str, Any],
    plain: Mapping[str, Any],
    policy: Policy,
    declared: Declared,
    budget: Budget,
    private: bool,
) -> Task:
    """What a server wants to know about held-out records; refused where this site has none, or its limits say no."""
    settings = Evaluation.parse(brief.get("evaluation"))
    if settings is None:
        raise Refused("the study has no [evaluation]: this site judges no model of it")
    if not declared.held:
        raise Refused("this site holds out no records to judge a model by: data.held_out in SITE.toml does")
    terms, rounds = wire.terms_from_plain(plain), int(brief["rounds"])
    wanted = parts_of(declared.classes)
    if tuple(name for name, _ in terms.parts) != wanted:
        raise Refused(f"an evaluation releases {' and '.join(wanted)}, not {terms.what!r}")
    if terms.sampling.scheme is not Scheme.FULL or terms.count != 1 or terms.divisor != 1.0 or terms.groups:
        raise Refused("an evaluation counts all held-out records, once: no batches and nothing to divide by")
    if terms.adjacency is not budget.adjacency:
        raise Refused(
            f"the evaluation accounts under {terms.adjacency}, this site's budget is under {budget.adjacency}"
        )
    for name, z in terms.parts:
        if private and not budget.is_public and not z >= policy.least_noise:
            raise Refused(f"{name!r} would have noise {z:.3g}: this site adds at least {policy.least_noise:g}")
    if not 1 <= rounds <= policy.rounds:
        raise Refused(f"{rounds} rounds are not possible for this site: it allows {policy.rounds} a run")
    return Task(safe(str(brief["run"])), terms, settings, rounds, cells_of(declared.classes, settings.bins))


def check_request(packet: Packet, understood: Understood) -> Tensor:
    """The weights to judge; refuses whatever else a request holds."""
    if more := sorted(set(packet.facts) - FACTS):
        raise Refused(f"the request says {more[0]!r}: a model is judged on all held-out records, and on no others")
    if set(packet.tensors) != {"weights"}:
        raise Refused("the request holds tensors that nothing asks for")
    weights, dimension = packet.tensors["weights"], Trainable(understood.judged).dimension
    if weights.dtype is not torch.float32 or weights.shape != (dimension,):
        raise Refused(f"'weights' is not a float32 vector of the model's {dimension} parameters")
    return weights


def own_weights(understood: Understood, weights: Tensor, folder: Path, number: int, since: int) -> Tensor:
    """The weights that are judged: those that were sent, or the site's own model, where the method gives it one.

    A model of its own is made from the common weights and the state that the site's turns left, up to round ``since``,
    the last of them that counted at the server. That state is made of releases.
    """
    work = understood.work
    if work.local.begin is None:
        return weights
    state = LocalState(folder, work.local.state, work.engine.dimension).before(number + 1, 0, since)
    return work.local.begin(weights[None], state)[0][0]


def verdict(
    understood: Understood, weights: Tensor, records: Records, task: Task, permit: Permit, gate: Gate
) -> dict[str, Release]:
    """Release how a model does on these records: counts by cell, and how many it gets right.

    Guarantees: what a record adds is a function of the request and that record alone, bit for bit: it goes through the
    model by itself, on one thread. One on which the model raises an error adds nothing.
    """
    outputs, fine = outputs_alone(understood.judged, weights, records.x)
    valid = fine if records.valid is None else fine & records.valid
    return score(outputs, records, valid, task.cells, permit, gate)


def outputs_alone(module: nn.Module, weights: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs of a model with these weights for records one at a time, and for which of them there are any."""
    model = copy.deepcopy(module)
    Trainable(model).load(model, weights)
    with one_thread():
        return models.one_by_one(model.eval(), x)
