"""A method: a handful of parts, each a small pure function, composed by name.

select      who takes part in which round
local       what a client does with its released gradients
clip        how much each record counts
aggregate   how the server combines updates of different quality
server      what the server does with the combined update
calibrate   how budgets become noise
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sordino.client.clip import Clip, flat
from sordino.client.local import Local, sgd
from sordino.errors import BadInput
from sordino.methods.asking import Ask
from sordino.methods.selection import Selection, everyone
from sordino.server import after, rules
from sordino.server.facts import Rule

ACCOUNTANTS = {
    "tight": "pld",
    "rdp": "rdp",
    "rdp-robust-hdp": "rdp-robust-hdp",
    "closed-form-selection": "closed-form-selection",
    "wor-paper": "wor-paper",
}


@dataclass(frozen=True)
class Calibrate:
    """How budgets become noise.

    ``by`` picks the noise: ``tight`` (PLD), ``rdp``, or a published rule. Whatever picked it, the ledger charges that
    noise with the real accountant. ``strictest``: everyone uses the noise of the strictest client's budget.
    """

    by: str = "tight"
    strictest: bool = False

    def __post_init__(self) -> None:
        if self.by not in ACCOUNTANTS:
            raise BadInput(f"calibrate {self.by!r} is unknown: use one of {', '.join(ACCOUNTANTS)}")

    @property
    def accountant(self) -> str:
        """The accountant that picks the noise."""
        return ACCOUNTANTS[self.by]


@dataclass(frozen=True)
class Method:
    """A named composition of parts. ``private=False`` means no clipping, no noise, NOT PRIVATE in every output."""

    name: str = "custom"
    select: Selection = field(default_factory=everyone)
    ask: tuple[Ask, ...] = ()
    local: Local = field(default_factory=sgd)
    clip: Clip = field(default_factory=flat)
    aggregate: Rule = rules.data_weighted
    server: after.After = after.plain
    calibrate: Calibrate | str = field(default_factory=Calibrate)
    private: bool = True
    summary: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.calibrate, str):
            object.__setattr__(self, "calibrate", Calibrate(self.calibrate))
        self._match_questions()
        if sum(one.share for one in self.ask) >= 1:
            raise BadInput(f"method {self.name!r}: its questions' shares leave no budget for the gradients")

    def _match_questions(self) -> None:
        """Refuse parts that miss an answer or their other half; drop spare questions that nobody needs."""
        rule = part_name(self.aggregate)
        asked = {one.question.what for one in self.ask}
        beside = {one.question.what for one in self.ask if one.batch == "step"}
        wanted = set()
        for part, name, needs, heard in (
            ("clip", self.clip.name, self.clip.needs, asked),
            ("local", self.local.name, self.local.needs, beside),
            ("aggregate", rule, _said(self.aggregate, "needs", ()), asked),
        ):
            wanted |= set(needs)
            for what in set(needs) - heard:
                raise BadInput(
                    f"method {self.name!r}: {part} {name!r} needs every client's released {what!r}"
                    + (", from the batch of every step" if heard is beside else "")
                    + ", and nobody is asked for it: exchange that part, or ask for it (ask = {name, batch})"
                )
        if self.local.partner != _said(self.aggregate, "partner", ""):
            raise BadInput(
                f"method {self.name!r}: local {self.local.name!r} and aggregate {rule!r} do not go together: one of "
                "them is half a method; exchange both, or neither (the server's half takes 'combine', any other rule)"
            )
        object.__setattr__(self, "ask", tuple(o for o in self.ask if not o.spare or o.question.what in wanted))
        own = [one.of for one in self.ask if one.batch == "own"]
        if self.select.name == "power-of-choice" and own[:1] != ["candidates"]:
            raise BadInput(
                f"method {self.name!r}: power-of-choice chooses by the candidates' released loss, and they are not "
                "asked first: ask = {name = 'loss', of = 'candidates'}"
            )

    @property
    def adaptive(self) -> bool:
        """Whether the server sets the local steps of the next round (``public/steps``), under the plan's total."""
        return bool(_said(self.aggregate, "adaptive", False))

    @property
    def calibration(self) -> Calibrate:
        """``calibrate`` as a value."""
        return self.calibrate if isinstance(self.calibrate, Calibrate) else Calibrate(self.calibrate)

    def describe(self) -> dict[str, str]:
        """Its parts by name, for plans and reports."""
        return {
            "select": self.select.name,
            "ask": ", ".join(_asked(one) for one in self.ask) or "nothing",
            "local": self.local.name,
            "clip": self.clip.name if self.private else "none",
            "aggregate": part_name(self.aggregate),
            "server": part_name(self.server),
            "calibrate": (
                "none"
                if not self.private
                else self.calibration.by + (", strictest budget" if self.calibration.strictest else "")
            ),
        }


def _asked(ask: Ask) -> str:
    """A question in words: what, from which batch, and the options of what is made of the answers."""
    size = "" if ask.size is None else f" of {ask.size}" if ask.size == "full" else f" of {ask.size:g}"
    used = f" → {part_name(ask.conclude)}" if isinstance(ask.conclude, partial) else ""
    return f"{ask.question.what} ({ask.batch} batch{size}, share {ask.share:g}){used}"


def _said(part: Callable[..., Any], about: str, default: Any) -> Any:
    """What an aggregation rule says about itself (``rule.needs``, ``rule.partner``), under options bound to it."""
    return getattr(part.func if isinstance(part, partial) else part, about, default)


def part_name(part: Callable[..., Any]) -> str:
    """The name of a part that is a function, with the options bound to it."""
    if isinstance(part, partial):
        options = ", ".join(f"{k}={v}" for k, v in part.keywords.items())
        return f"{part_name(part.func)}({options})" if options else part_name(part.func)
    return str(part.__name__).replace("_", "-")
