"""The privacy room: types, accountants, the ledger, the gate, generators, the audit. Opens no other room."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sordino.privacy.types import Adjacency, Budget, Event, Release, Sampling, Scheme

if TYPE_CHECKING:
    from sordino.privacy.accounting import calibrate, epsilon
    from sordino.privacy.auditing import audit
    from sordino.privacy.ledger import Ledger

__all__ = ["Adjacency", "Budget", "Event", "Ledger", "Release", "Sampling", "Scheme", "audit", "calibrate", "epsilon"]

_LATER = {"audit": "auditing", "calibrate": "accounting", "epsilon": "accounting", "Ledger": "ledger"}


def __getattr__(name: str) -> Any:
    """Accountants bring SciPy along: they are loaded when first used."""
    if name not in _LATER:
        raise AttributeError(f"module 'sordino.privacy' has no attribute {name!r}")
    return getattr(importlib.import_module(f"sordino.privacy.{_LATER[name]}"), name)
