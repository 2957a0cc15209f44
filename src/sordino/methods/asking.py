"""Questions as a part of a method: what is asked, from which batch, at which share of the budget, and what for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from sordino.client import ask
from sordino.client.ask import Question
from sordino.errors import BadInput
from sordino.made import Made, part
from sordino.server import broadcast
from sordino.server.broadcast import Check
from sordino.server.facts import Facts, Told
from sordino.server.fair import LOSS_BROADCASTS, hear_loss
from sordino.server.radius import Quantile, RootMeanSquare

LOSS_SHARE = 4 / 29
"""The loss's share of the budget that makes z_l = 2.5 z with one step a round, as in the paper's z = 2, z_l = 5."""


def _nothing(answers: Tensor, facts: Facts) -> Told:
    return Told()


@dataclass(frozen=True)
class Ask:
    """A private question.

    Attributes
    ----------
    question: what every record answers, and the bound on it.
    conclude: (answers[rows], facts) → what the server broadcasts because of them.
    batch: ``own``: before the step, from a batch of its own; ``step``: from every step's batch, beside the gradient.
    share: the share of the budget (of Σ count·q²/z²) that goes to it; the gradients get what is left.
    of: ``participants``, or ``candidates`` for a selection rule that chooses participants by the answers.
    spare: True: asked only where a part of the method needs the answer, so that what is not used costs nothing.
    size: for a batch of its own, how large: an expected number of records (never more than a client has), ``full``
        for all of them, or None for the size of a training batch.
    broadcasts: what ``conclude`` broadcasts by name, and the check that a site makes of each value.
    used: what is made of the answers, in words, for plans and reports.
    made: the factory and options that made it, set by ``sordino.made.Factory``.
    """

    question: Question
    conclude: Callable[[Tensor, Facts], Told] = _nothing
    batch: str = "own"
    share: float = 0.1
    of: str = "participants"
    spare: bool = False
    size: float | str | None = None
    broadcasts: Mapping[str, Check] = field(default_factory=dict, hash=False)
    used: str = ""
    made: Made | None = None

    def __post_init__(self) -> None:
        if self.batch not in ("own", "step"):
            raise BadInput(f"ask.batch = {self.batch!r} is unknown: use 'own' or 'step'")
        if not 0 < self.share < 1:
            raise BadInput(f"ask.share = {self.share!r}: a share of the budget lies strictly between 0 and 1")
        if self.size is not None and self.batch == "step":
            raise BadInput("ask.size goes with ask.batch = 'own': a question beside the gradient uses the step's batch")
        if not (self.size in (None, "full") or (isinstance(self.size, (int, float)) and self.size > 0)):
            raise BadInput(f"ask.size = {self.size!r}: use 'full', or a positive number of records")

    def __str__(self) -> str:
        size = "" if self.size is None else f" of {self.size}" if self.size == "full" else f" of {self.size:g}"
        used = f" → {self.used}" if self.used else ""
        return f"{self.question.what} ({self.batch} batch{size}, share {self.share:g}){used}"


@part
def loss(
    batch: str = "own",
    share: float = LOSS_SHARE,
    start: float = 2.5,
    kappa: float = 2.5,
    floor: float = 0.1,
    ceiling: float = 10.0,
    of: str = "participants",
    size: float | str | None = None,
) -> Ask:
    """Every client's loss, released every round: Σ min(max(0, F_j), C_l) + z_l C_l N(0, 1), over q·n.

    Parameters
    ----------
    batch: ``own``: at the weights of the round, from a batch of its own; ``step``: from the gradients' batches (R4).
    share: the share of the budget.
    start: the first C_l; from then on it is κ times the released mean, between ``floor`` and ``ceiling``.
    of: ``candidates`` where the same answers choose participants (power-of-choice).
    size: of a batch of its own, if not a training batch's.
    """
    heard = hear_loss(kappa, floor, ceiling)
    return Ask(ask.bounded_loss(start), heard, batch, share, of, True, size, LOSS_BROADCASTS)


@part
def exact_loss(batch: str = "own") -> Ask:
    """The loss as it is, without bound: for methods that are NOT PRIVATE."""
    heard = hear_loss(adapt=False)
    return Ask(ask.exact_loss(), heard, batch, spare=True, broadcasts=LOSS_BROADCASTS)


@part
def candidate_loss(bound: float = 4.0, share: float = 0.1) -> Ask:
    """The candidates' loss, by which power-of-choice chooses who trains."""
    return Ask(ask.bounded_loss(bound), share=share, of="candidates")


@partial(part, more=RootMeanSquare)
def squared_norm(
    share: float = 0.1,
    size: float | str | None = None,
    reach: float | None = None,
    batch: str = "own",
    **options: Any,
) -> Ask:
    """Phase 1 of AdaptDP-FedAvg: a released mean squared norm sets the radius.

    Parameters
    ----------
    share: its share of the budget.
    size: b^C, of a batch of its own (``full``: Remark 3).
    reach: κ, with which the bound Ĝ follows the radius.
    batch: ``own``: before the step, from a batch of its own, for this round's radius (the paper); ``step``: from the
        gradients' own batches, whose norms are known anyway, for the next round's (ours: no pass of its own).
    options: of ``radius.RootMeanSquare``: tau, floor, chance, margin, weigh, per_client.
    """
    given = options if reach is None else {**options, "reach": reach}
    told, used = {"radius": broadcast.radius}, _called("root-mean-square", given)
    question = ask.squared_norms(reach)
    return Ask(question, RootMeanSquare(**given), batch, share, size=size, broadcasts=told, used=used)


@partial(part, more=Quantile)
def under_radius(share: float = 0.05, **options: Any) -> Ask:
    """The share of records under the radius, released beside every step's gradient, moves the next round's radius.

    Options of ``radius.Quantile``: target, rate, weigh, per_client.
    """
    told, used = {"radius": broadcast.radius}, _called("quantile", options)
    return Ask(ask.under_radius(), Quantile(**options), "step", share, broadcasts=told, used=used)


def _called(name: str, options: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value}' for key, value in options.items())})" if options else name
