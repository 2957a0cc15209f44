"""Small things that the ledger's tests share."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path

from sordino.privacy.ledger import Charge, Ledger, Plan
from sordino.privacy.types import Budget, Event, Sampling

REQUEST = "ab" * 32
OTHER_REQUEST = "cd" * 32
GRADIENT = Event("gradient", Sampling.poisson(0.05), 2.0, 10)
LOSS = Event("loss", Sampling.full(), 20.0, 1)


def charge(
    key: str,
    client: str = "hospital 3",
    run: str = "a",
    what: str = "gradient",
    count: int = 10,
    request: str = REQUEST,
) -> Charge:
    return Charge(client, run, key, what, count, request)


def plan(turns: int, client: str = "hospital 3", run: str = "a", turn: tuple[Event, ...] = (GRADIENT,)) -> Plan:
    return Plan(client, run, turn, turns)


def small_ledger(path: Path, turns: int = 5, epsilon: float = 2.0, simulated: bool = False) -> Ledger:
    """A ledger of one client with a declared plan of ``turns`` turns that it can pay."""
    ledger = Ledger(path)
    ledger.open_account("hospital 3", Budget(epsilon, 1e-5), simulated=simulated)
    assert ledger.declare([plan(turns)]) == {"hospital 3": turns}
    return ledger


def forked(work: Callable[[], None]) -> int:
    """Run ``work`` in a forked process; returns its id. The child ends without pytest's clean-up."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def ended_well(child: int) -> bool:
    """Wait for a forked process; whether it ended without an error."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def all_end_well(*works: Callable[[], None]) -> bool:
    """Run all at once, each in a process of its own; whether all ended without an error."""
    results = [ended_well(child) for child in [forked(work) for work in works]]
    return all(results)
