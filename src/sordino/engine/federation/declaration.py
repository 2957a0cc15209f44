"""What a site may say about itself. Whatever does not fit is refused with a reason, and the others go on.

The bounds keep a lie from stopping a run: within them planning and accounting are sure to end. They are far outside
what an honest site declares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sordino.errors import BadInput
from sordino.privacy.groups import check_group_name
from sordino.privacy.trust import Against
from sordino.privacy.types import Adjacency

RECORDS = (1, 10**12)
EPSILON = (1e-6, 1e4)  # ∞, for a public data set, is allowed too
DELTA = (1e-30, 0.1)

SLACK = 1e-6  # by how much two computations of one ε may differ
LEVELS = 20  # levels of consent that one site may have
LONGEST = 300  # letters of a reason that are worth keeping


def check_declaration(facts: Mapping[str, Any], name: str, adjacency: str) -> dict[str, Any]:
    """What a site declares, and nothing else that it sent; refuses what no site can mean.

    ``adjacency``: what the study accounts under.
    """
    found = {
        "name": name,
        "records": _whole("records", facts.get("records"), *RECORDS),
        "held": _whole("held", facts.get("held", 0), 0, RECORDS[1]),
        "epsilon": _number("epsilon", facts.get("epsilon"), *EPSILON, endless=True),
        "delta": _number("delta", facts.get("delta"), *DELTA),
    }
    said = facts.get("adjacency")
    if not isinstance(said, str) or said not in set(Adjacency):
        raise BadInput(f"it declares the adjacency {readable(said)!r}: one of {', '.join(Adjacency)} was expected")
    if said != adjacency:
        raise BadInput(f"it declares the adjacency {said}, and the study accounts under {adjacency}")
    held = {} if facts.get("held") is None else {"held": _whole("held", facts["held"], 0, RECORDS[1])}
    levels = {} if facts.get("levels") is None else {"levels": _check_levels(facts["levels"], found)}
    return {**found, "adjacency": said, **held, **levels}


def _check_levels(said: Any, found: Mapping[str, Any]) -> list[list[Any]]:
    """The levels of consent of a site's records: names, ε and counts that fit what else it declares."""
    if not isinstance(said, list) or not 1 <= len(said) <= LEVELS:
        raise BadInput(f"it declares levels of consent in a form that nobody knows, or more than {LEVELS}")
    levels: list[list[Any]] = []
    for one in said:
        if not isinstance(one, list) or len(one) != 3 or not isinstance(one[0], str) or not one[0]:
            raise BadInput("it declares a level of consent that is not a name, an ε and a number of records")
        name, epsilon, records = check_group_name(one[0]), one[1], one[2]
        levels.append([name, _number("epsilon", epsilon, *EPSILON), _whole("records", records, 0, RECORDS[1])])
    if len({name for name, _, _ in levels}) != len(levels):
        raise BadInput("it declares a level of consent twice")
    if sum(count for _, _, count in levels) != found["records"]:
        raise BadInput(f"its levels of consent do not add up to its {found['records']} records")
    if min(epsilon for _, epsilon, _ in levels) != found["epsilon"]:
        raise BadInput(f"it declares ε = {found['epsilon']:g}, which is not that of its strictest level of consent")
    return sorted(levels, key=lambda one: (one[1], one[0]))


def check_signed_key(said: Any) -> dict[str, str]:
    """A site's signed key of a run, in form; whether the signature is the site's is for the other sites to see."""
    if not isinstance(said, dict) or set(said) != {"public", "signature"}:
        raise BadInput("it sent no signed key, and this study shares noise")
    for value in said.values():
        if not isinstance(value, str) or not 2 <= len(value) <= LONGEST or set(value) - set("0123456789abcdef"):
            raise BadInput("its signed key is not written in hexadecimal digits")
    return dict(said)


def check_payable(said: Any, turns: int) -> int:
    """How many of the turns that it was offered a site can pay."""
    return _whole("payable", said, 0, turns)


