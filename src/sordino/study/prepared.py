"""A run before it begins, checked and put together, and after it has ended."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from sordino import models
from sordino.client import gradients
from sordino.data import Federation
from sordino.data.partitions import Index
from sordino.engine.mapped import pages_of
from sordino.errors import BadInput
from sordino.methods import Plan
from sordino.methods.identity import identities, identity
from sordino.study.result import save_run, to_json

if TYPE_CHECKING:
    from sordino.study.predict import Predictions


@dataclass
class Run:
    """A finished (or interrupted) run: the result that ``result.json`` holds, and the trained model."""

    result: dict[str, Any]
    weights: Tensor
    template: nn.Module | None
    personal: Tensor | None = None
    """Clients' own models, a row each in the order of ``privacy``, where the method gives them one."""

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
        return self._loaded(self._template(), self.weights)

    def model_of(self, client: str) -> nn.Module:
        """A client's own model, where the method gives every client one (``result["personal"]``)."""
        if self.personal is None:
            raise BadInput(
                "this run has no models of clients' own: its method has none, sites keep them (deployed), or they "
                "are too large to be kept with it (then the run's checkpoint has them); the common one is run.model"
            )
        names = [one["client"] for one in self.privacy]
        if client not in names:
            raise BadInput(
                f"client {client!r} is unknown: this run has {', '.join(names[:10])}{', …' * (len(names) > 10)}"
            )
        return self._loaded(copy.deepcopy(self._template()), self.personal[names.index(client)])

    def _template(self) -> nn.Module:
        if self.template is None:
            raise BadInput(
                "this run was saved with a model of your own: build it, and give it to sd.load(path, model=…)"
            )
        return self.template

    def _loaded(self, module: nn.Module, weights: Tensor) -> nn.Module:
        gradients.build(module, self.result["study"]["loss"], kind="exact").load(module, weights)
        return module.eval()

    def predict(
        self,
        frame: Any,
        client: str | None = None,
        threshold: float | str | None = None,
        id_column: str | None = None,
    ) -> Predictions:
        """What the model says of records without targets, one prediction each, in their order.

        Parameters
        ----------
        frame: a path (CSV, Parquet, NPZ), a pandas or polars data frame, a pyarrow table, a dict of columns, or an
            array. Columns are encoded by the schema that the model was trained with.
        client: whose own model to ask, where the method gives every client one; by default the common one.
        threshold: of two classes, the P from which on the second is answered: a number, or ``"chosen"`` for the one
            that paid evaluation chose; by default the likelier class is.
        id_column: a column of ``frame`` that rows are told by, in place of their numbers.
        """
        from sordino.study.predict import predict

        return predict(self, frame, client, threshold, id_column)

    def export(self, path: str | os.PathLike[str], format: str = "torch", client: str | None = None) -> None:
        """Write the model for programs without sordino: ``"torch"`` (torch.export's ``.pt2``) or ``"onnx"``.

        It takes encoded records and gives what ``predict`` gives; the schema lies in the file. ``client``: whose own.
        """
        from sordino.study.export import export

        export(self, Path(path), format, client)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write result and weights into one file; ``sd.load`` reads it."""
        save_run(Path(path), self.result, self.weights, self.personal)

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
    judge: gradients.Engine | None = None
    """The engine of the model itself, where ``engine`` has another module in its place (``Local.trains``)."""
    graded_loss: str = ""
    """The loss of that other module."""
    held: tuple[Index, ...] | None = None
    """Each client's held-out records, which training does not see; None where none are held out."""
    first_keys: bool = False
    """Whether the run was begun by sordino 0.1, which knew parts by their names only."""
    baselines: Callable[[], dict[str, Any]] | None = None
    """Trains what the run is compared with, once it has ended (``study.baselines``); None where nobody asked."""
    deterministic: bool = True
    """Whether a GPU is to repeat the run bit for bit (``engine.devices``). No part of what the run is: draws stay."""

    @property
    def key(self) -> str:
        """What the run's random streams are keyed by: the seed, everything that shapes a release, and what parts are.

        Parts count by their factories and options, or by their code, so that two of one name draw differently. How
        often somebody looks (``training.evaluate``) shapes nothing.
        """
        if self.first_keys:
            return _hash([self.study, self.seed])
        training = {name: value for name, value in self.study["training"].items() if name != "evaluate"}
        return _hash([{**self.study, "training": training}, self.seed, self.rules])

    @cached_property
    def rules(self) -> dict[str, str]:
        """What the method's parts and the model are, beyond their names."""
        return {**identities(self.plan.method), "model": identity([repr(self.template), type(self.template).forward])}

    @property
    def kept_as(self) -> str:
        """What a run's state is found by after a crash: its study, seed and rules, looks and all."""
        return _hash([self.study, self.seed, self.rules])

    @cached_property
    def kinship(self) -> tuple[str, ...]:
        """What runs of one stack have in common: the network with what it holds fixed, records' shape, loss, copies."""
        told = [*(self.study[key] for key in ("model", "loss", "precision")), repr(self.trained), self.graded_loss]
        told += [self.study["training"].get("augment"), self.clients.unit_records]
        return json.dumps(told), self.rules["model"], models.digest(self.template)

    @property
    def stackable(self) -> bool:
        """Whether the run can share a stack: not with one record at a time, nor with records that stay on disk."""
        return not self.plan.training.exact_noise and pages_of(self.clients.x) is None


def _hash(told: list[Any]) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()
