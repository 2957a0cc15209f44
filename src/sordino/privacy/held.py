"""Held-out records: which they are, by a keyed hash, and what their account is called.

A record that is held out touches no gradient, so what is asked of it costs its own account and training costs it
nothing. Each record is in one of the two parts for ever: its ε is the larger of the two accounts', never the sum
(parallel composition). The part follows from a secret key and the record's id, or its place in a file that never
changes; it does not depend on what the record says, and both sizes are public.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from sordino.errors import BadInput

HELD = " (held out)"
"""What the account of a client's held-out records is called, after the client's own."""

OF_HELD = " of held-out records"
"""What is added to the name of a release from them, where releases of both parts are listed."""


def check_share(share: float, where: str) -> float:
    """The share of the records that are held out, strictly between 0 and 1."""
    if isinstance(share, bool) or not (isinstance(share, (int, float)) and 0.0 < share < 1.0):
        raise BadInput(f"{where} = {share!r}: a share of the records lies strictly between 0 and 1, such as 0.2")
    return float(share)


def held_out(key: bytes, ids: Iterable[str], share: float) -> NDArray[np.bool_]:
    """For every id whether it is held out: BLAKE2b(key, id)/2⁶⁴ < share.

    Guarantees: equal ids are in one part, whatever else there is and in whichever order; nobody without the key can
    tell which.
    """
    limit = int(share * 2.0**64)
    found = [
        int.from_bytes(hashlib.blake2b(one.encode(), key=key[:64], digest_size=8).digest(), "big") < limit
        for one in ids
    ]
    return np.array(found, dtype=bool)


def places(count: int) -> Iterable[str]:
    """Ids of records that have none of their own: their places in a file that never changes."""
    return (f"place {k}" for k in range(count))
