"""``[sweep]``: one study, many runs. Any keys vary, as a grid or side by side; finished runs are not redone."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sordino.data import Dataset, Federation
from sordino.engine.checkpoint import write_atomic
from sordino.engine.devices import torch_device
from sordino.errors import BadInput, Diverged, SordinoError
from sordino.study.compare import Watch
from sordino.study.file import Study, make_study
from sordino.study.folder import Folder, check_kind, planned_noises
from sordino.study.many import train_together
from sordino.study.result import from_json
from sordino.study.run import Callback, Prepared, prepare, train
from sordino.study.track import tracker

MOST = 100
"""More runs than this are asked about first."""

STACK_BYTES = 8 << 30
"""How much the updates of one stack of runs may take."""

OPTIONS = ("mode", "stack")
SEED = "study.seed"


@dataclass(frozen=True)
class Point:
    """One run of a sweep: what it varies, and the study that this makes."""

    values: dict[str, Any]
    study: Study

    @property
    def name(self) -> str:
        """The run's folder: ``key=value,…``, shortened with a hash where that is long or odd."""
        told = ",".join(f"{key}={_word(value)}" for key, value in self.values.items())
        plain = re.sub(r"[^\w.,=+-]", "_", told)
        if plain == told and len(plain) <= 120:
            return plain
        mark = hashlib.sha256(json.dumps(self.values, sort_keys=True).encode()).hexdigest()[:8]
        return f"{plain[:110]}-{mark}"

    @property
    def label(self) -> str:
        """What tells it apart from other runs but for the seed."""
        parts = [f"{key.rpartition('.')[2]}={_word(v)}" for key, v in self.values.items() if key != SEED]
        named = [] if "method.name" in self.values else [self.study.method.name]
        return " ".join(named + [part.removeprefix("name=") for part in parts])


@dataclass(frozen=True)
class Finished:
    """A run of a sweep and its result; ``failed`` says why there is none."""

    point: Point
    result: dict[str, Any] | None
    failed: str | None = None


def points(study: Study) -> list[Point]:
    """All runs of a study's ``[sweep]``, in the order of its keys (the last varies fastest); each is a checked study.

    ``mode = "grid"`` (the default) takes every combination, ``mode = "list"`` the first values of all keys, then the
    second, and so on.
    """
    lists = dict(_lists({key: value for key, value in study.sweep.items() if key not in OPTIONS}))
    if not lists:
        raise BadInput('[sweep] varies nothing: give it keys with lists, such as "training.lr" = [0.1, 0.3]')
    mode = study.sweep.get("mode", "grid")
    if mode not in ("grid", "list"):
        raise BadInput(f"sweep.mode = {mode!r} is unknown: use 'grid' (every combination) or 'list' (side by side)")
    if not isinstance(study.sweep.get("stack", False), bool):
        raise BadInput(f"sweep.stack = {study.sweep['stack']!r}: it is true or false")
    for key, values in lists.items():
        _check(key, values, mode)
    if mode == "list" and len({len(values) for values in lists.values()}) > 1:
        lengths = ", ".join(f"{key} has {len(values)}" for key, values in lists.items())
        raise BadInput(f"[sweep] with mode = 'list' needs lists of one length: {lengths}; or use mode = 'grid'")
    combined = zip(*lists.values()) if mode == "list" else itertools.product(*lists.values())
    found = [Point(values := dict(zip(lists, chosen)), _with(study, values)) for chosen in combined]
    twice = [name for name, group in itertools.groupby(sorted(point.name for point in found)) if len(list(group)) > 1]
    if twice:
        raise BadInput(f"[sweep] has the run {twice[0]} twice: leave out one of the equal values")
    return found


