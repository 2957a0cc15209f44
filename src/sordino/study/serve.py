"""``sordino serve``: a SuperLink, the coordinator in it, and somebody who watches both."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sordino.engine.federation.certificates import Keys
from sordino.engine.federation.link import Link
from sordino.errors import SordinoError
from sordino.study.conduct import conduct, set_up
from sordino.study.file import Study
from sordino.study.finished import ask_sites
from sordino.study.folder import EVALUATED, SURVEYED, TUNED
from sordino.study.heartbeat import Heart
from sordino.study.prepared import Run
from sordino.study.survey.conduct import ask_survey
from sordino.study.survey.result import SURVEY
from sordino.study.tune_sites import check_search, tune_sites

log = logging.getLogger("sordino.serve")

START = 120.0  # seconds a coordinator has to take up its run
AWAY = 10.0  # seconds of absence, once it was there, that are a death
END = 10.0  # seconds a coordinator has to end after it wrote its result
RESTARTS = 5  # how often a coordinator that died within one round is started again before somebody should look

DONE = {SURVEYED: SURVEY, EVALUATED: "evaluation.json"}
"""The file that is there when all is done, of what is no training run."""

Watch = Callable[[dict[str, Any]], None]
"""Somebody who is told the record of every round."""


def coordinate(grid: Any, context: Any) -> None:
    """Flower's ServerApp: take up the run in the folder that the shell was given."""
    from sordino.engine.federation.grid import GridTransport
    from sordino.engine.federation.keyring import Keyring

    folder = Path(str(context.run_config["run"]))
    to_file = logging.FileHandler(folder / "coordinator.log")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger("sordino").addHandler(to_file)
    logging.getLogger("sordino").setLevel(logging.INFO)
    with _alone(folder, "coordinator", 20.0):
        try:
            about = json.loads((folder / "serve.json").read_text())
            sys.path.insert(0, about["path"])
            keyring = None if about["keys"] is None else Keyring(Keys(Path(about["keys"])), folder / "keys.json")
            others = {SURVEYED: ask_survey, EVALUATED: ask_sites, TUNED: tune_sites}
            conduct(folder, GridTransport(grid, keyring), others.get(about.get("kind")))
        except Exception:
            logging.getLogger("sordino.coordinator").exception("the coordinator stops")
            raise


@contextlib.contextmanager
def _alone(folder: Path, what: str, seconds: float) -> Iterator[None]:
    """One process at a time; the lock also tells others that it is alive, for it goes with the process."""
    until = time.monotonic() + seconds
    with open(folder / f"{what}.lock", "w") as lock:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() >= until:
                raise SordinoError(f"another process works on {folder}: let it, or end it first")
            time.sleep(0.2)
        yield


def is_locked(folder: Path, what: str) -> bool:
    """Whether somebody serves this folder (``serve``), or a ``coordinator`` works on it, right now."""
    with contextlib.suppress(FileNotFoundError), open(folder / f"{what}.lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def serve(
    study: Study,
    folder: Path,
    keys: Keys | None,
    host: str = "127.0.0.1",
    port: int = 9092,
    resume: bool = False,
    watch: Watch = lambda record: None,
    judged: Run | None = None,
) -> dict[str, Any]:
    """Serve a study until its result is there. ``keys`` None: no TLS, no authentication, for trials only.

    ``judged``: a finished run, whose model is to be judged and nothing trained.
    """
    set_up(folder, study, resume, None if keys is None else keys.folder, judged=judged)
    return _served(folder, keys, host, port, watch)


def serve_survey(
    study: Study, folder: Path, keys: Keys | None, host: str = "127.0.0.1", port: int = 9092, resume: bool = False
) -> dict[str, Any]:
    """Survey real sites; returns what survey.json says."""
    set_up(folder, study, resume, None if keys is None else keys.folder, SURVEYED)
    return _served(folder, keys, host, port, lambda record: None)


def serve_tune(
    study: Study,
    folder: Path,
    keys: Keys | None,
    host: str = "127.0.0.1",
    port: int = 9092,
    resume: bool = False,
    watch: Watch = lambda record: None,
) -> dict[str, Any]:
    """Try the settings of a study's ``[tune]`` with real sites; returns what result.json says."""
    check_search(study)
    set_up(folder, study, resume, None if keys is None else keys.folder, TUNED)
    return _served(folder, keys, host, port, watch)


def _served(folder: Path, keys: Keys | None, host: str, port: int, watch: Watch) -> dict[str, Any]:
    """Do the run in ``folder`` with a SuperLink of its own, alone, and give signs of life meanwhile."""
    with _alone(folder, "serve", 5.0), Heart(folder) as heart, Link(folder, host, port, keys) as link:
        return run_on(link, folder, watch, heart.beat)


def run_on(
    link: Link, folder: Path, watch: Watch = lambda record: None, beat: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Have a SuperLink's coordinator do the run in ``folder``; starts it again where it dies. Returns the result.

    ``beat`` is called all the while.
    """
    starts, shown, due = 0, 0, 0.0  # due: when a coordinator that is not there has to be started
    kind = json.loads((folder / "serve.json").read_text()).get("kind")
    ended, failed = folder / DONE.get(kind, "result.json"), folder / "failed.json"
    while not ended.exists():
        beat()
        if failed.exists():
            said = json.loads(failed.read_text())
            error = SordinoError(str(said["reason"]))
            error.exit_code = int(said["code"])
            raise error
        if not link.running:
            log.warning("the SuperLink ended; starting it again")
            link.start()
            due = 0.0
        link.refresh()  # a site may come late, or with a new key
        if is_locked(folder, "coordinator"):
            due = time.monotonic() + AWAY
        elif time.monotonic() > due:
            if starts > RESTARTS:
                raise SordinoError(f"the coordinator died {starts} times: see {folder / 'coordinator.log'}")
            link.submit(folder)
            starts, due = starts + 1, time.monotonic() + START
        new = read_rounds(folder)[shown:]
        for record in new:
            watch(record)
        shown += len(new)
        starts = 0 if new else starts  # a round was finished in between: it is not the same trouble again
        time.sleep(0.2)
    for record in read_rounds(folder)[shown:]:
        watch(record)
    until = time.monotonic() + END
    while is_locked(folder, "coordinator") and time.monotonic() < until:
        time.sleep(0.1)
    result: dict[str, Any] = json.loads(ended.read_text())
    return result


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    """The rounds in a run's log, or in those of a search's candidates, in the order in which these were begun.

    Half a last line, while it is written, does not count.
    """
    logs = [folder / "log.jsonl"]
    if (folder / "offered.json").exists():
        logs = sorted(folder.glob("*/log.jsonl"), key=lambda file: (file.parent / "agreed.json").stat().st_mtime_ns)
    found = []
    for file in logs:
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            for line in file.read_text().splitlines():
                found.append(json.loads(line))
    return found
