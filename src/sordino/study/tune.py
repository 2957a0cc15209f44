"""``[tune]``: settings tried under one budget. Every run is charged in full, every look at held-out records too.

All candidates are calibrated together and declared in one ledger before the first release (``methods.tuning``), so the
whole search costs a client at most its budget. The winner is chosen by what was released, which is free.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from sordino.engine.checkpoint import write_atomic
from sordino.errors import BadInput, BudgetRefused, Diverged
from sordino.methods import Plan
from sordino.methods.evaluation import Evaluation, Judging, judge
from sordino.methods.tuning import Factors, Noises, evaluation_factors, judged_louder, louder, training_factors
from sordino.privacy.accounting import composed_epsilon
from sordino.privacy.held import HELD
from sordino.privacy.ledger import Ledger
from sordino.server import choosing
from sordino.study.evaluated import estimate_of
from sordino.study.file import Study
from sordino.study.folder import Folder, Planned, check_kind, planned
from sordino.study.many import Finished, Point, Studies, Watch
from sordino.study.prepared import Prepared
from sordino.study.result import load_run, read_result, save_run, to_json
from sordino.study.run import keep_in
from sordino.study.session import open_accounts, open_held_accounts, train_alone
from sordino.study.sweep import expanded
from sordino.study.track import tracker

TRIES = 5
"""Times that noise is made larger where schedules follow from it; once is enough where they do not."""

TRIED = ("training", "method", "model")
"""Sections whose keys may be tried, beside study.rounds: all runs need the same records, parted alike."""


class HasPlan(Protocol):
    """A candidate that is ready to run, here or with sites."""

    @property
    def plan(self) -> Plan:
        """What it releases, and when."""


Ready = TypeVar("Ready", bound=HasPlan)


@dataclass(frozen=True)
class Search:
    """A search before it begins: its candidates, ready to run, and what it costs that there are several.

    ``factors``: by client, how much larger its noise is than if one candidate were trained alone; ``looking``: the same
    for what is released of held-out records.
    """

    points: tuple[Point, ...]
    ready: tuple[Prepared, ...]
    factors: Factors
    looking: Factors

    def describe(self) -> dict[str, Any]:
        """The cost of searching as plain values, for a plan and for ``tune.json``."""
        return describe(self.points, [one.plan for one in self.ready], self.factors, self.looking)


@dataclass(frozen=True)
class Tuned:
    """A search that is over: every candidate, the winner's place, and the result, whose privacy is of all runs."""

    runs: tuple[Finished, ...]
    winner: int
    result: dict[str, Any]


def describe(points: Sequence[Point], plans: Sequence[Plan], factors: Factors, looking: Factors) -> dict[str, Any]:
    """What it costs that there are several candidates, as plain values."""
    return {
        "candidates": [point.label for point in points],
        "factor": float(statistics.median(factors)),
        "factors": dict(zip((client.name for client in plans[0].clients), map(float, factors))),
        "looks": sum(plan.judging.times for plan in plans if plan.judging is not None),
        "look_factor": float(statistics.median(looking)),
    }


def in_words(cost: Mapping[str, Any]) -> str:
    """What a search costs, in a sentence."""
    count = len(cost["candidates"])
    return (
        f"{count} settings cost you a factor of {cost['factor']:.2g} in noise: each is a run that the server sees, and "
        f"all of them together keep every budget; the {cost['looks']} looks at held-out records have "
        f"{cost['look_factor']:.2g} times the noise of one setting's"
    )


def candidates(study: Study, here: bool = True) -> list[Point]:
    """All settings that ``[tune]`` tries, each a study, checked where clients are ``here``; keys as in ``[sweep]``."""
    found = expanded(study, study.tune, "tune", here)
    other = [key for key in found[0].values if key.partition(".")[0] not in TRIED and key != "study.rounds"]
    if other:
        raise BadInput(
            f'[tune] "{other[0]}" cannot be tried: all candidates train on the same records, parted alike, under one '
            f"budget; keys of [{'], ['.join(TRIED)}] and study.rounds can"
        )
    if "stack" in study.tune:
        raise BadInput("tune.stack is unknown: candidates pay from one ledger, one after the other")
    if len(found) < 2:
        raise BadInput("[tune] has one candidate, so there is nothing to choose: add values, or use 'sordino run'")
    if study.evaluation is None:
        raise BadInput("[tune] chooses by paid estimates, and there is no [evaluation]: add that section")
    for point in found:
        method = point.study.chosen_method()
        if not method.private:
            raise BadInput(f"[tune] {point.name}: {method.name!r} is not private, so nothing is charged: [sweep]")
    if study.trust.chosen().shared:
        raise BadInput("[tune] does not go with trust.noise = 'shared' yet: tune with noise per site, or [sweep]")
    return found


