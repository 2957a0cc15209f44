"""Methods whose clipping radius adapts: AdaptDP-FedAvg, quantile clipping, automatic clipping.

Their questions are parts too: ``ask = {name = "squared-norm", tau = 2, size = "full"}`` in a study, or
``replace(get("adaptdp"), ask=squared_norm(tau=2))`` in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sordino.client import adaptive
from sordino.errors import BadInput
from sordino.methods.asking import Ask
from sordino.methods.method import Method
from sordino.server import radius
from sordino.server.after import After
from sordino.server.facts import Rule


def squared_norm(
    share: float = 0.1,
    size: float | str | None = None,
    reach: float | None = None,
    batch: str = "own",
    **options: Any,
) -> tuple[Ask, ...]:
    """Phase 1 of AdaptDP-FedAvg: a released mean squared norm sets the radius.

    Parameters
    ----------
    share: its share of the budget.
    size: b^C, of a batch of its own (``full``: Remark 3).
    reach: κ, with which the bound Ĝ follows the radius.
    batch: ``own``: before the step, from a batch of its own, for this round's radius (the paper); ``step``: from the
        gradients' own batches, whose norms are known anyway, for the next round's (ours: no pass of its own).
    options: of ``radius.root_mean_square``: tau, floor, chance, margin, weigh, per_client.
    """
    if reach is not None:
        options = {**options, "reach": reach}
    conclude = partial(radius.root_mean_square, **_known(radius.root_mean_square, options))
    return (Ask(adaptive.squared_norms(reach), conclude, batch, share, size=size),)


def under_radius(share: float = 0.05, **options: Any) -> tuple[Ask, ...]:
    """The share of records under the radius, released beside every step's gradient, moves the next round's radius.

    Options of ``radius.quantile``: target, rate, weigh, per_client.
    """
    conclude = partial(radius.quantile, **_known(radius.quantile, options))
    return (Ask(adaptive.under_radius(), conclude, batch="step", share=share),)


def _known(function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """``options``, if the function has keywords of these names."""
    known = list(function.__kwdefaults__ or {})
    wrong = sorted(set(options) - set(known))
    if wrong:
        raise BadInput(f"ask has no option {wrong[0]!r}: use share, {', '.join(known)}")
    return options


ASKS = {"squared-norm": squared_norm, "under-radius": under_radius}
LOCALS = {"averaged": adaptive.averaged}
CLIPS = {"moving": adaptive.moving, "automatic": adaptive.automatic}
RULES: dict[str, Rule] = {"averaged": radius.averaged}
STEPS: dict[str, After] = {"ball": radius.ball}

ADAPTIVE = (
    Method(
        "adaptdp",
        ask=squared_norm(),
        clip=adaptive.moving(),
        server=radius.ball,
        summary="The clipping radius follows the released root mean square of gradient norms (AdaptDP-FedAvg).",
    ),
    Method(
        "quantile-clipping",
        ask=under_radius(),
        clip=adaptive.moving(),
        summary="The clipping radius follows a released quantile of gradient norms.",
    ),
    Method(
        "auto-clipping",
        clip=adaptive.automatic(),
        summary="Every record's gradient is normalised (AUTO-S): no radius to tune.",
    ),
)
