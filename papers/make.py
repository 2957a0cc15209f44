"""From a cell to a prepared run. Data sets, federations and calibrated noise are made once and shared."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from papers import packed
from papers.experiment import Cell
from papers.standin import load_or_stand_in
from papers.validation import REPORTED, validated
from sordino import methods, models
from sordino.data import Dataset, Federation
from sordino.data.partitions import generator
from sordino.methods import Method, noises_of, wants_auto
from sordino.privacy.trust import Trust
from sordino.study.folder import Planned
from sordino.study.prepared import Prepared
from sordino.study.run import prepare

Noises = list[list[list[float]]]

NOT_FOR_NOISE = ("lr", "server_lr", "cooldown", "pull", "clip", "evaluate")
"""Settings that noise multipliers do not depend on."""


@dataclass
class Workshop:
    """Makes runs of cells; ``stand_in`` lets small bundled data take the place of a data set that is not there.

    ``features`` is a folder where fixed features of records are kept, so that the runs of a data set share them in all
    processes; None lets every run compute its own, on its own device.
    """

    folder: str | Path | None = None
    stand_in: bool = False
    precision: str = "float32"
    features: Path | None = None
    replaced: dict[str, str] = field(default_factory=dict)
    """Data sets that something else stands in for, and what it is."""
    _sets: dict[str, Dataset] = field(default_factory=dict)
    _federations: dict[str, Federation] = field(default_factory=dict)
    _noises: dict[str, Noises] = field(default_factory=dict)
    _mapped: dict[str, Any] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        """Every process makes its own."""
        return Workshop, (self.folder, self.stand_in, self.precision, self.features)

    def prepared(self, cell: Cell) -> Prepared:
        """The run of a cell, ready to train."""
        cell = cell.settled
        clients = self.federation(cell)
        method = methods.get(cell.method, cell.parts)
        key = self._noise_key(cell, clients, method)
        known = self._noises.get(key)
        before = None if known is None else Planned(known)
        options = dict(cell.model_options)
        settings, trust = dict(cell.training), Trust.parse(cell.trust)
        ready = prepare(clients, cell.model, method, cell.seed, options, settings, before, self.precision, trust)
        if known is None:
            self._noises[key] = noises_of(ready.plan)
        return ready if self.features is None else self._with_features(ready, self.features)

    def _with_features(self, ready: Prepared, folder: Path) -> Prepared:
        """The same run whose records have been through the model's fixed modules already; draws stay what they were."""
        if ready.fixed is None:
            return ready
        made = [ready.clients.description["source"], ready.study["model"], models.digest(ready.template)]
        key = hashlib.sha256(_text(made).encode()).hexdigest()[:16]
        if key not in self._mapped:
            parts = {
                "": ready.clients.x,
                "-central": None if ready.clients.central is None else ready.clients.central[0],
            }
            made_of = partial(_kept, ready.fixed)
            found = [made_of(x, folder / f"{ready.clients.name}-{key}{part}.npy") for part, x in parts.items()]
            self._mapped = {key: found}  # those of one set at a time: they can be large
        x, central_x = self._mapped[key]
        central = None if central_x is None or ready.clients.central is None else (central_x, ready.clients.central[1])
        return replace(ready, clients=replace(ready.clients, x=x, central=central), fixed=None)

    def federation(self, cell: Cell) -> Federation:
        """The clients of a cell: its data set, dealt out, with budgets."""
        settings = dict(cell.data)
        key = _text([settings, cell.budgets, cell.seed, cell.validation])
        if key not in self._federations:
            chosen, by = self._set(settings.pop("name"), settings.pop("options", {})), settings.pop("by", None)
            dealt = chosen.partition(seed=cell.seed, **settings)
            if cell.validation:
                dealt = validated(dealt, [chosen.partition(seed=seed, **settings) for seed in REPORTED], cell.seed)
            dealt = dealt.by_record() if by == "record" else dealt
            if cell.budgets is not None:
                dealt = _promised(dealt, cell.budgets, cell.seed)
            self._federations[key] = dealt
        return self._federations[key]

    def _set(self, name: str, options: Mapping[str, Any]) -> Dataset:
        """Runs that use the same records must use the same arrays, or they could not share a stack."""
        key = _text([name, dict(options)])
        if key not in self._sets:
            if self.stand_in:
                self._sets[key], instead = load_or_stand_in(name, self.folder, options)
                if instead:
                    self.replaced[name] = instead
            else:
                self._sets[key] = packed.load(name, self.folder, options)
        return self._sets[key]

    def _noise_key(self, cell: Cell, clients: Federation, method: Method) -> str:
        """What noise multipliers depend on. Rules that draw clients also depend on the draw, so on seed and model."""
        training = {key: value for key, value in cell.training.items() if key not in NOT_FOR_NOISE}
        asked = [(one.question.what, one.batch, one.share, one.size, one.of) for one in method.ask]
        drawn = None
        if method.select.draws or wants_auto(method, cell.training):  # rounds may then follow from the model
            drawn = [method.select.name, cell.parts.get("select"), cell.seed, cell.model, dict(cell.model_options)]
        budgets = [(b.epsilon, b.delta, str(b.adjacency)) for b in clients.budgets or ()]
        levels = [[(one.name, one.budget.epsilon, one.records) for one in own] for own in clients.levels]
        who = [clients.sizes.tolist(), budgets, clients.batch_sizes, clients.names, *([levels] if levels else [])]
        how = [method.private, str(method.calibrate), asked, method.aggregate.sets_steps]
        shared = cell.trust and [cell.trust, method.aggregate.name, cell.parts.get("aggregate")]  # weights count then
        return hashlib.sha256(_text([who, how, training, drawn, shared]).encode()).hexdigest()


def _promised(clients: Federation, budgets: Mapping[str, Any], seed: int) -> Federation:
    """The clients with budgets; with ``levels`` that records have at random, by ``shares``."""
    if "levels" not in budgets:
        return clients.with_budgets(seed=seed, **budgets)
    names, shares = list(budgets["levels"]), budgets["shares"]
    words = generator(seed, "levels").choice(names, len(clients.x), p=[shares[one] for one in names])
    return clients.with_levels(budgets["levels"], words.tolist(), budgets["delta"])


def _kept(fixed: nn.Module, x: Any, path: Path) -> Any:
    """The features of some records, from their file where it is there; None of none."""
    if x is None:
        return None
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_suffix(f".{os.getpid()}.npy")
        np.save(half, models.apply_fixed(fixed, torch.from_numpy(x)).numpy())
        half.replace(path)
    return np.load(path)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else str(value)
