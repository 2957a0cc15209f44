"""Two classes from one column: a group of its values, or a threshold. Declared, like everything in a schema.

``positive = ["1", "2", "3", "4"]`` makes class 1 of records whose target is one of these values, class 0 of all others
that have a target. ``target = "stage > 0"`` makes class 1 of records for which that is true. A record without a target
stays without a class.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sordino.errors import BadInput

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip

_OPPOSITE = {">": "≤", ">=": "<", "<": "≥", "<=": ">", "==": "≠", "!=": "="}
_SIGN = {">=": "≥", "<=": "≤", "==": "=", "!=": "≠"}
_NUMBER = r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_RULE = re.compile(rf"(.*[^\s<>=!])\s*(>=|<=|==|!=|>|<)\s*({_NUMBER}|\"[^\"]*\"|'[^']*')", re.DOTALL)


@dataclass(frozen=True)
class Rule:
    """A question about the target's cell; class 1 where the answer is yes, class 0 where it is no.

    Attributes
    ----------
    names
        The two classes, no and yes.
    comparison
        A key of ``COMPARISONS`` for a threshold; ``in`` or ``not in`` for words.
    number
        What a threshold compares with.
    words
        The values of the group.
    """

    names: tuple[str, str]
    comparison: str
    number: float = 0.0
    words: tuple[str, ...] = ()

    @property
    def unanswered(self) -> str:
        """What is wrong with a cell that leaves the question open."""
        return "is missing or not a number" if self.comparison in COMPARISONS else "is missing"


def split_target(raw: Mapping[str, Any]) -> tuple[str, Rule | None]:
    """The column that ``target`` names, and the threshold where it holds one: ``stage > 0``, ``grade == "high"``."""
    said = str(raw.get("target", "y"))
    found = _RULE.fullmatch(said.strip())
    if found is None:
        return said, None
    column, sign, value = found.groups()
    for key in ("classes", "positive"):
        if key in raw:
            raise BadInput(f"data.schema.target is {said!r}, which makes two classes itself: leave out {key}")
    if raw.get("task", "classification") != "classification":
        raise BadInput(f"data.schema.target is {said!r}, two classes: use task = 'classification', or the column alone")
    names = (f"{column} {_OPPOSITE[sign]} {_bare(value)}", f"{column} {_SIGN.get(sign, sign)} {_bare(value)}")
    if value[0] not in "\"'":
        return column, Rule(names, sign, float(value))
    if sign not in ("==", "!="):
        raise BadInput(f"data.schema.target is {said!r}: words have no order; use == or !=, or a number")
    return column, Rule(names, "in" if sign == "==" else "not in", words=(_bare(value).strip(),))


def _bare(value: str) -> str:
    return value[1:-1] if value[0] in "\"'" else value


def grouped(words: tuple[str, ...]) -> Rule:
    """The rule of ``positive``: class 1 is the group, called by its value where it has only one."""
    yes = words[0] if len(words) == 1 and words[0] != "other" else "positive"
    return Rule(("other", yes), "in", words=words)