def check_spent(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What a site says it has spent; only what is well formed, for this is written into the result."""
    epsilons = ("spent_epsilon", "run_epsilon", "replace_one_epsilon")
    found: dict[str, Any] = {key: _number(key, facts.get(key), 0.0, math.inf, endless=True) for key in epsilons}
    releases, marks = facts.get("releases"), facts.get("not_private")
    wanted = {"what", "rate", "noise", "count"}
    if (
        not isinstance(releases, list)
        or not isinstance(marks, list)
        or len(releases) + len(marks) > 10_000
        or not all(isinstance(one, dict) and set(one) >= wanted for one in releases)
    ):
        raise BadInput("it lists its releases in a form that nobody knows")
    found["releases"] = [
        {
            "what": readable(one["what"]),
            "rate": _number("rate", one["rate"], 0.0, 1.0),
            "noise": _number("noise", one["noise"], 0.0, math.inf),
            "count": _whole("count", one["count"], 0, 10**15),
        }
        for one in releases
    ]
    found |= _check_parts(facts, found["spent_epsilon"]) | _check_spent_levels(facts)
    return {**found, **_check_trust(facts, found["spent_epsilon"]), "not_private": [readable(one) for one in marks]}


def _check_parts(facts: Mapping[str, Any], spent: float) -> dict[str, float]:
    """What the accounts of training and of held-out records have spent, where a site has both: the larger is its ε."""
    names = ("training_epsilon", "held_epsilon")
    if not any(name in facts for name in names):
        return {}
    found = {name: _number(name, facts.get(name), 0.0, math.inf, endless=True) for name in names}
    if not math.isclose(max(found.values()), spent, rel_tol=SLACK):
        raise BadInput(f"it says that ε = {spent:g} was spent, which is not the larger of {tuple(found.values())}")
    return found


def _check_spent_levels(facts: Mapping[str, Any]) -> dict[str, dict[str, list[float]]]:
    """What the accounts of a site's levels have spent, in all and in the run, where it has levels."""
    said = facts.get("levels")
    if said is None:
        return {}
    if not isinstance(said, dict) or not 1 <= len(said) <= LEVELS:
        raise BadInput("it says what its levels of consent have spent in a form that nobody knows")
    if not all(isinstance(own, list) and len(own) == 2 for own in said.values()):
        raise BadInput("it does not say what each level of consent has spent, in all and in this run")
    return {
        "levels": {
            readable(name): [_number("spent_epsilon", one, 0.0, math.inf, endless=True) for one in own]
            for name, own in said.items()
        }
    }


def _check_trust(facts: Mapping[str, Any], spent: float) -> dict[str, Any]:
    """Whom a site says its figures hold against, and what its own share of the noise promises alone."""
    said = facts.get("against")
    if not isinstance(said, dict) or set(said) != {"colluders", "others"}:
        raise BadInput("it does not say whom its figures hold against")
    counts = (said[key] for key in ("colluders", "others"))
    colluders, others = (None if one is None else _whole("against", one, 0, 10**6) for one in counts)
    own = _number("own_epsilon", facts.get("own_epsilon"), 0.0, math.inf, endless=True)
    if own < spent * (1 - SLACK) or (colluders is None and own > spent * (1 + SLACK)):
        raise BadInput(
            f"it says that its own share of the noise promises ε = {own:g}, and all shares together {spent:g}: fewer "
            "shares never promise more, and what holds against everybody rests on its own noise"
        )
    if colluders is not None and others is not None and colluders >= others:
        raise BadInput(f"it says that {colluders} of {others} other sites may conspire: that would be everybody")
    return {"against": Against(colluders, others), "own_epsilon": own}


def readable(said: Any) -> str:
    """Somebody else's words as one short line that no terminal takes for a command."""
    if isinstance(said, (dict, list)):
        said = type(said).__name__
    elif not isinstance(said, str):
        try:
            said = repr(said)
        except ValueError:  # Python does not write out thousands of digits
            said = "a number too long to write"
    return "".join(one if one.isprintable() else " " for one in said[:LONGEST])


def _whole(what: str, said: Any, low: int, high: int) -> int:
    if type(said) is not int or not low <= said <= high:
        raise BadInput(f"it declares {what} = {readable(said)}: a whole number from {low} to {high} was expected")
    return said


def _number(what: str, said: Any, low: float, high: float, endless: bool = False) -> float:
    if type(said) is int and abs(said) < 1 << 64:
        said = float(said)
    fits = isinstance(said, float) and low <= said <= high and math.isfinite(said)
    if not fits and not (endless and said == math.inf):
        raise BadInput(f"it declares {what} = {readable(said)}: a number from {low:g} to {high:g} was expected")
    return float(said)
