"""From ``result.json`` dicts to what the report shows: runs grouped by method, curves over seeds, facts per client.

Every field but ``method`` is optional: a run may be unfinished, a regression has no accuracy, a method may tell
nothing about weights. What is absent is left out of the page; it is never made up.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from sordino.engine.evaluate import budget_groups
from sordino.errors import BadInput
from sordino.privacy.trust import SHARED
from sordino.privacy.types import RECORD
from sordino.study.report.numbers import SeedMean, finite, finites, short, spread, thin

SCHEMAS = (1, 2)
"""Schemas of results that the report reads; the second only adds keys, which it does not need."""

COLOURS = 8
"""Colours of the palette in page.css; a ninth method takes the first colour again with a dashed line."""

SYMBOLS = ("circle", "diamond", "square", "triangle-up", "cross", "x", "triangle-down", "star")
TELEMETRY = ("iterations", "residual", "unsettled", "rounds", "spread_error")
"""Diagnostics that say how a computation went rather than what it found."""

SEEDED = {"seed", "compare", "topped_up"}
"""Keys of a study that say which seeds there are, or follow from one."""

GROUPS = ("strictest", "middle", "loosest")
"""Clients by budget, in groups of about equal number."""

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Client:
    """One client in one run. ε is ``inf`` where the result says null, None where the result says nothing.

    ``declared`` is the finite budget the client set, which a study knows also for a method that is not private.
    """

    name: str
    declared: float | None
    epsilon: float | None
    delta: float | None
    spent: float | None
    run: float | None
    replace_one: float | None
    adjacency: str
    sampling: str
    accountant: str
    releases: tuple[Mapping[str, Any], ...]
    size: float | None
    accuracy: float | None
    participation: float | None
    weight: float | None
    declared_weight: float | None
    optimum: float | None
    trust: str
    """Whom its figures hold against, in words; empty where nobody says."""
    own: float | None
    """ε of its own share of the noise alone, where noise was shared."""
    training: float | None
    held: float | None
    """What its two accounts have spent, where records are held out; ``spent`` is the larger."""
    attack: Mapping[str, Any] | None
    """The best an attacker can do, as the result tells it."""
    unit: str
    """What is protected as one: a record, or somebody with several."""
    ends: float | None
    """The round after which its budget pays for no more; ∞ when it outlasts the run, None where nobody says."""
    levels: tuple[tuple[str, float | None, float | None], ...] = ()
    """Where records have levels of consent: their names, what they allow and what they spent."""


@dataclass(frozen=True)
class SeedRun:
    """One result: a run of a method with one seed, its rounds and its clients."""

    seed: Any
    private: bool
    simulated: bool
    clients: tuple[Client, ...]
    rounds: tuple[Mapping[str, Any], ...]
    final: Mapping[str, Any]
    seconds: float | None
    versions: Mapping[str, Any]
    study: Mapping[str, Any]
    evaluation: tuple[Mapping[str, Any], ...]
    """Estimates that were paid for, by round and metric."""
    kept: Mapping[str, Any] | None
    threshold: Mapping[str, Any] | None
    tuned: Mapping[str, Any] | None
    """What was chosen by them: the round, the edge between two classes, the settings."""
    baselines: Mapping[str, Any]
    """What the model is compared with."""

    @cached_property
    def by_budget(self) -> dict[str, list[int]]:
        """Places of the clients in each group of budgets, strictest first; "all" where nobody's budget differs."""
        places = [place for place, client in enumerate(self.clients) if client.declared is not None]
        found = budget_groups([self.clients[place].declared or 0.0 for place in places], len(GROUPS))
        names = GROUPS if len(found) == 3 else (GROUPS[0], GROUPS[-1])
        grouped = {name: [places[one] for one in inside] for name, inside in zip(names, found)}
        return grouped or {"all": list(range(len(self.clients)))}

    def budget_means(self, values: Sequence[Any]) -> dict[str, float]:
        """The mean of the clients' values in each group of budgets that has any."""
        known = {name: finites(values[place] for place in places) for name, places in self.by_budget.items()}
        return {name: sum(found) / len(found) for name, found in known.items() if found}

    def at_end(self, key: str) -> float | None:
        """A metric of the final model; of the last round that evaluated it when the run has no final record."""
        return finite(self.final.get(key)) if self.final else self.last(key)

    def last(self, *path: str) -> float | None:
        """The figure at the end of a path of keys, in the last round that has one."""
        told = (finite(dig(row, path)) for row in reversed(self.rounds))
        return next((value for value in told if value is not None), None)


