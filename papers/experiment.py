"""An experiment as data: its cells, what is read from them, the published numbers, and what differs from the paper."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from papers.make import Workshop
    from papers.runner import Silent
    from papers.store import Store

Place = tuple[str, str, str]
"""Block, row and column of a number in a table."""


@dataclass(frozen=True)
class Cell:
    """One training run: where its number stands, and the keywords of ``sd.train`` that make it.

    Attributes
    ----------
    data: ``name`` and ``options`` of ``sd.data.load``, and the keywords of ``Dataset.partition`` (``kind`` …).
    budgets: the keywords of ``Federation.with_budgets``; None for methods that are not private.
    parts: what is put in place of the method's parts, as ``[method]`` of a study does.
    training: keys of ``Training``.
    search: settings the paper does not give, with the values to begin with: ``{"lr": (0.1, 1.0), "clip.weight": (0.1,
        0.5)}``. A name with a dot is an option of a part; ``step`` is lr·clip, the longest step that a record can make.
        How they are searched: ``papers.search``.
    tune_at: what the searching runs put over data, model_options, budgets, parts and training, where one setting
        chooses for several;
        None takes an entry away.
    chosen: the values of such settings that this run uses.
    trust: the keys of ``[trust]`` of a study, where noise is shared.
    validation: whether the run is judged by records that no table reports (``papers.validation``): those that choose.
    """

    block: str
    row: str
    column: str
    data: Mapping[str, Any]
    model: str
    method: str
    training: Mapping[str, Any]
    budgets: Mapping[str, Any] | None = None
    parts: Mapping[str, Any] = field(default_factory=dict)
    model_options: Mapping[str, Any] = field(default_factory=dict)
    search: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    tune_at: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    chosen: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    trust: Mapping[str, Any] | None = None
    validation: bool = False

    @property
    def place(self) -> Place:
        """Where its number stands."""
        return (self.block, self.row, self.column)

    @property
    def recipe(self) -> dict[str, Any]:
        """Everything that shapes the run, and nothing else: not where its number stands, nor what it is for."""
        labels = ("block", "row", "column", "search", "tune_at", "chosen")
        told = {key: value for key, value in asdict(self.settled).items() if key not in labels}
        return {key: value for key, value in told.items() if key not in ("trust", "validation") or value}

    @property
    def id(self) -> str:
        """A name for files, the same for the same recipe in every experiment."""
        body = json.dumps(self.recipe, sort_keys=True, default=str)
        words = re.sub(r"[^a-z0-9]+", "-", f"{self.data['name']} {self.method} seed {self.seed}".lower())
        return f"{words}-{hashlib.sha256(body.encode()).hexdigest()[:12]}"

    @property
    def settled(self) -> Cell:
        """The same run with the chosen values put where they belong."""
        cell = self
        for key in sorted(self.chosen, key=lambda one: one == "step"):  # which needs to know the clip
            cell = cell._with(key, self.chosen[key])
        return replace(cell, chosen={}) if self.chosen else cell

    def _with(self, key: str, value: Any) -> Cell:
        part, dot, option = key.partition(".")
        if key == "step":
            return replace(self, training={**self.training, "lr": value / self.training["clip"]})
        if not dot:
            return replace(self, training={**self.training, key: value})
        before = self.parts.get(part, {})
        options = {"name": before} if isinstance(before, str) else dict(before)
        return replace(self, parts={**self.parts, part: {**options, option: value}})

    @property
    def reference(self) -> Cell:
        """The same run in the setting where values are searched."""
        over = {
            key: {k: v for k, v in {**(getattr(self, key) or {}), **values}.items() if v is not None}
            for key, values in self.tune_at.items()
        }
        return replace(self, **over) if over else self  # type: ignore[arg-type]

    def grid(self) -> Iterator[dict[str, Any]]:
        """Every combination of the searched values."""
        for values in itertools.product(*self.search.values()):
            yield dict(zip(self.search, values))


@dataclass(frozen=True)
class Measure:
    """A number of a finished run: ``key`` in its figures, shown times ``scale`` in the format ``form``."""

    key: str
    label: str
    scale: float = 1.0
    form: str = ".3g"
    more_is_better: bool = False

    def show(self, value: float | None) -> str:
        """The number as a table shows it; ``value`` is scaled already."""
        return "–" if value is None else f"{value:{self.form}}"


ACCURACY = Measure("accuracy", "accuracy %, mean over clients", 100.0, ".1f", True)
RECORDS = Measure("record_accuracy", "accuracy %, all clients' test records", 100.0, ".1f", True)
WORST = Measure("worst_accuracy", "accuracy %, worst client", 100.0, ".1f", True)
CENTRAL = Measure("central_accuracy", "test accuracy %", 100.0, ".1f", True)
PSI = Measure("psi", "Ψ", 1.0, ".2g")
TRAIN_LOSS = Measure("train_loss", "training loss", 1.0, ".3g")


@dataclass(frozen=True)
class Quick:
    """How an experiment is scaled down to under two minutes on two cores.

    Attributes
    ----------
    blocks, rows, columns: which of them stay; None for all.
    data, training, budgets: settings put over every cell's.
    parts: by method, parts put in place of its own.
    grid: how many values of each searched setting stay; with one there is nothing to search.
    """

    blocks: tuple[str, ...] | None = None
    rows: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    budgets: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    grid: int = 1

    def scaled(self, cells: Sequence[Cell]) -> tuple[Cell, ...]:
        """The cells that stay, made smaller."""
        kept = ((self.blocks, "block"), (self.rows, "row"), (self.columns, "column"))
        chosen = [c for c in cells if all(names is None or getattr(c, key) in names for names, key in kept)]
        return tuple(self._smaller(cell) for cell in chosen)

    def _smaller(self, cell: Cell) -> Cell:
        options = {**cell.data.get("options", {}), **self.data.get("options", {})}
        data = {**cell.data, **self.data, "options": options}
        budgets = None if cell.budgets is None else {**cell.budgets, **self.budgets}
        training = {**cell.training, **self.training}
        parts = {**cell.parts, **self.parts.get(cell.method, {})}
        search = {k: tuple(values)[: self.grid] for k, values in cell.search.items() if k not in self.training}
        small = {"data": self.data, "budgets": self.budgets, "training": self.training}
        tune_at = {key: {**values, **small.get(key, {})} for key, values in cell.tune_at.items()}
        chosen: dict[str, Any] = {}
        if self.grid == 1:
            search, chosen = {}, next(replace(cell, search=search).grid())
        changed = replace(cell, data=data, budgets=budgets, training=training, parts=parts)
        return replace(changed, search=search, chosen={**cell.chosen, **chosen}, tune_at=tune_at)


@dataclass(frozen=True)
class Entry:
    """Numbers at one place of a table, by the key of their measure; scaled as shown."""

    place: Place
    values: Mapping[str, float | None]
    deviations: Mapping[str, float | None] = field(default_factory=dict)
    runs: int = 1
    chosen: Mapping[str, Any] = field(default_factory=dict)
    seeds: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """By measure, every seed's own number: what differences are paired by."""


