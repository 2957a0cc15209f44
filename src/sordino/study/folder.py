"""Where runs keep their state while they train, so that they go on where they were stopped.

A run folder holds one run: study.json, ledger.db, log.jsonl, checkpoint.safetensors while it runs; result.json at the
end. Copies hold one run or a whole stack, once a minute, with ledgers that nobody's budget depends on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sordino._version import __version__
from sordino.engine.checkpoint import Checkpoint, load_checkpoint, save_checkpoint, write_atomic
from sordino.errors import BadInput, SordinoError
from sordino.methods import Plan, noises_of
from sordino.methods.identity import identities
from sordino.privacy.ledger import Ledger
from sordino.study.result import json_pieces, save_run, to_json

log = logging.getLogger("sordino.study")

PYTHON = ".".join(platform.python_version_tuple()[:2])

EVERY = 60.0
"""Seconds of training that a crash may cost where copies are kept."""

Begun = tuple[str, Ledger, Checkpoint | None]
"""A run's name in its ledger, the ledger, open, and the state that it goes on from."""

SHOWN = 5
"""So many differences between two studies are named."""


class Planned(NamedTuple):
    """What a run settled before it started: its noise multipliers, and whether sordino 0.1 keyed its random streams.

    Noises of None are still to be calibrated.
    """

    noises: list[list[list[float]]] | None
    first_keys: bool = False


def planned(path: Path) -> Planned | None:
    """What the run in this folder settled before it started; None where there is no run."""
    if not (path / "study.json").exists():
        return None
    kept = _kept(path / "study.json")
    return Planned(kept["noises"], kept.get("sordino") == "0.1.0")


def read_state(path: Path, device: torch.device) -> tuple[Checkpoint, list[str]]:
    """The state that a run left in its folder, and the lines of its log up to that round. Nothing is changed."""
    state = load_checkpoint(path / "checkpoint.safetensors", device)
    lines = (path / "log.jsonl").read_text().splitlines()[: state.round]
    state.history = [json.loads(line) for line in lines]
    return state, lines


SURVEYED, EVALUATED, TUNED = "survey", "evaluation", "deployed tuning"
"""The kinds of folders in which sites were surveyed, judged a finished model, or trained several settings."""


def check_kind(path: Path, kind: str) -> None:
    """Refuse another kind of folder: ``run``, ``sweep``, ``tuning``, ``comparison``, ``deployed run``, ``survey``."""
    if (path / "sweep.json").exists():
        found = "sweep"
    elif (path / "tune.json").exists():
        found = "tuning"
    elif (path / "serve.json").exists():
        found = str(json.loads((path / "serve.json").read_text()).get("kind", "deployed run"))
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


class Keeper:
    """Where runs that train together keep their state; each is known by its place among them.

    This one keeps nothing: a run has a new name and pays from ``ledger``, or from a scratch one that ends with it.
    """

    retells = False
    """Whether callbacks also hear of the rounds that were done before the runs were stopped."""

    keeps = False
    """Whether states are kept, for which they have to be whole."""

    def __init__(self, ledger: Path | None = None) -> None:
        self.ledger = ledger

    def begin(self, place: int, private: bool, scratch: Path, device: torch.device) -> Begun:
        """A run's name, its open ledger, and the state that it goes on from (None for one that begins)."""
        return uuid.uuid4().hex, Ledger(self.ledger or scratch / f"{place}.db", durable=self.ledger is not None), None

    def keep(self, *states: Checkpoint) -> None:
        """A round is done: keep the states of all runs that were begun and not undone, in order."""

    def finish(self, result: dict[str, Any], weights: Tensor, place: int = 0, personal: Tensor | None = None) -> None:
        """A run is done and its ledger closed: keep its result."""

    def undo(self, place: int = 0) -> None:
        """A run was refused before it began: leave nothing of it behind."""

    def end(self, error: SordinoError | None = None) -> None:
        """All runs are done, or an error ended them."""


