"""Messages under masks become a sum. The server's half of shared noise: all messages of an attempt, or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sordino.engine import rounds
from sordino.engine.federation import wire
from sordino.engine.federation.wire import Packet
from sordino.errors import BadInput
from sordino.methods import Ask, Plan
from sordino.methods.sharing import SharedRelease
from sordino.privacy.common import ceiling
from sordino.server.facts import Facts
from sordino.server.select import Round
from sordino.server.summed import Summed

FARTHEST = 40.0  # deviations of noise that are never seen


@dataclass(frozen=True)
class Sum:
    """What the sites of one attempt said together: by part Σ w_i x_i over them, [width], in float64; and Σ w_i."""

    parts: Mapping[str, Tensor]
    weight: float

    def mean(self, part: str) -> Tensor:
        """The weighted mean of one part."""
        return self.parts[part] / self.weight


def message_of(packet: Packet, width: int) -> tuple[Tensor, str]:
    """One site's message and the digest it says it is masked under; refused unless it is a row of so many integers."""
    value, digest = packet.tensors.get(wire.MASKED), packet.facts.get("descriptor")
    if set(packet.tensors) != {wire.MASKED} or value is None or not isinstance(digest, str):
        raise BadInput("it holds something else than a message under masks")
    if value.shape != (1, width) or value.dtype is not torch.int64:
        raise BadInput(f"its message is not a row of {width} integers")
    return value[0], digest


def add_up(
    plan: Plan, place: int, called: Round, messages: Sequence[tuple[Tensor, str]], bounds: Mapping[str, float]
) -> Sum:
    """The sum of everybody's message mod 2⁶⁴, read as signed integers in steps γ = C·grain of every part.

    Refused where sites were masked under different descriptors, or where the sum is larger than what they could have
    said: masks that did not cancel. Nothing of it is to be used then.
    """
    sharing = plan.sharing
    if sharing is None or len(messages) != len(called.clients):
        raise BadInput("a sum is opened with everybody's message, or not at all")
    if len({digest for _, digest in messages}) != 1:
        raise BadInput("the sites of this round were not told the same: their masks do not cancel")
    release = sharing.releases[place]
    total = torch.zeros_like(messages[0][0])
    for message, _ in messages:
        total += message  # wraps, as the masks do
    found, start = {}, 0
    for part in release.parts:
        whole = total[start : start + part.width].double()
        start += part.width
        if float(whole.abs().max()) > _most(plan, place, called, part.name):
            raise BadInput("the sum makes no sense: a site masked, or was masked, by something else than the others")
        found[part.name] = whole * (bounds[part.name] * part.grain)
    return Sum(found, float(_weights(release, called).sum()))


def _weights(release: SharedRelease, called: Round) -> np.ndarray:
    return np.array(release.weights)[called.clients]


def _most(plan: Plan, place: int, called: Round, part: str) -> float:
    """The largest number that these sites can have said together, in steps: ceilings of all, and noise."""
    found = 0.0
    for i in called.clients:
        client = plan.clients[i]
        terms = (client.terms, *client.asks)[place]
        common = terms.common_of(part)
        if common is not None:
            found += ceiling(common.lattice(1.0, 1), terms.divisor) + FARTHEST * common.deviation
    return found


def bounds_of(plan: Plan, place: int, called: Round, sent: rounds.Broadcast) -> dict[str, float]:
    """C of every part of a release, the same for all who take part, in single precision as the gate takes it."""
    if sent.each:
        raise BadInput(
            f"method {plan.method.name!r} tells every site something else, and who shares noise must be told the same"
        )
    own = rounds.own_questions(plan)
    asked: list[Ask] = [own[place - 1]] if place else [one for one in plan.method.ask if one.batch == "step"]
    limits = {} if place else {"gradient": plan.method.clip.bound(sent.public)}
    limits |= {one.question.what: one.question.bound(sent.public) for one in asked}
    return {part: float(np.float32(float(bound))) for part, bound in limits.items()}


def uploads_of(course: rounds.Course, about: Facts, total: Sum, lr: float) -> dict[str, object]:
    """A turn's sum as a round is closed with it: the step −η Σ w_i ḡ_i, and everybody the mean of every answer."""
    sharing, rows = course.plan.sharing, len(about.clients)
    if sharing is None:
        raise BadInput("noise is not shared in this run")
    weights = np.array(sharing.releases[0].weights)[about.clients]
    gradient = total.parts["gradient"]
    step = Summed(about, weights, len(gradient), (gradient * -lr).float())
    answers = {what: total.mean(what).float().expand(rows, 1) for what in total.parts if what != "gradient"}
    return {"update": step, **answers}
