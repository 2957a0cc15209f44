"""The result of a deployed run: what sites say they spent, and what their answers must have cost at least."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

from sordino.engine import rounds
from sordino.engine.checkpoint import Checkpoint
from sordino.methods import Plan
from sordino.methods.plan import ClientPlan
from sordino.privacy.accounting import composed_epsilon, replace_one_epsilon
from sordino.privacy.accounting.attack import NOTHING, Attack, best_attack
from sordino.privacy.held import OF_HELD
from sordino.privacy.trust import Against
from sordino.privacy.types import RECORD, Event
from sordino.study.folder import Folder
from sordino.study.levels import spent_levels
from sordino.study.result import chosen_by, complete

_SPENT = {
    "spent_epsilon": float,
    "run_epsilon": float,
    "replace_one_epsilon": float,
    "own_epsilon": float,
    "releases": list,
    "not_private": list,
}


"""What a site says in the end, and as what."""

_PARTS = ("training_epsilon", "held_epsilon")


def result_of(
    folder: Folder,
    plan: Plan,
    state: Checkpoint,
    spent: dict[str, dict[str, Any]],
    refused: dict[str, str],
    records: dict[str, Any],
) -> dict[str, Any]:
    """The dict of result.json. Metrics on sites' records are null but those of ``evaluation``, which were paid for."""
    about = json.loads((folder.path / "study.json").read_text())
    early = rounds.stopped(plan, state.round, state.history)
    nothing = dict.fromkeys(("accuracy", "loss", "psi", "worst_accuracy", "client_accuracy"))
    parts = {
        "study": {"name": about["study"]["data"]["name"], **about["study"]},
        "method": plan.method.name,
        "seed": about["seed"],
        "rounds": state.history,
        "final": nothing,
        "privacy": privacy_of(plan, state, spent),
        "private": plan.private,
        "simulated": False,
        **({} if plan.method.local.begin is None else {"personal": True}),
        **({"stopped": early} if early else {}),
        **chosen_by(plan, state),
        "refused": refused,
        "records": records,
        "seconds": state.seconds,
    }
    return complete(parts, state.chosen)


def privacy_of(plan: Plan, state: Checkpoint, spent: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Per site what it says it spent; where it said nothing, what the answers that came must have cost at least.

    ``trust`` is never more than the run's own plan promises, whatever a site says.
    """
    taken = rounds.turns_taken(plan, state.history)
    repeated = sum((Counter(record.get("unopened", {})) for record in state.history), Counter[str]())
    judged = Counter(name for record in state.history for name in record.get("judged", ()))
    found = []
    for place, (c, opened) in enumerate(zip(plan.clients, taken.tolist())):
        turns = opened + repeated[c.name]  # a sum that was not opened was paid for all the same
        private = plan.method.private
        row: dict[str, Any] = {
            "client": c.name,
            "epsilon": c.widest[0].epsilon if private else math.inf,
            "delta": c.budget.delta,
            "adjacency": str(c.budget.adjacency),
            **({} if c.budget.unit == RECORD else {"unit": c.budget.unit}),
            "sampling": str(c.terms.sampling.scheme),
            "accountant": "pld" if private else "none",
        }
        said = spent.get(c.name, {})
        if not private:
            row |= dict.fromkeys(("spent_epsilon", "run_epsilon", "replace_one_epsilon"), math.inf) | {"releases": []}
        elif told := told_by_site(said):
            row |= told
            row["trust"] = _against(c).and_also(said["against"]).words()
            row["composition"] = str(said.get("composition", "not said"))
            row["attack"] = told_attack(said.get("attack"))
            if c.levels and set(said.get("levels", {})) == set(c.budgets):
                spent_by, here = ({c.name + k: v[at] for k, v in said["levels"].items()} for at in (0, 1))
                row["levels"] = spent_levels(c, spent_by, here)
        else:
            row |= _least_spent(c, turns)
            seen = _best_seen(c, turns)
            if plan.judging is not None and judged[c.name]:
                held = plan.judging.terms[place].event.times(judged[c.name])
                _add_held(row, held)
                seen = seen.or_worse(best_attack([held], row["held_epsilon"], c.budget.delta))
            row["attack"] = None if c.budget.is_public else seen.told()
        found.append(row)
    return found


def _least_spent(c: ClientPlan, turns: int) -> dict[str, Any]:
    """What so many turns must have cost a site that said nothing; the largest ε of its accounts holds for all."""
    delta, by = c.budget.delta, {name: [e for e in own if e.count] for name, own in c.totals(turns).items()}
    costs = dict(zip(by, composed_epsilon(list(by.values()), delta).tolist()))
    alone = composed_epsilon([[e.alone() for e in own] for own in by.values()], delta)
    accounts = {c.name + name: cost for name, cost in costs.items()}
    return {
        "spent_epsilon": max(costs.values()),
        "run_epsilon": max(costs.values()),
        "told_by": "server",
        "own_epsilon": float(alone.max()),
        "trust": _against(c).words(),
        "replace_one_epsilon": max(float(replace_one_epsilon(own, delta)) for own in by.values()),
        "releases": [
            {"what": e.what + name, "rate": e.sampling.rate, "noise": e.noise, "count": e.count}
            for name, own in by.items()
            for e in own
        ],
        **({"levels": spent_levels(c, accounts, accounts)} if c.levels else {}),
    }


def _best_seen(c: ClientPlan, turns: int) -> Attack:
    """The best that an attacker can do with so many turns of a site, to a record of any of its accounts."""
    delta, found = c.budget.delta, NOTHING
    for own in c.totals(turns).values():
        events = [e for e in own if e.count]
        found = found.or_worse(best_attack(events, float(composed_epsilon([events], [delta])[0]), delta))
    return found


def told_by_site(said: dict[str, Any]) -> dict[str, Any]:
    """The figures in what a site said in the end; nothing where they are not complete."""
    if not all(isinstance(said.get(key), kind) for key, kind in _SPENT.items()):
        return {}
    return {key: said[key] for key in (*_SPENT, *_PARTS) if key in said} | {"told_by": "site"}


def told_attack(said: Any) -> dict[str, Any] | None:
    """The attacker's view as a site tells it; None where it tells none, or one that makes no sense."""
    rates = ("success", "true_positives", "false_positives")
    if not isinstance(said, dict) or said.get("from") not in ("releases", "epsilon"):
        return None
    if not all(isinstance(said.get(key), float) and 0.0 <= said[key] <= 1.0 for key in rates):
        return None
    return {**{key: said[key] for key in rates}, "from": said["from"]}


def _add_held(row: dict[str, Any], event: Event) -> None:
    """Beside what training must have cost, what evaluations on held-out records must have: ε is the larger."""
    cost = float(composed_epsilon([[event]], [row["delta"]])[0])
    row |= {"training_epsilon": row["spent_epsilon"], "held_epsilon": cost}
    for key in ("spent_epsilon", "run_epsilon", "own_epsilon"):
        row[key] = max(row[key], cost)
    row["replace_one_epsilon"] = max(row["replace_one_epsilon"], float(replace_one_epsilon([event], row["delta"])))
    row["releases"].append({"what": event.what + OF_HELD, "rate": 1.0, "noise": event.noise, "count": event.count})


def _against(client: ClientPlan) -> Against:
    """Whom a client's promise of this run holds against."""
    return Against.weakest(terms.shared for terms in (client.terms, *client.asks))