Conclude = Callable[[Mapping[Place, Entry], Mapping[Place, tuple[float | None, ...]]], list[str]]
"""What the measured and the published numbers say together, in sentences."""


@dataclass(frozen=True)
class Exploring:
    """What an experiment is told that finds its own runs: where it may keep files, what it works with, how much."""

    folder: Path
    workshop: Workshop
    watch: Silent
    quick: bool
    seeds: int | None
    processes: int


@dataclass(frozen=True)
class Experiment:
    """A table or figure of a paper.

    Attributes
    ----------
    name, title: ``paper/tableN`` or ``paper/figureN``, and what it shows.
    cost: what it takes at full size; times are estimates until a page in docs/results has measured them.
    measures: the numbers that are read from every run.
    choose: what decides where values are searched, of records that no table reports; default the first measure.
    published: numbers of the paper by place, one for each measure, as shown; None where the paper has none.
    cells: the training runs, for one seed.
    features: whether fixed features of records are computed once and kept in files, for all runs and processes.
    explore: in the place of ``cells``, the runs of all seeds where they follow from a search of its own; it keeps what
        it found in files.
    gather: called with folder, runs, store and what the page is about: what results.json has beside.
    lines: lines of Markdown in the place of plain grids, made of results.json and nothing else.
    compute: for what needs no training: called with whether it is to be quick, gives the entries.
    seeds: how many seeds the table takes by default; the blocks in ``once``, which no paper has, take one.
    screened: values are screened at one in so many of the rounds (``papers.search``).
    claim: two rows, the first above the second according to the paper: a quick version says whether that shows.
    differs: what differs from the paper, and why.
    formerly: the same for pages in docs/results whose runs were made before values were searched as they are now.
    conclude: sentences made of the numbers.
    axes: what rows and columns are.
    """

    name: str
    title: str
    cost: str
    measures: tuple[Measure, ...]
    published: Mapping[Place, tuple[float | None, ...]]
    differs: tuple[str, ...]
    cells: Callable[[], tuple[Cell, ...]] = tuple
    compute: Callable[[bool], list[Entry]] | None = None
    choose: Measure | None = None
    seeds: int = 1
    once: tuple[str, ...] = ()
    screened: int = 4
    formerly: tuple[str, ...] = ()
    claim: tuple[str, str] | None = None
    quick: Quick = Quick()
    conclude: Conclude | None = None
    axes: tuple[str, str] = ("method", "setting")
    features: bool = False
    explore: Callable[[Exploring], tuple[Cell, ...]] | None = None
    gather: Callable[[Path, Sequence[Cell], Store, Mapping[str, Any]], dict[str, Any]] | None = None
    lines: Callable[[Mapping[str, Any]], list[str]] | None = None

    def planned(self, quick: bool = False, seeds: int | None = None) -> tuple[Cell, ...]:
        """The runs whose numbers the table shows, seed by seed; searched values are still open."""
        base = self.quick.scaled(self.cells()) if quick else self.cells()
        count = (1 if quick else self.seeds) if seeds is None else seeds
        return tuple(
            replace(cell, seed=seed)
            for seed in range(count)
            for cell in base
            if seed == 0 or cell.block not in self.once
        )
