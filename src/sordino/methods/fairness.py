"""Fairness methods and the baselines they are compared with, each with and without privacy.

λ, μ, α and q are options of the parts: ``clip = {name = "fair", weight = 0.1}``, ``local = {name = "fedprox", mu =
0.01}``, ``aggregate = {name = "q-ffl", q = 0.5}``, ``ask = {name = "loss", batch = "step"}`` in a study.
"""

from __future__ import annotations

from sordino.client import corrections, fair
from sordino.methods.asking import Ask
from sordino.methods.method import Method
from sordino.server.facts import Rule
from sordino.server.fair import FAIR_RULES, ali_dpfl, feddyn, hear_loss, q_ffl, scaffold

LOSS_SHARE = 4 / 29
"""The loss's share of the budget that makes z_l = 2.5 z with one step a round, as in the paper's z = 2, z_l = 5."""


def loss(
    batch: str = "own",
    share: float = LOSS_SHARE,
    start: float = 2.5,
    kappa: float = 2.5,
    floor: float = 0.1,
    ceiling: float = 10.0,
    of: str = "participants",
    size: float | str | None = None,
) -> tuple[Ask, ...]:
    """Every client's loss, released every round: Σ min(max(0, F_j), C_l) + z_l C_l N(0, 1), over q·n.

    Parameters
    ----------
    batch: ``own``: at the weights of the round, from a batch of its own; ``step``: from the gradients' batches (R4).
    share: the share of the budget.
    start: the first C_l; from then on it is κ times the released mean, between ``floor`` and ``ceiling``.
    of: ``candidates`` where the same answers choose participants (power-of-choice).
    size: of a batch of its own, if not a training batch's.
    """
    return (Ask(fair.bounded_loss(start), hear_loss(kappa, floor, ceiling), batch, share, of, True, size),)


def _exact(batch: str) -> tuple[Ask, ...]:
    """The loss as it is, without bound: for methods that are NOT PRIVATE."""
    return (Ask(fair.exact_loss(), hear_loss(adapt=False), batch, spare=True),)


ASKS = {"loss": loss, "nothing": lambda: ()}
LOCALS = {
    "fair": fair.fair_step,
    "scaffold": corrections.scaffold,
    "fedprox": corrections.fedprox,
    "feddyn": corrections.feddyn,
}
CLIPS = {"fair": fair.fair}
RULES: dict[str, Rule] = FAIR_RULES

FAIR = (
    Method(
        "fedfair",
        ask=_exact("step"),
        local=fair.fair_step(),
        private=False,
        summary="Clients whose loss is above the mean take longer steps. NOT PRIVATE.",
    ),
    Method(
        "fedfdp",
        ask=loss(),
        clip=fair.fair(),
        summary="Records whose loss is above the released mean count more, within the clip (fair clipping).",
    ),
    Method(
        "scaffold",
        local=corrections.scaffold(),
        aggregate=scaffold,
        private=False,
        summary="Control variates against client drift. NOT PRIVATE.",
    ),
    Method(
        "dp-scaffold",
        local=corrections.scaffold(),
        aggregate=scaffold,
        summary="Control variates against client drift, made of released gradients.",
    ),
    Method(
        "fedprox",
        local=corrections.fedprox(),
        private=False,
        summary="Local steps are pulled back to the server's weights. NOT PRIVATE.",
    ),
    Method(
        "dp-fedprox",
        local=corrections.fedprox(),
        summary="Private local steps are pulled back to the server's weights.",
    ),
    Method(
        "feddyn",
        local=corrections.feddyn(),
        aggregate=feddyn,
        private=False,
        summary="Local objectives are tilted until clients agree with the server. NOT PRIVATE.",
    ),
    Method(
        "dp-feddyn",
        local=corrections.feddyn(),
        aggregate=feddyn,
        summary="Local objectives are tilted by released gradients until clients agree with the server.",
    ),
    Method(
        "q-ffl",
        ask=_exact("own"),
        aggregate=q_ffl,
        private=False,
        summary="Clients with a larger loss count more, by its q-th power. NOT PRIVATE.",
    ),
    Method(
        "dp-q-ffl",
        ask=loss(),
        aggregate=q_ffl,
        summary="Clients with a larger released loss count more, by its q-th power.",
    ),
    Method(
        "ali-dpfl",
        aggregate=ali_dpfl,
        summary="The number of local steps follows a convergence bound, under the budget's total.",
    ),
)
