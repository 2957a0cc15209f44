"""Data that live, in a statement: each cohort and what it has spent, who went when, and what cannot be taken back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sordino.privacy.book import number
from sordino.privacy.ledger import Ledger
from sordino.privacy.living import JOINED, RETURNED, WITHDRAWN, Life, cohort_of, is_held, since
from sordino.privacy.words import epsilon_in_words

KEPT = (
    "What was released while a {unit} was here stays released. It is covered by the epsilon of that time, above; if it "
    "was withdrawn because of what was released, by the budget.",
    "Models that were trained meanwhile are not unlearnt, whoever has them by now.",
    "A {unit} that is withdrawn is in no later batch, evaluation or survey from the site's next start on; one that "
    "comes back is in its old cohort, with all that was spent there.",
    "A keyed hash of the id stays in this ledger for ever: without it, whoever comes back would look new.",
)
"""What cannot be taken back, and what a withdrawal does."""


def lives(ledger: Ledger, client: str) -> dict[str, Any] | None:
    """What the ledger says of the cohort whose account this is, and of all; None where data do not live.

    Of everybody who went: ε that this account had spent by then, None where nothing is guaranteed.
    """
    life, account = ledger.life(), ledger.account(client)
    if life is None or account.simulated:
        return None
    cohort, held = cohort_of(client), is_held(client)
    base = client.removesuffix(since(cohort))
    names = {k: base + since(k) for k in range(1, life.cohorts + 1)}
    there = {one.client: one for one in ledger.accounts()}
    costs = ledger.epsilon([name for name in names.values() if name in there])
    spent = {name: math.inf if there[name].not_private else cost for name, cost in costs.items()}
    own = [one for one in life.changes if one.cohort == cohort]
    then = ledger.epsilon_before(client, [one.entry for one in own if one.what == WITHDRAWN])
    return {
        "by": life.column,
        "since": life.time,
        "cohort": cohort,
        "cohorts": [{**_counted(life, k), "spent_epsilon": number(spent.get(name, 0.0))} for k, name in names.items()],
        "changes": [
            {"time": one.time, "what": one.what, "count": one.count}
            | ({"epsilon": number(math.inf if account.not_private else then[one.entry])} if one.entry in then else {})
            for one in own
        ],
        "runs": [
            {"run": run, "count": seats.count}
            for (run, part), seats in life.seats.items()
            if part is held and cohort in seats.cohorts
        ],
    }


def _counted(life: Life, cohort: int) -> dict[str, Any]:
    """How many ever joined a cohort, since when, and how many of them are away."""
    own = [one for one in life.changes if one.cohort == cohort]
    total = {what: sum(one.count for one in own if one.what == what) for what in (JOINED, WITHDRAWN, RETURNED)}
    first = own[0].time if own else life.time
    away = total[WITHDRAWN] - total[RETURNED]
    return {"cohort": cohort, "since": first, "joined": total[JOINED], "away": away}


def lives_in_words(life: dict[str, Any] | None, of: Mapping[str, str], known: Mapping[str, str]) -> list[str]:
    """The cohorts and what each has spent; who of this one came and went, and in which runs it was.

    ``of``: the words for a unit and for several; ``known``: by run, what the statement calls it.
    """
    if life is None:
        return []
    lines = ["", f"{of['units'].capitalize()} that come and go, known by {life['by']} since {life['since']}:"]
    for one in life["cohorts"]:
        which = "  (this account)" if one["cohort"] == life["cohort"] else ""
        count = f"{one['joined']} {of['unit' if one['joined'] == 1 else 'units']}, {one['away']} of them away"
        told = f"epsilon {epsilon_in_words(one['spent_epsilon'])} spent{which}"
        lines.append(f"  cohort {one['cohort']}, since {one['since']}: {count}; {told}")
    lines += ["", f"Cohort {life['cohort']}, training and held-out together:"]
    for one in life["changes"]:
        then = f", when epsilon {epsilon_in_words(one['epsilon'])} was spent" if "epsilon" in one else ""
        lines.append(f"  {one['time']}: {one['count']} {one['what']}{then}")
    runs = [(known.get(one["run"], f"run {one['run']}"), one["count"]) for one in life["runs"]]
    return lines + [f"  in {name}, among {count} {of['units']}" for name, count in runs]
