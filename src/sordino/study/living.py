"""Data that live, at a site's file: which version of it was read, who withdrew, and the roll that its ledger calls."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from sordino.engine.federation.attending import Roll
from sordino.errors import BadInput
from sordino.privacy.ledger import Ledger
from sordino.privacy.living import canonical

log = logging.getLogger("sordino.site")


def version_of(file: Path) -> tuple[int, ...]:
    """What tells a file from what it was a moment ago; nothing where there is none."""
    if not file.is_file():
        return ()
    found = file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def read_withdrawn(file: Path) -> list[str]:
    """The ids, one a line, of those whose records are there and may not be used any more."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"data.withdrawn: {file} cannot be read, and who withdrew must be known: {error}") from None
    return [canonical(f"id {line}") for line in lines if line.strip()]


def called(ledger: Ledger, column: str, spelt: Sequence[str], withdrawn: Path | None) -> Roll:
    """In which cohort everybody is: the ledger notes who is new, who is gone and who is back.

    ``spelt``: the ids of all units as the file has them, in the column of that name.
    """
    ids, out = [canonical(one) for one in spelt], [] if withdrawn is None else read_withdrawn(withdrawn)
    if ledger.life() is None and ledger.parted() is not None and ids != list(spelt):
        raise BadInput(
            f"{ledger.path} has parted these records by their ids as they are spelt, and living data are known by them "
            f"in small letters with single spaces: some in column {column!r} would go from training to held-out or "
            "back; leave data.living away"
        )
    known, there = ledger.call_roll(column, ids, out), set(ids)
    strange = sum(one not in there for one in out)
    if strange:
        told = "%d of %d ids in %s are in no record: removed since, or misspelt"
        log.warning(told, strange, len(out), withdrawn)
    here = sum(not one.away for one in known)
    life = ledger.life()
    log.info("%d of %d take part from now on, in %d cohorts", here, len(known), 0 if life is None else life.cohorts)
    return Roll.of(known)
