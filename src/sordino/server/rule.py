"""An aggregation rule as a value: how the server combines the updates of a round, and what that needs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sordino.made import Made
from sordino.server.broadcast import Check
from sordino.server.defend import screen
from sordino.server.facts import Added, Array, Facts, Memory, Outcome

PER_ROW = ("estimated_variances", "votes")
"""Diagnostics with an entry for each row that was kept; refused rows get None, so that entries match participants."""

log = logging.getLogger("sordino.server")


def weighted(updates: Tensor | Added, weights: Array) -> Tensor:
    """The weighted sum of the updates, Σ w_i Δ_i."""
    if not isinstance(updates, Tensor):
        return updates.combined(weights)
    return torch.as_tensor(weights, dtype=updates.dtype, device=updates.device) @ updates


@dataclass(frozen=True)
class Aggregate:
    """An aggregation rule.

    Attributes
    ----------
    name: what plans and reports call it.
    combine: (updates[rows, d], facts, memory) → outcome. Pure. It sees rows that passed the screening only: finite, and
        no longer than steps and noise explain; ``memory`` is what its last outcome said to remember.
    needs: the questions whose released answers it uses (``facts.answers``).
    broadcasts: what it tells clients by name (``Outcome.told``), and the check that a site makes of each value.
    partner: what it shares with the local rule that is its other half at the client, if there is one.
    weights: for a rule that is Σ w_i Δ_i with weights from facts alone, those of some rows in proportion to those of
        all: these weights. Its uploads may then be added up as they come (``server.running``).
    receive: (uploads by name, facts) → updates[rows, d], for a rule whose clients may upload something else.
    refuse_small: whether updates smaller than their own noise are refused: for rules that reward small ones.
    sets_steps: whether it sets the number of local steps of the next round (``Outcome.next_steps``).
    goes_on: whether a run whose steps it sets goes on beyond ``training.rounds`` until all planned steps are taken.
    simulation_only: why it cannot run deployed; empty where it can.
    aims: the weights it aims at: by ``size`` or ``budget``, ``equal``, of ``least`` noise, a ``balance``, or unknown.
    foreseen: whether what it aims at can be settled from public facts before the run, so that the server need not see
        single updates and noise can be shared (``methods.sharing``).
    made: the factory and options that made it, set by ``sordino.made.Factory``.
    """

    shows_options: ClassVar[bool] = True

    name: str
    combine: Callable[[Any, Facts, Memory], Outcome]
    needs: tuple[str, ...] = ()
    broadcasts: Mapping[str, Check] = field(default_factory=dict, hash=False)
    partner: str = ""
    weights: Callable[[Facts], Array] | None = None
    receive: Callable[[Mapping[str, Tensor], Facts], Tensor] | None = None
    refuse_small: bool = False
    sets_steps: bool = False
    goes_on: bool = False
    simulation_only: str = ""
    aims: str = ""
    foreseen: bool = False
    made: Made | None = None

    def __call__(self, updates: Tensor | Added, facts: Facts, memory: Memory) -> Outcome:
        """Screen the updates, combine what may count, and say what was done, by row of all that came.

        Refused clients have weight 0 and are named in the log. Diagnostics also get the noise power of the combined
        update, Σ w_i²σ_i²/η² by declared variances (Table 10 of Robust-HDP), and the least possible.
        """
        if isinstance(updates, Tensor):
            screened = screen(updates, facts, refuse_small=self.refuse_small)
        else:
            screened = updates.screened()
        if len(screened.kept) == 0:
            lines = [*screened.lines, f"round {facts.round}: no update could be used, the model stays as it is"]
            outcome = Outcome(updates.new_zeros(updates.shape[1]), np.zeros(0), memory)
        else:
            outcome = self.combine(screened.updates, screened.facts, memory)
            lines = [*screened.lines, *outcome.diagnostics.get("log", ())]
        for line in lines:
            log.warning(line)
        weights = None
        diagnostics = {name: value for name, value in outcome.diagnostics.items() if name != "log"}
        for name in PER_ROW:
            if name in diagnostics:
                found = dict(zip(screened.kept.tolist(), diagnostics[name]))
                diagnostics[name] = [found.get(row) for row in range(len(facts.clients))]
        if outcome.weights is not None:
            weights = np.zeros(len(facts.clients))
            weights[screened.kept] = outcome.weights
            diagnostics |= _noise_after(outcome.weights, screened.facts)
        if lines:
            diagnostics["log"] = lines
        return replace(outcome, weights=weights, diagnostics=diagnostics)


def _noise_after(weights: Array, facts: Facts) -> dict[str, float]:
    """Σ w_i²σ_i²/η² and its minimum 1/Σ(η²/σ_i²) by declared variances; nothing where somebody adds no noise."""
    if len(weights) == 0 or not (facts.variances > 0).all():
        return {}
    declared = facts.variances / facts.lr**2
    least = 1.0 / float((1.0 / declared).sum())
    return {"noise_power": float((weights**2 * declared).sum()), "least_noise_power": least}