def search(study: Study, out: Path, maker: Studies | None = None) -> Search:
    """Calibrate all candidates together: nobody's noise is less than all of them need. Touches no record."""
    points, maker = candidates(study), maker or Studies(out)

    def prepared(place: int, noises: Noises | None) -> Prepared:
        return maker.prepared(points[place], Planned(noises))

    ready, factors = together(len(points), prepared)
    begun = [planned(out / point.name) for point in points]  # what they began with is what they go on with
    ready = [maker.prepared(point) if before else one for point, one, before in zip(points, ready, begun)]
    plans, looking = judged_together([one.plan for one in ready], ready[0].clients.classes)
    made = []
    for one, plan in zip(ready, plans):
        settings = {} if plan.judging is None else asdict(plan.judging.settings)
        made.append(replace(one, study={**one.study, "evaluation": json.loads(to_json(settings))}, plan=plan))
    return Search(tuple(points), tuple(made), factors, looking)


def together(count: int, prepare: Callable[[int, Noises | None], Ready]) -> tuple[list[Ready], Factors]:
    """All candidates with the noise that they need together; by client, how much larger it is than that of one alone.

    ``prepare``: the candidate at a place, with these noises or, for None, with those that it needs alone.
    """
    ready = [prepare(place, None) for place in range(count)]
    factors = np.ones(len(ready[0].plan.clients))
    for _ in range(TRIES):
        more = training_factors([one.plan for one in ready])
        if (more == 1.0).all():
            return ready, factors
        factors = factors * more
        ready = [prepare(place, louder(one.plan, more)) for place, one in enumerate(ready)]
    raise BadInput("[tune] candidates whose turns follow from their noise do not settle under one budget: try fewer")


def judged_together(plans: Sequence[Plan], classes: int | None) -> tuple[list[Plan], Factors]:
    """The plans with evaluations calibrated together; only the last model is looked at where nobody says more."""
    judged = [_looks(plan, classes) for plan in plans]
    looking = evaluation_factors(judged, [client.budget for client in plans[0].clients])
    pairs = zip(plans, judged)
    return [replace(plan, judging=judged_louder(one, looking, len(plans))) for plan, one in pairs], looking


def _looks(plan: Plan, classes: int | None) -> Judging:
    judging = plan.judging
    assert judging is not None
    chosen: Evaluation = judging.settings
    if chosen.every is not None or chosen.stop is not None or chosen.keep == "best":
        return judging
    chosen = replace(chosen, every=plan.schedule.rounds)
    budgets = [client.budget for client in plan.clients]
    return judge(chosen, plan.schedule.rounds, classes, judging.held, budgets, private=True)


def tune(study: Study, out: Path, ledger: Path | None = None, watch: Watch | None = None) -> Tuned:
    """Train every candidate under one ledger and choose by paid estimates; given again, it goes on where it stopped.

    Guarantees: all candidates are declared before the first release, and all together cost every client at most its
    budget; a candidate that is finished is not made again, one that was stopped pays for no round twice.
    """
    told = _told(out, study)
    maker = Studies(out, study.study.track)
    found = search(study, out, maker)
    _claim(out, told)
    folders: list[Folder] = []
    paid = ledger or out / "ledger.db"
    for point, one in zip(found.points, found.ready):
        at = out / point.name
        begun = (at / "study.json").exists()  # it remembers its ledger, and all others pay from the same
        folders.append(keep_in(at, one, begun, ledger if begun and not folders else paid))
        paid = folders[-1].ledger or paid
    _declare(out, found, folders, paid, [maker.finished(point) for point in found.points])
    runs = []
    for point, one, folder in zip(found.points, found.ready, folders):
        if maker.finished(point):
            runs.append(Finished(point, maker.result(point)))
            continue
        about = point.study.study
        shown = [] if watch is None else [watch(point.label, about.seed, one.plan.schedule.rounds)]
        try:
            with tracker(study.study.track, folder.path, point.study, point.name) as tracked:
                done = train_alone(one, folder, about.device, [*shown, tracked], about.name)
                tracked.finish(done.result)
            runs.append(Finished(point, done.result))
        except (Diverged, BudgetRefused) as error:
            runs.append(Finished(point, None, str(error)))
            with Ledger(paid) as book:
                book.close_run(folder.run)
    names = [folder.run for folder in folders]
    with Ledger(paid, readonly=True) as book:
        return choose(out, found.describe(), runs, lambda one: _total(one, book, names))


def _told(out: Path, study: Study) -> dict[str, Any]:
    """What a search is known by; a folder with another one is refused: its noise was calibrated for those settings."""
    told: dict[str, Any] = json.loads(json.dumps({**study.table(), "tune": study.tune}, default=str))
    for key in ("name", "device", "deterministic", "track"):
        told.get("study", {}).pop(key, None)
    check_kind(out, "tuning")
    file = out / "tune.json"
    if file.exists() and json.loads(file.read_text())["study"] != told:
        raise BadInput(f"{out} holds a tuning of another study: give the same one to go on, or choose another --out")
    return told


