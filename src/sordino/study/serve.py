"""``sordino serve``: a SuperLink, the coordinator in it, and somebody who watches both."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sordino.engine.federation.certificates import Keys
from sordino.engine.federation.link import Link
from sordino.errors import SordinoError
from sordino.study.conduct import conduct, set_up
from sordino.study.file import Study

log = logging.getLogger("sordino.serve")

START = 120.0
"""Seconds a coordinator has to take up its run."""

RESTARTS = 5
"""How often a coordinator that died within one round is started again before somebody should look."""


END = 10.0
"""Seconds a coordinator has to end after it wrote its result."""


class Failed(SordinoError):
    """The coordinator gave up, and said why."""


def coordinate(grid: Any, context: Any) -> None:
    """Flower's ServerApp: take up the run in the folder that the shell was given."""
    from sordino.engine.federation.grid import GridTransport
    from sordino.engine.federation.keyring import Keyring

    folder = Path(str(context.run_config["run"]))
    to_file = logging.FileHandler(folder / "coordinator.log")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger("sordino").addHandler(to_file)
    logging.getLogger("sordino").setLevel(logging.INFO)
    with _alone(folder / "coordinator.lock", 20.0):
        try:
            about = json.loads((folder / "serve.json").read_text())
            keys = None if about["keys"] is None else Keys(Path(about["keys"]))
            conduct(folder, GridTransport(grid, None if keys is None else Keyring(keys, folder / "keys.json")))
        except Exception:
            logging.getLogger("sordino.coordinator").exception("the coordinator stops")
            raise


@contextlib.contextmanager
def _alone(path: Path, seconds: float) -> Iterator[None]:
    """One process at a time; the lock also tells others that it is alive, for it goes with the process."""
    until = time.monotonic() + seconds
    with open(path, "w") as lock:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() >= until:
                raise SordinoError(f"another process works on {path.parent}: let it, or end it first")
            time.sleep(0.2)
        yield


def is_coordinated(folder: Path) -> bool:
    """Whether a coordinator works on this folder right now."""
    return _held(folder / "coordinator.lock")


def is_served(folder: Path) -> bool:
    """Whether somebody serves this folder right now."""
    return _held(folder / "serve.lock")


def _held(path: Path) -> bool:
    try:
        with open(path) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    except FileNotFoundError:
        pass
    return False


def serve(
    study: Study,
    folder: Path,
    keys: Keys | None,
    host: str = "127.0.0.1",
    port: int = 9092,
    resume: bool = False,
    watch: Callable[[dict[str, Any]], None] = lambda record: None,
) -> dict[str, Any]:
    """Serve a study until its result is there. ``keys`` None: no TLS, no authentication, for trials only."""
    set_up(folder, study, resume, None if keys is None else keys.folder)
    with _alone(folder / "serve.lock", 5.0), Link(folder, host, port, keys) as link:
        return run_on(link, folder, watch)


def run_on(link: Link, folder: Path, watch: Callable[[dict[str, Any]], None] = lambda record: None) -> dict[str, Any]:
    """Have a SuperLink's coordinator do the run in ``folder``; starts it again where it dies. Returns the result."""
    starts, shown, began = 0, 0, 0.0
    done, failed, log_file = folder / "result.json", folder / "failed.json", folder / "log.jsonl"
    while not done.exists():
        if failed.exists():
            said = json.loads(failed.read_text())
            error = Failed(str(said["reason"]))
            error.exit_code = int(said["code"])
            raise error
        if not link.running:
            log.warning("the SuperLink ended; starting it again")
            link.start()
            began = 0.0
        link.refresh()  # a site may come late, or with a new key
        if not is_coordinated(folder) and time.monotonic() - began > (START if began else 0.0):
            if starts > RESTARTS:
                raise SordinoError(f"the coordinator died {starts} times: see {folder / 'coordinator.log'}")
            link.submit(folder)
            starts, began = starts + 1, time.monotonic()
        elif is_coordinated(folder):
            began = time.monotonic() - START + 10.0  # once it was there, ten seconds of absence are a death
        before, shown = shown, _show(log_file, shown, watch)
        starts = 0 if shown > before else starts  # a round was finished in between: it is not the same trouble again
        time.sleep(0.2)
    _show(log_file, shown, watch)
    until = time.monotonic() + END
    while is_coordinated(folder) and time.monotonic() < until:
        time.sleep(0.1)
    result: dict[str, Any] = json.loads(done.read_text())
    return result


def _show(log_file: Path, shown: int, watch: Callable[[dict[str, Any]], None]) -> int:
    """Tell ``watch`` about rounds that are new in the log."""
    lines = log_file.read_text().splitlines() if log_file.exists() else []
    for line in lines[shown:]:
        with contextlib.suppress(json.JSONDecodeError):
            watch(json.loads(line))
    return max(shown, len(lines))
