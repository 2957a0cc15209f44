"""What is told of a run while it trains, through callbacks: lines in the terminal, logs for TensorBoard or MLflow.

TensorBoard and MLflow are imported only where they are asked for. What is logged is the observer's record of a
simulation: metrics computed from clients' records, which no guarantee covers. A run that is not private carries NOT
PRIVATE there as a tag.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from sordino.errors import BadInput
from sordino.privacy.trust import Against
from sordino.study.file import Study
from sordino.study.result import to_json

REMEDY = "pip install 'sordino[track]'"
METRICS = (
    "accuracy",
    "loss",
    "psi",
    "worst_accuracy",
    "worst_decile",
    "best_decile",
    "accuracy_variance",
    "central_accuracy",
    "central_loss",
)
"""What an evaluated round tells of the model."""


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a round: its metrics, the ε spent (min, median, max), and its diagnostics by name."""
    found = {name: record.get(name) for name in (*METRICS, "clip")}
    for group in ("spent_epsilon", "diagnostics", "observer"):
        found |= {f"{group}/{name}": value for name, value in (record.get(group) or {}).items()}
    return {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    }


def settings(study: Study, private: bool) -> dict[str, str]:
    """The study as flat text, and whether it is private: what a tracker shows beside the curves."""

    def leaves(table: Mapping[str, Any], prefix: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for key, value in table.items():
            if isinstance(value, Mapping):
                found |= leaves(value, f"{prefix}{key}.")
            elif value is not None:
                found[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value)
        return found

    words = "private: every client within its own budget" if private else "NOT PRIVATE"
    if private and study.trust.chosen().shared:
        words += f", {Against(study.trust.colluders).words()}"
    return {"privacy": words} | leaves(study.table(), "")


class Tracker:
    """A callback that logs every round, and a context manager that closes the log. This one keeps nothing."""

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Log a round."""
        self.log(numbers(record), int(record["round"]))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers of a round."""

    def finish(self, result: Mapping[str, Any]) -> None:
        """Log the final figures of a run."""

    def close(self) -> None:
        """Write out what is still held, and close the log."""

    def replay(self, result: Mapping[str, Any]) -> None:
        """Log a finished run that was not watched while it trained."""
        for record in result["rounds"]:
            self(record)
        self.finish(result)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def tracker(kind: str | None, folder: Path, study: Study, name: str) -> Tracker:
    """A tracker for one run: event files in the run's folder, or a run of an MLflow experiment named like the study.

    None tracks nothing.
    """
    makers: dict[str, Any] = {"tensorboard": _TensorBoard, "mlflow": _MLflow}
    if kind is None:
        return Tracker()
    if kind not in makers:
        raise BadInput(f"track {kind!r} is unknown: use {' or '.join(makers)}")
    made: Tracker = makers[kind](folder, study, name, study.chosen_method().private)
    return made


def _final(result: Mapping[str, Any]) -> dict[str, float]:
    return {key: value for key, value in result["final"].items() if isinstance(value, float)}


class _TensorBoard(Tracker):
    """Event files under ``FOLDER/tensorboard``: ``tensorboard --logdir`` on any folder above shows them."""

    def __init__(self, folder: Path, study: Study, name: str, private: bool) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise BadInput(f"tracking with tensorboard needs the package: {REMEDY}") from None
        self.writer: Any = SummaryWriter(str(folder / "tensorboard"))
        for key, value in settings(study, private).items():
            self.writer.add_text(key, value)
        if not private:
            self.writer.add_text("NOT PRIVATE", f"{name}: trained without a privacy guarantee; do not release it.")

    def log(self, values: Mapping[str, float], step: int) -> None:
        for key, value in values.items():
            self.writer.add_scalar(key, value, step)

    def finish(self, result: Mapping[str, Any]) -> None:
        self.writer.add_text("final", f"```\n{to_json(_final(result), indent=1)}\n```")

    def close(self) -> None:
        self.writer.close()


class _MLflow(Tracker):
    """A run at ``MLFLOW_TRACKING_URI``; where that is not set, in files under ``mlruns`` beside the run's folder."""

    def __init__(self, folder: Path, study: Study, name: str, private: bool) -> None:
        try:
            import mlflow
        except ImportError:
            raise BadInput(f"tracking with mlflow needs the package: {REMEDY}") from None
        self.mlflow: Any = mlflow
        self.folder = folder
        if "MLFLOW_TRACKING_URI" not in os.environ:
            # Files are all that the slim package can write to; recent versions want to be told that this is meant.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            folder.parent.mkdir(parents=True, exist_ok=True)
            mlflow.set_tracking_uri(f"file:{(folder.parent / 'mlruns').resolve()}")
        mlflow.set_experiment(study.study.name)
        mlflow.start_run(run_name=name)
        told = settings(study, private)
        mlflow.set_tag("privacy", told.pop("privacy"))
        mlflow.log_params({key: value[:500] for key, value in told.items()})

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.mlflow.log_metrics(dict(values), step=step)

    def finish(self, result: Mapping[str, Any]) -> None:
        """Log the final figures, and result.json as an artifact."""
        found = {f"final/{key}": value for key, value in _final(result).items() if math.isfinite(value)}
        self.mlflow.log_metrics(found)
        if (self.folder / "result.json").exists():
            self.mlflow.log_artifact(str(self.folder / "result.json"))

    def close(self) -> None:
        self.mlflow.end_run()
