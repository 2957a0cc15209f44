"""What a finished model says of records that nobody has labelled: ``run.predict`` and ``sordino predict``.

Records are encoded by the schema that the model was trained with, which its run holds. A class is answered by its name,
with P(k) = exp(o_k) / Σ_j exp(o_j) of the outputs o; a number in the target's own unit, inside its declared range.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sordino.data.schema import Schema, known_schema
from sordino.data.sources import SOURCES
from sordino.data.unlabelled import read_unlabelled
from sordino.errors import BadInput

if TYPE_CHECKING:
    from sordino.study.prepared import Run

PIECE = 1024
"""Records that go through the model at once."""

CHOSEN = "chosen"
"""The word for the edge between two classes that was chosen by paid evaluation (``result["threshold"]``)."""

NO_OUTPUT = "the model's output for it is no finite number"


@dataclass(frozen=True)
class Predictions:
    """One prediction for every record, in order; where there is none, the reason.

    Attributes
    ----------
    classes: the classes' names, or None where a number is predicted.
    prediction: the name of a class, or a number in the target's unit; None and NaN where there is none.
    probabilities: P of every class, ``[records, classes]``, rows of NaN where there is none; None for numbers.
    reasons: why a record has no prediction; None where it has one.
    ids: what the caller tells records by, beside their number from 1 (of a file: the first after the header).
    """

    classes: tuple[str, ...] | None
    prediction: npt.NDArray[Any]
    probabilities: npt.NDArray[np.float64] | None
    reasons: tuple[str | None, ...]
    ids: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.reasons)

    @property
    def missing(self) -> int:
        """How many records have no prediction."""
        return sum(one is not None for one in self.reasons)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns of ``rows``."""
        who = ("row",) if self.ids is None else ("row", "id")
        return (*who, "prediction", *(f"P({name})" for name in self.classes or ()), "reason")

    def rows(self) -> Iterator[dict[str, Any]]:
        """Record by record: row and id, prediction, P of every class, reason; None where there is none.

        A pandas data frame is ``pandas.DataFrame(found.rows())``.
        """
        for place, reason in enumerate(self.reasons):
            who = [place + 1] if self.ids is None else [place + 1, self.ids[place]]
            told = [None] * (1 + len(self.classes or ()))
            if reason is None:
                told = [*self.prediction[place : place + 1].tolist()]
                told += [] if self.probabilities is None else self.probabilities[place].tolist()
            yield dict(zip(self.columns, [*who, *told, reason]))

    def csv(self) -> str:
        """``rows`` as the text of a CSV file: a header, seven digits, an empty cell for what is not there."""
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        writer.writeheader()
        for row in self.rows():
            writer.writerow({key: f"{one:.7g}" if isinstance(one, float) else one for key, one in row.items()})
        return text.getvalue()


def predict(
    run: Run, frame: Any, client: str | None = None, threshold: float | str | None = None, id_column: str | None = None
) -> Predictions:
    """Predict with a finished run; the arguments are those of ``Run.predict``."""
    schema, shape = schema_of(run.result), run.result["study"]["model"]["shape"]
    edge = edge_of(run.result, threshold)
    module = run.model if client is None else run.model_of(client)
    found = read_unlabelled(frame, schema, shape, id_column)
    outputs = outputs_of(module, torch.from_numpy(found.x), 1 if schema.classes is None else len(schema.classes))
    reasons = list(found.reasons)
    for place in np.flatnonzero(~np.isfinite(outputs).all(axis=1)).tolist():
        reasons[place] = reasons[place] or NO_OUTPUT
    there = np.array([one is None for one in reasons], dtype=bool)
    if schema.classes is None:
        values = in_own_unit(outputs[:, 0], schema)
        return Predictions(None, np.where(there, values, math.nan), None, tuple(reasons), found.ids)
    probabilities = np.where(there[:, None], softmax(outputs), math.nan)
    best = outputs.argmax(axis=1) if edge is None else (probabilities[:, 1] >= edge).astype(np.int64)
    names = np.array([*schema.classes, None], dtype=object)[np.where(there, best, -1)]
    return Predictions(schema.classes, names, probabilities, tuple(reasons), found.ids)


def outputs_of(module: nn.Module, x: Tensor, outputs: int) -> npt.NDArray[np.float64]:
    """A model's outputs for encoded records, ``[records, outputs]``, computed where the model is."""
    found, where = np.zeros((len(x), outputs)), next(module.parameters()).device
    with torch.no_grad():
        for start in range(0, len(x), PIECE):
            piece = x[start : start + PIECE]
            found[start : start + PIECE] = module(piece.to(where)).reshape(len(piece), outputs).cpu().numpy()
    return found


def softmax(outputs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """P of every class by record; the largest output is taken off first, so that nothing overflows."""
    with np.errstate(invalid="ignore"):  # outputs that are not finite have no P, and are told of
        grown = np.exp(outputs - outputs.max(axis=1, keepdims=True))
        shares: npt.NDArray[np.float64] = grown / grown.sum(axis=1, keepdims=True)
    return shares


def in_own_unit(outputs: npt.NDArray[np.float64], schema: Schema) -> npt.NDArray[np.float64]:
    """Predicted numbers as the target's column has them: the declared scaling undone."""
    return outputs if schema.interval is None else schema.interval.unscaled(outputs, schema.scale)


def edge_of(result: dict[str, Any], threshold: float | str | None) -> float | None:
    """The P(class 1) from which on class 1 is answered; None: the likelier class is."""
    if threshold is None:
        return None
    if result["study"]["model"]["classes"] != 2:
        raise BadInput(f"threshold {threshold!r} is an edge between two classes, and this model has other targets")
    if threshold == CHOSEN:
        if result.get("threshold") is None:
            raise BadInput(f"no threshold was {CHOSEN} in this run: that needs [evaluation]; give a number instead")
        return float(result["threshold"]["edge"])
    try:
        edge = float(threshold)
    except ValueError:
        edge = math.nan
    if not 0.0 <= edge <= 1.0:
        raise BadInput(f"threshold is {threshold!r}: use '{CHOSEN}', or a probability from 0 to 1")
    return edge


def schema_of(result: dict[str, Any]) -> Schema:
    """How records are made numbers for this run's model; of runs that do not hold it, what can be told all the same."""
    if result.get("records") is not None:
        return known_schema(result["records"]["schema"])
    about, model = result["study"].get("data", {}), result["study"]["model"]
    source = about.get("source", {})
    if "schema" in source:  # a folder of one's own, simulated: its schema was always part of the study
        return known_schema(source["schema"])
    if source.get("name") in SOURCES and SOURCES[source["name"]].schema:
        return known_schema(SOURCES[source["name"]].schema)
    if about.get("schema") is not None:
        raise BadInput(
            "this run was saved by an older sordino, without its schema (only a hash of it): records cannot be encoded "
            "as its training records were; train it again, or feed run.model with records that you encoded"
        )
    task = "regression" if model["classes"] is None else "classification"
    return known_schema({"task": task} | ({} if model["classes"] is None else {"classes": model["classes"]}))
