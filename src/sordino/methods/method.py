"""A method: a handful of parts, each a frozen value made of small pure functions.

select      who takes part in which round
ask         private questions before or beside the step
local       what a client does with its released gradients
clip        how much each record counts
aggregate   how the server combines updates of different quality
server      what the server does with the combined update
calibrate   how budgets become noise
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sordino.client.clip import Clip, flat
from sordino.client.local import Local, sgd
from sordino.errors import BadInput
from sordino.made import Factory
from sordino.methods.asking import Ask
from sordino.methods.calibrate import Calibrate
from sordino.methods.selection import Selection, everyone
from sordino.server.after import ServerStep, plain
from sordino.server.broadcast import Check
from sordino.server.broadcast import steps as step_check
from sordino.server.rule import Aggregate
from sordino.server.rules import data_weighted

KINDS: dict[str, type] = {
    "select": Selection,
    "ask": Ask,
    "local": Local,
    "clip": Clip,
    "aggregate": Aggregate,
    "server": ServerStep,
}
"""The parts of a method that are values, and of which type."""


@dataclass(frozen=True)
class Method:
    """A named composition of parts. ``private=False`` means no clipping, no noise, NOT PRIVATE in every output.

    ``ask`` is a question or a tuple of them; ``calibrate`` may be a name; ``aggregate`` may be a plain function
    (updates, facts, memory) → outcome. ``defaults`` are settings of training, used where nobody says otherwise.
    """

    name: str = "custom"
    select: Selection = field(default_factory=everyone)
    ask: tuple[Ask, ...] = ()
    local: Local = field(default_factory=sgd)
    clip: Clip = field(default_factory=flat)
    aggregate: Aggregate = field(default_factory=data_weighted)
    server: ServerStep = field(default_factory=plain)
    calibrate: Calibrate = field(default_factory=Calibrate)
    private: bool = True
    summary: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if isinstance(self.calibrate, str):  # "rdp" for Calibrate("rdp")
            object.__setattr__(self, "calibrate", Calibrate(self.calibrate))
        if isinstance(self.ask, Ask):
            object.__setattr__(self, "ask", (self.ask,))
        if isinstance(self.aggregate, types.FunctionType):
            object.__setattr__(self, "aggregate", Aggregate(self.aggregate.__name__, self.aggregate))
        for part, kind in KINDS.items():
            for value in self.ask if part == "ask" else (getattr(self, part),):
                if not isinstance(value, kind):
                    called = "call it to make one" if isinstance(value, Factory) else "see sordino.parts"
                    raise BadInput(f"method {self.name!r}: {part} is {value!r}, and not a {kind.__name__}: {called}")
        self._match_questions()
        if sum(one.share for one in self.ask) >= 1:
            raise BadInput(f"method {self.name!r}: its questions' shares leave no budget for the gradients")

    def _match_questions(self) -> None:
        """Refuse parts that miss an answer or their other half; drop spare questions that nobody needs."""
        asked = {one.question.what for one in self.ask}
        beside = {one.question.what for one in self.ask if one.batch == "step"}
        wanted = set(self.select.needs)
        for part, value, heard in (
            ("clip", self.clip, asked),
            ("local", self.local, beside),
            ("aggregate", self.aggregate, asked),
        ):
            wanted |= set(value.needs)
            for what in set(value.needs) - heard:
                raise BadInput(
                    f"method {self.name!r}: {part} {value.name!r} needs every client's released {what!r}"
                    + (", from the batch of every step" if heard is beside else "")
                    + ", and nobody is asked for it: exchange that part, or ask for it (ask = {name, batch})"
                )
        if self.local.partner != self.aggregate.partner:
            raise BadInput(
                f"method {self.name!r}: local {self.local.name!r} and aggregate {self.aggregate.name!r} do not go "
                "together: one of them is half a method; exchange both, or neither (the server's half takes 'combine', "
                "any other rule)"
            )
        object.__setattr__(self, "ask", tuple(o for o in self.ask if not o.spare or o.question.what in wanted))
        ordered = sorted(self.ask, key=lambda one: one.of != "candidates")  # candidates answer before anybody is chosen
        object.__setattr__(self, "ask", tuple(ordered))
        heard_first = {one.question.what for one in self.ask if one.batch == "own" and one.of == "candidates"}
        for what in self.select.needs:
            if what not in heard_first:
                raise BadInput(
                    f"method {self.name!r}: {self.select.name} chooses by the candidates' released {what}, and they "
                    f"are not asked first: ask = {{name = {what!r}, of = 'candidates'}}"
                )

    @property
    def broadcasts(self) -> dict[str, Check]:
        """What its parts broadcast beside the learning rate and the clipping radius, with a site's checks."""
        known = dict(self.aggregate.broadcasts)
        for one in self.ask:
            known |= one.broadcasts
        return known | ({"steps": step_check} if self.aggregate.sets_steps else {})

    def describe(self) -> dict[str, str]:
        """Its parts by name, for plans and reports."""
        how = ", strictest budget" if self.calibrate.strictest else ""
        how += "" if self.calibrate.shares == "limit" else ", shares by the accountant"
        return {
            "select": self.select.name,
            "ask": ", ".join(map(str, self.ask)) or "nothing",
            "local": self.local.name,
            "clip": self.clip.name if self.private else "none",
            "aggregate": self.aggregate.name,
            "server": self.server.name,
            "calibrate": self.calibrate.by + how if self.private else "none",
        }