@dataclass(frozen=True)
class Group:
    """All seeds of one method under one study: one colour, one line, one row of a table."""

    label: str
    index: int
    colour: int
    """Which colour of the palette stands for the method, everywhere on the page."""
    symbol: str
    """The shape of its points, as plotly names it."""
    runs: tuple[SeedRun, ...]

    @property
    def clients(self) -> list[tuple[Client, SeedRun]]:
        """The clients of all seeds, each with the run that it took part in."""
        return [(client, run) for run in self.runs for client in run.clients]

    @property
    def private(self) -> bool:
        """Whether every run of the group is private."""
        return all(run.private for run in self.runs)

    def over_seeds(self, key: str) -> SeedMean | None:
        """A final metric as mean and deviation over the seeds."""
        return spread(run.at_end(key) for run in self.runs)


class Curve(NamedTuple):
    """A metric by round: mean over seeds and, with several seeds, its standard deviation."""

    rounds: list[int]
    mean: list[float]
    deviation: list[float | None]


def grouped(results: Sequence[Result]) -> list[Group]:
    """Sort results into groups: same method, same study apart from the seed. Order of first appearance.

    A method that was run under several studies (a sweep) is labelled with the settings that differ; a result that
    repeats method, study and seed of an earlier one starts a group of its own, so that a copy is never a "seed".
    """
    if not results:
        raise BadInput("there is no result to report: pass at least one result.json")
    buckets: dict[tuple[str, str, int], list[tuple[SeedRun, dict[str, str]]]] = defaultdict(list)
    copies: Counter[tuple[str, str, str]] = Counter()
    for place, result in enumerate(results):
        _check(result, place)
        settings = _settings(result.get("study") or {})
        key = json.dumps(settings, sort_keys=True)
        method, seed = str(result["method"]), str(result.get("seed"))
        copies[method, key, seed] += 1
        buckets[method, key, copies[method, key, seed]].append((_run(result), settings))
    labels = _labels([(method, copy, bucket[0][1]) for (method, _, copy), bucket in buckets.items()])
    return [
        Group(label, index, index % COLOURS, SYMBOLS[index % len(SYMBOLS)], tuple(run for run, _ in bucket))
        for index, (label, bucket) in enumerate(zip(labels, buckets.values(), strict=True))
    ]


def curve(group: Group, *path: str) -> Curve | None:
    """A round metric over the seeds of a group, thinned for drawing; None when no round has it.

    A round's mean is over the seeds that evaluated it; rounds nobody evaluated are left out.
    """
    values: dict[int, list[float]] = defaultdict(list)
    for run in group.runs:
        for place, row in enumerate(run.rounds, start=1):
            number = finite(dig(row, path))
            if number is not None:
                values[int(row.get("round", place))].append(number)
    if not values:
        return None
    rounds = [sorted(values)[place] for place in thin(len(values))]
    means = [mean for number in rounds if (mean := spread(values[number])) is not None]
    return Curve(rounds, [one.mean for one in means], [one.deviation for one in means])


def every_run(groups: Sequence[Group]) -> list[SeedRun]:
    """The runs of all methods."""
    return [run for group in groups for run in group.runs]


def everyone_always(groups: Sequence[Group]) -> bool:
    """Whether every client took part once in every round, as far as the results tell."""
    return {1.0} == set(finites(client.participation for group in groups for client, _ in group.clients))


def budgets_inside(runs: Sequence[SeedRun]) -> dict[str, list[float]]:
    """The budgets that the clients of each group of budgets declared."""
    found: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        for name, places in run.by_budget.items():
            found[name] += finites(run.clients[place].declared for place in places)
    return found


