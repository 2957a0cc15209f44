"""A run folder: study.json, ledger.db, log.jsonl, checkpoint.safetensors while it runs; result.json at the end."""

from __future__ import annotations

import json
import logging
import os
import platform
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sordino._version import __version__
from sordino.engine.checkpoint import Checkpoint, load_checkpoint, save_checkpoint, write_atomic
from sordino.errors import BadInput
from sordino.methods import Plan, noises_of
from sordino.methods.identity import identities
from sordino.privacy.ledger import Ledger
from sordino.study.result import save_run, to_json

log = logging.getLogger("sordino.study")

PYTHON = ".".join(platform.python_version_tuple()[:2])

SHOWN = 5
"""So many differences between two studies are named."""


def planned_noises(path: Path) -> list[list[list[float]]] | None:
    """The noise multipliers of the run in this folder, fixed before it started; None where there is no run."""
    about = path / "study.json"
    return _kept(about)["noises"] if about.exists() else None


def read_state(path: Path, device: torch.device) -> tuple[Checkpoint, list[str]]:
    """The state that a run left in its folder, and the lines of its log up to that round. Nothing is changed."""
    state = load_checkpoint(path / "checkpoint.safetensors", device)
    lines = (path / "log.jsonl").read_text().splitlines()[: state.round]
    state.history = [json.loads(line) for line in lines]
    return state, lines


def check_kind(path: Path, kind: str) -> None:
    """Refuse a folder that holds something else than a ``run``, ``sweep``, ``comparison`` or ``deployed run``."""
    if (path / "sweep.json").exists():
        found = "sweep"
    elif (path / "serve.json").exists():
        found = "deployed run"
    elif (path / "study.json").exists():
        found = "run"
    elif next(path.glob("*/seed-*/study.json"), None) is not None:
        found = "comparison"
    else:
        return
    if found != kind:
        raise BadInput(f"{path} holds a {found}, and this is a {kind}: choose another folder (--out)")


def _kept(about: Path) -> dict[str, Any]:
    """What study.json says of the run in its folder."""
    try:
        kept: dict[str, Any] = json.loads(about.read_text())
        if {"run", "seed", "noises", "study"} <= kept.keys():
            return kept
    except (OSError, ValueError):
        pass
    raise BadInput(f"{about} cannot be read as the study of a run: choose another folder, or put the file back")


def check_same(path: Path, study: dict[str, Any], seed: int, rules: Mapping[str, str], remedy: str) -> None:
    """Refuse another study than the one whose run, finished or not, is in this folder; ``rules``: its identities.

    Folders of other versions, of sordino or of Python, say nothing of the rules that can be compared.
    """
    kept = _kept(path / "study.json")
    changed = [] if kept["seed"] == seed else [_changed("study.seed", kept["seed"], seed)]
    for key in study:
        changed += differences(kept["study"].get(key), study[key], key)
    if changed:
        more = "" if len(changed) <= SHOWN else f" and {len(changed) - SHOWN} more"
        raise BadInput(f"{path} holds a run with another {', '.join(changed[:SHOWN])}{more}: {remedy}")
    before = kept.get("rules", {})
    if before.get("python") == PYTHON and kept["sordino"] == __version__:
        for part, one in rules.items():
            if before.get(part, one) != one:
                raise BadInput(
                    f"{path} holds a run with another {part}, of the same name but with other code: {remedy}"
                )
    elif before:
        log.warning("%s was made by another version: whether its rules do the same as these cannot be told", path)


