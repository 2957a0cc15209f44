"""What the server knows about a round: public facts about those who answered, and what a rule hands back.

Everything here is public by declaration (rule R5) and listed in the run's privacy statement. Rows are participations
(a client, or a virtual copy of one), in the order of the rows of the update matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]
State = dict[str, Any]
"""What a rule carries from round to round: tensors and plain numbers only, so that a checkpoint can hold it."""


@dataclass(frozen=True)
class Facts:
    """Public metadata of one round's participations, a row each.

    Attributes
    ----------
    clients: index of the client behind each row.
    sizes: n_i, records.
    epsilons: ε_i (∞ for a public data set).
    batches: b_i = q_i n_i, expected batch size.
    noises: z_i, noise multiplier of the gradient release.
    steps: K_i, local steps of this round.
    variances: declared variance σ_i² of one coordinate of the update, K_i (η C z_i / b_i)².
    selection: importance weight of each row (1 unless the selection rule compensates).
    layout: (name, shape, offset) of every parameter tensor inside the flat update.
    round: from 1.
    """

    clients: NDArray[np.int64]
    sizes: Array
    epsilons: Array
    batches: Array
    noises: Array
    steps: Array
    variances: Array
    selection: Array
    layout: tuple[tuple[str, tuple[int, ...], int], ...] = ()
    round: int = 1
    extra: dict[str, Any] = field(default_factory=dict)
    """Releases and public values beyond these, by name: released losses, a learning rate, an oracle's variances."""


@dataclass(frozen=True)
class Outcome:
    """What an aggregation rule hands back: the step to take, who counted how much, what to remember, what to show."""

    delta: Tensor
    weights: Array | None
    state: State
    diagnostics: dict[str, Any] = field(default_factory=dict)


Rule = Callable[[Tensor, Facts, State], Outcome]
"""An aggregation rule: (updates[rows, d], facts, state) → outcome. Pure: neither input is changed."""


class Added(Protocol):
    """Updates that were added up as they came, in place of their matrix."""

    shape: tuple[int, int]

    def screened(self) -> Any:
        """The round after the defence, as ``server.defend.screen`` gives it for a matrix."""

    def combined(self, weights: Array) -> Tensor:
        """Σ w_i Δ_i over the rows that were kept."""

    def new_zeros(self, width: int) -> Tensor:
        """No step at all."""
