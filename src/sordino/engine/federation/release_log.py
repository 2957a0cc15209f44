"""A dated log of releases beside a site's ledger, for people: ``<ledger>.releases.log``, a line a release, append-only.

The ledger stays the truth. A line is written once its release is charged and stored (R11), so a site that is killed
between the two lacks a line and never has one too many; a log that cannot be written stops nobody.
"""

from __future__ import annotations

import logging
import os
from datetime import UTC, datetime
from pathlib import Path

from sordino.privacy.ledger import Ledger
from sordino.privacy.words import epsilon_in_words

log = logging.getLogger("sordino.site")


def log_of(ledger: Ledger) -> Path:
    """Where the log of a ledger lies."""
    return ledger.path.with_name(f"{ledger.path.name}.releases.log")


def note_release(ledger: Ledger, account: str, run: str, what: str) -> None:
    """Append a line on what was just released: when, for which study, what, how often, ε so far."""
    try:
        line = f"{datetime.now(UTC).isoformat(timespec='seconds')}  {_told(ledger, account, run, what)}\n"
        with open(log_of(ledger), "a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except Exception as error:  # whatever it is, the release was paid for and stored, and is to be sent
        log.warning("the log of releases cannot be written (%s); the ledger has everything", error)


def _told(ledger: Ledger, account: str, run: str, what: str) -> str:
    standing = next((one for one in ledger.standings(account) if one.plan.run == run), None)
    if standing is None:
        times = ledger.unprotected(account, run, what)
        return f"{account}: run {run}: {what}, {times} times so far, NOT PRIVATE: without noise"
    study = f"study {standing.plan.study}" if standing.plan.study else f"run {run}"
    budget = ledger.account(account).budget
    told = f"{account}: {study}: {what}, {standing.used.get(what, 0)} times so far"
    if budget.is_public:
        return f"{told}; the data are public"
    spent = epsilon_in_words(ledger.epsilon([account])[account])
    return f"{told}; in all epsilon {spent} of {budget.epsilon:g} at delta {budget.delta:g}"