class Folder(Keeper):
    """One run's files: it keeps every round, and its ledger is durable.

    ``shared``: a ledger outside the folder that the run pays from, together with other runs. ``fresh``: the folder was
    made for this run.
    """

    keeps = True

    def __init__(self, path: Path, run: str, shared: Path | None = None, fresh: bool = False) -> None:
        super().__init__(shared or path / "ledger.db")
        self.path, self.run, self.fresh = path, run, fresh
        self._log, self._checkpoint = path / "log.jsonl", path / "checkpoint.safetensors"

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
        return cls(path, run, shared, fresh=True)

    @property
    def begun(self) -> bool:
        """Whether a round was finished here, and so paid for."""
        return self._checkpoint.exists()

    def begin(self, place: int, private: bool, scratch: Path, device: torch.device) -> Begun:
        """The run as its folder has it; a ledger that does not know the rounds which were paid for is refused."""
        try:
            book = Ledger(self.ledger or self.path / "ledger.db")
        except SordinoError:
            if self.fresh:
                self.undo()
            raise
        with ExitStack() as closing:
            closing.enter_context(book)
            if private and self.begun:
                runs = {standing.plan.run for account in book.accounts() for standing in book.standings(account.client)}
                if self.run not in runs:
                    raise BadInput(
                        f"{self.ledger} knows nothing of the run in {self.path}, whose rounds were paid for: name the "
                        "ledger that it was begun with (--ledger), or start afresh"
                    )
            state = self.checkpoint(device)
            closing.pop_all()
        return self.run, book, state

    def checkpoint(self, device: torch.device) -> Checkpoint | None:
        """The state to go on from, or None for a run that has not finished a round; the log is cut to fit it."""
        if not self.begun:
            self._log.unlink(missing_ok=True)
            return None
        state, lines = read_state(self.path, device)
        write_atomic(self._log, "".join(line + "\n" for line in lines).encode())
        return state

    def keep(self, *states: Checkpoint) -> None:
        """Log the last round and write the checkpoint. The log line goes first: a crash between is cut on resume."""
        (state,) = states
        try:
            with open(self._log, "a") as log:
                log.write(to_json(state.history[-1]) + "\n")
                log.flush()
                os.fsync(log.fileno())
        except OSError as error:
            raise BadInput(f"cannot write {self._log}: {error.strerror}; free some space, then --resume") from error
        save_checkpoint(self._checkpoint, replace(state, history=[]))

    def finish(self, result: dict[str, Any], weights: Tensor, place: int = 0, personal: Tensor | None = None) -> None:
        """Write result.json and the model."""
        save_run(self.path / "model.safetensors", result, weights, personal)
        write_atomic(self.path / "result.json", json_pieces(result))

    def undo(self, place: int = 0) -> None:
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


class Copies(Keeper):
    """A folder below ``below`` with the state and the ledger of every run of one stack, as of the same round.

    There are two copies, ``a`` and ``b``, written in turn; ``stack.json`` names the one that is whole. ``keys`` say
    what the runs are, in order: another stack finds nothing here. Where ``below`` is None nothing is kept. Each run of
    ``folders`` gets its result, model and ledger when the stack is done: whole, or not at all.
    """

    retells = keeps = True

    def __init__(self, below: Path | None, keys: Sequence[str], folders: Sequence[Folder] | None = None) -> None:
        super().__init__()
        self.keys, self.folders = list(keys), folders
        mark = hashlib.sha256("\n".join(keys).encode()).hexdigest()[:12]
        self.home = None if below is None else below / mark
        self.runs = [uuid.uuid4().hex for _ in keys] if folders is None else [one.run for one in folders]
        self.copy: Path | None = None
        """The copy that is whole."""
        about = self._about()
        if self.home and about and (folders is None or about["names"] == self.runs):
            self.runs, self.copy = about["names"], self.home / about["copy"]
        self.books: dict[int, Ledger] = {}
        self.scratch = Path()
        self.saved = time.monotonic()

    def _about(self) -> dict[str, Any]:
        try:
            about: dict[str, Any] = json.loads((self.home / "stack.json").read_text()) if self.home else {}
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return about if about.get("keys") == self.keys else {}

    def begin(self, place: int, private: bool, scratch: Path, device: torch.device) -> Begun:
        """The run as it was kept, or a new one."""
        self.scratch, state = scratch, None
        if self.copy:
            for part in self.copy.glob(f"{place}.db*"):  # the ledger, and the anchor that lies beside it
                shutil.copyfile(part, scratch / part.name)
            kept = self.copy / f"{place}.safetensors"
            state = load_checkpoint(kept, device) if kept.exists() else None
        self.books[place] = Ledger(scratch / f"{place}.db", durable=False)
        return self.runs[place], self.books[place], state

    def keep(self, *states: Checkpoint) -> None:
        """Once a minute, write the copy that is not whole. A crash meanwhile leaves what was kept before."""
        if self.home is None or time.monotonic() - self.saved < EVERY:
            return
        target = self.home / ("b" if self.copy and self.copy.name == "a" else "a")
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for (place, book), state in zip(self.books.items(), states):
            save_checkpoint(target / f"{place}.safetensors", state)
            book.copy(target / f"{place}.db")
        about = {"keys": self.keys, "names": self.runs, "copy": target.name}
        write_atomic(self.home / "stack.json", json.dumps(about).encode())
        self.copy, self.saved = target, time.monotonic()

    def finish(self, result: dict[str, Any], weights: Tensor, place: int = 0, personal: Tensor | None = None) -> None:
        """Put ledger, result and model into the run's folder, where it has one."""
        if self.folders is not None:
            for part in self.scratch.glob(f"{place}.db*"):
                shutil.move(part, self.folders[place].path / part.name.replace(f"{place}.db", "ledger.db"))
            self.folders[place].finish(result, weights, personal=personal)

    def undo(self, place: int = 0) -> None:
        """Leave the run out; its folder, where it has one, is taken back."""
        del self.books[place]
        if self.folders is not None:
            self.folders[place].undo()

    def end(self, error: SordinoError | None = None) -> None:
        """Forget the stack. After bad input it stays: a full disk may pass, other errors do not."""
        if self.home is not None and not isinstance(error, BadInput):
            shutil.rmtree(self.home, ignore_errors=True)
            with suppress(OSError):  # other stacks are kept beside it
                self.home.parent.rmdir()
