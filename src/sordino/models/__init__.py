"""The models room: networks by name, and what makes any network fit for record-level privacy. Opens no other room."""

from sordino.models.fixed import apply_fixed, split_fixed
from sordino.models.isolation import (
    check,
    isolated,
    private_ready,
    refuse_batch_statistics,
    refuse_tied_weights,
    why_not_isolated,
)
from sordino.models.zoo import build, check_spec, names

__all__ = [
    "apply_fixed",
    "build",
    "check",
    "check_spec",
    "isolated",
    "names",
    "private_ready",
    "refuse_batch_statistics",
    "refuse_tied_weights",
    "split_fixed",
    "why_not_isolated",
]
