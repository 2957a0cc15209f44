"""Durable copies of releases, so that a lost answer is sent again byte for byte instead of being drawn anew (R11)."""

from __future__ import annotations

import hashlib
import json
from typing import NamedTuple

from sordino.errors import BadInput
from sordino.privacy.book import check_names, standing_of
from sordino.privacy.ledger_file import LedgerFile, check_payload


class Copy(NamedTuple):
    """Which release a copy is of: the draw's key, and the hash of the complete request it answers."""

    client: str
    run: str
    key: str
    request: str


def keep(file: LedgerFile, copy: Copy, payload: bytes) -> None:
    """Store a release that was charged, durably, before it is sent.

    Guarantees: one charge yields at most one stored release under a key: the same bytes again change nothing, other
    bytes need a charge of this request that is newer than the stored copy.
    """
    check_names(**copy._asdict())
    digest = hashlib.sha256(payload).hexdigest()
    with file.transaction() as draft:
        standing_of(file.book, copy.client, copy.run)
        charged = file.db.execute(
            "SELECT MAX(number) FROM entries WHERE kind = 'charge' AND client = ? AND run = ? AND request = ?",
            (copy.client, copy.run, copy.request),
        ).fetchone()[0]
        if charged is None:
            raise BadInput(
                f"nothing was charged to client {copy.client!r} for this request of run {copy.run!r}: charge first"
            )
        last = _last(file, copy)
        if last is not None:
            number, body, kept_payload = last
            if kept_payload is not None and json.loads(body)["sha256"] == digest:
                return
            if charged < number:
                raise BadInput(
                    f"another release of {copy.key!r} is stored for this request of client {copy.client!r}: "
                    "send that one again, or charge a new draw"
                )
        entry = draft.add("stored", {"sha256": digest, "size": len(payload)}, **copy._asdict())
        draft.releases.append((entry.number, bytes(payload)))


def kept(file: LedgerFile, copy: Copy) -> bytes | None:
    """The stored release for exactly this request, or None."""
    with file.reading():
        last = _last(file, copy)
    if last is None:
        return None
    number, body, payload = last
    if payload is not None:
        check_payload(file.path, number, body, payload)
    return payload


def drop(file: LedgerFile, client: str, run: str, keep_newest: int) -> int:
    """Delete the copies of a run but the newest ones; returns how many went. Their entries stay."""
    with file.transaction() as draft:
        standing_of(file.book, client, run)
        numbers = file.db.execute(
            "SELECT number FROM entries JOIN releases USING (number) WHERE kind = 'stored' AND client = ? "
            "AND run = ? ORDER BY number DESC LIMIT -1 OFFSET ?",
            (client, run, max(0, keep_newest)),
        ).fetchall()
        if numbers:
            file.db.executemany("DELETE FROM releases WHERE number = ?", numbers)
            draft.add("forgotten", {"releases": len(numbers)}, client=client, run=run)
    return len(numbers)


def _last(file: LedgerFile, copy: Copy) -> tuple[int, str, bytes | None] | None:
    row: tuple[int, str, bytes | None] | None = file.db.execute(
        "SELECT number, body, payload FROM entries LEFT JOIN releases USING (number) WHERE kind = 'stored' "
        "AND client = ? AND run = ? AND key = ? AND request = ? ORDER BY number DESC LIMIT 1",
        copy,
    ).fetchone()
    return row
