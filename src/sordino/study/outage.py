"""Whether the server of a run is there, since when it is not, and what to do about it."""

from __future__ import annotations

from pathlib import Path

from sordino.study.folder import EVALUATED, SURVEYED, TUNED
from sordino.study.heartbeat import LATE, Life, moment
from sordino.study.serve import is_locked

WRITTEN = ("log.jsonl", "now.json", "coordinator.log", "serve.json")
"""What a server writes as it goes on: the youngest of these was its last sign of life, where it left no other."""

AGAIN = {SURVEYED: "sordino survey … --serve", EVALUATED: "sordino evaluate … --sites", TUNED: "sordino tune … --sites"}
"""The command that works in a folder, by kind; a training run's is ``sordino serve``."""


def state_of(folder: Path) -> str:
    """What goes on in a run's folder that holds no result yet: running, starting, not responding, interrupted.

    A process that is there holds a lock; one that also gave no sign of life for a while does not respond.
    """
    life, working = Life.read(folder), is_locked(folder, "coordinator")
    if not (working or is_locked(folder, "serve")):
        return "running" if life is not None and life.elsewhere else "interrupted"
    if life is not None and life.ended is None and life.age > LATE:
        return "not responding"
    return "running" if working else "starting"


def trouble_of(folder: Path, state: str, kind: str | None) -> dict[str, object] | None:
    """What is wrong with the server, since when (seconds since 1970), and the remedy; None where nothing is."""
    if state not in ("interrupted", "not responding"):
        return None
    life = Life.read(folder)
    again = f"the same `{AGAIN.get(str(kind), 'sordino serve …')}` with --resume goes on where it was"
    cost = "sites send again what they had stored, and nobody pays twice"
    if state == "not responding" and life is not None:
        what = f"the server's process is there and has not done anything since {moment(life.last)}"
        return {
            "what": what,
            "since": life.last,
            "remedy": f"it is suspended, or its disk does not answer: see to that, or end it and {again}",
        }
    if life is not None and life.ended is not None:
        what, since = "the server was ended in order", life.ended
    elif life is not None:
        what, since = "the server died without a word", life.last
    else:
        files = [folder / name for name in WRITTEN if (folder / name).exists()]
        what, since = "no server works here", max(one.stat().st_mtime for one in files)
    return {"what": f"{what}: last seen {moment(since)}", "since": since, "remedy": f"{again}; {cost}"}