def _lists(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their lists; ``training.lr = […]`` without quotes is a table in a table, and means the same."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _lists(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _check(key: str, values: Any, mode: str) -> None:
    section = key.partition(".")[0]
    if "." not in key or section in ("sweep", "compare"):
        raise BadInput(
            f'[sweep] {key!r} is not a key of the study: write section.key, such as "training.lr" or "method.name"'
        )
    if not isinstance(values, list):
        raise BadInput(f'[sweep] "{key}" = {values!r}: give a list of values, or put it into [{section}]')
    if not values:
        raise BadInput(f'[sweep] "{key}" is an empty list: give it values, or leave it out')
    told = [json.dumps(value, sort_keys=True) for value in values]
    again = next((one for place, one in enumerate(told) if one in told[:place]), None)
    if mode == "grid" and again is not None:
        raise BadInput(f'[sweep] "{key}" lists {again} twice: leave out one of them')


def _with(study: Study, values: Mapping[str, Any]) -> Study:
    """The study with these keys put over it; what is wrong with one is said of the sweep."""
    table = study.table()
    for key, value in values.items():
        *sections, last = key.split(".")
        inside = table
        for section in sections:
            inside = inside.setdefault(section, {})
            if not isinstance(inside, dict):
                raise BadInput(f'[sweep] "{key}": {section} is not a section')
        inside[last] = value
    try:
        made = make_study(table)
        made.check()
    except BadInput as error:
        raise BadInput(f"[sweep] {error}") from None
    return made


def sweep(
    study: Study,
    out: Path,
    watch: Watch | None = None,
    yes: bool = False,
    track: str | None = None,
) -> list[Finished]:
    """Run everything that ``out`` does not hold yet; returns all runs in their order.

    Runs that share model, records and what clients do are stacked on a GPU, or anywhere with ``sweep.stack = true``. A
    run that fails (training diverged, settings that do not fit its clients) does not stop the others; where all fail,
    the first reason is raised.
    """
    todo = points(study)
    if len(todo) > MOST and not yes:
        raise BadInput(f"[sweep] makes {len(todo)} runs: say --yes if that is meant, or shorten its lists")
    _claim(out, study, todo[0].values)
    finished: dict[str, Finished] = {}
    pending = []
    for point in todo:
        kept = out / point.name / "result.json"
        if kept.exists():
            finished[point.name] = Finished(point, from_json(kept.read_text()))
        else:
            pending.append(point)
    clients = _Clients()
    for some in _stacks(pending, out, clients, study):
        for one in _trained(some, out, clients, watch, track or study.study.track):
            finished[one.point.name] = one
    runs = [finished[point.name] for point in todo]
    if all(run.result is None for run in runs):
        raise BadInput(f"every run of the sweep failed; {runs[0].point.name}: {runs[0].failed}")
    return runs


def _claim(out: Path, study: Study, values: Mapping[str, Any]) -> None:
    """Note which study a folder's runs belong to; refuse a folder with runs of another one."""
    ignored = {"study.name", "study.device", "study.track", *values}
    told = {key: value for key, value in _lists(study.table()) if key not in ignored}
    told = json.loads(json.dumps(told))
    file = out / "sweep.json"
    check_kind(out, "sweep")
    if file.exists():
        before = {key: value for key, value in json.loads(file.read_text()).items() if key not in values}
        changed = [key for key in sorted({*told, *before}) if told.get(key) != before.get(key)]
        if changed:
            raise BadInput(f"{out} holds runs of a study with another {', '.join(changed)}: choose another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"cannot make the folder {out}: {error.strerror}") from None
    write_atomic(file, json.dumps(told, indent=1).encode())


class _Clients:
    """Federations of studies; records are loaded once for all that deal the same ones."""

    def __init__(self) -> None:
        self.sources: dict[str, Dataset | None] = {}
        self.made: dict[str, Federation] = {}

    def of(self, study: Study) -> Federation:
        """The study's clients, as made before where nothing that shapes them differs."""
        private = study.chosen_method().private
        key = json.dumps([study.data.model_dump(), study.budgets.model_dump(), study.study.seed, private], default=str)
        if key not in self.made:
            source = self.records(study)
            if source not in self.sources:
                self.sources[source] = study.source()
            if len(self.made) >= 64:
                self.made.clear()
            self.made[key] = study.federation(self.sources[source])
        return self.made[key]

    def records(self, study: Study) -> str:
        """What decides which records there are, and in which order."""
        d = study.data
        seed = (study.study.seed if d.seed is None else d.seed) if d.records or d.table_schema or d.central else None
        schema = [d.table_schema, d.invalid, d.test, d.central] if d.table_schema else None
        return json.dumps([d.name, d.folder, d.options, d.records, seed, schema], default=str)


def _stacks(pending: Sequence[Point], out: Path, clients: _Clients, study: Study) -> Iterator[list[Point]]:
    """Runs to train at once: stacks where that is wanted and possible, else one by one."""
    wanted = study.sweep.get("stack", torch_device(study.study.device).type == "cuda")
    groups: dict[str, list[Point]] = {}
    for point in pending:
        method = point.study.chosen_method()
        begun = (out / point.name / "checkpoint.safetensors").exists()  # goes on alone, from where it was
        alone = not wanted or begun or method.adaptive or method.local.state or method.select.resolve is not None
        does = [method.private, method.clip.name, method.local.name, method.describe()["ask"]]
        model = [point.study.model.model_dump(), point.study.study.device]
        key = [point.name] if alone else [clients.records(point.study), model, does]
        groups.setdefault(json.dumps(key, default=str), []).append(point)
    yield from groups.values()


def _trained(
    some: Sequence[Point], out: Path, clients: _Clients, watch: Watch | None, track: str | None
) -> Iterator[Finished]:
    """Train one run, or several in stacks that fit memory; what cannot be stacked after all is tried alone."""
    ready: list[tuple[Point, Prepared]] = []
    alone = list(some) if len(some) == 1 else []
    for point in some if len(some) > 1 else ():
        try:
            ready.append((point, _prepared(point, out, clients)))
        except SordinoError:
            alone.append(point)
    while ready:
        rows = max(one.plan.schedule.asked.shape[1] for _, one in ready)
        size = max(1, int(STACK_BYTES // (4 * rows * ready[0][1].engine.dimension)))
        stack, ready = ready[:size], ready[size:]
        try:
            yield from _stacked(stack, out, watch, track)
        except SordinoError:
            alone += [point for point, _ in stack]
    for point in alone:
        yield _alone(point, out, clients, watch, track)


def _prepared(point: Point, out: Path, clients: _Clients) -> Prepared:
    settings = point.study.arguments()
    model, options, seed = (settings.pop(key) for key in ("model", "model_options", "seed"))
    noises = planned_noises(out / point.name)
    method = point.study.chosen_method()
    return prepare(clients.of(point.study), model, method, seed, options, settings, noises)


def _stacked(
    stack: Sequence[tuple[Point, Prepared]], out: Path, watch: Watch | None, track: str | None
) -> list[Finished]:
    some, ready = [point for point, _ in stack], [one for _, one in stack]
    rounds = max(point.study.study.rounds for point in some)
    show: Callback | None = None
    if watch:
        show = watch(f"{len(some)} runs stacked", some[0].study.study.seed, rounds)
    folders = [
        Folder.open(
            path := out / point.name, one.study, one.plan, one.seed, (path / "study.json").exists(), rules=one.rules
        )
        for point, one in stack
    ]
    about = some[0].study.study
    done = train_together(
        ready,
        about.device,
        lambda number: show({"round": number}) if show else None,
        folders,
        about.name,
        out / "stacks",
    )
    finished = []
    for point, run in zip(some, done):
        if isinstance(run, Diverged):
            finished.append(Finished(point, None, str(run)))
            continue
        with tracker(track, out / point.name, point.study, point.name) as tracked:
            tracked.replay(run.result)
        finished.append(Finished(point, run.result))
    return finished


def _alone(point: Point, out: Path, clients: _Clients, watch: Watch | None, track: str | None) -> Finished:
    about, folder = point.study.study, out / point.name
    callbacks: list[Callback] = [watch(point.label, about.seed, about.rounds)] if watch else []
    settings = {
        "out": folder,
        "resume": (folder / "study.json").exists(),
        "device": about.device,
        "name": about.name,
        **point.study.arguments(),
    }
    try:
        method, federation = point.study.chosen_method(), clients.of(point.study)
        with tracker(track, folder, point.study, point.name) as tracked:
            done = train(federation, method=method, callbacks=[*callbacks, tracked], **settings)
            tracked.finish(done.result)
            return Finished(point, done.result)
    except SordinoError as error:
        return Finished(point, None, str(error))


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
