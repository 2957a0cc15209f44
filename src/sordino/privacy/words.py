"""Figures of privacy in words."""

from __future__ import annotations

import math


def epsilon_in_words(value: float | None) -> str:
    """A figure that never looks smaller than it is: rounded up to four digits; None is infinite."""
    if value is None:
        return "infinite"
    if value == 0.0:
        return "0"
    scale = 10.0 ** (3 - math.floor(math.log10(value)))
    return f"{math.ceil(value * scale - 1e-9) / scale:.6g}"
