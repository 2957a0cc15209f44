"""``[sweep]``: one study, many runs. Any keys vary, as a grid or side by side; finished runs are not redone."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sordino.engine.checkpoint import write_atomic
from sordino.errors import BadInput
from sordino.study.file import Study, make_study, put
from sordino.study.folder import check_kind
from sordino.study.many import Finished, Point, Studies, Watch, shown_by
from sordino.study.schedule import Scheduler

__all__ = ["Finished", "points", "sweep"]

MOST = 100
"""More runs than this are asked about first."""

OPTIONS = ("mode", "stack")
SEED = "study.seed"


def _named(values: Mapping[str, Any]) -> str:
    """A run's folder: ``key=value,…``, shortened with a hash where that is long or odd."""
    told = ",".join(f"{key}={_word(value)}" for key, value in values.items())
    plain = re.sub(r"[^\w.,=+-]", "_", told)
    if plain == told and len(plain) <= 120:
        return plain
    mark = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
    return f"{plain[:110]}-{mark}"


def _labelled(values: Mapping[str, Any], study: Study) -> str:
    """What tells a run apart from other runs but for the seed."""
    parts = [f"{key.rpartition('.')[2]}={_word(v)}" for key, v in values.items() if key != SEED]
    named = [] if "method.name" in values else [study.method.name]
    return " ".join(named + [part.removeprefix("name=") for part in parts])


def points(study: Study) -> list[Point]:
    """All runs of a study's ``[sweep]``, in the order of its keys (the last varies fastest); each is a checked study.

    ``mode = "grid"`` (the default) takes every combination, ``mode = "list"`` the first values of all keys, then the
    second, and so on.
    """
    if not isinstance(study.sweep.get("stack", False), bool):
        raise BadInput(f"sweep.stack = {study.sweep['stack']!r}: it is true or false")
    return expanded(study, study.sweep, "sweep")


def expanded(study: Study, table: Mapping[str, Any], section: str, here: bool = True) -> list[Point]:
    """The studies that a table of lists makes of one study, as ``points`` says; ``section``: the table's name.

    ``here``: whether their clients are simulated, so that data and budgets of the study are checked too.
    """
    lists = dict(_lists({key: value for key, value in table.items() if key not in OPTIONS}))
    if not lists:
        raise BadInput(f'[{section}] varies nothing: give it keys with lists, such as "training.lr" = [0.1, 0.3]')
    mode = table.get("mode", "grid")
    if mode not in ("grid", "list"):
        raise BadInput(f"{section}.mode = {mode!r} is unknown: use 'grid' (every combination) or 'list' (side by side)")
    for key, values in lists.items():
        _check(key, values, mode, section)
    if mode == "list" and len({len(values) for values in lists.values()}) > 1:
        lengths = ", ".join(f"{key} has {len(values)}" for key, values in lists.items())
        raise BadInput(f"[{section}] with mode = 'list' needs lists of one length: {lengths}; or use mode = 'grid'")
    combined = zip(*lists.values()) if mode == "list" else itertools.product(*lists.values())
    found = []
    for chosen in combined:
        values = dict(zip(lists, chosen))
        made = _with(study, values, section, here)
        found.append(Point(values, made, _named(values), _labelled(values, made)))
    twice = [name for name, group in itertools.groupby(sorted(point.name for point in found)) if len(list(group)) > 1]
    if twice:
        raise BadInput(f"[{section}] has the run {twice[0]} twice: leave out one of the equal values")
    return found


def _lists(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their lists; ``training.lr = […]`` without quotes is a table in a table, and means the same."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _lists(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _check(key: str, values: Any, mode: str, whose: str) -> None:
    section = key.partition(".")[0]
    if "." not in key or section in ("sweep", "compare", "tune"):
        raise BadInput(
            f'[{whose}] {key!r} is not a key of the study: write section.key, such as "training.lr" or "method.name"'
        )
    if not isinstance(values, list):
        raise BadInput(f'[{whose}] "{key}" = {values!r}: give a list of values, or put it into [{section}]')
    if not values:
        raise BadInput(f'[{whose}] "{key}" is an empty list: give it values, or leave it out')
    told = [json.dumps(value, sort_keys=True) for value in values]
    again = next((one for place, one in enumerate(told) if one in told[:place]), None)
    if mode == "grid" and again is not None:
        raise BadInput(f'[{whose}] "{key}" lists {again} twice: leave out one of them')


def _with(study: Study, values: Mapping[str, Any], whose: str, here: bool) -> Study:
    """The study with these keys put over it; what is wrong with one is said of the table that it comes from."""
    table = study.table()
    for key, value in values.items():
        put(table, key, value, f'[{whose}] "{key}"')
    try:
        made = make_study(table)
        if here:
            made.check()
    except BadInput as error:
        raise BadInput(f"[{whose}] {error}") from None
    return made


def sweep(
    study: Study, out: Path, watch: Watch | None = None, yes: bool = False, how: Scheduler | None = None
) -> list[Finished]:
    """Run everything that ``out`` does not hold yet; returns all runs in their order.

    Runs of one model and shape of a record are stacked on a GPU, or anywhere with ``sweep.stack = true``. A run that
    fails (training diverged, settings that do not fit its clients) does not stop the others; where all fail, the first
    reason is raised.
    """
    todo = points(study)
    if len(todo) > MOST and not yes:
        raise BadInput(f"[sweep] makes {len(todo)} runs: say --yes if that is meant, or shorten its lists")
    _claim(out, study, todo[0].values)
    how = how or Scheduler(study.study.device)
    how = replace(how, stack=study.sweep.get("stack") if how.stack is None else how.stack)
    maker = Studies(out, study.study.track)
    ended = {one.job.name: one.error for one in how.run(todo, maker, shown_by(watch))}
    runs = [
        Finished(one, None, str(error)) if (error := ended.get(one.name)) else Finished(one, maker.result(one))
        for one in todo
    ]
    if all(run.result is None for run in runs):
        raise BadInput(f"every run of the sweep failed; {runs[0].point.name}: {runs[0].failed}")
    return runs


def _claim(out: Path, study: Study, values: Mapping[str, Any]) -> None:
    """Note which study a folder's runs belong to; refuse a folder with runs of another one."""
    ignored = {"study.name", "study.device", "study.deterministic", "study.track", *values}
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


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
