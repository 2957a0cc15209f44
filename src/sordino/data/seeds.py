"""Random generators for data sets, partitions and budgets: one stream per seed and purpose."""

from __future__ import annotations

import zlib

import numpy as np

from sordino.errors import BadInput


def generator(seed: int, purpose: str) -> np.random.Generator:
    """The stream of ``(seed, purpose)``: Philox keyed by SeedSequence([seed, crc32(purpose)]).

    Two purposes never share draws, so that e.g. another budget seed leaves the partition as it was.
    These draws are public randomness (who got which record in a simulation); nothing here protects a record.
    """
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise BadInput(f"seed is {seed!r}: it must be a whole number ≥ 0")
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([int(seed), zlib.crc32(purpose.encode())])))
