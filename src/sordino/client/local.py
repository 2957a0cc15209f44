"""What a client does with its released gradients: local objectives and corrections, over rows.

A rule sees the rows' weights, the client's own state, released gradients and public facts, and nothing else, so
whatever it computes is post-processing. ``update`` may write into ``params``: the turn owns that matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from sordino.client.clip import Public

State = dict[str, Tensor]
"""A client's own state between rounds, a row each: control variates, duals."""


@dataclass(frozen=True)
class Local:
    """A local rule by name.

    Attributes
    ----------
    update: (params[rows, d], state, gradient[rows, d], public) → (params, state), once a step. What was released
        from the step's batch beside the gradient is in ``public`` under its name, [rows, 1].
    finish: (params, start, state, public) → (upload, state), once a turn; ``upload`` maps names to [rows, …].
    state: the names of the per-client vectors of length d that survive between rounds; they start at zero.
    needs: the questions whose answers it uses; they must be asked of the step's own batch.
    partner: what it shares with the aggregation rule that is its other half at the server, if there is one.
    """

    name: str
    update: Callable[[Tensor, State, Tensor, Public], tuple[Tensor, State]]
    finish: Callable[[Tensor, Tensor, State, Public], tuple[dict[str, Tensor], State]]
    state: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    partner: str = ""


def _descend(params: Tensor, state: State, gradient: Tensor, public: Public) -> tuple[Tensor, State]:
    return params.sub_(gradient.mul_(public["lr"])), state


def _difference(params: Tensor, start: Tensor, state: State, public: Public) -> tuple[dict[str, Tensor], State]:
    return {"update": params.sub_(start)}, state


def sgd() -> Local:
    """Plain descent: w ← w − η g; upload w − w_start."""
    return Local("sgd", _descend, _difference)
