"""A run folder: study.json, ledger.db, log.jsonl, checkpoint.safetensors while it runs; result.json at the end."""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sordino._version import __version__
from sordino.engine.checkpoint import Checkpoint, load_checkpoint, save_checkpoint, write_atomic
from sordino.errors import BadInput
from sordino.methods import Plan, noises_of
from sordino.study.result import save_run, to_json


def planned_noises(path: Path) -> list[list[list[float]]] | None:
    """The noise multipliers of the run in this folder, fixed before it started; None where there is no run."""
    about = path / "study.json"
    return json.loads(about.read_text())["noises"] if about.exists() else None


@dataclass(frozen=True)
class Folder:
    """One run's files."""

    path: Path
    run: str

    @classmethod
    def open(
        cls, path: Path, study: dict[str, Any], plan: Plan, seed: int, resume: bool, run: str | None = None
    ) -> Folder:
        """A new run folder, or with ``resume`` the one that an interrupted run left; ``run`` names a new run."""
        about = path / "study.json"
        if about.exists():
            if not resume:
                raise BadInput(f"{path} already holds a run: use --resume to go on with it, or choose another folder")
            kept = json.loads(about.read_text())
            changed = [key for key in study if study[key] != kept["study"].get(key)]
            if changed or kept["seed"] != seed:
                what = ", ".join(changed) or "seed"
                raise BadInput(f"{path} holds a run with another {what}: resume with the same study, or start afresh")
            return cls(path, kept["run"])
        run = run or uuid.uuid4().hex
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"cannot make the run folder {path}: {error.strerror}") from None
        about_run = {"sordino": __version__, "run": run, "seed": seed, "noises": noises_of(plan)}
        body = {**about_run, "study": study}
        write_atomic(about, to_json(body, indent=1).encode())
        return cls(path, run)

    @property
    def ledger(self) -> Path:
        """The run's own ledger."""
        return self.path / "ledger.db"

    @property
    def _log(self) -> Path:
        return self.path / "log.jsonl"

    @property
    def _checkpoint(self) -> Path:
        return self.path / "checkpoint.safetensors"

    def checkpoint(self, device: torch.device) -> Checkpoint | None:
        """The state to go on from, or None for a run that has not finished a round."""
        if not self._checkpoint.exists():
            self._log.unlink(missing_ok=True)
            return None
        state = load_checkpoint(self._checkpoint, device)
        lines = self._log.read_text().splitlines()[: state.round]
        write_atomic(self._log, "".join(line + "\n" for line in lines).encode())
        state.history = [json.loads(line) for line in lines]
        return state

    def keep(self, state: Checkpoint) -> None:
        """Log the last round and write the checkpoint. The log line goes first: a crash between is cut on resume."""
        try:
            with open(self._log, "a") as log:
                log.write(to_json(state.history[-1]) + "\n")
                log.flush()
                os.fsync(log.fileno())
        except OSError as error:
            raise BadInput(f"cannot write {self._log}: {error.strerror}; free some space, then --resume") from error
        save_checkpoint(self._checkpoint, replace(state, history=[]))

    def finish(self, result: dict[str, Any], weights: Tensor) -> None:
        """Write result.json and the model."""
        save_run(self.path / "model.safetensors", result, weights)
        write_atomic(self.path / "result.json", to_json(result, indent=1).encode())
