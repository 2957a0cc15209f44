"""Whom the figures of a result hold against, for every place that shows an ε."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sordino.privacy.trust import EVERYBODY


def against(result: Mapping[str, Any]) -> list[str]:
    """Whom clients' ε hold against, each once; nothing where nobody is promised anything, or an old result says not."""
    if not result.get("private"):
        return []
    bounded = [one for one in result.get("privacy", ()) if math.isfinite(one.get("epsilon") or math.inf)]
    return list(dict.fromkeys(one["trust"] for one in bounded if one.get("trust")))


def named(result: Mapping[str, Any]) -> str:
    """The method of a result, and that noise was shared where it was: figures of both kinds are never averaged."""
    shared = any(words != EVERYBODY for words in against(result))
    return f"{result['method']}, noise shared" if shared else str(result["method"])


def own_epsilon(result: Mapping[str, Any]) -> float | None:
    """The largest ε that a client's own share of the noise promises, if all others conspire with the server."""
    found = [one.get("own_epsilon") for one in result.get("privacy", ()) if one.get("trust") not in (None, EVERYBODY)]
    return max((math.inf if one is None else float(one) for one in found), default=None)


def trust_lines(results: Sequence[Mapping[str, Any]], labels: Sequence[str] | None = None) -> list[str]:
    """A line for each promise that holds against some only, with the names of the runs that it is made by."""
    found: dict[str, list[str]] = {}
    for result, label in zip(results, labels or [one["method"] for one in results], strict=True):
        for words in against(result):
            found.setdefault(words, []).append(label)
    return [
        f"{', '.join(dict.fromkeys(names))}: noise is shared, ε holds {words}"
        for words, names in found.items()
        if words != EVERYBODY
    ]
