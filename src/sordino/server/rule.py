"""An aggregation rule as a value: how the server combines the updates of a round, and what that needs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sordino.made import Made
from sordino.server.broadcast import Check
from sordino.server.defend import Screened, screen
from sordino.server.facts import Added, Array, Facts, Memory, Outcome

PER_ROW = ("estimated_variances", "votes")
"""Diagnostics with an entry for each row that was kept; refused rows get None, so that entries match participants."""

log = logging.getLogger("sordino.server")


def weighted(updates: Tensor | Added, weights: Array) -> Tensor:
    """The weighted sum of the updates, Σ w_i Δ_i."""
    if not isinstance(updates, Tensor):
        return updates.combined(weights)
    return torch.as_tensor(weights, dtype=updates.dtype, device=updates.device) @ updates


class Call(NamedTuple):
    """What a rule is called with: the updates of a round, facts about them, and what the rule remembers."""

    updates: Any
    facts: Facts
    memory: Memory


@dataclass(frozen=True)
class AtOnce:
    """A way to combine that is quicker for the rounds of several runs at once, as a stack has them.

    ``each``: the outcomes of these calls, each what the call alone would give, up to rounding.
    """

    each: Callable[[Sequence[Call]], list[Outcome]]

    def __call__(self, updates: Any, facts: Facts, memory: Memory) -> Outcome:
        """The outcome of one round."""
        return self.each([Call(updates, facts, memory)])[0]


@dataclass(frozen=True)
class Aggregate:
    """An aggregation rule.

    Attributes
    ----------
    name: what plans and reports call it.
    combine: (updates[rows, d], facts, memory) → outcome. Pure. It sees rows that passed the screening only: finite, and
        no longer than steps and noise explain; ``memory`` is what its last outcome said to remember. An ``AtOnce`` also
        takes the rounds of several runs of a stack at once.
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
        return self.together([Call(updates, facts, memory)])[0]

    def together(self, calls: Sequence[Call]) -> list[Outcome]:
        """The same for the rounds of several runs, at once where the rule has a way to."""
        screened = [self._screened(updates, facts) for updates, facts, _ in calls]
        usable = [i for i, one in enumerate(screened) if len(one.kept)]
        given = [Call(screened[i].updates, screened[i].facts, calls[i].memory) for i in usable]
        if isinstance(self.combine, AtOnce):
            found = dict(zip(usable, self.combine.each(given)))
        else:
            found = {i: self.combine(*one) for i, one in zip(usable, given)}
        return [self._told(call, one, found.get(i)) for i, (call, one) in enumerate(zip(calls, screened))]

    def _screened(self, updates: Tensor | Added, facts: Facts) -> Screened:
        if isinstance(updates, Tensor):
            return screen(updates, facts, refuse_small=self.refuse_small)
        kept: Screened = updates.screened()
        return kept

    def _told(self, call: Call, screened: Screened, outcome: Outcome | None) -> Outcome:
        """What a round came to, by row of all that came; None: no update could be used."""
        updates, facts, memory = call
        if outcome is None:
            lines = [*screened.lines, f"round {facts.round}: no update could be used, the model stays as it is"]
            outcome = Outcome(updates.new_zeros(updates.shape[1]), np.zeros(0), memory)
        else:
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
        own = outcome.own and all(one is not outcome.delta for one in outcome.memory.values())  # of a rule around one
        return replace(outcome, weights=weights, diagnostics=diagnostics, own=own)


def combine_rounds(rules: Sequence[Aggregate], calls: Sequence[Call]) -> list[Outcome]:
    """What each rule makes of its call; those that one factory made alike, and that can, combine theirs at once."""
    groups: dict[Hashable, list[int]] = {}
    for place, rule in enumerate(rules):
        alike: Hashable = place
        if isinstance(rule.combine, AtOnce) and rule.made is not None and rule.made.still(rule):
            alike = rule.made.factory, repr(rule.made.options)
        groups.setdefault(alike, []).append(place)
    found: dict[int, Outcome] = {}
    for places in groups.values():
        found |= dict(zip(places, rules[places[0]].together([calls[i] for i in places])))
    return [found[place] for place in range(len(rules))]


def _noise_after(weights: Array, facts: Facts) -> dict[str, float]:
    """Σ w_i²σ_i²/η² and its minimum 1/Σ(η²/σ_i²) by declared variances; nothing where somebody adds no noise."""
    if len(weights) == 0 or not (facts.variances > 0).all():
        return {}
    declared = facts.variances / facts.lr**2
    least = 1.0 / float((1.0 / declared).sum())
    return {"noise_power": float((weights**2 * declared).sum()), "least_noise_power": least}
