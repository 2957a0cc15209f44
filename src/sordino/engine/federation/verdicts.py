"""The server asks sites to judge a model on their held-out records, and reads what they say. It opens no records.

Who does not answer, refuses or sends something else is missing from that estimate; the others' answers stand.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sordino.engine.federation import wire
from sordino.engine.federation.exchange import Heard, Transport, exchange
from sordino.engine.federation.inbox import Inbox
from sordino.engine.federation.wire import Packet, pack
from sordino.engine.scored import edge, told
from sordino.errors import BadInput
from sordino.methods import Plan
from sordino.methods.evaluation import Judging

log = logging.getLogger("sordino.coordinator")

FARTHEST = 40.0  # deviations of noise that are never seen


@dataclass(frozen=True)
class Verdicts:
    """What came of one evaluation: rows of estimates with intervals, who was counted, and why others were not."""

    rows: list[dict[str, Any]]
    judged: list[str]
    missing: Heard
    edge: dict[str, Any] | None = None
    """For two classes: from which P(class 1) on to answer class 1."""

    def record(self) -> dict[str, Any]:
        """What the record of a round says of it."""
        missing = self.missing.missing()
        found: dict[str, Any] = {"evaluation": self.rows, "judged": self.judged}
        found |= {} if self.edge is None else {"threshold": self.edge}
        return found | ({"not_judged": missing} if missing else {})


@dataclass(frozen=True)
class Question:
    """One evaluation: the model's weights after round ``number``; ``times``: the how many-th it is, from 1.

    ``since``: by site, the last round in which its answer counted, from which a model of its own is made.
    """

    weights: Tensor
    number: int
    times: int
    since: Mapping[str, int]


def ask_scores(
    plan: Plan,
    brief: dict[str, Any],
    who: Sequence[int],
    question: Question,
    transport: Transport,
    seconds: float,
    inbox: Inbox,
) -> Verdicts:
    """Ask these sites, by their places in the plan, how good a model is, and estimate it from what they release."""
    judging = plan.judging
    if judging is None:
        raise BadInput("this run is not evaluated: the study needs [evaluation]")
    number = question.number
    requests = []
    for i in who:
        name = plan.clients[i].name
        facts: dict[str, Any] = {"brief": brief, "terms": wire.terms_to_plain(judging.terms[i])}
        facts |= {"round": number, "since": question.since.get(name, 0)}
        requests.append((name, pack(Packet(wire.SCORES, facts, {"weights": question.weights}))))
    heard = exchange(transport, requests, seconds, inbox, f"{number:06d}-evaluation") if requests else Heard()
    values: dict[int, dict[str, Tensor]] = {}
    for row, packet in sorted(heard.replies.items()):
        try:
            values[who[row]] = counts_of(packet, judging, who[row])
        except BadInput as error:
            heard.refused[plan.clients[who[row]].name] = f"its scores were refused here: {error}"
    for name, why in heard.refused.items():
        log.warning("round %d, evaluation: %s is not counted: %s", number, name, why)
    if heard.absent:
        log.warning("round %d, evaluation: no answer from %s", number, ", ".join(heard.absent))
    rows = told(plan, judging, values, number, question.times)
    chosen = edge(plan, judging, values, number)
    return Verdicts(rows, [plan.clients[i].name for i in values], heard, chosen)


def counts_of(packet: Packet, judging: Judging, client: int) -> dict[str, Tensor]:
    """What one site counted; refused unless it is the parts that were asked for, as counts that can be meant."""
    terms = judging.terms[client]
    widths = {"scores": judging.cells.count, "correct": 1}
    wanted = {name: widths[name] for name, _ in terms.parts}
    if set(packet.tensors) != set(wanted):
        raise BadInput(f"{' and '.join(wanted)} were asked for, and nothing else")
    for name, width in wanted.items():
        value = packet.tensors[name]
        if value.shape != (width,) or value.dtype is not torch.float64 or not torch.isfinite(value).all():
            raise BadInput(f"{name!r} is not {width} finite counts")
        most = judging.held[client] + FARTHEST * terms.noise(name) * terms.adjacency.sensitivity + 1.0
        if float(value.abs().max()) > most:
            raise BadInput(f"{name!r} holds a count that {judging.held[client]} records cannot give")
    return dict(packet.tensors)
