"""Questions as a part of a method: what is asked, from which batch, at which share of the budget, and what for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from sordino.client.ask import Question
from sordino.errors import BadInput
from sordino.server.facts import Facts, State

Conclude = Callable[[Tensor, Facts, State], State]
"""(answers[rows], facts, state) → state. Entries named ``public/…`` are broadcast with the next request."""


@dataclass(frozen=True)
class Ask:
    """A private question.

    Attributes
    ----------
    batch: ``own``: before the step, from a batch of its own; ``step``: from every step's batch, beside the gradient.
    share: the share of the budget (of Σ count·q²/z²) that goes to it; the gradients get what is left.
    size: for a batch of its own, how large: an expected number of records (never more than a client has), ``full``
        for all of them, or None for the size of a training batch.
    of: ``participants``, or ``candidates`` for a rule that chooses participants by the answers.
    spare: True: asked only where a part of the method needs the answer, so that what is not used costs nothing.
    conclude: what the server makes of the answers.
    """

    question: Question
    conclude: Conclude
    batch: str = "own"
    share: float = 0.1
    of: str = "participants"
    spare: bool = False
    size: float | str | None = None

    def __post_init__(self) -> None:
        if self.batch not in ("own", "step"):
            raise BadInput(f"ask.batch = {self.batch!r} is unknown: use 'own' or 'step'")
        if not 0 < self.share < 1:
            raise BadInput(f"ask.share = {self.share!r}: a share of the budget lies strictly between 0 and 1")
        if self.size is not None and self.batch == "step":
            raise BadInput("ask.size goes with ask.batch = 'own': a question beside the gradient uses the step's batch")
        if not (self.size in (None, "full") or (isinstance(self.size, (int, float)) and self.size > 0)):
            raise BadInput(f"ask.size = {self.size!r}: use 'full', or a positive number of records")
