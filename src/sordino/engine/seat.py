"""A row of a stack of runs: whose round it belongs to, and what it was told."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from sordino.engine.checkpoint import Checkpoint
from sordino.engine.simulate import (
    Opened,
    Setup,
)
from sordino.privacy.gate import Terms
from sordino.privacy.generators import Batches, Turn


@dataclass(frozen=True)
class Seat:
    """A row of the stack: whose round it belongs to, and which of that round's rows it is.

    ``first``: where the run's records begin among those of all runs. ``rules``: what the run's clients do, see
    ``_rules``.
    """

    run: int
    place: int
    setup: Setup
    state: Checkpoint
    opened: Opened
    first: int
    rules: Hashable

    @property
    def released(self) -> Hashable:
        """What is released from a batch: rows of one pass through the gate have it in common."""
        return self.setup.plan.method.private, *(one.what for one in self.setup.work.also)

    @property
    def doing(self) -> Hashable:
        """What the client does, and which names the broadcast has: rows of one part have it in common."""
        return self.rules, frozenset({*self.opened.sent.public, *self.opened.sent.each})

    @property
    def public(self) -> dict[str, Any]:
        """What was broadcast to this row: its own row of what differs between clients, without the axis of rows."""
        sent, client = self.opened.sent, self.opened.called.clients[self.place]
        return {**sent.public, **{name: value[client] for name, value in sent.each.items()}}

    @property
    def turn(self) -> Turn:
        """Whose turn it is."""
        return self.opened.permit.turns[self.place]

    @property
    def terms(self) -> Terms:
        """What the turn releases."""
        return self.opened.permit.terms[self.place]

    def batches(self) -> Batches:
        """The row's batches, as positions among the records of all runs."""
        drawn = self.setup.batches(int(self.opened.called.clients[self.place]), self.turn, self.terms)
        return Batches(drawn.positions + self.first, drawn.ends)
