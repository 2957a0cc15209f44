"""The server's half of personal models: when clients go on alone from the model they made together."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile

from torch import Tensor

from sordino.errors import BadInput
from sordino.made import part
from sordino.server import broadcast
from sordino.server.facts import Facts, Layout, Memory, Outcome, Told
from sordino.server.rule import Aggregate
from sordino.server.rules import inner_rule


@part
def fine_tuned(*, alone: float = 0.2, head: bool = False, combine: str | Aggregate = "data-weighted") -> Aggregate:
    """Combine, and in the last share ``alone`` of the rounds leave the model as it is and let every client go on alone.

    With ``head`` only the model's last layer moves then. What clients are told, under ``alone``, is how many of the
    last parameters move; the noise was calibrated for all rounds, so rounds alone are paid for like the others.
    """
    if isinstance(alone, bool) or not (isinstance(alone, (int, float)) and 0.0 < alone < 1.0):
        raise BadInput(f"aggregate.alone is {alone!r}: it is the share of the rounds alone, between 0 and 1")
    inner = inner_rule(combine)

    def both(updates: Tensor, facts: Facts, memory: Memory) -> Outcome:
        together = facts.rounds - max(1, round(alone * facts.rounds))
        if facts.round > together:
            return Outcome(updates.new_zeros(updates.shape[1]), None, memory)
        outcome = inner.combine(updates, facts, memory)
        if facts.round < together:
            return outcome
        moving = last_layer(facts.layout) if head else updates.shape[1]
        return replace(outcome, told=Told({**outcome.told.public, "alone": moving}, outcome.told.each))

    known = {**inner.broadcasts, "alone": broadcast.number(1, 1e12)}
    return Aggregate("fine-tuned", both, partner="fine-tuned", refuse_small=inner.refuse_small, broadcasts=known)


def last_layer(layout: Layout) -> int:
    """How many parameters the last layer has: of the tensors at the end whose names differ in their last word only."""
    layers = [name.rpartition(".")[0] for name, _, _ in layout]
    own = list(takewhile(lambda place: layers[place] == layers[-1], reversed(range(len(layout)))))
    return sum(math.prod(layout[place][1]) for place in own)


PERSONAL_RULES: dict[str, Callable[..., Aggregate]] = {"fine-tuned": fine_tuned}
