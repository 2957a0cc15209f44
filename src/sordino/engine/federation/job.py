"""A run as a site understands it: method, model and terms, built from what is installed there and checked by policy."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sordino import models
from sordino.client import gradients
from sordino.client.augment import Augment
from sordino.client.gradients.losses import loss_by_name
from sordino.client.turn import Work
from sordino.engine.federation import wire
from sordino.engine.federation.limits import Declared, Policy, Refused
from sordino.engine.federation.pact import Pact
from sordino.engine.federation.policy import (
    check_features,
    check_frozen,
    check_layout,
    check_size,
    check_study,
    check_terms,
)
from sordino.methods import Method, get
from sordino.methods.levels import LevelPlan
from sordino.methods.plan import ClientPlan
from sordino.privacy.gate import Terms
from sordino.privacy.levels import present
from sordino.privacy.types import Budget

KEPT = 1 << 31
"""The most memory for the features of a site's records, in bytes."""


@dataclass(frozen=True)
class Job:
    """One run, as this site understood and accepted it."""

    run: str
    method: Method
    work: Work
    plan: ClientPlan
    rounds: int
    fixed: nn.Module | None = None
    """What the model does to a record before its first trained layer, where ``work`` takes that as done."""
    pact: Pact | None = None
    """Where sites share noise: the charter of the run, as this site checked it."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of entries of each of the model's tensors, in order."""
        return tuple(math.prod(shape) for _, shape, _ in self.work.engine.layout)

    @property
    def terms(self) -> Terms:
        """What one turn releases, with how much noise."""
        return self.plan.terms

    @property
    def asks(self) -> tuple[Terms, ...]:
        """What each question with a batch of its own releases, with how much noise."""
        return self.plan.asks


@dataclass(frozen=True)
class Understood:
    """A study as this site can do it: method, model and gradient engine, built from what is installed here."""

    method: Method
    work: Work
    fixed: nn.Module | None
    """The model's fixed part, where the features of all records fit memory: computed once then, else at every step."""
    judged: nn.Module
    """The model after its fixed part, as it is judged; ``work`` may train something in its place."""


def canonical(brief: Any) -> str:
    """A study's brief as text, the same for the same study."""
    return json.dumps(brief, sort_keys=True)


def understand(text: str, policy: Policy, declared: Declared, budget: Budget) -> Understood:
    """Method, model and gradient engine of a study, built from what is installed here; refused by public parameters."""
    brief = json.loads(text)
    parts = dict(brief["method"])
    method = get(str(parts.pop("name")), parts, policy.modules)
    check_study(policy, brief, method, declared, budget)
    about = brief["model"]
    check_size(policy, about["name"], declared, about["options"])
    records = declared.shape, declared.classes, int(brief["seed"])
    template = models.build(about["name"], *records, tokens=declared.tokens, **about["options"])
    loss = "cross-entropy" if declared.classes is not None else "half-squared-error"
    check_features(brief, template)
    check_frozen(brief, template)
    augment = None if brief.get("augment") is None else Augment.parse(brief["augment"])
    if augment is not None:
        augment.check(declared.shape)
    copies = declared.unit_records * (1 if augment is None else augment.copies)
    fixed, trained = models.split_fixed(template)
    if fixed is not None and (
        augment is not None
        or (declared.records + declared.held) * declared.unit_records * _size(fixed, declared) > KEPT
    ):
        fixed, trained = None, template
    gradients.Alone(template, loss_by_name(loss), copies=copies).check(declared.shape, declared.classes)
    judged = trained
    if method.local.trains is not None:
        trained, loss = method.local.trains(trained)
    engine = gradients.build(trained, loss, copies=copies)
    if engine.dimension > policy.parameters:
        raise Refused(f"a model of {engine.dimension} parameters is too large here: at most {policy.parameters}")
    check_layout(brief, [[name, list(shape), offset] for name, shape, offset in engine.layout])
    also = tuple(one.question for one in method.ask if one.batch == "step")
    alone = gradients.Alone(trained, loss_by_name(loss), copies=copies)
    work = Work(
        engine, method.clip, method.local, also, alone=alone, augment=augment, unit_records=declared.unit_records
    )
    return Understood(method, work, fixed, judged)


def _size(fixed: nn.Module, declared: Declared) -> int:
    """Bytes of one record's features."""
    with torch.no_grad():
        found: Tensor = fixed(torch.zeros((1, *declared.shape), dtype=models.dtype_of(declared.tokens)))
    return found.nbytes


def accept(
    name: str, offer: Mapping[str, Any], method: Method, policy: Policy, declared: Declared, offered: Budget
) -> ClientPlan:
    """This site's plan for a run, from what the server offers; refused where its limits say so.

    ``name``: of the site's account.
    """
    terms = wire.terms_from_plain(offer["terms"])
    asks = tuple(wire.terms_from_plain(one) for one in offer["asks"])
    turns, queries = int(offer["turns"]), tuple(int(q) for q in offer["queries"])
    if len(queries) != len(asks):
        raise Refused(f"{len(asks)} questions and {len(queries)} numbers of how often they are asked do not match")
    if min((turns, *queries)) < 0:
        raise Refused(f"{turns} turns and {queries} questions make no sense: they are counted from 0")
    most = max((turns, *queries))
    check_terms(policy, method, terms, asks, most, declared, offered.is_public)
    levels = tuple(LevelPlan(one, 0.0) for one in present(declared.levels))
    adaptive = method.aggregate.sets_steps
    return ClientPlan(name, declared.records, offered, turns, terms, asks, queries, 0.0, adaptive, levels)


def safe(run: str) -> str:
    """A run's name as a file name: what a server calls it must not lead out of the folder."""
    if run.isalnum() and len(run) <= 64:
        return run
    return hashlib.sha256(run.encode()).hexdigest()
