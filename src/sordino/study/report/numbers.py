"""Numbers as a reader sees them, and as the page stores them. Every rounding of the report is here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

MISSING = "–"
"""What a cell shows when there is no value."""

MAX_POINTS = 200
"""A curve is drawn with at most this many points: finer than a screen resolves, and it keeps the file small."""


@dataclass(frozen=True)
class SeedMean:
    """A mean over seeds with its sample standard deviation (None when there is one seed only)."""

    mean: float
    deviation: float | None


def finite(value: Any) -> float | None:
    """The value as a float, or None when it is absent, not a number, or not finite."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    return float(value) if math.isfinite(value) else None


def finites(values: Iterable[Any]) -> list[float]:
    """The finite numbers among the values."""
    return [number for number in map(finite, values) if number is not None]


def spread(values: Iterable[Any]) -> SeedMean | None:
    """Mean and sample standard deviation (n − 1 in the divisor) of the finite values; None when there are none."""
    kept = finites(values)
    if not kept:
        return None
    deviation = statistics.stdev(kept) if len(kept) > 1 else None
    return SeedMean(statistics.fmean(kept), deviation)


def short(value: float | None, digits: int = 5) -> float | int | None:
    """The number rounded to ``digits`` significant digits for storage; integers stay integers."""
    number = finite(value)
    if number is None:
        return None
    if number == int(number) and abs(number) < 10**digits:
        return int(number)
    return float(f"{number:.{digits}g}")


def thin(count: int, limit: int = MAX_POINTS) -> list[int]:
    """Evenly spaced indices into a curve of ``count`` points: at most ``limit``, always the first and the last."""
    if count <= limit:
        return list(range(count))
    return sorted({round(place * (count - 1) / (limit - 1)) for place in range(limit)})


def plain(value: float | None, digits: int = 3) -> str:
    """A number for people: ``digits`` significant digits, ∞ for infinity, a dash for nothing."""
    if value is None or math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    if 1e-4 <= abs(value) < 1e6:
        decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
        text = f"{value:,.{decimals}f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
    else:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        text = f"{mantissa}e{int(exponent)}"
    return text.replace("-", "−")


def upward(value: float | None, digits: int = 4) -> float | None:
    """A finite ε rounded up to ``digits`` significant digits: a figure that never looks smaller than it is."""
    if value is None or not math.isfinite(value) or value <= 0:
        return value
    scale = 10.0 ** (digits - 1 - math.floor(math.log10(value)))
    return math.ceil(value * scale * (1 - 1e-9)) / scale


def as_epsilon(value: float | None) -> str:
    """An ε for people: four digits, rounded up."""
    return plain(upward(value), 4)


def percent(value: float | None) -> str:
    """A share as per cent."""
    return MISSING if value is None else f"{100 * value:.1f} %".replace("-", "−")


def certainty(epsilon: float) -> str:
    """How sure an undecided observer can become under ε: posterior e^ε/(1 + e^ε) from a prior of one half."""
    value = 1.0 / (1.0 + math.exp(-epsilon))
    return "all but certain" if value > 0.9995 else f"at most {percent(value)} sure"


def plus_minus(value: SeedMean | None, unit: str = "") -> str:
    """``mean ± deviation``, with as many decimals as the deviation supports; the mean alone for one seed.

    ``unit`` "%" writes a share as per cent; "points²" writes a variance of shares in squared points.
    """
    if value is None:
        return MISSING
    scale = {"%": 100.0, "points²": 1e4}.get(unit, 1.0)
    form = (lambda number, _: f"{number:.1f}") if unit == "%" else plain
    deviation = "" if value.deviation is None else f" ± {form(scale * value.deviation, 2)}"
    return f"{form(scale * value.mean, 3)}{deviation}{' %' if unit == '%' else ''}"


def duration(seconds: float | None) -> str:
    """Seconds as people say them."""
    if seconds is None:
        return MISSING
    if seconds < 100:
        return f"{plain(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def span(values: Sequence[float], form: Callable[[float], str] = plain) -> str:
    """The range of some numbers: one number when they are alike."""
    low, high = form(min(values)), form(max(values))
    return low if low == high else f"{low} to {high}"


def listed(names: Sequence[str], limit: int = 6) -> str:
    """Names as a phrase: ``a, b and c``; beyond ``limit`` the rest is counted."""
    if len(names) > limit:
        return ", ".join(names[:limit]) + f" and {len(names) - limit} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
