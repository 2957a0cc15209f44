"""A round budget from ε: how many rounds a budget pays for when the noise is given, counting every release."""

from __future__ import annotations

from sordino.errors import BadInput
from sordino.privacy.accounting import affordable
from sordino.privacy.types import Adjacency, Budget, Event, Sampling, Scheme, joined

MOST_ROUNDS = 10**9


def rounds_within(
    epsilon: float,
    delta: float,
    rate: float,
    noise: float,
    *,
    steps: int = 1,
    loss_noise: float | None = None,
    same_batch: bool = False,
    accountant: str = "pld",
    sampling: str = "poisson",
    adjacency: str = "zero-out",
) -> int:
    """The largest number of rounds T with ε(T) ≤ epsilon < ε(T+1); at most 10⁹.

    Parameters
    ----------
    noise: z of the gradients; ``steps`` K of them a round.
    loss_noise: z_l of the loss, if one is released: once a round from a batch of its own, or with ``same_batch``
        beside every gradient, when both are ONE release with z_eff = (z⁻² + z_l⁻²)^(-1/2) (R4).

    Guarantees
    ----------
    Every release of every round is counted, and the answer is on the strict side.
    """
    if steps < 1:
        raise BadInput(f"steps is {steps!r}: a round has at least one local step")
    relation = Adjacency.parse(adjacency)
    drawn = Sampling(Scheme.parse(sampling), float(rate))
    if loss_noise is None:
        turn = [Event("gradient", drawn, float(noise), steps, relation)]
    elif same_batch:
        turn = [Event("gradient+loss", drawn, joined(float(noise), float(loss_noise)), steps, relation)]
    else:
        turn = [
            Event("gradient", drawn, float(noise), steps, relation),
            Event("loss", drawn, float(loss_noise), 1, relation),
        ]
    budget = Budget(float(epsilon), float(delta), relation)
    most = 1
    while most < MOST_ROUNDS and affordable([e.times(e.count * most) for e in turn], budget, 1, accountant=accountant):
        most *= 2
    return affordable(turn, budget, min(most, MOST_ROUNDS), accountant=accountant)
