"""Many studies, a run folder each: what comparisons and sweeps give to the scheduler."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from sordino.data import Dataset, Federation
from sordino.errors import SordinoError
from sordino.study.file import Study
from sordino.study.folder import Copies, Planned, planned
from sordino.study.prepared import Prepared, Run
from sordino.study.result import read_result
from sordino.study.run import keep_in, prepare
from sordino.study.schedule import Ending, Tell
from sordino.study.session import Callback, train_alone, train_together
from sordino.study.track import tracker

Watch = Callable[[str, int, int | None], Callback]
"""Given a label, a seed and the number of rounds, what to call after each round."""


class Point(NamedTuple):
    """One run of many: what it varies, the study that this makes, its folder's name, and its label but for the seed."""

    values: dict[str, Any]
    study: Study
    name: str
    label: str


class Finished(NamedTuple):
    """A run of many and its result; ``failed`` says why there is none."""

    point: Point
    result: dict[str, Any] | None
    failed: str | None = None


class Studies:
    """Makes the runs of points in folders below ``out``: see ``schedule.Maker``. Records are loaded once for all."""

    def __init__(self, out: Path, track: str | None = None) -> None:
        self.out, self.track = out, track
        self.sources: dict[str, Dataset | None] = {}
        self.made: dict[str, Federation] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Studies, (self.out, self.track)

    def result(self, point: Point) -> dict[str, Any]:
        """The result of a finished run."""
        return read_result(self.out / point.name / "result.json")

    def finished(self, point: Point) -> bool:
        """Whether the run's folder holds a result."""
        return (self.out / point.name / "result.json").exists()

    def begun(self, point: Point) -> bool:
        """Whether a round was finished in the run's folder."""
        return (self.out / point.name / "checkpoint.safetensors").exists()

    def kin(self, point: Point) -> Hashable:
        """The device, and what reports call the study."""
        return point.study.study.device, point.study.study.name

    def prepared(self, point: Point, before: Planned | None = None) -> Prepared:
        """The run of a study, with the noise that was fixed if it was begun before, or that ``before`` says."""
        settings = point.study.arguments()
        keys = ("model", "model_options", "seed", "trust", "evaluation")
        model, options, seed, trust, evaluation = (settings.pop(key) for key in keys)
        before = before or planned(self.out / point.name)
        clients, method = self.clients(point.study), point.study.chosen_method()
        made = prepare(clients, model, method, seed, options, settings, before, trust=trust, evaluation=evaluation)
        return replace(made, deterministic=point.study.study.deterministic)

    def alone(self, point: Point, ready: Prepared, tell: Callback) -> Run:
        """Train one run in its folder."""
        about, folder = point.study.study, self.out / point.name
        with tracker(self.track, folder, point.study, point.name) as tracked:
            keeper = keep_in(folder, ready, (folder / "study.json").exists())
            done = train_alone(ready, keeper, about.device, [tell, tracked], about.name)
            tracked.finish(done.result)
        return done

    def together(
        self, points: Sequence[Point], runs: Sequence[Prepared], tell: Callback
    ) -> Sequence[Run | SordinoError]:
        """Train several runs in one stack; each folder gets its result when all are done."""
        places = [self.out / point.name for point in points]
        folders = [keep_in(at, one, (at / "study.json").exists()) for at, one in zip(places, runs)]
        keeper = Copies(self.out / "stacks", [one.kept_as for one in runs], folders)
        about = points[0].study.study
        found = train_together(runs, about.device, [tell], keeper, about.name)
        for at, point, one in zip(places, points, found):
            if isinstance(one, Run):
                with tracker(self.track, at, point.study, point.name) as tracked:
                    tracked.replay(one.result)
        return found

    def close(self, point: Point, found: Run | SordinoError, seconds: float) -> Ending[Point]:
        """Nothing is left to do: the folder has the result."""
        return Ending(point, found if isinstance(found, SordinoError) else None)

    def clients(self, study: Study) -> Federation:
        """A study's clients, as made before where nothing that shapes them differs."""
        private = study.chosen_method().private
        key = json.dumps([study.data.model_dump(), study.budgets.model_dump(), study.study.seed, private], default=str)
        if key not in self.made:
            source = _records(study)
            if source not in self.sources:
                self.sources[source] = study.source()
            if len(self.made) >= 64:
                self.made.clear()
            self.made[key] = study.federation(self.sources[source])
        return self.made[key]


def _records(study: Study) -> str:
    """What decides which records there are, and in which order."""
    d = study.data
    seed = study.data_seed if d.records or d.table_schema or d.central else None
    schema = [d.table_schema, d.invalid, d.test, d.central] if d.table_schema else None
    return json.dumps([d.name, d.folder, d.options, d.records, seed, schema], default=str)


def shown_by(watch: Watch | None) -> Tell:
    """Show the rounds of runs and of stacks, each by a callback of its own."""
    seen: dict[tuple[str, int], Callback] = {}

    def tell(points: Sequence[Point], record: dict[str, Any]) -> None:
        key, about = (points[0].name, len(points)), points[0].study.study
        if watch is not None and key not in seen:
            label = points[0].label if len(points) == 1 else f"{len(points)} runs stacked"
            rounds = [point.study.planned_rounds for point in points]
            seen[key] = watch(label, about.seed, max((r for r in rounds if r), default=None) if all(rounds) else None)
        if watch is not None:
            seen[key](record)

    return tell
