"""A finished model for programs without sordino: torch.export's ``.pt2``, or ONNX. ``run.export`` and `sordino export`.

The program takes encoded records, float32 ``[records, …]`` or of texts int64 token ids, any number of them, and gives
what ``run.predict`` gives: P of every class, ``[records, classes]``, or numbers in the target's own unit,
``[records]``. The schema by which records are encoded and the classes' names lie in the file as JSON (``told``).
"""

from __future__ import annotations

import io
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sordino import models
from sordino.data.schema import Interval
from sordino.engine.checkpoint import write_atomic
from sordino.errors import BadInput
from sordino.study.predict import schema_of
from sordino.study.result import to_json

if TYPE_CHECKING:
    from sordino.study.prepared import Run

FORMATS = ("torch", "onnx")

KEY = "sordino"
"""Under this name an ONNX file holds what ``told`` says; a ``.pt2`` file holds it in an extra file ``sordino.json``."""


class Answer(nn.Module):
    """A model, and what is done with its outputs: P of every class, or the declared scaling of the target undone."""

    def __init__(self, module: nn.Module, classes: bool, interval: Interval | None, scale: str) -> None:
        super().__init__()
        self.module, self.classes, self.interval, self.scale = module, classes, interval, scale

    def forward(self, x: Tensor) -> Tensor:
        """P(k) = exp(o_k) / Σ_j exp(o_j) of the outputs o, or ``Interval.unscaled``."""
        outputs: Tensor = self.module(x)
        if self.classes:
            return outputs.softmax(-1)
        values = outputs.reshape(-1)
        if self.interval is None:
            return values
        low, width = self.interval.low, self.interval.high - self.interval.low
        unit = (values if self.scale == "unit" else (values + 1.0) / 2.0).clamp(0.0, 1.0)
        return low + (torch.expm1(unit * math.log1p(width)) if self.interval.log else unit * width)


def export(run: Run, path: Path, form: str, client: str | None) -> None:
    """Write a run's model to a file; the arguments are those of ``Run.export``."""
    if form not in FORMATS:
        raise BadInput(f"format {form!r} is unknown: use {' or '.join(FORMATS)}")
    schema, about = schema_of(run.result), run.result["study"]["model"]
    module = run.model if client is None else run.model_of(client)
    answer = Answer(module.cpu(), schema.classes is not None, schema.interval, schema.scale).eval()
    example = torch.zeros((2, *about["shape"]), dtype=models.dtype_of(about.get("tokens")))
    many = {"x": {0: torch.export.Dim("records")}}
    with torch.no_grad(), _quiet():
        try:
            program = torch.export.export(answer, (example,), dynamic_shapes=many)
        except Exception as error:  # a model of one's own may do anything
            why = str(error).strip().splitlines()[0]
            raise BadInput(f"torch cannot make a program for any number of records of this model: {why}") from error
        content = _torch(program, told(run)) if form == "torch" else _onnx(program, told(run))
    write_atomic(path, content)


def told(run: Run) -> str:
    """What a reader of the file needs beside the program, as JSON: schema, classes, shape, whether it is private."""
    schema, result = schema_of(run.result), run.result
    about = {
        "records": result["records"],
        "classes": None if schema.classes is None else list(schema.classes),
        "features": list(schema.features),
        "shape": result["study"]["model"]["shape"],
        "private": result["private"],
        "checksum": result["checksum"],
        "sordino": result["versions"].get("sordino"),
    }
    return to_json(about)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch says to itself on the way: packages that it could use, names that will change."""
    said = logging.getLogger("torch.onnx")
    before = said.level
    said.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        said.setLevel(before)


def _torch(program: torch.export.ExportedProgram, about: str) -> bytes:
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={f"{KEY}.json": about})
    return file.getvalue()


def _onnx(program: torch.export.ExportedProgram, about: str) -> bytes:
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        raise BadInput("ONNX files need more packages: pip install 'sordino[onnx]'") from None
    names: dict[str, Any] = {"input_names": ["x"], "output_names": ["prediction"]}
    made = torch.onnx.export(program, dynamo=True, verbose=False, **names)
    if made is None:
        raise BadInput("torch made no ONNX program of this model: use format 'torch'")
    proto = made.model_proto
    proto.metadata_props.add(key=KEY, value=about)
    content: bytes = proto.SerializeToString()
    return content