def diagnostics(groups: Sequence[Group]) -> list[str]:
    """Names of the numeric diagnostics that any round carries, in order of first appearance, how a solver went last.

    Noise power has a chart of its own.
    """
    rows = [row.get("diagnostics") for run in every_run(groups) for row in run.rounds]
    told = (pair for row in rows if isinstance(row, Mapping) for pair in row.items())
    names = dict.fromkeys(str(name) for name, value in told if finite(value) is not None)
    own = ("noise_power", "least_noise_power")
    return sorted((name for name in names if name not in own), key=lambda name: name in TELEMETRY)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """A nested mapping as dotted keys with values written as JSON; the numbers of a list are shortened."""
    leaves: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= flat(value, f"{prefix}{key}.")
            continue
        if isinstance(value, list | tuple):
            value = [short(one) if isinstance(one, float) else one for one in value]
        leaves[f"{prefix}{key}"] = json.dumps(value, default=str, ensure_ascii=False)
    return leaves


def _check(result: Any, place: int) -> None:
    if not isinstance(result, Mapping) or not isinstance(result.get("method"), str):
        raise BadInput(f"result {place + 1} is not a sordino result: it names no method; pass the dict of result.json")
    schema = result.get("schema", SCHEMAS[0])
    if schema not in SCHEMAS:
        raise BadInput(
            f"result {place + 1} has schema {schema!r}, this version reads schemas {' and '.join(map(str, SCHEMAS))}: "
            "use the version of sordino that wrote it"
        )


def _settings(study: Mapping[str, Any]) -> dict[str, str]:
    """The study without what a seed decides: seeds at any depth, and the lists of sizes and budgets drawn with them.

    What was chosen automatically follows from those, so it does not tell runs apart either.
    """
    chosen = {line.split()[0] for line in study.get("auto") or () if line.split()}
    chosen |= {"evaluate"} if chosen else set()

    def drawn(key: str, value: str) -> bool:
        path = key.split(".")
        automatic = key == "auto" or (path[0] == "training" and path[-1] in chosen)
        return automatic or bool(SEEDED & set(path)) or (path[-1] in ("sizes", "budgets") and value.startswith("["))

    told = {key: value for key, value in flat(study).items() if not drawn(key, value) and not key.startswith("trust.")}
    return {**told, "trust": _trust(study.get("trust") or {})}


def _trust(chosen: Mapping[str, Any]) -> str:
    """A study's choice of trust in a few words; nothing for noise per site."""
    if chosen.get("noise") != SHARED:
        return ""
    lost = f", {chosen['dropouts']} lost" if chosen.get("dropouts") else ""
    return f"with shared noise ({chosen.get('colluders', 0)} conspiring{lost})"


def _labels(entries: Sequence[tuple[str, int, dict[str, str]]]) -> list[str]:
    labels = []
    for method, copy, settings in entries:
        alike = [one for other, _, one in entries if other == method]
        differing = [key for key in sorted(set().union(*alike)) if len({one.get(key) for one in alike}) > 1]
        parts = [f"{key.rpartition('.')[2]}={settings.get(key, 'unset')}" for key in differing if key != "trust"]
        trust = f" {settings['trust']}" if "trust" in differing and settings["trust"] else ""
        labels.append(" ".join([method, *parts]) + trust + (f" ({copy})" if copy > 1 else ""))
    return labels


def _run(result: Result) -> SeedRun:
    rounds = tuple(row for row in result.get("rounds") or () if isinstance(row, Mapping))
    return SeedRun(
        seed=result.get("seed"),
        private=result.get("private") is True,
        simulated=result.get("simulated") is not False,
        clients=_clients(result, rounds),
        rounds=rounds,
        final=result.get("final") or {},
        seconds=finite(result.get("seconds")),
        versions=result.get("versions") or {},
        study=result.get("study") or {},
        evaluation=tuple(row for row in result.get("evaluation") or () if isinstance(row, Mapping)),
        kept=result.get("kept"),
        threshold=result.get("threshold"),
        tuned=result.get("tuned"),
        baselines=result.get("baselines") or {},
    )


