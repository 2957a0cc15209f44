"""A site's part in one sum of a round: what it was told, as a descriptor; its message, under masks made from that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor

from sordino.client.ask import Question
from sordino.client.rows import Rows
from sordino.client.turn import share
from sordino.engine.federation.descriptor import Descriptor, hashed_tensors, participants_of
from sordino.engine.federation.job import Job
from sordino.engine.federation.masks import masked
from sordino.engine.federation.pact import Pact
from sordino.engine.federation.wire import Packet, whole
from sordino.privacy.gate import Gate, Permit, Terms
from sordino.privacy.types import Release, derive


@dataclass(frozen=True)
class TakingPart:
    """One release of a round with shared noise, at one site: which it is, its bounds, what it is masked under."""

    job: Job
    pact: Pact
    terms: Terms
    question: Question | None
    bounds: Mapping[str, float]
    descriptor: Descriptor

    @classmethod
    def of(cls, job: Job, pact: Pact, packet: Packet, place: int, public: Mapping[str, Any]) -> TakingPart:
        """What a request asks for: the turn (``place`` 0) or a question. Refused where too few others are known."""
        own = [one.question for one in job.method.ask if one.batch == "own"]
        question, terms = own[place - 1] if place else None, (job.terms, *job.asks)[place]
        limits = {} if question is not None else {"gradient": job.work.clip.bound(public)}
        asked = (question,) if question is not None else job.work.also
        bounds = {part: _single(bound) for part, bound in (limits | {q.what: q.bound(public) for q in asked}).items()}
        names = participants_of(pact.charter, packet.facts["participants"])
        pact.check_round(place, terms, names)
        descriptor = Descriptor(
            pact.charter.digest,
            whole(packet, "round"),
            whole(packet, "copy"),
            place,
            names,
            tuple(bounds.values()),
            hashed_tensors({"weights": packet.tensors["weights"]}),
            hashed_tensors({n: t for n, t in packet.tensors.items() if n != "weights"}, packet.facts["public"]),
        )
        return cls(job, pact, terms, question, bounds, descriptor)

    @property
    def digest(self) -> str:
        """What the message is masked under, once and never again."""
        return self.descriptor.digest.hex()

    def message(
        self, rows: Rows, start: Release, public: Mapping[str, Any], permit: Permit, gate: Gate, key: X25519PrivateKey
    ) -> Release:
        """The site's integers under masks with everybody else's keys; ``key`` is its own of the run."""
        own, names = self.pact.peers.name, self.descriptor.participants
        others = {name: self.pact.keys[name] for name in names if name != own}
        found = share(self.job.work, rows, start, public, permit, gate, self.question)
        return derive(
            "message under masks",
            lambda values: torch.from_numpy(masked(values.numpy(), own, key, others, self.descriptor.digest)),
            found,
        )


def _single(bound: Tensor | float) -> float:
    """A bound as the gate takes it, in single precision: masks rest on every digit of it."""
    return float(np.float32(float(bound)))
