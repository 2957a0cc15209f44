"""The hash chain of a ledger's entries, and the anchor beside the file that says how long the chain must be.

Every entry carries h_k = SHA-256(h_{k-1} ‖ entry_k) with h_0 = 64 zeros, so that no entry can be changed, dropped or
moved without breaking all later hashes. A chain alone cannot tell that its *end* is missing: the anchor, a small file
next to the ledger, holds the number of entries and the last hash.
"""

from __future__ import annotations

import hashlib
import json
import os
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import NamedTuple

from sordino.errors import LedgerDamaged

START = "0" * 64
RESTORE = "restore the ledger and its .anchor file together from a backup; sordino will not start it anew"


class Entry(NamedTuple):
    """One line of the ledger. Fields that a kind of entry does not need are None and are left out of the hash."""

    number: int
    time: str
    kind: str
    client: str | None = None
    run: str | None = None
    what: str | None = None
    key: str | None = None
    attempt: int | None = None
    amount: int | None = None
    used: int | None = None
    request: str | None = None
    body: str | None = None


class Anchor(NamedTuple):
    """What the file beside the ledger says: whose it is, how many entries, the last hash.

    ``seal`` is the SHA-256 of the whole ledger file: it covers bytes that no entry uses. It follows every commit at a
    site and every end of a process but a kill; it is absent while a transaction is written, and after a kill in it.
    """

    ledger: str
    entries: int
    head: str
    seal: str | None = None


def canonical(entry: Entry) -> str:
    """The one way an entry is written for hashing: a JSON object in ASCII, fields in order, empty fields left out.

    Empty fields are left out so that a later version can add a column without changing the hash of old entries.
    Spelt out because it runs for every entry that is ever read, at half the time of ``json.dumps``.
    """
    fields = [
        f'"{name}":{encode_basestring_ascii(value) if isinstance(value, str) else value}'
        for name, value in zip(Entry._fields, entry)
        if value is not None
    ]
    return "{" + ",".join(fields) + "}"


def link(previous: str, entry: Entry) -> str:
    """h_k = SHA-256(h_{k-1} ‖ canonical(entry_k)), as hex."""
    return hashlib.sha256((previous + canonical(entry)).encode("ascii")).hexdigest()


def anchor_path(ledger: Path) -> Path:
    """Where the anchor of a ledger lies."""
    return ledger.with_name(ledger.name + ".anchor")


def _checksum(fields: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _text(fields: dict[str, object], check: object) -> bytes:
    """The one way an anchor is written: a byte that means nothing cannot be changed either."""
    return (json.dumps({**fields, "check": check}) + "\n").encode("ascii")


def write_anchor(ledger: Path, anchor: Anchor, durable: bool = True) -> None:
    """Replace the anchor atomically. Call it with the ledger locked and *after* its commit.

    Guarantees: a reader sees the old anchor or the new one, whole; so the anchor may lag behind the ledger after a
    crash, and never leads it. (Its folder is not synced: the next commit's sync on the same disk takes care of that.)
    """
    fields: dict[str, object] = anchor._asdict()
    path = anchor_path(ledger)
    draft = path.with_name(path.name + ".tmp")
    with open(draft, "w", encoding="ascii") as file:
        file.write(_text(fields, _checksum(fields)).decode())
        file.flush()
        if durable:
            os.fsync(file.fileno())
    os.replace(draft, path)


def read_anchor(ledger: Path) -> Anchor | None:
    """The anchor of a ledger, None where there is no such file; an unreadable one raises ``LedgerDamaged``."""
    path = anchor_path(ledger)
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        fields = json.loads(text)
        check = fields.pop("check")
        anchor = Anchor(**fields)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise LedgerDamaged(f"{path} is not readable as a ledger's anchor: {RESTORE}") from error
    if check != _checksum(fields) or text != _text(fields, check):
        raise LedgerDamaged(f"{path} was changed outside sordino: {RESTORE}")
    return anchor