def _clients(result: Result, rounds: Sequence[Mapping[str, Any]]) -> tuple[Client, ...]:
    entries = list(result.get("privacy") or [])
    accuracies = list((result.get("final") or {}).get("client_accuracy") or [])
    names = [str(entry.get("client", place)) for place, entry in enumerate(entries)]
    names += [f"client {place}" for place in range(len(names), len(accuracies))]
    entries += [{}] * (len(names) - len(entries))
    accuracies += [None] * (len(names) - len(accuracies))
    sizes = [finite(entry.get("n", entry.get("records"))) for entry in entries]
    if all(size is None for size in sizes):
        sizes = _of_study(result, "sizes", names)
    budgets = _of_study(result, "budgets", names)
    aliases = _aliases(names)
    takes = _takes(rounds, aliases)
    weights = _mean_weights(rounds, aliases, "weights")
    declared = _mean_weights(rounds, aliases, "declared_weights")
    optimum = _mean_weights(rounds, aliases, "observer", "optimum_weights")
    return tuple(
        Client(
            name=name,
            declared=finite(entry.get("epsilon")) or budgets[place],
            epsilon=_or_infinite(entry, "epsilon"),
            delta=finite(entry.get("delta")),
            spent=_or_infinite(entry, "spent_epsilon" if "spent_epsilon" in entry else "run_epsilon"),
            run=_or_infinite(entry, "run_epsilon"),
            replace_one=finite(entry.get("replace_one_epsilon")),
            adjacency=str(entry.get("adjacency") or ""),
            sampling=str(entry.get("sampling") or ""),
            accountant=str(entry.get("accountant") or ""),
            releases=tuple(entry.get("releases") or ()),
            size=sizes[place],
            accuracy=finite(accuracies[place]),
            participation=None if takes is None else takes[name] / len(rounds),
            weight=weights.get(name),
            declared_weight=declared.get(name),
            optimum=optimum.get(name),
            trust=str(entry.get("trust") or ""),
            own=_or_infinite(entry, "own_epsilon"),
            training=_or_infinite(entry, "training_epsilon"),
            held=_or_infinite(entry, "held_epsilon"),
            attack=entry.get("attack"),
            unit=str(entry.get("unit") or RECORD),
            ends=_or_infinite(entry, "budget_ends"),
            levels=tuple(
                (str(one.get("level")), _or_infinite(one, "epsilon"), _or_infinite(one, "spent_epsilon"))
                for one in entry.get("levels") or ()
            ),
        )
        for place, (name, entry) in enumerate(zip(names, entries, strict=True))
    )


def _or_infinite(entry: Mapping[str, Any], key: str) -> float | None:
    """An ε or the end of a budget: None when the result does not say, ∞ for null, which is how JSON writes it."""
    if key not in entry:
        return None
    number = finite(entry[key])
    return math.inf if number is None else number


def _of_study(result: Result, key: str, names: Sequence[str]) -> list[float | None]:
    """What the study says of every client: a list in the clients' order, or a table by name; None where it does not."""
    told = (result.get("study") or {}).get(key)
    if isinstance(told, Mapping):
        return [finite(told.get(name)) for name in names]
    if isinstance(told, list | tuple) and len(told) == len(names):
        return [finite(one) for one in told]
    return [None] * len(names)


def _takes(rounds: Sequence[Mapping[str, Any]], aliases: Mapping[Any, str]) -> Counter[str] | None:
    """How often each client took part (a virtual copy counts); None where no round tells who did."""
    takes: Counter[str] = Counter()
    told = False
    for row in rounds:
        present = row.get("participants")
        present = (row.get("weights") or None) if present is None else present
        told = told or present is not None
        takes.update(aliases.get(one, str(one)) for one in present or ())
    return takes if told else None


def _mean_weights(rounds: Sequence[Mapping[str, Any]], aliases: Mapping[Any, str], *path: str) -> dict[str, float]:
    """By client: the mean of what the rounds tell under ``path``, over the rounds that tell it."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rounds:
        for key, value in (dig(row, path) or {}).items():
            found[aliases.get(key, str(key))] += finites([value])
    return {name: sum(values) / len(values) for name, values in found.items() if values}


def _aliases(names: Sequence[str]) -> dict[Any, str]:
    """Every way a round may refer to a client: by its name, or by its position."""
    known = set(names)
    by_place = {place: str(place) if str(place) in known else name for place, name in enumerate(names)}
    return {**by_place, **{name: name for name in names}}


def study_name(study: Mapping[str, Any]) -> str | None:
    """What a study is called, or what its data are."""
    named = (("name",), ("study", "name"), ("data", "source", "name"), ("data", "name"))
    return next((name for path in named if isinstance(name := dig(study, path), str)), None)


def dig(row: Mapping[str, Any], path: Sequence[str]) -> Any:
    """What lies at the end of a path of keys, or None where the path breaks off."""
    value: Any = row
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
