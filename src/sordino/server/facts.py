"""What the server knows about a round, and what an aggregation rule hands back.

Everything here is public by declaration (rule R5) and listed in the run's privacy statement. Rows are participations
(a client, or a virtual copy of one), in the order of the rows of the update matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]
Layout = tuple[tuple[str, tuple[int, ...], int], ...]
"""Name, shape and offset of every parameter tensor inside a flat update."""

Memory = dict[str, Any]
"""What one part of a method remembers from round to round: tensors and plain numbers, so that a checkpoint holds it."""

_PER_ROW = ("clients", "sizes", "epsilons", "batches", "noises", "steps", "variances", "selection")
_PER_ROW_IF_KNOWN = ("norms", "true_variances", "steps_left", "step_budget")


@dataclass(frozen=True)
class Facts:
    """What is public about one round's participations, an entry a row, and about the run.

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
    norms: Euclidean norm of each row's update, after screening.
    true_variances: the variances that the noise really had, which only a simulation knows; else None.
    steps_left, step_budget: local steps that each row's client has left and had, where the server sets their number.
    answers: the released answers by question, an entry a row.
    answer_noise: by question, the deviation of the noise on each row's answer in units of the question's bound.
    uploads: what the rows released beside their updates, by name, [rows, …].
    public: what was broadcast to everyone this round; ``each``: what every client was told for itself, a row a client.
    layout: name, shape and offset of every parameter tensor inside the flat update.
    round, rounds: the number of this round, from 1, and how many there are.
    population, records: how many clients the federation has, and how many records all of them have.
    lr, server_lr, clip: η, this round's η_s, and C.
    """

    clients: NDArray[np.int64]
    sizes: Array
    epsilons: Array
    batches: Array
    noises: Array
    steps: Array
    variances: Array
    selection: Array
    norms: Array | None = None
    true_variances: Array | None = None
    steps_left: NDArray[np.int64] | None = None
    step_budget: NDArray[np.int64] | None = None
    answers: Mapping[str, Array] = field(default_factory=dict)
    answer_noise: Mapping[str, Array] = field(default_factory=dict)
    uploads: Mapping[str, Tensor] = field(default_factory=dict)
    public: Mapping[str, Any] = field(default_factory=dict)
    each: Mapping[str, Tensor] = field(default_factory=dict)
    layout: Layout = ()
    round: int = 1
    rounds: int = 1
    population: int = 0
    records: int = 0
    lr: float = 1.0
    server_lr: float = 1.0
    clip: float = math.inf

    def only(self, rows: NDArray[np.int64]) -> Facts:
        """The facts of these rows."""
        known = [*_PER_ROW, *(name for name in _PER_ROW_IF_KNOWN if getattr(self, name) is not None)]
        return replace(
            self,
            answers={name: values[rows] for name, values in self.answers.items()},
            answer_noise={name: values[rows] for name, values in self.answer_noise.items()},
            uploads={name: values[torch.from_numpy(rows).to(values.device)] for name, values in self.uploads.items()},
            **{name: getattr(self, name)[rows] for name in known},
        )

    @property
    def data_shares(self) -> Array:
        """n_i/Σn over the rows."""
        return np.asarray(self.sizes / self.sizes.sum())


@dataclass(frozen=True)
class Told:
    """What the server broadcasts with the next request: to everyone, and a row each to every client."""

    public: Mapping[str, Any] = field(default_factory=dict)
    each: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What an aggregation rule hands back.

    Attributes
    ----------
    delta: the step to take.
    weights: how much each row counted; None where that is no number.
    memory: what the rule remembers; it gets this back in the next round.
    diagnostics: what to show of the round; ``log`` holds lines to be logged.
    told: what to broadcast with the next request.
    next_steps: how many local steps the next round's turns have, for a rule that sets their number.
    shown: the model to show, for a rule that makes it itself; the server's step then shows nothing.
    iterate: the combined mean iterate minus the weights, for a server step that shows averaged iterates.
    own: whether ``delta`` is nobody else's, so that the server's step may write over it.
    """

    delta: Tensor
    weights: Array | None
    memory: Memory = field(default_factory=dict)
    diagnostics: dict[str, Any] = field(default_factory=dict)
    told: Told = Told()
    next_steps: int | None = None
    iterate: Tensor | None = None
    shown: Tensor | None = None
    own: bool = False


@dataclass(frozen=True)
class ServerState:
    """What the server carries from round to round, each thing in its place.

    Attributes
    ----------
    rule, step: what the aggregation rule and the server's step remember.
    public, each: what is broadcast with the next request (``Told``).
    next_steps: the number of local steps of the next turns, where an aggregation rule sets it.
    start: the first weights, where training is pulled back to them.
    steps_used: local steps that each client has taken, where their number varies.
    """

    rule: Memory = field(default_factory=dict)
    step: Memory = field(default_factory=dict)
    public: Mapping[str, Any] = field(default_factory=dict)
    each: Mapping[str, Tensor] = field(default_factory=dict)
    next_steps: int | None = None
    start: Tensor | None = None
    steps_used: Tensor | None = None

    def told(self, news: Told) -> ServerState:
        """The state with these broadcasts put over earlier ones of the same names."""
        return replace(self, public={**self.public, **news.public}, each={**self.each, **news.each})


class Added(Protocol):
    """Updates that were added up as they came, in place of their matrix (``server.running``)."""

    shape: tuple[int, int]

    def screened(self) -> Any:
        """The round after the defence, as ``server.defend.screen`` gives it for a matrix."""

    def combined(self, weights: Array) -> Tensor:
        """Σ w_i Δ_i over the rows that were kept."""

    def new_zeros(self, width: int) -> Tensor:
        """A step of length zero."""
