"""A run before it begins, checked and put together, and after it has ended."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from sordino.client import gradients
from sordino.data import Federation
from sordino.engine.mapped import pages_of
from sordino.errors import BadInput
from sordino.methods import Plan
from sordino.methods.identity import identities, identity
from sordino.study.result import save_run, to_json


@dataclass
class Run:
    """A finished (or interrupted) run: the result that ``result.json`` holds, and the trained model."""

    result: dict[str, Any]
    weights: Tensor
    template: nn.Module | None

    @property
    def privacy(self) -> list[dict[str, Any]]:
        """What every client budgeted and spent."""
        return list(self.result["privacy"])

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """What was seen in every round."""
        return list(self.result["rounds"])

    @property
    def model(self) -> nn.Module:
        """The trained model: the module that the run started from, with the weights that it ended with."""
        if self.template is None:
            raise BadInput("this run was saved with a model of your own: build it and load run.weights into it")
        engine = gradients.build(self.template, self.result["study"]["loss"], kind="exact")
        engine.load(self.template, self.weights)
        return self.template.eval()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write result and weights into one file; ``sd.load`` reads it."""
        save_run(Path(path), self.result, self.weights)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write the report of this run: one HTML file that works offline."""
        from sordino.study.report import write

        write([json.loads(to_json(self.result))], Path(path))
        return Path(path)


@dataclass(frozen=True)
class Prepared:
    """Arguments of ``train`` and ``plan``, checked and put together: what a session makes a run of."""

    clients: Federation
    template: nn.Module
    engine: gradients.Engine
    plan: Plan
    study: dict[str, Any]
    seed: int
    trained: nn.Module
    """The model from its first trained layer on, which is what ``engine`` has."""
    fixed: nn.Module | None = None
    """What the model does to a record before its first trained layer: ``engine`` takes it as done."""
    first_keys: bool = False
    """Whether the run was begun by sordino 0.1, which knew parts by their names only."""

    @property
    def key(self) -> str:
        """What the run's random streams are keyed by: the seed, everything that shapes a release, and what parts are.

        Parts count by their factories and options, or by their code, so that two of one name draw differently.
        """
        told = [self.study, self.seed] if self.first_keys else [self.study, self.seed, self.rules]
        return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()

    @cached_property
    def rules(self) -> dict[str, str]:
        """What the method's parts and the model are, beyond their names."""
        return {**identities(self.plan.method), "model": identity([repr(self.template), type(self.template).forward])}

    @property
    def kept_as(self) -> str:
        """What a run's state is found by after a crash: its key, and what its rules are."""
        return hashlib.sha256(json.dumps([self.key, self.rules], sort_keys=True).encode()).hexdigest()

    @cached_property
    def kinship(self) -> tuple[str, ...]:
        """What runs of one stack have in common: the network with what it holds fixed, records' shape, loss, copies."""
        held = hashlib.sha256()
        frozen = [(name, one) for name, one in self.template.named_parameters() if not one.requires_grad]
        for name, one in [*self.template.named_buffers(), *frozen]:
            held.update(name.encode() + np.ascontiguousarray(one.detach().cpu().numpy()).tobytes())
        told = [*(self.study[key] for key in ("model", "loss", "precision")), self.study["training"].get("augment")]
        return json.dumps(told), self.rules["model"], held.hexdigest()

    @property
    def stackable(self) -> bool:
        """Whether the run can share a stack: not with one record at a time, nor with records that stay on disk."""
        return not self.plan.training.exact_noise and pages_of(self.clients.x) is None
