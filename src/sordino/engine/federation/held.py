"""A site's held-out records: parted from those that training sees, by its ledger's own key."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from sordino.client.rows import Records
from sordino.engine.federation.limits import BLANK
from sordino.engine.federation.state import commitment
from sordino.errors import BadInput
from sordino.privacy.held import held_out, places
from sordino.privacy.ledger import Commit, Ledger


def held_mask(
    ledger: Ledger, share: float, file: Path, count: int, column: str = "", ids: Sequence[str] = ()
) -> NDArray[np.bool_]:
    """Which of a file's records are held out, one entry a record: by their ids, or by their places in this very file.

    ``column``: what the column of the ``ids`` is called; empty where there are none. The ledger remembers share, key
    and, where records have no ids, the file.
    """
    if column:
        return held_out(ledger.split(share, column), ids, share)
    return held_out(ledger.split(share, "", lambda key: file_hash(file, key)), places(count), share)


def file_hash(file: Path, key: bytes) -> str:
    """HMAC-SHA-256 of a file's bytes."""
    digest = hmac.new(key, digestmod=hashlib.sha256)
    with open(file, "rb") as opened:
        while piece := opened.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


FILED = "file "
"""How a commitment begins that is to a file as it is, and not to records as some schema encodes them."""


def commit_to(ledger: Ledger, file: Path, records: Records, by_file: bool) -> Commit:
    """What this ledger is tied to its site's records by: their file's bytes, or the records as they are encoded.

    A ledger that is tied already says which; a new one is tied ``by_file`` where a survey may come before any schema.
    """
    known = ledger.bindings()
    if known[-1].commitment.startswith(FILED) if known else by_file:
        return lambda salt: FILED + file_hash(file, salt)
    if tuple(records.x.shape[1:]) == BLANK:  # they are all alike, so a commitment to them would hold for any file
        raise BadInput(f"{ledger.path} is tied to records as a schema encodes them: give this site its schema again")
    return lambda salt: commitment(records, salt)


def parted(records: Records, held: NDArray[np.bool_] | None, ledger: Ledger) -> tuple[Records, Records | None]:
    """Training and held-out records; refuses to train on records that the ledger knows as held out."""
    if held is None:
        if ledger.parted() is not None:
            raise BadInput(
                f"{ledger.path} holds out some of these records, and this site would train on all of them: say "
                f"data.held_out = {ledger.parted().share:g} again"  # type: ignore[union-attr]
            )
        return records, None
    train, out = (torch.from_numpy(np.flatnonzero(which)) for which in (~held, held))
    return records.only(train), records.only(out)