def _claim(out: Path, told: dict[str, Any]) -> None:
    """Note which search a folder holds."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"cannot make the folder {out}: {error.strerror}") from None
    write_atomic(out / "tune.json", to_json({"study": told}, indent=1).encode())


def _declare(out: Path, found: Search, folders: Sequence[Folder], paid: Path, done: Sequence[bool]) -> None:
    """Declare every candidate that is not finished, before the first is charged.

    Who cannot pay for all of them is to pay for none: candidates that lack different clients cannot be compared.
    """
    begun = any(folder.begun for folder in folders)
    with Ledger(paid) as book:
        turns: list[dict[str, int]] = []
        for point, one, folder, finished in zip(found.points, found.ready, folders, done):
            if not finished:
                name = point.study.study.name
                training = open_accounts(book, one.plan, folder.run, name)
                turns.append(training | open_held_accounts(book, one, folder.run, name))
        if begun:
            return
        wanted = [_wanted(one) for one in found.ready]
        short = sorted({name for own, most in zip(turns, wanted) for name, n in own.items() if n < most[name]})
        idle = {name for name in short if all(own.get(name, 0) == 0 for own in turns)}
        parts = [{name for own in turns for name in own if name.endswith(HELD) is held} for held in (False, True)]
        if set(short) == idle and all(part - idle for part in parts):
            return
        for folder in folders:
            book.close_run(folder.run)
            folder.undo()
    (out / "tune.json").unlink(missing_ok=True)
    told = ", ".join(name.replace(HELD, " (held-out records)") for name in short[:10])
    raise BudgetRefused(
        f"not all candidates can be paid for, beside what the ledger has charged before, by {told}"
        f"{' and more' if len(short) > 10 else ''}: nothing was trained or charged; try fewer settings, top the ledger "
        "up, or use another ledger"
    )


def _wanted(ready: Prepared) -> dict[str, int]:
    """By account: how many turns, or evaluations, a candidate declares."""
    plan = ready.plan
    wanted = {client.name: client.declared_turns for client in plan.clients}
    if plan.judging is not None:
        wanted |= {plan.clients[i].name + HELD: plan.judging.times for i in plan.judging.who}
    return wanted


def choose(
    out: Path, cost: Mapping[str, Any], runs: Sequence[Finished], total: Callable[[dict[str, Any]], dict[str, Any]]
) -> Tuned:
    """The winner's result and model, with what all runs together cost; written to the search's own folder.

    ``total``: a client's privacy entry in the winner's result → that of the whole search.
    """
    rows = [None if run.result is None else estimate_of(run.result) for run in runs]
    judged = [place for place, row in enumerate(rows) if row is not None]
    if not judged:
        raise BadInput(f"every candidate failed; {runs[0].point.name}: {runs[0].failed}")
    winner = max(judged, key=lambda place: choosing.merit(rows[place] or {}))
    folder = out / runs[winner].point.name
    result = read_result(folder / "result.json")
    result["privacy"] = [total(one) for one in result["privacy"]]
    table = [
        {"settings": run.point.values, "label": run.point.label, "folder": run.point.name, "estimate": row}
        | ({"failed": run.failed} if run.failed else {})
        for run, row in zip(runs, rows)
    ]
    result["tuned"] = {**cost, "tried": table, "winner": winner}
    _, weights, personal = load_run(folder)
    save_run(out / "model.safetensors", result, weights, personal)
    write_atomic(out / "result.json", to_json(result, indent=1).encode())
    return Tuned(tuple(runs), winner, result)


def _total(one: dict[str, Any], book: Ledger, runs: Sequence[str]) -> dict[str, Any]:
    """A client's entry with what all runs of the search released and cost, in place of the winner's alone."""
    known = {account.client for account in book.accounts()}
    accounts = [name for name in (one["client"], one["client"] + HELD) if name in known]
    events = [[event for run in runs for event in book.run_events(name, run)] for name in accounts]
    spent, own = book.epsilon(accounts), book.own_epsilon(accounts)
    here = composed_epsilon(events, [one["delta"]] * len(accounts))
    whose = ("", " of held-out records")
    figures = {
        "spent_epsilon": max(spent.values()),
        "run_epsilon": float(here.max()),
        "replace_one_epsilon": max(book.replace_one_epsilon(name) for name in accounts),
        "own_epsilon": max(own.values()),
        "releases": [
            {"what": e.what + word, "rate": e.sampling.rate, "noise": e.noise, "count": e.count}
            for own_events, word in zip(events, whose)
            for e in own_events
        ],
    }
    if len(accounts) > 1:
        figures |= {"training_epsilon": spent[accounts[0]], "held_epsilon": spent[accounts[1]]}
    return {**one, **figures}
