"""What the privacy levels published with AdaptDP-FedAvg amount to, by that paper's own formulas. For documentation.

The paper fixes noise sizes and calls them levels 1 to 3 without saying which ε they give. Appendix D says how to work
it out: ε is the smallest with RK·S(ε(·), γ)(α*) ≤ ε/2, α* = 1 + ⌈2 ln(1/δ)/ε⌉, Δ = 2/b; Theorem 1 has ε/4 for each of
the two phases. Nearly all of them are far too large to protect anybody.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sordino.privacy.accounting import rdp
from sordino.privacy.accounting.parts import Composition, Kind, Part
from sordino.privacy.accounting.published import wor_epsilons

DELTA = 1e-4
BATCH = 100
CLIENTS = 2


class Task(NamedTuple):
    """A task of the paper's Table 2: training records, R rounds, K steps."""

    name: str
    records: int
    rounds: int
    steps: int


TASKS = (
    Task("T1 artificial", 4000, 150, 20),
    Task("T2 Bank Marketing", 45_211, 100, 226),
    Task("T3 MNIST", 3000, 1000, 15),
    Task("T4 FashionMNIST", 3000, 1000, 15),
)

_IMAGES = ((0.003, 0.0041, 0.0011), (0.006, 0.0093, 0.0021), (0.01, 0.013, 0.0050))
NOISES = (
    ((0.003, 0.0042, 0.00097), (0.006, 0.0078, 0.0021), (0.01, 0.012, 0.0043)),
    ((0.006, 0.0077, 0.0025), (0.01, 0.0103, 0.0078), (0.03, 0.0524, 0.010)),
    _IMAGES,
    _IMAGES,
)
"""Table 1 by task and level: σ of DP-FedAvg, then σ and σ^C of AdaptDP-FedAvg. It prints 0.093 for 0.0093."""

LOSSES = (
    ((6.73e-6, 3.34e-7), (2.69e-5, 3.81e-6), (7.62e-5, 1.82e-5)),
    ((3.13e-1, 3.12e-1), (3.12e-1, 3.12e-1), (3.13e-1, 3.13e-1)),
    ((4.84e-5, 4.25e-5), (5.57e-5, 4.38e-5), (4.06e-4, 4.02e-5)),
    ((2.02e-2, 5.96e-5), (3.39e-2, 2.94e-4), (1.28e-1, 1.27e-1)),
)
"""Table 2 by task and level: the lowest training loss of DP-FedAvg and of AdaptDP-FedAvg."""


class Level(NamedTuple):
    """One published level, and its ε at δ = 1e-4."""

    task: str
    level: int
    sigma: float
    epsilon: float
    """DP-FedAvg's, by the paper's equation (3)."""
    tightened: float
    """The same noise by the tightened bound that the ledger charges with."""
    adapt_sigmas: tuple[float, float]
    adapt_epsilon: float
    """AdaptDP-FedAvg's, by the paper's equation (1)."""
    losses: tuple[float, float]


def published_levels() -> list[Level]:
    """ε of every level in Table 1, for two clients, batches of 100 without replacement, replace-one, δ = 1e-4."""
    found = []
    delta = np.array([DELTA])
    for task, noises, losses in zip(TASKS, NOISES, LOSSES):
        for number, ((sigma, *adapt), loss) in enumerate(zip(noises, losses), start=1):
            fixed = _phase(task, sigma, task.steps)
            both = _phase(task, adapt[0], task.steps) + _phase(task, adapt[1], 1)
            level = Level(
                task=task.name,
                level=number,
                sigma=sigma,
                epsilon=float(wor_epsilons([fixed], delta, share=0.5)[0]),
                tightened=float(rdp.epsilons([fixed], delta)[0]),
                adapt_sigmas=(adapt[0], adapt[1]),
                adapt_epsilon=float(wor_epsilons([both], delta)[0]),
                losses=loss,
            )
            found.append(level)
    return found


def levels_table() -> str:
    """The levels as a Markdown table, beside the published training losses."""
    lines = [
        "| task | level | σ (DP-FedAvg) | ε by (3) | ε, tightened bound | σ, σ^C (AdaptDP) | ε by (1) "
        "| published training loss: DP-FedAvg, AdaptDP |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.task} | {one.level} | {one.sigma:g} | {one.epsilon:.3g} | {one.tightened:.3g} "
        f"| {one.adapt_sigmas[0]:g}, {one.adapt_sigmas[1]:g} | {one.adapt_epsilon:.3g} "
        f"| {one.losses[0]:.3g}, {one.losses[1]:.3g} |"
        for one in published_levels()
    ]
    return "\n".join(lines)


def _phase(task: Task, sigma: float, steps: int) -> Composition:
    """R·steps releases of a mean over b records with noise σ·C: sensitivity 2C/b, so z = σ b/2."""
    records = task.records // CLIENTS
    return (Part(Kind.FIXED, BATCH / records, sigma * BATCH / 2, task.rounds * steps),)