def differences(before: Any, now: Any, key: str) -> list[str]:
    """Which keys of two tables differ, each with its value before and now where that is short."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [one for one in {**before, **now} if before.get(one) != now.get(one)]
        return [text for one in keys for text in differences(before.get(one), now.get(one), f"{key}.{one}")]
    return [] if before == now else [_changed(key, before, now)]


def _changed(key: str, before: Any, now: Any) -> str:
    values = f" ({to_json(before)}, not {to_json(now)})"
    return key + (values if len(values) <= 60 else "")


@dataclass(frozen=True)
class Folder:
    """One run's files. ``shared``: a ledger outside the folder that the run pays from, together with other runs."""

    path: Path
    run: str
    shared: Path | None = None

    @classmethod
    def open(
        cls,
        path: Path,
        study: dict[str, Any],
        plan: Plan,
        seed: int,
        resume: bool,
        ledger: Path | None = None,
        deployed: str | None = None,
        rules: Mapping[str, str] | None = None,
    ) -> Folder:
        """A new run folder, or with ``resume`` the one that an interrupted run left.

        A run remembers its ``ledger``: the one it began with is the one it goes on with. ``deployed`` names a run whose
        sites keep ledgers of their own: it has none here. ``rules``: what the run's rules are, beyond their names;
        default: the method's.
        """
        about, rules = path / "study.json", identities(plan.method) if rules is None else rules
        check_kind(path, "deployed run" if deployed else "run")
        if about.exists():
            if not resume:
                raise BadInput(f"{path} already holds a run: use --resume to go on with it, or choose another folder")
            check_same(path, study, seed, rules, "resume with the same study, or start afresh")
            kept = _kept(about)
            return cls(path, kept["run"], None if deployed else _settled_ledger(path, kept, ledger))
        run = deployed or uuid.uuid4().hex
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"cannot make the run folder {path}: {error.strerror}") from None
        shared = None if ledger is None else ledger.resolve()
        about_run = {"sordino": __version__, "run": run, "seed": seed, "noises": noises_of(plan)}
        body = {**about_run, "ledger": None if shared is None else str(shared)}
        body |= {"rules": {"python": PYTHON, **rules}, "study": study}
        write_atomic(about, to_json(body, indent=1).encode())
        return cls(path, run, shared)

    @property
    def ledger(self) -> Path:
        """What the run pays from: its own ledger, or the shared one that it was begun with."""
        return self.shared or self.path / "ledger.db"

    @property
    def begun(self) -> bool:
        """Whether a round was finished here, and so paid for."""
        return self._checkpoint.exists()

    def check_paid(self, book: Ledger) -> None:
        """Refuse to go on with a ledger that does not know the rounds which were paid for."""
        if not self.begun:
            return
        runs = {standing.plan.run for account in book.accounts() for standing in book.standings(account.client)}
        if self.run not in runs:
            raise BadInput(
                f"{self.ledger} knows nothing of the run in {self.path}, whose rounds were paid for: name the ledger "
                "that it was begun with (--ledger), or start afresh"
            )

    @property
    def _log(self) -> Path:
        return self.path / "log.jsonl"

    @property
    def _checkpoint(self) -> Path:
        return self.path / "checkpoint.safetensors"

    def checkpoint(self, device: torch.device) -> Checkpoint | None:
        """The state to go on from, or None for a run that has not finished a round; the log is cut to fit it."""
        if not self.begun:
            self._log.unlink(missing_ok=True)
            return None
        state, lines = read_state(self.path, device)
        write_atomic(self._log, "".join(line + "\n" for line in lines).encode())
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

    def undo(self) -> None:
        """Take back a folder whose run was refused before it began, so that the same command can be given again."""
        if not self.begun:
            (self.path / "study.json").unlink(missing_ok=True)


def _settled_ledger(path: Path, kept: dict[str, Any], given: Path | None) -> Path | None:
    """The shared ledger of a run that goes on; None: its own. Another one than it was begun with is refused."""
    own = (path / "ledger.db").resolve()
    begun = (path / "checkpoint.safetensors").exists()
    if "ledger" in kept:
        recorded = Path(kept["ledger"]) if kept["ledger"] else own
    elif begun and not own.exists():  # an older version, which did not write down where a shared ledger was
        if given is None:
            raise BadInput(f"{path} holds a run that pays from a ledger elsewhere: name it with --ledger")
        recorded = given.resolve()
    else:
        recorded = own
    if given is not None and given.resolve() != recorded and recorded.exists():
        raise BadInput(
            f"{path} holds a run that pays from {recorded}, not from {given}: leave out --ledger, or start afresh"
        )
    chosen = recorded if given is None else given.resolve()
    if begun and not chosen.exists():
        raise BadInput(
            f"the ledger {chosen} of the run in {path} is gone, and with it what was spent: put it back, name where it "
            "is now (--ledger), or start afresh"
        )
    return None if chosen == own else chosen
