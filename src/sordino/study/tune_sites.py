"""``[tune]`` with real sites: every candidate is an ordinary run at them, and all are declared before the first charge.

serve.json → enrolled.json (who came) → search.json (the runs and their noise, fixed) → offered.json (everybody can pay
for all of it) → a folder for every candidate, as ``conduct`` keeps it → result.json.
"""

from __future__ import annotations

import json
import logging
import shutil
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sordino.engine.checkpoint import Checkpoint, write_atomic
from sordino.engine.federation.exchange import Agreed, Transport, agree, farewell
from sordino.errors import BudgetRefused, Diverged, SordinoError
from sordino.methods import Plan, noises_of
from sordino.methods.tuning import Noises
from sordino.privacy.accounting import composed_epsilon, replace_one_epsilon
from sordino.privacy.held import OF_HELD
from sordino.privacy.types import Event
from sordino.study.conduct import BYE, check_run, conduct_run, enrolment, facts_of, notice_of, settle, settled, table_of
from sordino.study.deploy import Facts, Served, prepare
from sordino.study.deployed import privacy_of, told_by_site
from sordino.study.file import Study, make_study
from sordino.study.folder import Folder
from sordino.study.many import Finished, Point
from sordino.study.result import read_result, to_json
from sordino.study.tune import candidates, choose, describe, judged_together, together

log = logging.getLogger("sordino.coordinator")

ENDS = ("result.json", "failed.json")
"""What a candidate's folder holds when it is over; either says what sites released in it."""


class Candidate(NamedTuple):
    """One of the runs: its settings, its folder, and its plan."""

    point: Point
    kept: Folder
    served: Served
    plan: Plan


class _Alone(NamedTuple):
    plan: Plan


def check_search(study: Study) -> None:
    """Refuse a search that cannot be made with sites, whoever comes."""
    for point in candidates(study, here=False):
        check_run(point.study)


def tune_sites(folder: Path, transport: Transport) -> dict[str, Any]:
    """Do what serve.json says of a search, or what is left of it; returns what result.json says.

    Guarantees: every site has declared all candidates and all looks before it is charged for the first, and whoever
    cannot pay for all of them pays for none.
    """
    about = json.loads((folder / "serve.json").read_text())
    study = make_study(about["study"])
    points, where = candidates(study, here=False), study.deployment
    served = [prepare(point.study, str(about["run"])) for point in points]
    sound = partial(_sound, served)
    enrolled = settled(folder / "enrolled.json", lambda: enrolment(folder, study, served[0].brief, transport, sound))
    facts = facts_of(enrolled)
    search = settled(folder / "search.json", lambda: _search(points, served, facts))
    found = [_laid(folder, about, point, one, search, enrolled) for point, one in zip(points, search["runs"])]
    offered = settled(folder / "offered.json", lambda: _offer(folder, found, transport, where.timeout))
    runs = []
    for place, one in enumerate(found):
        settled(one.kept.path / "agreed.json", partial(offered["agreed"].__getitem__, place))
        notice_of(folder, {"round": 0, "phase": f"candidate {place + 1} of {len(found)}", "asked": list(facts)})
        runs.append(_run(one, transport, list(facts), where.timeout))
    said = farewell(transport, found[-1].kept.run, list(facts), min(BYE, where.timeout))
    done = choose(folder, search["cost"], runs, lambda row: _total(row, found, said.get(row["client"], {})))
    notice_of(folder, {"round": 0, "phase": "finished", "asked": []})
    return done.result


def _sound(served: Sequence[Served], facts: Facts) -> tuple[dict[str, Any], dict[str, str]]:
    """The sites that every candidate can be planned for, and why not for the others."""
    kept: dict[str, Any] = dict(facts)
    odd: dict[str, str] = {}
    for one in served:
        if kept:
            kept, more = one.sound(kept)
            odd |= more
    return kept, odd


def _search(points: Sequence[Point], served: Sequence[Served], facts: Facts) -> dict[str, Any]:
    """The runs of all candidates, calibrated together as in a simulation (``tune.search``)."""

    def alone(place: int, noises: Noises | None) -> _Alone:
        return _Alone(served[place].plan(facts, noises))

    ready, factors = together(len(points), alone)
    plans, looking = judged_together([one.plan for one in ready], served[0].brief["classes"])
    runs = [
        {"run": uuid.uuid4().hex, "noises": noises_of(plan), "every": plan.judging and plan.judging.settings.every}
        for plan in plans
    ]
    return {"runs": runs, "looking": looking.tolist(), "cost": describe(points, plans, factors, looking)}


def _laid(
    folder: Path,
    about: dict[str, Any],
    point: Point,
    one: dict[str, Any],
    search: dict[str, Any],
    enrolled: dict[str, Any],
) -> Candidate:
    """A candidate's folder, as ``conduct_run`` finds one whose sites have come and whose noise is fixed."""
    at, table = folder / point.name, table_of(point.study)
    at.mkdir(exist_ok=True)
    table["evaluation"] = table["evaluation"] | ({} if one["every"] is None else {"every": one["every"]})
    looking = {"factors": search["looking"], "runs": len(search["runs"])}
    own = {**about, "study": table, "run": one["run"], "noises": one["noises"], "looking": looking}
    about = settled(at / "serve.json", lambda: own | {"kind": "deployed run"})
    settled(at / "enrolled.json", lambda: enrolled)
    served, plan, kept = settle(at, about, prepare(make_study(table), one["run"]), facts_of(enrolled))
    return Candidate(point, kept, served, plan)


def _offer(folder: Path, found: Sequence[Candidate], transport: Transport, seconds: float) -> dict[str, Any]:
    """What all sites said to all candidates; unless everybody pays for everything, all of it is taken back."""
    names = [client.name for client in found[0].plan.clients]
    notice_of(folder, {"round": 0, "phase": "offer", "asked": names})
    said = [agree(transport, one.served.brief, one.plan, seconds) for one in found]
    short = sorted({name for one, agreed in zip(found, said) for name in _short(one.plan, agreed)})
    refused = {name: f"{one.point.label}: {why}" for one, a in zip(found, said) for name, why in a.refused.items()}
    if not short and not refused:
        return {"agreed": [vars(one) for one in said]}
    for one in found:
        farewell(transport, one.kept.run, names, min(BYE, seconds))
        shutil.rmtree(one.kept.path)
    for file in ("search.json", "enrolled.json"):  # whoever tries again asks anew, and under other names of runs
        (folder / file).unlink()
    if refused:
        why = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise SordinoError(
            f"not every site trains every candidate, so they cannot be compared, and nothing was charged: {why}"
        )
    raise BudgetRefused(
        f"not all candidates can be paid for, beside what was charged before, by {', '.join(short)}: nothing was "
        "trained or charged; try fewer settings, let officers top ledgers up, or leave these out of deployment.sites"
    )


def _short(plan: Plan, agreed: Agreed) -> set[str]:
    """Who cannot pay for all turns, or all evaluations, of a candidate."""
    wanted = {client.name: client.declared_turns for client in plan.clients}
    looks = 0 if plan.judging is None else plan.judging.times
    fewer = {name for name, turns in agreed.payable.items() if turns < wanted[name]}
    return (fewer | {name for name, times in agreed.evaluations.items() if times < looks}) - agreed.refused.keys()


def _run(one: Candidate, transport: Transport, names: list[str], seconds: float) -> Finished:
    """Train a candidate, or what is left of it; one that fails is charged all the same, and loses."""
    ended, failed = one.kept.path / "result.json", one.kept.path / "failed.json"
    if not ended.exists() and not failed.exists():
        log.info("candidate %s", one.point.label)
        try:
            conduct_run(one.kept.path, transport)
        except (Diverged, BudgetRefused) as error:
            log.warning("%s failed: %s", one.point.label, error)
            said = farewell(transport, one.kept.run, names, min(BYE, seconds))
            state = one.kept.checkpoint(torch.device("cpu")) or Checkpoint(0, one.served.start, one.served.shown)
            told = {"reason": str(error), "privacy": privacy_of(one.plan, state, said)}
            write_atomic(failed, to_json(told, indent=1).encode())
    if ended.exists():
        return Finished(one.point, read_result(ended))
    return Finished(one.point, None, str(json.loads(failed.read_text())["reason"]))


def _total(row: dict[str, Any], found: Sequence[Candidate], said: dict[str, Any]) -> dict[str, Any]:
    """A site's entry with what all candidates cost it: as it says in the end, or else at least what its answers did."""
    name, delta, releases = row["client"], row["delta"], []
    events: tuple[list[Event], list[Event]] = ([], [])  # of training records, of held-out ones
    for one in found:
        place = [client.name for client in one.plan.clients].index(name)
        known = {event.what: event for event in one.plan.clients[place].total()}
        if one.plan.judging is not None:
            look = one.plan.judging.terms[place].event
            known[look.what + OF_HELD] = look
        file = next(one.kept.path / kept for kept in ENDS if (one.kept.path / kept).exists())
        mine = [entry["releases"] for entry in json.loads(file.read_text())["privacy"] if entry["client"] == name]
        for release in mine[0]:
            releases.append(release)
            if release["what"] in known and release["count"]:
                events[release["what"].endswith(OF_HELD)].append(known[release["what"]].times(release["count"]))
    costs = [float(composed_epsilon([own], [delta])[0]) if own else 0.0 for own in events]
    figures: dict[str, Any] = {"training_epsilon": costs[0], "held_epsilon": costs[1], "told_by": "server"}
    figures |= dict.fromkeys(("spent_epsilon", "own_epsilon"), max(costs))
    figures["replace_one_epsilon"] = max(float(replace_one_epsilon(own, delta)) if own else 0.0 for own in events)
    return {**row, **figures, **told_by_site(said), "run_epsilon": max(costs), "releases": releases}
